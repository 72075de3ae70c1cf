"""How the wgmma Gemm is cut up: pure arithmetic, no TVM. The schedule, its constraints and its features read it.

Y is cut into tiles of block_m × block_n, k into trips of 128 bytes; with split_k > 1, ranges of trips are units of their own,
whose partial sums a second launch adds up. Persistent blocks take units in turn, in bands of `group` rows of tiles, so that the
tiles in flight at any time share rows of x and w in the L2 cache.

Read first: `DensePlan`, `plan_dense`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil, sqrt
from typing import TYPE_CHECKING

from kronsched.dtypes import DTYPES
from kronsched.errors import InvalidConfig
from kronsched.space import Config
from kronsched.workloads.conv2d import FOUR_BIT
from kronsched.workloads.gemm import Gemm
from kronsched.workloads.gemm_dense import MAX_INT8_K
from kronsched.workloads.gemm_epilogue import has_epilogue

if TYPE_CHECKING:
    from kronsched.hardware import Device

ROW_BYTES = 128
"""Bytes of k a trip moves for each row of x and w: the widest swizzle."""
PANEL_BYTES = 64 * ROW_BYTES
"""A staging panel: 64 rows of 128 bytes of Y."""
REGISTERS = {1: None, 2: (40, 232), 3: (32, 160)}
"""By consumer warpgroups: registers a thread of the producer and of the consumers (setmaxnreg); None: as compiled."""
_L2_BYTES_NS = 95.0
"""Bytes a nanosecond that a multiprocessor got through L2 at most in the kernels measured on an H200."""
_SPLIT_ROWS = 1.75
"""What rows that are spread over two 128-byte lines cost, against rows on one (measured there, too)."""
_EIGHT_BITS = 0.78
"""Share of the 8-bit peak rate that an H200 sustains."""
_LATENCY_NS = 1400.0
"""From asking for a stage to having it."""
_HEAT = 0.02
"""What bytes through L2 cost where they are not what limits: power, so clock, as a share of the time that L2 would need."""
_CLUSTER_US = 0.3
"""What the barriers of a cluster cost a unit."""
_UNKNOWN_GFLOPS = 500_000.0
"""The rate of a GPU of which nobody has said it."""
_SUMS = {1: 192, 2: 192, 3: 96}
"""Registers a thread of a consumer can spare for sums."""


@dataclass(frozen=True)
class DensePlan:
    """One kernel.

    workload, …, cluster: the knobs, as search_spaces/gemm_dense_wgmma.toml says.  blocks: launched.  span: staging panels a
    warpgroup has; 0: results go straight to global memory.  padded: x and w are copies whose rows have whole 16 bytes, and k is
    that of the copies.
    """

    workload: Gemm
    block_m: int
    block_n: int
    warpgroups: int
    stages: int
    group: int
    split_k: int
    promote: int
    pair: bool = False
    pingpong: bool = False
    cluster: int = 1
    blocks: int = 1
    span: int = 0
    padded: bool = False

    @property
    def item(self) -> int:
        """Bytes of an element of x and w."""
        return DTYPES[self.workload.a_dtype].itemsize

    @property
    def block_k(self) -> int:
        """Elements of k a trip."""
        return ROW_BYTES // self.item

    @property
    def m_tiles(self) -> int:
        """Tiles along m."""
        return ceil(self.workload.m / self.block_m)

    @property
    def n_tiles(self) -> int:
        """Tiles along n."""
        return ceil(self.workload.n / self.block_n)

    @property
    def rows_of_tiles(self) -> int:
        """Rows of tiles, those that a cluster takes together counted as one."""
        return ceil(self.m_tiles / self.cluster)

    @property
    def tiles(self) -> int:
        """Tiles of Y, those that a cluster takes together counted as one."""
        return self.rows_of_tiles * self.n_tiles

    @property
    def units(self) -> int:
        """Units of work of a block or cluster: tiles times ranges of k."""
        return self.tiles * self.split_k

    @property
    def workers(self) -> int:
        """Blocks or clusters that take units."""
        return self.blocks // self.cluster

    @property
    def trips(self) -> int:
        """Trips along the whole of k."""
        return ceil(self.workload.k / self.block_k)

    @property
    def unit_trips(self) -> int:
        """Trips of a unit (the last range of k may have fewer)."""
        return ceil(self.trips / self.split_k)

    @property
    def rows(self) -> int:
        """Row tiles of 64 a warpgroup owns."""
        return self.block_m // (64 * self.sharers)

    @property
    def sharers(self) -> int:
        """Warpgroups that share a tile."""
        return 1 if self.pingpong else self.warpgroups

    @property
    def mma_n(self) -> int:
        """Columns of one wgmma: int8 has shapes only up to 224 in TVM's table, and halves are as fast."""
        return self.block_n if self.workload.a_dtype != "int8" or self.block_n <= 128 else self.block_n // 2

    @property
    def sums(self) -> int:
        """Accumulators a thread."""
        return self.rows * self.block_n // 2

    @property
    def threads(self) -> int:
        """Threads a block: one producer warpgroup and the consumers."""
        return 128 * (1 + self.warpgroups)

    @property
    def stage_bytes(self) -> int:
        """Shared memory of a stage."""
        return (self.block_m + self.block_n) * ROW_BYTES

    @property
    def shared_bytes(self) -> int:
        """Shared memory a block: stages, staging panels, two mbarriers a stage, two for turns."""
        return self.stages * (self.stage_bytes + 16) + self.warpgroups * self.span * PANEL_BYTES + 16 * self.pingpong

    @property
    def out_dtype(self) -> str:
        """What the kernel writes: Y, or partial sums."""
        wide = DTYPES[self.workload.a_dtype].accumulate
        return wide if self.split_k > 1 else self.workload.out_dtype

    @property
    def fused(self) -> bool:
        """Whether the kernel applies an epilogue itself."""
        return self.split_k == 1 and has_epilogue(self.workload)

    @property
    def panel_columns(self) -> int:
        """Columns of Y of a staging panel."""
        return ROW_BYTES // DTYPES[self.out_dtype].itemsize


