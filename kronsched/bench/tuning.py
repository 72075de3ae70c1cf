"""Tunes and builds the shapes of a suite in one process: worker processes start once and serve one shape after another.

Read first: `tune_cases`. A tuning log a shape, named by its key, or one log for all; what a log holds already is not repeated,
so an interrupted run goes on where it stopped.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kronsched import registry
from kronsched.bench.contest import release
from kronsched.errors import KronschedError

if TYPE_CHECKING:
    from kronsched.bench.suites import Case
    from kronsched.hardware import Device
    from kronsched.measure.crew import Crew
    from kronsched.search.result import TuneResult
    from kronsched.workloads.base import Workload

PREBUILD_FROM = 4
"""Fewer shapes than this are built one by one when they are loaded: workers take longer to start."""
BUILD_TIMEOUT_S = 120.0
PREBUILD_TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Logs:
    """Where records of a suite are kept: one file, a folder with one file a workload, or (both None) where `tune` puts them."""

    file: Path | None = None
    folder: Path | None = None

    def path(self, workload: Workload) -> Path | None:
        """The log of a workload; None for its default log."""
        if self.file is not None:
            return self.file
        return self.folder / f"{workload.key}.jsonl" if self.folder is not None else None


def tune_cases(
    cases: Sequence[Case],
    device: Device,
    trials: int,
    logs: Logs,
    crew: Crew,
    *,
    seconds: float | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> None:
    """Bring each shape's log to `trials` records. A shape that cannot be tuned is one line to `say`, not an error.

    seconds: no shape is started after so long.  Raises KeyboardInterrupt; what was measured is in the logs.
    """
    begin = time.perf_counter()
    for number, case in enumerate(cases, start=1):
        if seconds is not None and time.perf_counter() - begin > seconds:
            say(f"tuning stopped after {seconds:g} s: {len(cases) - number + 1} shapes stay as they are")
            return
        head = f"[{number}/{len(cases)}] {case.workload.label}"
        left = trials - known_count(case.workload, device, logs)
        if left <= 0:
            say(f"{head}: {trials} records or more, none added")
            continue
        try:
            say(f"{head}: {_outcome(_tune(case.workload, device, left, logs, crew))}")
        except KronschedError as e:
            say(f"{head}: not tuned: {e}")
        release(device)


def known_count(workload: Workload, device: Device, logs: Logs) -> int:
    """Records of a workload on this model of device that its log holds, good or bad."""
    from kronsched.records.database import default_log, matches_device
    from kronsched.records.journal import Journal

    path = logs.path(workload) or default_log(workload)
    if not path.is_file():
        return 0
    return sum(r.workload_key == workload.key and matches_device(r, device) for r in Journal(path).read())


def prebuild(cases: Sequence[Case], device: Device, logs: Logs, crew: Crew) -> None:
    """Fill the artefact cache by all builders at once; what fails here is reported when it is loaded."""
    if len(cases) < PREBUILD_FROM:
        return
    builders, _ = crew.workers()
    futures = [
        builders.schedule(build_best, case.workload, device, logs.path(case.workload), timeout=BUILD_TIMEOUT_S) for case in cases
    ]
    wait(futures, timeout=PREBUILD_TIMEOUT_S)


def build_best(workload: Workload, device: Device, log: Path | None) -> None:
    """Build what `load` would load, in a builder process: it must not touch the device."""
    from kronsched.records.database import best_in, find_best
    from kronsched.records.journal import Journal
    from kronsched.runtime.cache import get_or_build
    from kronsched.runtime.load import choose_config

    record = None
    if log is not None and log.is_file():
        record = best_in(Journal(log).read(), workload, device)
    record = record or find_best(workload, device)
    space, config = choose_config(workload, device)[:2] if record is None else (record.space["name"], dict(record.config))
    with contextlib.suppress(KronschedError):
        get_or_build(workload, space, config, device)  # type: ignore[arg-type]


def _tune(workload: Workload, device: Device, trials: int, logs: Logs, crew: Crew) -> TuneResult:
    import kronsched
    from kronsched.measure.live import LiveMeasurer

    with LiveMeasurer(workload, registry.schedules_for(workload, device), device, crew=crew) as measurer:
        return kronsched.tune(workload, target=device, trials=trials, log=logs.path(workload), measurer=measurer)


def _outcome(result: TuneResult) -> str:
    us = result.best.median_us if result.best is not None else None
    found = f"best {us:.4g} µs" if us is not None else "nothing ok yet"
    failed = sum(result.failures.values())
    return f"{result.trials} trials in {result.seconds:.1f} s, {found}" + (f", {failed} failed" if failed else "")
