"""One side of a comparison of tuners, as a process: reads a job from stdin, prints a JSON line when it starts and one a trial.

    python -m kronsched.bench.versus_worker < job.json

Read first: `main`. The process that started it (`versus.py`) ends it when time is up; builders and runners end with it.
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
    from kronsched.search.result import TuneEvent
    from kronsched.workloads.base import Workload

OURS, PEER = "kronsched", "metaschedule"


def main() -> None:
    """Run the job that stdin describes; stdout carries nothing but the lines of the protocol."""
    job = json.load(sys.stdin)
    lines = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    from kronsched import registry
    from kronsched.errors import KronschedError
    from kronsched.hardware import resolve_target

    def say(event: str, **more: Any) -> None:
        lines.write(json.dumps({"event": event, **more}) + "\n")

    try:
        workload, device = registry.workload_from_dict(job["workload"]), resolve_target(job["target"])
        (_ours if job["side"] == OURS else _metaschedule)(job, workload, device, say)
        say("end")
    except KronschedError as e:
        say("error", message=" ".join(str(e).split()))


def _ours(job: dict[str, Any], workload: Workload, device: Device, say: Any) -> None:
    import tvm  # noqa: F401  (as the other side, which imports its rules before the clock starts)

    import kronsched

    say("start")
    begin = time.perf_counter()

    def progress(event: TuneEvent) -> None:
        if event.kind == "result" and event.record is not None:
            record, seconds = event.record, time.perf_counter() - begin
            error = " ".join(str(record.result.get("error") or "").split())[:200]
            space = str(record.space.get("name"))
            us = record.median_us if record.ok else None
            say("trial", status=record.status, us=us, error=error, seconds=seconds, space=space, config=dict(record.config))

    with tempfile.TemporaryDirectory(prefix="kronsched-versus-") as folder:
        kronsched.tune(
            workload,
            target=device,
            trials=job["trials"],
            log=Path(folder) / "log.jsonl",
            seed=job["seed"],
            warm_start=job["warm_start"],
            builders=job["builders"],
            progress=progress,
        )


def _metaschedule(job: dict[str, Any], workload: Workload, device: Device, say: Any) -> None:
    from kronsched.bench.peer_metaschedule import GivenProgram, MetaSchedulePeer, prepare
    from kronsched.measure.crew import default_builders
    from kronsched.measure.live import LiveMeasurer

    def on_trial(trial: Trial) -> None:
        say("trial", status=trial.status, us=trial.us, error=trial.error, seconds=trial.seconds)

    def on_batch(count: int, seconds: float) -> None:
        say("batch", count=count, seconds=seconds)

    prepare()
    say("start")
    builders = job["builders"] or default_builders(device)
    peer = MetaSchedulePeer(
        workload,
        device,
        repaired=job["repaired"],
        threads=builders,
        seed=job["seed"],
        on_trial=on_trial,
        on_batch=on_batch,
        **job["peer_options"],
    )
    with LiveMeasurer(workload, [GivenProgram(job["repaired"])], device, builders=builders, seed=job["seed"]) as measurer:
        peer.run(job["trials"], measurer)


if __name__ == "__main__":
    main()
