"""How a Kron-Matmul is cut up for a CPU: pure arithmetic, no TVM. The CPU schedule, its constraints and its features read it.

    merged factors   neighbouring small factors multiplied together first, so that vectors fill up
    groups           neighbouring axes contracted chunk by chunk, intermediates of a chunk staying in cache
    steps            one axis of a group; a register tile accumulates tq × tv outputs while walking along p

A group sees the tensor as (rows, O, D, C): D holds its own axes, O the axes before, C the axes after them. A step sees D as
(A, P, B) and turns it into (A, Q, B). Vectors run along C when a chunk takes only `ctile` of it, else along B (C is merged
into B), else, for the last axis, along q.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import ceil, gcd, prod
from typing import TYPE_CHECKING

from kronsched.dtypes import DTYPES
from kronsched.errors import InvalidConfig
from kronsched.space import Config, Value
from kronsched.workloads.kron import KronMatmul

if TYPE_CHECKING:
    from kronsched.hardware import Device


@dataclass(frozen=True)
class Factor:
    """One factor as it is contracted: the Kronecker product of the workload's factors `members` (one or more neighbours)."""

    members: tuple[int, ...]
    p: int
    q: int


@dataclass(frozen=True)
class Step:
    """Contraction of one axis inside a group: (A, P, B) → (A, Q, B) for each chunk.

    axis: position among the merged factors.  along: "q", "b" or "c", the dimension vectors run along.
    tv: elements of the tile along it.  tq: outputs along q in the tile (1 when along is "q", where rows take that part).
    ta, tr: with along == "q", rows of A and of the row block in the tile.
    """

    axis: int
    a: int
    p: int
    q: int
    b: int
    along: str
    tv: int
    tq: int = 1
    ta: int = 1
    tr: int = 1


@dataclass(frozen=True)
class Group:
    """Neighbouring axes contracted together. rows: extent of the row dimension; block: rows of it in a chunk."""

    rows: int
    block: int
    outer: int
    size_in: int
    size_out: int
    inner: int
    ctile: int
    steps: tuple[Step, ...]


