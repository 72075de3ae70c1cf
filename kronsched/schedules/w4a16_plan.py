"""The arithmetic of a W4A16 CUDA kernel: tiles, trips, memory and registers that a config makes at a shape. No TVM.

    grid:   column blocks × split_k × row blocks
    block:  warps_n × warps_k warps; a warp owns `strips` strips of 16 columns and every warps_k-th chunk of 128 rows of k
    warp:   for each chunk: strips × mtile accumulators of 16 × 8

Read first: `W4Plan`, `plan_w4`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import gcd
from typing import TYPE_CHECKING, Any

from kronsched.dtypes import DTYPES
from kronsched.errors import InvalidConfig
from kronsched.quant.layout import TILE_K, TILE_N
from kronsched.space import Config
from kronsched.workloads.gemm import Gemm

if TYPE_CHECKING:
    from kronsched.hardware import Device

MAX_WASTE = 0.25
"""Largest share of a block's trips along k that may fall beyond its end."""
_FIXED_REGISTERS = 40
_SMALL_REDUCTION = 32 * 1024
_MOST_KEPT = 4


class W4Tiles:
    """What a main kernel's sizes follow from, whatever instruction multiplies; a plan adds how its knobs make them.

    workload: what is computed.  split_k: blocks that share the sum along k.  reduction: "flat" or "halving" (w4a16_epilogue.py).
    start: "serial": after the kernel before it on the stream; "wait": its blocks start while that one ends, and wait for it;
    "early": they read weights before they wait. Weights are constants: who writes packed tensors in place synchronises before
    the next call. With split_k > 1 "early" is no gain: blocks that wait take the place of those that add up partial results.
    strips, strip_step: strips of 16 columns a warp owns, and how far they are apart.  warps_k: shares of k in a block that add
    up in shared memory.  mtile, rows: tiles of 8 rows of x a block holds, and these rows.  columns, threads: of a block.
    """

    workload: Gemm
    split_k: int
    reduction: str
    start: str
    strips: int
    strip_step: int
    warps_k: int
    mtile: int
    rows: int
    columns: int
    threads: int

    @property
    def consumers(self) -> int:
        """Threads that hold sums; the others only fetch."""
        return self.threads

    @property
    def prepared(self) -> bool:
        """Whether a first kernel gathers or pads x: rows sorted by group, or rows of x that do not start on 16 bytes."""
        return self.workload.act_order or self.workload.k % 8 != 0

    @property
    def k(self) -> int:
        """Columns of x as the main kernel reads it."""
        return self.workload.layout.k_packed if self.prepared else self.workload.k

    @property
    def chunks(self) -> int:
        """Chunks of 128 rows of k."""
        return self.workload.layout.k_packed // TILE_K

    @property
    def trips(self) -> int:
        """Chunks a warp walks over, the ones beyond the end included."""
        return -(-self.chunks // (self.warps_k * self.split_k))

    @property
    def ragged_k(self) -> bool:
        """Whether some reads of x must be replaced by zeros."""
        return self.k % TILE_K != 0 or self.trips * self.warps_k * self.split_k != self.chunks

    @property
    def span(self) -> int:
        """Rows of a chunk that surely share a scale: 32, 64 or 128."""
        layout = self.workload.layout
        return TILE_K if layout.groups == 1 else gcd(layout.rows_per_group, TILE_K)

    @property
    def grid(self) -> tuple[int, int, int]:
        """(column blocks, splits of k, row blocks)."""
        w = self.workload
        return (-(-w.layout.n_packed // self.columns), self.split_k, -(-w.m // self.rows))

    @property
    def pitch(self) -> int:
        """Floats from row to row of a partial result in shared memory; 4 more than the columns: no bank conflicts."""
        return self.columns + 4

    @property
    def slots(self) -> int:
        """Partial results that are in shared memory at once."""
        return self.warps_k if self.reduction == "flat" else max(1, self.warps_k // 2)


@dataclass(frozen=True)
class W4Plan(W4Tiles):
    """One main kernel. Knobs under their own names; see the properties for what follows from them.

    strips, …, zeros: the knobs, as search_spaces/gemm_w4a16_cuda.toml says.  per_sm: blocks that ptxas is told an SM should
    hold: it limits registers to that, and to nothing less.
    """

    workload: Gemm
    strips: int
    warps_n: int
    warps_k: int
    mtile: int
    stages: int
    split_k: int
    x_load: str
    batch: int
    unroll: int
    reduction: str
    zeros: str
    start: str
    per_sm: int = 1

    strip_step = 1

    @property
    def columns(self) -> int:  # type: ignore[override]
        """Columns of a block."""
        return 16 * self.strips * self.warps_n

    @property
    def rows(self) -> int:  # type: ignore[override]
        """Rows of x of a block."""
        return 8 * self.mtile

    @property
    def threads(self) -> int:  # type: ignore[override]
        """Threads of a block."""
        return 32 * self.warps_n * self.warps_k

    @property
    def ring_words(self) -> int:
        """32-bit words of the cp.async ring in shared memory; 0 when weights go straight to registers."""
        return self.stages * 2 * self.strips * self.threads * 4

    @property
    def shared_words(self) -> int:
        """Words of shared memory: the ring, then partial results in its place."""
        return max(self.ring_words, self.slots * self.rows * self.pitch)

    @property
    def kept_sums(self) -> int:
        """Groups of a chunk whose sums of x are kept for all batches of strips; all, or one: made anew for each batch."""
        parts = TILE_K // self.span
        return parts if parts * self.mtile <= _MOST_KEPT else 1

    @property
    def registers(self) -> int:
        """A rough count of live registers a thread."""
        x = {"segment": 8, "late": 16, "ahead": 32}[self.x_load] * self.mtile
        columns = 2 * self.strips * (TILE_K // self.span)
        kind = self.workload.zero_point
        per_column = 1 if kind == "symmetric" else 3 if kind == "float" else 2
        sums = 4 * self.mtile * self.kept_sums if self.zeros == "sum" else 0
        weights = 8 * self.strips if self.stages == 0 else 4 * self.batch
        tiles = (self.strips + self.batch) * self.mtile * 4
        return _FIXED_REGISTERS + x + columns * per_column + sums + weights + tiles + 4 * self.batch


def plan_w4(w: Gemm, config: Config, device: Device) -> W4Plan:
    """The plan of a config. Raises InvalidConfig with one line when it breaks a limit or repeats another config's kernel."""
    c: dict[str, Any] = dict(config)
    c.setdefault("start", "serial" if capability(device) < 90 else "wait" if c["split_k"] > 1 else "early")
    plan = W4Plan(workload=w, **c)
    if "per_sm" not in c:
        plan = replace(plan, per_sm=_blocks_per_sm(plan, device))
    for broken in (_limits(plan, device), _idle(plan, device.units)):
        if broken is not None:
            raise InvalidConfig(broken)
    return plan


def _blocks_per_sm(p: W4Plan, device: Device) -> int:
    """Blocks that an SM should hold at once: as many as there are for it, if their registers suffice."""
    blocks = p.grid[0] * p.grid[1] * p.grid[2]
    fit = int(device.registers_per_sm // (_enough_registers(p) * p.threads))
    return max(1, min(-(-blocks // device.units), fit, device.max_threads_per_sm // p.threads))


def _enough_registers(p: W4Plan) -> float:
    """Registers a thread that ptxas can do with: a tenth less than it takes when nothing limits it."""
    return max(32, 1.17 * p.registers - 32)


def _limits(p: W4Plan, device: Device) -> str | None:
    if p.threads > min(device.max_threads_per_block, 512):
        return f"warps_n={p.warps_n} × warps_k={p.warps_k} makes {p.threads} threads, 512 at most"
    if p.shared_words * 4 > device.shared_per_block:
        return f"{p.shared_words * 4} bytes of shared memory, {device.name} has {device.shared_per_block} a block"
    if p.registers > 255 or _enough_registers(p) * p.threads > device.registers_per_sm:
        return f"about {p.registers} registers for each of {p.threads} threads: too many"
    slots = p.trips * p.warps_k * p.split_k
    if slots > 1 and slots - p.chunks > MAX_WASTE * slots:
        return f"warps_k={p.warps_k} × split_k={p.split_k} leaves {slots - p.chunks} of {slots} trips along k without work"
    return None


def _idle(p: W4Plan, units: int) -> str | None:
    """Why a config repeats the kernel, or the waste, of another one."""
    w = p.workload
    if p.strips % p.batch != 0:
        return f"batch={p.batch} does not divide strips={p.strips}"
    if p.x_load == "segment" and p.batch != p.strips:
        return f"x_load='segment' would load x {p.strips // p.batch} times: batch={p.strips} is needed"
    if p.columns > max(TILE_N, w.layout.n_packed):
        return f"{p.columns} columns a block, the padded n is {w.layout.n_packed}"
    if p.mtile > 1 and p.rows >= 2 * w.m:
        return f"mtile={p.mtile} holds {p.rows} rows, m={w.m} needs at most half"
    if p.unroll > 1 and p.trips < 2 * p.unroll:
        return f"unroll={p.unroll} with {p.trips} trips"
    if p.stages > 2 and p.stages > p.trips:
        return f"stages={p.stages} with {p.trips} trips"
    if p.x_load == "ahead" and p.trips == 1:
        return "x_load='ahead' with one trip"
    if p.reduction == "halving":
        flat = p.warps_k * p.rows * p.pitch * 4
        if flat <= _SMALL_REDUCTION:
            return f"reduction='halving' for {flat} bytes: 'flat' is as good up to {_SMALL_REDUCTION}"
    blocks = p.grid[0] * p.grid[2]
    if p.split_k > 1 and p.split_k * blocks > 4 * units:
        return f"split_k={p.split_k} of {blocks} blocks for {units} multiprocessors: more blocks are no help"
    return None


def capability(device: Device) -> int:
    """Such as 90 for sm_90a."""
    return int("".join(c for c in device.arch if c.isdigit()))


def zero_methods(w: Gemm) -> tuple[str, ...]:
    """How zeros can enter: "fold" into the integers before the product, or "sum": zero × Σ x subtracted after it."""
    return {"symmetric": ("fold",), "asymmetric": ("fold", "sum"), "float": ("sum",)}[w.zero_point]


def w4_features(p: W4Plan, device: Device) -> dict[str, float]:
    """Blocks, waves, occupancy, bytes through memory and a roofline time (µs), for the cost model."""
    w, item = p.workload, DTYPES[p.workload.a_dtype].itemsize
    blocks = p.grid[0] * p.grid[1] * p.grid[2]
    shared = p.shared_words * 4
    registers = min(255, -(-p.registers // 8) * 8)
    per_sm = min(
        device.shared_per_sm // (shared + 1024),
        device.max_threads_per_sm // p.threads,
        device.registers_per_sm // (registers * p.threads),
        32,
    )
    per_sm = max(1, per_sm)
    waves = blocks / (device.units * per_sm)
    weights = w.layout.n_packed * w.layout.k_packed / 2
    x_bytes = float(p.grid[0] * p.grid[2] * p.rows * w.layout.k_packed * item * p.warps_n)
    partial = 8.0 * p.split_k * w.m * w.n if p.split_k > 1 else 0.0
    flight = per_sm * p.threads * 32 * p.strips * max(1, p.stages - 1)
    work = 2.0 * p.grid[2] * p.rows * w.layout.n_packed * w.layout.k_packed
    memory_us = (w.min_bytes + partial) / device.bandwidth_gbs / 1e3
    return {
        "launches": 1.0 + (p.split_k > 1) + p.prepared,
        "blocks": float(blocks),
        "blocks_per_sm": float(per_sm),
        "threads_per_sm": float(per_sm * p.threads),
        "waves": waves,
        "wave_efficiency": waves / -(-waves // 1),
        "busy_sms": min(1.0, blocks / device.units),
        "trips": float(p.trips),
        "k_waste": 1 - p.chunks / (p.trips * p.warps_k * p.split_k),
        "weights_mb": weights * p.grid[2] / 1e6,
        "x_mb": x_bytes / 1e6,
        "partial_mb": partial / 1e6,
        "bytes_in_flight": float(flight),
        "shared_kb": shared / 1024,
        "registers": float(p.registers),
        "reduction_kb": p.warps_k * p.rows * p.pitch * 4 / 1024,
        "mma_per_scale": p.span / 16,
        "roofline_us": max(memory_us, work / device.peak_gflops.get(w.compute_dtype, 1e4) / 1e3),
    }
