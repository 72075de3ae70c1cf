"""The ways in which torch's own matmuls compute one Kronecker-sparse factor: what a kernel of ours competes with.

Read first: `FORMULATIONS`, `prepared`. Each takes a weight (a, b, c, d) and a layout and returns a callable x -> y; whatever can
be done once for a weight is done before. With the pattern (a, b, c, d) and n samples:

    strided_bmm   bmm on views of x and y, nothing is copied          batch-last; batch-first only for d = 1
    bmm           bmm between permutes that copy x and y              both layouts
    dense         x Kᵀ with the matrix K and its zeros                a·d times the arithmetic
    block_dense   bmm with the a diagonal blocks (b·d, c·d) of K      d times the arithmetic
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from kronsched.errors import UnsupportedError
from kronsched.workloads.ks import Pattern

Call = Callable[[Tensor], Tensor]
Formulation = Callable[[Tensor, bool], Call]
"""(weight (a, b, c, d), batch_first) -> x -> y. Raises UnsupportedError where the formulation cannot serve the pattern."""


def strided_bmm(w: Tensor, batch_first: bool) -> Call:
    """torch.bmm on strided views of x and of the output; in batch-last min(a, d) calls (one, unless both a and d exceed 1)."""
    a, b, c, d = w.shape
    if batch_first:
        if d > 1:
            raise UnsupportedError("with d > 1 no axis of a batch-first block has unit stride: bmm would copy")
        columns = w.reshape(a, b, c).transpose(1, 2).contiguous()

        def rows(x: Tensor) -> Tensor:
            y = x.new_empty(x.shape[0], a * b)
            torch.bmm(x.view(-1, a, c).transpose(0, 1), columns, out=y.view(-1, a, b).transpose(0, 1))
            return y

        return rows
    blocks = w.permute(0, 3, 1, 2).contiguous()

    def call(x: Tensor) -> Tensor:
        n = x.shape[1]
        y = x.new_empty(a * b * d, n)
        # [i, l] is one product (b, c) @ (c, n).
        data, result = x.view(a, c, d, n).transpose(1, 2), y.view(a, b, d, n).transpose(1, 2)
        if d <= a:
            for inner in range(d):
                torch.bmm(blocks[:, inner], data[:, inner], out=result[:, inner])
        else:
            for i in range(a):
                torch.bmm(blocks[i], data[i], out=result[i])
        return y

    return call


def bmm(w: Tensor, batch_first: bool) -> Call:
    """torch.bmm between permutes: x is copied into a·d matrices and their products are copied into y."""
    a, b, c, d = w.shape
    if batch_first:
        columns = w.permute(0, 3, 2, 1).reshape(a * d, c, b).contiguous()

        def rows(x: Tensor) -> Tensor:
            n = x.shape[0]
            y = torch.bmm(x.view(n, a, c, d).permute(1, 3, 0, 2).reshape(a * d, n, c), columns)
            return y.view(a, d, n, b).permute(2, 0, 3, 1).reshape(n, a * b * d)

        return rows
    blocks = w.permute(0, 3, 1, 2).reshape(a * d, b, c).contiguous()

    def call(x: Tensor) -> Tensor:
        n = x.shape[1]
        y = torch.bmm(blocks, x.view(a, c, d, n).permute(0, 2, 1, 3).reshape(a * d, c, n))
        return y.view(a, d, b, n).permute(0, 2, 1, 3).reshape(a * b * d, n)

    return call


def dense(w: Tensor, batch_first: bool) -> Call:
    """One matmul with the whole matrix, zeros included."""
    return dense_chain([w], batch_first)


def dense_chain(weights: Sequence[Tensor], batch_first: bool) -> Call:
    """One matmul with the product of the matrices of a chain, the first one applied first; it is rounded once."""
    matrix = dense_matrix(weights[0]) if len(weights) == 1 else _product(weights)
    return (lambda x: x @ matrix.T) if batch_first else (lambda x: matrix @ x)


def block_dense(w: Tensor, batch_first: bool) -> Call:
    """torch.bmm on views with the a diagonal blocks, each with the zeros of its d diagonals. With a = 1 this is `dense`."""
    a, b, c, d = w.shape
    if a == 1 or d == 1:
        raise UnsupportedError("with a = 1 this is the dense matrix, with d = 1 it is strided_bmm")
    blocks = dense_blocks(w).reshape(a, b * d, c * d, 1)
    return strided_bmm(blocks, batch_first)


FORMULATIONS: Mapping[str, Formulation] = {
    "strided_bmm": strided_bmm,
    "bmm": bmm,
    "dense": dense,
    "block_dense": block_dense,
}


def serves(name: str, pattern: Pattern, batch_first: bool) -> bool:
    """Whether a formulation of that name is there for a pattern."""
    a, _, _, d = pattern
    if name == "strided_bmm":
        return d == 1 or not batch_first
    if name == "block_dense":
        return a > 1 and d > 1
    return name in FORMULATIONS


def prepared(name: str, weights: Sequence[Tensor], layout: str) -> Call:
    """X -> y as `ks_matmul` computes it, float32 in full precision. A chain goes factor by factor, but "dense" is one matrix."""
    first = layout == "batch_first"
    calls = [dense_chain(weights, first)] if name == "dense" else [FORMULATIONS[name](w, first) for w in weights]

    def exact(x: Tensor) -> Tensor:
        with full_precision(x):
            for call in calls:
                x = call(x)
        return x

    return exact


def dense_matrix(w: Tensor) -> Tensor:
    """K (a·b·d, a·c·d) of a weight (a, b, c, d)."""
    a, b, c, d = w.shape
    matrix = w.new_zeros(a, b * d, a, c * d)
    matrix.diagonal(dim1=0, dim2=2).copy_(dense_blocks(w).permute(1, 2, 0))
    return matrix.view(a * b * d, a * c * d)


def _product(weights: Sequence[Tensor]) -> Tensor:
    matrix = dense_matrix(weights[0].double())
    for w in weights[1:]:
        matrix = dense_matrix(w.double()) @ matrix
    return matrix.to(weights[0].dtype)


def dense_blocks(w: Tensor) -> Tensor:
    """The diagonal blocks (a, b·d, c·d) of K."""
    a, b, c, d = w.shape
    blocks = w.new_zeros(a, b, d, c, d)
    blocks.diagonal(dim1=2, dim2=4).copy_(w)
    return blocks.view(a, b * d, c * d)


@contextlib.contextmanager
def full_precision(x: Tensor) -> Iterator[None]:
    """float32 and complex64 products of cuBLAS without TF32, whatever the process has allowed; what it allowed is restored."""
    settings = torch.backends.cuda.matmul
    new = hasattr(settings, "fp32_precision")
    allowed = (
        x.is_cuda
        and x.dtype in (torch.float32, torch.complex64)
        and (settings.fp32_precision == "tf32" if new else settings.allow_tf32)
    )
    if not allowed:
        yield
        return
    settings.allow_tf32 = False  # the older setting changes both
    try:
        yield
    finally:
        settings.allow_tf32 = True
        if new:
            settings.fp32_precision = "tf32"
