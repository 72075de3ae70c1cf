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
from kronsched.schedules.kron_chain_layout import pairs, row_chunks, tiles_a_row, units_a_row, words_a_tile
from kronsched.schedules.kron_chain_ring_plan import Ring, ring_bytes, ring_fixed, ring_of
from kronsched.space import Config
from kronsched.space.space import Value
from kronsched.workloads.kron import KronMatmul

if TYPE_CHECKING:
    from kronsched.hardware import Device

SMALL = ((4, 6), (4, 7), (2, 12), (2, 13))
"""(P, N) of every dtype."""
SERVED = {
    "float16": ((8, 3), (8, 4), (8, 5), (16, 3), (16, 4), (32, 3), (64, 2), (64, 3), (64, 4), *SMALL),
    "bfloat16": ((8, 3), (8, 4), (8, 5), (16, 3), (16, 4), (32, 3), (64, 2), (64, 3), (64, 4), *SMALL),
    "float32": ((8, 4), (8, 5), (16, 4), (32, 3), *SMALL),
}
"""(P, N) of each dtype."""

LANDS = ("bulk", "ring")
"""Kinds of prefetch by which rows land in a ring."""

RADIX = 64
"""FMA: elements of a register group."""
PITCH = RADIX + 4
"""FMA: floats from one line of 64 to the next in shared memory: 16-byte aligned, an odd number of 16-byte chunks."""

TF32_LINE = 65
"""float32 16^4: 16-byte chunks from one line of 64 to the next in shared memory; 1 modulo 8 keeps accesses in different banks."""
TF32_ROW = 8 * TF32_LINE + 4
"""float32 16^4: chunks from one a_0 to the next: 4 modulo 8."""
TF32_BLOCK = 8 * TF32_ROW
"""float32 16^4: chunks of a quarter of a row; three of them are in shared memory at a time."""
TF32_PITCH = 257
"""float32 32^3: chunks from one a_0 to the next: 1 modulo 8."""
TF32_ROW_BYTES = {16: 3 * TF32_BLOCK * 16, 32: 32 * TF32_PITCH * 16}
"""Shared memory of a row in the float32 kernels of 16^4 and 32^3."""

TF32_THREADS = {16: (256,), 32: (256, 512)}
"""Threads of a block of these kernels: fewer could not hold a row, more would have too few registers."""


@dataclass(frozen=True)
class ChainPlan:
    """One kernel.

    rows: rows of X of a block.  blocks: ⌈m / rows⌉.  grid: thread blocks launched (fewer than `blocks` when persistent).
    per_sm: thread blocks that must fit on an SM (the launch bound that caps registers).
    prefetch: how the next block's data comes while the present one is exchanged: "none", "registers", "async" (cp.async into a
        stage in shared memory), "split" (half of it each way), or to where it is exchanged afterwards by "bulk" copies or by
        cp.async ("ring").
    load, store: cache hints of global accesses.  unroll: steps of the loops over a warp's tiles after the first phase.
    l2: the next block's rows are brought into L2 while the present ones are contracted.
    first: a block's first rows are brought into L2 before the launch before this one has ended (it may still write them: L2 is
        where all multiprocessors meet).  sooner: the launch after this one may do so already then.
    group: FMA: register groups summed at a time with the same factor row.
    staged_tiles: tiles of a warp (16-bit), or planes of 64 (FMA), that come through the stage.
    overlap: the launch starts while the one before it ends, where the device can do that and the kernel waits for it by itself.
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
    l2: bool
    first: bool
    sooner: bool
    staged_tiles: int
    shared_bytes: int
    overlap: bool

    @property
    def row_bytes(self) -> int:
        """Bytes of a row of X."""
        size: int = self.p**self.n * DTYPES[self.dtype].itemsize
        return size

    @property
    def kernel(self) -> str:
        """Which kernel: see `kernel_kind`."""
        return kernel_kind(self.p, self.dtype)

    @property
    def tiles_a_thread(self) -> int:
        """What `staged_tiles` is a part of: register tiles of a warp in the first phase, or planes of 64 (FMA)."""
        if self.kernel != "half":
            return RADIX
        return self.rows * tiles_a_row(self.p, self.n) // (self.threads // 32)

    @property
    def parts(self) -> int:
        """FMA: register groups that a thread contracts one after another."""
        groups: int = self.rows * self.p**self.n // RADIX
        return groups // self.threads

    @property
    def steps_unrolled(self) -> int:
        """Steps of the longest loop that `unroll` applies to."""
        if self.kernel == "tf32":
            return 32 // (self.threads // 32)
        if self.kernel == "fma":
            return self.rows * RADIX * 16 // self.threads // self.parts
        if self.p == 64:
            return 8
        reads = self.rows * units_a_row(self.p, self.n) // (4 if self.p == 8 else 1)
        return max(reads // (self.threads // 32), self.tiles_a_thread if len(pairs(self.p, self.n)) > 1 else 0)

    @property
    def ring(self) -> Ring:
        """Where bulk copies put rows."""
        return ring_of(self.p, self.n, self.shared_bytes - ring_fixed(self.p, self.n))

    @property
    def rows_at_once(self) -> int:
        """Rows of a block that may be on their way at once, if they land in a ring, else 1."""
        return self.ring.rows if self.prefetch in LANDS else 1

    @property
    def axes_a_group(self) -> int:
        """FMA: axes of a register group."""
        return round(log(RADIX, self.p))

    @property
    def held_words(self) -> int:
        """32-bit words of the next block that come through a thread's registers."""
        if self.prefetch in LANDS:
            return 0
        if self.kernel == "tf32":
            return (64 if self.p == 16 else 32) if self.prefetch == "registers" else 0
        words = self.parts if self.kernel == "fma" else words_a_tile(self.p)
        return (self.tiles_a_thread - self.staged_tiles) * words


