"""Dense Gemm: Y = X Wᵀ with X and W of one dtype: what `Gemm` does when b_dtype is a_dtype.

    float16, bfloat16   y = round(Σk x[i,k] w[j,k])                                in X's dtype
    int8                y = Σk x[i,k] w[j,k]                                       int32, exact
                        y = round((Σk x[i,k] w[j,k]) · x_scale[i] · w_scale[j])    float16 or bfloat16
    float8              the same, sums in float32
    int4                y = Σk x[i,k] w[j,k]                                       int32, exact; two values a byte

uint4 is int4 with an unsigned x. Bias, residual, relu and requantised results: gemm_epilogue.py.

Read first: `DENSE_DTYPES`, `dense_reference`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from kronsched.dtypes import DTYPES
from kronsched.errors import ArgumentError, UnsupportedError, choose
from kronsched.workloads.base import TensorSpec
from kronsched.workloads.conv2d import FOUR_BIT
from kronsched.workloads.float8 import FLOAT8, widened
from kronsched.workloads.gemm_epilogue import as_conv2d, epilogue_inputs, finished, has_epilogue, integer_inputs
from kronsched.workloads.int4 import unpack_int4

if TYPE_CHECKING:
    import torch
    import tvm

    from kronsched.workloads.gemm import Gemm

DENSE_DTYPES: dict[str, tuple[str, ...]] = {
    "float16": ("float16",),
    "bfloat16": ("bfloat16",),
    "int8": ("float16", "bfloat16", "int32", "int8"),
    "int4": ("int32", "int4"),
    "uint4": ("int32", "uint4", "int4"),
    "float8_e4m3fn": ("bfloat16", "float16"),
    "float8_e5m2": ("bfloat16", "float16"),
}
"""Output dtypes of a dense Gemm by the dtype of X and W; the first is the default."""
MAX_INT8_K = 2**17 - 1
"""Beyond this, a sum of products of int8 may leave int32."""
MAX_K = {"int8": MAX_INT8_K, "int4": 2**25 - 1, "uint4": (2**31 - 1) // 120}
"""The same by the dtype of X."""


def check_dense(w: Gemm) -> str:
    """The output dtype of a dense Gemm; ArgumentError or UnsupportedError naming the field that is wrong."""
    if w.a_dtype == "uint4" and w.b_dtype != "int4":
        raise choose("b_dtype", w.b_dtype, ("int4",))
    if not w.is_dense:
        raise choose("b_dtype", w.b_dtype, (w.a_dtype, *(("int4", "uint4") if w.a_dtype in ("float16", "bfloat16") else ())))
    for name, default in (("group_size", 128), ("zero_point", "symmetric"), ("act_order", False)):
        if getattr(w, name) != default:
            raise ArgumentError(f"{name}={getattr(w, name)!r} is not allowed: it is for b_dtype='int4' only")
    allowed = DENSE_DTYPES[w.a_dtype]
    if w.out_dtype not in ("", *allowed):
        raise choose("out_dtype", w.out_dtype, allowed)
    most = MAX_K.get(w.a_dtype, w.k)
    if w.k > most:
        raise UnsupportedError(f"k={w.k} is not supported: {w.a_dtype} products of more than {most} terms may overflow int32")
    if w.a_dtype in FOUR_BIT and w.k % 2:
        raise ArgumentError(f"k={w.k} is not allowed with {w.a_dtype}: an even number is needed")
    return w.out_dtype or allowed[0]


def has_scales(w: Gemm) -> bool:
    """Whether a dense Gemm takes x_scale and w_scale: 8-bit inputs and a floating output."""
    return DTYPES[w.a_dtype].bits == 8 and w.out_dtype in ("float16", "bfloat16")


def dense_inputs(w: Gemm) -> tuple[TensorSpec, ...]:
    """The tensors x (m, k), w (n, k), with scales x_scale (m,) and w_scale (n,) in float32, then those of the epilogue."""
    if w.a_dtype in FOUR_BIT:
        specs = [TensorSpec("x", (w.m, w.k // 2), "int8"), TensorSpec("w", (w.n, w.k // 2), "int8")]
    else:
        specs = [TensorSpec("x", (w.m, w.k), w.a_dtype), TensorSpec("w", (w.n, w.k), w.b_dtype)]
    if has_scales(w):
        specs += [TensorSpec("x_scale", (w.m,), "float32"), TensorSpec("w_scale", (w.n,), "float32")]
    return (*specs, *epilogue_inputs(w))


def dense_output(w: Gemm) -> TensorSpec:
    """The tensor y (m, n); of 4 bits, two columns are a byte."""
    return TensorSpec("y", (w.m, w.n // 2), "int8") if w.out_dtype in FOUR_BIT else TensorSpec("y", (w.m, w.n), w.out_dtype)


def dense_make_inputs(w: Gemm, seed: int, device: str) -> list[torch.Tensor]:
    """Normal or (int8) uniform x and w; scales, or a w, that make y of order 1."""
    import torch

    if has_epilogue(w) and DTYPES[w.a_dtype].accumulate == "int32" and not has_scales(w):
        return integer_inputs(w, seed, device)
    gen = torch.Generator(device=device).manual_seed(seed)
    if w.a_dtype in FOUR_BIT:
        sizes = (t.shape for t in dense_inputs(w))
        return [torch.randint(-128, 128, s, generator=gen, device=device, dtype=torch.int8) for s in sizes]
    dtype = DTYPES[w.a_dtype].torch()
    shapes = ((w.m, w.k), (w.n, w.k))
    if w.a_dtype == "int8":
        tensors = [torch.randint(-128, 128, s, generator=gen, device=device, dtype=torch.int8) for s in shapes]
        product = 128 * 128 / 3 * w.k**0.5  # standard deviation of a sum
    else:
        tensors = [torch.randn(s, generator=gen, device=device).to(dtype) for s in shapes]
        product = w.k**0.5
    if has_scales(w):
        for extent in (w.m, w.n):
            tensors.append((0.5 + torch.rand(extent, generator=gen, device=device)) / product**0.5)
    for spec in epilogue_inputs(w):
        tensors.append(torch.randn(spec.shape, generator=gen, device=device).to(DTYPES[spec.dtype].torch()))
    return tensors


def dense_reference(w: Gemm, *inputs: torch.Tensor) -> torch.Tensor:
    """Y (m, n) in float64: exact for int8 (|sums| < 2⁵³), rounded nowhere else."""
    x, weight = _values(w, inputs[0], inputs[1])
    y = x.double() @ weight.double().T
    if has_scales(w):
        y *= inputs[2].double()[:, None]
        y *= inputs[3].double()[None, :]
    return finished(w, y, inputs) if has_epilogue(w) else y


def _values(w: Gemm, x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Both matrices with one value an element."""
    return (unpack_int4(x, w.a_dtype == "int4"), unpack_int4(weight)) if w.a_dtype in FOUR_BIT else (x, weight)


