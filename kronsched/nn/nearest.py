"""The Kronecker product nearest to a dense matrix (Van Loan and Pitsianis 1993): `nearest_kron`.

Reordering the elements of A so that those which one element of each factor multiplies share an index turns A ≈ F1 ⊗ … ⊗ FN into
a rank-one approximation of a tensor with N axes of Pi·Qi elements. For two factors its answer is the leading singular pair; for
more, peeling off one factor at a time gives a start, and alternating least squares improves it until it settles.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from kronsched.errors import ArgumentError, ArgumentTypeError

_STEPS, _SETTLED = 200, 1e-12


def nearest_kron(matrix: Tensor, shapes: Sequence[tuple[int, int]]) -> list[Tensor]:
    """Factors (Pi, Qi) whose Kronecker product is near `matrix` (ΠPi, ΠQi) in the Frobenius norm, of equal norms.

    The best there is for one and two factors; for more, a local optimum. Computed in float64, returned in the matrix's dtype.
    Raises ArgumentError when the shapes do not multiply to the matrix's.
    """
    if not isinstance(matrix, Tensor):
        raise ArgumentTypeError(f"matrix is of type {type(matrix).__name__}: a torch.Tensor is needed")
    wanted = (prod(p for p, _ in shapes), prod(q for _, q in shapes))
    if not shapes or tuple(matrix.shape) != wanted:
        raise ArgumentError(f"matrix has shape {tuple(matrix.shape)}, {wanted} is needed, the product of shapes={list(shapes)}")
    with torch.no_grad():
        tensor = _reordered(matrix.double(), shapes)
        vectors = _improved(tensor, _peeled(tensor))
        return [v.reshape(pair).to(matrix.dtype).contiguous() for v, pair in zip(_balanced(vectors), shapes, strict=True)]


def _reordered(a: Tensor, shapes: Sequence[tuple[int, int]]) -> Tensor:
    """The tensor (P1·Q1, …, PN·QN) of the elements of A."""
    n = len(shapes)
    split = a.reshape(*(p for p, _ in shapes), *(q for _, q in shapes))
    return split.permute(*(axis for i in range(n) for axis in (i, n + i))).reshape([p * q for p, q in shapes])


def _peeled(tensor: Tensor) -> list[Tensor]:
    """A rank-one start: the leading singular pair of (first axis, the rest), then the same of the rest."""
    vectors, rest = [], tensor
    while rest.dim() > 1:
        u, s, vh = torch.linalg.svd(rest.reshape(rest.shape[0], -1), full_matrices=False)
        vectors.append(u[:, 0])
        rest = (s[0] * vh[0]).reshape(rest.shape[1:])
    return [*vectors, rest]


def _improved(tensor: Tensor, vectors: list[Tensor]) -> list[Tensor]:
    """Alternating least squares: each vector in turn is the best one given the others."""
    if len(vectors) < 3:
        return vectors
    before = float(vectors[-1].norm())
    for _ in range(_STEPS):
        for i in range(len(vectors)):
            best = tensor
            for j in reversed([j for j in range(len(vectors)) if j != i]):
                unit = vectors[j] / vectors[j].norm().clamp_min(torch.finfo(torch.float64).tiny)
                best = torch.tensordot(best, unit, dims=([j], [0]))
            vectors[i] = best
            if i < len(vectors) - 1:
                vectors[i] = best / best.norm().clamp_min(torch.finfo(torch.float64).tiny)
        after = float(vectors[-1].norm())  # the share of the tensor that is explained
        if after - before <= _SETTLED * after:
            break
        before = after
    return vectors


def _balanced(vectors: Sequence[Tensor]) -> list[Tensor]:
    """The same product from vectors of equal norms."""
    norms = [v.norm() for v in vectors]
    total = torch.stack(norms).prod()
    if total == 0:
        return [torch.zeros_like(v) for v in vectors]
    each = total ** (1 / len(vectors))
    return [v * (each / norm) for v, norm in zip(vectors, norms, strict=True)]
