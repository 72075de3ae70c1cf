"""The best-so-far curve of a tuning run, as data: what to draw, not how. The renderer is `kronsched.report.svg`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from kronsched.records.schema import TuningRecord

PAUSE_SECONDS = 300.0
"""A longer silence between two records is a pause of the user's, not search: it counts as the record's own seconds."""


@dataclass(frozen=True)
class Curve:
    """Measurements of one workload on one device in the order of the log.

    x_label: "trial" (from 1) or "seconds of search".  measured: (x, median microseconds) of every ok record.  failed: x of every
    other record.  best: (x, microseconds) where the best time so far fell, ending at the last record.  floor_us: the roofline
    time, None when unknown.
    """

    x_label: str
    measured: tuple[tuple[float, float], ...]
    failed: tuple[float, ...]
    best: tuple[tuple[float, float], ...]
    floor_us: float | None = None


def over_trials(records: Sequence[TuningRecord], floor_us: float | None = None) -> Curve:
    """Best so far against the number of candidates measured, failures included."""
    return _curve("trial", [float(i + 1) for i in range(len(records))], records, floor_us)


def over_time(records: Sequence[TuningRecord], floor_us: float | None = None) -> Curve:
    """Best so far against wall time. See `seconds_of`."""
    return _curve("seconds of search", seconds_of(records), records, floor_us)


def seconds_of(records: Sequence[TuningRecord]) -> list[float]:
    """Seconds of search when each record was written, never falling.

    The difference of two timestamps, where it is between 0 and `PAUSE_SECONDS`; else (first record, a pause, a clock that was set
    back, no timestamp) the record's own build and run seconds.
    """
    now, previous, out = 0.0, None, []
    for record in records:
        stamp = _stamp(record)
        gap = stamp - previous if stamp is not None and previous is not None else -1.0
        now += gap if 0 <= gap <= PAUSE_SECONDS else _own_seconds(record)
        previous = stamp
        out.append(now)
    return out


def _curve(x_label: str, xs: Sequence[float], records: Sequence[TuningRecord], floor_us: float | None) -> Curve:
    measured: list[tuple[float, float]] = []
    failed: list[float] = []
    best: list[tuple[float, float]] = []
    for x, record in zip(xs, records, strict=True):
        if record.median_us is None:
            failed.append(x)
            continue
        measured.append((x, record.median_us))
        if not best or record.median_us < best[-1][1]:
            best.append((x, record.median_us))
    if best and xs[-1] > best[-1][0]:
        best.append((xs[-1], best[-1][1]))
    return Curve(x_label, tuple(measured), tuple(failed), tuple(best), floor_us)


def _stamp(record: TuningRecord) -> float | None:
    try:
        return datetime.fromisoformat(record.timestamp).timestamp()
    except (ValueError, OverflowError, OSError):
        return None


def _own_seconds(record: TuningRecord) -> float:
    return sum(max(0.0, float(record.search.get(name) or 0.0)) for name in ("build_seconds", "run_seconds"))
