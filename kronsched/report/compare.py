"""Tuning runs of one workload side by side: best so far against trials and wall time. The live counterpart of `simulate`.

Read first: `compare_logs`, `Run`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kronsched.errors import ArgumentError
from kronsched.records.journal import read_log
from kronsched.records.schema import TuningRecord
from kronsched.report.curves import over_time, over_trials

SHARES = (0.90, 0.95, 0.99)
SECONDS = (2.0, 5.0, 10.0, 20.0, 40.0)
TRIALS = (8, 16, 32, 64, 128)


@dataclass(frozen=True)
class Run:
    """One log.

    strategy: the strategies its records name.  trials, failures: records, and those without a time.  seconds: wall time of the
    search, from the first build on.  best_us: median microseconds of its best kernel.  after_trials, after_seconds: best so far
    at `TRIALS` and `SECONDS`, None before the first ok record and past the end of the run.  reached: for each of `SHARES` of the
    best kernel of all runs, (trials, seconds) at which this run got there, None when it did not.
    """

    log: str
    strategy: str
    seed: int | None
    trials: int
    failures: int
    seconds: float
    best_us: float
    after_trials: tuple[float | None, ...]
    after_seconds: tuple[float | None, ...]
    reached: tuple[tuple[float, float] | None, ...]

    @property
    def name(self) -> str:
        """What tells it from the others: the log's file name, strategy and seed."""
        return f"{Path(self.log).name.removesuffix('.gz').removesuffix('.jsonl')}: {self.strategy}, seed {self.seed}"


@dataclass(frozen=True)
class Comparison:
    """Runs of one workload on one device. best_us: the fastest kernel of all of them."""

    label: str
    device: str
    best_us: float
    runs: tuple[Run, ...]


def compare_logs(logs: Sequence[str | os.PathLike[str]]) -> Comparison:
    """Compare logs that each hold one run of the same workload on the same model of device.

    Raises ArgumentError when a log holds no time, or when workloads or devices differ.
    """
    if not logs:
        raise ArgumentError("logs: none given, name at least one tuning log")
    groups = [(str(Path(log)), read_log(log)) for log in logs]
    for what, found in (
        ("workload", {r.workload_key for _, records in groups for r in records}),
        ("device", {str(r.target["name"]) for _, records in groups for r in records}),
    ):
        if len(found) != 1:
            raise ArgumentError(f"logs: one {what} is needed, they hold {', '.join(sorted(found))}")
    for name, records in groups:
        if not any(r.ok for r in records):
            raise ArgumentError(f"log={name!r} holds no successful record")
    best = min(r.median_us for _, records in groups for r in records if r.median_us is not None)
    first = groups[0][1][0]
    return Comparison(_label(first), str(first.target["name"]), best, tuple(_run(name, rs, best) for name, rs in groups))


def _run(name: str, records: Sequence[TuningRecord], overall: float) -> Run:
    trials, seconds = over_trials(records).best, over_time(records).best
    reached = []
    for share in SHARES:
        at = [next((x for x, us in curve if us <= overall / share), None) for curve in (trials, seconds)]
        reached.append(None if at[0] is None or at[1] is None else (at[0], at[1]))
    total = over_time(records)
    end = max([*(x for x, _ in total.measured), *total.failed])
    return Run(
        log=name,
        strategy=", ".join(dict.fromkeys(str(r.search.get("strategy", "?")) for r in records)),
        seed=records[0].search.get("seed"),
        trials=len(records),
        failures=sum(not r.ok for r in records),
        seconds=end,
        best_us=trials[-1][1],
        after_trials=tuple(_at(trials, float(n), float(len(records))) for n in TRIALS),
        after_seconds=tuple(_at(seconds, s, end) for s in SECONDS),
        reached=tuple(reached),
    )


def _at(curve: Sequence[tuple[float, float]], x: float, end: float) -> float | None:
    """Best so far at x; None before the first point and beyond the end of the run."""
    return min((us for at, us in curve if at <= x), default=None) if x <= end else None


def _label(record: TuningRecord) -> str:
    from kronsched import registry
    from kronsched.errors import KronschedError

    try:
        return registry.workload_from_dict(record.workload).label
    except (KronschedError, TypeError, KeyError):
        return record.workload_key
