"""kronsched: an auto-scheduling compiler for structured matmul programs.

Importing this package is cheap: each public name is loaded on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kronsched.nn.functional import kron_matmul as kron_matmul
    from kronsched.records.replay import replay as replay
    from kronsched.registry import register_family as register_family
    from kronsched.registry import register_schedule as register_schedule
    from kronsched.registry import register_strategy as register_strategy
    from kronsched.runtime.export import export as export
    from kronsched.runtime.load import load as load
    from kronsched.runtime.module import TunedModule as TunedModule
    from kronsched.search.tuner import TuneResult as TuneResult
    from kronsched.search.tuner import tune as tune
    from kronsched.workloads.conv2d import Conv2d as Conv2d
    from kronsched.workloads.gemm import Gemm as Gemm
    from kronsched.workloads.kron import KronMatmul as KronMatmul
    from kronsched.workloads.ks import KSMatmul as KSMatmul

__version__ = "0.1.0"

_WHERE = {
    "KronMatmul": "kronsched.workloads.kron",
    "KSMatmul": "kronsched.workloads.ks",
    "Gemm": "kronsched.workloads.gemm",
    "Conv2d": "kronsched.workloads.conv2d",
    "tune": "kronsched.search.tuner",
    "TuneResult": "kronsched.search.tuner",
    "load": "kronsched.runtime.load",
    "kron_matmul": "kronsched.nn.functional",
    "TunedModule": "kronsched.runtime.module",
    "replay": "kronsched.records.replay",
    "export": "kronsched.runtime.export",
    "register_family": "kronsched.registry",
    "register_schedule": "kronsched.registry",
    "register_strategy": "kronsched.registry",
}
_PACKAGES = ("distributed", "nn", "quant")  # reachable as kronsched.nn without an import of their own
__all__ = [*_WHERE, "__version__"]


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return importlib.import_module(f"kronsched.{name}")
    if name not in _WHERE:
        raise AttributeError(f"module 'kronsched' has no attribute {name!r}")
    return getattr(importlib.import_module(_WHERE[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_WHERE])
