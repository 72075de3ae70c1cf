"""The torch custom operators behind `ks_matmul` in a compiled or traced graph.

`kronsched::ks(Tensor x, Tensor[] weights, str layout)`, `kronsched::ks_fused` with bias, activation and residual, and
`kronsched::ks_wgrad(Tensor g, Tensor x, int[] pattern, str layout)`, the gradient of a weight on a GPU, serve any batch, have a
fake implementation and a derivative, so that torch.compile(fullgraph=True) sees one opaque operator for every batch. Eager calls
do not come here: a custom op costs more than a launch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kronsched.nn import ks_autograd
from kronsched.nn.ks_wgrad import gradients as wgrad_gradients
from kronsched.nn.ks_wgrad import run as run_wgrad


def ks(x: Tensor, weights: Sequence[Tensor], layout: str) -> Tensor:
    """`ks_autograd.product` as one operator."""
    result: Tensor = torch.ops.kronsched.ks(x, list(weights), layout)
    return result


@torch.library.custom_op("kronsched::ks", mutates_args=())
def _ks(x: Tensor, weights: Sequence[Tensor], layout: str) -> Tensor:
    return ks_autograd.run(x, weights, layout)


@_ks.register_fake
def _empty(x: Tensor, weights: Sequence[Tensor], layout: str) -> Tensor:
    a, b, _, d = weights[-1].shape
    return x.new_empty((x.shape[0], a * b * d) if layout == "batch_first" else (a * b * d, x.shape[1]))


def _setup_context(ctx: Any, inputs: tuple[Tensor, list[Tensor], str], output: Tensor) -> None:
    x, weights, ctx.layout = inputs
    ctx.save_for_backward(x, *weights)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, list[Tensor | None], None]:
    x, *weights = ctx.saved_tensors
    of_x, of_weights, _ = ctx.needs_input_grad
    dx, *dweights = ks_autograd.gradient(x, weights, grad, [of_x, *of_weights], ctx.layout)
    return dx, dweights, None


_ks.register_autograd(_backward, setup_context=_setup_context)


# -- weight gradients ------------------------------------------------------------------------------------


def ks_wgrad(g: Tensor, x: Tensor, pattern: Sequence[int], layout: str) -> Tensor:
    """`ks_wgrad.weight_gradient` as one operator."""
    result: Tensor = torch.ops.kronsched.ks_wgrad(g, x, list(pattern), layout)
    return result


@torch.library.custom_op("kronsched::ks_wgrad", mutates_args=())
def _ks_wgrad(g: Tensor, x: Tensor, pattern: Sequence[int], layout: str) -> Tensor:
    a, b, c, d = pattern
    return run_wgrad(g, x, (a, b, c, d), layout).contiguous()


@_ks_wgrad.register_fake
def _(g: Tensor, x: Tensor, pattern: Sequence[int], layout: str) -> Tensor:
    return x.new_empty(list(pattern))


def _setup_wgrad(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    g, x, _, ctx.layout = inputs
    ctx.save_for_backward(g, x)


def _backward_wgrad(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    g, x = ctx.saved_tensors
    return (*wgrad_gradients(g, x, grad, ctx.layout), None, None)


_ks_wgrad.register_autograd(_backward_wgrad, setup_context=_setup_wgrad)


# -- with an epilogue -----------------------------------------------------------------------------------


def ks_fused(
    x: Tensor, weights: Sequence[Tensor], layout: str, bias: Tensor | None, activation: str | None, residual: Tensor | None
) -> Tensor:
    """`ks_fused.product_with` as one operator."""
    result: Tensor = torch.ops.kronsched.ks_fused(x, list(weights), layout, bias, activation, residual)
    return result


@torch.library.custom_op("kronsched::ks_fused", mutates_args=())
def _ks_fused(
    x: Tensor, weights: Sequence[Tensor], layout: str, bias: Tensor | None, activation: str | None, residual: Tensor | None
) -> Tensor:
    from kronsched.nn.ks_fused import run_with

    return run_with(x, weights, layout, bias, activation, residual)


@_ks_fused.register_fake
def _(
    x: Tensor, weights: Sequence[Tensor], layout: str, bias: Tensor | None, activation: str | None, residual: Tensor | None
) -> Tensor:
    result: Tensor = _empty(x, weights, layout)
    return result


def _setup_fused(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    from kronsched.nn.ks_fused import needs_output

    x, weights, ctx.layout, bias, ctx.activation, residual = inputs
    ctx.save_for_backward(output if needs_output(ctx.activation, residual) else None, bias, x, *weights)


def _backward_fused(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    from kronsched.nn.ks_fused import gradient_with

    y, bias, x, *weights = ctx.saved_tensors
    of_x, of_weights, _, of_bias, _, of_residual = ctx.needs_input_grad
    needs = [of_x, *of_weights, of_bias, of_residual]
    dx, *dweights, dbias, dresidual = gradient_with(x, weights, bias, y, grad, needs, ctx.layout, ctx.activation)
    return dx, dweights, None, dbias, None, dresidual


_ks_fused.register_autograd(_backward_fused, setup_context=_setup_fused)
