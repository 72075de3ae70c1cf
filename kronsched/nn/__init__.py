"""Kron-Matmul for torch users: a differentiable function, a layer, kernels for any number of rows, a linear_operator adapter.

Read first: `kron_matmul` in functional.py. Importing `kronsched.nn.linear_operator` switches that adapter on.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kronsched.nn.dynamic import DynamicKron as DynamicKron
    from kronsched.nn.functional import kron_matmul as kron_matmul
    from kronsched.nn.kron_linear import KronLinear as KronLinear
    from kronsched.nn.nearest import nearest_kron as nearest_kron

_WHERE = {
    "DynamicKron": "kronsched.nn.dynamic",
    "KronLinear": "kronsched.nn.kron_linear",
    "kron_matmul": "kronsched.nn.functional",
    "nearest_kron": "kronsched.nn.nearest",
}
_MODULES = ("functional", "linear_operator")
__all__ = list(_WHERE)


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"kronsched.nn.{name}")
    if name not in _WHERE:
        raise AttributeError(f"module 'kronsched.nn' has no attribute {name!r}")
    return getattr(importlib.import_module(_WHERE[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_WHERE])