def kernel_kind(p: int, dtype: str) -> str:
    """Which kernel: "half" (16-bit types on tensor cores), "fma" or "tf32" (float32; the latter as TF32 products)."""
    if dtype != "float32":
        return "half"
    return "tf32" if p > 8 else "fma"


def chained_part(w: KronMatmul) -> KronMatmul:
    """What the chained kernel contracts: all, or the last two of more than two factors of 64 (the others take a launch each)."""
    p, n = w.factors[0][0], len(w.factors)
    if p != 64 or n <= 2:
        return w
    return KronMatmul(w.m * p ** (n - 2), w.factors[-2:], w.dtype)


def plan_chain(w: KronMatmul, config: Config, device: Device) -> ChainPlan:
    """The kernel of a config. Raises InvalidConfig with one line."""
    w = chained_part(w)
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
    if grid == blocks and config["l2"] is True:
        raise InvalidConfig("l2=True: there is no next block when every block has its own place in the grid")
    split = {"half": _split_half, "fma": _split_fma, "tf32": _split_tf32}
    if prefetch in LANDS and 0 < generation(device) < 90:
        raise InvalidConfig(f"prefetch={prefetch}: rows land in a ring on sm_90 or later only, {device.name} is {device.arch}")
    if prefetch in LANDS and p != 64:  # no more rows than a block has
        most = min(most, ring_fixed(p, n) + ring_of(p, n, most, ceil(blocks / grid)).bytes)
    staged, shared = split[kernel_kind(p, w.dtype)](p, n, rows, threads, prefetch, DTYPES[w.dtype].itemsize, most)
    if shared > most:
        raise InvalidConfig(f"{per_sm} blocks of {shared} bytes of shared memory do not fit on an SM")
    overlap = generation(device) >= 90 and kernel_kind(p, w.dtype) == "half" and p != 64
    if isinstance(config["l2"], str) and not overlap:
        raise InvalidConfig(f"l2={config['l2']}: this launch does not start before the one before it has ended")
    hints = str(config["load"]), str(config["store"]), int(config["unroll"]), int(config["group"])
    early = config["l2"] is True, overlap and bool(config["l2"]), config["l2"] == "sooner"
    return ChainPlan(p, n, w.dtype, w.m, rows, threads, per_sm, blocks, grid, prefetch, *hints, *early, staged, shared, overlap)


