"""Small factors shared by the tests of `kronsched.nn`, so that few kernels are built, and the dense product to compare with."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import torch
from torch import Tensor

SHAPES = [(2, 3), (3, 1), (2, 2)]  # rectangular, and no two alike: a wrong order shows


def factors(
    shapes: Sequence[tuple[int, int]] = SHAPES, dtype: torch.dtype = torch.float64, batch: tuple[int, ...] = ()
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(*batch, *pair, generator=generator, dtype=torch.float64).to(dtype) for pair in shapes]


def dense(fs: Sequence[Tensor]) -> Tensor:
    """The Kronecker product of matrices with leading dimensions."""

    def kron(a: Tensor, b: Tensor) -> Tensor:
        t = a[..., :, None, :, None] * b[..., None, :, None, :]
        return t.reshape(*t.shape[:-4], a.shape[-2] * b.shape[-2], a.shape[-1] * b.shape[-1])

    return reduce(kron, fs)


def rows(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)
