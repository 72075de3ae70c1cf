"""The roofline: the least time a workload can take on a device, by bandwidth or by arithmetic."""

from __future__ import annotations

from typing import Protocol

from kronsched.hardware.device import Device


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

    A dtype without a known rate counts at the float32 rate, which every 16-bit kernel can reach by converting.
    """
    peak = device.peak_gflops.get(workload.compute_dtype) or device.peak_gflops["float32"]
    return max(workload.min_bytes / (device.bandwidth_gbs * 1e3), workload.flops / (peak * 1e3))


def roofline_fraction(workload: Costed, device: Device, time_us: float) -> float:
    """`floor_us` / time: 1.0 is the roofline."""
    return floor_us(workload, device) / time_us
