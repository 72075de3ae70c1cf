"""What a Conv2d computes, in torch: inputs for checks, the exact reference, and torch's own convolution as a baseline."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kronsched.dtypes import DTYPES
from kronsched.workloads.blocked import from_blocks, to_blocks
from kronsched.workloads.conv2d import FOUR_BIT, LIMITS, block_channels
from kronsched.workloads.int4 import pack_int4, unpack_int4

if TYPE_CHECKING:
    import torch

    from kronsched.workloads.conv2d import Conv2d

_DEVIATIONS = {"int8": 73.9**2, "int4": 4.61**2, "uint4": 8.8 * 4.61}
"""Of a product of uniform integers, about: standard deviation (root mean square of uint4)."""
_OUTPUT_DEVIATIONS = {"int8": 60.0, "int4": 4.0, "uint4": 6.0}
"""Wanted of y, so that some of it is saturated."""


def make_inputs(conv: Conv2d, seed: int, device: str) -> list[torch.Tensor]:
    """Random inputs: int8 over its whole range, floats normal; see `Conv2d.make_inputs`."""
    import torch

    gen = torch.Generator(device=device).manual_seed(seed)
    integers, wide = conv.sums_dtype == "int32", _DEVIATIONS.get(conv.in_dtype, 1.0)
    deviation = wide * conv.depth**0.5  # of a sum

    def draw(name: str, shape: Sequence[int], dtype: str) -> torch.Tensor:
        if name == "bias" and integers:
            return torch.randint(-int(deviation) - 2, int(deviation) + 2, shape, generator=gen, device=device, dtype=torch.int32)
        if dtype in ("int8", "int32"):
            return torch.randint(-128, 128, shape, generator=gen, device=device, dtype=torch.int32).to(DTYPES[dtype].torch())
        if name == "scale":
            spread = 0.5 + torch.rand(shape, generator=gen, device=device)
            result: torch.Tensor = spread * (_OUTPUT_DEVIATIONS.get(conv.out_dtype, 1.0) / deviation)
            return result
        if name == "residual_scale":
            return 0.2 + torch.rand(shape, generator=gen, device=device)
        values = torch.randn(shape, generator=gen, device=device, dtype=torch.float32)
        return values.to(DTYPES[dtype].torch())

    return [draw(t.name, t.shape, t.dtype) for t in conv.inputs]


def conv2d_reference(conv: Conv2d, *inputs: torch.Tensor) -> torch.Tensor:
    """Y in float64: sums in float64, one tap of the kernel at a time, which is exact for integers; then the epilogue."""
    named = dict(zip((t.name for t in conv.inputs), inputs, strict=True))
    x, w = named["x"], named["w"]
    if conv.in_dtype in FOUR_BIT:
        x, w = unpack_int4(x, signed=conv.in_dtype == "int4"), unpack_int4(w)
    if conv.layout != "NHWC":
        plain = conv2d_reference(replace(conv, layout="NHWC"), from_blocks(x), *inputs[1:])
        return to_blocks(plain, block_channels(conv.out_dtype))
    return finished(conv, _sums(conv, x.double(), w.double()), named)


def finished(conv: Conv2d, acc: torch.Tensor, named: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Y in float64 from the sums in float64, which it may overwrite: the epilogue."""
    if conv.requantised:
        y = _requantised(conv, acc, named)
        return pack_int4(y).double() if conv.out_dtype in FOUR_BIT else y
    if conv.has_scale:
        acc *= named["scale"].double()
    if conv.has_bias:
        acc += named["bias"].double()
    if conv.has_residual:
        acc += named["residual"].double()
    return acc.clamp_(min=0) if conv.relu else acc


def _sums(conv: Conv2d, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    from torch.nn.functional import pad

    (ph, pw), (sh, sw), (dh, dw), (oh, ow) = conv.padding, conv.stride, conv.dilation, conv.out_hw
    x = pad(x, (0, 0, pw, pw, ph, ph))
    g, wide = conv.groups, conv.c_in // conv.groups
    acc = x.new_zeros((g, conv.pixels, conv.c_out // g))
    for r in range(conv.kernel[0]):
        for s in range(conv.kernel[1]):
            top, left = r * dh, s * dw
            tap = x[:, top : top + (oh - 1) * sh + 1 : sh, left : left + (ow - 1) * sw + 1 : sw]
            rows = tap.reshape(conv.pixels, g, wide).transpose(0, 1)
            acc.baddbmm_(rows, w[:, r, s].reshape(g, conv.c_out // g, wide).transpose(1, 2))
    return acc.transpose(0, 1).reshape(conv.n, oh, ow, conv.c_out)


def _requantised(conv: Conv2d, acc: torch.Tensor, named: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Requantise by the arithmetic of the module docstring of conv2d.py, in float32 where it says so."""
    if conv.has_bias:
        acc = acc + named["bias"].double()
    y = acc.float()
    if conv.has_scale:
        y = y * named["scale"].float()
    y = y.round_()  # halves to even
    if conv.has_residual:
        y += (named["residual"].float() * named["residual_scale"].float()).round_()
    if conv.relu:
        y = y.clamp_(min=0)
    return y.clamp_(*LIMITS[conv.out_dtype]).double()


def torch_conv2d(conv: Conv2d, *inputs: torch.Tensor) -> tuple[str, Callable[[], torch.Tensor]]:
    """(name, call) of torch.nn.functional.conv2d without the epilogue, channels-last.

    float16 in place of int8 and fp8; on a CPU float32 in place of all three, as torch convolves float16 far more slowly there.
    """
    import torch
    from torch.nn.functional import conv2d

    x, w = inputs[0], inputs[1]
    if conv.in_dtype in FOUR_BIT:
        x, w = unpack_int4(x, signed=conv.in_dtype == "int4"), unpack_int4(w)
    x = x if conv.layout == "NHWC" else from_blocks(x)
    half = torch.float32 if x.device.type == "cpu" else torch.float16
    dtype = torch.bfloat16 if conv.in_dtype == "bfloat16" else half
    image, weight = (t.to(dtype).permute(0, 3, 1, 2) for t in (x, w))  # NCHW by shape, NHWC in memory
    attrs: dict[str, Any] = {
        "stride": conv.stride,
        "padding": conv.padding,
        "dilation": conv.dilation,
        "groups": conv.groups,
    }
    return f"torch conv2d {str(dtype).removeprefix('torch.')}", lambda: conv2d(image, weight, **attrs)
