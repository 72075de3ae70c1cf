"""`ks_matmul`: multiply by a Kronecker-sparse matrix or a chain of them, and what follows; differentiable, for any batch.

Read first: `ks_matmul`. Everything here can be traced by torch.compile.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kronsched.errors import ArgumentError, ArgumentTypeError, choose
from kronsched.nn import checks
from kronsched.nn.functional import _autocast
from kronsched.nn.ks_fused import product_with
from kronsched.workloads.ks import DTYPE_NAMES, LAYOUTS, MAX_FACTORS, Pattern
from kronsched.workloads.ks_epilogue import check_activation

_DTYPES = tuple(getattr(torch, name) for name in DTYPE_NAMES)


def ks_matmul(
    x: Tensor,
    weights: Tensor | Sequence[Tensor],
    patterns: Pattern | Sequence[Pattern] | None = None,
    layout: str = "batch_first",
    bias: Tensor | None = None,
    activation: str | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """Y = act(X Kᵀ + bias) + residual, K the product of Kronecker-sparse matrices, the first one applied first.

    A Kronecker-sparse matrix has the nonzeros of I_a ⊗ 1_{b×c} ⊗ I_d.

    x: (…, a·c·d) with layout "batch_first", (a·c·d, …) with "batch_last", any number of batch dimensions of any size.
    weights: a tensor (a, b, c, d), or 1 to 32 of them, where a·b·d of one equals a·c·d of the next: with x as (n, a, c, d) and
    y as (n, a, b, d), y[n, i, j, l] = Σk x[n, i, k, l] · w[i, j, k, l].  patterns: (a, b, c, d) of each weight, checked against
    the shapes; None takes the shapes.
    bias: (a·b·d,).  activation: None, "relu", "gelu" (x·Φ(x), torch's default) or "silu".  residual: of Y's shape. They are part
    of the kernel: in float32 for 16-bit types, rounded once. Backward computes X Kᵀ + bias again where it needs it, so that
    nothing but Y is written forward; see `kronsched.nn.ks_fused`.
    Returns Y (…, a·b·d) or (a·b·d, …), contiguous.

    Any strides are right; contiguous x is not copied in batch-first. In batch-last a batch that is not a bucket and was not tuned
    costs a copy of x and of y (see `kronsched.nn.ks_dynamic`). All tensors have one dtype (float32, float64, float16, bfloat16;
    16-bit types accumulate in float32; complex64 and complex128, without an activation) and device; under torch.autocast they are
    cast as torch.matmul casts. Differentiable in x and the weights, backwards (twice and more), forwards and under torch.func.
    The first call of a bucket builds a kernel.

    Raises ArgumentError (a ValueError), ArgumentTypeError (a TypeError) or UnsupportedError, naming the argument.
    """
    if layout not in LAYOUTS:
        raise choose("layout", layout, LAYOUTS)
    checks.check_x(x, _DTYPES)
    listed = check_weights(weights)
    if patterns is not None:
        check_patterns(patterns, listed)
    if activation is not None:
        check_activation(activation, checks.name_of(x))
    given = {name: t for name, t in (("bias", bias), ("residual", residual)) if t is not None}
    for name, t in given.items():
        if not isinstance(t, Tensor):
            raise ArgumentTypeError(f"{name} is of type {type(t).__name__}: a torch.Tensor is needed")
    n = len(listed)
    x, listed, _ = _autocast(x, [*listed, *given.values()], None)
    named = dict(zip((*(f"weights[{i}]" for i in range(n)), *given), listed, strict=True))
    for name, t in named.items():
        checks.check_same(name, t, x)
    listed, bias, residual = listed[:n], named.get("bias"), named.get("residual")
    a, _, c, d = listed[0].shape
    first = layout == "batch_first"
    if x.shape[-1 if first else 0] != a * c * d:
        side = "last" if first else "first"
        raise ArgumentError(
            f"x has shape {tuple(x.shape)}: {a * c * d} are needed in the {side} dimension, a·c·d of the first weight {(a, c, d)}"
        )
    batch = x.shape[:-1] if first else x.shape[1:]
    flat = x if x.dim() == 2 else x.reshape((checks.times(batch), a * c * d) if first else (a * c * d, checks.times(batch)))
    y = product_with(flat, listed, layout, bias, activation, _checked(bias, residual, listed[-1], batch, first))
    if x.dim() == 2:
        return y
    return y.reshape((*batch, y.shape[1]) if first else (y.shape[0], *batch))


def _checked(bias: Tensor | None, residual: Tensor | None, last: Tensor, batch: Sequence[int], first: bool) -> Tensor | None:
    """The residual with one batch dimension. The shapes of bias and residual are those of y, the product by the last weight."""
    a, b, _, d = last.shape
    if bias is not None and tuple(bias.shape) != (a * b * d,):
        raise ArgumentError(f"bias has shape {tuple(bias.shape)}, ({a * b * d},) is needed")
    if residual is None:
        return None
    shape = (*batch, a * b * d) if first else (a * b * d, *batch)
    if tuple(residual.shape) != shape:
        raise ArgumentError(f"residual has shape {tuple(residual.shape)}, {shape} is needed, that of y")
    n = checks.times(batch)
    return residual if residual.dim() == 2 else residual.reshape((n, a * b * d) if first else (a * b * d, n))


def check_weights(weights: Any) -> list[Tensor]:
    """The weights as a list: 1 to 32 tensors of four dimensions that fit one after another."""
    if isinstance(weights, Tensor):
        weights = [weights]
    if not isinstance(weights, list | tuple | torch.nn.ParameterList):
        raise ArgumentTypeError(f"weights is of type {type(weights).__name__}: a tensor or a list of tensors is needed")
    listed = list(weights)
    if not 1 <= len(listed) <= MAX_FACTORS:
        raise ArgumentError(f"weights: {len(listed)} given, 1 to {MAX_FACTORS} are allowed")
    before: int | None = None
    for i, w in enumerate(listed):
        if not isinstance(w, Tensor):
            raise ArgumentTypeError(f"weights[{i}] is of type {type(w).__name__}: a torch.Tensor is needed")
        if w.dim() != 4 or 0 in w.shape:
            raise ArgumentError(f"weights[{i}] has shape {tuple(w.shape)}: (a, b, c, d), each ≥ 1, is needed")
        a, b, c, d = w.shape
        if before is not None and a * c * d != before:
            raise ArgumentError(
                f"weights[{i}] has shape {tuple(w.shape)}: it takes a·c·d = {a * c * d} features, "
                f"the one before it gives a·b·d = {before}"
            )
        before = a * b * d
    return listed


def check_patterns(patterns: Any, weights: Sequence[Tensor]) -> None:
    """The patterns are the shapes of the weights."""
    if isinstance(patterns, str) or not isinstance(patterns, list | tuple):
        raise ArgumentTypeError(f"patterns={patterns!r} must be (a, b, c, d) or a sequence of such patterns")
    chained = len(patterns) == 0 or isinstance(patterns[0], list | tuple)
    given = [tuple(p) if isinstance(p, list | tuple) else p for p in (patterns if chained else [patterns])]
    shapes = [tuple(w.shape) for w in weights]
    if given != shapes:
        raise ArgumentError(f"patterns={patterns!r} is not allowed: the weights have the shapes {shapes}")
