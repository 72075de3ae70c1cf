"""The Kronecker-sparse product with what follows it, act(K x + bias) + residual, in one kernel and differentiable.

    dz = dy · act'(z),   dbias = Σ over samples of dz,   dresidual = dy,   the rest as in ks_autograd.py with dz for dy

The forward pass writes nothing but y. The backward pass computes z = K x + bias once more, by one product, where act' needs it
(gelu, silu, relu before a residual); relu at the end needs only the sign of y. Where a transform of torch.func or forward-mode
differentiation is at work, the parts run one by one.

Read first: `product_with` (how a call is dispatched), `gradient_with`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kronsched.nn.autograd import is_recorded
from kronsched.nn.ks_autograd import _FIRST, _NAMES, _pattern, gradient, product
from kronsched.nn.ks_fused_kernels import fused_for
from kronsched.workloads.ks_epilogue import Epilogue, finished


def product_with(
    x: Tensor, weights: Sequence[Tensor], layout: str, bias: Tensor | None, activation: str | None, residual: Tensor | None
) -> Tensor:
    """`ks_autograd.product`, then bias (features,), activation and residual (of y's shape). Differentiable.

    All arguments have one dtype and device and are checked by the caller.
    """
    if bias is None and activation is None and residual is None:
        return product(x, weights, layout)
    recording = torch.is_grad_enabled()
    if len(weights) > 1 and recording and any(w.requires_grad for w in weights):
        x, weights = product(x, weights[:-1], layout), weights[-1:]
    tensors = [x, *weights, *(t for t in (bias, residual) if t is not None)]
    if is_recorded(tensors):
        from kronsched.nn import ks_ops

        return ks_ops.ks_fused(x, weights, layout, bias, activation, residual)
    if _is_transformed(tensors):
        return finished(product(x, weights, layout), activation, bias, residual, layout == _FIRST)
    if recording and any(t.requires_grad for t in tensors):
        result: Tensor = _Fused.apply(layout, activation, bias, residual, x, *weights)  # type: ignore[no-untyped-call]
        return result
    return run_with(x, weights, layout, bias, activation, residual, keep=True)


def _is_transformed(tensors: Sequence[Tensor]) -> bool:
    """Whether something other than autograd's backward mode has to see each part."""
    if torch.autograd.forward_ad._current_level >= 0:
        return True
    functorch = torch._C._functorch
    return any(functorch.is_functorch_wrapped_tensor(t) or functorch.is_legacy_batchedtensor(t) for t in tensors)


def run_with(
    x: Tensor,
    weights: Sequence[Tensor],
    layout: str,
    bias: Tensor | None,
    activation: str | None,
    residual: Tensor | None,
    keep: bool = False,
) -> Tensor:
    """`product_with` by the kernels, without autograd. keep: see `KSKernels.__call__`."""
    patterns = tuple(_pattern(w) for w in weights)
    if x.numel() == 0:
        a, b, _, d = patterns[-1]
        return x.new_empty((x.shape[0], a * b * d) if layout == _FIRST else (a * b * d, x.shape[1]))
    device = x.device
    name = f"cuda:{device.index}" if device.type == "cuda" else device.type
    epilogue = Epilogue(bias is not None, activation, residual is not None)
    return fused_for(patterns, layout, _NAMES[x.dtype], name, epilogue)(x, weights, bias, residual, keep)


class _Fused(torch.autograd.Function):
    """`product_with` in eager mode: backward and double backward."""

    @staticmethod
    def forward(
        layout: str, activation: str | None, bias: Tensor | None, residual: Tensor | None, x: Tensor, *weights: Tensor
    ) -> Tensor:
        return run_with(x, weights, layout, bias, activation, residual)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.layout, ctx.activation, bias, residual, x, *weights = inputs
        ctx.save_for_backward(output if needs_output(ctx.activation, residual) else None, bias, x, *weights)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        y, bias, x, *weights = ctx.saved_tensors
        of_bias, of_residual, *rest = ctx.needs_input_grad[2:]
        needs = (*rest, of_bias, of_residual)
        *found, dbias, dresidual = gradient_with(x, weights, bias, y, grads[0], needs, ctx.layout, ctx.activation)
        return (None, None, dbias, dresidual, *found)


# -- gradients ------------------------------------------------------------------------------------------


def needs_output(activation: str | None, residual: Any) -> bool:
    """Whether the gradient is taken from the sign of y."""
    return activation == "relu" and residual is None


def gradient_with(
    x: Tensor,
    weights: Sequence[Tensor],
    bias: Tensor | None,
    y: Tensor | None,
    grad: Tensor,
    needs: Sequence[bool],
    layout: str,
    activation: str | None,
) -> list[Tensor | None]:
    """The gradients of x, each weight, bias and residual from `grad`, that of y; None where `needs` says so (same order).

    y: where `needs_output`; else z is computed again. Made of differentiable calls.
    """
    *rest, of_bias, of_residual = needs
    kind, none = x.device.type, [None] * len(rest)
    with torch.autocast(kind, enabled=False) if kind in ("cpu", "cuda") else nullcontext():
        if not any((*rest, of_bias)):
            return [*none, None, grad if of_residual else None]
        dz = grad
        if activation is not None:
            dz = _before(activation, grad, product_with(x, weights, layout, bias, None, None) if y is None else y)
        found = gradient(x, weights, dz, rest, layout) if any(rest) else none
        dbias = dz.sum(0 if layout == _FIRST else 1) if of_bias else None
        return [*found, dbias, grad if of_residual else None]


def _before(activation: str, grad: Tensor, z: Tensor) -> Tensor:
    """The gradient of z from that of act(z); of relu, z may be act(z)."""
    aten = torch.ops.aten
    if activation == "relu":
        result: Tensor = aten.threshold_backward(grad, z, 0)
        return result
    if activation == "silu" and torch.is_grad_enabled():  # torch's operator has no derivative
        sigmoid = torch.sigmoid(z)
        return grad * sigmoid * (1 + z * (1 - sigmoid))
    result = aten.gelu_backward(grad, z) if activation == "gelu" else aten.silu_backward(grad, z)
    return result


def _of_module(layout: str, activation: str | None, inputs: Sequence[Tensor], grad: Tensor, needs: Sequence[bool]) -> list[Any]:
    """The gradients of a TunedModule's inputs x, weights, bias and residual (told apart by their dimensions)."""
    x, weights = inputs[0], [t for t in inputs[1:] if t.dim() == 4]
    more = inputs[1 + len(weights) :]
    bias = more[0] if more and more[0].dim() == 1 else None
    given = [*needs[: 1 + len(weights)], False, False]
    for t, need in zip(more, needs[1 + len(weights) :], strict=True):
        given[-2 if t is bias else -1] = need
    *found, dbias, dresidual = gradient_with(x, weights, bias, None, grad, given, layout, activation)
    return [*found, *((dbias,) if bias is not None else ()), *((dresidual,) if len(more) > (bias is not None) else ())]


of_batch_first_identity = partial(_of_module, "batch_first", None)
of_batch_first_relu = partial(_of_module, "batch_first", "relu")
of_batch_first_gelu = partial(_of_module, "batch_first", "gelu")
of_batch_first_silu = partial(_of_module, "batch_first", "silu")
of_batch_last_identity = partial(_of_module, "batch_last", None)
of_batch_last_relu = partial(_of_module, "batch_last", "relu")
of_batch_last_gelu = partial(_of_module, "batch_last", "gelu")
of_batch_last_silu = partial(_of_module, "batch_last", "silu")
"""See `KSMatmul.gradient`."""
