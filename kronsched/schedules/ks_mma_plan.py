"""Arithmetic of the batch-first tensor-core Kronecker-sparse kernel: the tiling, sizes and limits. No TVM.

    slice (i, j-chunk, l-chunk)     weights W[i, j, k, l] of JB outputs and LB l, all k: resident in shared memory, or streamed
    tile  (M samples)               X[n, i, k, l] of KS steps of k at a time, through a ring of S stages

For each l a product (M × c) · (c × JB), by m16n8k16 (16-bit) or m16n8k8 (TF32) instructions. The order of k inside an instruction
and of j inside a pair of them is free as long as both operands, or operand and result, agree. It is chosen so that a lane's data
lie together in memory (E elements make 16 bytes):

    d < E ("small")   lane t of a row owns k = Q·t … Q·t + Q−1 and all l: 8·d contiguous bytes; outputs j = 4·t … 4·t + 3
    d ≥ E             lane t owns k = 4·q + t for q < Q and E neighbouring l: 16 bytes each; outputs j = 4·q + t

Read first: `MmaPlan`, `plan_mma`; ks_mma_maps.py for which lane has what.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil, gcd
from typing import TYPE_CHECKING

from kronsched.dtypes import DTYPES
from kronsched.errors import InvalidConfig
from kronsched.schedules.ks_mma_limits import FRESH_OTHER, LANES, check_limits, check_warps, check_wgmma, form_of
from kronsched.space import Config
from kronsched.workloads.ks import KSMatmul, Pattern
from kronsched.workloads.ks_epilogue import NONE, Epilogue

if TYPE_CHECKING:
    from kronsched.hardware import Device

SMALL_OPERAND = 16
"""Registers of an operand A of wgmma, at most, of which a thread holds two."""
LONG_SUM, SUM_STEPS = 48, 32
"""Longest float32 sum, in steps of k, that stays in one set of registers, and how many steps a part of a longer one has at most.