def dense_baseline(w: Gemm, *inputs: torch.Tensor) -> tuple[str, Callable[[], Any]]:
    """(name, callable) of what a user would run without kronsched: F.linear, `torch._int_mm` or `torch._scaled_mm`.

    Without the epilogue. The 8-bit operators exist on CUDA for shapes they like; elsewhere the inputs are converted beforehand.
    """
    import torch

    x, weight = _values(w, inputs[0], inputs[1])
    if DTYPES[w.a_dtype].bits == 16:
        return f"torch linear {w.a_dtype}", lambda: torch.nn.functional.linear(x, weight)
    if x.is_cuda and w.a_dtype in MAX_K and w.m > 16 and w.k % 8 == 0 and w.n % 8 == 0:
        if not has_scales(w):
            return "torch _int_mm", lambda: torch._int_mm(x, weight.T)
        xs, ws, dtype = inputs[2][:, None], inputs[3][None, :], DTYPES[w.out_dtype].torch()
        return "torch _int_mm and scales", lambda: (torch._int_mm(x, weight.T) * xs * ws).to(dtype)
    if x.is_cuda and w.a_dtype == "float8_e4m3fn" and w.out_dtype == "bfloat16" and w.k % 16 == 0 and w.n % 16 == 0:
        xs, ws = inputs[2][:, None].contiguous(), inputs[3][None, :].contiguous()
        return "torch _scaled_mm", lambda: torch._scaled_mm(x, weight.T, xs, ws, out_dtype=torch.bfloat16)
    wide = [x.float(), weight.float().T.contiguous()]
    return "torch matmul float32", lambda: wide[0] @ wide[1]


def widen(w: Gemm, tensor: Any, i: Any, k: Any) -> Any:
    """Element (i, k) of x or w in the dtype of sums, as a TVM expression."""
    from tvm import tirx

    if w.a_dtype == "uint4" and tensor.op.name == "x":
        return (tensor[i, k // 2].astype("int32") >> (k % 2 * 4)) & 15
    if w.a_dtype in FOUR_BIT:
        return (((tensor[i, k // 2].astype("int32") >> (k % 2 * 4)) & 15) ^ 8) - 8
    value = tensor[i, k]
    if w.a_dtype in FLOAT8:
        value = widened(tirx.reinterpret("uint8", value), w.a_dtype)
    return value.astype(DTYPES[w.a_dtype].accumulate)


def rounded(w: Gemm, value: Any, tensors: Mapping[str, Any], i: Any, j: Any) -> Any:
    """Element (i, j) of Y from its sum, as a TVM expression."""
    if has_scales(w):
        value = value.astype("float32") * tensors["x_scale"][i] * tensors["w_scale"][j]
    if not has_epilogue(w):
        return value.astype(w.out_dtype)
    from kronsched.workloads.conv2d_te import epilogue

    return epilogue(as_conv2d(w), value, tensors, (i, j))


def results(w: Gemm, acc: Any, tensors: Mapping[str, Any]) -> Any:
    """The te stage y from the sums."""
    from tvm import te

    def pair(i: Any, j: Any) -> Any:
        low, high = (rounded(w, acc[i, 2 * j + odd], tensors, i, 2 * j + odd).astype("int32") & 15 for odd in (0, 1))
        return (low | high << 4).astype("int8")

    def one(i: Any, j: Any) -> Any:
        return rounded(w, acc[i, j], tensors, i, j)

    return te.compute(dense_output(w).shape, pair if w.out_dtype in FOUR_BIT else one, name="y")


def dense_program(w: Gemm) -> tvm.IRModule:
    """TensorIR: product in float32 or int32, scaled, rounded."""
    import tvm
    from tvm import te

    placeholders = {t.name: te.placeholder(t.shape, name=t.name, dtype=t.dtype) for t in dense_inputs(w)}
    x, weight = placeholders["x"], placeholders["w"]
    k = te.reduce_axis((0, w.k), name="kk")
    acc = te.compute((w.m, w.n), lambda i, j: te.sum(widen(w, x, i, k) * widen(w, weight, j, k), axis=k), name="acc")
    y = results(w, acc, placeholders)
    func = te.create_prim_func([*placeholders.values(), y]).with_attr("global_symbol", "main")
    return tvm.IRModule({"main": func})
