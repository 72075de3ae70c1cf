"""Sums up the rows of a large suite by groups: dtype, and layout and pattern (KS) or kind of weights (4-bit Gemm).

Read first: `group_of`, `groups`.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kronsched.bench.row import Row, best_geomean, joules_geomean
from kronsched.quant.layout import TILE_K, TILE_N
from kronsched.workloads.base import Workload
from kronsched.workloads.gemm import Gemm
from kronsched.workloads.ks import KSMatmul

NEVER_SLOWER = 0.97
"""A row whose best peer takes less than this share of our time counts as lost; what is nearer is noise."""


@dataclass(frozen=True)
class Group:
    """What some rows have in common.

    rows: timed.  failed: rows without a time of ours.  best_geomean: of the best peer's time / ours, row by row.  lowest: the
    least of these ratios.  lost: rows below `NEVER_SLOWER`.  served_geomean, served_lowest, served_lost: the same of what a user
    of `kronsched.nn` gets, who is served by a library where it is faster; None for families without such a choice.
    over_floor: median of time / floor.  error: the largest.  joules_geomean: of our joules / the best peer's, None where they
    were not measured.
    """

    name: str
    rows: int
    failed: int
    best_geomean: float | None
    lowest: float | None
    lost: int
    over_floor: float | None
    error: float | None
    joules_geomean: float | None
    served_geomean: float | None = None
    served_lowest: float | None = None
    served_lost: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def group_of(workload: Workload) -> str:
    """Such as "float16 batch_first d>1" or, of 4-bit weights, "float16 asymmetric ragged"; the dtype alone for other families."""
    if isinstance(workload, Gemm) and not workload.is_dense:
        kinds = {
            workload.zero_point: workload.zero_point != "symmetric",
            "act-order": workload.act_order,
            "ragged": workload.n % TILE_N != 0 or workload.k % TILE_K != 0,
        }
        return " ".join([workload.a_dtype, *(kind for kind, has in kinds.items() if has)])
    if not isinstance(workload, KSMatmul):
        return workload.compute_dtype
    kind = "chain" if len(workload.patterns) > 1 else "d=1" if workload.patterns[0][3] == 1 else "d>1"
    return f"{workload.dtype} {workload.layout} {kind}"


def served_us(row: Row) -> float | None:
    """What `ks_matmul` takes once the row is in its table: the time of our kernel or of torch's formulation that it chooses."""
    if not isinstance(row.workload, KSMatmul):
        return None
    from kronsched.nn.ks_select import Selector
    from kronsched.nn.ks_select_library import FORMULATIONS
    from kronsched.nn.ks_select_predict import KERNEL, Entry

    library = {name: us for name, us in row.peers.items() if us and name in FORMULATIONS}
    name = Selector([Entry(row.workload, row.us, library)]).choose(row.workload).name
    return row.us if name == KERNEL else library[name]


def _served_ratio(row: Row) -> float | None:
    peer, ours = row.peers.get(row.best_peer or ""), served_us(row)
    return peer / ours if peer and ours else None


def groups(rows: Sequence[Row], selection: bool = True) -> list[Group]:
    """The groups in the order of their first rows. selection: whether `kronsched.nn` chooses a library on the rows' device."""
    by_name: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        by_name[group_of(row.workload)].append(row)
    return [_group(name, own, selection) for name, own in by_name.items()]


def _group(name: str, rows: Sequence[Row], selection: bool) -> Group:
    timed = [r for r in rows if r.us]
    ratios = [r.best_ratio for r in timed if r.best_ratio]
    served = [ratio for r in timed if (ratio := _served_ratio(r))] if selection else []
    errors = [r.error for r in timed if r.error is not None]
    return Group(
        name,
        len(timed),
        len(rows) - len(timed),
        best_geomean(timed),
        min(ratios, default=None),
        sum(ratio < NEVER_SLOWER for ratio in ratios),
        statistics.median(r.us / r.floor_us for r in timed if r.us) if timed else None,
        max(errors, default=None),
        joules_geomean(timed),
        statistics.geometric_mean(served) if served else None,
        min(served, default=None),
        sum(ratio < NEVER_SLOWER for ratio in served) if served else None,
    )
