"""Measures what a device can do at best: copy bandwidth and matmul rate. About a second, then cached on disk."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from kronsched.hardware.device import Device
from kronsched.paths import cache_dir

SCHEMA = 2
BUDGET_S = 0.15
"""Seconds for each kernel."""
DTYPES_MEASURED = ("float32", "float64", "float16", "bfloat16")


def measure_ceilings(device: Device) -> Device:
    """The device with measured copy bandwidth (GB/s, read plus written) and matmul rates (Gflop/s by dtype).

    Returns the device as it is when its figures are a preset's or measured before. Takes about a second the first time and
    imports torch; the result is kept in the cache directory by device name and core count.
    """
    if device.ceilings_from != "estimate" or not device.present:
        return device
    return _measured(device, 0.0, {})


def raise_ceilings(device: Device) -> Device:
    """Measure again and keep the larger of each figure: for when a kernel ran faster than the roofline allows.

    What was measured while the machine was busy is too low, and would stay in the cache. A preset's figures are left alone.
    """
    if device.ceilings_from != "measured" or not device.present:
        return device
    return _measured(device, device.bandwidth_gbs, device.peak_gflops)


def _measured(device: Device, least_bandwidth: float, least_peaks: Mapping[str, float]) -> Device:
    bandwidth, peaks = _measure(device)
    bandwidth = max(bandwidth, least_bandwidth)
    peaks = {name: max(rate, least_peaks.get(name, 0.0)) for name, rate in peaks.items()}
    # A kernel that accumulates in float32 is never slower than float32 itself, however slow the library's half matmul is.
    for name in ("float16", "bfloat16", "int8"):
        peaks[name] = max(peaks.get(name, 0.0), peaks["float32"])
    _store(device, {"schema": SCHEMA, "bandwidth_gbs": bandwidth, "peak_gflops": peaks})
    return replace(device, bandwidth_gbs=bandwidth, peak_gflops=peaks, ceilings_from="measured")


def with_known_ceilings(device: Device) -> Device:
    """The device with figures that `measure_ceilings` left on disk, or as it is."""
    try:
        data = json.loads(_path(device).read_text(encoding="utf-8"))
        if data["schema"] != SCHEMA:
            return device
        bandwidth = float(data["bandwidth_gbs"])
        peaks = {str(k): float(v) for k, v in data["peak_gflops"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return device
    if not (bandwidth > 0 and peaks.get("float32", 0) > 0 and all(v > 0 for v in peaks.values())):
        return device
    return replace(device, bandwidth_gbs=bandwidth, peak_gflops=peaks, ceilings_from="measured")


def _path(device: Device) -> Path:
    identity = json.dumps([device.kind, device.name, device.arch, device.units])
    return cache_dir() / "ceilings" / f"{hashlib.sha256(identity.encode()).hexdigest()[:16]}.json"


def _store(device: Device, data: dict[str, Any]) -> None:
    path = _path(device)
    with contextlib.suppress(OSError):  # a read-only cache only costs measuring again
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent)
        with os.fdopen(handle, "w", encoding="utf-8") as f:
            json.dump({"device": device.name, "units": device.units, **data}, f)
        Path(name).replace(path)


def _measure(device: Device) -> tuple[float, dict[str, float]]:
    if device.kind == "cuda":
        return _copy_cuda(device), {name: _matmul_cuda(name, device) for name in (*DTYPES_MEASURED, "tfloat32")}
    import torch

    slices = max(16, 4 * int(device.extra.get("l3_bytes", 0)) // CPU_SLICE)  # together more than the caches hold
    share = min(64, -(-slices // device.units) + 1)
    threads = torch.get_num_threads()
    try:
        bandwidth = _cpu_rate(partial(_copy_cpu, share), device.units)
        return bandwidth, {name: _cpu_rate(partial(_matmul_cpu, name), device.units) for name in DTYPES_MEASURED}
    finally:
        torch.set_num_threads(threads)


# -- CPU ------------------------------------------------------------------------------------------------

CPU_SLICE = 2 << 20
CPU_MATMUL = 256
Work = tuple[Callable[[], Any], float]
"""(something to run, its flops or bytes)."""


def _cpu_rate(make: Callable[[], Work], cores: int) -> float:
    """1e9 flops or bytes a second of all cores, each running its own single-threaded work at the same time.

    The sum of the cores' medians over runs much shorter than a scheduler's time slice, most of which nothing disturbs even on a
    busy machine. (The library's own threads would wait for each other, so that one neighbour on one core stops them all.)
    """
    import torch

    start = threading.Barrier(cores, timeout=60)

    def one(_: int) -> float:
        torch.set_num_threads(1)
        call, work = make()
        call()
        start.wait()
        times: list[float] = []
        until = time.perf_counter() + BUDGET_S
        while len(times) < 3 or time.perf_counter() < until:
            begin = time.perf_counter()
            call()
            times.append(time.perf_counter() - begin)
        return work / statistics.median(times) / 1e9

    with ThreadPoolExecutor(cores) as pool:
        return sum(pool.map(one, range(cores)))


def _matmul_cpu(dtype_name: str) -> Work:
    import torch

    a = torch.ones(CPU_MATMUL, CPU_MATMUL, dtype=getattr(torch, dtype_name))
    return partial(torch.matmul, a, a, out=torch.empty_like(a)), 2.0 * CPU_MATMUL**3


def _copy_cpu(slices: int) -> Work:
    """Copies one slice after another of tensors that the caches do not hold."""
    import torch

    source = torch.zeros(slices, CPU_SLICE, dtype=torch.uint8)
    pairs = itertools.cycle(list(zip(torch.zeros_like(source), source, strict=True)))

    def copy_next() -> None:
        to, here = next(pairs)
        to.copy_(here)

    return copy_next, 2.0 * CPU_SLICE


# -- CUDA -----------------------------------------------------------------------------------------------


def _matmul_cuda(dtype_name: str, device: Device) -> float:
    import torch

    n = 4096 if dtype_name == "float64" else 8192
    dtype = torch.float32 if dtype_name == "tfloat32" else getattr(torch, dtype_name)
    a = torch.ones(n, n, dtype=dtype, device=device.torch_device)
    allowed = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = dtype_name == "tfloat32"
    try:
        return 2.0 * n**3 / _cuda_seconds(partial(torch.matmul, a, a, out=torch.empty_like(a))) / 1e9
    finally:
        torch.backends.cuda.matmul.allow_tf32 = allowed


def _copy_cuda(device: Device) -> float:
    import torch

    source = torch.zeros(1 << 29, dtype=torch.uint8, device=device.torch_device)
    return 2.0 * source.numel() / _cuda_seconds(partial(torch.empty_like(source).copy_, source)) / 1e9


def _cuda_seconds(call: Callable[[], Any]) -> float:
    """Shortest of the runs that fit the budget, at least two after a warm-up: a ceiling is the best ever seen."""
    import torch

    call()
    times: list[float] = []
    until = time.perf_counter() + BUDGET_S
    while len(times) < 2 or time.perf_counter() < until:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(float(begin.elapsed_time(end)) / 1e3)
    return min(times)
