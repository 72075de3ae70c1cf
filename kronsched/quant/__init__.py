"""Quantised weights: the packed layout kernels read, and the ways into it: `pack`, `load`, `round_to_nearest`, `quantize_`."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from kronsched.quant.packed_weight import PackedWeight, pack

if TYPE_CHECKING:
    from kronsched.quant.checkpoint import Checkpoint as Checkpoint
    from kronsched.quant.checkpoint import load as load
    from kronsched.quant.quantize import quantize_ as quantize_
    from kronsched.quant.quantize import round_to_nearest as round_to_nearest

_WHERE = {
    "Checkpoint": "kronsched.quant.checkpoint",
    "load": "kronsched.quant.checkpoint",
    "quantize_": "kronsched.quant.quantize",
    "round_to_nearest": "kronsched.quant.quantize",
}
__all__ = ["PackedWeight", "pack", *_WHERE]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'kronsched.quant' has no attribute {name!r}")
    return getattr(importlib.import_module(_WHERE[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_WHERE])
