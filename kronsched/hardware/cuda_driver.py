"""Asks libcuda what GPUs there are, by ctypes: milliseconds, with neither torch nor a CUDA toolkit."""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from pathlib import Path

# CUdevice_attribute numbers, from cuda.h; they never change.
_ATTRIBUTES = {
    "max_threads_per_block": 1,
    "warp_size": 10,
    "units": 16,
    "l2_bytes": 38,
    "max_threads_per_sm": 39,
    "major": 75,
    "minor": 76,
    "shared_per_sm": 81,
    "registers_per_sm": 82,
    "shared_per_block": 97,  # MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
}


@dataclass(frozen=True)
class GpuInfo:
    """Name and attributes (see `_ATTRIBUTES`) of one visible GPU."""

    name: str
    attributes: dict[str, int]


@functools.cache
def gpus() -> tuple[GpuInfo, ...]:
    """The GPUs visible to this process, in CUDA order; empty without a driver or a GPU."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return ()
    count = ctypes.c_int()
    if cuda.cuInit(0) != 0 or cuda.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return ()
    return tuple(_gpu(cuda, i) for i in range(count.value))


def _gpu(cuda: ctypes.CDLL, index: int) -> GpuInfo:
    device, text, value = ctypes.c_int(), ctypes.create_string_buffer(256), ctypes.c_int()
    cuda.cuDeviceGet(ctypes.byref(device), index)
    cuda.cuDeviceGetName(text, len(text), device)
    attributes = {}
    for name, number in _ATTRIBUTES.items():
        code = cuda.cuDeviceGetAttribute(ctypes.byref(value), number, device)
        attributes[name] = value.value if code == 0 else 0
    return GpuInfo(text.value.decode(errors="replace"), attributes)


@functools.cache
def driver_version() -> str | None:
    """The NVIDIA driver's version such as "580.95.05"; None when it cannot be read."""
    try:
        line = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8", errors="replace").splitlines()[0]
    except (OSError, IndexError):
        return None
    words = [w for w in line.split() if w[0].isdigit() and "." in w]
    return words[0] if words else None
