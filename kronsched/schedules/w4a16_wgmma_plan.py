"""The arithmetic of a W4A16 kernel on warpgroup products (wgmma): tiles, memory and registers of a config at a shape. No TVM.

    grid:       column blocks × split_k × row blocks
    block:      groups_n × groups_k warpgroups; a warpgroup owns `tiles` tiles of 64 columns and every groups_k-th chunk of 128
                rows of k; the warpgroups side by side along n share x in shared memory
                copies = "fetch" or "ring": and one warpgroup that fetches for the others
    warpgroup:  for each chunk and tile: 8 products of 64 columns × `rows` rows × 16

Read first: `WgmmaPlan`, `plan_wgmma`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from kronsched.dtypes import DTYPES
from kronsched.errors import InvalidConfig
from kronsched.quant.layout import TILE_K, TILE_N, ceil_to
from kronsched.schedules.w4a16_plan import W4Tiles
from kronsched.space import Config
from kronsched.workloads.gemm import Gemm

if TYPE_CHECKING:
    from kronsched.hardware import Device

X_ROW = TILE_K * 2
"""Bytes of a row of x in a chunk."""
W_TILE = TILE_N * TILE_K // 2
"""Bytes of a tile of weights."""
COLUMN_WORDS = TILE_N // 2
"""Words of the scales of a tile and group."""
_FIXED_REGISTERS, _PIPELINE_REGISTERS = 22, 12
_REGISTERS = 65536
"""Of a multiprocessor of sm_90."""


@dataclass(frozen=True)
class WgmmaPlan(W4Tiles):
    """One main kernel. tiles, …, copies: the knobs, as search_spaces/gemm_w4a16_wgmma.toml says."""

    workload: Gemm
    tiles: int
    groups_n: int
    groups_k: int
    rows: int
    stages: int
    split_k: int
    copies: str
    start: str

    strip_step: ClassVar[int] = 4  # type: ignore[misc]
    reduction: ClassVar[str] = "flat"  # type: ignore[misc]

    @property
    def strips(self) -> int:  # type: ignore[override]
        """A warp owns one strip of each tile."""
        return self.tiles

    @property
    def warps_k(self) -> int:  # type: ignore[override]
        """Shares of k in a block."""
        return self.groups_k

    @property
    def mtile(self) -> int:  # type: ignore[override]
        """Tiles of 8 rows of x."""
        return self.rows // 8

    @property
    def columns(self) -> int:  # type: ignore[override]
        """Columns of a block."""
        return TILE_N * self.tiles * self.groups_n

    @property
    def sharers(self) -> int:
        """Threads that share x: those of the warpgroups side by side."""
        return 128 * self.groups_n

    @property
    def producers(self) -> int:
        """Threads that only fetch."""
        return 0 if self.copies == "threads" else 128

    @property
    def kept(self) -> int:
        """Registers that a producer keeps when consumers need more than their share."""
        return 40 if self.consumers <= 256 else 32

    @property
    def consumers(self) -> int:
        """Threads that multiply."""
        return self.sharers * self.groups_k

    @property
    def threads(self) -> int:  # type: ignore[override]
        """Threads of a block."""
        return self.consumers + self.producers

    @property
    def x_words(self) -> int:
        """Words of x in a stage."""
        return self.rows * X_ROW // 4

    @property
    def prepared(self) -> bool:
        """Whether a first kernel writes x in the order of shared memory: wanted, or needed (see `must_prepare`)."""
        return self.copies == "ring" or must_prepare(self.workload)

    @property
    def image(self) -> tuple[int, int, int]:
        """Shape of prepared x: for each block of rows and chunk of k what shared memory holds."""
        return (self.grid[2], self.chunks, self.rows * TILE_K)

    @property
    def x_sums(self) -> tuple[int, int]:
        """Shape of the sums of x that float zero points need: one a span of k and row, padding included."""
        return (self.workload.layout.k_packed // self.span, self.grid[2] * self.rows)

    @property
    def ragged_k(self) -> bool:
        """Whether warpgroups have different numbers of trips."""
        return self.trips * self.groups_k * self.split_k != self.chunks

    @property
    def w_at(self) -> int:
        """Word of a stage where packed words begin, after x."""
        return self.x_words

    @property
    def s_at(self) -> int:
        """Word of a stage where scales begin."""
        return self.w_at + self.tiles * self.groups_n * W_TILE // 4

    @property
    def z_at(self) -> int:
        """Word of a stage where zeros begin."""
        return self.s_at + self.tiles * self.groups_n * (TILE_K // self.span) * COLUMN_WORDS

    @property
    def stage_words(self) -> int:
        """Words of a stage: x, words, scales and zeros of a chunk for the warpgroups that share x."""
        per_column = {"symmetric": 0, "asymmetric": 1, "float": 2}[self.workload.zero_point]
        return self.z_at + per_column * (self.z_at - self.s_at)

    @property
    def stage_bytes(self) -> int:
        """Shared memory from stage to stage; whole kilobytes."""
        return ceil_to(4 * self.stage_words, 1024)

    @property
    def barrier_word(self) -> int:
        """The word where the mbarriers begin: after the ring, and after the partial results that take its place."""
        return max(self.groups_k * self.stages * self.stage_bytes // 4, self.groups_k * self.rows * self.pitch)

    @property
    def shared_words(self) -> int:
        """Words of shared memory."""
        return self.barrier_word + 4 * self.groups_k * self.stages

    @property
    def pipelined(self) -> bool:
        """Whether two tiles take turns, so that a warpgroup's products never wait for its other work."""
        return self.producers > 0 and self.tiles == 2

    @property
    def batch(self) -> int:
        """Steps of 16 rows of k whose products are issued together; fewer where registers are short."""
        return min(4 if self._registers(4) <= self.granted else 2, self.span // 16)

    @property
    def registers(self) -> int:
        """A rough count of live registers a thread."""
        return self._registers(self.batch)

    def _registers(self, batch: int) -> int:
        sums = self.tiles * self.rows
        per_column = {"symmetric": 1, "asymmetric": 2, "float": 5}[self.workload.zero_point]
        columns = self.tiles * (TILE_K // self.span) * per_column
        if self.workload.zero_point == "float":
            sums += self.rows // 4
        fixed = _FIXED_REGISTERS + (_PIPELINE_REGISTERS if self.pipelined else 0)
        return fixed + sums + 8 * batch + 8 * self.tiles + columns

    @property
    def launched(self) -> int:
        """Registers a thread has at most when all threads of a block have the same number."""
        return min(255, _REGISTERS // self.threads // 8 * 8)

    @property
    def granted(self) -> int:
        """Registers a consumer has at most: producers give away theirs."""
        pool = self.launched * self.threads
        return min(255, (pool - self.producers * self.kept) // self.consumers // 8 * 8) if self.producers else self.launched


def must_prepare(w: Gemm) -> bool:
    """Whether a first kernel is needed: x has to be gathered, has rows that do not start on 4 bytes, or is summed up by group."""
    return w.act_order or w.k % 2 != 0 or w.zero_point == "float"


def plan_wgmma(w: Gemm, config: Config, device: Device) -> WgmmaPlan:
    """The plan of a config. Raises InvalidConfig with one line when it breaks a limit or repeats another config's kernel."""
    c: dict[str, Any] = {"start": "early", **config}
    plan = WgmmaPlan(workload=w, **c)
    for broken in (_limits(plan, device), _idle(plan, device.units)):
        if broken is not None:
            raise InvalidConfig(broken)
    return plan


def _limits(p: WgmmaPlan, device: Device) -> str | None:
    if p.consumers > 512:
        return f"groups_n={p.groups_n} × groups_k={p.groups_k} makes {p.consumers} threads, 512 at most"
    if p.shared_words * 4 > device.shared_per_block:
        return f"{p.shared_words * 4} bytes of shared memory, {device.name} has {device.shared_per_block} a block"
    if p.registers > p.granted:
        return f"about {p.registers} registers for each of {p.consumers} threads: too many"
    if p.split_k * p.groups_k > p.chunks:
        return f"groups_k={p.groups_k} × split_k={p.split_k} for {p.chunks} chunks of k"
    return None


def _idle(p: WgmmaPlan, units: int) -> str | None:
    """Why a config repeats the kernel, or the waste, of another one."""
    w = p.workload
    if p.columns > max(TILE_N, w.layout.n_packed):
        return f"{p.columns} columns a block, the padded n is {w.layout.n_packed}"
    if p.rows > 16 and p.rows >= 2 * w.m:
        return f"rows={p.rows}, m={w.m} needs at most half"
    if p.stages > 3 and p.stages > p.trips + 1:
        return f"stages={p.stages} with {p.trips} trips"
    if p.prepared and p.copies != "ring":
        return f"copies={p.copies!r}: x has to be gathered, padded or summed up first"
    blocks = p.grid[0] * p.grid[2]
    if p.split_k > 1 and p.split_k * blocks > 4 * units:
        return f"split_k={p.split_k} of {blocks} blocks for {units} multiprocessors: more blocks are no help"
    return None


def wgmma_features(p: WgmmaPlan, device: Device) -> dict[str, float]:
    """Blocks, waves, occupancy, bytes through memory and a roofline time (µs), for the cost model."""
    w, item = p.workload, DTYPES[p.workload.a_dtype].itemsize
    blocks = p.grid[0] * p.grid[1] * p.grid[2]
    shared = p.shared_words * 4
    registers = min(255, -(-p.registers // 8) * 8)
    per_sm = min(device.shared_per_sm // (shared + 1024), device.registers_per_sm // (registers * p.threads))
    per_sm = max(1, min(per_sm, device.max_threads_per_sm // p.threads))
    waves = blocks / (device.units * per_sm)
    x_bytes = float(p.grid[0] * p.grid[2] * p.rows * w.layout.k_packed * item)
    partial = 8.0 * p.split_k * w.m * w.n if p.split_k > 1 else 0.0
    work = 2.0 * p.grid[2] * p.rows * w.layout.n_packed * w.layout.k_packed
    memory_us = (w.min_bytes + partial) / device.bandwidth_gbs / 1e3
    return {
        "launches": 1.0 + (p.split_k > 1) + p.prepared,
        "blocks": float(blocks),
        "blocks_per_sm": float(per_sm),
        "warpgroups_per_sm": float(per_sm * p.threads // 128),
        "waves": waves,
        "wave_efficiency": waves / -(-waves // 1),
        "busy_sms": min(1.0, blocks / device.units),
        "trips": float(p.trips),
        "weights_mb": w.layout.n_packed * w.layout.k_packed / 2e6 * p.grid[2],
        "x_mb": x_bytes / 1e6,
        "partial_mb": partial / 1e6,
        "producers": float(p.producers > 0),
        "pipelined": float(p.pipelined),
        "bytes_in_flight": float(per_sm * p.groups_k * p.stage_bytes * (p.stages - 1)),
        "shared_kb": shared / 1024,
        "registers": float(p.registers),
        "roofline_us": max(memory_us, work / device.peak_gflops.get(w.compute_dtype, 1e4) / 1e3),
    }
