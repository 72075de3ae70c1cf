"""How the TMA kernel of a Kronecker-sparse factor is cut up: pure arithmetic, no TVM. Its schedule and its program read it.

A factor is one dense product for each of its a·d slices (i, l), 16-bit elements, float32 sums:

    batch_last     Y_il (b × B) = W_il (b × c) · X_il (c × B)     rows lie d·B elements apart
    batch_first    Y_il (B × b) = X_il (B × c) · W_ilᵀ (c × b)    d = 1: rows lie a·c and a·b apart; d > 1: X is sorted, Y merged

Each product is cut up as a dense Gemm is (gemm_dense_wgmma_plan.py); the units of all slices are one sequence.

Read first: `TilePlan`, `TensorView`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from math import ceil
from typing import TYPE_CHECKING, Any

from kronsched.errors import InvalidConfig
from kronsched.schedules.gemm_dense_wgmma_plan import DensePlan, plan_dense
from kronsched.space import Config
from kronsched.workloads.gemm import Gemm
from kronsched.workloads.ks import KSMatmul, Pattern
from kronsched.workloads.ks_epilogue import NONE, Epilogue

if TYPE_CHECKING:
    from kronsched.hardware import Device

ITEM = 2
"""Bytes of an element."""
_CHUNK = 16 // ITEM
_FIXED = {"split_k": 1, "promote": 0, "pair": False, "cluster": 1, "group": 1}
"""Knobs of the dense Gemm that a factor has no use for."""
_KEPT_BYTES = 16 * 2**20
"""Weights that the L2 cache keeps beside the samples."""
# Fitted to try-outs on an H200, which are not shipped.
_SUSTAINED = 0.94
"""Share of the peak rate that the products of a tile reach."""
_L2_BYTES_NS = 77.0
"""Bytes a nanosecond that a multiprocessor reads through L2 while all of them do."""
_STORE_BYTES_NS = 70.0
"""The same for the sums of a tile on their way out."""
_LATENCY_NS = 1400.0
"""From asking for a stage to having it."""
_TURN_NS = 280.0
"""What pingpong adds to half the time of two tiles one behind the other."""
_MANY_SUMS = 1.08
"""More time where sums leave a thread few other registers."""
_NARROW = 56.0
"""Intensity of a tile, m·n / (m + n), below which shared memory limits its products."""
_ONE_GROUP = 1.3
"""More time where a warpgroup alone multiplies."""
_READ, _WRITTEN = 0.95, 1.42
"""What a byte of memory costs, read or written, over one at the measured rate (of copies, which do both)."""
_AGAIN, _AGAIN_MOST = 0.3, 2
"""More of it for X, where other tiles read it again through L2, for each of so many tiles at most."""
_COPY_SHARE = 0.9
_POWER = 5.0


@dataclass(frozen=True)
class TensorView:
    """What a tensor map says of a tensor: elements along (fast axis, rows, l, i), and how far apart the last three are."""

    extents: tuple[int, int, int, int]
    strides: tuple[int, int, int]


@dataclass(frozen=True)
class TilePlan(DensePlan):
    """The multiplying launch of one factor. `workload` is the product of one slice; block_m, …, pingpong are the knobs."""

    pattern: Pattern = (1, 1, 1, 1)
    batch_first: bool = True
    epilogue: Epilogue = NONE
    last: bool = True  # nothing of ours reads what the launch writes
    early: bool = False  # the launch before this one writes only weights: samples may be read before it has ended

    @property
    def units(self) -> int:
        """Tiles of all slices."""
        a, _, _, d = self.pattern
        return self.tiles * a * d

    @property
    def samples(self) -> int:
        """The batch."""
        return self.workload.m if self.batch_first else self.workload.n

    @property
    def output_tiles(self) -> int:
        """Tiles along the outputs of a slice, which read the same samples."""
        return self.n_tiles if self.batch_first else self.m_tiles

    @property
    def fetched(self) -> int:
        """Bytes a block asks the L2 cache for in a trip."""
        return self.stage_bytes

    @property
    def prefilled(self) -> int:
        """Stages whose samples are asked for before the launch before this one has ended: of a block's first unit."""
        return min(self.stages, self.trips) if self.early else 0

    @property
    def sorts(self) -> bool:
        """Whether X is sorted from (batch, a, c, d) to (batch, a, d, c) first, and Y merged likewise."""
        return self.batch_first and self.pattern[3] > 1

    @property
    def pitch(self) -> int:
        """Elements from a row of packed weights to the next: c, up to whole 16 bytes."""
        return ceil(self.pattern[2] / _CHUNK) * _CHUNK

    @property
    def packs(self) -> bool:
        """Whether the weights (a, b, c, d) are copied to (a, b, d, pitch) first."""
        return self.pattern[3] > 1 or self.pitch > self.pattern[2]

    @property
    def weights(self) -> TensorView:
        """Of the weights, packed or as they are."""
        a, b, c, d = self.pattern
        return TensorView((c, b, d, a), (d * self.pitch, self.pitch, b * d * self.pitch))

    def place(self, unit: Any) -> tuple[Any, Any, Any]:
        """(row, column, slice) of a unit, in tiles; of ints or TVM expressions.

        Tiles of the same samples follow each other. In batch_first all slices of some samples do, where the L2 cache keeps the
        weights of all slices; and the last samples come first where they have just been sorted: they may be in the cache.
        """
        if not self.batch_first:
            part, tile = unit // self.tiles, unit % self.tiles
            return tile % self.m_tiles, tile // self.m_tiles, part
        a, b, c, d = self.pattern
        rest, column = unit // self.n_tiles, unit % self.n_tiles
        if a * b * c * d * ITEM > _KEPT_BYTES:
            return rest % self.m_tiles, column, rest // self.m_tiles
        row = rest // (a * d)
        return self.m_tiles - 1 - row if self.sorts else row, column, rest % (a * d)

    def data(self, features: int) -> TensorView:
        """Of X (features = c) or Y (features = b), or of their sorted copies."""
        a, _, _, d = self.pattern
        batch = self.samples
        if not self.batch_first:
            return TensorView((batch, features, d, a), (d * batch, batch, features * d * batch))
        return TensorView((features, batch, d, a), (a * d * features, features, d * features))