def plan_dense(w: Gemm, config: Config, device: Device) -> DensePlan:
    """The plan of a config. Raises InvalidConfig with one line."""
    block_m, block_n, warpgroups = (int(config[name]) for name in ("block_m", "block_n", "warpgroups"))
    stages, split_k, promote = (int(config[name]) for name in ("stages", "split_k", "promote"))
    pingpong = bool(config["pingpong"])
    if pingpong and (warpgroups != 2 or split_k > 1):
        raise InvalidConfig("pingpong=True: two warpgroups take turns, and k is not split")
    sharers = 1 if pingpong else warpgroups
    if block_m % (64 * sharers) or block_m > 128 * sharers:
        raise InvalidConfig(f"block_m={block_m}: {sharers} warpgroups own one or two times 64 rows each")
    group, cluster = int(config["group"]), int(config["cluster"])
    pair = bool(config["pair"])
    padded, w = whole_k(w) > w.k, replace(w, k=whole_k(w))
    plan = DensePlan(w, block_m, block_n, warpgroups, stages, group, split_k, promote, pair, pingpong, cluster)
    sums = plan.sums * (1 + (promote > 0) + pair)
    if sums > _SUMS[warpgroups]:
        raise InvalidConfig(f"a tile of {block_m} x {block_n} needs {sums} registers for sums, {_SUMS[warpgroups]} at most")
    if group > 1 and group > plan.rows_of_tiles:
        raise InvalidConfig(f"group={group}: there are {plan.rows_of_tiles} rows of tiles")
    if cluster > plan.m_tiles:
        raise InvalidConfig(f"cluster={cluster}: there are {plan.m_tiles} tiles along m")
    if split_k > 1 and (split_k - 1) * plan.unit_trips >= plan.trips:
        raise InvalidConfig(f"split_k={split_k}: k has {plan.trips} trips")
    if block_n > plan.panel_columns and block_n % plan.panel_columns:
        raise InvalidConfig(f"block_n={block_n}: results are staged {plan.panel_columns} columns at a time")
    blocks = cluster * min(plan.units, max(1, device.units // cluster))
    plan = replace(plan, blocks=blocks, span=_span(plan, device), padded=padded)
    if plan.shared_bytes > device.shared_per_block:
        raise InvalidConfig(f"a block needs {plan.shared_bytes} bytes of shared memory, the device has {device.shared_per_block}")
    return plan


def whole_k(w: Gemm) -> int:
    """The least k not below the workload's with rows of whole 16 bytes."""
    chunk = 16 // DTYPES[w.a_dtype].itemsize
    return ceil(w.k / chunk) * chunk


def _span(plan: DensePlan, device: Device) -> int:
    """Staging panels a warpgroup: as many as fit, a divisor of its panels; 0 where rows of Y or tiles rule out TMA."""
    w = plan.workload
    if plan.split_k > 1 or w.n * DTYPES[w.out_dtype].itemsize % 16 or plan.block_n < plan.panel_columns:
        return 0
    panels = plan.block_n // plan.panel_columns
    free = device.shared_per_block - plan.shared_bytes
    return max((s for s in range(1, panels + 1) if panels % s == 0 and s * plan.warpgroups * PANEL_BYTES <= free), default=1)


def why_not(w: Gemm, device: Device) -> str | None:
    """None when the schedule serves the workload on the device, else one line."""
    if w.a_dtype in FOUR_BIT:
        return f"a_dtype={w.a_dtype}: there is gemm_int4_cuda for it"
    if not w.is_dense:
        return f"b_dtype={w.b_dtype}: it multiplies dense matrices"
    if device.arch != "sm_90a":
        return f"{device.arch}: wgmma needs sm_90a"
    if w.a_dtype == "int8" and whole_k(w) > MAX_INT8_K:
        return f"k={w.k}: rows of whole 16 bytes would have more than {MAX_INT8_K} elements"
    return None


def _fetched(plan: DensePlan) -> float:
    """Bytes a block asks the L2 cache for in a trip."""
    rows = plan.block_m + plan.block_n / plan.cluster
    return rows * ROW_BYTES * (_SPLIT_ROWS if plan.workload.k * plan.item % ROW_BYTES else 1.0)


def predicted_us(plan: DensePlan, device: Device) -> float:
    """A rough time: waves of units, each as slow as its products or its reads through L2; memory traffic; launches."""
    w = plan.workload
    rate = device.peak_gflops.get(w.a_dtype, _UNKNOWN_GFLOPS) / device.units  # flops a nanosecond and multiprocessor
    rate *= _EIGHT_BITS if plan.item == 1 else 1.0
    product = 2 * plan.block_m * plan.block_n * plan.block_k / rate
    # A warpgroup alone leaves the tensor cores idle between its products, and while it adds up.
    product *= 1.0 if plan.warpgroups > 1 else 1.3
    product *= 1.0 + (0.06 if plan.pair else 0.12) / plan.promote if plan.promote else 1.0
    # Narrow operands are read from shared memory again and again, and written to it more often.
    intensity = plan.block_m * plan.block_n / (plan.block_m + plan.block_n)
    product /= min(1.0, sqrt(sqrt(intensity / 85)), intensity / 56)
    fetch = _fetched(plan) / _L2_BYTES_NS
    trip = max(product, fetch, _LATENCY_NS / plan.stages) + _HEAT * fetch
    wave = (_LATENCY_NS + plan.unit_trips * trip) / 1e3
    if plan.cluster > 1:
        wave += _CLUSTER_US * (3.0 if plan.promote else 1.0)
    memory = w.min_bytes / (device.bandwidth_gbs * 1e3)
    extra = 3.0 + 2 * plan.split_k * w.m * w.n * 4 / (device.bandwidth_gbs * 1e3) if plan.split_k > 1 else 0.0
    extra += 2.0 + 2 * (w.m + w.n) * w.k * plan.item / (device.bandwidth_gbs * 1e3) if plan.padded else 0.0
    return max(ceil(plan.units / plan.workers) * wave, memory) + extra + 2.0


def dense_features(plan: DensePlan, device: Device) -> dict[str, float]:
    """Waves, occupancy, bytes through each memory level, predicted and roofline time (µs)."""
    w = plan.workload
    waves = plan.units / plan.workers
    traffic = plan.units * plan.cluster * plan.unit_trips * _fetched(plan)
    rate = device.peak_gflops.get(w.a_dtype, _UNKNOWN_GFLOPS)
    useful = w.m * w.n / (plan.tiles * plan.cluster * plan.block_m * plan.block_n)
    return {
        "units": float(plan.units),
        "waves": waves,
        "wave_efficiency": waves / ceil(waves),
        "useful_share": useful,
        "intensity": plan.block_m * plan.block_n / (plan.block_m + plan.block_n),
        "l2_mb": traffic / 1e6,
        "shared_kb": plan.shared_bytes / 1024,
        "bytes_in_flight": float(plan.stages * plan.stage_bytes),
        "sums": float(plan.sums),
        "predicted_us": predicted_us(plan, device),
        "roofline_us": max(w.min_bytes / device.bandwidth_gbs, w.flops / rate) / 1e3,
    }
