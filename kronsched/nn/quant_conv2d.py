"""`QuantConv2d`: a convolution of int8 images by int8 weights, requantised in the same kernel.

    y = saturate(relu(rint((Σ x·w + bias) · scale) + rint(residual · residual_scale)))
    scale = input_scale · weight_scale / output_scale

Values are symmetric: a real number is an int8 times its scale, one scale a tensor, for weights one an output channel. The
residual may have another scale than the output; both are rounded before they are added, half a unit each at most.

Read first: `QuantConv2d`, `QuantConv2d.from_float`. The kernels behind it and its operator are in quant_conv2d_kernels.py.
"""

from __future__ import annotations

from math import inf
from typing import Any

import torch
from torch import Tensor, nn

from kronsched.errors import ArgumentError, ArgumentTypeError, UnsupportedError
from kronsched.nn import quant_conv2d_kernels
from kronsched.nn.checks import check_tensor
from kronsched.nn.kept_dtypes import KeepsDtypes
from kronsched.nn.quant_conv2d_kernels import Options
from kronsched.workloads.conv2d import Conv2d, integer, real

LARGEST = 127
"""Weights and images use −127 to 127, so that both signs have the same range."""
_LARGEST_PRODUCT = 128 * LARGEST
_LARGEST_SUM = 2**31 - 1
_LEAST_BIAS_BITS = 24
_SMALLEST = 1e-30
"""The largest weight of a channel of zeros, for a scale that is not 0."""


class QuantConv2d(KeepsDtypes):
    """A layer for int8 inputs in NHWC: (n, h, w, c_in) to (n, h_out, w_out, c_out).

    weight: int8 (c_out, kh, kw, c_in / groups).  scale: float32 (c_out,), what a sum is multiplied by.  bias: int32 (c_out,)
    in units of sums, or None; a sum with its bias has to fit into int32. stride, padding, dilation, groups: as in torch.  relu:
    negative results become 0.  out_dtype: "int8", or "int32" for the sums themselves (no scale then).

    Weight, scale and bias are buffers and stay int8, float32 and int32 where a model is cast (`half()`, `to(torch.bfloat16)`,
    `double()`): images are int8 and results `out_dtype` in any model. A kernel is loaded for each new shape of the input and
    kept, for all layers of this process that are alike. torch.compile sees one operator for every shape. There is no gradient.
    """

    weight: Tensor
    scale: Tensor | None
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
        check_tensor("weight", weight)
        if weight.dtype != torch.int8 or weight.ndim != 4:
            raise ArgumentTypeError(f"weight is {weight.dtype} of {weight.ndim} axes: int8 (c_out, kh, kw, c_in) is needed")
        c_out, _, _, c_in = weight.shape
        attrs = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups, "relu": relu}
        one: Any = Conv2d(1, 1, 1, c_in * integer("groups", groups, 1), c_out, 1, out_dtype=out_dtype, **attrs)  # type: ignore[arg-type]
        for name, tensor, dtype in (("scale", scale, torch.float32), ("bias", bias, torch.int32)):
            if tensor is None:
                continue
            check_tensor(name, tensor)
            if tensor.dtype != dtype or tensor.shape != weight.shape[:1]:
                found = f"{tensor.dtype} {tuple(tensor.shape)}"
                raise ArgumentError(f"{name} is {found}: {dtype} ({c_out},) is needed")
        if (scale is None) != (one.out_dtype == "int32"):
            raise ArgumentError(f"scale: out_dtype={one.out_dtype!r} {'needs one' if scale is None else 'takes none'}")
        self.register_buffer("weight", weight.contiguous())
        self.register_buffer("scale", scale)
        self.register_buffer("bias", bias)
        self.stride, self.padding, self.dilation = one.stride, one.padding, one.dilation
        self.groups, self.relu, self.out_dtype = one.groups, one.relu, one.out_dtype

    @classmethod
    def from_float(cls, conv: nn.Conv2d, input_scale: float, output_scale: float, relu: bool = False) -> QuantConv2d:
        """Quantise a float layer: weights to the nearest int8, with the scale of each channel's largest weight.

        input_scale, output_scale: of x and y, such as an observer finds.  The bias is rounded to the nearest multiple of
        input_scale · weight_scale, the unit of sums. Where it is too large for that (a channel of small weights or, pruned, of
        zeros), the weight scale is the least with which the bias and any sum fit into int32 together: the bias then keeps 30 bits
        or more (in layers of up to 66,000 terms a sum), and the weights of that channel fewer than 8, as they count for little.
        Requantising multiplies in float32, to 24 bits. Raises ArgumentError or ArgumentTypeError naming the argument.
        """
        if not isinstance(conv, nn.Conv2d):
            raise ArgumentTypeError(f"conv is of type {type(conv).__name__}: a torch.nn.Conv2d is needed")
        if conv.padding_mode != "zeros":
            raise ArgumentError(f"padding_mode={conv.padding_mode!r} is not allowed: 'zeros' is needed")
        input_scale, output_scale = _positive("input_scale", input_scale), _positive("output_scale", output_scale)
        weight = _finite("weight", conv.weight)
        weight_scale = weight.abs().amax(dim=(1, 2, 3)).clamp_min(_SMALLEST) / LARGEST
        bias = None
        if conv.bias is not None:
            wanted = _finite("bias", conv.bias)
            weight_scale = weight_scale.maximum(wanted.abs() / input_scale / _largest_bias(weight[0].numel()))
            bias = (wanted / input_scale / weight_scale).round().to(torch.int32)
        scale = (weight_scale * (input_scale / output_scale)).float()
        if not bool(torch.isfinite(scale).all()):
            given = f"input_scale={input_scale}, output_scale={output_scale}"
            raise ArgumentError(f"{given}: their ratio times a weight scale is beyond float32")
        return cls(
            (weight / weight_scale[:, None, None, None]).round().to(torch.int8).permute(0, 2, 3, 1),
            scale,
            bias,
            stride=conv.stride,  # type: ignore[arg-type]
            padding=_padding(conv),
            dilation=conv.dilation,  # type: ignore[arg-type]
            groups=conv.groups,
            relu=relu,
        )

    def workload(self, shape: torch.Size | tuple[int, ...], residual: bool = False) -> Conv2d:
        """The workload of an input of this shape."""
        weight, bias = self.weight.shape, self.bias is not None
        return quant_conv2d_kernels.workload(tuple(shape), tuple(weight), bias, residual, self._options)

    def forward(self, x: Tensor, residual: Tensor | None = None, residual_scale: float | Tensor = 1.0) -> Tensor:
        """Y of x int8 (n, h, w, c_in).

        residual: of y's shape and dtype, added before relu, times residual_scale where y is int8.  residual_scale: a number, or
        a floating tensor of one element, which is faster on a GPU.
        """
        check_tensor("x", x)
        if x.dtype != torch.int8 or x.ndim != 4 or x.shape[3] != self.weight.shape[3] * self.groups:
            wanted = f"int8 (n, h, w, {self.weight.shape[3] * self.groups})"
            raise ArgumentError(f"x is {x.dtype} {tuple(x.shape)}: {wanted} is needed")
        factor = None
        if residual is not None:
            check_tensor("residual", residual)
        if residual is not None and self.out_dtype == "int8":
            factor = _one("residual_scale", residual_scale, x.device)
        return quant_conv2d_kernels.product(x, self.weight, self.scale, self.bias, residual, factor, self._options)

    @property
    def _options(self) -> Options:
        return self.stride, self.padding, self.dilation, self.groups, self.relu, self.out_dtype

    def extra_repr(self) -> str:
        """Shapes and options."""
        c_out, kh, kw, c_in = self.weight.shape
        return f"{c_in * self.groups}, {c_out}, kernel=({kh}, {kw}), stride={self.stride}, relu={self.relu}, to {self.out_dtype}"


