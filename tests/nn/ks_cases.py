"""Small Kronecker-sparse weights shared by the tests, so that few kernels are built, and the dense product to compare with."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

CHAIN = [(2, 3, 2, 1), (1, 4, 3, 2)]  # 4 -> 6 -> 8 features, no two sizes of a pattern alike but by need
ONE = [(2, 3, 1, 2)]  # 4 -> 12
LAYOUTS = ["batch_first", "batch_last"]


def weights(patterns: Sequence[tuple[int, ...]] = CHAIN, dtype: torch.dtype = torch.float64, seed: int = 7) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*p, generator=generator, dtype=torch.float64).to(dtype) for p in patterns]


def dense(w: Tensor) -> Tensor:
    """The matrix (a·b·d, a·c·d) of one weight, entry by entry from the definition."""
    a, b, c, d = w.shape
    k = w.new_zeros(a * b * d, a * c * d)
    for i in range(a):
        for j in range(b):
            for m in range(c):
                for n in range(d):
                    k[(i * b + j) * d + n, (i * c + m) * d + n] = w[i, j, m, n]
    return k


def whole(ws: Sequence[Tensor]) -> Tensor:
    """The matrix of a chain, the first weight applied first."""
    k = dense(ws[0])
    for w in ws[1:]:
        k = dense(w) @ k
    return k


def data(n: int, features: int, layout: str, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    x = torch.randn(n, features, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)
    return x if layout == "batch_first" else x.T.contiguous()


def first(t: Tensor, layout: str) -> Tensor:
    """A tensor of samples and features with the samples first."""
    return t if layout == "batch_first" else t.T
