"""Tunes and builds the shapes of a suite in one process: worker processes start once and serve one shape after another.

Read first: `tune_cases`. A tuning log a shape, named by its key, or one log for all; what a log holds already is not repeated,
so an interrupted run goes on where it stopped.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from kronsched import registry
from kronsched.errors import KronschedError
from kronsched.measure.memory import release

if TYPE_CHECKING:
    from kronsched.bench.suites import Case
    from kronsched.hardware import Device
    from kronsched.measure.crew import Crew
    from kronsched.records.schema import TuningRecord
    from kronsched.runtime.module import TunedModule
    from kronsched.search.result import TuneEvent, TuneResult
    from kronsched.workloads.base import Workload

PREBUILD_FROM = 4
"""Fewer shapes than this are built one by one when they are loaded: workers take longer to start."""
TICK_S = 10.0
"""Between two lines about the shape that is being tuned."""
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

    def best(self, workloads: Sequence[Workload], device: Device) -> dict[str, TuningRecord]:
        """The fastest record of each workload that they hold, by key; a file of many shapes is read once."""
        from kronsched.records.database import matches_device
        from kronsched.records.journal import Journal

        wanted = {w.key for w in workloads}
        found: dict[str, TuningRecord] = {}
        for path in dict.fromkeys(p for w in workloads if (p := self.path(w)) is not None and p.is_file()):
            for record in Journal(path).read():
                usable = record.workload_key in wanted and record.ok and matches_device(record, device)
                if usable and record.median_us is not None:
                    known = found.get(record.workload_key)
                    if known is None or known.median_us is None or record.median_us < known.median_us:
                        found[record.workload_key] = record
        return found


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
            say(f"{head}: {_outcome(_tune(case.workload, device, left, logs, crew, _Ticker(head, say)))}")
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


@dataclass(frozen=True)
class Built:
    """What `kronsched.load` would load, built: the folder and what is known of it (see `TunedModule`)."""

    artefact: str
    expected_us: float | None
    measured: bool
    origin: str


class BuiltAhead:
    """The kernels of a suite, built by all builders of a crew while earlier shapes are timed."""

    def __init__(self, cases: Sequence[Case], device: Device, logs: Logs, crew: Crew, peers: Sequence[str] = ()) -> None:
        """Queue everything. peers: those among them that run kernels of ours find them in the artefact cache."""
        self._device, self._logs = device, logs
        best = logs.best([c.workload for c in cases], device)
        self._futures: dict[str, Future[Built | None]] = {}
        schedule = partial(crew.workers()[0].schedule, build_best, timeout=BUILD_TIMEOUT_S)
        for workload in [c.workload for c in cases]:
            key = workload.key
            self._futures[key] = schedule(workload, device, best.get(key), f"log {logs.path(workload)}")
            for other in kernels_of_peers(workload, peers):
                if other.key not in self._futures:
                    self._futures[other.key] = schedule(other, device)

    def wait(self, seconds: float) -> None:
        """Until all are built, at most so long."""
        wait(self._futures.values(), timeout=seconds)

    def module(self, workload: Workload) -> TunedModule:
        """The kernel of a shape, once it is built. What a builder could not do is tried here, to raise what it raises."""
        from kronsched.runtime.module import TunedModule

        built = None
        with contextlib.suppress(Exception):  # a builder that died or took too long
            built = self._futures[workload.key].result(timeout=PREBUILD_TIMEOUT_S)
        if built is None:
            return load_module(workload, self._device, self._logs)
        return TunedModule.from_artefact(
            Path(built.artefact),
            device_index=self._device.index,
            expected_us=built.expected_us,
            measured=built.measured,
            origin=built.origin,
        )


def prebuild(cases: Sequence[Case], device: Device, logs: Logs, crew: Crew, peers: Sequence[str] = ()) -> None:
    """Fill the artefact cache by all builders at once; what fails here is reported when it is loaded."""
    if len(cases) >= PREBUILD_FROM:
        BuiltAhead(cases, device, logs, crew, peers).wait(PREBUILD_TIMEOUT_S)


def kernels_of_peers(workload: Workload, names: Sequence[str]) -> list[Workload]:
    """The workloads whose kernels of ours the named peers run."""
    from kronsched.bench.peers import peers_for
    from kronsched.bench.peers.base import kernel_of

    found = (kernel_of(peer, workload) for name, peer in peers_for(workload).items() if name in names)
    return [other for other in found if other is not None]


def build_best(workload: Workload, device: Device, record: TuningRecord | None = None, where: str = "log") -> Built | None:
    """Build a record, else what `load` would load, in a builder process: it must not touch the device.

    None for what cannot be built.
    """
    from kronsched.records.database import find_best, matches_device
    from kronsched.runtime.cache import get_or_build
    from kronsched.runtime.load import choose_config
    from kronsched.runtime.manifest import Manifest

    if record is None:
        record, where = find_best(workload, device), "log"
    try:
        if record is None:
            space, config, origin = choose_config(workload, device)
            return Built(str(get_or_build(workload, space, config, device)), None, False, origin)  # type: ignore[arg-type]
        artefact = get_or_build(workload, record.space["name"], record.config, device)
    except KronschedError:
        return None
    sha = record.kernel.get("source_sha256")
    same = sha is None or sha == Manifest.load(artefact).source_sha256
    measured = same and matches_device(record, device)
    origin = f"{where}, measured on {record.target['name']}" + ("" if same else " by another version")
    return Built(str(artefact), record.median_us if measured else None, measured, origin)


def load_module(workload: Workload, device: Device, logs: Logs) -> TunedModule:
    """The best kernel of the suite's own log when that has one, else what `kronsched.load` finds."""
    import kronsched

    path: Path | None = logs.path(workload)
    if path is not None and _has_record(path, workload, device):
        return kronsched.load(path, workload, device=device.torch_device)
    return kronsched.load(workload, device=device.torch_device)


def _has_record(path: Path, workload: Workload, device: Device) -> bool:
    from kronsched.records.database import best_in
    from kronsched.records.journal import Journal

    return path.is_file() and best_in(Journal(path).read(), workload, device) is not None


class _Ticker:
    """Says every now and then how far the tuning of a shape is."""

    def __init__(self, head: str, say: Callable[[str], None]) -> None:
        self._head, self._say, self._said = head, say, time.perf_counter()

    def __call__(self, event: TuneEvent) -> None:
        now = time.perf_counter()
        if event.kind == "result" and event.done < event.trials and now - self._said > TICK_S:
            self._said = now
            self._say(f"{self._head}: {event.done} of {event.trials} trials, {_best(event.best)}")


def _tune(
    workload: Workload, device: Device, trials: int, logs: Logs, crew: Crew, progress: Callable[[TuneEvent], None]
) -> TuneResult:
    import kronsched
    from kronsched.measure.live import LiveMeasurer

    with LiveMeasurer(workload, registry.schedules_for(workload, device), device, crew=crew) as measurer:
        return kronsched.tune(
            workload, target=device, trials=trials, log=logs.path(workload), measurer=measurer, progress=progress
        )


def _outcome(result: TuneResult) -> str:
    failed = sum(result.failures.values())
    head = f"{result.trials} trials in {result.seconds:.1f} s, {_best(result.best)}"
    return head + (f", {failed} failed" if failed else "")


def _best(record: TuningRecord | None) -> str:
    us = record.median_us if record is not None else None
    return f"best {us:.4g} µs" if us is not None else "nothing ok yet"
