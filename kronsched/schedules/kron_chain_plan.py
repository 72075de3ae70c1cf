"""How a chained Kron-Matmul is cut up: pure arithmetic, no TVM. The schedule, its constraints and its features read it.

A block contracts all axes of `rows` rows of X at once; a persistent grid walks over the blocks, the next one's data on its way.

Read first: `ChainPlan`, `plan_chain`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, log
from typing import TYPE_CHECKING

from kronsched.dtypes import DTYPES
from kronsched.errors import InvalidConfig
from kronsched.schedules.kron_chain_layout import chunk_strides, pairs, tiles_a_row, units_a_row
from kronsched.space import Config
from kronsched.space.space import Value
from kronsched.workloads.kron import KronMatmul

if TYPE_CHECKING:
    from kronsched.hardware import Device

SERVED = {
    "float16": ((8, 3), (8, 4), (8, 5), (16, 3), (16, 4)),
    "bfloat16": ((8, 3), (8, 4), (8, 5), (16, 3), (16, 4)),
    "float32": ((8, 4), (8, 5), (4, 6), (4, 7), (2, 12), (2, 13)),
}
"""(P, N) of each dtype."""

RADIX = 64
"""float32: elements of a register group."""
PITCH = RADIX + 4
"""float32: floats from one line of 64 to the next in shared memory: 16-byte aligned, an odd number of 16-byte chunks."""


@dataclass(frozen=True)
class ChainPlan:
    """One kernel.

    rows: rows of X of a block.  blocks: ⌈m / rows⌉.  grid: thread blocks launched (fewer than `blocks` when persistent).
    per_sm: thread blocks that must fit on an SM (the launch bound that caps registers).
    prefetch: how the next block's data comes while the present one is exchanged: "none", "registers", "async" (cp.async into a
        stage in shared memory) or "split" (half of it each way).
    load, store: cache hints of global accesses.  unroll: steps of the loops over a warp's tiles after the first phase.
    group: float32: register groups summed at a time with the same factor row.
    staged_tiles: tiles of a warp (16-bit), or planes of 64 (float32), that come through the stage.
    """

    p: int
    n: int
    dtype: str
    m: int
    rows: int
    threads: int
    per_sm: int
    blocks: int
    grid: int
    prefetch: str
    load: str
    store: str
    unroll: int
    group: int
    staged_tiles: int
    shared_bytes: int

    @property
    def row_bytes(self) -> int:
        """Bytes of a row of X."""
        size: int = self.p**self.n * DTYPES[self.dtype].itemsize
        return size

    @property
    def tiles_a_thread(self) -> int:
        """What `staged_tiles` is a part of: register tiles of a warp in the first phase, or planes of the float32 kernel."""
        if self.dtype == "float32":
            return RADIX
        return self.rows * tiles_a_row(self.p, self.n) // (self.threads // 32)

    @property
    def steps_unrolled(self) -> int:
        """Steps of the longest loop that `unroll` applies to."""
        if self.dtype == "float32":
            return self.rows * RADIX * 16 // self.threads
        reads = self.rows * units_a_row(self.p, self.n) // (4 if self.p == 8 else 1)
        return max(reads // (self.threads // 32), self.tiles_a_thread if len(pairs(self.p, self.n)) > 1 else 0)

    @property
    def axes_a_group(self) -> int:
        """float32: axes of a register group."""
        return round(log(RADIX, self.p))

    @property
    def held_words(self) -> int:
        """32-bit words of the next block that come through a thread's registers."""
        words = 1 if self.dtype == "float32" else self.p * self.p * 4 // 32
        return (self.tiles_a_thread - self.staged_tiles) * words


