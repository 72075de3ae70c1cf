"""`KronLinear`: a linear layer whose weight is a Kronecker product of small factors."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from kronsched.errors import ArgumentError, ArgumentTypeError
from kronsched.nn.functional import kron_matmul
from kronsched.nn.nearest import nearest_kron
from kronsched.workloads.kron import KronMatmul


class KronLinear(nn.Module):
    """y = x (F1 ⊗ … ⊗ FN) + bias: `nn.Linear` with weight (F1 ⊗ … ⊗ FN)ᵀ, ΣPi·Qi parameters instead of ΠPi·ΠQi.

    in_factors, out_factors: the sizes Pi and Qi, as many of each; in_features = ΠPi and out_features = ΠQi. `factors` holds the
    parameters Fi (Pi, Qi), `bias` (ΠQi) or None. x: (…, in_features), any number of rows; y: (…, out_features).
    Factors start uniform so that the weight has the mean and variance of `nn.Linear`'s; the bias starts as there. Under
    torch.autocast it computes as `nn.Linear` does; torch.compile sees one operator; see `kronsched.kron_matmul`.
    Raises ArgumentError or ArgumentTypeError naming the argument.
    """

    bias: nn.Parameter | None

    def __init__(
        self,
        in_factors: Sequence[int],
        out_factors: Sequence[int],
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Make the layer; see the class."""
        super().__init__()
        pairs = _pairs(in_factors, out_factors)
        self.in_factors, self.out_factors = tuple(p for p, _ in pairs), tuple(q for _, q in pairs)
        self.in_features, self.out_features = prod(self.in_factors), prod(self.out_factors)
        self.factors = nn.ParameterList(nn.Parameter(torch.empty(pair, device=device, dtype=dtype)) for pair in pairs)
        if bias:
            self.bias = nn.Parameter(torch.empty(self.out_features, device=device, dtype=dtype))
        else:
            self.register_parameter("bias", None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw new parameters: N independent uniform factors of variance 3^(-1/N)/Pi, whose product has nn.Linear's 1/(3 ΠPi)."""
        n = len(self.factors)
        for f in self.factors:
            bound = (3 ** (1 - 1 / n) / f.shape[0]) ** 0.5
            nn.init.uniform_(f, -bound, bound)
        if self.bias is not None:
            bound = self.in_features**-0.5
            nn.init.uniform_(self.bias, -bound, bound)

    @classmethod
    def from_dense(
        cls, weight: Tensor, in_factors: Sequence[int], out_factors: Sequence[int], bias: Tensor | None = None
    ) -> KronLinear:
        """The layer nearest to a dense one: weight (out_features, in_features) as in nn.Linear; see `nearest_kron`."""
        if not isinstance(weight, Tensor):
            raise ArgumentTypeError(f"weight is of type {type(weight).__name__}: a torch.Tensor is needed")
        layer = cls(in_factors, out_factors, bias=bias is not None, device=weight.device, dtype=weight.dtype)
        shape = (layer.out_features, layer.in_features)
        if tuple(weight.shape) != shape:
            raise ArgumentError(f"weight has shape {tuple(weight.shape)}, {shape} is needed for these factors")
        if bias is not None and tuple(bias.shape) != (layer.out_features,):
            raise ArgumentError(f"bias has shape {tuple(bias.shape)}, ({layer.out_features},) is needed for these factors")
        pairs = list(zip(layer.in_factors, layer.out_factors, strict=True))
        with torch.no_grad():
            for parameter, value in zip(layer.factors, nearest_kron(weight.detach().T, pairs), strict=True):
                parameter.copy_(value)
            if layer.bias is not None and bias is not None:
                layer.bias.copy_(bias)
        return layer

    def dense_weight(self) -> Tensor:
        """The weight (out_features, in_features) of the equivalent nn.Linear, differentiable. Large: ΠPi·ΠQi elements."""
        weight: Tensor = reduce(torch.kron, list(self.factors))
        return weight.T

    def forward(self, x: Tensor) -> Tensor:
        """Y (…, out_features) of x (…, in_features)."""
        return kron_matmul(x, list(self.factors), y=self.bias, beta=0.0 if self.bias is None else 1.0)

    def extra_repr(self) -> str:
        """Sizes, for print."""
        return f"in_factors={self.in_factors}, out_factors={self.out_factors}, bias={self.bias is not None}"


def _pairs(in_factors: Any, out_factors: Any) -> tuple[tuple[int, int], ...]:
    for name, sizes in (("in_factors", in_factors), ("out_factors", out_factors)):
        if isinstance(sizes, str) or not isinstance(sizes, Sequence):
            raise ArgumentTypeError(f"{name}={sizes!r} must be a sequence of ints ≥ 1")
        for i, size in enumerate(sizes):
            if isinstance(size, bool) or not isinstance(size, int):
                raise ArgumentTypeError(f"{name}[{i}]={size!r} must be an int ≥ 1")
            if size < 1:
                raise ArgumentError(f"{name}[{i}]={size} is not allowed: an int ≥ 1 is needed")
    if len(in_factors) != len(out_factors):
        raise ArgumentError(f"out_factors: {len(out_factors)} sizes given, {len(in_factors)} are needed, as many as in_factors")
    return KronMatmul(m=1, factors=tuple(zip(in_factors, out_factors, strict=True))).factors
