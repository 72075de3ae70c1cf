"""Makes GPyTorch's Kronecker products run on kronsched's kernels: `import kronsched.nn.linear_operator` switches it on.

From then on, `KroneckerProductLinearOperator` of the linear_operator package multiplies by `kronsched.kron_matmul` wherever its
factors are dense matrices of a dtype and on a device that have kernels; everything else runs as before. Solves by conjugate
gradients, Lanczos, gradients and GPyTorch models call these products, so they follow. `disable()` restores the original,
`enable()` switches the adapter on again; both act on the whole process.

Read first: `_factors` (which operators count as dense).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kronsched.errors import UnsupportedError
from kronsched.nn.functional import kron_matmul
from kronsched.workloads.kron import DTYPE_NAMES, MAX_FACTORS

try:
    from linear_operator.operators import (
        ConstantMulLinearOperator,
        DenseLinearOperator,
        DiagLinearOperator,
        KroneckerProductLinearOperator,
        RootLinearOperator,
        SumLinearOperator,
        TriangularLinearOperator,
    )
    from linear_operator.operators.kronecker_product_linear_operator import KroneckerProductDiagLinearOperator
except ImportError as e:
    raise ImportError(f"kronsched.nn.linear_operator needs the linear_operator package: pip install linear-operator ({e})") from e

_DTYPES = tuple(getattr(torch, name) for name in DTYPE_NAMES)
_SMALL = 1024  # operators that are sums or products of matrices are multiplied out up to this size
_original: dict[str, Callable[..., Any]] = {}


def enable() -> None:
    """Switch the adapter on. Importing this module does it."""
    if _original:
        return
    cls = KroneckerProductLinearOperator
    _original.update(_matmul=cls._matmul, _t_matmul=cls._t_matmul)
    cls._matmul, cls._t_matmul = _matmul, _t_matmul


def disable() -> None:
    """Give linear_operator its own products back."""
    for name, method in _original.items():
        setattr(KroneckerProductLinearOperator, name, method)
    _original.clear()


def enabled() -> bool:
    """Whether the adapter is on."""
    return bool(_original)


def _matmul(self: Any, rhs: Tensor) -> Tensor:
    result = _product(self, rhs, "n")
    return _own("_matmul")(self, rhs) if result is None else result


def _t_matmul(self: Any, rhs: Tensor) -> Tensor:
    result = _product(self, rhs, "t")
    return _own("_t_matmul")(self, rhs) if result is None else result


def _own(name: str) -> Callable[..., Tensor]:
    """The original method, also for a call that began before `disable`."""
    method: Callable[..., Tensor] = _original.get(name) or getattr(KroneckerProductLinearOperator, name)
    return method


def _product(operator: Any, rhs: Any, op_f: str) -> Tensor | None:
    """(F1 ⊗ … ⊗ FN) rhs, or of the transposed factors; None where linear_operator has to do it itself."""
    if not isinstance(rhs, Tensor) or rhs.dtype not in _DTYPES or rhs.device.type not in ("cpu", "cuda"):
        return None
    factors = _factors(operator, rhs)
    if factors is None or len(factors) > MAX_FACTORS:
        return None
    try:
        # Contiguous as the original's result is: callers take views of it.
        return kron_matmul(rhs, factors, form="kmm", op_f=op_f).contiguous()
    except UnsupportedError:  # a tensor of more elements than kernels index
        return None


def _factors(operator: Any, rhs: Tensor) -> list[Tensor] | None:
    """The factors as matrices, those of nested products among them; None when one is better left to its own structure."""
    found: list[Tensor] = []
    for op in operator.linear_ops:
        if isinstance(op, KroneckerProductLinearOperator) and not isinstance(op, KroneckerProductDiagLinearOperator):
            inner = _factors(op, rhs)
            if inner is None:
                return None
            found += inner
            continue
        dense = _dense(op)
        if dense is None or (dense.dtype, dense.device) != (rhs.dtype, rhs.device):
            return None
        found.append(dense)
    return found


def _dense(op: Any) -> Tensor | None:
    if isinstance(op, DenseLinearOperator):
        tensor: Tensor = op.tensor
        return tensor
    if isinstance(op, DiagLinearOperator):  # also a TriangularLinearOperator
        return None
    if isinstance(op, TriangularLinearOperator):
        return _dense(op._tensor)
    if isinstance(op, RootLinearOperator | SumLinearOperator | ConstantMulLinearOperator) and max(op.shape[-2:]) <= _SMALL:
        # Not op.to_dense(), which is remembered even when it was computed without gradients.
        columns: Tensor = op._matmul(torch.eye(op.size(-1), dtype=op.dtype, device=op.device))
        return columns
    return None


enable()
