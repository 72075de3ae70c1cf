"""Batch-last Kronecker-sparse matmul by TMA and wgmma with samples as the rows of a tile (CUDA, sm_90a).

As ks_cuda_tma.py, but the product of a slice is turned: a tile has 64 to 512 samples and as many outputs as a block has, in
steps of 16, so that a block of 48 or 96 outputs leaves nothing of it empty, and weights are read again less often.

Read first: `KSCudaTmaLast`, then ks_last_tile_plan.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from kronsched.errors import InvalidConfig
from kronsched.schedules.ks_cuda_tma import KSCudaTma
from kronsched.schedules.ks_last_tile_plan import SamplePlan, plan_samples
from kronsched.space import Config
from kronsched.workloads.base import Workload
from kronsched.workloads.ks import KSMatmul

if TYPE_CHECKING:
    from kronsched.hardware import Device
    from kronsched.schedules.ks_tile_plan import TilePlan

FEW: tuple[Config, ...] = tuple(
    {"block_m": m, "block_n": n, "warpgroups": groups, "pingpong": groups == 2 and m == 128, "cluster": cluster}
    for m, n, groups, cluster in (
        (256, 48, 2, 1), (128, 64, 2, 1), (256, 64, 2, 1), (128, 96, 2, 1), (256, 96, 2, 2), (384, 96, 3, 1), (384, 96, 3, 2),
        (256, 128, 2, 2), (128, 192, 2, 1), (256, 192, 2, 2),
    )
)  # fmt: skip
"""Tiles that defaults are chosen from: the fastest ones of each kind of block on an H200."""
MANY_SAMPLES, WIDE = 384, 256
"""Tiles of so many samples are chosen for up to 4 tiles of outputs, the others for up to 2, or from half of `WIDE` outputs on."""


class KSCudaTmaLast(KSCudaTma):
    """float16 and bfloat16 with float32 sums, batch_last, chains factor by factor, without an epilogue."""

    name: ClassVar[str] = "ks_cuda_tma_last"

    def supports(self, workload: Workload, device: Device) -> str | None:
        """As the base class says, in batch_last, without an epilogue."""
        assert isinstance(workload, KSMatmul)
        if workload.batch_first:
            return f"layout {workload.layout} is not served"
        if workload.epilogue:
            return "an epilogue is not served"
        return super().supports(workload, device)

    def default_config(self, workload: Workload, device: Device) -> Config:
        """The config of least predicted time with one of `FEW` tiles, or with any where none of them fits."""
        assert isinstance(workload, KSMatmul)
        wide = max(b for _, b, _, _ in workload.patterns)
        tiles = [t for t in FEW if int(t["block_n"]) >= (wide / 4 if t["block_m"] == MANY_SAMPLES else min(wide, WIDE) / 2)]
        stages = next(k.values for k in self.space(workload, device).knobs if k.name == "stages")
        found: list[tuple[float, int, Config]] = []
        for n, (tile, depth) in enumerate(itertools.product(tiles, sorted(stages, reverse=True))):
            config: Config = {**tile, "stages": depth}
            try:
                found.append((self.expected_us(workload, config, device), n, config))
            except InvalidConfig:
                continue
        return min(found)[2] if found else super().default_config(workload, device)

    def extents(self, workload: KSMatmul) -> Mapping[str, int]:
        """See the base class."""
        return {"block_m": workload.batch, "block_n": max(b for _, b, _, _ in workload.patterns)}

    def kernel(self, plan: TilePlan) -> Any:
        """See the base class."""
        from kronsched.schedules.ks_last_tile_kernel import samples_kernel

        assert isinstance(plan, SamplePlan)
        return samples_kernel(plan, "multiply")

    def plans(self, workload: KSMatmul, config: Config, device: Device) -> list[TilePlan]:
        """See the base class."""
        return [plan_samples(workload, pattern, config, device) for pattern in workload.patterns]
