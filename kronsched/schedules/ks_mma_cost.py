"""A predicted time for the tensor-core Kronecker-sparse kernels, from what a launch asks of each part of the GPU. No TVM.

    time = (memory^q + L2^q + lines^q + shared^q + tensor cores^q + issue slots^q + latency^q)^(1/q) · idle share + start

The constants were fitted to measurements on an H200 (see `Constants`). The prediction chooses default configs and is a feature of
the cost model; it is no claim.

Read first: `demand_of`, `predict`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING

from kronsched.schedules.ks_last_plan import LastPlan
from kronsched.schedules.ks_mma_limits import LANES
from kronsched.schedules.ks_mma_plan import MmaPlan
from kronsched.workloads.ks import pattern_in, pattern_out

if TYPE_CHECKING:
    from kronsched.hardware import Device

Plan = MmaPlan | LastPlan
SECTOR = 32
LINE = 128
READ, WRITTEN = 0.8, 1.2
"""What a byte of memory costs, over one of a copy (which reads as many as it writes)."""
_BLOCK_SHARED = 1024


@dataclass(frozen=True)
class Constants:
    """Fitted constants. Rates are shares of what the device has, times are in microseconds.

    Fitted to try-outs on an H200, which are not shipped.
    """

    l2: float = 2.276  # of the memory's rate
    lines: float = 0.339  # of a line of 128 bytes a cycle of each SM
    shared: float = 0.958  # of 128 bytes a cycle of each SM
    cycles: float = 1700.0  # a microsecond
    rates: tuple[tuple[float, float], tuple[float, float]] = ((0.856, 0.896), (0.417, 0.529))
    """Of the float16 peak: by mma.sync and by wgmma, 16-bit and TF32."""
    issue: float = 1.871  # instructions a cycle of an SM
    flight: float = 1799.0  # bytes an SM must have under way
    power: float = 2.238
    sync: float = 0.025  # a chunk of k
    wait: float = 0.600  # until a chunk has come, shared by those that are fetched ahead
    direct: float = 1.098  # more time for bytes that are stored from registers as they come, in 16 or 32 neighbouring bytes
    tile: float = 0.330  # the end of a tile
    quick: float = 0.05  # the same, where lanes store 64 neighbouring bytes as they are
    start: float = 3.209  # launches, filling and draining the pipeline
    pack: float = 1.025  # of it, for packing weights in a launch of its own
    gathered: float = 0.1006  # gathering of a weight word by a thread
    strained: float = 1.017  # more time where registers are short
    idle: float = 0.506  # how much of an uneven end is not hidden


@dataclass(frozen=True)
class Demand:
    """What a launch asks for. Bytes and operations of the whole launch, unless said otherwise."""

    memory: float
    scattered: float  # of them, written by stores to places apart
    l2: float
    lines: float  # of X, as an SM fetches them: a line of 128 bytes for every line that the lanes of a copy touch
    shared: float
    flops: float  # of the tensor cores, padding and TF32 products included
    instructions: float  # of warps
    flight: float  # bytes under way on an SM
    run_in: int  # neighbouring bytes of a read of X
    run_out: int  # and of a write of Y
    blocks: int
    per_sm: int
    rounds: int  # tiles that a group of warps works through, one after another
    even: float  # share of the groups that have work in the last round, over all rounds
    quick: bool  # see `_Tile`


@dataclass(frozen=True)
class _Tile:
    """What one tile of one slice asks for. Instructions are counted by warp, and by k step where `step` is in the name."""

    rows: int
    outputs: int  # sums of a row: j, or (j, l)
    warps: int
    groups: int
    j_slices: int
    blocks_a_slice: int
    x_bytes: int  # a chunk
    step_instructions: float
    end_instructions: float
    weight_reads: int  # times that weights, and rows of X, are read from shared memory
    row_reads: int
    run_in: int
    run_out: int
    scattered: float  # 1: stores of 16 bytes to places apart
    staged: bool
    quick: bool = False  # whether the end of a tile is (see `Constants`)


def _first(p: MmaPlan) -> _Tile:
    wide, d = p.item == 4, p.pattern[3]
    operands, columns = p.l_units * p.unit_l * p.mt * 4, p.l_units * p.unit_l * p.pairs
    loads = p.l_units * p.mt * 2 * p.raw_words // p.load_words
    step = 1.5 * loads + operands * (3 if wide else 1)
    if not p.wgmma:
        step += 1.5 * columns + columns * 2 * p.mt * (3 if wide else 1) + (12 * columns if wide else 0)
    if p.fresh:
        step += p.sums / p.fresh_form[0]
    stored = p.sums * p.item / 16
    end = 2 * stored * (3 if p.store == "staged" else 1) + p.sums * (1.2 if wide else 1.0)
    if p.store in ("pair", "quad"):
        end += 3 * p.sums * p.item / 4
    whole = (p.jb * d if p.small else p.lb) * p.item
    # Neighbouring lanes store neighbouring 8 or 16 bytes.
    joined = 4 * d * p.item <= 16 if p.small else d == p.per16
    direct = (16 if joined else 4) * d * p.item if p.small else 64 if joined else 16
    run_out = {"staged": whole, "pair": 32, "quad": 64, "direct": direct}[p.store]
    return _Tile(
        rows=p.rows,
        outputs=p.jb * p.lb,
        warps=p.group_threads // LANES,
        groups=p.groups,
        j_slices=p.slices[1],
        blocks_a_slice=p.grid_rows,
        x_bytes=p.rows * p.row_bytes,
        step_instructions=step,
        end_instructions=end,
        weight_reads=p.warps_m // 4 * p.mt if p.wgmma else p.warps_m,
        row_reads=p.warps_j,
        run_in=(p.ks * d if p.small else p.lb) * p.item,
        run_out=run_out,
        scattered={"staged": 0.0, "pair": 0.5, "quad": 0.0, "direct": 0.0 if joined else 1.0}[p.store],
        staged=p.store == "staged",
        quick=p.store == "quad" or (p.store == "direct" and p.small and joined),
    )


def _last(p: LastPlan) -> _Tile:
    wide, instructions = p.item == 4, p.units * p.lane_n
    step = 1.5 * p.units * p.own + instructions * 2 * (3 if wide else 1)
    if not p.wgmma:
        step += 1.5 * p.mj + p.mj * instructions * (3 if wide else 1) + (12 * p.mj if wide else 0)
    if p.fresh:
        step += p.sums / p.fresh_form[0]
    stored = p.sums * p.item / p.vector
    return _Tile(
        rows=p.nb,
        outputs=p.jb,
        warps=p.threads // LANES,
        groups=1,
        j_slices=p.j_slices,
        blocks_a_slice=p.grid_tiles,
        x_bytes=p.nb * p.ks * p.item,
        step_instructions=step,
        end_instructions=2 * stored + p.sums * (1.2 if wide else 1.5),
        weight_reads=p.warps_n // 4 if p.wgmma else p.warps_n,
        row_reads=p.warps_j,
        run_in=p.nb * p.item,
        run_out=8 * p.vector if p.wgmma else 64,
        scattered=0.0,
        staged=False,
    )


def demand_of(p: Plan, device: Device) -> Demand:
    """What the launch of a plan asks for."""
    t = _last(p) if isinstance(p, LastPlan) else _first(p)
    a, b, c, d = p.pattern
    x, y = p.item * p.batch * pattern_in(p.pattern), p.item * p.batch * pattern_out(p.pattern)
    wasted_in, wasted_out = SECTOR / min(SECTOR, t.run_in), SECTOR / min(SECTOR, t.run_out)
    chunk, works, blocks = 4 * p.chunk_words, p.tiles * p.slice_count, p.slice_count * t.blocks_a_slice
    weights = chunk * p.chunks * (works if p.stream else blocks)
    copies = (t.x_bytes / p.copy_bytes + (chunk / 16 if p.stream else 0)) / LANES
    steps = p.ks // p.k_step * t.warps * t.step_instructions
    tile_out = t.rows * t.outputs * p.item
    per_sm = max(1, min(p.min_blocks, device.shared_per_sm // (4 * p.shared_words + _BLOCK_SHARED)))
    rounds = ceil(p.tiles / (t.groups * t.blocks_a_slice))
    shared = p.chunks * (t.x_bytes * (1 + t.row_reads) + chunk * t.weight_reads) + (2 * tile_out if t.staged else 0)
    return Demand(
        memory=READ * x + WRITTEN * y * (1 + 0.5 * (wasted_out - 1)) + p.item * a * b * c * d,
        scattered=y * t.scattered,
        l2=x * wasted_in * t.j_slices + y * wasted_out + weights,
        lines=x * t.j_slices * _lines(p, t.run_in),
        shared=works * shared + weights,
        flops=2.0 * works * t.rows * t.outputs * p.chunks * p.ks * (3 if p.item == 4 else 1),
        instructions=works * (p.chunks * (steps + 4 * copies) + t.warps * t.end_instructions),
        flight=per_sm * t.groups * p.ahead * (t.x_bytes + (chunk if p.stream else 0)),
        run_in=t.run_in,
        run_out=t.run_out,
        blocks=blocks,
        per_sm=per_sm,
        rounds=rounds,
        even=p.tiles / (t.groups * t.blocks_a_slice * rounds),
        quick=t.quick,
    )


def _lines(p: Plan, run: int) -> float:
    """Lines that the 32 lanes of a copy of X touch, 16 bytes each, over the 4 that would hold them."""
    if run >= LINE or isinstance(p, LastPlan) or p.small:
        return 1.0
    runs_a_line = max(1.0, LINE / (p.pattern[3] * p.item))
    return max(1.0, LANES * 16 / run / runs_a_line / 4)


def parts_us(p: Plan, need: Demand, device: Device, k: Constants) -> dict[str, float]:
    """Microseconds of each part of the GPU, were it the only one that is busy; and of the latency of chunks and tiles."""
    cycles = device.units * k.cycles
    waves = max(1.0, need.blocks / (device.units * need.per_sm))
    peak = device.peak_gflops.get("float16", 4 * device.peak_gflops["float32"])
    return {
        "memory_us": (need.memory + k.direct * need.scattered) / device.bandwidth_gbs / 1e3 * max(1.0, k.flight / need.flight),
        "cache_us": need.l2 / (k.l2 * device.bandwidth_gbs) / 1e3,
        "lines_us": need.lines / (LINE * k.lines * cycles),
        "shared_us": need.shared / (128 * k.shared * cycles),
        "mma_us": need.flops / (peak * k.rates[p.item == 4][p.wgmma]) / 1e3,
        "issue_us": need.instructions / (k.issue * cycles),
        "latency_us": need.rounds * waves * (p.chunks * (k.sync + k.wait / p.ahead) + (k.quick if need.quick else k.tile)),
    }


def predict(p: Plan, need: Demand, device: Device, k: Constants) -> float:
    """Microseconds of a launch, and of the packing of its weights."""
    together = math.pow(sum(math.pow(t, k.power) for t in parts_us(p, need, device, k).values()), 1 / k.power)
    waves = need.blocks / (device.units * need.per_sm)
    idle = 1 + k.idle * (ceil(waves) / waves / need.even - 1)
    start = k.start - k.pack + p.resident_words / p.threads * k.gathered if p.gather else k.start
    return together * idle * (k.strained if _strained(p) else 1.0) + start


def _strained(p: Plan) -> bool:
    """Whether ptxas may spill: the estimate is short of what mma.sync takes where a lane's loads serve several instructions."""
    more = 28 if isinstance(p, MmaPlan) and not p.small and not p.wgmma else 0
    return p.registers + more > 232
