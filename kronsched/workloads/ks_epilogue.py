"""What may follow a Kronecker-sparse product in the same kernel: y = act(K x + bias) + residual, rounded once.

gelu is x · Φ(x) with the normal distribution's Φ, torch's default (approximate="none"); silu is x / (1 + exp(−x)).

Read first: `Epilogue`, `finished` (float64 and torch), `activated` (TVM).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kronsched.dtypes import DTYPES
from kronsched.errors import ArgumentTypeError, UnsupportedError, choose

if TYPE_CHECKING:
    import torch

ACTIVATIONS = ("relu", "gelu", "silu")
EPILOGUE = ("bias", "residual")
"""Optional inputs, in the order in which they follow the weights."""


@dataclass(frozen=True)
class Epilogue:
    """Which parts there are; false when there are none."""

    bias: bool = False
    activation: str | None = None
    residual: bool = False

    def __bool__(self) -> bool:
        return self.bias or self.activation is not None or self.residual

    @property
    def tensors(self) -> tuple[str, ...]:
        """The names of the inputs it takes, in their order."""
        return ("bias",) * self.bias + ("residual",) * self.residual

    @property
    def label(self) -> str:
        """Such as "bias gelu residual"; empty when there is nothing."""
        return " ".join(("bias",) * self.bias + ((self.activation,) if self.activation else ()) + ("residual",) * self.residual)


NONE = Epilogue()


def check_epilogue(bias: Any, activation: Any, residual: Any, dtype: str) -> None:
    """Raise ArgumentTypeError, ArgumentError or UnsupportedError naming the field that is wrong."""
    for name, value in (("bias", bias), ("residual", residual)):
        if not isinstance(value, bool):
            raise ArgumentTypeError(f"{name}={value!r} must be True or False")
    check_activation(activation, dtype)


def check_activation(activation: Any, dtype: str) -> None:
    """Raise ArgumentError unless it is None or one of `ACTIVATIONS`, UnsupportedError for a complex dtype."""
    if activation is None:
        return
    if not isinstance(activation, str) or activation not in ACTIVATIONS:
        raise choose("activation", activation, ACTIVATIONS)
    if dtype in DTYPES and DTYPES[dtype].is_complex:
        raise UnsupportedError(f"activation={activation!r} is not defined for {dtype}: real dtypes only")


def finished(
    value: torch.Tensor,
    activation: str | None,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    batch_first: bool,
) -> torch.Tensor:
    """The epilogue by torch, one differentiable operation a part, in value's dtype."""
    import torch.nn.functional as F

    if bias is not None:
        value = value + (bias if batch_first else bias.reshape(-1, *[1] * (value.dim() - 1)))
    if activation is not None:
        value = getattr(F, activation)(value)
    return value if residual is None else value + residual


def activated(activation: str | None, value: Any, dtype: str) -> Any:
    """The activation of a TVM expression of the dtype. A NaN stays one."""
    from tvm.script import tirx as T

    if activation == "relu":
        zero = T.Cast(dtype, 0)
        return T.Select(value < zero, zero, value)  # not max, which drops NaN
    if activation == "gelu":
        return value * T.Cast(dtype, 0.5) * (T.Cast(dtype, 1) + T.erf(value * T.Cast(dtype, 0.7071067811865476)))
    if activation == "silu":
        return value / (T.Cast(dtype, 1) + T.exp(T.Cast(dtype, 0) - value))
    return value
