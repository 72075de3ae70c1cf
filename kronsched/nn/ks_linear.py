"""`KSLinear`: a linear layer whose weight is a Kronecker-sparse matrix or a product of them."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kronsched.errors import ArgumentError, ArgumentTypeError, choose
from kronsched.nn import ks_bound
from kronsched.nn.checks import name_of
from kronsched.nn.ks_autograd import by_torch
from kronsched.nn.ks_functional import ks_matmul
from kronsched.nn.ks_nearest import check_dtype_of, check_matrix, nearest_ks
from kronsched.workloads.ks import DTYPE_NAMES, LAYOUTS, KSMatmul, Pattern, pattern_in, pattern_out
from kronsched.workloads.ks_epilogue import check_activation

KSMM_FORMATS = ("kernel", "bmm", "einsum", "dense")


class KSLinear(nn.Module):
    """y = act(K_N … K_1 x + bias) + residual: `nn.Linear` whose weight is a product of Kronecker-sparse matrices.

    A Kronecker-sparse matrix has the nonzeros of I_a ⊗ 1_{b×c} ⊗ I_d.

    patterns: (a, b, c, d), or up to 32 of them, the first one applied first; a·b·d of one equals a·c·d of the next.
    `weights` holds a parameter (a, b, c, d) for each, `bias` (out_features,) or None.
    layout: "batch_first", x (…, in_features) and y (…, out_features); or "batch_last", x (in_features, …), y (out_features, …).
    activation: None, "relu", "gelu" (x·Φ(x), torch's default) or "silu". It, the bias and a residual given to `forward` are part
    of the kernel, in training too. A residual of another dtype than y is added by torch, which promotes.
    dtype: as in `nn.Linear`; complex64 and complex128 have no activation.
    Any batch, of any number of dimensions: a few kernels serve all sizes.
    Weights start uniform so that y has the variance that `nn.Linear` gives it; the bias starts as in an `nn.Linear` of as many
    inputs as an output depends on. Under torch.autocast it computes as `nn.Linear` does; torch.compile sees one operator a
    factor; see `kronsched.nn.ks_matmul`.
    For inference on a GPU, `keep_packed` spares every call the reordering of the weights.
    Raises ArgumentError or ArgumentTypeError naming the argument.
    """

    bias: nn.Parameter | None

    def __init__(
        self,
        patterns: Pattern | Sequence[Pattern],
        bias: bool = True,
        layout: str = "batch_first",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        activation: str | None = None,
    ) -> None:
        """Make the layer; see the class."""
        super().__init__()
        _check_dtype(dtype)
        check_activation(activation, str(dtype or torch.get_default_dtype()).removeprefix("torch."))
        self.activation = activation
        self.patterns = _checked(patterns)
        if layout not in LAYOUTS:
            raise choose("layout", layout, LAYOUTS)
        self.layout = layout
        self.in_features, self.out_features = pattern_in(self.patterns[0]), pattern_out(self.patterns[-1])
        self.weights = nn.ParameterList(nn.Parameter(torch.empty(p, device=device, dtype=dtype)) for p in self.patterns)
        self._make_bias(bias)
        self.reset_parameters()

    def _make_bias(self, bias: bool) -> None:
        if bias:
            self.bias = nn.Parameter(self.weights[0].new_empty(self.out_features))
        else:
            self.register_parameter("bias", None)

    def reset_parameters(self) -> None:
        """Draw new parameters: weights of variance 3^(-1/N)/c, a bias; uniform, of complex numbers each part is."""
        n = len(self.weights)
        for w, (_, _, c, _) in zip(self.weights, self.patterns, strict=True):
            _draw(w, (3 ** (1 - 1 / n) / c) ** 0.5)
        if self.bias is not None:
            _draw(self.bias, min(self.in_features, prod(c for _, _, c, _ in self.patterns)) ** -0.5)

    def keep_packed(self, enabled: bool = True) -> Self:
        """Let calls that record no gradient keep the weights in the order that the GPU kernel reads; returns the layer.

        A change of the weights is seen, be it by an optimiser, load_state_dict or in place, and packs them anew, but not a write
        through `weight.data`: call this again after one. It is not kept in copies, pickles or the state_dict. No effect on a
        CPU, under torch.compile and in the capture of a CUDA graph.
        """
        ks_bound.allow(list(self.weights), enabled)
        return self

    @classmethod
    def from_dense(
        cls,
        weight: Tensor,
        patterns: Pattern | Sequence[Pattern],
        bias: Tensor | None = None,
        layout: str = "batch_first",
    ) -> Self:
        """The layer near a dense one: weight (out_features, in_features) as in nn.Linear, projected by `nearest_ks`."""
        check_matrix("weight", weight)
        layer = cls(patterns, bias=bias is not None, layout=layout, device=weight.device, dtype=weight.dtype)
        shape = (layer.out_features, layer.in_features)
        if tuple(weight.shape) != shape:
            raise ArgumentError(f"weight has shape {tuple(weight.shape)}, {shape} is needed for these patterns")
        return layer._filled(nearest_ks(weight.detach(), layer.patterns), bias)

    @classmethod
    def _of_patterns(cls, patterns: Sequence[Pattern], bias: bool, layout: str, like: Tensor) -> Self:
        """A layer of these patterns, with the device and dtype of a tensor."""
        return cls(patterns, bias=bias, layout=layout, device=like.device, dtype=like.dtype)

    @classmethod
    def from_ksmm(
        cls,
        factors: Sequence[Tensor],
        patterns: Pattern | Sequence[Pattern],
        algo: str,
        bias: Tensor | None = None,
        layout: str = "batch_first",
    ) -> Self:
        """The layer of ksmm's KSLinear from its `factors`, `patterns`, `algo` and `bias`: both list the right-most factor first.

        algo: how ksmm stored the factors: "kernel" (a·d·c, b), "bmm" (a·d, b, c), "einsum" (a, b, c, d), "dense" (a·b·d, a·c·d).
        bias: (out_features,), or (out_features, 1) as ksmm's batch-last layers have it. Values are copied. A `MonarchLinear` or
        `ButterflyLinear` takes only patterns of its kind.
        """
        if algo not in KSMM_FORMATS:
            raise choose("algo", algo, KSMM_FORMATS)
        if not isinstance(factors, list | tuple | nn.ParameterList):
            raise ArgumentTypeError(f"factors is of type {type(factors).__name__}: a list of tensors is needed")
        chain, factors = _checked(patterns), list(factors)
        if len(factors) != len(chain):
            raise ArgumentError(f"factors: {len(factors)} given, {len(chain)} are needed, as many as patterns")
        weights = [_from_ksmm(f"factors[{i}]", f, p, algo) for i, (f, p) in enumerate(zip(factors, chain, strict=True))]
        for i, w in enumerate(weights):
            if w.dtype != weights[0].dtype:
                raise ArgumentTypeError(
                    f"factors[{i}] has dtype {name_of(w)}, {name_of(weights[0])} is needed, as factors[0] has"
                )
        layer = cls._of_patterns(chain, bias is not None, layout, weights[0])
        if isinstance(bias, Tensor) and tuple(bias.shape) == (layer.out_features, 1):
            bias = bias.squeeze(1)
        return layer._filled(weights, bias)

    def _filled(self, weights: Sequence[Tensor], bias: Tensor | None) -> Self:
        """The layer itself, with these values."""
        if bias is not None:
            _check_tensor("bias", bias)
            if bias.is_complex() and not self.weights[0].is_complex():
                raise ArgumentTypeError(f"bias has dtype {name_of(bias)}: a real one is needed, as the weights are")
            if tuple(bias.shape) != (self.out_features,):
                raise ArgumentError(f"bias has shape {tuple(bias.shape)}, ({self.out_features},) is needed")
        with torch.no_grad():
            for parameter, value in zip(self.weights, weights, strict=True):
                parameter.copy_(value)
            if self.bias is not None and bias is not None:
                self.bias.copy_(bias)
        return self

    def dense_weight(self) -> Tensor:
        """The weight (out_features, in_features) of the equivalent nn.Linear, differentiable. Large."""
        w = self.weights[0]
        columns = torch.eye(pattern_in(self.patterns[0]), device=w.device, dtype=w.dtype)
        return by_torch(columns, list(self.weights), "batch_last")[: self.out_features, : self.in_features]

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Y (…, out_features) of x (…, in_features), with a residual of y's shape added; features first in batch-last."""
        dim, made = -1 if self.layout == "batch_first" else 0, pattern_out(self.patterns[-1])
        bias: Tensor | None = self.bias
        weights, cut = list(self.weights), made != self.out_features
        if bias is not None:
            bias = (F.pad(bias, (0, made - self.out_features)) if cut else bias).to(weights[0].dtype)
        if residual is not None and isinstance(x, Tensor):
            self._check_residual(residual, x)
        fused = residual if not cut and isinstance(x, Tensor) and _has_dtype_of_y(residual, x) else None
        y = ks_matmul(self._extended(x, dim), weights, None, self.layout, bias, self.activation, fused)
        if cut:
            y = y.narrow(dim, 0, self.out_features)
        return y if residual is None or fused is not None else y + residual

    def _check_residual(self, residual: Any, x: Tensor) -> None:
        """A residual that torch adds would be broadcast, or would broadcast y."""
        _check_tensor("residual", residual)
        batch = x.shape[:-1] if self.layout == "batch_first" else x.shape[1:]
        shape = (*batch, self.out_features) if self.layout == "batch_first" else (self.out_features, *batch)
        if tuple(residual.shape) != shape:
            raise ArgumentError(f"residual has shape {tuple(residual.shape)}, {shape} is needed, that of y")

    def _extended(self, x: Tensor, dim: int) -> Tensor:
        """X with zeros for the features that the patterns have and the layer has not (`MonarchLinear`)."""
        missing = pattern_in(self.patterns[0]) - self.in_features
        if missing == 0 or not isinstance(x, Tensor) or x.dim() == 0:
            return x
        if x.shape[dim] != self.in_features:
            raise ArgumentError(f"x has shape {tuple(x.shape)}: in_features = {self.in_features} are needed in dimension {dim}")
        return F.pad(x, (0, missing) if dim == -1 else (*[0] * (2 * x.dim() - 1), missing))

    def extra_repr(self) -> str:
        """Sizes, for print."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, patterns={list(self.patterns)}, "
            f"bias={self.bias is not None}, layout={self.layout!r}"
        ) + (f", activation={self.activation!r}" if self.activation else "")


def _draw(parameter: Tensor, bound: float) -> None:
    """Uniform numbers of variance bound²/3."""
    parts = parameter.detach()
    if parts.is_complex():
        parts, bound = torch.view_as_real(parts), bound / 2**0.5
    nn.init.uniform_(parts, -bound, bound)


def _checked(patterns: Any) -> tuple[Pattern, ...]:
    """The patterns as `KSMatmul` takes them; its message names the field `pattern`."""
    return KSMatmul(batch=1, pattern=patterns).patterns


def _check_dtype(dtype: Any) -> None:
    if dtype is not None and (not isinstance(dtype, torch.dtype) or str(dtype).removeprefix("torch.") not in DTYPE_NAMES):
        raise choose("dtype", dtype, [f"torch.{name}" for name in DTYPE_NAMES])


def _has_dtype_of_y(residual: Any, x: Tensor) -> bool:
    """Whether a residual can be added in the kernel."""
    kind, dtype = x.device.type, x.dtype
    if kind in ("cpu", "cuda") and torch.is_autocast_enabled(kind) and dtype != torch.float64:
        dtype = torch.get_autocast_dtype(kind)
    return isinstance(residual, Tensor) and residual.dtype == dtype


def _check_tensor(name: str, value: Any) -> None:
    if not isinstance(value, Tensor):
        raise ArgumentTypeError(f"{name} is of type {type(value).__name__}: a torch.Tensor is needed")


def _from_ksmm(name: str, factor: Tensor, pattern: Pattern, algo: str) -> Tensor:
    """The weight (a, b, c, d) of a factor as ksmm stores it."""
    a, b, c, d = pattern
    check_dtype_of(name, factor)
    shape = {"kernel": (a * d * c, b), "bmm": (a * d, b, c), "einsum": pattern, "dense": (a * b * d, a * c * d)}[algo]
    if tuple(factor.shape) != shape:
        raise ArgumentError(f"{name} has shape {tuple(factor.shape)}, {shape} is needed for pattern {pattern} and algo={algo!r}")
    factor = factor.detach()
    if algo == "kernel":
        return factor.reshape(a, d, c, b).permute(0, 3, 2, 1)
    if algo == "bmm":
        return factor.reshape(a, d, b, c).permute(0, 2, 3, 1)
    return nearest_ks(factor, pattern)[0] if algo == "dense" else factor
