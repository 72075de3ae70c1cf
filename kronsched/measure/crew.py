"""Worker processes that outlive one workload, so that tuning many shapes pays for their start once.

Read first: `Crew`. Hand it to each `LiveMeasurer` in turn; a measurer with a crew leaves its workers running when it closes.
"""

from __future__ import annotations

import shutil
import tempfile
import weakref
from pathlib import Path

from kronsched.hardware.cpu import cores
from kronsched.hardware.device import Device
from kronsched.measure import worker
from kronsched.measure.pools import Workers

MAX_BUILDERS = 32
"""A builder holds about 200 MB."""


class Crew:
    """Builders and one runner for a device, shared by measurers that are used one after another. Also a context manager.

    builders: processes; None takes the usable cores (on CUDA one fewer, for the runner), at most `MAX_BUILDERS`.
    """

    def __init__(self, device: Device, builders: int | None = None) -> None:
        """Start nothing yet: processes start with the first task."""
        self.count = builders or default_builders(device)
        self._dir = Path(tempfile.mkdtemp(prefix="kronsched-crew-"))
        self._remove = weakref.finalize(self, shutil.rmtree, self._dir, ignore_errors=True)
        self._pools: dict[bool, tuple[Workers, Workers]] = {}

    def workers(self, import_main: bool = False) -> tuple[Workers, Workers]:
        """(builders, runner). import_main: see `Workers`; a measurer that needs it gets processes of their own."""
        if import_main not in self._pools:
            folder = self._dir / ("main" if import_main else "plain")
            folder.mkdir(exist_ok=True)
            self._pools[import_main] = make_workers(self.count, folder, import_main)
        return self._pools[import_main]

    def close(self) -> None:
        """End the processes. Safe to call twice."""
        for builders, runner in self._pools.values():
            builders.replace()
            runner.replace()
        self._pools.clear()
        self._remove()

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def default_builders(device: Device) -> int:
    """Builder processes for a device of this machine."""
    return max(1, min(MAX_BUILDERS, cores() - (device.kind == "cuda")))


def make_workers(builders: int, folder: Path, import_main: bool) -> tuple[Workers, Workers]:
    """(builders, runner), neither started; their output goes to files in the folder."""
    return (
        Workers(builders, folder / "builders.log", worker.set_up_builder, import_main),
        Workers(1, folder / "runner.log", worker.no_set_up, import_main),
    )
