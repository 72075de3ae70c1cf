"""How a fused Kron-Matmul is cut up: pure arithmetic, no TVM. The CUDA schedule, its constraints and its features read it.

    kernel groups     consecutive axes contracted in one launch: one read and one write of the tensor
    exchange groups   axes contracted between two trips through shared memory (one `StagePlan` each)
    register groups   the axes of a stage that one thread contracts on elements it holds in registers

A launch sees the tensor as (O, P_s, …, P_e, C): everything before its axes is merged into O, everything after into C. A block
owns `rows` of O and `ct` of C with all of the axes; both edges are padded in the block and guarded in global memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import ceil, prod

from kronsched.dtypes import DTYPES
from kronsched.errors import InvalidConfig
from kronsched.space import Config
from kronsched.workloads.kron import KronMatmul

Pair = tuple[int, int]


@dataclass(frozen=True)
class StagePlan:
    """One exchange group.

    axes: positions among the launch's factors, ascending and consecutive.
    tile: False = all of the axes' elements sit in one thread's registers; True = one large axis, a thread accumulates `tq`
        outputs (for each of `tr` rows) while it walks along p.
    items: thread work items of a block (before they are dealt to the threads).
    extent: axis sizes of the block's tile when the stage starts (contracted axes hold Q, the others P).
    """

    axes: tuple[int, ...]
    tile: bool
    items: int
    tq: int
    tr: int
    extent: tuple[int, ...]
    after: tuple[int, ...]


@dataclass(frozen=True)
class LaunchPlan:
    """One kernel: contracts factors[first:last] of the workload on a tensor viewed as (outer, …, inner)."""

    first: int
    last: int
    outer: int
    inner: int
    factors: tuple[Pair, ...]
    rows: int
    ct: int
    threads: int
    stages: tuple[StagePlan, ...]
    stage_in: bool
    stage_out: bool
    vec_in: int
    vec_out: int
    shared_bytes: int

    @property
    def grid(self) -> tuple[int, int]:
        """Blocks along O and along C."""
        return ceil(self.outer / self.rows), ceil(self.inner / self.ct)

    @property
    def out_extents(self) -> tuple[int, ...]:
        """Axis sizes after the launch."""
        return tuple(q for _, q in self.factors)


def plan_launches(w: KronMatmul, config: Config, shared_limit: int) -> tuple[LaunchPlan, ...]:
    """The launches of a config, in order of execution (last axes first). Raises InvalidConfig with one line.

    shared_limit: bytes of shared memory a block may use.
    """
    n = len(w.factors)
    launches = []
    end = n
    for size in _balanced(n, int(config["fuse"])):
        start = end - size
        outer = w.m * prod(p for p, _ in w.factors[:start])
        inner = prod(q for _, q in w.factors[end:])
        launches.append(_plan_launch(w, config, start, end, outer, inner, shared_limit))
        end = start
    return tuple(launches)


def _plan_launch(w: KronMatmul, config: Config, start: int, end: int, outer: int, inner: int, limit: int) -> LaunchPlan:
    factors = w.factors[start:end]
    width = max(prod(p for p, _ in factors), prod(q for _, q in factors))
    ct = min(inner, int(config["ctile"]))
    rows = max(1, min(outer, _floor_pow2(int(config["tile"]) // (width * ct))))
    regs = int(config["regs"])
    groups = _groups(factors, regs, str(config["grouping"]))
    extent = [p for p, _ in factors]
    stages = []
    for axes in _ordered(groups, str(config["order"])):
        tile = len(axes) == 1 and max(factors[axes[0]]) > regs
        tq = _divisor(factors[axes[0]][1], int(config["tq"])) if tile else 0
        tr = min(int(config["tr"]), rows) if tile else 1
        if tile and rows % tr:
            raise InvalidConfig(f"tr={tr} does not divide the {rows} rows of a block")
        before = tuple(extent)
        others = prod(e for i, e in enumerate(extent) if i not in axes)
        for i in axes:
            extent[i] = factors[i][1]
        items = rows * ct * others
        if tile:
            items = items // tr * (factors[axes[0]][1] // tq)
        stages.append(StagePlan(axes, tile, items, tq, tr, before, tuple(extent)))
    stage_in = config["stage_in"] == "shared"
    stage_out = config["stage_out"] == "shared"
    # Never more threads than the smallest stage has items: TVM would have the idle ones repeat work on padding.
    threads = min(int(config["threads"]), ceil(min(s.items for s in stages) / 32) * 32)
    lane_in = ct if inner > 1 else factors[-1][0]
    lane_out = ct if inner > 1 else factors[-1][1]
    vec = int(config["vec"])
    whole = inner % ct == 0
    vec_in, vec_out = (vec if whole and lane % vec == 0 else 1 for lane in (lane_in, lane_out))
    exchanges = stage_in or stage_out or len(stages) > 1
    if exchanges and int(config["pad"]) % max(vec_in, vec_out):
        raise InvalidConfig(f"pad={config['pad']} would misalign vectors of {max(vec_in, vec_out)} elements in shared memory")
    shared = _shared_bytes(w, config, factors, rows, ct, threads, tuple(stages), stage_in, stage_out)
    if shared > limit:
        raise InvalidConfig(f"a block needs about {shared} bytes of shared memory, the device has {limit}")
    return LaunchPlan(
        start, end, outer, inner, factors, rows, ct, threads, tuple(stages), stage_in, stage_out, vec_in, vec_out, shared
    )


def _shared_bytes(
    w: KronMatmul,
    config: Config,
    factors: tuple[Pair, ...],
    rows: int,
    ct: int,
    threads: int,
    stages: tuple[StagePlan, ...],
    stage_in: bool,
    stage_out: bool,
) -> int:
    """Peak of the live exchange buffers plus the factors. TVM reuses a buffer whose last read precedes the next write."""
    item = DTYPES[w.dtype].itemsize
    chunk = padded_chunk(factors, stages, ct)
    pad = 1 + int(config["pad"]) % chunk / chunk
    live, peak = 0, 0
    for i, stage in enumerate(stages):
        reads_shared = i > 0 or stage_in
        lanes = ceil(stage.items / threads) * threads  # the last, partly idle pass over the items reads padding rows
        size_in = rows * ct * prod(stage.extent) * lanes // stage.items if reads_shared else 0
        writes_shared = i < len(stages) - 1 or stage_out
        size_out = rows * ct * prod(stage.after) if writes_shared else 0
        in_place = not stage.tile and stage.items == threads
        if (reads_shared and rows * ct * prod(stage.extent) == 1) or size_out == 1:
            raise InvalidConfig("an exchange buffer of one element: TVM 0.27 loses it when it merges shared memory")
        live = max(size_in, size_out) if in_place else size_in + size_out
        peak = max(peak, live)
    factor_elements = sum(p * q for p, q in factors) if config["factors_in"] == "shared" else 0
    return int(peak * pad * item) + factor_elements * item


def chunk_axis(stages: tuple[StagePlan, ...], axes: int) -> int:
    """The axis at which exchange buffers are padded: the first axis of the register group that holds the last axis."""
    return next(s.axes[0] for s in stages if axes - 1 in s.axes)


def padded_chunk(factors: tuple[Pair, ...], stages: tuple[StagePlan, ...], ct: int) -> int:
    """Elements between two paddings of an exchange buffer (the smaller of before and after the contraction)."""
    at = chunk_axis(stages, len(factors))
    return max(1, ct * min(prod(p for p, _ in factors[at:]), prod(q for _, q in factors[at:])))


def _balanced(n: int, most: int) -> list[int]:
    """Sizes of the kernel groups, first executed first: as few as possible, as equal as possible, larger ones first."""
    count = ceil(n / most)
    base, extra = divmod(n, count)
    return [base + 1] * extra + [base] * (count - extra)


def _groups(factors: tuple[Pair, ...], regs: int, grouping: str) -> list[tuple[int, ...]]:
    """Register groups, in axis order: consecutive axes whose elements (before, during and after) fit in `regs`.

    grouping: where the greedy packing starts: "tail", "head", or "ends" (both, leaving the odd group in the middle).
    """

    def fits(axes: range) -> bool:
        return prod(max(factors[i]) for i in axes) <= regs

    lo, hi = 0, len(factors)
    front: list[tuple[int, ...]] = []
    back: list[tuple[int, ...]] = []
    take_back = grouping != "head"
    while lo < hi:
        if take_back:
            start = hi - 1
            while start > lo and fits(range(start - 1, hi)):
                start -= 1
            back.insert(0, tuple(range(start, hi)))
            hi = start
        else:
            stop = lo + 1
            while stop < hi and fits(range(lo, stop + 1)):
                stop += 1
            front.append(tuple(range(lo, stop)))
            lo = stop
        if grouping == "ends":
            take_back = not take_back
    return front + back


def _ordered(groups: list[tuple[int, ...]], order: str) -> list[tuple[int, ...]]:
    """The order in which a block's groups are contracted (any order is right, since the axes commute).

    "tail": last first.  "head": first first.  "inner_last": first, then from the last down, so that both the read and the
    write of global memory run along axes that stay whole (coalesced without staging).
    """
    if order == "tail":
        return groups[::-1]
    if order == "head":
        return groups
    return [groups[0], *groups[:0:-1]]


@cache
def group_signature(factors: tuple[Pair, ...], regs: int, grouping: str) -> tuple[object, ...]:
    """Equal for (regs, grouping) pairs that cut these factors alike; lets a space drop values that repeat a kernel."""
    return tuple((axes, len(axes) == 1 and max(factors[axes[0]]) > regs) for axes in _groups(factors, regs, grouping))


def fused_axes(n: int, most: int) -> int:
    """The largest kernel group that `fuse=most` makes of n axes: equal for values that cut the axes alike."""
    return max(_balanced(n, most))


def stage_order(factors: tuple[Pair, ...], regs: int, grouping: str, order: str) -> list[tuple[int, ...]]:
    """The register groups of a launch in the order in which they are contracted."""
    return _ordered(_groups(factors, regs, grouping), order)


def _divisor(n: int, most: int) -> int:
    """The largest divisor of n that is at most `most`."""
    return next(d for d in range(min(n, most), 0, -1) if n % d == 0)


def _floor_pow2(n: int) -> int:
    return 1 << (n.bit_length() - 1) if n > 0 else 1
