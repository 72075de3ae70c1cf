"""Worker processes that outlive one workload, so that tuning many shapes pays for their start once.

Read first: `Crew`. Hand it to each `LiveMeasurer` in turn; a measurer with a crew leaves its workers running when it closes.
"""

from __future__ import annotations

import shutil
import tempfile
import weakref
from collections.abc import Sequence
from pathlib import Path

from kronsched.errors import ArgumentError, UnsupportedError
from kronsched.hardware.cpu import cores
from kronsched.hardware.device import Device
from kronsched.measure import worker
from kronsched.measure.pools import Workers

MAX_BUILDERS = 32
"""A builder holds about 200 MB."""


class Crew:
    """Builders and a runner a device, shared by measurers that are used one after another. Also a context manager.

    device: one, or several of one model.  builders: processes; None is `default_builders`.
    """

    def __init__(self, device: Device | Sequence[Device], builders: int | None = None) -> None:
        """Start nothing yet: processes start with the first task."""
        devices = as_devices(device)
        self.count, self._runners = builders or default_builders(devices), len(devices)
        self._dir = Path(tempfile.mkdtemp(prefix="kronsched-crew-"))
        self._remove = weakref.finalize(self, shutil.rmtree, self._dir, ignore_errors=True)
        self._pools: dict[bool, tuple[Workers, list[Workers]]] = {}

    def workers(self, import_main: bool = False) -> tuple[Workers, list[Workers]]:
        """(builders, runners). import_main: see `Workers`; a measurer that needs it gets processes of their own."""
        if import_main not in self._pools:
            folder = self._dir / ("main" if import_main else "plain")
            folder.mkdir(exist_ok=True)
            self._pools[import_main] = make_workers(self.count, self._runners, folder, import_main)
        return self._pools[import_main]

    def close(self) -> None:
        """End the processes. Safe to call twice."""
        for builders, runners in self._pools.values():
            for workers in (builders, *runners):
                workers.replace()
        self._pools.clear()
        self._remove()

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def as_devices(device: Device | Sequence[Device]) -> tuple[Device, ...]:
    """The devices, checked: at least one, all on this machine and of one model; a GPU only once."""
    devices = (device,) if isinstance(device, Device) else tuple(device)
    if not devices:
        raise ArgumentError("devices=[] is not allowed: at least one is needed")
    for found in devices:
        if not found.present:
            raise UnsupportedError(
                f"device {found.name!r} is a preset that this machine does not have: nothing can be measured on it"
            )
        check_same_model(devices[0], found, found.torch_device)
    names = [d.torch_device for d in devices if d.kind == "cuda"]
    if twice := next((n for n in names if names.count(n) > 1), None):
        raise ArgumentError(f"devices: {twice!r} is named twice; two runners on one GPU would disturb each other's times")
    return devices


def check_same_model(first: Device, other: Device, where: str) -> None:
    """Times of one log are comparable: a device of another model or driver than the first is refused."""
    for name in ("kind", "name", "arch", "units", "shared_per_block", "driver"):
        mine, its = getattr(first, name), getattr(other, name)
        if mine != its:
            raise ArgumentError(
                f"devices: {where} ({other.name}, {name} {its!r}) is not like the first ({first.name}, {name} {mine!r}); devices "
                "of one model and driver are needed, since their times go into one log: tune the others into logs of their own"
            )


def default_builders(device: Device | Sequence[Device]) -> int:
    """Builder processes for devices of this machine: the usable cores, on CUDA one fewer for each runner."""
    devices = (device,) if isinstance(device, Device) else tuple(device)
    return max(1, min(MAX_BUILDERS, cores() - len(devices) * (devices[0].kind == "cuda")))


def make_workers(builders: int, runners: int, folder: Path, import_main: bool) -> tuple[Workers, list[Workers]]:
    """(builders, runners), none started; their output goes to files in the folder."""
    return (
        Workers(builders, folder / "builders.log", worker.set_up_builder, import_main),
        [Workers(1, folder / f"runner{i}.log", worker.no_set_up, import_main) for i in range(runners)],
    )
