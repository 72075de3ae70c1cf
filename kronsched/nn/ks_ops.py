"""The torch custom operator behind `ks_matmul` in a compiled or traced graph.

`kronsched::ks(Tensor x, Tensor[] weights, str layout)` serves any batch, has a fake implementation and a derivative, so that
torch.compile(fullgraph=True) sees one opaque operator for every batch. Eager calls do
not come here: a custom op costs more than a launch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kronsched.nn import ks_autograd


def ks(x: Tensor, weights: Sequence[Tensor], layout: str) -> Tensor:
    """`ks_autograd.product` as one operator."""
    result: Tensor = torch.ops.kronsched.ks(x, list(weights), layout)
    return result


@torch.library.custom_op("kronsched::ks", mutates_args=())
def _ks(x: Tensor, weights: Sequence[Tensor], layout: str) -> Tensor:
    return ks_autograd.run(x, weights, layout)


@_ks.register_fake
def _(x: Tensor, weights: Sequence[Tensor], layout: str) -> Tensor:
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
