"""Which computes a weight gradient: our kernels, or torch.bmm between permutes. Rules, used where nothing was measured.

Read first: `kernel_pays`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kronsched import registry
from kronsched.dtypes import DTYPES
from kronsched.errors import InvalidConfig
from kronsched.workloads.ks_wgrad import KSWeightGrad

if TYPE_CHECKING:
    from kronsched.hardware import Device

_MARGIN, _OVERHEAD_US, _EXTRA_US = 0.9, 2.0, 40.0
"""_EXTRA_US: of copying samples into a bucket, or of another call and an addition; mostly the CPU's time."""
_SAMPLE_US = {2: 0.0014, 4: 0.02}
"""What a sample costs torch.bmm at least, by bytes of an element: few tiles of dW mean few busy multiprocessors."""
_COPY_SHARE, _MEMORY_SHARE, _MATH_SHARE = 0.18, 0.87, 0.45
_LAUNCH_US, _COPY_LAUNCH_US = 2.4, 3.0
# Measured on an H200 for 72 shapes, batch 64 to 25088: torch.bmm on views took at least 1.4 ns a sample in float16, 23 ns in
# float32, and copies of permutes 1.3 to 7 µs for each MB of g and x. The least count here, so that kernels serve only where they
# win.


def kernel_pays(workload: KSWeightGrad, times: Sequence[float | None], device: Device, padded: bool = False) -> bool:
    """Whether calls of kernels with these `expected_us` are expected to take clearly less than torch.bmm for `workload`.

    padded: samples are copied first, in batch last all of them.
    On a CPU they do where neighbouring l fill a vector; torch.bmm was faster elsewhere.
    """
    if device.kind != "cuda":
        lanes = device.vector_bytes // DTYPES[DTYPES[workload.dtype].accumulate].itemsize
        return workload.batch_first and workload.pattern[3] >= lanes
    if None in times:
        return False
    calls_us = sum(t + _OVERHEAD_US for t in times if t is not None) + _EXTRA_US * max(padded, len(times) - 1)
    if padded and not workload.batch_first:
        calls_us += 2 * workload.min_bytes / (_MEMORY_SHARE * device.bandwidth_gbs * 1e3)
    return calls_us < _MARGIN * bmm_us(workload, device)


def expected_us(workload: KSWeightGrad, device: Device) -> float | None:
    """The least time that a schedule with a model of its own expects of its default config; None where there is none."""
    found = []
    for schedule in registry.schedules_for(workload, device) if device.kind == "cuda" else ():
        try:
            found.append(schedule.expected_us(workload, schedule.default_config(workload, device), device))
        except InvalidConfig:
            continue
    return min((t for t in found if t is not None), default=None)


def bmm_us(w: KSWeightGrad, device: Device) -> float:
    """About what torch.bmm takes on a GPU, with the copies that its permutes make where d > 1."""
    a, _, _, d = w.pattern
    item = DTYPES[w.dtype].itemsize
    moved, bandwidth = sum(t.nbytes for t in w.inputs), device.bandwidth_gbs * 1e3
    copies = d > 1 and (w.batch_first or a > 1)
    copy_us = 2 * _COPY_LAUNCH_US + moved / (_COPY_SHARE * bandwidth) if copies else 0.0
    peak = (device.peak_gflops.get(w.dtype) or device.peak_gflops["float32"]) * 1e3
    sample_us = _SAMPLE_US.get(item, _SAMPLE_US[2])
    return copy_us + max(_LAUNCH_US, sample_us * w.batch, moved / (_MEMORY_SHARE * bandwidth), w.flops / (_MATH_SHARE * peak))
