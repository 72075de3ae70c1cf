"""What a report shows of each workload and device of a log, as plain data.

Read first: `Section`, then `sections_of`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from kronsched import registry
from kronsched.hardware import floor_us
from kronsched.records.replay import recorded_device
from kronsched.records.schema import TuningRecord
from kronsched.report.curves import Curve, over_time, over_trials

TOP = 20


@dataclass(frozen=True)
class KnobValue:
    """One value of a knob among the measured candidates: how often tried, how often ok, best median in microseconds."""

    value: str
    tried: int
    ok: int
    best_us: float | None
    in_best: bool


@dataclass(frozen=True)
class Failure:
    """A status other than ok: how often, and its most frequent message."""

    status: str
    count: int
    example: str


@dataclass(frozen=True)
class Section:
    """One workload on one device.

    label: the workload in words.  device: name and arch.  best: the fastest ok record, None when all failed.  floor_us: roofline
    time, None when the workload or device is not known here.  top: at most 20 distinct configs, fastest first.  knobs: by space
    and knob name, every value tried.  versions: package -> the versions met.
    """

    label: str
    device: str
    records: int
    ok: int
    seconds: float
    best: TuningRecord | None
    floor_us: float | None
    top: tuple[TuningRecord, ...]
    failures: tuple[Failure, ...]
    knobs: tuple[tuple[str, tuple[KnobValue, ...]], ...]
    versions: tuple[tuple[str, str], ...]
    strategies: tuple[str, ...]
    curves: tuple[Curve, ...]

    @property
    def roofline_fraction(self) -> float | None:
        """floor_us over the best median."""
        if self.floor_us is None or self.best is None or not self.best.median_us:
            return None
        return self.floor_us / self.best.median_us


def sections_of(records: Sequence[TuningRecord]) -> list[Section]:
    """One section for each (workload, device), in the order in which the log first names them."""
    groups: dict[tuple[str, ...], list[TuningRecord]] = {}
    for record in records:
        groups.setdefault((record.workload_key, record.target["kind"], record.target["name"]), []).append(record)
    return [_section(group) for group in groups.values()]


def _section(records: Sequence[TuningRecord]) -> Section:
    first = records[0]
    label, floor = _workload_facts(first)
    ranked = sorted((r for r in records if r.median_us is not None), key=lambda r: r.median_us or 0.0)
    distinct = {r.candidate.key: r for r in reversed(ranked)}
    top = [r for r in ranked if distinct[r.candidate.key] is r][:TOP]
    by_time = over_time(records, floor)
    ends = [x for x, _ in by_time.best[-1:]] + list(by_time.failed[-1:])
    return Section(
        label=label,
        device=" ".join(str(part) for part in (first.target["name"], first.target.get("arch")) if part),
        records=len(records),
        ok=len(ranked),
        seconds=max(ends, default=0.0),
        best=ranked[0] if ranked else None,
        floor_us=floor,
        top=tuple(top),
        failures=_failures(records),
        knobs=_knobs(records, ranked[0] if ranked else None),
        versions=_versions(records),
        strategies=tuple(dict.fromkeys(str(r.search["strategy"]) for r in records if r.search.get("strategy"))),
        curves=(over_trials(records, floor), by_time),
    )


def _workload_facts(record: TuningRecord) -> tuple[str, float | None]:
    """(label, roofline time); the JSON of the workload when its family is not known here."""
    try:
        workload = registry.workload_from_dict(record.workload)
        device = recorded_device(record.target)
        known = device.bandwidth_gbs > 0 and device.peak_gflops
        return str(workload.label), floor_us(workload, device) if known else None
    except Exception:  # a log may hold anything, and a family may come from outside: the report still shows the record
        return json.dumps(record.workload)[:300], None


def _failures(records: Sequence[TuningRecord]) -> tuple[Failure, ...]:
    by_status: dict[str, Counter[str]] = {}
    for record in records:
        if not record.ok:
            by_status.setdefault(record.status, Counter())[str(record.result.get("error") or "")] += 1
    found = [Failure(status, messages.total(), messages.most_common(1)[0][0]) for status, messages in by_status.items()]
    return tuple(sorted(found, key=lambda f: -f.count))


def _knobs(records: Sequence[TuningRecord], best: TuningRecord | None) -> tuple[tuple[str, tuple[KnobValue, ...]], ...]:
    met: dict[str, dict[str, list[TuningRecord]]] = {}
    spaces = len({r.space["name"] for r in records})
    for record in records:
        prefix = f"{record.space['name']}." if spaces > 1 else ""
        for knob, value in record.config.items():
            met.setdefault(prefix + knob, {}).setdefault(_text(value), []).append(record)
    knobs = []
    for knob, values in met.items():
        rows = []
        for text, group in values.items():
            times = [r.median_us for r in group if r.median_us is not None]
            rows.append(KnobValue(text, len(group), len(times), min(times, default=None), any(r is best for r in group)))
        knobs.append((knob, tuple(sorted(rows, key=lambda row: _natural(row.value)))))
    return tuple(knobs)


def _versions(records: Sequence[TuningRecord]) -> tuple[tuple[str, str], ...]:
    met: dict[str, dict[str, None]] = {}
    for record in records:
        for name, version in {**record.versions, "driver": record.target.get("driver")}.items():
            if version is not None:
                met.setdefault(name, {})[str(version)] = None
    return tuple((name, ", ".join(found)) for name, found in met.items())


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _natural(text: str) -> tuple[int, float, str]:
    """Numbers in order of size, then texts."""
    try:
        return 0, float(text), text
    except ValueError:
        return 1, 0.0, text
