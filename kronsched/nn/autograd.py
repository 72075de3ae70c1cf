"""The differentiable Kron product of batches, and its gradients.

    y = x (F1 ⊗ … ⊗ FN),   dx = dy (F1ᵀ ⊗ … ⊗ FNᵀ),   dFi = Σ over all other axes of  u_i · v_i
    u_i: x with F1 … F(i-1) applied,   v_i: dy with F(i+1)ᵀ … FNᵀ applied

u_(i+1) comes from u_i, and v_(i-1) from v_i, by one factor: all factor gradients take 2N steps. Gradients are made of
differentiable calls, so they can be differentiated again.

Read first: `product` (how a call is dispatched), `gradient`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from math import prod
from typing import Any

import torch
from torch import Tensor

from kronsched.nn.dynamic import kernels_for
from kronsched.runtime.arguments import carries_tangent
from kronsched.workloads.kron import DTYPE_NAMES

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_NAMES = {getattr(torch, name): name for name in DTYPE_NAMES}


def product(x: Tensor, factors: Sequence[Tensor]) -> Tensor:
    """Y (M, ΠQi) from x (M, ΠPi) and Fi (Pi, Qi); or all with one more leading dimension, a product for each. Differentiable.

    All arguments have one dtype and device and are checked by the caller.
    """
    tensors = (x, *factors)
    if is_recorded(tensors):
        from kronsched.nn import ops

        return ops.kron(x, factors)
    if any(torch._C._functorch.is_legacy_batchedtensor(t) for t in tensors):
        return _by_torch(x, factors)
    if is_tracked(tensors):
        result: Tensor = _Kron.apply(x, *factors)  # type: ignore[no-untyped-call]
        return result
    return run(x, factors)


def is_recorded(tensors: Sequence[Tensor]) -> bool:
    """Whether something records or replaces what torch does (torch.compile, make_fx, a subclass): it must see an operator."""
    if torch.compiler.is_compiling() or any(type(t) not in _PLAIN or t.is_meta for t in tensors):
        return True
    return torch._C._len_torch_dispatch_stack() > 0 or torch._C._get_tracing_state() is not None


def is_tracked(tensors: Sequence[Tensor]) -> bool:
    """Whether autograd, forward-mode differentiation or a torch.func transform has to see the call."""
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        return True
    if any(torch._C._functorch.is_functorch_wrapped_tensor(t) for t in tensors):
        return True
    return torch.autograd.forward_ad._current_level >= 0 and any(carries_tangent(t) for t in tensors)


def run(x: Tensor, factors: Sequence[Tensor], out: Tensor | None = None) -> Tensor:
    """`product` by the kernels, without autograd; `out` is contiguous and apart from the inputs."""
    shapes = tuple((f.shape[-2], f.shape[-1]) for f in factors)
    if x.numel() == 0:
        return x.new_empty((*x.shape[:-1], prod(q for _, q in shapes))) if out is None else out
    device = x.device
    kernels = kernels_for(shapes, _NAMES[x.dtype], f"cuda:{device.index}" if device.type == "cuda" else device.type)
    if torch.autograd.forward_ad._current_level >= 0:  # the caller has seen to tangents; a kernel refuses them
        x, factors = x.detach(), [f.detach() for f in factors]
    if x.dim() == 2:
        return kernels(x, factors, out)
    if out is None:
        out = x.new_empty((*x.shape[:-1], kernels.k_out))
    for xs, ys, *fs in zip(x, out, *factors, strict=True):
        kernels(xs, fs, ys)
    return out


def _by_torch(x: Tensor, factors: Sequence[Tensor]) -> Tensor:
    """`product` by torch, for the batches of is_grads_batched=True: they have no memory to give to a kernel."""
    if x.dim() == 2:
        return _by_torch(x.unsqueeze(0), [f.unsqueeze(0) for f in factors]).squeeze(0)
    length, m = x.shape[:2]
    before = m
    for i, f in enumerate(factors):
        x = _contract(x.reshape(length, before, f.shape[1], prod(g.shape[1] for g in factors[i + 1 :])), f)
        before *= f.shape[2]
    return x.reshape(length, m, prod(f.shape[2] for f in factors))


class _Kron(torch.autograd.Function):
    """`product` in eager mode: backward, double backward, forward mode and vmap."""

    @staticmethod
    def forward(x: Tensor, *factors: Tensor) -> Tensor:
        if is_recorded((x, *factors)):
            from kronsched.nn import ops

            return ops.kron(x, factors)
        return run(x, factors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, *factors = ctx.saved_tensors
        return tuple(gradient(x, factors, grads[0], ctx.needs_input_grad))

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> Tensor:
        x, *factors = ctx.saved_tensors
        terms = [product(tangents[0], factors)] if tangents[0] is not None else []
        for i, tangent in enumerate(tangents[1:]):
            if tangent is not None:
                terms.append(product(x, [*factors[:i], tangent, *factors[i + 1 :]]))
        total: Tensor = sum(terms[1:], start=terms[0])
        return total

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], x: Tensor, *factors: Tensor) -> tuple[Tensor, int]:
        if in_dims[0] is not None and all(dim is None for dim in in_dims[1:]):  # more rows
            rows = x.movedim(in_dims[0], -3)
            size, m, _ = rows.shape[-3:]
            y = product(rows.flatten(-3, -2), factors)
            return y.reshape(*y.shape[:-2], size, m, y.shape[-1]), y.dim() - 2

        def stacked(t: Tensor, dim: int | None) -> Tensor:
            return t.unsqueeze(0).expand(info.batch_size, *t.shape) if dim is None else t.movedim(dim, 0)

        xs, *fs = (stacked(t, dim) for t, dim in zip((x, *factors), in_dims, strict=True))
        if xs.dim() == 3:
            return product(xs, fs), 0
        y = product(xs.flatten(0, 1), [f.flatten(0, 1) for f in fs])
        return y.reshape(*xs.shape[:2], *y.shape[1:]), 0


# -- gradients ------------------------------------------------------------------------------------------


def gradient(x: Tensor, factors: Sequence[Tensor], grad: Tensor, needs: Sequence[bool]) -> list[Tensor | None]:
    """The gradients of x and of each factor from `grad`, that of y; None where `needs` (x first) says that it is not needed."""
    kind = x.device.type
    with torch.autocast(kind, enabled=False) if kind in ("cpu", "cuda") else nullcontext():
        result = [product(grad, [f.mT for f in factors]) if needs[0] else None]
        if any(needs[1:]):
            return result + _factor_gradients(x, factors, grad, needs[1:])
        return result + [None] * len(factors)


def of_module(inputs: Sequence[Tensor], grad: Tensor, needs: Sequence[bool]) -> list[Tensor | None]:
    """The gradients of a TunedModule's inputs x (M, ΠPi) and Fi (Pi, Qi); see `KronMatmul.gradient`."""
    return gradient(inputs[0], inputs[1:], grad, needs)


