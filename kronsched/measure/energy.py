"""Energy of a call. An observer brackets a stretch of repeated calls and says how many joules the device used.

Read first: `EnergyObserver`. Observers are pickled to the runner process, so they open their device in `start`.
The counter covers the whole board: idle power is part of the figure, as it is part of what the user pays for.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

WINDOW_S = 0.5
"""Calls are repeated for this long: NVML's counter moves every 20 to 100 ms."""
STUCK_S = 5.0
"""A counter that has not moved for so long tells nothing."""


class EnergyObserver(Protocol):
    """Reads an energy counter before and after."""

    def start(self) -> None:
        """Note the counter."""

    def stop(self) -> float | None:
        """Joules since `start`, or None when this device has no counter."""


@dataclass
class NvmlEnergy:
    """Board energy of one NVIDIA GPU (Volta or later) from NVML's total energy counter, resolution 1 mJ.

    uuid: "GPU-…" as in `nvidia-smi -L` (NVML numbers GPUs unlike CUDA does); None takes torch's current device.
    Source: nvmlDeviceGetTotalEnergyConsumption, NVML API reference.
    """

    uuid: str | None = None
    _handle: Any = field(default=None, repr=False, compare=False)
    _before: int | None = field(default=None, repr=False, compare=False)

    def start(self) -> None:
        """Note the counter; without NVML or a counter, `stop` returns None."""
        self._before = self._read()

    def read(self) -> float | None:
        """The counter in joules; None without one. It moves in steps of some milliseconds."""
        found = self._read()
        return None if found is None else found / 1e3

    def stop(self) -> float | None:
        """Joules since `start`."""
        after = self._read()
        return None if after is None or self._before is None else (after - self._before) / 1e3

    def _read(self) -> int | None:
        try:
            import pynvml
        except ImportError:
            return None
        try:
            if self._handle is None:
                pynvml.nvmlInit()
                self._handle = pynvml.nvmlDeviceGetHandleByUUID(self.uuid or _torch_uuid())
            return int(pynvml.nvmlDeviceGetTotalEnergyConsumption(self._handle))
        except pynvml.NVMLError:
            return None


def joules_per_call(
    observer: EnergyObserver, burst: Callable[[], Any], calls: int, wait: Callable[[], Any], seconds: float = WINDOW_S
) -> float | None:
    """Joules of one call, from repeating `burst` for `seconds`; None when the observer has no counter.

    burst: makes `calls` calls back to back, so that the device does not idle between them.  wait: returns when all calls made
    so far have finished (such as `torch.cuda.synchronize`).

    An observer with `read` is read after every burst, and what counts lies between two moments at which its counter moved: a
    window of a few hundred milliseconds is then as good as one that is long beside the counter's period.
    """
    burst()
    wait()
    read: Callable[[], float | None] | None = getattr(observer, "read", None)
    if read is not None:
        return _between_ticks(read, burst, calls, wait, seconds)
    observer.start()
    done, start = 0, time.perf_counter()
    while done == 0 or time.perf_counter() - start < seconds:
        burst()
        wait()
        done += calls
    joules = observer.stop()
    return None if joules is None else joules / done


def _between_ticks(
    read: Callable[[], float | None], burst: Callable[[], Any], calls: int, wait: Callable[[], Any], seconds: float
) -> float | None:
    """Joules a call between the counter's first move and one at least `seconds` later."""
    last, begin = read(), time.perf_counter()
    if last is None:
        return None
    first: tuple[float, float] | None = None  # time and joules at the first move
    done = 0
    while True:
        burst()
        wait()
        done += calls
        joules, now = read(), time.perf_counter()
        if joules is None:
            return None
        if joules != last:
            if first is None:
                first, done = (now, joules), 0
            elif now - first[0] >= seconds:
                return (joules - first[1]) / done
            last = joules
        if now - begin > seconds + STUCK_S:
            return None


def device_uuid(index: int) -> str:
    """NVML's name of a CUDA device of this process."""
    import torch

    return f"GPU-{torch.cuda.get_device_properties(index).uuid}"


def _torch_uuid() -> str:
    import torch

    return device_uuid(torch.cuda.current_device())