def quantise(x: Tensor, scale: float) -> Tensor:
    """The nearest int8 multiples of `scale`, within ±127: an NCHW float image to int8 NHWC. Infinities saturate."""
    check_tensor("x", x)
    if x.ndim != 4 or not x.is_floating_point():
        raise ArgumentTypeError(f"x is {x.dtype} of {x.ndim} axes: a floating-point image (n, c, h, w) is needed")
    steps = (x.float() / _positive("scale", scale)).round_().clamp_(-LARGEST, LARGEST)
    return steps.to(torch.int8).permute(0, 2, 3, 1).contiguous()


def _padding(conv: nn.Conv2d) -> tuple[int, int]:
    """Rows of zeros on each side; torch's words as numbers."""
    if not isinstance(conv.padding, str):
        h, w = conv.padding
        return h, w
    if conv.padding == "valid":
        return 0, 0
    h, w = (d * (k - 1) for d, k in zip(conv.dilation, conv.kernel_size, strict=True))
    if h % 2 or w % 2:
        raise ArgumentError(f"padding='same' is not allowed with kernel_size={conv.kernel_size}: it pads one side more")
    return h // 2, w // 2


def _largest_bias(terms: int) -> int:
    """What fits into int32 beside any sum of so many products, x down to −128."""
    largest = _LARGEST_SUM - terms * _LARGEST_PRODUCT
    if largest < 1 << _LEAST_BIAS_BITS:
        raise UnsupportedError(f"weight has {terms} elements a channel: sums of so many products and a bias may overflow int32")
    return largest


def _finite(name: str, tensor: Tensor) -> Tensor:
    """In float64, in which quotients of float32 values neither overflow nor vanish."""
    if tensor.is_meta or not tensor.is_floating_point():
        raise ArgumentTypeError(f"{name} is {tensor.dtype} on {tensor.device}: floating-point values are needed")
    if not bool(torch.isfinite(tensor).all()):
        raise ArgumentError(f"{name} holds NaN or infinity: finite values are needed")
    return tensor.detach().double()


def _positive(name: str, value: Any) -> float:
    """A finite number > 0, or a tensor of one such as observers give, as a float."""
    try:
        number = float("") if isinstance(value, bool | str) else float(value)
    except OverflowError:
        number = inf
    except (TypeError, ValueError, RuntimeError):
        raise ArgumentTypeError(f"{name}={value!r} must be one finite number > 0") from None
    if not 0 < number < inf:
        raise ArgumentError(f"{name}={number} is not allowed: a finite number > 0 is needed")
    return number


def _one(name: str, value: float | Tensor, device: torch.device) -> Tensor:
    """A factor as float32 (1,)."""
    if not isinstance(value, Tensor):
        return torch.full((1,), real(name, value), dtype=torch.float32, device=device)
    if value.numel() != 1 or not value.is_floating_point():
        raise ArgumentError(f"{name} is {value.dtype} {tuple(value.shape)}: a floating tensor of one element is needed")
    return value.detach().reshape(1).float()
