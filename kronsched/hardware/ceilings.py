"""Measures what a device can do at best: copy bandwidth and matmul rate. About a second, then cached on disk."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kronsched.hardware.device import Device
from kronsched.paths import cache_dir

if TYPE_CHECKING:
    import torch

SCHEMA = 1


def measure_ceilings(device: Device) -> Device:
    """The device with measured copy bandwidth (GB/s, read plus written) and matmul rates (Gflop/s by dtype).

    Returns the device as it is when its figures are a preset's or measured before. Takes about 1.5 s the first time and
    imports torch; the result is kept in the cache directory by device name and core count.
    """
    if device.ceilings_from != "estimate" or not device.present:
        return device
    bandwidth, peaks = _measure(device)
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
    import torch

    where = torch.device(device.torch_device)
    cuda = device.kind == "cuda"
    nbytes = (1 << 29) if cuda else min(max(4 * int(device.extra.get("l3_bytes", 0)), 1 << 26), 1 << 28)
    bandwidth = 2 * nbytes / _copy_seconds(nbytes, where, cuda) / 1e9
    peaks = {}
    sizes = {"float32": (8192, 1024), "float64": (4096, 1024), "float16": (8192, 256), "bfloat16": (8192, 256)}
    for name, (on_gpu, on_cpu) in sizes.items():
        n = on_gpu if cuda else on_cpu
        dtype: torch.dtype = getattr(torch, name)
        a = torch.ones(n, n, dtype=dtype, device=where)
        out = torch.empty_like(a)
        seconds = _best_seconds(partial(torch.matmul, a, a, out=out), cuda, 0.15)
        peaks[name] = 2 * n**3 / seconds / 1e9
    return bandwidth, peaks


def _copy_seconds(nbytes: int, where: torch.device, cuda: bool) -> float:
    import torch

    source = torch.zeros(nbytes, dtype=torch.uint8, device=where)
    target = torch.empty_like(source)
    return _best_seconds(partial(target.copy_, source), cuda, 0.4)


def _best_seconds(call: Callable[[], Any], cuda: bool, budget: float) -> float:
    """Shortest of the runs that fit the budget (at least two after a warm-up): a ceiling is the best ever seen."""
    call()
    best, start, runs = float("inf"), time.perf_counter(), 0
    while runs < 2 or (time.perf_counter() - start < budget and runs < 100):
        best = min(best, _cuda_seconds(call) if cuda else _cpu_seconds(call))
        runs += 1
    return best


def _cpu_seconds(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _cuda_seconds(call: Callable[[], Any]) -> float:
    import torch

    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3
