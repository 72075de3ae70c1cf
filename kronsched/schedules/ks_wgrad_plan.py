"""How a tensor-core weight gradient is cut up: pure arithmetic, no TVM. ks_wgrad_mma.py has the schedule, its kernel the program.

A block owns an i, a run of l (LB of them), a tile of j (JB) and one of k (KB), and a slice of the samples; its partial sums go to
scratch in the order in which threads hold them, and a second launch adds up the slices (ks_wgrad_sum.py).

    tensor core:  m = j, n = k, k = samples: 16 of them a step of 16-bit types, 8 of float32.  lane = (g, t), 8 × 4
    batch first   a lane reads units of consecutive features of one sample: `unit` = lcm(E, d) elements, `jr` j with all l, or,
                  where l is cut into runs, `lw` l of one j. Its j are (u·8 + g)·jr + r, so that one wide load has operands of
                  several l and j. Its samples are t, t + 4, …
    batch last    a lane reads 16 bytes of samples of one feature: operands of two steps

Read first: `WgradPlan`, `plan_wgrad`.
"""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import dataclass, replace
from math import ceil, gcd, lcm
from typing import TYPE_CHECKING, Any

from kronsched.dtypes import DTYPES
from kronsched.errors import InvalidConfig
from kronsched.schedules.ks_mma_limits import LANES
from kronsched.space import Config
from kronsched.workloads.ks import MAX_ELEMENTS, Pattern
from kronsched.workloads.ks_wgrad import KSWeightGrad

if TYPE_CHECKING:
    from kronsched.hardware import Device

KNOBS = ("vector", "warps_j", "warps_k", "warps_l", "mj", "nk", "lunits", "steps", "stages", "min_blocks", "waves")
FLUSH = 16
"""float32: tensor cores truncate their sums, so every so many steps the sums move to a second set by rounded additions."""
REGISTERS = 65536
_OTHER = 44  # registers beyond data
_MOST = 245
_LONGEST = 1 << 15
"""Samples of a slice at most: sums of tensor cores are truncated, which adds up."""
_OTHER_INSTRUCTIONS, _COPY_INSTRUCTIONS = 12, 10


