"""How the mma.sync Gemm is cut up: pure arithmetic, no TVM. The schedule, its constraints and its features read it.

Read first: `MmaPlan`, `plan_mma`.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING

from kronsched.dtypes import DTYPES
from kronsched.errors import InvalidConfig
from kronsched.space import Config
from kronsched.workloads.gemm import Gemm

if TYPE_CHECKING:
    from kronsched.hardware import Device

ROW_BYTES = 128
"""Bytes of k in shared memory for each row of x and w."""
_MOST_SUMS = 128


@dataclass(frozen=True)
class MmaPlan:
    """One kernel.

    workload, …, stages: the knobs, as search_spaces/gemm_dense_cuda_mma.toml says.
    """

    workload: Gemm
    warps_m: int
    warps_n: int
    warp_m: int
    warp_n: int
    stages: int

    @property
    def staged(self) -> str:
        """The dtype in shared memory: float8 is widened to float16, which holds all its values and every GPU multiplies."""
        return "float16" if self.workload.a_dtype.startswith("float8") else self.workload.a_dtype

    @property
    def by_chunks(self) -> bool:
        """Whether rows of k are copied 16 bytes at a time by cp.async; else element by element."""
        return self.staged == self.workload.a_dtype and self.workload.k * DTYPES[self.staged].itemsize % 16 == 0

    @property
    def block_m(self) -> int:
        """Rows of Y a block."""
        return self.warps_m * self.warp_m

    @property
    def block_n(self) -> int:
        """Columns of Y a block."""
        return self.warps_n * self.warp_n

    @property
    def block_k(self) -> int:
        """Elements of k a trip."""
        return ROW_BYTES // DTYPES[self.staged].itemsize

    @property
    def trips(self) -> int:
        """Trips along k."""
        return ceil(self.workload.k / self.block_k)

    @property
    def m_tiles(self) -> int:
        """Blocks along m."""
        return ceil(self.workload.m / self.block_m)

    @property
    def blocks(self) -> int:
        """Blocks launched."""
        return self.m_tiles * ceil(self.workload.n / self.block_n)

    @property
    def threads(self) -> int:
        """Threads a block."""
        return 32 * self.warps_m * self.warps_n

    @property
    def sums(self) -> int:
        """Accumulators a thread."""
        return self.warp_m * self.warp_n // 32

    @property
    def stage_bytes(self) -> int:
        """Shared memory of a stage."""
        return (self.block_m + self.block_n) * ROW_BYTES

    @property
    def shared_bytes(self) -> int:
        """Shared memory a block."""
        return self.stages * self.stage_bytes


def plan_mma(w: Gemm, config: Config, device: Device) -> MmaPlan:
    """The plan of a config. Raises InvalidConfig with one line."""
    plan = MmaPlan(w, *(int(config[name]) for name in ("warps_m", "warps_n", "warp_m", "warp_n", "stages")))
    if plan.sums > _MOST_SUMS:
        tile = f"{plan.warp_m} x {plan.warp_n}"
        raise InvalidConfig(f"a warp tile of {tile} needs {plan.sums} registers for sums, {_MOST_SUMS} at most")
    if plan.sums > 64 and plan.threads > 256:
        raise InvalidConfig(f"{plan.threads} threads with {plan.sums} sums each: more registers than a multiprocessor has")
    if plan.shared_bytes > device.shared_per_block:
        raise InvalidConfig(f"a block needs {plan.shared_bytes} bytes of shared memory, the device has {device.shared_per_block}")
    return plan


def mma_features(plan: MmaPlan, device: Device) -> dict[str, float]:
    """Waves, useful share of tiles, bytes through L2, roofline time (µs)."""
    w = plan.workload
    waves = plan.blocks / device.units
    rate = device.peak_gflops.get(w.a_dtype, device.peak_gflops.get("float32", 10_000.0))
    return {
        "blocks": float(plan.blocks),
        "waves": waves,
        "wave_efficiency": waves / ceil(waves),
        "useful_share": w.m * w.n / (plan.blocks * plan.block_m * plan.block_n),
        "intensity": plan.block_m * plan.block_n / (plan.block_m + plan.block_n),
        "warp_intensity": plan.warp_m * plan.warp_n / (plan.warp_m + plan.warp_n),
        "l2_mb": plan.blocks * plan.trips * plan.stage_bytes / 1e6,
        "shared_kb": plan.shared_bytes / 1024,
        "bytes_in_flight": float((plan.stages - 1) * plan.stage_bytes),
        "sums": float(plan.sums),
        "threads": float(plan.threads),
        "roofline_us": max(w.min_bytes / device.bandwidth_gbs, w.flops / rate) / 1e3,
    }
