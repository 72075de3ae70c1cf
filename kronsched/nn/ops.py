"""The torch custom operator behind `kron_matmul` in a compiled or traced graph: `kronsched::kron(Tensor x, Tensor[] factors)`.

It serves any number of rows, has a fake implementation and a derivative, so that torch.compile(fullgraph=True) sees one opaque
operator for every batch size. Eager calls do not come here: a custom op costs more than a launch.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from kronsched.nn import autograd


def kron(x: Tensor, factors: Sequence[Tensor]) -> Tensor:
    """`autograd.product` as one operator."""
    result: Tensor = torch.ops.kronsched.kron(x, list(factors))
    return result


@torch.library.custom_op("kronsched::kron", mutates_args=())
def _kron(x: Tensor, factors: Sequence[Tensor]) -> Tensor:
    return autograd.run(x, factors)


@_kron.register_fake
def _(x: Tensor, factors: Sequence[Tensor]) -> Tensor:
    return x.new_empty((*x.shape[:-1], prod(f.shape[-1] for f in factors)))


def _setup_context(ctx: Any, inputs: tuple[Tensor, list[Tensor]], output: Tensor) -> None:
    x, factors = inputs
    ctx.save_for_backward(x, *factors)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, list[Tensor | None]]:
    x, *factors = ctx.saved_tensors
    of_x, of_factors = ctx.needs_input_grad
    dx, *dfactors = autograd.gradient(x, factors, grad, [of_x, *of_factors])
    return dx, dfactors


_kron.register_autograd(_backward, setup_context=_setup_context)