def _factor_gradients(x: Tensor, factors: Sequence[Tensor], grad: Tensor, wanted: Sequence[bool]) -> list[Tensor | None]:
    if x.dim() == 2:
        found = _factor_gradients(x.unsqueeze(0), [f.unsqueeze(0) for f in factors], grad.unsqueeze(0), wanted)
        return [g if g is None else g.squeeze(0) for g in found]
    dtype = x.dtype
    if x.device.type == "cpu" and dtype in (torch.float16, torch.bfloat16):  # torch sums some of these in 16 bits there
        x, grad, factors = x.float(), grad.float(), [f.float() for f in factors]
    first, last = wanted.index(True), len(wanted) - 1 - wanted[::-1].index(True)
    # u_i and v_i as (L, rows and axes contracted before, axis i, axes after).
    length, m = x.shape[:2]
    before = [m * prod(f.shape[2] for f in factors[:i]) for i in range(len(factors))]
    after = [prod(f.shape[1] for f in factors[i + 1 :]) for i in range(len(factors))]
    right: dict[int, Tensor] = {}
    v = grad
    for i in range(len(factors) - 1, first - 1, -1):
        v = v.reshape(length, before[i], factors[i].shape[2], after[i])
        if wanted[i]:
            right[i] = v
        if i > first:
            v = _contract(v, factors[i].mT)
    result: list[Tensor | None] = [None] * len(factors)
    u = x
    for i in range(last + 1):
        u = u.reshape(length, before[i], factors[i].shape[1], after[i])
        if wanted[i]:
            result[i] = _outer(u, right.pop(i)).to(dtype)
        if i < last:
            u = _contract(u, factors[i])
    return result


def _contract(t: Tensor, factor: Tensor) -> Tensor:
    """(L, a, q, b) from t (L, a, p, b) and factor (L, p, q)."""
    if t.shape[3] == 1:
        return (t.squeeze(3) @ factor).unsqueeze(3)
    return factor.mT.unsqueeze(1) @ t


def _outer(u: Tensor, v: Tensor) -> Tensor:
    """(L, p, q): Σ over a and b of u (L, a, p, b) · v (L, a, q, b)."""
    if u.shape[3] == 1:
        return u.squeeze(3).mT @ v.squeeze(3)
    n = u.shape[1] * u.shape[3]
    left = u.transpose(1, 2).reshape(u.shape[0], u.shape[2], n)
    return left @ v.transpose(1, 2).reshape(v.shape[0], v.shape[2], n).mT
