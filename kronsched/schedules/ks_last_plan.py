"""Arithmetic of the batch-last tensor-core Kronecker-sparse kernel: sizes, limits, index maps. No TVM.

    slice (i, l, j-chunk)   weights W[i, j, k, l] of JB outputs and all k: resident in shared memory, or streamed
    tile  (NB samples)      X[i, k, l, n] of KS steps of k at a time, through a ring of S stages

For each slice a product (JB × c) · (c × NB). Lane (g, t) of a warp loads 16 bytes of samples at k = 4·q + t: E elements,
which are its operands of several instructions.

    mma.sync    weights are the m16 operand, samples the n8 operand: E instructions for 128 bytes of samples. Which 16 bytes a
                lane takes (`chunk_of`) is chosen so that a store, 16 bytes a lane, writes 64 neighbouring bytes of a row j.
    wgmma       samples are operand A (two rows of each instruction: E / 2 instructions), weights operand B, in shared memory.
                Lanes take neighbouring 16 bytes (or 8: knob `vector`), and a store writes 128 (64) bytes of a row j.

Read first: `LastPlan`, `chunk_of`, `weight_at`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil, gcd
from typing import TYPE_CHECKING, Any

from kronsched.dtypes import DTYPES
from kronsched.schedules.ks_mma_limits import FRESH_OTHER, LANES, check_limits, check_warps, check_wgmma, form_of
from kronsched.schedules.ks_mma_plan import SMALL_OPERAND, SUM_STEPS
from kronsched.space import Config
from kronsched.workloads.ks import KSMatmul, Pattern
from kronsched.workloads.ks_epilogue import NONE, Epilogue

if TYPE_CHECKING:
    from kronsched.hardware import Device

UNIT_BYTES = 128
_OTHER_REGISTERS = 48
LONG_ROWS = 96
"""Steps of k from which on blocks of 16-bit elements that work side by side in memory were faster on an H200."""


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
    wgmma: bool = False
    vector: int = 16  # bytes of samples that a lane loads at once
    after: str = ""  # as in MmaPlan
    gather: bool = False  # blocks put their weights in order themselves
    epilogue: Epilogue = NONE
    in_rows: bool = False  # neighbouring blocks take neighbouring samples of a slice, else the same samples of other slices

    @cached_property
    def item(self) -> int:
        """Bytes of an element."""
        return DTYPES[self.dtype].itemsize

    @cached_property
    def per16(self) -> int:
        """Elements of 16 bytes."""
        return 16 // self.item

    @cached_property
    def lane_n(self) -> int:
        """E: samples of a lane's load."""
        return self.vector // self.item

    @cached_property
    def parts(self) -> int:
        """Parts a packed weight has: the high and the low one of TF32 when wgmma reads it, else the weight itself."""
        return 2 if self.wgmma and self.item == 4 else 1

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
        return 8 * self.lane_n * self.units * self.warps_n

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
        """Bytes from k to k of X in shared memory, without bank conflicts for the loads of a warp."""
        wanted = 32 if self.wgmma else 16
        return self.nb * self.item + (wanted - self.nb * self.item) % 128

    @cached_property
    def chunk_words(self) -> int:
        """Words of the weights of a chunk of k."""
        return self.jb * self.ks * self.item // 4 * self.parts

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
        return self.mj * self.units * self.lane_n * 4

    @cached_property
    def two_sums(self) -> bool:
        """Whether long float32 sums are kept in two parts."""
        return self.dtype == "float32" and self.pattern[2] > SUM_STEPS

    @cached_property
    def buffers(self) -> int:
        """Operands A of wgmma that a thread holds: the next one is made while one is read, where they are small."""
        return 2 if not self.fresh and self.units * 2 * self.lane_n * self.parts <= SMALL_OPERAND else 1

    @cached_property
    def ahead(self) -> int:
        """Chunks fetched before they are needed: one stage less where wgmma may still read the streamed weights of the last."""
        return self.stages - (2 if self.wgmma and not self.fresh and self.stream and self.stages > 2 else 1)

    @cached_property
    def fresh(self) -> bool:
        """Whether each product of wgmma starts new sums, which are added to the long ones by rounded additions."""
        return self.wgmma and self.two_sums

    @cached_property
    def fresh_form(self) -> tuple[int, int]:
        """See `form_of`."""
        return form_of(self.ks // self.k_step, self.threads * self.min_blocks, self._fresh_registers)

    def _fresh_registers(self, steps: int, sets: int) -> int:
        loaded = self.units * self.own * self.vector // 4
        return self.sums + sets * self.mj * 8 + steps * (loaded + 16) + FRESH_OTHER

    @cached_property
    def registers(self) -> int:
        """An estimate of the registers of a thread."""
        if self.fresh:
            return self._fresh_registers(*self.fresh_form)
        held = self.units * 2 * self.lane_n * self.buffers if self.wgmma else 4 * self.mj
        loaded = self.vector // 4 * self.own * (self.units if self.wgmma else 1)
        operands = held * (2 if self.item == 4 else 1) + loaded
        return self.sums * (2 if self.two_sums else 1) + operands + _OTHER_REGISTERS


def plan_last(w: KSMatmul, pattern: Pattern, config: Config, device: Device) -> LastPlan:
    """The plan of one factor: knobs, cut to the extents. Raises InvalidConfig for a config that cannot be built."""
    _, b, c, _ = pattern
    item, wgmma = DTYPES[w.dtype].itemsize, config["mma"] == "wgmma"
    per16, vector = 16 // item, int(config["vector"]) if wgmma else 16
    units_n = ceil(w.batch / (8 * vector // item))
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
        gather=config["weights"] == "gather",
        min_blocks=int(config["min_blocks"]),
        wgmma=wgmma,
        vector=vector,
        in_rows=wgmma and item == 2 and config["weights"] != "gather" and c >= LONG_ROWS,
    )
    check_wgmma(wgmma, plan.warps_n, device)
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

    Order: slice (i, l, j-chunk), chunk of k, k step, part, 16 outputs, then
        mma.sync  lane, half of k, half of the outputs, element of a word
        wgmma     half of the outputs, half of k, output, element of 16 bytes
    """
    per_word = 4 // p.item
    part, word = index % per_word, index // per_word
    if p.wgmma:  # core matrices of 8 outputs × 16 bytes of k
        t, row, word = word % 4, word // 4 % 8, word // LANES
        half, upper, word = word % 2, word // 2 % 2, word // 4
    else:
        upper, half, word = word % 2, word // 2 % 2, word // 4
        t, row, word = word % 4, word // 4 % 8, word // LANES
    tile, word = word % (p.jb // 16), word // (p.jb // 16) // p.parts
    step, word = word % (p.ks // p.k_step), word // (p.ks // p.k_step)
    chunk, slice_ = word % p.chunks, word // p.chunks
    d = p.pattern[3]
    k = chunk * p.ks + step * p.k_step + (half * per_word + part) * 4 + t
    j = slice_ % p.j_slices * p.jb + tile * 16 + upper * 8 + row
    return slice_ // (p.j_slices * d), j, k, slice_ // p.j_slices % d


def low_weight(p: LastPlan, index: Any) -> Any:
    """Whether an element of the packed weights is a low part (`parts` = 2)."""
    return index // (p.jb * p.k_step) % 2 == 1
