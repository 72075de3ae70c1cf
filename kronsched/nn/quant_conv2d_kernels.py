"""int8 convolutions of any shape of image, and the torch operator of `QuantConv2d` in a compiled or traced graph.

`kronsched::quant_conv2d` has a fake implementation, so that torch.compile(fullgraph=True) sees one opaque operator for every
batch and size. Eager calls do not come here: a custom op costs more than a launch. Read first: `product`.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kronsched.errors import ArgumentError, ArgumentTypeError, UnsupportedError
from kronsched.nn.autograd import is_recorded
from kronsched.runtime.load import load
from kronsched.runtime.module import TunedModule
from kronsched.workloads.conv2d import Conv2d

Pair = tuple[int, int]
Options = tuple[Pair, Pair, Pair, int, bool, str]
"""stride, padding, dilation, groups, relu, out_dtype of `Conv2d`."""

_modules: dict[tuple[Any, ...], TunedModule] = {}
_lock = threading.Lock()


def product(
    x: Tensor,
    weight: Tensor,
    scale: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    residual_scale: Tensor | None,
    options: Options,
) -> Tensor:
    """Y of `QuantConv2d`: int8 or int32 (n, h_out, w_out, c_out)."""
    tensors = [t for t in (x, weight, scale, bias, residual, residual_scale) if t is not None]
    recorded = is_recorded(tensors)
    if recorded or x.shape[0] == 0:  # no module does it, or only later
        _check(x, tensors, residual, _shape(x, weight, options), options[-1])
    if recorded:
        stride, padding, dilation, *rest = options
        result: Tensor = torch.ops.kronsched.quant_conv2d(
            x, weight, scale, bias, residual, residual_scale, list(stride), list(padding), list(dilation), *rest
        )
        return result
    if x.shape[0] == 0:
        return _empty(x, weight, options)
    if torch._C._are_functorch_transforms_active() and any(map(torch._C._functorch.is_functorch_wrapped_tensor, tensors)):
        raise UnsupportedError("x is within a torch.func transform: QuantConv2d is supported outside of vmap, grad and jvp only")
    shapes = x.shape, weight.shape
    return module(shapes, bias is not None, residual is not None, options, x.device)(*tensors)  # type: ignore[no-any-return]


def workload(x: tuple[int, ...], weight: tuple[int, ...], bias: bool, residual: bool, options: Options) -> Conv2d:
    """The workload of images and weights of these shapes, with an int32 bias and a residual or without."""
    n, h, w, c_in = x
    stride, padding, dilation, groups, relu, out_dtype = options
    return Conv2d(
        n,
        h,
        w,
        c_in,
        weight[0],
        (weight[1], weight[2]),
        stride,
        padding,
        dilation,
        groups,
        "int8",
        out_dtype,
        has_bias=bias,
        has_residual=residual,
        relu=relu,
    )


def module(
    shapes: tuple[torch.Size, torch.Size], bias: bool, residual: bool, options: Options, device: torch.device
) -> TunedModule:
    """The kernel for these shapes and options, loaded when it is first needed and kept."""
    key = (*shapes, bias, residual, options, device)
    found = _modules.get(key)
    if found is None:
        with _lock:
            found = _modules.get(key)
            if found is None:
                found = load(workload(*shapes, bias, residual, options), device=str(device))
                _modules[key] = found
    return found


def clear() -> None:
    """Forget the kernels, so that the next call looks into the logs again, such as after tuning."""
    with _lock:
        _modules.clear()


# -- the operator --------------------------------------------------------------------------------------


@torch.library.custom_op("kronsched::quant_conv2d", mutates_args=())
def _quant_conv2d(
    x: Tensor,
    weight: Tensor,
    scale: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    residual_scale: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
    relu: bool,
    out_dtype: str,
) -> Tensor:
    options = (_pair(stride), _pair(padding), _pair(dilation), groups, relu, out_dtype)
    tensors = [t for t in (x, weight, scale, bias, residual, residual_scale) if t is not None]
    if x.shape[0] == 0:
        return _empty(x, weight, options)
    found = module((x.shape, weight.shape), bias is not None, residual is not None, options, x.device)
    return found.call_torch(tensors, None)


@_quant_conv2d.register_fake
def _(
    x: Tensor,
    weight: Tensor,
    scale: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    residual_scale: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
    relu: bool,
    out_dtype: str,
) -> Tensor:
    return _empty(x, weight, (_pair(stride), _pair(padding), _pair(dilation), groups, relu, out_dtype))


def _empty(x: Tensor, weight: Tensor, options: Options) -> Tensor:
    """Y without values."""
    return x.new_empty(_shape(x, weight, options), dtype=getattr(torch, options[-1]))


def _shape(x: Tensor, weight: Tensor, options: Options) -> tuple[int, int, int, int]:
    """That of y."""
    stride, padding, dilation = options[:3]
    sizes = zip(x.shape[1:3], weight.shape[1:3], stride, padding, dilation, strict=True)
    h, w = ((size + 2 * p - d * (k - 1) - 1) // s + 1 for size, k, s, p, d in sizes)
    if h < 1 or w < 1:
        raise ArgumentError(f"x is {tuple(x.shape)}: kernel={tuple(weight.shape[1:3])} does not fit into its h and w")
    return x.shape[0], h, w, weight.shape[0]


def _check(x: Tensor, tensors: Sequence[Tensor], residual: Tensor | None, shape: tuple[int, ...], out_dtype: str) -> None:
    """What a module checks of tensors that are of the right types already."""
    for tensor in tensors:
        if tensor.device != x.device:
            raise ArgumentTypeError(f"x is on {x.device}, another tensor on {tensor.device}: one device is needed for all")
    if residual is not None and (residual.dtype != getattr(torch, out_dtype) or tuple(residual.shape) != shape):
        found = f"{residual.dtype} {tuple(residual.shape)}"
        raise ArgumentError(f"residual is {found}: torch.{out_dtype} {shape}, as y, is needed")


def _pair(values: list[int]) -> Pair:
    first, second = values
    return first, second
