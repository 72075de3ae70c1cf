"""Conv2d as a tensor expression: the program that CPU and CUDA-core schedules start from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kronsched.dtypes import DTYPES
from kronsched.workloads.conv2d import FOUR_BIT, IMAGES, LIMITS, block_channels

if TYPE_CHECKING:
    from kronsched.workloads.conv2d import Conv2d


def conv2d_stages(conv: Conv2d, channels: int = 0) -> tuple[list[Any], list[Any]]:
    """(placeholders, stages): xp, x widened with its zeros around it; wt, w as (kh, kw, c, c_out); acc, sums in y's shape; y.

    channels: of wt and acc, with zeros after those of y; c_out by default.
    """
    from tvm import te, tirx

    tensors = {t.name: te.placeholder(t.shape, name=t.name, dtype=t.dtype) for t in conv.inputs}
    x, w, wide = tensors["x"], tensors["w"], DTYPES[conv.in_dtype].accumulate
    (ph, pw), (sh, sw), (dh, dw) = conv.padding, conv.stride, conv.dilation
    per_group, out_per_group = conv.c_in // conv.groups, conv.c_out // conv.groups

    def place(n: Any, i: Any, j: Any, c: Any) -> tuple[Any, ...]:
        if conv.layout == "NHWC":
            return n, i, j, c
        block = block_channels(conv.in_dtype)
        return n // IMAGES, i, j, c // block, n % IMAGES, c % block

    def padded(n: Any, i: Any, j: Any, c: Any) -> Any:
        inside = tirx.all(i >= ph, i < conv.h + ph, j >= pw, j < conv.w + pw)
        return tirx.if_then_else(inside, element(x, place(n, i - ph, j - pw, c), conv.in_dtype), tirx.const(0, wide))

    channels = channels or conv.c_out

    def transposed(r: Any, s: Any, c: Any, o: Any) -> Any:
        value = element(w, (o, r, s, c), "int4" if conv.in_dtype in FOUR_BIT else conv.in_dtype)
        return value if channels == conv.c_out else tirx.if_then_else(o < conv.c_out, value, tirx.const(0, wide))

    wt = te.compute((*conv.kernel, per_group, channels), transposed, name="wt")
    xp = te.compute((conv.n, conv.h + 2 * ph, conv.w + 2 * pw, conv.c_in), padded, name="xp")
    r, s = (te.reduce_axis((0, k), name=name) for k, name in zip(conv.kernel, "rs", strict=True))
    c = te.reduce_axis((0, per_group), name="c")

    def term(n: Any, i: Any, j: Any, o: Any) -> Any:
        channel = c if conv.groups == 1 else o // out_per_group * per_group + c
        return te.sum(xp[n, i * sh + r * dh, j * sw + s * dw, channel] * wt[r, s, c, o], axis=[r, s, c])

    acc = te.compute((conv.n, *conv.out_hw, channels), term, name="acc")

    def result(*at: Any) -> Any:
        if conv.layout != "NHWC":
            n, i, j, c, image, channel = at
            at = n * IMAGES + image, i, j, c * block_channels(conv.out_dtype) + channel
        if conv.out_dtype not in FOUR_BIT:
            return epilogue(conv, acc[at], tensors, at)
        pair = [(*at[:-1], at[-1] * 2 + odd) for odd in (0, 1)]
        low, high = (epilogue(conv, acc[one], tensors, one).astype("int32") & 15 for one in pair)
        return (low | high << 4).astype("int8")

    y = te.compute(conv.output.shape, result, name="y")
    return list(tensors.values()), [xp, wt, acc, y]


def element(tensor: Any, at: tuple[Any, ...], dtype: str) -> Any:
    """An element of a tensor of a storage dtype in the dtype of its sums; of 4 bits, it is half of a byte."""
    if dtype not in FOUR_BIT:
        return widened(tensor[at], dtype)
    byte = tensor[(*at[:-1], at[-1] // 2)].astype("int32")
    half = (byte >> (at[-1] % 2 * 4)) & 15
    return half if dtype == "uint4" else (half ^ 8) - 8


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
    if out in LIMITS:
        v = acc + tensors["bias"][at[-1]] if conv.has_bias else acc
        v = v.astype(float32)
        v = tirx.nearbyint(v * tensors["scale"][at[-1]]) if conv.has_scale else v
        if conv.has_residual:
            v = v + tirx.nearbyint(tensors["residual"][at].astype(float32) * tensors["residual_scale"][0])
        least, most = LIMITS[out]
        low = tirx.const(float(max(0, least) if conv.relu else least), float32)
        return tirx.min(tirx.max(v, low), tirx.const(float(most), float32)).astype("int8")
    wide = DTYPES[conv.in_dtype].accumulate
    v = acc * tensors["scale"][at[-1]] if conv.has_scale else acc
    v = v + tensors["bias"][at[-1]] if conv.has_bias else v
    v = v + tensors["residual"][at].astype(wide) if conv.has_residual else v
    v = tirx.Select(v < tirx.const(0, wide), tirx.const(0, wide), v) if conv.relu else v  # not max, which drops NaN
    return v.astype(out)
