"""How much memory a device has left for this process, and how to give some back."""

from __future__ import annotations

import contextlib
import gc
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kronsched.hardware.device import Device


def free_bytes(device: Device) -> int:
    """Memory of the device that this process can still get: what nobody holds, and what its torch keeps for reuse."""
    if device.kind != "cuda":
        return free_host_bytes()
    import torch

    kept = torch.cuda.memory_reserved(device.index) - torch.cuda.memory_allocated(device.index)
    return int(torch.cuda.mem_get_info(device.index)[0]) + kept


def free_host_bytes() -> int:
    """Host memory that can be had without swapping; 1 GiB where the system does not say."""
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    except (OSError, ValueError, IndexError):
        pass
    return 1 << 30  # not Linux: enough for a modest rotation


def release(device: Device) -> None:
    """Give back what is held for nothing, so that the next shape, or another process, can have it."""
    gc.collect()
    if device.kind == "cuda":
        import torch

        with contextlib.suppress(RuntimeError):  # a kernel has broken the CUDA context: every later use will say so
            torch.cuda.empty_cache()
