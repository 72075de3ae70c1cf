"""`MonarchLinear` and `ButterflyLinear`: `KSLinear` with the patterns of Monarch and butterfly matrices.

    Monarch (Dao et al., ICML 2022)      (k, q, in/k, 1)  then  (1, out/l, k·q/l, l)
    butterfly of radices p1 … pN         (n/p1, p1, p1, 1), (n/(p1·p2), p2, p2, p1), …, (1, pN, pN, n/pN)

Both are products for which `from_dense` is a projection; see `kronsched.nn.nearest_ks`.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, Self

import torch
from torch import Tensor

from kronsched.errors import ArgumentError, ArgumentTypeError
from kronsched.nn.checks import name_of
from kronsched.nn.ks_linear import KSLinear
from kronsched.nn.ks_nearest import check_dtype_of, check_matrix, nearest_ks
from kronsched.workloads.ks import Pattern, pattern_in


class MonarchLinear(KSLinear):
    """A Monarch layer: block-diagonal, permutation, block-diagonal, permutation, as two Kronecker-sparse factors.

    in_features, out_features: any; rounded up to multiples of `blocks` inside, as fly's MonarchLinear does (x gets zeros, y is
    cut).  blocks: blocks of both factors.  width: outputs of a block of the first factor; the default is the smaller one of
    in_features/blocks and out_features/blocks, as in fly. The rank of each block of the product is width/blocks, so width must be
    a multiple of blocks for `from_dense`.  bias, layout, device, dtype, activation: as in `KSLinear`.
    Raises ArgumentError or ArgumentTypeError naming the argument.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        blocks: int = 4,
        width: int | None = None,
        bias: bool = True,
        layout: str = "batch_first",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        activation: str | None = None,
    ) -> None:
        """Make the layer; see the class."""
        for name, value in (("in_features", in_features), ("out_features", out_features), ("blocks", blocks)):
            _check_size(name, value)
        p, s = -(-in_features // blocks), -(-out_features // blocks)
        q = min(p, s) if width is None else width
        _check_size("width", q)
        patterns = [(blocks, q, p, 1), (1, s, q, blocks)]
        super().__init__(patterns, bias=False, layout=layout, device=device, dtype=dtype, activation=activation)
        self._narrow(in_features, out_features, bias)

    def _narrow(self, in_features: int, out_features: int, bias: bool) -> None:
        """Serve fewer features than the patterns have."""
        self.in_features, self.out_features = in_features, out_features
        self._make_bias(bias)
        self.reset_parameters()

    @classmethod
    def from_dense(  # type: ignore[override]
        cls,
        weight: Tensor,
        blocks: int = 4,
        width: int | None = None,
        bias: Tensor | None = None,
        layout: str = "batch_first",
    ) -> Self:
        """The layer nearest to a dense one: weight (out_features, in_features) as in nn.Linear; width a multiple of blocks."""
        check_matrix("weight", weight)
        if weight.dim() != 2:
            raise ArgumentError(f"weight has shape {tuple(weight.shape)}, (out_features, in_features) is needed")
        out_features, in_features = weight.shape
        layer = cls(in_features, out_features, blocks, width, bias is not None, layout, weight.device, weight.dtype)
        if layer.patterns[0][1] % blocks:
            raise ArgumentError(f"width={layer.patterns[0][1]} is not allowed here: a multiple of blocks={blocks} is needed")
        (_, _, p, _), (_, s, _, _) = layer.patterns
        matrix = weight.new_zeros((s * blocks, p * blocks))
        matrix[:out_features, :in_features] = weight.detach()
        return layer._filled(nearest_ks(matrix, layer.patterns), bias)

    @classmethod
    def _of_patterns(cls, patterns: Sequence[Pattern], bias: bool, layout: str, like: Tensor) -> Self:
        if len(patterns) != 2 or patterns[0][3] != 1 or patterns[1][0] != 1:
            needed = "(k, q, p, 1) and (1, s, r, l) are needed; KSLinear takes others"
            raise ArgumentError(f"patterns={list(patterns)} are not allowed here: {needed}")
        layer = cls.__new__(cls)
        KSLinear.__init__(layer, patterns, bias, layout, like.device, like.dtype)
        return layer

    @classmethod
    def from_fly(
        cls,
        blkdiag1: Tensor,
        blkdiag2: Tensor,
        bias: Tensor | None = None,
        in_features: int | None = None,
        out_features: int | None = None,
        layout: str = "batch_first",
    ) -> Self:
        """The layer of fly's (HazyResearch) MonarchLinear from its parameters; also its blockdiag_butterfly_multiply's weights.

        blkdiag1: (k, q, p).  blkdiag2: (l, s, r), l·r = k·q.  in_features, out_features: where less than k·p and l·s.
        """
        for name, value in (("blkdiag1", blkdiag1), ("blkdiag2", blkdiag2)):
            check_dtype_of(name, value)
            if value.dim() != 3 or 0 in value.shape:
                raise ArgumentError(f"{name} has shape {tuple(value.shape)}: three dimensions, each ≥ 1, are needed")
        (k, q, p), (n, s, r) = blkdiag1.shape, blkdiag2.shape
        if n * r != k * q:
            raise ArgumentError(f"blkdiag2 has shape {(n, s, r)}: it takes {n * r} features, blkdiag1 {(k, q, p)} gives {k * q}")
        sizes = []
        for name, size, most in (("in_features", in_features, k * p), ("out_features", out_features, n * s)):
            sizes.append(_check_size(name, most if size is None else size))
            if sizes[-1] > most:
                raise ArgumentError(f"{name}={size} is not allowed: at most {most} with these weights")
        if blkdiag2.dtype != blkdiag1.dtype:
            raise ArgumentTypeError(f"blkdiag2 has dtype {name_of(blkdiag2)}, {name_of(blkdiag1)} is needed, as blkdiag1 has")
        layer = cls._of_patterns([(k, q, p, 1), (1, s, r, n)], bias is not None, layout, blkdiag1)
        layer._narrow(sizes[0], sizes[1], bias is not None)
        first, second = blkdiag1.detach(), blkdiag2.detach()
        return layer._filled([first.unsqueeze(3), second.permute(1, 2, 0).unsqueeze(0)], bias)


class ButterflyLinear(KSLinear):
    """A butterfly layer n → n: one factor for each radix, dense blocks of that size at growing strides, as in an FFT.

    n: features in and out.  radices: sizes ≥ 2 with product n, innermost stride first; the default is the prime factors of n,
    the classic 2 × 2 butterfly where n is a power of two.  bias, layout, device, dtype, activation: as in `KSLinear`.
    Raises ArgumentError or ArgumentTypeError naming the argument.
    """

    def __init__(
        self,
        n: int,
        radices: Sequence[int] | None = None,
        bias: bool = True,
        layout: str = "batch_first",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        activation: str | None = None,
    ) -> None:
        """Make the layer; see the class."""
        patterns = butterfly_patterns(n, radices)
        super().__init__(patterns, bias=bias, layout=layout, device=device, dtype=dtype, activation=activation)
        self.radices = tuple(b for _, b, _, _ in patterns)

    @classmethod
    def from_dense(  # type: ignore[override]
        cls,
        weight: Tensor,
        radices: Sequence[int] | None = None,
        bias: Tensor | None = None,
        layout: str = "batch_first",
    ) -> Self:
        """The layer near a dense one: weight (n, n) as in nn.Linear, projected by `nearest_ks`."""
        check_matrix("weight", weight)
        if weight.dim() != 2 or weight.shape[0] != weight.shape[1]:
            raise ArgumentError(f"weight has shape {tuple(weight.shape)}, a square matrix is needed")
        layer = cls(weight.shape[0], radices, bias is not None, layout, weight.device, weight.dtype)
        return layer._filled(nearest_ks(weight.detach(), layer.patterns), bias)

    @classmethod
    def _of_patterns(cls, patterns: Sequence[Pattern], bias: bool, layout: str, like: Tensor) -> Self:
        radices, n = [b for _, b, _, _ in patterns], pattern_in(patterns[0])
        if prod(radices) != n or min(radices) < min(n, 2) or list(patterns) != butterfly_patterns(n, radices):
            needed = "blocks b = c at strides d = 1, b1, b1·b2, … are needed; KSLinear takes others"
            raise ArgumentError(f"patterns={list(patterns)} are not allowed here: {needed}")
        return cls(n, radices, bias, layout, like.device, like.dtype)


def butterfly_patterns(n: int, radices: Sequence[int] | None = None) -> list[Pattern]:
    """The patterns of a butterfly, the first one applied first."""
    _check_size("n", n)
    if radices is None:
        radices = _prime_factors(n)
    if isinstance(radices, str) or not isinstance(radices, Sequence):
        raise ArgumentTypeError(f"radices={radices!r} must be a sequence of ints ≥ 2")
    for i, p in enumerate(radices):
        _check_size(f"radices[{i}]", p)
    if prod(radices) != n or not radices:
        raise ArgumentError(f"radices={list(radices)!r} is not allowed: their product must be n = {n}")
    patterns, inner = [], 1
    for p in radices:
        patterns.append((n // (inner * p), p, p, inner))
        inner *= p
    return patterns


def _prime_factors(n: int) -> list[int]:
    found, p = [], 2
    while p * p <= n:
        while n % p == 0:
            found.append(p)
            n //= p
        p += 1
    return [*found, n] if n > 1 or not found else found


def _check_size(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ArgumentTypeError(f"{name}={value!r} must be an int ≥ 1")
    if value < 1:
        raise ArgumentError(f"{name}={value} is not allowed: an int ≥ 1 is needed")
    return value
