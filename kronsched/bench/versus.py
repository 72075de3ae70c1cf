"""kronsched's tuner against MetaSchedule on the same workloads: equal wall time, and equal trials.

Each side tunes in a process of its own (versus_worker.py), one after the other, with as many builders, and is ended when its
seconds are up. They count from its first step of search: by then it has imported what it needs, and its builders and its runner
have measured one candidate, which is no trial. Candidates of both are built, checked against the float64 reference and timed by
the same code. Equal trials are read from the same runs: the best of the first n trials of each, n being the smaller number.

Read first: `versus`.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import IO, TYPE_CHECKING, Any

from kronsched.bench.peer_metaschedule import STRATEGIES
from kronsched.bench.versus_worker import OURS, PEER, SEARCH
from kronsched.errors import ArgumentError, UnsupportedError, choose
from kronsched.hardware import resolve_target
from kronsched.search.setup import MAX_SEED

if TYPE_CHECKING:
    from kronsched.workloads.base import Workload

START_S = 180.0
"""For imports and for workers to start, before the clock of a side does."""
BUILD_TIMEOUT_S = 30.0
"""As of MetaSchedule's own builder."""
DIED = "its process died"
MANY = 100_000
"""Trials when only time ends a side."""
MOST_SECONDS = 86_400.0
OnEvent = Callable[["Workload", str, Mapping[str, Any]], None]
"""Called with the workload, the name of a side, and a stage or a trial of it."""


@dataclass(frozen=True)
class Side:
    """What one tuner did for one workload.

    trials: dicts with status, us, error, seconds.  error: why there is nothing.  stages: dicts with stage, such as "32 candidates
    sampled", and seconds; those before "search" count from the start of the process, all others from "search" on.
    """

    name: str
    trials: tuple[Mapping[str, Any], ...]
    error: str = ""
    stages: tuple[Mapping[str, Any], ...] = ()

    def best(self, first: int | None = None) -> Mapping[str, Any] | None:
        """The fastest right candidate, of all trials or of the first so many."""
        return min((t for t in self.trials[:first] if t["us"]), key=lambda t: float(t["us"]), default=None)

    def best_us(self, first: int | None = None) -> float | None:
        """Its microseconds."""
        found = self.best(first)
        return None if found is None else float(found["us"])

    @property
    def right(self) -> float | None:
        """Share of the trials that built and computed the right result."""
        return sum(t["status"] == "ok" for t in self.trials) / len(self.trials) if self.trials else None

    def to_dict(self) -> dict[str, Any]:
        """For JSON: counts and the best, and every trial."""
        counts: dict[str, int] = {}
        for trial in self.trials:
            counts[trial["status"]] = counts.get(trial["status"], 0) + 1
        return {
            "name": self.name,
            "trials": len(self.trials),
            "statuses": counts,
            "right_share": self.right,
            "best": self.best(),
            "error": self.error,
            "stages": [dict(s) for s in self.stages],
            "all": [dict(t) for t in self.trials],
        }


@dataclass(frozen=True)
class Match:
    """Both sides on one workload. Ratios are peer / ours, above 1 where ours is faster; None where a side found nothing."""

    workload: Workload
    ours: Side
    peer: Side

    @property
    def common(self) -> int:
        """Trials that both made."""
        return min(len(self.ours.trials), len(self.peer.trials))

    @property
    def equal_time(self) -> float | None:
        """Ratio of the best times in the given seconds."""
        return _ratio(self.peer.best_us(), self.ours.best_us())

    @property
    def equal_trials(self) -> float | None:
        """Ratio of the best times of the first `common` trials."""
        return _ratio(self.peer.best_us(self.common), self.ours.best_us(self.common))

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "workload": self.workload.to_dict(),
            "label": self.workload.label,
            "equal_time": self.equal_time,
            "equal_trials": self.equal_trials,
            "common_trials": self.common,
            "sides": [self.ours.to_dict(), self.peer.to_dict()],
        }