Tensor cores truncate when they accumulate; parts are added up by rounded additions, in a second set. On an H200 the largest error
of sums of 48 steps was 2.3e-6 of the RMS (25088 samples), that of longer ones 1.8e-6. Sums of 48 stay whole in batch_first, where
tiles of several l leave no registers for a second set; batch_last takes those in parts, too.
"""
_OTHER_REGISTERS = 48


@dataclass(frozen=True)
class MmaPlan:
    """One launch of the batch-first kernel. See the module for the letters; every field but the first four is a knob."""

    pattern: Pattern
    batch: int
    dtype: str
    grid_rows: int  # G: blocks that share a slice
    mt: int
    warps_m: int
    warps_j: int
    warps_l: int
    pairs: int  # P: 16 outputs j each, of a warp
    lc: int  # l of a warp
    ks: int
    stages: int
    groups: int
    stream: bool
    store: str
    min_blocks: int
    wgmma: bool = False
    after: str = ""  # beside what it may start: "packing" of the weights, the "factor" before it, "any" kernel, or nothing
    gather: bool = False  # blocks put their weights in order themselves
    epilogue: Epilogue = NONE

    # -- elements and instructions ------------------------------------------------------------------

    @cached_property
    def item(self) -> int:
        """Bytes of an element."""
        return DTYPES[self.dtype].itemsize

    @cached_property
    def per16(self) -> int:
        """E: elements of 16 bytes."""
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
    def small(self) -> bool:
        """Whether all l of a (k, row) are less than 16 bytes."""
        return self.pattern[3] < self.per16

    @cached_property
    def unit_l(self) -> int:
        """How many l one load of a lane has: d, or E."""
        return min(self.pattern[3], self.per16)

    @cached_property
    def l_units(self) -> int:
        """Units of l of a warp."""
        return self.lc // self.unit_l

    @cached_property
    def raw_words(self) -> int:
        """32-bit words that a lane loads for one row, one k step and one unit of l."""
        return 2 * self.unit_l

    @cached_property
    def load_words(self) -> int:
        """Words of one such load: 4, or 2 where the lane's data are not 16-byte aligned."""
        return 4 if not self.small or self.pattern[3] % 2 == 0 else 2

    # -- tiles --------------------------------------------------------------------------------------

    @cached_property
    def rows(self) -> int:
        """M: samples of a tile."""
        return 16 * self.mt * self.warps_m

    @cached_property
    def jb(self) -> int:
        """Outputs j of a slice."""
        return 16 * self.pairs * self.warps_j

    @cached_property
    def lb(self) -> int:
        """How many l a slice has."""
        return self.lc * self.warps_l

    @cached_property
    def group_threads(self) -> int:
        """Threads of one group, which works through tiles of its own."""
        return LANES * self.warps_m * self.warps_j * self.warps_l

    @cached_property
    def threads(self) -> int:
        """Threads of a block."""
        return self.group_threads * self.groups

    @cached_property
    def slices(self) -> tuple[int, int, int]:
        """Slices along i, j, l."""
        a, b, _, d = self.pattern
        return a, ceil(b / self.jb), ceil(d / self.lb)

    @cached_property
    def slice_count(self) -> int:
        """Number of slices."""
        a, j, m = self.slices
        return a * j * m

    @cached_property
    def tiles(self) -> int:
        """Tiles of samples."""
        return ceil(self.batch / self.rows)

    @cached_property
    def chunks(self) -> int:
        """Chunks of k."""
        return ceil(self.pattern[2] / self.ks)

    # -- memory -------------------------------------------------------------------------------------

    @cached_property
    def copy_bytes(self) -> int:
        """Bytes of one copy from X: as many as every row, block i, and k (large d) is aligned to."""
        _, _, c, d = self.pattern
        return gcd(16, c * d * self.item, d * self.item if not self.small else 16)

    @cached_property
    def store_bytes(self) -> int:
        """Bytes of one store to Y."""
        _, b, _, d = self.pattern
        run = 4 * d * self.item if self.small else d * self.item
        return gcd(16, b * d * self.item, run)

    @cached_property
    def row_bytes(self) -> int:
        """Bytes of a row of X in a stage."""
        return self.ks * self.lb * self.item

    @cached_property
    def swizzled(self) -> bool:
        """Whether the 16-byte units of a k are exchanged for every other pair of k."""
        return not self.small and self.lb * self.item == 64

    @cached_property
    def pitch(self) -> int:
        """Bytes from row to row of X in shared memory, without bank conflicts for the loads of a warp."""
        by_d, by_l = {2: 64, 4: 16, 6: 64}, {16: 64, 32: 16, 64: 32}
        wanted = by_d.get(self.pattern[3], 32) if self.small else by_l[self.lb * self.item]
        return self.row_bytes + (wanted - self.row_bytes) % 128

    @cached_property
    def chunk_words(self) -> int:
        """Words of the weights of a chunk of k."""
        return self.jb * self.ks * self.lb * self.item // 4 * self.parts

    @cached_property
    def parts(self) -> int:
        """Parts a packed weight has: the high and the low one of TF32 when wgmma reads it, else the weight itself."""
        return 2 if self.wgmma and self.item == 4 else 1

    @cached_property
    def stage_words(self) -> int:
        """Words of a stage: rows of X, then the chunk's weights when they are streamed."""
        return self.rows * self.pitch // 4 + (self.chunk_words if self.stream else 0)

    @cached_property
    def resident_words(self) -> int:
        """Words of the weights that stay in shared memory."""
        return 0 if self.stream else self.chunks * self.chunk_words

    @cached_property
    def out_pitch(self) -> int:
        """Bytes from row to row of the staged output."""
        row = self.jb * self.lb * self.item
        return row + (32 - row) % 128

    @cached_property
    def shared_words(self) -> int:
        """Words of shared memory of a block."""
        staged = self.groups * self.rows * self.out_pitch // 4 if self.store == "staged" else 0
        return self.resident_words + self.groups * self.stages * self.stage_words + staged

    @cached_property
    def weight_elements(self) -> int:
        """Elements of the weights in fragment order, padding included."""
        return self.slice_count * self.chunks * self.chunk_words * 4 // self.item

    # -- registers ----------------------------------------------------------------------------------

    @cached_property
    def sums(self) -> int:
        """Accumulators of a thread."""
        return self.mt * self.lc * self.pairs * 8

    @cached_property
    def two_sums(self) -> bool:
        """Whether long float32 sums are kept in two parts."""
        return self.dtype == "float32" and self.pattern[2] > LONG_SUM

    @cached_property
    def buffers(self) -> int:
        """Operands A of wgmma that a thread holds: the next one is made while one is read, where they are small."""
        return 2 if self.mt * 4 * self.unit_l * self.parts <= SMALL_OPERAND else 1

    @cached_property
    def ahead(self) -> int:
        """Chunks fetched before they are needed: one stage less where wgmma may still read the streamed weights of the last."""
        return self.stages - (2 if self.wgmma and not self.fresh and self.stream and self.stages > 2 else 1)

    @cached_property
    def fresh(self) -> bool:
        """Whether each product of wgmma starts new sums, which are added to the long ones by rounded additions."""
        return self.wgmma and self.two_sums

    @cached_property
    def short_sums(self) -> int:
        """Sums of one l where products of wgmma start new ones."""
        return self.mt * self.pairs * 8

    @cached_property
    def fresh_form(self) -> tuple[int, int]:
        """See `form_of`."""
        return form_of(self.ks // self.k_step, self.threads * self.min_blocks, self._fresh_registers)

    def _fresh_registers(self, steps: int, sets: int) -> int:
        return self.sums + sets * self.short_sums + steps * self.mt * (2 * self.raw_words + 16) + FRESH_OTHER

    @cached_property
    def registers(self) -> int:
        """An estimate of the registers of a thread."""
        if self.fresh:
            return self._fresh_registers(*self.fresh_form)
        sums = self.sums * (2 if self.two_sums else 1)
        held = self.unit_l * self.buffers if self.wgmma else 1
        operands = self.mt * 4 * (2 if self.item == 4 else 1) * held
        return sums + self.mt * 2 * self.raw_words + operands + _OTHER_REGISTERS


def plan_mma(w: KSMatmul, pattern: Pattern, config: Config, device: Device) -> MmaPlan:
    """The plan of one factor: knobs, cut to the extents. Raises InvalidConfig for a config that cannot be built."""
    _, b, c, d = pattern
    per16 = 16 // DTYPES[w.dtype].itemsize
    units_l = 1 if d < per16 else ceil(d / per16)
    knob = {k: int(config[k]) for k in ("mt", "warps_m", "warps_j", "warps_l", "pairs", "lunits", "ksteps", "groups")}
    mt = min(knob["mt"], ceil(w.batch / 16))
    warps_m = min(knob["warps_m"], ceil(w.batch / (16 * mt)))
    pairs = min(knob["pairs"], ceil(b / 16))
    lunits = min(knob["lunits"], units_l)
    plan = MmaPlan(
        pattern=pattern,
        batch=w.batch,
        dtype=w.dtype,
        grid_rows=1,
        mt=mt,
        warps_m=warps_m,
        warps_j=min(knob["warps_j"], ceil(b / (16 * pairs))),
        warps_l=min(knob["warps_l"], ceil(units_l / lunits)),
        pairs=pairs,
        lc=min(d, per16) * lunits,
        ks=2 * per16 * min(knob["ksteps"], ceil(c / (2 * per16))),
        stages=int(config["stages"]),
        groups=min(knob["groups"], ceil(w.batch / (16 * mt * warps_m))),
        stream=config["weights"] == "stream",
        gather=config["weights"] == "gather",
        store=str(config["store"]),
        min_blocks=int(config["min_blocks"]),
        wgmma=config["mma"] == "wgmma",
    )
    if plan.store == "pair" and (plan.small or plan.l_units % 2 or d % (2 * per16) or plan.store_bytes < 16):
        plan = replace(plan, store="direct")  # there are no two whole units to exchange
    if plan.store == "quad" and not (plan.small and d * plan.item == 8 and plan.store_bytes == 16):
        plan = replace(plan, store="direct")  # a lane has no 32 neighbouring bytes
    _check(plan, device)
    blocks = device.units * plan.min_blocks * int(config["waves"])
    plan = replace(plan, grid_rows=min(ceil(plan.tiles / plan.groups), max(1, blocks // plan.slice_count)))
    check_warps(plan, plan.slice_count * plan.grid_rows, device)
    return plan


def _check(p: MmaPlan, device: Device) -> None:
    """Raise InvalidConfig for a plan that cannot be built."""
    check_wgmma(p.wgmma, p.warps_m, device)
    if p.stream and p.groups > 1:
        raise InvalidConfig("groups share resident weights: weights=stream needs groups=1")
    if not p.small and p.lb * p.item > 64:
        raise InvalidConfig(f"a slice of {p.lb} l is more than 64 bytes")
    check_limits(p, device)
