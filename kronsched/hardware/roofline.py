"""The roofline: the least time a workload can take on a device, by bandwidth or by arithmetic."""

from __future__ import annotations

from typing import Protocol

from kronsched.hardware.device import Device

TF32_PRODUCTS = 3
"""TF32 products of a float32 product: high·high, high·low and low·high parts."""


class Costed(Protocol):
    """The three figures of a workload that the roofline needs."""

    @property
    def flops(self) -> int:
        """Floating-point operations."""

    @property
    def min_bytes(self) -> int:
        """Bytes moved when each tensor moves once."""

    @property
    def compute_dtype(self) -> str:
        """The dtype whose rate bounds the arithmetic."""


def floor_us(workload: Costed, device: Device) -> float:
    """The larger of min_bytes / bandwidth and flops / peak of the compute dtype, in microseconds.

    float32 counts at the rate of its multiply-adds or of three TF32 products each (float32-level error on tensor cores),
    whichever is higher. A dtype without a known rate counts at the float32 rate, which a kernel can reach by converting.
    """
    float32 = max(device.peak_gflops["float32"], device.peak_gflops.get("tfloat32", 0.0) / TF32_PRODUCTS)
    known = None if workload.compute_dtype == "float32" else device.peak_gflops.get(workload.compute_dtype)
    peak = known or float32
    return max(workload.min_bytes / (device.bandwidth_gbs * 1e3), workload.flops / (peak * 1e3))


def roofline_fraction(workload: Costed, device: Device, time_us: float) -> float:
    """`floor_us` / time: 1.0 is the roofline."""
    return floor_us(workload, device) / time_us
