"""How the TMA kernel with samples as rows is cut up: pure arithmetic, no TVM. See ks_cuda_tma_last.py.

    Y_ilᵀ (B × b) = X_ilᵀ (B × c) · W_ilᵀ (c × b)     for each slice (i, l), in batch_last: samples are the fast axis of X and Y

    stage    slabs of X, 64 samples × block_k steps of k, samples the fast axis; then W, block_n outputs × 64 steps of k
    panel    64 samples of block_n outputs of Y, on their way out

Read first: `SamplePlan`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil
from typing import TYPE_CHECKING, Any

from kronsched.errors import InvalidConfig
from kronsched.schedules.gemm_dense_wgmma_plan import ROW_BYTES
from kronsched.schedules.ks_tile_plan import ITEM, TensorView, TilePlan, fits
from kronsched.space import Config
from kronsched.workloads.gemm import Gemm
from kronsched.workloads.ks import KSMatmul, Pattern

if TYPE_CHECKING:
    from kronsched.hardware import Device

STEP = 16
"""Steps of k of one wgmma, and the least outputs of a tile."""


SUMS = {1: 192, 2: 192, 3: 96}
"""By warpgroups: registers a thread of a consumer can spare for sums."""
MOST_ROWS = 4
"""Row tiles of 64 samples of a warpgroup."""


@dataclass(frozen=True)
class SamplePlan(TilePlan):
    """The multiplying launch of one factor: block_m samples × block_n outputs a tile.

    The two blocks of a cluster take the same samples and neighbouring outputs where there is an even number of tiles along
    these, and each fetches half of the samples for both. Else they take neighbouring samples and share weights in this way.
    """

    @property
    def block_k(self) -> int:
        """Steps of k of a trip: no more than c needs, shared out evenly."""
        k = self.workload.k
        return ceil(k / ceil(k / 64) / STEP) * STEP

    @property
    def samples(self) -> int:
        """See the base class."""
        return self.workload.m

    @property
    def output_tiles(self) -> int:
        """See the base class."""
        return self.n_tiles

    @property
    def shares_samples(self) -> bool:
        """What the blocks of a cluster share: samples, or else weights."""
        return self.n_tiles % self.cluster == 0

    @property
    def tiles(self) -> int:
        """Tiles of a slice, those that a cluster takes together counted as one."""
        rows, columns = (1, self.cluster) if self.shares_samples else (self.cluster, 1)
        return ceil(self.m_tiles / rows) * (self.n_tiles // columns)

    @property
    def slab_bytes(self) -> int:
        """64 samples of a stage."""
        return self.block_k * ROW_BYTES

    @property
    def stage_bytes(self) -> int:
        """Shared memory of a stage."""
        return self.block_m // 64 * self.slab_bytes + self.block_n * ROW_BYTES

    @property
    def fetched(self) -> int:
        """See the base class: a cluster asks for what its blocks share once."""
        weights = self.block_n * ROW_BYTES
        samples = self.stage_bytes - weights
        return samples // self.cluster + weights if self.shares_samples else samples + weights // self.cluster

    @property
    def panel_bytes(self) -> int:
        """A staging panel."""
        return self.block_n * ROW_BYTES

    @property
    def shared_bytes(self) -> int:
        """Shared memory a block: stages, staging panels, mbarriers."""
        return self.stages * (self.stage_bytes + 16) + self.warpgroups * self.span * self.panel_bytes + 16 * self.pingpong

    def place(self, unit: Any, rank: Any = 0) -> tuple[Any, Any, Any]:
        """See the base class: tiles of the same samples follow each other. rank: of the block in its cluster."""
        part, tile = unit // self.tiles, unit % self.tiles
        if self.shares_samples:
            wide = self.n_tiles // self.cluster
            return tile // wide, tile % wide * self.cluster + rank, part
        return tile // self.n_tiles * self.cluster + rank, tile % self.n_tiles, part

    def data(self, features: int) -> TensorView:
        """See the base class."""
        a, _, _, d = self.pattern
        batch = self.samples
        return TensorView((batch, features, d, a), (d * batch, batch, features * d * batch))


def plan_samples(w: KSMatmul, pattern: Pattern, config: Config, device: Device) -> SamplePlan:
    """The plan of one factor. Raises InvalidConfig with one line."""
    _, b, c, _ = pattern
    block_m, block_n, warpgroups = (int(config[name]) for name in ("block_m", "block_n", "warpgroups"))
    stages, cluster, pingpong = int(config["stages"]), int(config["cluster"]), bool(config["pingpong"])
    product = Gemm(w.batch, b, ceil(c * ITEM / 16) * 16 // ITEM, w.dtype, w.dtype)
    plan = SamplePlan(product, block_m, block_n, warpgroups, stages, 1, 1, 0, pingpong=pingpong, cluster=cluster,
                      pattern=pattern, batch_first=False)  # fmt: skip
    if pingpong and warpgroups != 2:
        raise InvalidConfig("pingpong=True: two warpgroups take turns")
    if block_m % (64 * plan.sharers) or plan.rows > MOST_ROWS:
        raise InvalidConfig(f"block_m={block_m}: {plan.sharers} warpgroups own one to {MOST_ROWS} times 64 samples each")
    if plan.sums > SUMS[warpgroups]:
        raise InvalidConfig(f"a tile of {block_m} x {block_n} needs {plan.sums} registers for sums, {SUMS[warpgroups]} at most")
    if not (fits(block_m, w.batch) and block_n < b + 64):
        raise InvalidConfig(f"a tile of {block_m} x {block_n} is much larger than a product of {w.batch} x {b}")
    if cluster > 1 and (block_m % (64 * cluster) if plan.shares_samples else plan.m_tiles < cluster):
        raise InvalidConfig(f"cluster={cluster}: there is not enough for the blocks to share")
    free = device.shared_per_block - plan.shared_bytes
    spans = [s for s in range(1, plan.rows + 1) if plan.rows % s == 0 and s * warpgroups * plan.panel_bytes <= free]
    if not spans:
        raise InvalidConfig(f"stages={stages}: with staging panels a block needs more shared memory than {device.name} has")
    return replace(plan, span=max(spans), blocks=cluster * min(plan.units, device.units // cluster))
