"""Arithmetic of the batch-last tensor-core Kronecker-sparse kernel: sizes, limits, index maps. No TVM.

    slice (i, l, j-chunk)   weights W[i, j, k, l] of JB outputs and all k: resident in shared memory, or streamed
    tile  (NB samples)      X[i, k, l, n] of KS steps of k at a time, through a ring of S stages

For each slice a product (JB × c) · (c × NB): weights are the m16 operand, samples the n8 operand. A unit of 128 bytes of samples
takes E instructions (E elements make 16 bytes): lane (g, t) of a warp loads 16 bytes of samples at k = 4·q + t, which are its
operands of all E instructions. Which 16 bytes (`chunk_of`) is chosen so that a store of the results, 16 bytes a lane, writes 64
neighbouring bytes of a row j.

Read first: `LastPlan`, `chunk_of`, `weight_at`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil, gcd
from typing import TYPE_CHECKING, Any

from kronsched.dtypes import DTYPES
from kronsched.schedules.ks_mma_plan import LANES, LONG_SUM, check_limits, check_warps
from kronsched.space import Config
from kronsched.workloads.ks import KSMatmul, Pattern

if TYPE_CHECKING:
    from kronsched.hardware import Device

UNIT_BYTES = 128
_OTHER_REGISTERS = 48


@dataclass(frozen=True)
class LastPlan:
    """One launch of the batch-last kernel. See the module for the letters; every field but the first four is a knob."""

    pattern: Pattern
    batch: int
    dtype: str
    grid_tiles: int  # G: blocks that share a slice
    mj: int
    units: int
    warps_j: int
    warps_n: int
    ks: int
    stages: int
    stream: bool
    min_blocks: int

    @cached_property
    def item(self) -> int:
        """Bytes of an element."""
        return DTYPES[self.dtype].itemsize

    @cached_property
    def per16(self) -> int:
        """E: elements of 16 bytes, and instructions along a unit of samples."""
        return 16 // self.item

    @cached_property
    def k_step(self) -> int:
        """Steps of k of one instruction."""
        return 2 * self.per16

    @cached_property
    def own(self) -> int:
        """Q: steps of k that a lane owns."""
        return self.k_step // 4

    @cached_property
    def jb(self) -> int:
        """Outputs j of a slice."""
        return 16 * self.mj * self.warps_j

    @cached_property
    def nb(self) -> int:
        """NB: samples of a tile."""
        return UNIT_BYTES // self.item * self.units * self.warps_n

    @cached_property
    def threads(self) -> int:
        """Threads of a block."""
        return LANES * self.warps_j * self.warps_n

    @cached_property
    def j_slices(self) -> int:
        """Slices along j."""
        return ceil(self.pattern[1] / self.jb)

    @cached_property
    def slice_count(self) -> int:
        """Number of slices."""
        a, _, _, d = self.pattern
        return a * d * self.j_slices

    @cached_property
    def tiles(self) -> int:
        """Tiles of samples."""
        return ceil(self.batch / self.nb)

    @cached_property
    def chunks(self) -> int:
        """Chunks of k."""
        return ceil(self.pattern[2] / self.ks)

    @cached_property
    def copy_bytes(self) -> int:
        """Bytes of one copy from X and of one store to Y: as many as every row is aligned to."""
        return gcd(16, self.batch * self.item)

    @cached_property
    def pitch(self) -> int:
        """Bytes from k to k of X in shared memory: 16 modulo 128, without bank conflicts for the loads of a warp."""
        return self.nb * self.item + 16

    @cached_property
    def chunk_words(self) -> int:
        """Words of the weights of a chunk of k."""
        return self.jb * self.ks * self.item // 4

    @cached_property
    def stage_words(self) -> int:
        """Words of a stage: rows of X, then the chunk's weights when they are streamed."""
        return self.ks * self.pitch // 4 + (self.chunk_words if self.stream else 0)

    @cached_property
    def resident_words(self) -> int:
        """Words of the weights that stay in shared memory."""
        return 0 if self.stream else self.chunks * self.chunk_words

    @cached_property
    def shared_words(self) -> int:
        """Words of shared memory of a block."""
        return self.resident_words + self.stages * self.stage_words

    @cached_property
    def weight_elements(self) -> int:
        """Elements of the weights in fragment order, padding included."""
        return self.slice_count * self.chunks * self.chunk_words * 4 // self.item

    @cached_property
    def sums(self) -> int:
        """Accumulators of a thread."""
        return self.mj * self.units * self.per16 * 4

    @cached_property
    def two_sums(self) -> bool:
        """Whether long float32 sums are kept in two parts."""
        return self.dtype == "float32" and self.pattern[2] > LONG_SUM

    @cached_property
    def registers(self) -> int:
        """An estimate of the registers of a thread."""
        operands = 4 * self.mj * (2 if self.item == 4 else 1) + 4 * self.own
        return self.sums * (2 if self.two_sums else 1) + operands + _OTHER_REGISTERS


def plan_last(w: KSMatmul, pattern: Pattern, config: Config, device: Device) -> LastPlan:
    """The plan of one factor: knobs, cut to the extents. Raises InvalidConfig for a config that cannot be built."""
    _, b, c, _ = pattern
    per16 = 16 // DTYPES[w.dtype].itemsize
    units_n = ceil(w.batch / (8 * per16))
    mj, units = min(int(config["mj"]), ceil(b / 16)), min(int(config["units"]), units_n)
    plan = LastPlan(
        pattern=pattern,
        batch=w.batch,
        dtype=w.dtype,
        grid_tiles=1,
        mj=mj,
        units=units,
        warps_j=min(int(config["warps_j"]), ceil(b / (16 * mj))),
        warps_n=min(int(config["warps_n"]), ceil(units_n / units)),
        ks=2 * per16 * min(int(config["ksteps"]), ceil(c / (2 * per16))),
        stages=int(config["stages"]),
        stream=config["weights"] == "stream",
        min_blocks=int(config["min_blocks"]),
    )
    check_limits(plan, device)
    blocks = device.units * plan.min_blocks * int(config["waves"])
    plan = replace(plan, grid_tiles=min(plan.tiles, max(1, blocks // plan.slice_count)))
    check_warps(plan, plan.slice_count * plan.grid_tiles, device)
    return plan


# -- index maps: plain arithmetic, on ints or TVM expressions ---------------------------------------------


def chunk_of(column: Any) -> Any:
    """The 16-byte chunk of a 128-byte unit of samples that column `column` (below 8) of the instructions stands for."""
    return column // 2 + column % 2 * 4


def weight_at(p: LastPlan, index: Any) -> tuple[Any, Any, Any, Any]:
    """(i, j, k, l) of an element of the weights in fragment order; j or k may be beyond the pattern (padding: zero).

    Order: slice (i, l, j-chunk), chunk of k, k step, 16 outputs, lane, half of k, half of the outputs, element of a word.
    """
    per_word = 4 // p.item
    part, word = index % per_word, index // per_word
    upper, half, word = word % 2, word // 2 % 2, word // 4
    t, row, word = word % 4, word // 4 % 8, word // LANES
    tile, word = word % (p.jb // 16), word // (p.jb // 16)
    step, word = word % (p.ks // p.k_step), word // (p.ks // p.k_step)
    chunk, slice_ = word % p.chunks, word // p.chunks
    d = p.pattern[3]
    k = chunk * p.ks + step * p.k_step + (half * per_word + part) * 4 + t
    j = slice_ % p.j_slices * p.jb + tile * 16 + upper * 8 + row
    return slice_ // (p.j_slices * d), j, k, slice_ // p.j_slices % d
