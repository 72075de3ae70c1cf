"""Gemm: Y = X W with 4-bit weights, dequantised on the way, or dense Y = X Wᵀ with X and W of one dtype (gemm_dense.py).

4-bit: W[k, n] = (q[k, n] - zero[group, n]) · scale[group, n]; the weights come in one packed layout (kronsched/quant/layout.py),
made by `kronsched.quant.pack`. Source of the problem and of the split-K decomposition: SplitK W4A16, arXiv 2402.00025.

Read first: `Gemm`, `w4_stages` (the TensorIR).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

from kronsched.dtypes import DTYPES, dtype_of
from kronsched.errors import ArgumentError, ArgumentTypeError, UnsupportedError, choose
from kronsched.quant.layout import NEUTRAL, TILE_K, TILE_N, Layout, row_groups, unpack_columns, unpack_words
from kronsched.quant.packed_weight import MAX_ZERO, PackedWeight, check_group_size, check_zero_point
from kronsched.workloads import gemm_dense as dense
from kronsched.workloads.base import TensorSpec, Workload
from kronsched.workloads.gemm_epilogue import PARTS, check_parts, flattened, has_epilogue, requantised
from kronsched.workloads.gemm_packed import packed_args

if TYPE_CHECKING:
    import torch
    import tvm

A_DTYPES = tuple(dense.DENSE_DTYPES)
W4_A_DTYPES = ("float16", "bfloat16")
W4_DTYPES = ("int4", "uint4")
_W4_FIELDS = ("group_size", "zero_point", "act_order")
MAX_ELEMENTS = 2**31 - 1
_REFERENCE_ELEMENTS = 1 << 25


@dataclass(frozen=True)
class Gemm(Workload):
    """Y = X W: X (m, k); W 4-bit with a scale a group of rows, or dense (n, k) in X's dtype; sums in float32 or int32.

    m, n, k: ≥ 1, any.  a_dtype: float16 or bfloat16; dense also int8, int4, uint4, float8_e4m3fn, float8_e5m2.  b_dtype:
    a_dtype (dense; int4 for uint4), or int4; uint4 is another name for it, as values are stored as 0 to 15 and the zero point
    says what they mean.  out_dtype: of Y: a_dtype; for 8-bit inputs float16 or bfloat16, for int8 also int32 or int8; for int4
    and uint4 int32 or 4 bits. Dense tensors of 4 bits are int8 of half as many columns, two values a byte
    (`kronsched.workloads.int4`).

    4-bit only: group_size: rows of k that share a scale, a multiple of 32, or -1 for all.  zero_point: "symmetric" (8),
    "asymmetric" (integers 0 to 16) or "float".  act_order: rows of W are sorted by group, x is gathered by the kernel (without
    it, before the call).

    Dense only (gemm_epilogue.py says what is computed): has_bias: an input bias (n,), int32 where no float comes before it, else
    float32.  has_residual: an input residual of Y's shape and dtype, for int8 multiplied by residual_scale (1,).  relu: negative
    results become 0.  Results of int8 and 4 bits are requantised by an input scale (n,): halves to even, saturated. A bias that
    takes an int32 sum out of its range wraps around; results of a scale that is NaN or infinite are not defined.

    A call is `mod(x, pw)` with pw from `kronsched.quant.pack`; dense `mod(x, w)` with w as in nn.Linear; 8-bit inputs with a
    floating output `mod(x, w, x_scale, w_scale)`: float32 scales of the rows of x (m,) and of w (n,); an epilogue's inputs follow
    by name, `mod(x, w, scale=…, bias=…, residual=…)`.
    Raises ArgumentError (a ValueError) or ArgumentTypeError (a TypeError) naming the field.
    """

    family: ClassVar[str] = "gemm"

    m: int = field(metadata={"help": "rows of X (tokens)"})
    n: int = field(metadata={"help": "columns of W: outputs"})
    k: int = field(metadata={"help": "columns of X: inputs"})
    a_dtype: str = field(default="float16", metadata={"help": "dtype of X: " + ", ".join(A_DTYPES)})
    b_dtype: str = field(default="int4", metadata={"help": "dtype of W: int4 (or uint4, the same), or that of X"})
    group_size: int = field(
        default=128, metadata={"help": "4-bit: rows of W that share a scale, a multiple of 32, or -1 for all"}
    )
    zero_point: str = field(default="symmetric", metadata={"help": "4-bit: symmetric, asymmetric (integers) or float"})
    act_order: bool = field(default=False, metadata={"help": "4-bit: rows of W are sorted by group (g_idx)"})
    out_dtype: str = field(default="", metadata={"help": "dtype of Y: that of X; 8-bit X: float16 or bfloat16 by default"})
    has_bias: bool = field(default=False, metadata={"help": "dense: bias a column of Y"})
    has_residual: bool = field(default=False, metadata={"help": "dense: add a tensor of Y's shape"})
    relu: bool = field(default=False, metadata={"help": "dense: set negative results to 0"})

    def __post_init__(self) -> None:
        """Validate and normalise."""
        for name in ("m", "n", "k"):
            object.__setattr__(self, name, _positive(name, getattr(self, name)))
        dtype_of(self.a_dtype, "a_dtype", A_DTYPES)
        if not isinstance(self.out_dtype, str):
            raise ArgumentTypeError(f"out_dtype={self.out_dtype!r} must be a dtype name")
        if self.a_dtype not in W4_A_DTYPES or (self.b_dtype in A_DTYPES and self.b_dtype not in W4_DTYPES):
            object.__setattr__(self, "out_dtype", dense.check_dense(self))
            check_parts(self)
            self._check_size(max(self.m * self.k, self.m * self.n, self.n * self.k))
            return
        if self.b_dtype not in W4_DTYPES:
            raise choose("b_dtype", self.b_dtype, (*W4_DTYPES, self.a_dtype))
        if self.out_dtype not in ("", self.a_dtype):
            raise choose("out_dtype", self.out_dtype, (self.a_dtype,))
        object.__setattr__(self, "out_dtype", self.a_dtype)
        object.__setattr__(self, "b_dtype", "int4")
        object.__setattr__(self, "group_size", check_group_size(self.group_size))
        check_zero_point(self.zero_point)
        if not isinstance(self.act_order, bool):
            raise ArgumentTypeError(f"act_order={self.act_order!r} must be True or False")
        check_parts(self)
        self._check_size(max(self.m * self.layout.k_packed, self.m * self.n, self.layout.n_packed * self.layout.k_packed // 8))

    def _check_size(self, largest: int) -> None:
        if largest > MAX_ELEMENTS:
            raise UnsupportedError(
                f"m={self.m}, n={self.n}, k={self.k} needs a tensor of {largest} elements; {MAX_ELEMENTS} at most are supported"
            )

    def to_dict(self) -> dict[str, Any]:
        """As `Workload.to_dict`, without the fields that mean nothing for the kind of weights and parts that there are not."""
        left_out = {*(_W4_FIELDS if self.is_dense else ("out_dtype",)), *(name for name in PARTS if not getattr(self, name))}
        return {name: value for name, value in super().to_dict().items() if name not in left_out}

    # -- shape --------------------------------------------------------------------------------------

    @property
    def is_dense(self) -> bool:
        """Whether W is dense (n, k) rather than packed 4-bit."""
        return self.b_dtype == self.a_dtype or self.a_dtype == "uint4"

    @property
    def plain(self) -> Gemm:
        """The product alone; in place of requantised results, the sums."""
        if not has_epilogue(self):
            return self
        out_dtype = "int32" if requantised(self) else self.out_dtype
        return replace(self, has_bias=False, has_residual=False, relu=False, out_dtype=out_dtype)

    @property
    def layout(self) -> Layout:
        """Shapes of the packed weights."""
        return Layout(self.n, self.k, self.group_size, self.act_order)

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """The tensors x, w (packed words), s (scales), then z (zeros) unless symmetric, then perm with act-order.

        Dense: x, w, with scales x_scale and w_scale, with an epilogue scale, bias, residual, residual_scale.
        """
        if self.is_dense:
            return dense.dense_inputs(self)
        layout = self.layout
        specs = [
            TensorSpec("x", (self.m, self.k), self.a_dtype),
            TensorSpec("w", layout.words, "int32"),
            TensorSpec("s", layout.columns, self.a_dtype),
        ]
        if self.zero_point != "symmetric":
            specs.append(TensorSpec("z", layout.columns, "float32" if self.zero_point == "float" else self.a_dtype))
        if self.act_order:
            specs.append(TensorSpec("perm", (layout.k_packed,), "int32"))
        return tuple(specs)

    @property
    def output(self) -> TensorSpec:
        """The tensor y (m, n)."""
        return dense.dense_output(self) if self.is_dense else TensorSpec("y", (self.m, self.n), self.out_dtype)

    @property
    def flops(self) -> int:
        """2 m n k."""
        return 2 * self.m * self.n * self.k

    @property
    def min_bytes(self) -> int:
        """x, y, half a byte a weight, and scales, zeros and order without their padding."""
        if self.is_dense:
            return super().min_bytes
        item = DTYPES[self.a_dtype].itemsize
        column = item + {"symmetric": 0, "asymmetric": item, "float": 4}[self.zero_point]
        rows = (self.m * (self.k + self.n)) * item
        return rows + -(-self.n * self.k // 2) + self.n * self.layout.groups * column + 4 * self.k * self.act_order

    @property
    def label(self) -> str:
        """Such as "gemm m=16 n=4096 k=4096 float16xint4 g128 symmetric"."""
        order = " act_order" if self.act_order else ""
        shape = f"m={self.m} n={self.n} k={self.k}"
        if self.is_dense:
            kinds = self.a_dtype + (f"x{self.b_dtype}" if self.b_dtype != self.a_dtype else "")
            to = "" if self.out_dtype == self.a_dtype else f"->{self.out_dtype}"
            return " ".join([f"gemm {shape} {kinds}{to}", *(part.removeprefix("has_") for part in PARTS if getattr(self, part))])
        return f"gemm {shape} {self.a_dtype}x{self.b_dtype} g{self.group_size} {self.zero_point}{order}"

    # -- tensors ------------------------------------------------------------------------------------

    def make_inputs(self, seed: int, device: str = "cpu") -> list[torch.Tensor]:
        """Normal x, random nibbles, scales that make y of order 1, zeros over their whole range, a random order of rows."""
        import torch

        if self.is_dense:
            return dense.dense_make_inputs(self, seed, device)
        gen = torch.Generator(device=device).manual_seed(seed)
        layout, dtype = self.layout, DTYPES[self.a_dtype].torch()

        def uniform(shape: Sequence[int]) -> torch.Tensor:
            return torch.rand(shape, generator=gen, device=device)

        x = torch.randn((self.m, self.k), generator=gen, device=device).to(dtype)
        words = torch.randint(-(2**31), 2**31, layout.words, generator=gen, device=device, dtype=torch.int32)
        out = [x, words, ((0.5 + uniform(layout.columns)) / (4.6 * self.k**0.5)).to(dtype)]
        if self.zero_point == "asymmetric":
            out.append(torch.randint(0, MAX_ZERO + 1, layout.columns, generator=gen, device=device).to(dtype))
        elif self.zero_point == "float":
            out.append(15 * uniform(layout.columns))
        if self.act_order:
            perm = torch.full((layout.k_packed,), -1, dtype=torch.int32, device=device)
            perm[: self.k] = torch.randperm(self.k, generator=gen, device=device).to(torch.int32)
            out.append(perm)
        return out

    def flatten_args(self, args: Sequence[Any]) -> list[Any]:
        """(x, pw) -> x and the packed tensors, as numpy views when x is a numpy array; flat tensors pass as they are.

        Sorted weights (act-order) in a call of a workload without act_order: x is gathered here.
        """
        if len(args) != 2 or not isinstance(args[1], PackedWeight):
            return flattened(self, args, {}) if self.is_dense else list(args)
        return packed_args(self, *args)

    def flatten_named(self, args: Sequence[Any], named: Mapping[str, Any]) -> list[Any]:
        """Inputs of a dense product may be given by name."""
        return flattened(self, args, named) if self.is_dense else super().flatten_named(args, named)

    # -- what it computes ---------------------------------------------------------------------------

    def reference(self, *inputs: torch.Tensor) -> torch.Tensor:
        """Y (m, n) in float64 from x and the packed tensors, on their device, a few column tiles at a time."""
        import torch

        if self.is_dense:
            return dense.dense_reference(self, *inputs)
        x = self._packed_rows(*inputs)
        step = max(1, _REFERENCE_ELEMENTS // (TILE_N * self.layout.k_packed))
        tiles = range(0, self.layout.words[0], step)
        return torch.cat([x @ self._dequantised(inputs, start, start + step) for start in tiles], dim=1)[:, : self.n]

    def baseline(self, *inputs: torch.Tensor) -> tuple[str, Callable[[], Any]]:
        """(name, callable) of what a user would run without kronsched: torch's matmul on weights dequantised beforehand.

        In a_dtype; on a CPU float32 in place of float16, which torch multiplies far more slowly there.
        """
        import torch

        if self.is_dense:
            return dense.dense_baseline(self, *inputs)
        slow = self.a_dtype == "float16" and inputs[0].device.type == "cpu"
        dtype = torch.float32 if slow else inputs[0].dtype
        x = self._packed_rows(*inputs).to(dtype)
        step = max(1, _REFERENCE_ELEMENTS // (TILE_N * self.layout.k_packed))
        tiles = range(0, self.layout.words[0], step)
        weights = torch.cat([self._dequantised(inputs, i, i + step).to(x.dtype) for i in tiles], dim=1)[:, : self.n].contiguous()
        return f"torch matmul {str(dtype).removeprefix('torch.')}", lambda: x @ weights

    def _packed_rows(self, *inputs: torch.Tensor) -> torch.Tensor:
        """Columns of x in float64 in the order of the packed rows, zeros for padding: (m, k_packed)."""
        x, layout = inputs[0].double(), self.layout
        padded = x.new_zeros((self.m, layout.k_packed))
        if not self.act_order:
            padded[:, : self.k] = x
            return padded
        real = inputs[-1] >= 0
        padded[:, real] = x[:, inputs[-1][real].long()]
        return padded

    def _dequantised(self, inputs: Sequence[torch.Tensor], first: int, last: int) -> torch.Tensor:
        """The weights of some column tiles in float64: (k_packed, columns)."""
        layout = self.layout
        groups = row_groups(layout, inputs[1].device)
        q = unpack_words(inputs[1][first:last], layout).double()
        q -= NEUTRAL if self.zero_point == "symmetric" else unpack_columns(inputs[3][first:last]).double()[groups]
        return q.mul_(unpack_columns(inputs[2][first:last]).double()[groups])

    def program(self) -> tvm.IRModule:
        """TensorIR: rows gathered, weights dequantised, product in float32, rounded."""
        import tvm
        from tvm import te

        if self.is_dense:
            return dense.dense_program(self)
        placeholders, stages = w4_stages(self)
        func = te.create_prim_func([*placeholders, stages[-1]]).with_attr("global_symbol", "main")
        return tvm.IRModule({"main": func})


def w4_stages(w: Gemm) -> tuple[list[Any], list[Any]]:
    """(placeholders, stages) of the te program.

    Stages: xp (m, k_packed) x in float32 in packed order; wd (k_packed, n_packed) float32; acc (m, n_packed) float32; y (m, n).
    """
    from tvm import te, tirx

    layout = w.layout
    placeholders = {t.name: te.placeholder(t.shape, name=t.name, dtype=t.dtype) for t in w.inputs}
    x, words, scales = placeholders["x"], placeholders["w"], placeholders["s"]

    def gathered(i: Any, k: Any) -> Any:
        zero = tirx.const(0, "float32")
        if w.act_order:
            source = placeholders["perm"][k]
            return tirx.if_then_else(source >= 0, x[i, source].astype("float32"), zero)
        inside = x[i, k].astype("float32")
        return inside if layout.k_packed == w.k else tirx.if_then_else(k < w.k, inside, zero)

    def dequantised(k: Any, n: Any) -> Any:
        q = nibble(words, n, k).astype("float32")
        column = (n // TILE_N, tirx.min(k // layout.rows_per_group, layout.groups - 1), column_index(n % TILE_N))
        zero = tirx.const(NEUTRAL, "float32") if w.zero_point == "symmetric" else placeholders["z"][column].astype("float32")
        return (q - zero) * scales[column].astype("float32")

    xp = te.compute((w.m, layout.k_packed), gathered, name="xp")
    wd = te.compute((layout.k_packed, layout.n_packed), dequantised, name="wd")
    k = te.reduce_axis((0, layout.k_packed), name="kk")
    acc = te.compute((w.m, layout.n_packed), lambda i, j: te.sum(xp[i, k] * wd[k, j], axis=k), name="acc")
    y = te.compute((w.m, w.n), lambda i, j: acc[i, j].astype(w.a_dtype), name="y")
    return list(placeholders.values()), [xp, wd, acc, y]


def nibble(words: Any, n: Any, k: Any) -> Any:
    """The 4-bit value of weight (k, n) as an int32 expression; the index arithmetic of kronsched/quant/layout.py."""
    strip, c, g = n % TILE_N // 16, n % 16 // 8, n % 8
    half, h, t, s, e, f = k % TILE_K // 64, k % 64 // 32, k % 32 // 8, k % 8 // 4, k % 4 // 2, k % 2
    lane = g * 4 + t
    word = words[n // TILE_N, k // TILE_K, ((strip * 2 + half) * 32 + lane) * 4 + h * 2 + s]
    return (word >> (4 * (2 * e + c) + 16 * f)) & 15


def column_index(n: Any) -> Any:
    """Where column n of a tile stands among its 64 scales."""
    return n % 8 * 8 + n // 16 * 2 + n % 16 // 8


def _positive(field_name: str, value: Any) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise ArgumentTypeError(f"{field_name}={value!r} must be an int ≥ 1")
    number = int(value.__index__())
    if number < 1:
        raise ArgumentError(f"{field_name}={number} is not allowed: an int ≥ 1 is needed")
    return number
