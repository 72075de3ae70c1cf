"""A model of scaling to many GPUs from what `bench kron-multi` measured on a few: its link and its one-rank times.

    kernel time of a phase = measured time of the whole product on one rank · flops of the phase / flops of the whole
    exchange inside a host = latency + bytes / bandwidth of the measured link; between hosts as `network` says (an assumption)

Nothing is measured here. The other assumptions are those of `kronsched.distributed.scaling`, above all: no contention, no
stragglers, a latency that does not grow with the number of peers. They make every figure an upper bound of the efficiency.

Read first: `model`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from kronsched.bench.kron_multi import MODES, Case, case_of
from kronsched.distributed.cost import KernelTime, Link, scaling
from kronsched.errors import ArgumentError
from kronsched.hardware import Device
from kronsched.workloads.kron import KronMatmul


@dataclass(frozen=True)
class ModelRow:
    """One number of ranks. columns: GK that was asked for, None for the best grid.  us, one_us, efficiency: on paper."""

    case: str
    mode: str
    ranks: int
    grid: tuple[int, int]
    columns: int | None
    chunks: int
    us: float
    one_us: float
    exchange_us: float
    exchange_bytes: int
    efficiency: float


def model(
    data: Mapping[str, Any], ranks: Sequence[int], device: Device, *, columns: Sequence[int | None] = (None,)
) -> list[ModelRow]:
    """Rows for every case of a result of `bench kron-multi` (its JSON), mode, number of ranks and GK.

    device: the GPU of every rank, for the bandwidth of pack and unpack copies.
    """
    link = link_of(data)
    rows = []
    for label, one_us in _cases(data).items():
        case = _case(label)
        options: dict[str, Any] = {"device": device, "link": link, "kernel_us": by_flops(case, one_us)}
        for mode in MODES:
            for gk in columns:
                counts = [n for n in ranks if gk is None or (n >= gk and n % gk == 0)]
                points = scaling(case.rows, case.factors, counts, case.dtype, weak=mode == "weak", columns=gk, **options)
                for point in points:
                    plan = point.plan
                    one = one_us if mode == "strong" else one_us * point.ranks
                    rows.append(
                        ModelRow(
                            label,
                            mode,
                            point.ranks,
                            (plan.grid.rows, plan.grid.columns),
                            gk,
                            plan.chunks,
                            plan.us,
                            one_us,
                            plan.exchange_us,
                            plan.exchange_bytes,
                            one / plan.us / point.ranks,
                        )
                    )
    return rows


def by_flops(case: Case, one_us: float) -> KernelTime:
    """Time of any product of some of the case's factors: its share of the whole's arithmetic."""
    whole = KronMatmul(m=1, factors=case.factors, dtype=case.dtype).flops * case.rows

    def kernel_us(workload: KronMatmul) -> float:
        return one_us * workload.flops / whole

    return kernel_us


def link_of(data: Mapping[str, Any]) -> Link:
    """The measured link of a result."""
    found = data.get("link")
    if not isinstance(found, Mapping):
        raise ArgumentError("from: the result has no link: measure with 2 ranks or more")
    return Link(float(found["gbs"]), float(found["latency_us"]), f"measured on {data.get('device')}")


def _cases(data: Mapping[str, Any]) -> dict[str, float]:
    """The measured time of one rank alone by the label of each case: the median over its rows, which measure it again."""
    rows = data.get("rows")
    if not isinstance(rows, Sequence) or not rows:
        raise ArgumentError("from: the result has no rows: it must be the JSON of `kronsched bench kron-multi`")
    times: dict[str, list[float]] = {}
    for row in rows:
        times.setdefault(str(row["case"]), []).append(float(row["one_us"]))
    return {case: median(found) for case, found in times.items()}


def _case(label: str) -> Case:
    """The case of a label, such as "m=64 64x64^4 float32"."""
    rows, factors, dtype = label.split()
    return case_of(f"{factors}:{rows.removeprefix('m=')}", dtype, "cpu")
