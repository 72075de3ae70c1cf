"""Programs that TVM MetaSchedule can put on tensor cores: a Conv2d or dense Gemm whose operands stay in their storage dtype.

The programs that kronsched's own TensorIR schedules start from widen operands in stages of their own; MetaSchedule's rules match
a sum of products of narrow values only. Both compute the same, and ours is what candidates of either are checked against.

Read first: `metaschedule_program`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kronsched.dtypes import DTYPES
from kronsched.errors import UnsupportedError
from kronsched.workloads.conv2d import Conv2d
from kronsched.workloads.gemm import Gemm

if TYPE_CHECKING:
    import tvm

    from kronsched.workloads.base import Workload

TENSOR_CORE_DTYPES = ("int8", "float16")
"""What MetaSchedule of TVM 0.27 has tensor intrinsics for: no bfloat16, fp8 or int4."""


def metaschedule_program(workload: Workload) -> tvm.IRModule:
    """One PrimFunc "main" over the workload's inputs and output. UnsupportedError for what MetaSchedule cannot serve."""
    import tvm
    from tvm import te

    reason = unsupported(workload)
    if reason is not None:
        raise UnsupportedError(reason)
    tensors = {t.name: te.placeholder(t.shape, name=t.name, dtype=t.dtype) for t in workload.inputs}
    y = _conv2d(workload, tensors) if isinstance(workload, Conv2d) else _gemm(workload, tensors)  # type: ignore[arg-type]
    func = te.create_prim_func([*tensors.values(), y]).with_attr("global_symbol", "main")
    return tvm.IRModule({"main": func})


def unsupported(workload: Workload) -> str | None:
    """Why MetaSchedule does not serve a workload as a peer; None when it does."""
    if isinstance(workload, Conv2d):
        if workload.groups > 1:
            return "MetaSchedule as a peer serves one group of channels"
        if workload.layout != "NHWC":
            return "MetaSchedule as a peer takes NHWC"
        dtype = workload.in_dtype
    elif isinstance(workload, Gemm) and workload.a_dtype == workload.b_dtype:
        dtype = workload.a_dtype
    else:
        return f"MetaSchedule as a peer serves conv2d and dense gemm, not {workload.label}"
    if dtype not in TENSOR_CORE_DTYPES:
        return f"MetaSchedule has tensor intrinsics for {' and '.join(TENSOR_CORE_DTYPES)}, not for {dtype}"
    return None


def _conv2d(conv: Conv2d, tensors: dict[str, Any]) -> Any:
    from tvm import te, tirx

    from kronsched.workloads.conv2d_te import epilogue

    x, w, wide = tensors["x"], tensors["w"], DTYPES[conv.in_dtype].accumulate
    (ph, pw), (sh, sw), (dh, dw) = conv.padding, conv.stride, conv.dilation

    def padded(n: Any, i: Any, j: Any, c: Any) -> Any:
        inside = tirx.all(i >= ph, i < conv.h + ph, j >= pw, j < conv.w + pw)
        return tirx.if_then_else(inside, x[n, i - ph, j - pw, c], tirx.const(0, conv.in_dtype))

    outer = (conv.n, conv.h + 2 * ph, conv.w + 2 * pw, conv.c_in)
    xp = te.compute(outer, padded, name="xp") if ph or pw else x
    r, s = (te.reduce_axis((0, k), name=name) for k, name in zip(conv.kernel, "rs", strict=True))
    c = te.reduce_axis((0, conv.c_in), name="c")

    def term(n: Any, i: Any, j: Any, o: Any) -> Any:
        left = xp[n, i * sh + r * dh, j * sw + s * dw, c].astype(wide)
        return te.sum(left * w[o, r, s, c].astype(wide), axis=[r, s, c])

    acc = te.compute(conv.output.shape, term, name="acc")
    return te.compute(conv.output.shape, lambda *at: epilogue(conv, acc[at], tensors, at), name="y")


def _gemm(gemm: Gemm, tensors: dict[str, Any]) -> Any:
    from tvm import te

    from kronsched.workloads.gemm_dense import rounded

    x, w, wide = tensors["x"], tensors["w"], DTYPES[gemm.a_dtype].accumulate
    k = te.reduce_axis((0, gemm.k), name="kk")
    shape = (gemm.m, gemm.n)
    acc = te.compute(shape, lambda i, j: te.sum(x[i, k].astype(wide) * w[j, k].astype(wide), axis=k), name="acc")
    return te.compute(shape, lambda i, j: rounded(gemm, acc[i, j], tensors, i, j), name="y")
