"""The product of Kronecker-sparse matrices near a dense matrix: `nearest_ks`.

For two factors whose patterns fit together ("chainable"), the product splits into blocks that share no entry, each of which is
any matrix of rank ≤ r: the best approximation is a truncated SVD of each block (Zheng, Riccietti and Gribonval, "Efficient
identification of butterfly sparse matrix factorizations", SIAM J. Math. Data Science 2023; for Monarch matrices also Dao et
al., "Monarch", ICML 2022). Longer chains are split in two again and again (Lê, Zheng, Riccietti and Gribonval, "Butterfly
factorization with error guarantees", 2024).

    factors (a1, b1, c1, d1) then (a2, b2, c2, d2), a2 | a1, d1 | d2, f = a1/a2, e = d2/d1, r = b1/e = c2/f
    W[i, (j, λ), (α, k), l] ≈ Σρ  W2[i, j, (α, ρ), (λ, l)] · W1[(i, α), (ρ, λ), k, l]       one SVD of b2 × c1 a (i, α, λ, l)

Read first: `nearest_ks`, `_split`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from kronsched.errors import ArgumentError, ArgumentTypeError
from kronsched.nn.checks import name_of
from kronsched.workloads.ks import DTYPE_NAMES, KSMatmul, Pattern, pattern_in, pattern_out


def nearest_ks(matrix: Tensor, patterns: Pattern | Sequence[Pattern]) -> list[Tensor]:
    """Weights (a, b, c, d), the first one applied first, whose product K is near `matrix` (out, in) in the Frobenius norm.

    The best there is for one pattern and for two; a longer chain gives an exact product back and is else near, not nearest.
    Raises ArgumentError for patterns of which one's a is no multiple of the next one's a, or d no divisor of the next one's d, or
    b·d no multiple of the next one's d: their product has overlapping blocks; and for a matrix with NaN or infinity. Computed in
    float64 or complex128, returned in matrix's dtype.
    """
    check_matrix("matrix", matrix)
    chain = KSMatmul(batch=1, pattern=patterns).patterns  # type: ignore[arg-type]
    whole = reduce(product_pattern, chain)
    wanted = (pattern_out(whole), pattern_in(whole))
    if tuple(matrix.shape) != wanted:
        raise ArgumentError(f"matrix has shape {tuple(matrix.shape)}, {wanted} is needed for patterns={list(chain)}")
    with torch.no_grad():
        wide = torch.complex128 if matrix.is_complex() else torch.float64
        weights = _factored(_entries(matrix.to(wide), whole), chain)
        return [w.to(matrix.dtype).contiguous() for w in weights]


def check_matrix(name: str, matrix: Any) -> None:
    """A tensor of finite numbers, of a dtype that layers have."""
    check_dtype_of(name, matrix)
    if matrix.device.type == "meta":
        return
    odd = (~torch.isfinite(matrix.detach())).nonzero()
    if len(odd):
        place = tuple(odd[0].tolist())
        raise ArgumentError(
            f"{name}[{', '.join(map(str, place))}]={matrix[place].item()} is not allowed: finite numbers are needed"
        )


def check_dtype_of(name: str, tensor: Any) -> None:
    """A tensor of a dtype that layers have."""
    if not isinstance(tensor, Tensor):
        raise ArgumentTypeError(f"{name} is of type {type(tensor).__name__}: a torch.Tensor is needed")
    if name_of(tensor) not in DTYPE_NAMES:
        raise ArgumentTypeError(f"{name} has dtype {name_of(tensor)}: choose one of {', '.join(DTYPE_NAMES)}")


def product_pattern(first: Pattern, second: Pattern) -> Pattern:
    """The pattern of the product of two factors, `first` applied first; ArgumentError when it has none."""
    (a1, b1, c1, d1), (a2, b2, _, d2) = first, second
    if a1 % a2 or d2 % d1 or (b1 * d1) % d2:
        raise ArgumentError(
            f"patterns {first} then {second} are not allowed here: a = {a1} must be a multiple of {a2}, "
            f"d = {d2} a multiple of {d1}, and b·d = {b1 * d1} a multiple of {d2}"
        )
    return a2, b2 * (d2 // d1), (a1 // a2) * c1, d1


def _entries(matrix: Tensor, pattern: Pattern) -> Tensor:
    """The entries (a, b, c, d) of a matrix (a·b·d, a·c·d) at the nonzeros of a pattern."""
    a, b, c, d = pattern
    blocks = matrix.reshape(a, b, d, a, c, d)
    return blocks.diagonal(dim1=0, dim2=3).diagonal(dim1=1, dim2=3).permute(2, 0, 1, 3)


def _factored(w: Tensor, chain: Sequence[Pattern]) -> list[Tensor]:
    """The weights of a chain whose product is near the Kronecker-sparse weight w."""
    if len(chain) == 1:
        return [w]
    half = len(chain) // 2
    left, right = chain[:half], chain[half:]
    w1, w2 = _split(w, reduce(product_pattern, left), reduce(product_pattern, right))
    return [*_factored(w1, left), *_factored(w2, right)]


def _split(w: Tensor, first: Pattern, second: Pattern) -> tuple[Tensor, Tensor]:
    """The two weights whose product is nearest to w, of equal norms in each block."""
    (a1, b1, c1, d1), (a2, b2, c2, d2) = first, second
    e, f = d2 // d1, a1 // a2
    rank = b1 // e
    blocks = w.reshape(a2, b2, e, f, c1, d1).permute(0, 3, 2, 5, 1, 4)  # (i, α, λ, l, j, k)
    u, s, vh = torch.linalg.svd(blocks, full_matrices=False)
    kept = min(rank, s.shape[-1])
    root = s[..., :kept].sqrt()
    left = w.new_zeros((*blocks.shape[:4], b2, rank))
    right = w.new_zeros((*blocks.shape[:4], rank, c1))
    left[..., :kept] = u[..., :kept] * root.unsqueeze(-2)
    right[..., :kept, :] = root.unsqueeze(-1) * vh[..., :kept, :]
    w2 = left.permute(0, 4, 1, 5, 2, 3).reshape(a2, b2, c2, d2)  # (i, j, α, ρ, λ, l)
    w1 = right.permute(0, 1, 4, 2, 5, 3).reshape(a1, b1, c1, d1)  # (i, α, ρ, λ, k, l)
    return w1, w2
