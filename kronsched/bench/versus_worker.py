"""One side of a comparison of tuners, as a process: reads a job from stdin, prints a JSON line for each stage and each trial.

    python -m kronsched.bench.versus_worker < job.json

Stage "search" starts the clock. Before it, a side imports what it needs and has one candidate measured, the default config of a
schedule of kronsched, so that builders and runner are up; no side is told the result.

Read first: `main`. The process that started it (`versus.py`) ends it when time is up; it ends too when that process dies, and
builders and runners end with it.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kronsched.bench.peer_metaschedule import Trial
    from kronsched.hardware import Device
    from kronsched.measure.crew import Crew
    from kronsched.search.result import TuneEvent
    from kronsched.workloads.base import Workload

OURS, PEER = "kronsched", "metaschedule"
SEARCH = "search"
"""The stage from which on seconds count."""


class Reporter:
    """Writes the lines of the protocol, with seconds since the process started, or since stage "search"."""

    def __init__(self) -> None:
        """Take stdout for the protocol alone: whatever else is printed goes to stderr."""
        self._lines = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)
        self._begin = time.perf_counter()

    def say(self, event: str, **more: Any) -> None:
        """One line."""
        self._lines.write(json.dumps({"event": event, **more}) + "\n")

    def stage(self, stage: str) -> None:
        """A stage that is reached."""
        if stage == SEARCH:
            self._begin = time.perf_counter()
        self.say("stage", stage=stage, seconds=time.perf_counter() - self._begin)

    def trial(self, status: str, us: float | None, error: str, **more: Any) -> None:
        """A candidate that was measured."""
        self.say("trial", status=status, us=us, error=error, seconds=time.perf_counter() - self._begin, **more)


def main() -> None:
    """Run the job that stdin describes."""
    job, reporter = json.load(sys.stdin), Reporter()
    from kronsched import registry
    from kronsched.errors import KronschedError
    from kronsched.hardware import resolve_target
    from kronsched.measure.crew import Crew
    from kronsched.measure.pools import die_with

    if "parent" in job:
        die_with(job["parent"])
    try:
        workload, device = registry.workload_from_dict(job["workload"]), resolve_target(job["target"])
        with Crew(device, job["builders"]) as crew:
            (_ours if job["side"] == OURS else _metaschedule)(job, workload, device, crew, reporter)
        reporter.say("end")
    except KronschedError as e:
        reporter.say("error", message=" ".join(str(e).split()))


def _warm_up(workload: Workload, device: Device, crew: Crew, reporter: Reporter) -> None:
    """Start builders and runner by measuring a candidate."""
    from kronsched import registry
    from kronsched.measure.live import LiveMeasurer

    schedule = registry.schedules_for(workload, device)[0]
    candidate = schedule.space(workload, device).candidate(schedule.default_config(workload, device))
    with LiveMeasurer(workload, [schedule], device, crew=crew) as measurer:
        (measured,) = measurer.measure([candidate])
    reporter.stage(f"workers up, {schedule.name} {measured.status}")


def _ours(job: dict[str, Any], workload: Workload, device: Device, crew: Crew, reporter: Reporter) -> None:
    from kronsched import registry
    from kronsched.measure.live import LiveMeasurer
    from kronsched.search.tuner import tune

    def progress(event: TuneEvent) -> None:
        if event.kind == "result" and event.record is not None:
            record = event.record
            error = " ".join(str(record.result.get("error") or "").split())[:200]
            us = record.median_us if record.ok else None
            reporter.trial(record.status, us, error, space=str(record.space.get("name")), config=dict(record.config))

    reporter.stage("imports done")
    _warm_up(workload, device, crew, reporter)
    reporter.stage(SEARCH)
    schedules = registry.schedules_for(workload, device)
    options = {"crew": crew, "seed": job["seed"], "build_timeout_s": job["build_timeout_s"]}
    with (
        tempfile.TemporaryDirectory(prefix="kronsched-versus-") as folder,
        LiveMeasurer(workload, schedules, device, **options) as measurer,
    ):
        tune(
            workload,
            target=device,
            trials=job["trials"],
            log=Path(folder) / "log.jsonl",
            seed=job["seed"],
            warm_start=job["warm_start"],
            measurer=measurer,
            progress=progress,
        )


def _metaschedule(job: dict[str, Any], workload: Workload, device: Device, crew: Crew, reporter: Reporter) -> None:
    from kronsched.bench.metaschedule_program import metaschedule_program
    from kronsched.bench.peer_metaschedule import GivenProgram, MetaSchedulePeer, prepare
    from kronsched.measure.live import LiveMeasurer

    def on_trial(trial: Trial) -> None:
        reporter.trial(trial.status, trial.us, trial.error)

    metaschedule_program(workload)  # refuses what it cannot serve before anything is started
    prepare()
    reporter.stage("imports done")
    _warm_up(workload, device, crew, reporter)
    reporter.stage(SEARCH)
    options = {"threads": crew.count, **job["peer_options"]}
    seed, repaired, seconds = job["seed"], job["repaired"], job["build_timeout_s"]
    peer = MetaSchedulePeer(workload, device, repaired=repaired, seed=seed, on_trial=on_trial, on_stage=reporter.stage, **options)
    with LiveMeasurer(workload, [GivenProgram(repaired)], device, crew=crew, seed=seed, build_timeout_s=seconds) as measurer:
        peer.run(job["trials"], measurer)


if __name__ == "__main__":
    main()
