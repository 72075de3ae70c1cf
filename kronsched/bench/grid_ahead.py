"""A crew whose candidates are built before a measurer asks for them.

Read first: `Ahead`. It stands in for the crew of a `LiveMeasurer`, which then finds its builds done or under way.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kronsched import registry
from kronsched.measure import worker
from kronsched.measure.crew import Crew
from kronsched.measure.pools import Workers

if TYPE_CHECKING:
    from kronsched.hardware import Device
    from kronsched.space import Candidate
    from kronsched.workloads.base import Workload

BUILD_TIMEOUT_S = 60.0


class Ahead(Crew):
    """Hands a crew's runners to measurers as they are, and builders that know what was built ahead."""

    def __init__(self, crew: Crew) -> None:
        """Start nothing; the crew's owner closes it."""
        self._crew = crew
        self.count = crew.count
        self._futures: dict[tuple[str, str], Future[Any]] = {}

    def workers(self, import_main: bool = False) -> Any:
        """(builders, runners), as a measurer asks for them."""
        builders, runners = self._crew.workers(import_main)
        return _Builders(builders, self._futures), runners

    def submit(self, function: Callable[..., Any], *args: Any, timeout: float) -> Future[Any]:
        """Run a function in a builder."""
        return self._crew.workers()[0].schedule(function, *args, timeout=timeout)

    def build(self, workload: Workload, device: Device, candidate: Candidate, out_dir: Path) -> None:
        """Queue a build, which `worker.build` tasks of the same candidate then get."""
        schedule = registry.schedule(candidate.space)
        task = worker.BuildTask(workload, schedule, candidate.config, device, str(out_dir), "nvrtc")
        self._futures[_key(task)] = self.submit(worker.build, task, timeout=BUILD_TIMEOUT_S)

    def close(self) -> None:
        """Nothing: the processes are the crew's."""


class _Builders:
    """`Workers` that answer a build which was queued ahead with its future, once; everything else goes to the pool."""

    def __init__(self, builders: Workers, futures: dict[tuple[str, str], Future[Any]]) -> None:
        self._builders, self._futures = builders, futures

    def schedule(self, function: Callable[..., Any], *args: Any, timeout: float) -> Future[Any]:
        task = args[0] if args else None
        if function is worker.build and isinstance(task, worker.BuildTask):
            ahead = self._futures.pop(_key(task), None)
            if ahead is not None:
                return ahead
        return self._builders.schedule(function, *args, timeout=timeout)

    def replace(self) -> None:
        self._builders.replace()

    def log_tail(self) -> str:
        return self._builders.log_tail()


def _key(task: worker.BuildTask) -> tuple[str, str]:
    items = ",".join(f"{k}={v!r}" for k, v in sorted(task.config.items()))
    return f"{task.workload.key} {task.device.torch_device}", f"{task.schedule.name}({items})"
