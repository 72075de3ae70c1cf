"""A predicted time for weight-gradient kernels, from what a launch asks of each part of the GPU. No TVM.

It chooses default configs and is a feature of the cost model; it is no claim.

Read first: `wgrad_features`.
"""

from __future__ import annotations

from math import ceil
from typing import TYPE_CHECKING, Protocol

from kronsched.schedules.ks_wgrad_plan import REGISTERS, WgradPlan
from kronsched.workloads.ks_wgrad import KSWeightGrad

if TYPE_CHECKING:
    from kronsched.hardware import Device

_TF32_PRODUCTS = 3
_MMA_SHARE = {2: 0.645, 4: 0.595}
"""Of the tensor cores' rate, by bytes of an element, that mma.sync reaches."""
_L2_FACTOR = 5.3
"""Rate of the L2 cache over the memory's."""
_SHARED_BYTES, _ISSUED, _GHZ = 128, 2.4, 1.6
"""Bytes of shared memory and instructions a clock of a multiprocessor."""
_PARTS = 4
"""Parts of a multiprocessor, each with its tensor core, that fewer warps leave idle."""
_LINE, _SECTOR, _SHORT_RUNS = 128, 32, 0.52
_FLIGHT, _LITTLE_FLIGHT = 55 * 1024, 0.23
"""Bytes in flight on a multiprocessor below which loads come slowly."""
_POWER, _START_US = 2.46, 0.9
# These constants were fitted to 168 configs of 24 shapes, float16 and float32 in both layouts, on an H200.


class Tiled(Protocol):
    """What the figures common to all weight-gradient kernels need of a plan."""

    @property
    def elements(self) -> int:
        """Partial sums of a slice."""

    @property
    def splits(self) -> int:
        """Slices of the samples."""


def scratch_us(plan: Tiled, device: Device, item: int = 4) -> float:
    """What writing, reading and adding up partial sums takes."""
    return _START_US + 2 * item * plan.splits * plan.elements / (device.bandwidth_gbs * 1e3)


def wgrad_features(w: KSWeightGrad, p: WgradPlan, device: Device) -> dict[str, float]:
    """Traffic, waves, occupancy, and a predicted time of a tensor-core kernel (µs, bytes as named)."""
    a, nl, nj, nk = p.tiles
    jb, kb = p.extents
    blocks = p.tile_count * p.splits
    registers = max(p.registers, 32) * p.threads
    per_sm = max(1, min(device.shared_per_sm // (p.shared_bytes + 1024), REGISTERS // registers))
    waves = blocks / (device.units * per_sm)
    idle = min(1.0, blocks / device.units) if waves <= 1 else waves / ceil(waves)
    sizes = [w.batch * a * f * w.pattern[3] * p.item for f in w.pattern[1:3]]
    read = a * nl * nj * nk * w.batch * p.lb * (jb + kb) * p.item
    run = min(min(_LINE, p.row_bytes(s) if not p.first or p.small else p.lb * p.item) for s in range(2))
    shared = read * (1 + (jb * p.warps_k + kb * p.warps_j) / (jb + kb))
    products = 2.0 * w.batch * p.tile_count * p.lb * jb * kb * (_TF32_PRODUCTS if p.wide else 1)
    instructions = p.step_instructions * ceil(w.batch / p.step_n) * p.tile_count * p.threads / 32
    rates = device.peak_gflops
    peak = rates.get("tfloat32" if p.wide else p.dtype) or rates.get("float16") or 4 * rates["float32"]
    resident = min(per_sm, max(1.0, blocks / device.units))
    lone = max(1.0, _PARTS * 32 / (resident * p.threads))
    times = {
        "memory_us": (_LINE / run) ** _SHORT_RUNS * sum(sizes) / (device.bandwidth_gbs * 1e3),
        "l2_us": max(1.0, _SECTOR / run) * read / (_L2_FACTOR * device.bandwidth_gbs * 1e3),
        "shared_us": lone * shared / (device.units * _SHARED_BYTES * _GHZ * 1e3),
        "issue_us": lone * instructions / (device.units * _ISSUED * _GHZ * 1e3),
        "mma_us": lone * products / (_MMA_SHARE[p.item] * peak * 1e3),
    }
    flight = resident * (p.stages - 1) * p.stage_bytes
    slow = max(1.0, _FLIGHT / flight) ** _LITTLE_FLIGHT
    body = sum(t**_POWER for t in times.values()) ** (1 / _POWER)
    return {
        **times,
        "scratch_us": scratch_us(p, device),
        "predicted_us": body * slow / idle + scratch_us(p, device),
        "read_mb": read / 1e6,
        "useful": w.flops / (2.0 * w.batch * p.tile_count * p.lb * jb * kb),
        "blocks": float(blocks),
        "waves": waves,
        "splits": float(p.splits),
        "threads": float(p.threads),
        "warps_per_sm": resident * p.threads / 32,
        "in_flight_kb": flight / 1024,
        "shared_kb": p.shared_bytes / 1024,
        "registers": float(p.registers),
        "sums": float(p.sums),
        "coalesced": float(run),
    }
