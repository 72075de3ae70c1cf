"""The differentiable Kronecker-sparse product, and its gradients.

    y = K_N … K_1 x,   dx = K_1ᵀ … K_Nᵀ dy,   dW_i[·, j, k, l] = Σ over samples of  v_i[·, j, l] · u_i[·, k, l]
    u_i: x with K_1 … K_(i-1) applied,   v_i: dy with K_Nᵀ … K_(i+1)ᵀ applied;   complex: K and u_i conjugated in dx, v_i and dW_i

The transpose of a factor with pattern (a, b, c, d) has pattern (a, c, b, d) and the weight with its middle axes exchanged, so dx
comes from the same kernels. Weight gradients have kernels of their own (ks_wgrad.py). Gradients are made of differentiable
calls, so they can be differentiated again.

Read first: `product` (how a call is dispatched), `gradient`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from kronsched.nn.autograd import is_recorded, is_tracked
from kronsched.nn.ks_dynamic import kernels_for
from kronsched.nn.ks_wgrad import weight_gradient
from kronsched.workloads.ks import DTYPE_NAMES, Pattern
from kronsched.workloads.ks_wgrad import blocks

_NAMES = {getattr(torch, name): name for name in DTYPE_NAMES}
_FIRST = "batch_first"


def product(x: Tensor, weights: Sequence[Tensor], layout: str) -> Tensor:
    """Y of x, (n, features) or (features, n) by the layout, and of weights (a, b, c, d), first applied first. Differentiable.

    All arguments have one dtype and device and are checked by the caller. A chain whose weights are trained runs factor by
    factor, because what is between the factors is needed for their gradients; else it is one call.
    """
    if len(weights) > 1 and torch.is_grad_enabled() and any(w.requires_grad for w in weights):
        for w in weights:
            x = product(x, [w], layout)
        return x
    tensors = (x, *weights)
    if is_recorded(tensors):
        from kronsched.nn import ks_ops

        return ks_ops.ks(x, weights, layout)
    if any(torch._C._functorch.is_legacy_batchedtensor(t) for t in tensors):
        return by_torch(x, weights, layout)
    if is_tracked(tensors):
        result: Tensor = _KS.apply(layout, x, *weights)  # type: ignore[no-untyped-call]
        return result
    return run(x, weights, layout, keep=True)


def run(x: Tensor, weights: Sequence[Tensor], layout: str, keep: bool = False) -> Tensor:
    """`product` by the kernels, without autograd. keep: see `KSKernels.__call__`."""
    patterns = tuple(_pattern(w) for w in weights)
    if x.numel() == 0:
        a, b, _, d = patterns[-1]
        return x.new_empty((x.shape[0], a * b * d) if layout == _FIRST else (a * b * d, x.shape[1]))
    device = x.device
    name = f"cuda:{device.index}" if device.type == "cuda" else device.type
    kernels = kernels_for(patterns, layout, _NAMES[x.dtype], name)
    if torch.autograd.forward_ad._current_level >= 0:  # the caller has seen to tangents; a kernel refuses them
        x, weights = x.detach(), [w.detach() for w in weights]
    return kernels(x, weights, keep=keep)


def by_torch(x: Tensor, weights: Sequence[Tensor], layout: str) -> Tensor:
    """`product` by torch.bmm: for tensors that have no memory to give to a kernel (the batches of is_grads_batched=True)."""
    for w in weights:
        a, b, c, d = w.shape
        n = x.shape[0] if layout == _FIRST else x.shape[1]
        y = torch.bmm(blocks(x, (a, c, d), layout == _FIRST), w.permute(0, 3, 2, 1).reshape(a * d, c, b)).reshape(a, d, n, b)
        x = y.permute(2, 0, 3, 1).reshape(n, a * b * d) if layout == _FIRST else y.permute(0, 3, 1, 2).reshape(a * b * d, n)
    return x


def _pattern(w: Tensor) -> Pattern:
    a, b, c, d = w.shape
    return a, b, c, d


class _KS(torch.autograd.Function):
    """`product` in eager mode: backward, double backward, forward mode and vmap."""

    @staticmethod
    def forward(layout: str, x: Tensor, *weights: Tensor) -> Tensor:
        if is_recorded((x, *weights)):
            from kronsched.nn import ks_ops

            return ks_ops.ks(x, weights, layout)
        return run(x, weights, layout)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.layout, *tensors = inputs
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, *weights = ctx.saved_tensors
        return (None, *gradient(x, weights, grads[0], ctx.needs_input_grad[1:], ctx.layout))

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> Tensor:
        x, *weights = ctx.saved_tensors
        terms = [product(tangents[1], weights, ctx.layout)] if tangents[1] is not None else []
        for i, tangent in enumerate(tangents[2:]):
            if tangent is not None:
                terms.append(product(x, [*weights[:i], tangent, *weights[i + 1 :]], ctx.layout))
        total: Tensor = sum(terms[1:], start=terms[0])
        return total

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], layout: str, x: Tensor, *weights: Tensor) -> tuple[Tensor, int]:
        if all(dim is None for dim in in_dims[2:]):
            return _more_samples(x, in_dims[1], weights, layout)
        return _more_blocks(info.batch_size, in_dims[1:], x, weights, layout)


def _more_samples(x: Tensor, dim: int | None, weights: Sequence[Tensor], layout: str) -> tuple[Tensor, int]:
    """A batch of x alone is more samples."""
    assert dim is not None
    first = layout == _FIRST
    stacked = x.movedim(dim, 0 if first else 1)
    y = product(stacked.flatten(0, 1) if first else stacked.flatten(1, 2), weights, layout)
    return (y.reshape(*stacked.shape[:2], y.shape[1]), 0) if first else (y.reshape(y.shape[0], *stacked.shape[1:]), 1)


def _more_blocks(
    size: int, in_dims: Sequence[int | None], x: Tensor, weights: Sequence[Tensor], layout: str
) -> tuple[Tensor, int]:
    """A batch of weights is a product with `size` times as many diagonal blocks a."""

    def stacked(t: Tensor, dim: int | None) -> Tensor:
        return t.unsqueeze(0).expand(size, *t.shape) if dim is None else t.movedim(dim, 0)

    xs, *ws = (stacked(t, dim) for t, dim in zip((x, *weights), in_dims, strict=True))
    many = [w.flatten(0, 1) for w in ws]
    if layout == _FIRST:
        y = product(xs.movedim(0, 1).flatten(1, 2), many, layout)
        return y.reshape(xs.shape[1], size, y.shape[1] // size), 1
    y = product(xs.flatten(0, 1), many, layout)
    return y.reshape(size, y.shape[0] // size, xs.shape[2]), 0


# -- gradients ------------------------------------------------------------------------------------------


def gradient(x: Tensor, weights: Sequence[Tensor], grad: Tensor, needs: Sequence[bool], layout: str) -> list[Tensor | None]:
    """The gradients of x and of each weight from `grad`, that of y; None where `needs` (x first) says that it is not needed."""
    kind = x.device.type
    with torch.autocast(kind, enabled=False) if kind in ("cpu", "cuda") else nullcontext():
        flipped = [_conjugate(w.transpose(1, 2)) for w in weights]
        if not any(needs[1:]):
            return [product(grad, flipped[::-1], layout) if needs[0] else None, *[None] * len(weights)]
        wanted = [i for i, need in enumerate(needs[1:]) if need]
        result: list[Tensor | None] = [None] * (len(weights) + 1)
        right: dict[int, Tensor] = {}
        v = grad
        for i in range(len(weights) - 1, -1, -1):
            right[i] = v
            if needs[0] or i > wanted[0]:
                v = product(v, [flipped[i]], layout)
        result[0] = v if needs[0] else None
        u = x
        for i in range(wanted[-1] + 1):
            if i in wanted:
                result[i + 1] = weight_gradient(right[i], _conjugate(u), _pattern(weights[i]), layout)
            if i < wanted[-1]:
                u = product(u, [weights[i]], layout)
        return result


def _conjugate(t: Tensor) -> Tensor:
    """The complex conjugate, in memory of its own: kernels do not look at torch's conjugate bit. A real tensor as it is."""
    return torch.conj_physical(t) if t.is_complex() else t


def of_batch_first(inputs: Sequence[Tensor], grad: Tensor, needs: Sequence[bool]) -> list[Tensor | None]:
    """The gradients of a batch-first TunedModule's inputs x and weights; see `KSMatmul.gradient`."""
    return gradient(inputs[0], inputs[1:], grad, needs, "batch_first")


def of_batch_last(inputs: Sequence[Tensor], grad: Tensor, needs: Sequence[bool]) -> list[Tensor | None]:
    """The gradients of a batch-last TunedModule's inputs x and weights; see `KSMatmul.gradient`."""
    return gradient(inputs[0], inputs[1:], grad, needs, "batch_last")
