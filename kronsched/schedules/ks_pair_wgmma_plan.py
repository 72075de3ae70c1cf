"""The tiling of two Kronecker-sparse factors in one kernel of TMA and wgmma: pure arithmetic, no TVM.

Read first: `WgmmaPairPlan`, `plan_wgmma_pair`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil
from typing import TYPE_CHECKING

from kronsched.errors import InvalidConfig
from kronsched.schedules.gemm_dense_wgmma_plan import REGISTERS
from kronsched.space import Config
from kronsched.workloads.ks import KSMatmul, Pattern
from kronsched.workloads.ks_epilogue import NONE, Epilogue

if TYPE_CHECKING:
    from kronsched.hardware import Device

ITEM = 2
"""Bytes of an element."""
ROWS = 64
"""Samples of a warpgroup's tile: the rows of one wgmma."""
STEPS = 64
"""Inputs k of a panel: 128 bytes, the widest swizzle."""
PANEL = ROWS * STEPS * ITEM
"""Bytes of a panel of samples."""
STORE_ROWS = 16
"""Samples that a warp stores at a time."""
MOST_D = 4
LEAST = 2
"""Panels of weights in flight."""
_SUMS = {1: 160, 2: 160, 3: 96}
"""By warpgroups: registers a thread can spare for sums."""
_BLOCK_SHARED = 1024
"""What CUDA keeps of the shared memory of an SM for each block."""


@dataclass(frozen=True)
class Slots:
    """Rings of weights in shared memory: where their slots begin, bytes of one, how many a ring, where mbarriers begin, rings."""

    at: int
    size: int
    count: int
    barriers_at: int
    rings: int = 1

    @property
    def end(self) -> int:
        """The byte behind the last slot."""
        return self.at + self.size * self.count * self.rings

    @property
    def barriers_end(self) -> int:
        """The byte behind the last mbarrier."""
        return self.barriers_at + 16 * self.count * self.rings


