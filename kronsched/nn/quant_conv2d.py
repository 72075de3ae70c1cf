"""`QuantConv2d`: a convolution of int8 images by int8 weights, requantised in the same kernel.

    y = saturate(relu(rint((Σ x·w + bias) · scale) + rint(residual · residual_scale)))
    scale = input_scale · weight_scale / output_scale

Values are symmetric: a real number is an int8 times its scale, one scale a tensor, for weights one an output channel. The
residual may have another scale than the output; both are rounded before they are added, half a unit each at most.

Read first: `QuantConv2d`, `QuantConv2d.from_float`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from kronsched.errors import ArgumentError, ArgumentTypeError
from kronsched.runtime.load import load
from kronsched.workloads.conv2d import Conv2d

if TYPE_CHECKING:
    from torch import Tensor

    from kronsched.runtime.module import TunedModule

LARGEST = 127
"""Weights and images use −127 to 127, so that both signs have the same range."""


class QuantConv2d(nn.Module):
    """A layer for int8 inputs in NHWC: (n, h, w, c_in) to (n, h_out, w_out, c_out).

    weight: int8 (c_out, kh, kw, c_in / groups).  scale: float32 (c_out,), what a sum is multiplied by.  bias: int32 (c_out,)
    in units of sums, or None. stride, padding, dilation, groups: as in torch.  relu: negative results become 0.  out_dtype:
    "int8", or "int32" for the sums themselves (no scale then). A kernel is loaded for each new shape of the input and kept;
    there is no gradient.
    """

    weight: Tensor
    scale: Tensor
    bias: Tensor | None

    def __init__(
        self,
        weight: Tensor,
        scale: Tensor | None,
        bias: Tensor | None = None,
        *,
        stride: int | tuple[int, int] = 1,
        padding: int | tuple[int, int] = 0,
        dilation: int | tuple[int, int] = 1,
        groups: int = 1,
        relu: bool = False,
        out_dtype: str = "int8",
    ) -> None:
        """Hold the tensors; see the class. Raises ArgumentError or ArgumentTypeError naming the argument."""
        super().__init__()
        if weight.dtype != torch.int8 or weight.ndim != 4:
            raise ArgumentTypeError(f"weight is {weight.dtype} of {weight.ndim} axes: int8 (c_out, kh, kw, c_in) is needed")
        for name, tensor, dtype in (("scale", scale, torch.float32), ("bias", bias, torch.int32)):
            if tensor is not None and (tensor.dtype != dtype or tensor.shape != weight.shape[:1]):
                found = f"{tensor.dtype} {tuple(tensor.shape)}"
                raise ArgumentError(f"{name} is {found}: {dtype} ({weight.shape[0]},) is needed")
        if (scale is None) != (out_dtype == "int32"):
            raise ArgumentError(f"scale: out_dtype={out_dtype!r} {'needs one' if scale is None else 'takes none'}")
        self.register_buffer("weight", weight.contiguous())
        self.register_buffer("scale", scale)
        self.register_buffer("bias", bias)
        self.stride, self.padding, self.dilation, self.groups = stride, padding, dilation, groups
        self.relu, self.out_dtype = relu, out_dtype
        self._modules_by_shape: dict[tuple[object, ...], TunedModule] = {}

    @classmethod
    def from_float(cls, conv: nn.Conv2d, input_scale: float, output_scale: float, relu: bool = False) -> QuantConv2d:
        """Quantise a float layer: weights to the nearest int8, with the scale of each channel's largest weight.

        input_scale, output_scale: of x and y, such as an observer finds. Raises ArgumentError for padding that is not of zeros.
        """
        if conv.padding_mode != "zeros" or isinstance(conv.padding, str):
            raise ArgumentError(f"padding={conv.padding!r}, {conv.padding_mode!r}: a number of zeros is needed")
        for name, value in (("input_scale", input_scale), ("output_scale", output_scale)):
            if not value > 0:
                raise ArgumentError(f"{name}={value} is not allowed: a number > 0 is needed")
        weight = conv.weight.detach().float()
        weight_scale = weight.abs().amax(dim=(1, 2, 3)).clamp_min(1e-30) / LARGEST
        steps = (weight / weight_scale[:, None, None, None]).round().to(torch.int8)
        sums = (input_scale * weight_scale.double()).to(weight.device)
        bias = None if conv.bias is None else (conv.bias.detach().double() / sums).round().to(torch.int32)
        return cls(
            steps.permute(0, 2, 3, 1),
            (sums / output_scale).float(),
            bias,
            stride=_pair(conv.stride),
            padding=_pair(conv.padding),
            dilation=_pair(conv.dilation),
            groups=conv.groups,
            relu=relu,
        )

    def workload(self, shape: torch.Size | tuple[int, ...], residual: bool = False) -> Conv2d:
        """The workload of an input of this shape."""
        n, h, w, c_in = shape
        c_out, kh, kw, _ = self.weight.shape
        return Conv2d(
            n,
            h,
            w,
            c_in,
            c_out,
            (kh, kw),
            _pair(self.stride),
            _pair(self.padding),
            _pair(self.dilation),
            self.groups,
            "int8",
            self.out_dtype,
            has_bias=self.bias is not None,
            has_residual=residual,
            relu=self.relu,
        )

    def forward(self, x: Tensor, residual: Tensor | None = None, residual_scale: float | Tensor = 1.0) -> Tensor:
        """x: int8 (n, h, w, c_in).  residual: of y's shape and dtype, added before relu, times residual_scale where y is int8."""
        if x.dtype != torch.int8 or x.ndim != 4 or x.shape[3] != self.weight.shape[3] * self.groups:
            wanted = f"int8 (n, h, w, {self.weight.shape[3] * self.groups})"
            raise ArgumentError(f"x is {x.dtype} {tuple(x.shape)}: {wanted} is needed")
        named: dict[str, object] = {}
        if self.scale is not None:
            named["scale"] = self.scale
        if self.bias is not None:
            named["bias"] = self.bias
        if residual is not None:
            named["residual"] = residual
            if self.out_dtype == "int8":
                named["residual_scale"] = residual_scale
        result: Tensor = self._module(x, residual is not None)(x, self.weight, **named)
        return result

    def _module(self, x: Tensor, residual: bool) -> TunedModule:
        key = (*x.shape, residual, x.device)
        found = self._modules_by_shape.get(key)
        if found is None:
            found = load(self.workload(x.shape, residual), device=str(x.device))
            self._modules_by_shape[key] = found
        return found

    def extra_repr(self) -> str:
        """Shapes and options."""
        c_out, kh, kw, c_in = self.weight.shape
        return f"{c_in * self.groups}, {c_out}, kernel=({kh}, {kw}), stride={self.stride}, relu={self.relu}, to {self.out_dtype}"


def quantise(x: Tensor, scale: float) -> Tensor:
    """The nearest int8 multiples of `scale`, within ±127: an NCHW float image to int8 NHWC."""
    steps = (x / scale).round_().clamp_(-LARGEST, LARGEST)
    return steps.to(torch.int8).permute(0, 2, 3, 1).contiguous()


def _pair(value: int | tuple[int, ...]) -> tuple[int, int]:
    if isinstance(value, int):
        return value, value
    first, second = value
    return first, second
