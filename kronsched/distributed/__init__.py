"""Kron-Matmul over many devices by torch.distributed: a grid of ranks, its cost and its plan.

Read first: `kron_matmul` in kron.py; grid.py has the picture of how a matrix is split and how it moves.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kronsched.distributed.comm import CommunicationError as CommunicationError
    from kronsched.distributed.comm import finish as finish
    from kronsched.distributed.cost import LINKS as LINKS
    from kronsched.distributed.cost import Link as Link
    from kronsched.distributed.cost import Plan as Plan
    from kronsched.distributed.cost import plan as plan
    from kronsched.distributed.cost import scaling as scaling
    from kronsched.distributed.grid import Grid as Grid
    from kronsched.distributed.grid import shard as shard
    from kronsched.distributed.grid import unshard as unshard
    from kronsched.distributed.kron import kron_matmul as kron_matmul
    from kronsched.distributed.measure import measure_link as measure_link
    from kronsched.distributed.measure import measured_choices as measured_choices

_WHERE = {
    "CommunicationError": "comm",
    "Grid": "grid",
    "LINKS": "cost",
    "Link": "cost",
    "Plan": "cost",
    "finish": "comm",
    "kron_matmul": "kron",
    "measure_link": "measure",
    "measured_choices": "measure",
    "plan": "cost",
    "scaling": "cost",
    "shard": "grid",
    "unshard": "grid",
}
__all__ = list(_WHERE)


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'kronsched.distributed' has no attribute {name!r}")
    return getattr(importlib.import_module(f"kronsched.distributed.{_WHERE[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_WHERE])