def versus(
    workloads: Sequence[Workload],
    *,
    seconds: float | None = None,
    trials: int | None = None,
    target: str = "auto",
    repaired: bool = True,
    builders: int | None = None,
    seed: int = 0,
    warm_start: bool = False,
    build_timeout_s: float = BUILD_TIMEOUT_S,
    peer_options: Mapping[str, int | str] | None = None,
    on_event: OnEvent = lambda workload, side, event: None,
    on_side: Callable[[Workload, Side], None] = lambda workload, side: None,
    on_match: Callable[[Match], None] = lambda match: None,
) -> list[Match]:
    """Compare on each workload. seconds: of each side; trials: of each side; at least one of them is needed.

    repaired: see `peer_metaschedule`.  builders: processes of each side, None for the cores.  warm_start: whether ours may use
    logs of other shapes; MetaSchedule has none.  build_timeout_s: seconds of one build of either side.  peer_options: batch,
    population, strategy and threads of `MetaSchedulePeer`.
    on_event: called with each stage and each trial of a side, as dicts like those of `Side`.  on_side: once a side has ended.
    Raises ArgumentError, and UnsupportedError for a device that is not here; a side that fails has its reason in `Side.error`.
    """
    _check_budget(seconds, trials, build_timeout_s)
    if not 0 <= seed <= MAX_SEED:
        raise ArgumentError(f"seed={seed} is not allowed: an int from 0 to {MAX_SEED} is needed")
    if (strategy := (peer_options or {}).get("strategy", STRATEGIES[0])) not in STRATEGIES:
        raise choose("strategy", strategy, STRATEGIES)
    if not (device := resolve_target(target)).present:
        raise UnsupportedError(f"target={device.name!r} is not on this machine: nothing can be measured")
    matches = []
    for workload in workloads:
        job = {
            "workload": workload.to_dict(),
            "target": target,
            "trials": trials or MANY,
            "builders": builders,
            "seed": seed,
            "repaired": repaired,
            "warm_start": warm_start,
            "build_timeout_s": build_timeout_s,
            "peer_options": dict(peer_options or {}),
        }
        sides = []
        for name in (OURS, PEER):
            sides.append(run_side({**job, "side": name}, seconds or MOST_SECONDS, on_event=partial(on_event, workload, name)))
            on_side(workload, sides[-1])
        matches.append(Match(workload, *sides))
        on_match(matches[-1])
    return matches


def _check_budget(seconds: float | None, trials: int | None, build_timeout_s: float) -> None:
    if seconds is None and trials is None:
        raise ArgumentError("seconds=None is not allowed without trials: say how long, or how many, each side may tune")
    if seconds is not None and not 0 < seconds <= MOST_SECONDS:
        raise ArgumentError(f"seconds={seconds} is not allowed: a number in (0, {MOST_SECONDS:g}] is needed")
    if trials is not None and trials < 1:
        raise ArgumentError(f"trials={trials} is not allowed: an int ≥ 1 is needed")
    if not 0 < build_timeout_s <= MOST_SECONDS:
        raise ArgumentError(f"build_timeout_s={build_timeout_s} is not allowed: a number in (0, {MOST_SECONDS:g}] is needed")


def run_side(
    job: Mapping[str, Any],
    seconds: float,
    start_s: float = START_S,
    on_event: Callable[[Mapping[str, Any]], None] = lambda event: None,
) -> Side:
    """Run one side until it ends or its seconds are up, then end it with all its processes."""
    lines: queue.Queue[str | None] = queue.Queue()
    events: list[Mapping[str, Any]] = []

    def keep(event: Mapping[str, Any]) -> None:
        events.append(event)
        on_event(event)

    with tempfile.TemporaryFile("w+", errors="replace") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "kronsched.bench.versus_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,
        )
        threading.Thread(target=_read, args=(process.stdout, lines), daemon=True).start()
        try:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                json.dump({**job, "parent": os.getpid()}, process.stdin)
                process.stdin.close()
            error = _follow(lines, keep, seconds, start_s)
        finally:
            _end(process)
        if error == DIED:
            log.seek(0)
            error = f"{DIED}: {' '.join(log.read()[-600:].split())[-300:]}"
    trials, stages = (tuple(e for e in events if key in e) for key in ("status", "stage"))
    return Side(str(job["side"]), trials, error, stages)


def _follow(lines: queue.Queue[str | None], keep: Callable[[Mapping[str, Any]], None], seconds: float, start_s: float) -> str:
    """Hand on trials and stages until the end, an error or the deadline; what is wrong, else ""."""
    deadline, searching = time.monotonic() + start_s, False
    while True:
        left = deadline - time.monotonic()
        if searching and left <= 0:
            return ""
        try:
            line = lines.get(timeout=max(0.0, left))
        except queue.Empty:
            return "" if searching else f"it was not ready within {start_s:g} s"
        if line is None:
            return DIED
        event = json.loads(line)
        kind = event.pop("event")
        if kind in ("stage", "trial"):
            if event.get("stage") == SEARCH:
                deadline, searching = time.monotonic() + seconds, True
            keep(event)
        else:
            return str(event["message"]) if kind == "error" else ""


def _read(source: IO[str] | None, lines: queue.Queue[str | None]) -> None:
    assert source is not None
    for line in source:
        lines.put(line)
    lines.put(None)


def _end(process: subprocess.Popen[str]) -> None:
    """End the process and what it started: workers die with it, the group gets what is left."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    if process.stdout is not None:
        with contextlib.suppress(OSError, ValueError):
            process.stdout.close()


def _ratio(peer: float | None, ours: float | None) -> float | None:
    return peer / ours if peer and ours else None


def geomean(ratios: Sequence[float | None]) -> float | None:
    """Geometric mean of those that are there."""
    logs = [math.log(r) for r in ratios if r]
    return math.exp(sum(logs) / len(logs)) if logs else None