def plan_tile(w: KSMatmul, pattern: Pattern, config: Config, device: Device) -> TilePlan:
    """The plan of one factor. Raises InvalidConfig with one line."""
    _, b, c, _ = pattern
    m, n = (w.batch, b) if w.batch_first else (b, w.batch)
    dense = plan_dense(Gemm(m, n, c, w.dtype, w.dtype), {**config, **_FIXED}, device)
    if not (fits(dense.block_m, m) and fits(dense.block_n, n)):
        raise InvalidConfig(f"a tile of {dense.block_m} x {dense.block_n} is twice as large as a product of {m} x {n}")
    known = {f.name: getattr(dense, f.name) for f in fields(dense)}
    plan = TilePlan(**known, pattern=pattern, batch_first=w.batch_first)
    return replace(plan, blocks=min(plan.units, device.units))


def fits(block: int, extent: int) -> bool:
    """Whether a block of a tile is not half empty, or is the smallest one."""
    return block <= 64 or block < 2 * extent


def why_not(w: KSMatmul, pattern: Pattern) -> str | None:
    """None when TMA can reach the rows of a factor, else one line."""
    _, b, c, _ = pattern
    if w.batch_first:
        odd = [n for n in (b, c) if n % _CHUNK]
        return f"pattern {pattern}: runs of {odd[0]} {w.dtype} are not whole 16 bytes, as TMA needs" if odd else None
    return f"batch={w.batch}: rows of {w.batch} {w.dtype} are not whole 16 bytes, as TMA needs" if w.batch % _CHUNK else None


def parts_us(p: TilePlan, device: Device) -> dict[str, float]:
    """Microseconds of each part of the GPU, were it the only one that is busy, and of the copies around the product."""
    a, b, c, d = p.pattern
    rate = device.peak_gflops.get(p.workload.a_dtype, 500_000.0) * _SUSTAINED / device.units  # flops a nanosecond
    product = 2 * p.block_m * p.block_n * p.block_k / rate * (1.0 if p.warpgroups > 1 else _ONE_GROUP)
    product /= min(1.0, p.block_m * p.block_n / (p.block_m + p.block_n) / _NARROW)
    fetch = p.fetched / _L2_BYTES_NS
    main = p.trips * max(product, fetch, _LATENCY_NS / p.stages)
    both = main + p.block_m * p.block_n * ITEM / _STORE_BYTES_NS
    unit = max(main, both / 2 + _TURN_NS) if p.pingpong else both
    x, y, w = (ITEM * n for n in (p.samples * a * c * d, p.samples * a * b * d, a * b * c * d))
    gigabytes = device.bandwidth_gbs * 1e3
    again = _AGAIN * min(_AGAIN_MOST, p.output_tiles - 1)
    return {
        "mma_us": p.units * p.trips * product / p.workers / 1e3,
        "cache_us": p.units * p.trips * fetch / p.workers / 1e3,
        "unit_us": ceil(p.units / p.workers) * unit / 1e3,
        "memory_us": (x * _READ * (1 + again) + y * _WRITTEN + w) / gigabytes,
        "copies_us": (2.0 if p.packs else 0.0) + (4.0 + 2 * (x + y) / (_COPY_SHARE * gigabytes) if p.sorts else 0.0),
    }


def predicted_us(p: TilePlan, device: Device) -> float:
    """A rough time of the factor."""
    parts = parts_us(p, device)
    product = math.pow(math.pow(parts["unit_us"], _POWER) + math.pow(parts["memory_us"], _POWER), 1 / _POWER)
    return product * (_MANY_SUMS if p.sums >= 192 else 1.0) + parts["copies_us"] + 1.5