def plan_chain(w: KronMatmul, config: Config, device: Device) -> ChainPlan:
    """The kernel of a config. Raises InvalidConfig with one line."""
    p, n = w.factors[0][0], len(w.factors)
    rows, threads, per_sm = int(config["rows"]), int(config["threads"]), int(config["per_sm"])
    prefetch = str(config["prefetch"])
    blocks = ceil(w.m / rows)
    grid = min(blocks, device.units * per_sm) if config["persistent"] else blocks
    if rows > w.m:
        raise InvalidConfig(f"rows={rows} is more than the {w.m} rows of X")
    if threads * per_sm > device.max_threads_per_sm:
        raise InvalidConfig(f"{per_sm} blocks of {threads} threads exceed the {device.max_threads_per_sm} threads of an SM")
    if grid == blocks and prefetch != "none":
        raise InvalidConfig(f"prefetch={prefetch}: there is no next block when every block has its own place in the grid")
    most = min(device.shared_per_block, device.shared_per_sm // per_sm - 1024)
    split = _split_float32 if w.dtype == "float32" else _split_half
    staged, shared = split(p, n, rows, threads, prefetch, most)
    if shared > most:
        raise InvalidConfig(f"{per_sm} blocks of {shared} bytes of shared memory do not fit on an SM")
    hints = str(config["load"]), str(config["store"]), int(config["unroll"]), int(config["group"])
    return ChainPlan(p, n, w.dtype, w.m, rows, threads, per_sm, blocks, grid, prefetch, *hints, staged, shared)


def _split_half(p: int, n: int, rows: int, threads: int, prefetch: str, most: int) -> tuple[int, int]:
    """(tiles of a warp that come through the stage, bytes of shared memory) of a 16-bit kernel."""
    tiles, warps = rows * tiles_a_row(p, n), threads // 32
    if tiles % warps:
        raise InvalidConfig(f"threads={threads}: {tiles} tiles of {p}x{p} chunks do not split evenly among its warps")
    if p == 8 and rows * units_a_row(p, n) // 4 % warps:
        raise InvalidConfig(f"threads={threads}: the reads of the last phase do not split evenly among {warps} warps")
    a_warp = tiles // warps
    staged = {"none": 0, "registers": 0, "split": a_warp // 2, "async": a_warp}[prefetch]
    if prefetch == "split" and staged == 0:
        raise InvalidConfig(f"prefetch=split: a warp of {threads} threads has a single tile, which async or registers take whole")
    words = (a_warp - staged) * p * p * 4 // 32
    if words > 64:
        raise InvalidConfig(f"threads={threads}: a thread would hold {words} words of data, at most 64 are allowed")
    # The exchange buffer, the stage (tiles of P² chunks of 16 bytes), the factors in fragment order.
    exchange, stage = rows * chunk_strides(p, n)[2] * 16, staged * warps * p * p * 16
    return staged, exchange + stage + n * 32 * (p // 8) ** 2 * 4


def _split_float32(p: int, n: int, rows: int, threads: int, prefetch: str, most: int) -> tuple[int, int]:
    """(planes that come through the stage, bytes of shared memory) of the float32 kernel."""
    lanes: int = p**n // RADIX
    if threads != rows * lanes:
        raise InvalidConfig(f"threads={threads}: {rows} rows need {rows * lanes}, one for each {RADIX} elements")
    fixed = rows * lanes * PITCH * 4 + n * p * p * 4
    if prefetch == "registers":
        raise InvalidConfig("prefetch=registers: a thread's registers hold its own elements; async stages the next ones")
    if prefetch == "none":
        return 0, fixed
    planes = min(RADIX if prefetch == "async" else RADIX // 2, (most - fixed) // (rows * lanes * 4) // 4 * 4)
    if planes < RADIX // 2:
        raise InvalidConfig(f"prefetch={prefetch}: only {max(0, planes)} of {RADIX} planes fit in spare shared memory, half must")
    return planes, fixed + planes * rows * lanes * 4


def idle_knob(plan: ChainPlan, config: Config, values: Mapping[str, tuple[Value, ...]]) -> str | None:
    """One line naming a knob that has no effect on this plan and is not at its first value, which repeats another kernel."""
    idle = []
    if plan.prefetch == "async" and plan.held_words == 0:
        idle.append("load")
    if plan.dtype != "float32":
        idle.append("group")
    for name in idle:
        if config[name] != values[name][0]:
            return f"{name}={config[name]} has no effect here, {name}={values[name][0]} is the same kernel"
    steps = plan.steps_unrolled
    if plan.unroll > steps and steps in values["unroll"]:
        return f"unroll={plan.unroll} has no effect here, the loops have {steps} steps at most: unroll={steps} is the same kernel"
    return None


def why_not(w: KronMatmul, device: Device) -> str | None:
    """None when a chained kernel serves the workload on the device, else one line."""
    served = SERVED.get(w.dtype, ())
    p, n = w.factors[0][0], len(w.factors)
    sizes = ", ".join(f"{a}x{a}^{b}" for a, b in served) or "nothing"
    if any(pair != (p, p) for pair in w.factors) or (p, n) not in served:
        return f"one-launch chained kernels serve equal square factors only: {sizes} in {w.dtype}"
    generation = "".join(c for c in device.arch.removeprefix("sm_") if c.isdigit())
    if generation and int(generation) < 80:
        return f"one-launch chained kernels need sm_80 or later, {device.name} is {device.arch}"
    row = chunk_strides(p, n)[2] * 16 if w.dtype != "float32" else p**n // RADIX * PITCH * 4
    if row + 8192 > device.shared_per_block:
        return (
            f"a padded row of {row} bytes does not fit in the {device.shared_per_block} bytes of shared memory of {device.name}"
        )
    return None


def chain_features(w: KronMatmul, plan: ChainPlan, device: Device) -> dict[str, float]:
    """What the cost model sees of a plan: waves, occupancy, bytes through each memory level, roofline time (µs)."""
    item = DTYPES[w.dtype].itemsize
    elements = w.m * plan.p**plan.n
    phases = 3 if plan.n % 2 else 2
    traffic = 2.0 * elements * item
    per_sm = min(
        device.max_threads_per_sm // plan.threads,
        device.shared_per_sm // (plan.shared_bytes + 1024),
        ceil(plan.blocks / device.units),
    )
    resident = max(1, min(per_sm, plan.per_sm if plan.grid < plan.blocks else per_sm))
    waves = plan.blocks / (device.units * resident)
    work = float(w.flops)
    time_us = max(traffic / device.bandwidth_gbs, work / device.peak_gflops.get(w.compute_dtype, 1e4)) / 1e3
    return {
        "launches": 1.0,
        "global_mb": traffic / 1e6,
        "shared_mb": traffic * (phases - 1) / 1e6,
        "roofline_us": time_us,
        "intensity": work / traffic,
        "shared_kb": plan.shared_bytes / 1024,
        "blocks": float(plan.blocks),
        "blocks_per_sm": float(resident),
        "threads_per_sm": float(resident * plan.threads),
        "waves": waves,
        "wave_efficiency": waves / ceil(waves),
        "register_cap": min(255.0, device.registers_per_sm / (plan.threads * plan.per_sm)),
        "held_words": float(plan.held_words),
        "staged_share": plan.staged_tiles / plan.tiles_a_thread,
        "bytes_in_flight": float(resident * plan.rows * plan.row_bytes),
    }
