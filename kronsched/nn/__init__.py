"""Structured matmuls for torch users: differentiable functions, layers, kernels for any batch, a linear_operator adapter.

Read first: `kron_matmul` in functional.py, `ks_matmul` in ks_functional.py. Importing `kronsched.nn.linear_operator` switches
that adapter on.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kronsched.nn.dynamic import DynamicKron as DynamicKron
    from kronsched.nn.functional import kron_matmul as kron_matmul
    from kronsched.nn.kron_linear import KronLinear as KronLinear
    from kronsched.nn.ks_functional import ks_matmul as ks_matmul
    from kronsched.nn.ks_linear import KSLinear as KSLinear
    from kronsched.nn.ks_nearest import nearest_ks as nearest_ks
    from kronsched.nn.monarch import ButterflyLinear as ButterflyLinear
    from kronsched.nn.monarch import MonarchLinear as MonarchLinear
    from kronsched.nn.nearest import nearest_kron as nearest_kron
    from kronsched.nn.quant_conv2d import QuantConv2d as QuantConv2d
    from kronsched.nn.w4a16_dynamic import DynamicW4A16 as DynamicW4A16
    from kronsched.nn.w4a16_linear import W4A16Linear as W4A16Linear

_WHERE = {
    "ButterflyLinear": "kronsched.nn.monarch",
    "DynamicKron": "kronsched.nn.dynamic",
    "DynamicW4A16": "kronsched.nn.w4a16_dynamic",
    "KSLinear": "kronsched.nn.ks_linear",
    "KronLinear": "kronsched.nn.kron_linear",
    "MonarchLinear": "kronsched.nn.monarch",
    "QuantConv2d": "kronsched.nn.quant_conv2d",
    "W4A16Linear": "kronsched.nn.w4a16_linear",
    "kron_matmul": "kronsched.nn.functional",
    "ks_matmul": "kronsched.nn.ks_functional",
    "nearest_kron": "kronsched.nn.nearest",
    "nearest_ks": "kronsched.nn.ks_nearest",
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
