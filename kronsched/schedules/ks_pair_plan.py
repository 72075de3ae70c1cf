"""The tiling of two Kronecker-sparse factors in one kernel: pure arithmetic, no TVM. See ks_pair_kernel.py.

Read first: `plan_pair`.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING

from kronsched.errors import InvalidConfig
from kronsched.schedules.ks_mma_limits import LANES, can_overlap, check_limits
from kronsched.space import Config
from kronsched.workloads.ks import KSMatmul, Pattern
from kronsched.workloads.ks_epilogue import NONE, Epilogue

if TYPE_CHECKING:
    from kronsched.hardware import Device

MOST_SUMS = 12
"""Tiles of 8 outputs whose sums a warp holds."""
MOST_D = 4


@dataclass(frozen=True)
class PairPlan:
    """warps_m, warps_n: warps of a block along the samples, 16 · mt of them each, and along the outputs.  blocks: of the grid.

    overlap: it starts while the kernel before it runs, and waits for that one before it reads anything.
    """

    batch: int
    dtype: str
    first: Pattern
    second: Pattern
    mt: int
    warps_m: int
    warps_n: int
    min_blocks: int
    blocks: int
    overlap: bool
    epilogue: Epilogue = NONE

    @property
    def rows(self) -> int:
        """Samples of a tile."""
        return 16 * self.mt * self.warps_m

    @property
    def tiles(self) -> int:
        """Tiles of the batch."""
        return ceil(self.batch / self.rows)

    @property
    def threads(self) -> int:
        """Of a block."""
        return LANES * self.warps_m * self.warps_n

    @property
    def features(self) -> tuple[int, int, int]:
        """Of X, of the middle and of Y."""
        (a1, b1, c1, _), (a2, b2, _, d2) = self.first, self.second
        return a1 * c1, a1 * b1, a2 * b2 * d2

    @property
    def unit_first(self) -> int:
        """Tiles of 8 outputs that a warp makes at a time, all of one block i: few enough to give every warp some."""
        a, b, _, _ = self.first
        return _unit(b // 8, min(MOST_SUMS // self.mt, a * b // 8 // self.warps_n))

    @property
    def unit_second(self) -> int:
        """The same of the second factor, whose l are made together."""
        a, b, _, d = self.second
        return _unit(b // 8, min(MOST_SUMS // (self.mt * d), a * b // 8 // self.warps_n))

    @property
    def weight_pitches(self) -> tuple[int, int]:
        """Elements between rows j of weights in shared memory."""
        return _pitch(self.first[2]), _pitch(self.second[2])

    @property
    def middle_pitch(self) -> int:
        """Elements between samples of the middle."""
        return _pitch(self.features[1])

    @property
    def stage_pitch(self) -> int:
        """Elements between samples of a stage, which holds X first and then Y."""
        return _pitch(max(self.features[0], self.features[2]))

    @property
    def stage_elements(self) -> int:
        """Of a tile of X or Y."""
        return self.rows * self.stage_pitch

    @property
    def second_at(self) -> int:
        """Where the weights of the second factor begin, in elements of shared memory; those of the first begin at 0."""
        return self.first[0] * self.first[1] * self.weight_pitches[0]

    @property
    def middle_at(self) -> int:
        """Where the middle begins."""
        a, b, _, d = self.second
        return self.second_at + a * d * b * self.weight_pitches[1]

    @property
    def stages_at(self) -> int:
        """Where the two stages begin."""
        return self.middle_at + self.rows * self.middle_pitch

    @property
    def shared_elements(self) -> int:
        """All of it."""
        return self.stages_at + 2 * self.stage_elements

    @property
    def shared_words(self) -> int:
        """All of it in 4-byte words."""
        return self.shared_elements // 2

    @property
    def registers(self) -> int:
        """A guess of what a thread needs."""
        return 4 * self.mt * max(self.unit_first, self.unit_second * self.second[3]) + 48 + 4 * self.mt


def _unit(tiles: int, most: int) -> int:
    return max(n for n in range(1, max(1, most) + 1) if tiles % n == 0)


def _pitch(elements: int) -> int:
    """At least so many elements, and 4 words more than a multiple of 8: lanes of 8 rows then meet no bank twice."""
    return ceil(elements / 16) * 16 + 8


def why_not(w: KSMatmul) -> str | None:
    """Why a workload has no plan whatever the device, or None."""
    if w.dtype not in ("float16", "bfloat16") or not w.batch_first:
        return f"{w.dtype} in {w.layout} is not served: 16-bit types in batch_first are"
    if len(w.patterns) != 2:
        return f"{len(w.patterns)} factors: chains of two are served"
    first, second = w.patterns
    if first[3] != 1 or second[3] > MOST_D:
        return f"d = {first[3]} and {second[3]}: 1, and at most {MOST_D}, are served"
    odd = [n for _, b, c, _ in w.patterns for n, by in ((b, 8), (c, 16)) if n % by]
    return f"{odd[0]} is no multiple of 8 outputs or 16 inputs" if odd else None


def plan_pair(w: KSMatmul, config: Config, device: Device) -> PairPlan:
    """The plan of a config. Raises InvalidConfig."""
    first, second = w.patterns
    mt, warps_m, warps_n, min_blocks = (int(config[name]) for name in ("mt", "warps_m", "warps_n", "min_blocks"))
    tiles = ceil(w.batch / (16 * mt * warps_m))
    blocks = min(tiles, device.units * min_blocks)
    plan = PairPlan(w.batch, w.dtype, first, second, mt, warps_m, warps_n, min_blocks, blocks, can_overlap(device), w.epilogue)
    if plan.rows > 16 and plan.rows >= 2 * w.batch:
        raise InvalidConfig(f"warps_m={warps_m}, mt={mt}: half a tile of {plan.rows} samples is larger than the batch")
    units = max(plan.features[1] // (8 * plan.unit_first), second[0] * second[1] // (8 * plan.unit_second))
    if warps_n > units:
        raise InvalidConfig(f"warps_n={warps_n}: there is work for {units}")
    check_limits(plan, device)
    return plan