@dataclass(frozen=True)
class WgradPlan:
    """One kernel. vector: elements of a lane's load of features.  splits: slices of the samples.  The rest: see the TOML."""

    pattern: Pattern
    batch: int
    dtype: str
    first: bool
    vector: int
    warps_j: int
    warps_k: int
    warps_l: int
    mj: int
    nk: int
    lunits: int
    steps: int
    stages: int
    min_blocks: int
    splits: int = 1

    # -- operands -----------------------------------------------------------------------------------

    @property
    def item(self) -> int:
        """Bytes of an element."""
        return DTYPES[self.dtype].itemsize

    @property
    def wide(self) -> bool:
        """Whether elements are float32, and products are made of three of TF32."""
        return self.item == 4

    @property
    def small(self) -> bool:
        """Whether a unit has all l."""
        return self.first and self.lunits == 0

    @property
    def unit(self) -> int:
        """Consecutive features that a lane reads of one sample."""
        return lcm(self.vector, self.pattern[3]) if self.small else self.lw

    @property
    def jr(self) -> int:
        """Values of j (or k) of a unit."""
        return self.unit // self.pattern[3] if self.small else 1

    @property
    def lw(self) -> int:
        """Values of l of a warp."""
        if not self.first:
            return 1
        return self.pattern[3] if self.small else self.lunits * self.vector

    @property
    def lb(self) -> int:
        """Values of l of a block."""
        return self.lw * self.warps_l

    @property
    def sums(self) -> int:
        """Sums of a thread, those of the second set not counted."""
        return self.mj * self.nk * self.lw * 4

    @property
    def held(self) -> tuple[int, int]:
        """Numbers of j and k of a lane's operands."""
        return 2 * self.mj, self.nk

    # -- tiles ----------------------------------------------------------------------------------------

    @property
    def extents(self) -> tuple[int, int]:
        """Extents of a block: j (JB) and k (KB)."""
        return 16 * self.mj * self.warps_j, 8 * self.nk * self.warps_k

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return LANES * self.warps_j * self.warps_k * self.warps_l

    @property
    def tiles(self) -> tuple[int, int, int, int]:
        """Tiles along i, l, j, k."""
        a, b, c, d = self.pattern
        jb, kb = self.extents
        return a, ceil(d / self.lb), ceil(b / jb), ceil(c / kb)

    @property
    def tile_count(self) -> int:
        """Tiles of all."""
        a, nl, nj, nk = self.tiles
        return a * nl * nj * nk

    @property
    def step_n(self) -> int:
        """Samples of a step: those of one product in batch first, of 64 bytes in batch last."""
        return (32 if self.first else 64) // self.item

    @property
    def bn(self) -> int:
        """Samples of a chunk, that is of a stage."""
        return self.steps * self.step_n

    @property
    def chunks(self) -> int:
        """Chunks of all samples."""
        return ceil(self.batch / self.bn)

    @property
    def elements(self) -> int:
        """Partial sums of a slice, those of padding too."""
        return self.tile_count * self.threads * self.sums

    def place(self, e: Any) -> tuple[Any, Any, Any, Any]:
        """(i, j, k, l) of partial sum number e of a slice; beyond the pattern for padding."""
        z, tx, q, tile = e % 4, e // 4 % self.threads, e // 4 // self.threads % (self.sums // 4), e // (self.threads * self.sums)
        lane, warp = tx % LANES, tx // LANES
        m, nt, mt = q % self.lw, q // self.lw % self.nk, q // (self.lw * self.nk)
        jb, kb = self.extents
        _, nl, nj, nk = self.tiles
        wj, wk, wl = self.warp_of(warp)
        j = tile // nk % nj * jb + self.place_in(0, wj, mt * 2 + z // 2, lane // 4)
        k = tile % nk * kb + self.place_in(1, wk, nt, lane % 4 * 2 + z % 2)
        return tile // (nk * nj * nl), j, k, tile // (nk * nj) % nl * self.lb + wl * self.lw + m

    def warp_of(self, warp: Any) -> tuple[Any, Any, Any]:
        """Where a warp is along j, k and l."""
        return warp % self.warps_j, warp // self.warps_j % self.warps_k, warp // (self.warps_j * self.warps_k)

    def place_in(self, side: int, warp: Any, held: Any, g: Any) -> Any:
        """The j (side 0) or k (side 1), in a block, of a lane group's held number."""
        return warp * (8 * self.held[side]) + (held // self.jr * 8 + g) * self.jr + held % self.jr

    # -- shared memory ------------------------------------------------------------------------------

    def row_bytes(self, side: int) -> int:
        """Bytes of a row of a stage, of the gradient (side 0) or x: one sample's features, or a feature's samples."""
        return self.extents[side] * self.lb * self.item if self.first else self.bn * self.item

    def rows(self, side: int) -> int:
        """Rows of a side."""
        return self.bn if self.first else self.extents[side]

    def pitch(self, side: int) -> int:
        """Bytes from a row to the next."""
        row = self.row_bytes(side)
        return _pitch(row, self.jr * self.lb * self.item, self.vector * self.item) if self.first else row

    @property
    def stage_bytes(self) -> int:
        """Shared memory of a stage."""
        return sum(self.rows(side) * self.pitch(side) for side in range(2))

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block."""
        return self.stages * self.stage_bytes

    def copy_bytes(self, side: int) -> int:
        """Bytes of a copy from global memory: what every run of it is aligned to, at most 16."""
        _, b, c, d = self.pattern
        if not self.first:
            return gcd(16, self.batch * self.item)
        return gcd(16, (b, c)[side] * d * self.item) if self.small else gcd(16, d * self.item, self.lb * self.item)

    @property
    def registers(self) -> int:
        """About what a thread needs."""
        parts = 2 if self.wide else 1
        operands = (4 * self.mj + 2 * self.nk) * self.lw * (parts if self.first else 2)
        raw = self.unit * self.item // 4 * (2 if self.wide else 4) if self.first else 4
        return self.sums * parts + operands + raw + _OTHER

    @property
    def step_instructions(self) -> float:
        """About how many instructions a warp takes for a step, its share of the copies included."""
        held, parts = sum(self.held), 3 if self.wide else 1
        if self.first:
            loads = held // self.jr * (2 if self.wide else 4) * self.unit / self.vector
            operands, products = 2 * held * self.lw * parts, self.sums // 4 * parts
        else:
            loads, operands, products = held, 12 * held if self.wide else 0, self.sums // 2 * parts
        copies = sum(self.rows(s) * self.row_bytes(s) / self.copy_bytes(s) for s in range(2)) / self.threads
        return float(_OTHER_INSTRUCTIONS + loads + operands + products + _COPY_INSTRUCTIONS * copies / self.steps)


@functools.cache
def _pitch(row: int, group: int, vector: int) -> int:
    """The shortest pitch, a multiple of 16, with the fewest bank conflicts; group: bytes between the units of lane groups."""
    start, together = -(-row // 16) * 16, 128 // vector

    def conflicts(pitch: int) -> int:
        worst = 0
        for begin in range(0, LANES, together):
            starts = [(lane % 4 * pitch + lane // 4 * group) // 4 for lane in range(begin, begin + together)]
            at = [word + z for word in starts for z in range(vector // 4)]
            worst = max(worst, *Counter(word % 32 for word in set(at)).values())
        return worst

    return min(range(start, start + 128, 16), key=lambda pitch: (conflicts(pitch), pitch))


def plan_wgrad(w: KSWeightGrad, config: Config, device: Device) -> WgradPlan:
    """The plan of a config. Raises InvalidConfig with one line."""
    bytes_, *shape, waves = (int(config[name]) for name in KNOBS)
    item, d = DTYPES[w.dtype].itemsize, w.pattern[3]
    if not w.batch_first:
        bytes_, shape[2], shape[5] = 16, 1, 0  # one l a block
    p = WgradPlan(w.pattern, w.batch, w.dtype, w.batch_first, bytes_ // item, *shape)
    if w.batch_first:
        _check_units(p, d)
    if min(p.copy_bytes(side) for side in range(2)) < 4:
        raise InvalidConfig("runs of memory are not whole words of 4 bytes")
    limit = min(_MOST, REGISTERS // (p.threads * p.min_blocks))
    if p.registers > limit:
        raise InvalidConfig(f"about {p.registers} registers a thread, {limit} are there")
    if p.threads > device.max_threads_per_block:
        raise InvalidConfig(f"{p.threads} threads a block, {device.name} allows {device.max_threads_per_block}")
    shared = min(device.shared_per_block, device.shared_per_sm // p.min_blocks - 1024)
    if p.shared_bytes > shared:
        raise InvalidConfig(
            f"{p.shared_bytes} bytes of shared memory, {device.name} has {shared} for each of {p.min_blocks} blocks"
        )
    return replace(p, splits=slices(p.batch, p.chunks, p.tile_count, p.elements, device.units * waves))


def slices(batch: int, chunks: int, tiles: int, elements: int, blocks: int) -> int:
    """Slices of the samples for at most so many blocks. Raises InvalidConfig for more partial sums than an index counts."""
    most = MAX_ELEMENTS // elements
    if most == 0:
        raise InvalidConfig(f"{elements} partial sums, at most {MAX_ELEMENTS} are supported")
    return max(1, min(chunks, most, max(blocks // tiles, ceil(batch / _LONGEST))))


def _check_units(p: WgradPlan, d: int) -> None:
    """The loads of a lane are whole and make whole operands."""
    if p.small:
        if p.warps_l > 1:
            raise InvalidConfig("warps_l > 1: every warp has all l")
        if p.unit > 64 or any(held % p.jr for held in p.held):
            raise InvalidConfig(f"units of {p.unit} features with {p.jr} j do not make whole operands")
    elif d % p.vector or p.lb - p.vector >= d:
        raise InvalidConfig(f"runs of {p.lb} l by loads of {p.vector} do not fit d={d}")
