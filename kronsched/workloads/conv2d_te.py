"""Conv2d as a tensor expression: the program that CPU and CUDA-core schedules start from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kronsched.dtypes import DTYPES

if TYPE_CHECKING:
    from kronsched.workloads.conv2d import Conv2d


def conv2d_stages(conv: Conv2d) -> tuple[list[Any], list[Any]]:
    """(placeholders, stages): xp, x widened with its zeros around it; wt, w as (kh, kw, c, c_out); acc, sums in y's shape; y."""
    from tvm import te, tirx

    tensors = {t.name: te.placeholder(t.shape, name=t.name, dtype=t.dtype) for t in conv.inputs}
    x, w, wide = tensors["x"], tensors["w"], DTYPES[conv.in_dtype].accumulate
    (ph, pw), (sh, sw), (dh, dw) = conv.padding, conv.stride, conv.dilation
    per_group, out_per_group = conv.c_in // conv.groups, conv.c_out // conv.groups

    def padded(n: Any, i: Any, j: Any, c: Any) -> Any:
        inside = tirx.all(i >= ph, i < conv.h + ph, j >= pw, j < conv.w + pw)
        return tirx.if_then_else(inside, widened(x[n, i - ph, j - pw, c], conv.in_dtype), tirx.const(0, wide))

    def transposed(r: Any, s: Any, c: Any, o: Any) -> Any:
        return widened(w[o, r, s, c], conv.in_dtype)

    wt = te.compute((*conv.kernel, per_group, conv.c_out), transposed, name="wt")
    xp = te.compute((conv.n, conv.h + 2 * ph, conv.w + 2 * pw, conv.c_in), padded, name="xp")
    r, s = (te.reduce_axis((0, k), name=name) for k, name in zip(conv.kernel, "rs", strict=True))
    c = te.reduce_axis((0, per_group), name="c")

    def term(n: Any, i: Any, j: Any, o: Any) -> Any:
        channel = c if conv.groups == 1 else o // out_per_group * per_group + c
        return te.sum(xp[n, i * sh + r * dh, j * sw + s * dw, channel] * wt[r, s, c, o], axis=[r, s, c])

    acc = te.compute(conv.output.shape, term, name="acc")
    y = te.compute(conv.output.shape, lambda *at: epilogue(conv, acc[at], tensors, at), name="y")
    return list(tensors.values()), [xp, wt, acc, y]


def widened(value: Any, dtype: str) -> Any:
    """A value of a storage dtype in the dtype of its sums.

    fp8 by its bits: TVM 0.27 has zero, subnormals and NaN of fp8 wrong on a CPU. Shifted into a float16, an e4m3 is 2^-8 times
    its value, subnormals too; an e5m2 is the upper half of a float16.
    """
    from tvm import tirx

    if not dtype.startswith("float8"):
        return value.astype(DTYPES[dtype].accumulate)
    bits = tirx.reinterpret("uint8", value).astype("uint16")
    if dtype == "float8_e5m2":
        return tirx.reinterpret("float16", bits << tirx.const(8, "uint16")).astype("float32")
    low = bits & tirx.const(127, "uint16")
    half = ((bits & tirx.const(128, "uint16")) << tirx.const(8, "uint16")) | (low << tirx.const(7, "uint16"))
    number = tirx.reinterpret("float16", half).astype("float32") * tirx.const(256.0, "float32")
    return tirx.Select(low == tirx.const(127, "uint16"), tirx.const(float("nan"), "float32"), number)


def epilogue(conv: Conv2d, acc: Any, tensors: Mapping[str, Any], at: tuple[Any, ...]) -> Any:
    """The value of y at index `at` from its sum, by the arithmetic of the module docstring of conv2d.py."""
    from tvm import tirx

    out, float32 = conv.out_dtype, "float32"
    if out == "int8":
        v = acc + tensors["bias"][at[-1]] if conv.has_bias else acc
        v = v.astype(float32)
        v = tirx.nearbyint(v * tensors["scale"][at[-1]]) if conv.has_scale else v
        if conv.has_residual:
            v = v + tirx.nearbyint(tensors["residual"][at].astype(float32) * tensors["residual_scale"][0])
        low = tirx.const(0.0 if conv.relu else -128.0, float32)
        return tirx.min(tirx.max(v, low), tirx.const(127.0, float32)).astype("int8")
    wide = DTYPES[conv.in_dtype].accumulate
    v = acc * tensors["scale"][at[-1]] if conv.has_scale else acc
    v = v + tensors["bias"][at[-1]] if conv.has_bias else v
    v = v + tensors["residual"][at].astype(wide) if conv.has_residual else v
    v = tirx.Select(v < tirx.const(0, wide), tirx.const(0, wide), v) if conv.relu else v  # not max, which drops NaN
    return v.astype(out)