def _split_half(p: int, n: int, rows: int, threads: int, prefetch: str, item: int, most: int) -> tuple[int, int]:
    """(tiles of a warp that come through the stage, bytes of shared memory) of a 16-bit kernel."""
    tiles, warps = rows * tiles_a_row(p, n), threads // 32
    if tiles % warps:
        raise InvalidConfig(f"threads={threads}: {tiles} tiles of {p}x{p} chunks do not split evenly among its warps")
    if p == 8 and rows * units_a_row(p, n) // 4 % warps:
        raise InvalidConfig(f"threads={threads}: the reads of the last phase do not split evenly among {warps} warps")
    if p == 64 and (warps != rows or prefetch not in ("none", "registers")):
        raise InvalidConfig(f"threads={threads}, prefetch={prefetch}: a warp contracts one row of {p}^{n} and has no stage")
    a_warp = tiles // warps
    if (p < 8 or p == 16) and a_warp % 2:
        raise InvalidConfig(
            f"threads={threads}: a warp takes both halves of a tile, {tiles} of them do not split among {warps} warps"
        )
    if prefetch in LANDS:
        return 0, ring_bytes(p, n, rows, a_warp, most)
    staged = {"none": 0, "registers": 0, "split": a_warp // 2, "async": a_warp}[prefetch]
    if prefetch == "split" and staged == 0:
        raise InvalidConfig(f"prefetch=split: a warp of {threads} threads has a single tile, which async or registers take whole")
    words = (a_warp - staged) * words_a_tile(p)
    if words > 64:
        raise InvalidConfig(f"threads={threads}: a thread would hold {words} words of data, at most 64 are allowed")
    if rows * units_a_row(p, n) % warps:
        raise InvalidConfig(f"threads={threads}: the reads of the last phase do not split evenly among {warps} warps")
    # The exchange buffer, the stage, the factors in fragment order.
    exchange, stage = rows * row_chunks(p, n) * 16, staged * threads * words_a_tile(p) * 4
    return staged, exchange + stage + (n * 32 * (p // 8) ** 2 * 4 if p >= 8 else 4 * 32 * 16)


def _split_fma(p: int, n: int, rows: int, threads: int, prefetch: str, item: int, most: int) -> tuple[int, int]:
    """(planes that come through the stage, bytes of shared memory) of the FMA kernel."""
    lanes: int = p**n // RADIX
    if threads not in (rows * lanes, rows * lanes // 2):
        need = rows * lanes
        raise InvalidConfig(f"threads={threads}: {rows} rows need {need}, one for each {RADIX} elements, or half as many")
    fixed = rows * lanes * PITCH * 4 + n * p * p * 4
    if prefetch == "registers" or prefetch in LANDS:
        raise InvalidConfig(f"prefetch={prefetch}: a thread's registers hold its own elements; async stages the next ones")
    if prefetch == "none":
        return 0, fixed
    chunk = 16 // item  # cp.async copies 16 bytes
    planes = min(RADIX if prefetch == "async" else RADIX // 2, (most - fixed) // (rows * lanes * item) // chunk * chunk)
    if planes < RADIX // 2:
        raise InvalidConfig(f"prefetch={prefetch}: only {max(0, planes)} of {RADIX} planes fit in spare shared memory, half must")
    return planes, fixed + planes * rows * lanes * item


def _split_tf32(p: int, n: int, rows: int, threads: int, prefetch: str, item: int, most: int) -> tuple[int, int]:
    """(0, bytes of shared memory) of a float32 kernel on tensor cores, with factors as high and low TF32 parts."""
    if rows != 1 or threads not in TF32_THREADS[p]:
        allowed = " or ".join(str(v) for v in TF32_THREADS[p])
        raise InvalidConfig(f"rows={rows}, threads={threads}: the kernel of {p}^{n} takes one row of X and {allowed} threads")
    if prefetch not in ("none", "registers"):
        raise InvalidConfig(f"prefetch={prefetch}: the kernel of {p}^{n} has no stage in shared memory")
    return 0, TF32_ROW_BYTES[p] + n * 2 * p * p * 4


def idle_knob(plan: ChainPlan, config: Config, values: Mapping[str, tuple[Value, ...]]) -> str | None:
    """One line naming a knob that has no effect on this plan and is not at its first value, which repeats another kernel."""
    idle = []
    if plan.prefetch in LANDS or (plan.prefetch == "async" and plan.held_words == 0):
        idle.append("load")
    if plan.prefetch in LANDS and config["l2"] is True:
        return f"l2=True has no effect with prefetch={plan.prefetch}, l2=first is the same kernel"
    if plan.kernel != "fma":
        idle.append("group")
    for name in idle:
        if config[name] != values[name][0]:
            return f"{name}={config[name]} has no effect here, {name}={values[name][0]} is the same kernel"
    steps = plan.steps_unrolled
    if plan.unroll > steps and steps in values["unroll"]:
        return f"unroll={plan.unroll} has no effect here, the loops have {steps} steps at most: unroll={steps} is the same kernel"
    return None


def generation(device: Device) -> int:
    """The number in an architecture such as sm_90a."""
    return int("".join(c for c in device.arch if c.isdigit()) or 0)


def why_not(w: KronMatmul, device: Device) -> str | None:
    """None when a chained kernel serves the workload on the device, else one line."""
    served = SERVED.get(w.dtype, ())
    p, n = w.factors[0][0], len(w.factors)
    sizes = ", ".join(f"{a}x{a}^{b}" for a, b in served) or "nothing"
    if any(pair != (p, p) for pair in w.factors) or (p, n) not in served:
        return f"one-launch chained kernels serve equal square factors only: {sizes} in {w.dtype}"
    if 0 < generation(device) < 80:
        return f"one-launch chained kernels need sm_80 or later, {device.name} is {device.arch}"
    kernel = kernel_kind(p, w.dtype)
    if kernel == "half":
        row, factors = row_chunks(p, n) * 16, 8192
    elif kernel == "fma":
        row, factors = p**n // RADIX * PITCH * 4, 8192
    else:
        row, factors = TF32_ROW_BYTES[p], n * 2 * p * p * 4
    most = device.shared_per_block
    if row + factors > most:
        return f"a padded row of {row} bytes does not fit, with the factors, in the {most} of shared memory of {device.name}"
    return None


def chain_features(w: KronMatmul, plan: ChainPlan, device: Device) -> dict[str, float]:
    """What the cost model sees of a plan: waves, occupancy, bytes through each memory level, roofline time (µs)."""
    item = DTYPES[w.dtype].itemsize
    elements = w.m * w.k_in
    launches = 1 + len(w.factors) - plan.n
    phases = 3 if plan.n % 2 else 2
    traffic = 2.0 * elements * item * launches
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
        "launches": float(launches),
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
        "l2_ahead": float(plan.l2),
        "staged_share": plan.staged_tiles / plan.tiles_a_thread,
        "bytes_in_flight": float(resident * (plan.ring.bytes if plan.prefetch in LANDS else plan.rows * plan.row_bytes)),
    }