@dataclass(frozen=True)
class WgmmaPairPlan:
    """One launch. block_j, …, min_blocks: the knobs, as search_spaces/ks_cuda_pair_wgmma.toml says.

    groups: consumer warpgroups.  split: "samples": each has 64 samples of its own; "outputs": all have the same 64, and each has
    every n-th block i of the first factor and every n-th run of j of the second.  weights: "stream": a ring for both factors;
    "apart": a ring for the second factor where the rings of X and of the first one have been; "resident": loaded once; "gather":
    so, too, and those of the second factor put in order by each block.  copies: whether TMA stores Y.  blocks: launched.
    """

    batch: int
    dtype: str
    first: Pattern
    second: Pattern
    groups: int
    split: str
    block_j: int
    x_stages: int
    w_stages: int
    weights: str
    panels: int
    store: int
    min_blocks: int
    copies: bool = True
    blocks: int = 1
    epilogue: Epilogue = NONE

    @property
    def threads(self) -> int:
        """Of a block: the consumers, and warps of producers: whole warpgroups where these give registers away."""
        return 128 * self.groups + (64 if self.groups == 1 else 128)

    @property
    def registers(self) -> tuple[int, int] | None:
        """Of a thread of the producers and of the consumers (setmaxnreg); None: as compiled."""
        return REGISTERS[self.groups] if self.min_blocks == 1 and self.groups > 1 else None

    @property
    def rows(self) -> int:
        """Samples of a block's tile."""
        return ROWS * self.middles

    @property
    def together(self) -> bool:
        """Whether all warpgroups work on the same samples."""
        return self.split == "outputs"

    @property
    def middles(self) -> int:
        """Middles in shared memory."""
        return 1 if self.together else self.groups

    @property
    def tiles(self) -> int:
        """Tiles of the batch."""
        return ceil(self.batch / self.rows)

    @property
    def packs(self) -> bool:
        """Whether the second factor's weights (a, b, c, d) are copied to (a, b, d, c) first."""
        return self.second[3] > 1 and not self.gathers

    @property
    def gathers(self) -> bool:
        """Whether each block puts them in order itself."""
        return self.weights == "gather"

    # -- panels -------------------------------------------------------------------------------------

    @property
    def first_chunks(self) -> int:
        """Panels along k of a block of the first factor."""
        return ceil(self.first[2] / STEPS)

    @property
    def second_chunks(self) -> int:
        """Panels along k of a slice of the middle."""
        return ceil(self.second[2] / STEPS)

    @property
    def j_blocks(self) -> int:
        """Runs of `block_j` outputs of a block of the second factor."""
        return ceil(self.second[1] / self.block_j)

    @property
    def middle_panels(self) -> int:
        """Panels of the middle: by slice (i, l), then along k."""
        return self.second[0] * self.second[3] * self.second_chunks

    @property
    def first_panels(self) -> int:
        """Panels of weights of the first factor."""
        return self.first[0] * self.first_chunks

    @property
    def weight_panels(self) -> int:
        """Panels of weights of both factors, in the order in which a tile needs them."""
        return self.first_panels + self.second[0] * self.j_blocks * self.second[3] * self.second_chunks

    @property
    def resident(self) -> bool:
        """Whether weights stay in shared memory."""
        return self.weights in ("resident", "gather")

    @property
    def apart(self) -> bool:
        """Whether the second factor has a ring of its own, where X has been."""
        return self.weights == "apart"

    @property
    def rings(self) -> tuple[Slots, Slots]:
        """Of the weights of each factor; one ring twice, unless they are `apart`."""
        barriers = self.barriers_at + 16 * self.groups * self.x_stages
        first = Slots(self.w_at, self._slot_bytes, self._slot_count, barriers, self._weight_rings)
        if not self.apart:
            return first, first
        size = self.block_j * STEPS * ITEM
        return first, Slots(self.x_at, size, (self.stores_at - self.x_at) // size, first.barriers_end)

    @property
    def _weight_rings(self) -> int:
        return self.groups if self.together and not self.resident else 1

    @property
    def _slot_count(self) -> int:
        return self.weight_panels if self.resident else self.w_stages

    @property
    def _slot_bytes(self) -> int:
        return (self.first[1] if self.apart else max(self.first[1], self.block_j)) * STEPS * ITEM

    @property
    def sums(self) -> int:
        """Accumulators of a thread: of one block i of the first factor, or of all l of `block_j` outputs of the second."""
        return max(self.first[1], self.block_j * self.second[3]) // 2

    # -- shared memory ------------------------------------------------------------------------------

    @property
    def store_columns(self) -> int:
        """Columns of Y of a staging panel: `store` bytes, or the results of 16 outputs j where d is 3."""
        return 48 if self.second[3] == 3 else self.store // ITEM

    @property
    def store_bytes(self) -> int:
        """Of a staging panel of a warp."""
        return STORE_ROWS * self.store_columns * ITEM

    @property
    def x_at(self) -> int:
        """First byte of the rings of X, behind the middle of each warpgroup."""
        return self.middles * self.middle_panels * PANEL

    @property
    def w_at(self) -> int:
        """First byte of the weights."""
        return self.x_at + self.groups * self.x_stages * PANEL

    @property
    def stores_at(self) -> int:
        """First byte of the staging panels."""
        return self.w_at + self._weight_rings * self._slot_count * self._slot_bytes

    @property
    def barriers_at(self) -> int:
        """First byte of the mbarriers."""
        return self.stores_at + 4 * self.groups * self.panels * self.store_bytes

    @property
    def shared_bytes(self) -> int:
        """All of it."""
        return self.turns_at + 16

    @property
    def turns_at(self) -> int:
        """First byte of the two mbarriers that say which factor all warpgroups are done with."""
        return self.rings[1].barriers_end


def why_not(w: KSMatmul, device: Device) -> str | None:
    """Why a workload has no plan, or None."""
    if device.arch != "sm_90a":
        return f"{device.arch}: wgmma needs sm_90a"
    if w.dtype not in ("float16", "bfloat16") or not w.batch_first:
        return f"{w.dtype} in {w.layout} is not served: 16-bit types in batch_first are"
    if len(w.patterns) != 2:
        return f"{len(w.patterns)} factors: chains of two are served"
    (_, b, c, d), (_, b2, c2, d2) = w.patterns
    if d != 1 or d2 > MOST_D:
        return f"d = {d} and {d2}: 1, and at most {MOST_D}, are served"
    if b > 256:
        return f"{b} outputs of a block of the first factor: at most 256 are served"
    odd = [n for n, by in ((b, 8), (c, 8), (b2, 8), (c2, 16)) if n % by]
    return f"{odd[0]} is no multiple of 8 outputs or inputs, or 16 inputs of the second factor" if odd else None


def plan_wgmma_pair(w: KSMatmul, config: Config, device: Device) -> WgmmaPairPlan:
    """The plan of a config. Raises InvalidConfig with one line."""
    first, second = w.patterns
    names = ("groups", "block_j", "x_stages", "w_stages", "panels", "store", "min_blocks")
    knobs = {name: int(config[name]) for name in names}
    more = {"split": str(config["split"]), "weights": str(config["weights"]), "copies": config["copy"] == "tma"}
    p = WgmmaPairPlan(w.batch, w.dtype, first, second, **knobs, **more, epilogue=w.epilogue)  # type: ignore[arg-type]
    if p.block_j * second[3] % p.store_columns:
        raise InvalidConfig(f"block_j={p.block_j}: {p.block_j * second[3]} results are not whole panels of {p.store_columns}")
    if p.panels > 1 and not p.copies:
        raise InvalidConfig(f"panels={p.panels} has no effect with copy=threads, panels=1 is the same kernel")
    if p.block_j * second[3] // p.store_columns % p.panels:
        raise InvalidConfig(f"panels={p.panels}: block_j={p.block_j} results fill {p.block_j * second[3] // p.store_columns}")
    if second[3] == 3 and p.store != PANEL // ROWS:
        raise InvalidConfig(f"store={p.store} has no effect where d is 3, store={PANEL // ROWS} is the same kernel")
    if p.block_j > 32 and p.block_j >= 2 * second[1]:
        raise InvalidConfig(f"block_j={p.block_j}: the second factor has {second[1]} outputs j")
    if p.gathers and second[3] == 1:
        raise InvalidConfig("weights=gather has no effect where d is 1, weights=resident is the same kernel")
    if p.together and (p.groups == 1 or p.apart):
        raise InvalidConfig(f"split=outputs: groups={p.groups} and weights={p.weights}, but several share one ring each, or all")
    if p.groups > 1 and p.rows >= w.batch + ROWS:
        raise InvalidConfig(f"groups={p.groups}: {p.rows} samples of a tile, the batch has {w.batch}")
    if p.sums > _SUMS[p.groups]:
        raise InvalidConfig(f"a thread needs {p.sums} registers for sums, {_SUMS[p.groups]} at most")
    if p.min_blocks * p.threads * (p.sums + 56) > device.registers_per_sm and p.min_blocks > 1:
        raise InvalidConfig(f"min_blocks={p.min_blocks}: about {p.sums + 56} registers a thread are too many")
    panels = p.first_panels if p.apart else p.weight_panels
    if not p.resident and p.w_stages > panels:
        raise InvalidConfig(f"w_stages={p.w_stages}: there are {panels} panels")
    if p.rings[1].count < LEAST:
        raise InvalidConfig(f"{p.rings[1].count} panels of {p.rings[1].size} bytes in flight are too few")
    available = min(device.shared_per_block, device.shared_per_sm // p.min_blocks - _BLOCK_SHARED)
    if p.shared_bytes > available:
        raise InvalidConfig(f"{p.shared_bytes} bytes of shared memory, {available} are left for a block")
    return replace(p, blocks=min(p.tiles, device.units * p.min_blocks))
