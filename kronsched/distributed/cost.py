"""What a distributed product costs before anything runs: bytes exchanged, time on paper, the best grid, scaling to many GPUs.

    time of a piece of rows in a phase = kernel + pack and unpack copies,  then an exchange = latency + bytes sent / bandwidth

Pieces go through the phases in the order of `kron_matmul`, one kernel and one exchange at a time, a kernel beside an exchange:
with one piece the times add up, with several they overlap.

Read first: `plan`, then `scaling` (whose docstring lists what is assumed).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from math import ceil, gcd
from types import MappingProxyType
from typing import Any

from kronsched.distributed.grid import Grid, Phase, Shapes, as_grid, grids, needed_phases, positive
from kronsched.dtypes import DTYPES
from kronsched.errors import ArgumentError, ArgumentTypeError, UnsupportedError, choose
from kronsched.hardware import Device, resolve_target
from kronsched.hardware.roofline import floor_us
from kronsched.workloads.kron import MAX_FACTORS, KronMatmul

KernelTime = Callable[[KronMatmul], float]
CHUNKS = (1, 2, 4, 8)
"""The numbers of pieces that `plan` tries."""


@dataclass(frozen=True)
class Link:
    """gbs: 1e9 bytes/s that leave each GPU in a large all-to-all.  latency_us: time of an empty one.  source: where from."""

    gbs: float
    latency_us: float
    source: str

    def __post_init__(self) -> None:
        """A bandwidth above 0, a latency not below."""
        if not self.gbs > 0:
            raise ArgumentError(f"gbs={self.gbs!r} is not allowed: a number > 0 is needed")
        if not self.latency_us >= 0:
            raise ArgumentError(f"latency_us={self.latency_us!r} is not allowed: a number ≥ 0 is needed")


LINKS: Mapping[str, Link] = MappingProxyType(
    {
        # A line through all-to-alls of 16 MB (55 µs) and 2 GB (3.2 ms) a rank, half of which leaves it.
        "h200-nvlink": Link(334.0, 30.0, "NCCL all-to-all between two H200s of one host"),
        "network-400g": Link(45.0, 50.0, "not measured: 0.9 of 400 Gb/s for each GPU; the latency is a guess"),
    }
)


@dataclass(frozen=True)
class Costs:
    """The machine that a plan is for: what a kernel, an exchange and a launch take.

    device: the GPU or CPU of every rank.  kernel_us: time of one workload; see `from_logs`.  link: within a host.
    network: between hosts, of `per_host` ranks each.  launch_us: host time of one kernel or copy, an assumption.
    """

    device: Device
    kernel_us: KernelTime
    link: Link
    network: Link
    per_host: int = 8
    launch_us: float = 5.0

    def compute_us(self, rows: int, phase: Phase, factors: Shapes, dtype: str, columns: int) -> float:
        """A phase's kernel on the rows of one block, and with an exchange a copy of the block before and one after."""
        group = factors[phase.start : phase.stop]
        time = self.launch_us + self._rows_us(rows * (phase.k_in // phase.group_in // columns), group, dtype)
        if columns > 1:
            time += 2 * (self.launch_us + 2 * rows * phase.k_out // columns * _bytes(dtype) / (self.device.bandwidth_gbs * 1e3))
        return time

    def exchange_us(self, block_bytes: float, columns: int) -> float:
        """An all-to-all of one block by each of `columns` ranks next to each other: near peers by link, others by network."""
        near = gcd(columns, self.per_host)
        inside = self.link.latency_us + block_bytes * (near - 1) / columns / (self.link.gbs * 1e3)
        if near == columns:
            return inside
        return max(inside, self.network.latency_us + block_bytes * (columns - near) / columns / (self.network.gbs * 1e3))

    def _rows_us(self, rows: int, group: Shapes, dtype: str) -> float:
        """The kernel's time; rows beyond the largest tensor of a workload are as many more calls."""
        part = rows
        while True:
            try:
                return self.kernel_us(KronMatmul(m=part, factors=group, dtype=dtype)) * rows / part
            except UnsupportedError:
                if part == 1:
                    raise
                part = ceil(part / 2)


def from_logs(device: Device) -> KernelTime:
    """The time of a workload's best record of this device in the logs, or where there is none what the roofline allows."""
    from kronsched.records.database import find_best, matches_device

    known: dict[KronMatmul, float] = {}

    def kernel_us(workload: KronMatmul) -> float:
        if workload not in known:
            record = find_best(workload, device)
            logged = record.median_us if record is not None and matches_device(record, device) else None
            known[workload] = floor_us(workload, device) if logged is None else logged
        return known[workload]

    return kernel_us


@dataclass(frozen=True)
class Plan:
    """A choice for `kron_matmul`, and what it costs on paper.

    m: rows of the whole X.  local: the most factors of a phase, to pass on as it is.
    compute_us, exchange_us: sums over all phases and chunks.  us: the whole, with what overlaps.
    """

    m: int
    factors: Shapes
    dtype: str
    grid: Grid
    local: int
    chunks: int
    phases: tuple[Phase, ...]
    compute_us: float
    exchange_us: float
    us: float

    @property
    def rows(self) -> int:
        """The most rows of a rank."""
        return ceil(self.m / self.grid.rows)

    @cached_property
    def exchange_bytes(self) -> int:
        """Bytes that a rank with the most rows sends to others: all of its block but 1 / GK, once in each exchange."""
        return self.rows * _sent_bytes(self.phases, self.grid.columns, self.dtype)

    @cached_property
    def total_exchange_bytes(self) -> int:
        """Bytes that all ranks together send to others."""
        return self.m * self.grid.columns * _sent_bytes(self.phases, self.grid.columns, self.dtype)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        sent = {"exchange_bytes": self.exchange_bytes, "total_exchange_bytes": self.total_exchange_bytes}
        return {**asdict(self), "grid": [self.grid.rows, self.grid.columns], **sent}


def plan(
    m: int,
    factors: Sequence[tuple[int, int]],
    ranks: int,
    dtype: str = "float32",
    *,
    grid: Grid | tuple[int, int] | None = None,
    local: int | None = None,
    chunks: int | None = None,
    device: str | Device = "auto",
    link: str | Link = "h200-nvlink",
    network: str | Link = "network-400g",
    per_host: int = 8,
    kernel_us: KernelTime | None = None,
) -> Plan:
    """The grid and the number of chunks with the least time on paper for X (M, ΠPi) and so many ranks; what is given is kept.

    The phases of a grid are those that exchange the fewest elements with at most `local` factors each.
    device: as in `kronsched.tune`, such as "nvidia/h200".  link, network: a `Link` or a name of `LINKS`.
    kernel_us: the time of a workload; None is `from_logs`.
    """
    shapes = _shapes(m, factors, dtype)
    positive("ranks", ranks)
    if local is not None:
        positive("local", local)
    costs = _costs(device, link, network, per_host, kernel_us)
    if grid is None:
        asked = grids(ranks, shapes, local)
    else:
        asked = [as_grid(grid)]
        if asked[0].ranks != ranks:
            raise ArgumentError(f"grid={asked[0]} has {asked[0].ranks} ranks, ranks={ranks} is needed")
    pieces = CHUNKS if chunks is None else (positive("chunks", chunks),)
    plans = [_plan(m, shapes, dtype, g, local, c, costs) for g in asked for c in (pieces if g.columns > 1 else pieces[:1])]
    return min(plans, key=lambda p: (p.us, p.exchange_bytes, p.grid.columns, p.chunks))


def _plan(m: int, factors: Shapes, dtype: str, grid: Grid, local: int | None, chunks: int, costs: Costs) -> Plan:
    steps = needed_phases(factors, grid, local)
    pieces = _pieces(ceil(m / grid.rows), chunks)
    compute, exchange, total = _timeline(pieces, steps, factors, dtype, grid.columns, costs)
    most = max(step.stop - step.start for step in steps) if local is None else local
    return Plan(m, factors, dtype, grid, most, chunks, steps, compute, exchange, total)


def _timeline(
    pieces: Sequence[int], steps: Sequence[Phase], factors: Shapes, dtype: str, columns: int, costs: Costs
) -> tuple[float, float, float]:
    """(compute, exchange, end): one kernel and one exchange at a time, in the order of `kron_matmul`'s calls."""
    device_free = link_free = compute = exchange = 0.0
    ready = [0.0] * len(pieces)
    for step in steps:
        for i, rows in enumerate(pieces):
            work = costs.compute_us(rows, step, factors, dtype, columns)
            device_free = max(device_free, ready[i]) + work
            ready[i] = device_free
            compute += work
            if columns > 1:
                sending = costs.exchange_us(rows * step.k_out // columns * _bytes(dtype), columns)
                link_free = max(link_free, device_free) + sending
                ready[i] = link_free
                exchange += sending
    return compute, exchange, max(ready)


@dataclass(frozen=True)
class ScalingPoint:
    """One number of ranks: its plan, the time of one rank for the same rows (`one_us`), speed-up and speed-up / ranks."""

    ranks: int
    plan: Plan
    one_us: float

    @property
    def speedup(self) -> float:
        """The time of one rank over that of all."""
        return self.one_us / self.plan.us

    @property
    def efficiency(self) -> float:
        """Speed-up / ranks: 1 is perfect."""
        return self.speedup / self.ranks


def scaling(
    m: int,
    factors: Sequence[tuple[int, int]],
    ranks: Sequence[int] = (1, 2, 4, 8, 16, 64, 256, 1024),
    dtype: str = "float32",
    *,
    weak: bool = True,
    columns: int | None = None,
    **options: Any,
) -> list[ScalingPoint]:
    """A model of scaling: the plan of each number of ranks. Nothing is measured here.

    m: rows a rank (`weak`) or rows in all.  columns: GK of every point with at least so many ranks, None takes the best.
    options: those of `plan` (device, link, network, per_host, kernel_us, local, chunks).

    Assumed:
    * Every rank is the same GPU and has its own link and its own share of the network at full rate: no contention, no stragglers.
    * Ranks of a row of the grid are neighbours, `per_host` of them in a host; an exchange inside a host takes the link's latency
      and bandwidth for any number of peers, and one across hosts sends to near and far peers at the same time.
    * Latency does not grow with the number of peers; in truth it does, so points with many columns are too good.
    * A kernel takes what a log of its exact rows says, else the roofline; real kernels need more, which makes the exchange
      look larger beside them than it is. Give `kernel_us` for anything else.
    * The one rank that is compared with holds the whole problem, whether or not it would fit into one memory.
    """
    shapes = _shapes(m, factors, dtype)
    if columns is not None:
        positive("columns", columns)
    points = []
    for count in ranks:
        rows = m * positive("ranks", count) if weak else m
        grid = None
        if columns is not None and count >= columns:
            if count % columns:
                raise ArgumentError(f"columns={columns} does not divide ranks={count}")
            grid = Grid(count // columns, columns)
        chosen = plan(rows, shapes, count, dtype, grid=grid, **options)
        points.append(ScalingPoint(count, chosen, plan(rows, shapes, 1, dtype, **options).us))
    return points


# -- parts ----------------------------------------------------------------------------------------------


def _bytes(dtype: str) -> int:
    return DTYPES[dtype].bits // 8


def _sent_bytes(steps: Sequence[Phase], columns: int, dtype: str) -> int:
    """Bytes of one row that one rank sends to others."""
    if columns == 1:
        return 0
    return sum(step.k_out // columns // columns * (columns - 1) for step in steps) * _bytes(dtype)


def _pieces(rows: int, chunks: int) -> list[int]:
    """Rows of each piece, as torch.tensor_split cuts them."""
    count = max(1, min(rows, chunks))
    return [rows // count + (i < rows % count) for i in range(count)]


def _shapes(m: Any, factors: Any, dtype: str) -> Shapes:
    """The checked shapes, one by one: a row of X may be larger than the tensors of one rank may be."""
    positive("m", m)
    if isinstance(factors, str) or not isinstance(factors, Sequence):
        raise ArgumentTypeError(f"factors={factors!r} must be a sequence of (P, Q) pairs")
    if not 1 <= len(factors) <= MAX_FACTORS:
        raise ArgumentError(f"factors: {len(factors)} given, 1 to {MAX_FACTORS} are allowed")
    return tuple(KronMatmul(m=1, factors=(pair,), dtype=dtype).factors[0] for pair in factors)


def _costs(device: Any, link: Any, network: Any, per_host: Any, kernel_us: KernelTime | None) -> Costs:
    found = device if isinstance(device, Device) else resolve_target(device)
    positive("per_host", per_host)
    return Costs(found, kernel_us or from_logs(found), _link("link", link), _link("network", network), per_host)


def _link(name: str, value: Any) -> Link:
    if isinstance(value, Link):
        return value
    if not isinstance(value, str):
        raise ArgumentTypeError(f"{name}={value!r} is not allowed: a Link or a name is needed")
    if value not in LINKS:
        raise choose(name, value, LINKS)
    return LINKS[value]