@dataclass(frozen=True)
class CpuPlan:
    """The whole program. nested: all groups run inside one parallel loop over row blocks, else each has its own."""

    factors: tuple[Factor, ...]
    nested: bool
    groups: tuple[Group, ...]
    lanes: int

    @property
    def parallel_blocks(self) -> int:
        """Iterations of the parallel loop; of the shortest one when every group has its own."""
        return min(ceil(g.rows / g.block) * (1 if self.nested else g.inner // g.ctile) for g in self.groups)


def plan_cpu(w: KronMatmul, config: Config, vector_bytes: int) -> CpuPlan:
    """The plan of a config for vectors of `vector_bytes` bytes."""
    return _plan(w, tuple(sorted((k, v) for k, v in config.items() if k != "parallel")), vector_bytes)


# The search asks for the same plan as constraint, as features and to build; one takes 50 µs.
@lru_cache(maxsize=4096)
def _plan(w: KronMatmul, items: tuple[tuple[str, Value], ...], vector_bytes: int) -> CpuPlan:
    config = dict(items)
    lanes = max(1, vector_bytes // DTYPES[DTYPES[w.dtype].accumulate].itemsize)
    factors = merge_factors(w, int(config["merge"]))
    nested = config["nest"] == "rows"
    pairs = [(f.p, f.q) for f in factors]
    extent = [f.p for f in factors]
    groups = []
    for axes in _in_order(_split_axes(pairs, int(config["chunk"]), int(config["ctile"])), pairs, str(config["order"])):
        outer, inner = prod(extent[: axes[0]]), prod(extent[axes[-1] + 1 :])
        rows = w.m if nested else w.m * outer
        ctile = _ctile(inner, int(config["ctile"]), lanes)
        tiled = ctile < inner
        size_in = prod(extent[i] for i in axes)
        block = min(rows, int(config["rows"]))
        steps = []
        for axis in _step_order(axes, pairs, str(config["order"])):
            before = prod(extent[axes[0] : axis])
            after = prod(extent[axis + 1 : axes[-1] + 1]) * (1 if tiled else inner)
            steps.append(_step(axis, before, *pairs[axis], after, ctile if tiled else 0, block, config, lanes))
            extent[axis] = pairs[axis][1]
        size_out = prod(extent[i] for i in axes)
        if not tiled:  # C becomes the innermost part of D
            size_in, size_out, inner, ctile = size_in * inner, size_out * inner, 1, 1
        groups.append(Group(rows, block, outer if nested else 1, size_in, size_out, inner, ctile, tuple(steps)))
    return CpuPlan(tuple(factors), nested, tuple(groups), lanes)


def merge_factors(w: KronMatmul, limit: int) -> list[Factor]:
    """Neighbours merged from the last axis on while both ΠP and ΠQ stay within `limit`."""
    merged: list[Factor] = []
    for i in reversed(range(len(w.factors))):
        p, q = w.factors[i]
        if merged and max(merged[0].p * p, merged[0].q * q) <= limit:
            first = merged[0]
            merged[0] = Factor((i, *first.members), p * first.p, q * first.q)
        else:
            merged.insert(0, Factor((i,), p, q))
    return merged


def _split_axes(pairs: list[tuple[int, int]], chunk: int, ctile: int) -> list[list[int]]:
    """Neighbouring axes together, from the last on, while a chunk stays within `chunk` elements (0: all in one group)."""
    if not chunk:
        return [list(range(len(pairs)))]
    groups: list[list[int]] = [[]]
    size = inner = 1
    for i in reversed(range(len(pairs))):
        if groups[0] and size * max(pairs[i]) > chunk:
            inner *= prod(pairs[k][1] for k in groups[0])
            groups.insert(0, [])
            size = min(ctile, inner)
        size *= max(pairs[i])
        groups[0].insert(0, i)
    return groups


def _gain(p: int, q: int, cost: float) -> float:
    """The exchange argument: contract first what has the largest (1 − Q/P) / cost."""
    return (1 - q / p) / cost


def _step_order(axes: list[int], pairs: list[tuple[int, int]], order: str) -> list[int]:
    sign = -1 if order == "tail" else 1
    return sorted(axes, key=lambda i: (-_gain(*pairs[i], pairs[i][1]), sign * i))


def _in_order(groups: list[list[int]], pairs: list[tuple[int, int]], order: str) -> list[list[int]]:
    def key(axes: list[int]) -> tuple[float, int]:
        size, cost = 1.0, 0.0
        for i in _step_order(axes, pairs, order):
            cost += size * pairs[i][1]
            size *= pairs[i][1] / pairs[i][0]
        return -round((1 - size) / cost, 12), -axes[0] if order == "tail" else axes[0]

    return sorted(groups, key=key)


def _ctile(inner: int, want: int, lanes: int) -> int:
    """Columns of a chunk: the largest divisor up to `want` that is whole vectors; all of them when there is none."""
    return max((t for t in range(lanes, min(want, inner) + 1, lanes) if inner % t == 0), default=inner)


def _step(axis: int, a: int, p: int, q: int, b: int, ctile: int, block: int, config: Config, lanes: int) -> Step:
    width, tq = int(config["vectors"]) * lanes, int(config["tq"])
    if ctile:
        return Step(axis, a, p, q, b, "c", gcd(ctile, width), even_tile(q, tq))
    if b > 1:
        return Step(axis, a, p, q, b, "b", vector_tile(b, width, lanes), even_tile(q, tq))
    if a >= tq:
        return Step(axis, a, p, q, b, "q", vector_tile(q, width, lanes), ta=even_tile(a, tq))
    tr = even_tile(block, max(1, tq // a))
    return Step(axis, a, p, q, b, "q", vector_tile(q, width, lanes), ta=a, tr=tr)


def vector_tile(extent: int, width: int, lanes: int) -> int:
    """Elements of a tile along vectors: all when they fill no vector, else 1, 2, 4… vectors, whichever wastes the fewest lanes.

    Only whole vectors, because LLVM turns such as <17 x float> into scalar code; the tail tile holds the rest.
    """
    if extent < lanes:
        return extent

    def rank(tile: int) -> tuple[int, int]:
        whole, rest = divmod(extent, tile)
        return -(whole * tile // lanes + ceil(rest / lanes)), tile

    return max((lanes << n for n in range(8) if lanes << n <= min(width, extent)), key=rank)


def even_tile(extent: int, want: int) -> int:
    """A tile of at most `want`: a divisor when one is near, else the extent cut into tiles as equal as possible."""
    if extent <= want:
        return extent
    divisor = max(d for d in range(1, want + 1) if extent % d == 0)
    return divisor if 3 * divisor >= 2 * want else ceil(extent / ceil(extent / want))


def register_count(device: Device) -> int:
    """Vector registers of the CPU: 32 with AVX-512 and on AArch64, else 16."""
    return 16 if device.arch.startswith("x86-64") and device.vector_bytes < 64 else 32


def accumulators(s: Step, lanes: int) -> int:
    """Vector registers that hold the sums of a tile."""
    return ceil(s.tv / lanes) * s.tq * s.ta * s.tr


def check_registers(plan: CpuPlan, registers: int) -> None:
    """Raise InvalidConfig when an accumulator tile leaves no register for operands."""
    for group in plan.groups:
        for s in group.steps:
            need = accumulators(s, plan.lanes)
            if need > registers - 2:
                raise InvalidConfig(f"axis {s.axis} accumulates in {need} vector registers, the CPU has {registers}")


def cpu_features(w: KronMatmul, plan: CpuPlan, parallel: bool, device: Device) -> dict[str, float]:
    """Features for the cost model; see the comments for units."""
    item = DTYPES[DTYPES[w.dtype].accumulate].itemsize
    vector_ops = loads = lanes_used = waste = 0.0
    largest = 0
    for g in plan.groups:
        repeats = g.rows * g.outer * (g.inner // g.ctile)
        for s in g.steps:
            columns = {"q": s.q, "b": s.b, "c": g.ctile}[s.along]
            across = s.a * (1 if s.along == "q" else s.q) * (s.b if s.along == "c" else 1)
            tile = s.ta * s.tr if s.along == "q" else s.tq
            vectors = columns // s.tv * ceil(s.tv / plan.lanes) + ceil(columns % s.tv / plan.lanes)
            ops = repeats * s.p * across * vectors
            vector_ops += ops
            lanes_used += repeats * s.p * across * columns
            loads += ops / tile + ops / ceil(s.tv / plan.lanes)
            waste = max(waste, 1 - columns / (vectors * plan.lanes))
        chunk = g.block * g.ctile * max(g.size_in, g.size_out) * item
        largest = max(largest, chunk)
    flops = 2 * lanes_used
    blocks = plan.parallel_blocks
    cores = min(device.units, blocks) if parallel else 1
    rounds = ceil(blocks / cores) * cores / blocks
    peak = device.peak_gflops.get(DTYPES[w.dtype].accumulate, 0.0) or 1.0
    passes = 1 if plan.nested else len(plan.groups)
    return {
        "groups": float(len(plan.groups)),
        "steps": float(sum(len(g.steps) for g in plan.groups)),
        "blocks_per_core": blocks / cores,
        "cores": float(cores),
        "imbalance": rounds,
        "chunk_kb": largest / 1024,  # of one tensor; a step holds two
        "row_block_kb": max(g.block * g.outer * g.inner * max(g.size_in, g.size_out) for g in plan.groups) * item / 1024,
        "lane_use": lanes_used / (vector_ops * plan.lanes),
        "worst_waste": waste,
        "loads_per_fma": loads / vector_ops,
        "flops": flops,
        "extra_flops": flops / w.flops,  # merged factors cost more
        "memory_passes": float(passes),
        "compute_us": vector_ops * plan.lanes * 2 * rounds / (peak * 1e3) * device.units / cores,
        "memory_us": w.min_bytes * passes / (device.bandwidth_gbs * 1e3) if device.bandwidth_gbs else 0.0,
        "accumulators": float(max(accumulators(s, plan.lanes) for g in plan.groups for s in g.steps)),
    }
