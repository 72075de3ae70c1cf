"""Replay: rebuild every ok record of a log and compare the source digest, the numbers and the time with what it says.

Read first: `replay` and `_judge` (how the findings become one status). This is the one module of `records` that uses the
runtime and the measurer; both are imported when they are needed.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from kronsched import registry
from kronsched.errors import ArgumentError, KronschedError
from kronsched.hardware import PRESETS, Device, resolve_target
from kronsched.records.database import matches_device
from kronsched.records.journal import read_log
from kronsched.records.schema import PACKAGES, TuningRecord, versions

if TYPE_CHECKING:
    from kronsched.measure.base import Measured, Measurer
    from kronsched.schedules.base import Schedule
    from kronsched.space import Candidate
    from kronsched.workloads.base import Workload

TIME_TOLERANCE = 0.10
"""A median more than this share above the recorded one, in two measurements, is "slower"."""
REPLAY_STATUSES = ("reproduced", "source_differs", "slower", "wrong_result", "failed", "skipped")
MeasurerFactory = Callable[["Workload", Sequence["Schedule"], Device], "Measurer"]


@dataclass(frozen=True)
class ReplayResult:
    """What replaying one record found.

    status: "reproduced" (all that was asked holds), "source_differs", "slower", "wrong_result", "failed" (it cannot be
    rebuilt or run), "skipped" (something asked could not be checked here).  digest_matches: None when it was not rebuilt or the
    record has no digest.  measured_us: median microseconds now, None when not measured.  max_relative_error: of the new run,
    see `kronsched.measure.check`.  error: one line saying why the status is not "reproduced".  versions: package ->
    (recorded, here) for each version that differs.
    """

    record: TuningRecord
    status: str
    digest_matches: bool | None = None
    measured_us: float | None = None
    max_relative_error: float | None = None
    error: str | None = None
    versions: Mapping[str, tuple[str | None, str | None]] = field(default_factory=dict)

    @property
    def recorded_us(self) -> float | None:
        """The record's median, microseconds."""
        return self.record.median_us

    @property
    def ratio(self) -> float | None:
        """Measured over recorded time; above 1 means slower now."""
        if self.measured_us is None or not self.recorded_us:
            return None
        return self.measured_us / self.recorded_us

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready form, as `kronsched replay --json` lists it."""
        return {
            "workload": self.record.workload,
            "device": self.record.target["name"],
            "space": self.record.space["name"],
            "config": self.record.config,
            "status": self.status,
            "digest_matches": self.digest_matches,
            "recorded_us": self.recorded_us,
            "measured_us": self.measured_us,
            "ratio": self.ratio,
            "max_relative_error": self.max_relative_error,
            "error": self.error,
            "versions": {name: {"recorded": old, "here": new} for name, (old, new) in self.versions.items()},
        }


def replay(
    log: str | os.PathLike[str],
    *,
    measure: bool = False,
    verify: bool = False,
    best: bool = False,
    workload: Workload | None = None,
    compiler: str = "nvrtc",
    progress: Callable[[ReplayResult], None] | None = None,
    measurer: MeasurerFactory | None = None,
) -> list[ReplayResult]:
    """Rebuild the ok records of a log and compare them with what this machine and these versions make.

    Always: the source is generated for the recorded device (which need not be here) and its sha256 compared.
    verify: run the correctness gate on the device, if this machine has it (any CPU can verify a CPU record).
    measure: time it again and compare medians; needs the same model of GPU or CPU.
    best: only the fastest record of each workload and device.  workload: only records of this one.
    compiler: "nvrtc" or "nvcc", for verify and measure.  progress: called with each result, once those of its
    workload and device are all known.  measurer: makes the measurer of a (workload, schedules, device), default the live one.

    Returns one result a record, in the order of the log. Raises ArgumentError when the log cannot be read, holds no usable
    record, or none of `workload`.
    """
    records = _chosen(read_log(log), workload, best)
    if workload is not None and not records:
        raise ArgumentError(f"workload: log {str(log)!r} holds no ok record of {workload.label}")
    results: dict[int, ReplayResult] = {}
    for group in _groups(records):
        finish = _replay_group([r for _, r in group], measure, verify, measurer or _live(compiler))
        for (position, _), result in zip(group, finish, strict=True):
            results[position] = result
            if progress is not None:
                progress(result)
    return [results[i] for i in range(len(records))]


def recorded_device(target: Mapping[str, Any]) -> Device:
    """The device a record's `target` describes: this machine's or a preset of that name, with the recorded limits."""
    known = [*PRESETS.values(), *_present()]
    fallback = Device(target["kind"], target["name"], target.get("arch") or "", target.get("units") or 1, 0.0, {}, present=False)
    base = next((d for d in known if (d.kind, d.name) == (target["kind"], target["name"])), fallback)
    fields = ("arch", "units", "shared_per_block", "vector_bytes", "driver")
    return replace(base, **{name: target[name] for name in fields if target.get(name) is not None})


# -- which records --------------------------------------------------------------------------------------


def _chosen(records: Iterable[TuningRecord], workload: Workload | None, best: bool) -> list[TuningRecord]:
    chosen = [r for r in records if r.ok and (workload is None or r.workload_key == workload.key)]
    if not best:
        return chosen
    fastest: dict[tuple[str, ...], TuningRecord] = {}
    for record in chosen:
        other = fastest.get(_group_key(record))
        if other is None or (record.median_us or 0) < (other.median_us or 0):
            fastest[_group_key(record)] = record
    return [r for r in chosen if r is fastest[_group_key(r)]]


def _group_key(record: TuningRecord) -> tuple[str, ...]:
    return record.workload_key, record.target["kind"], record.target["name"]


def _groups(records: Sequence[TuningRecord]) -> list[list[tuple[int, TuningRecord]]]:
    """(position, record) by workload and device: each group shares one measurer."""
    groups: dict[tuple[str, ...], list[tuple[int, TuningRecord]]] = {}
    for item in enumerate(records):
        groups.setdefault(_group_key(item[1]), []).append(item)
    return list(groups.values())


def _present() -> list[Device]:
    """The devices of this machine."""
    auto, cpu = resolve_target("auto"), resolve_target("cpu")
    return [auto, cpu] if auto.kind == "cuda" else [cpu]


def _device_here(record: TuningRecord) -> Device | None:
    """The device of this machine that can run the record: the same model of GPU, or any CPU."""
    return next(
        (d for d in _present() if d.kind == record.target["kind"] and (d.kind == "cpu" or matches_device(record, d))), None
    )


# -- replaying ------------------------------------------------------------------------------------------


@dataclass
class _Finding:
    """What is known about one record so far."""

    record: TuningRecord
    candidate: Candidate | None = None
    schedule: Schedule | None = None
    digest: str | None = None
    measured: Measured | None = None
    time_counts: bool = False
    failure: str | None = None
    not_checked: str | None = None


def _replay_group(records: Sequence[TuningRecord], measure: bool, verify: bool, make: MeasurerFactory) -> Iterator[ReplayResult]:
    """Results of records of one workload and device, in order. Measuring starts after all sources are compared."""
    findings = [_Finding(r) for r in records]
    try:
        workload = registry.workload_from_dict(records[0].workload)
        device = recorded_device(records[0].target)
    except Exception as e:  # a log may hold anything, and a family may come from outside: no record may end the replay
        for finding in findings:
            finding.failure = _reason(e)
    else:
        for finding in findings:
            _rebuild(finding, workload, device)
        if measure or verify:
            _run(findings, workload, measure, make)
    return map(_judge, findings)


def _rebuild(finding: _Finding, workload: Workload, device: Device) -> None:
    from kronsched.runtime.build import lower_source

    record = finding.record
    try:
        schedule = registry.schedule(record.space["name"])
        if (schedule.family, schedule.device_kind) != (workload.family, device.kind):
            raise ArgumentError(f"space {schedule.name!r} serves {schedule.family} on {schedule.device_kind}")
        candidate = schedule.space(workload, device).candidate(record.config)
        _, finding.digest = lower_source(workload, schedule, candidate.config, device)
        finding.schedule, finding.candidate = schedule, candidate
    except Exception as e:  # as above: the config comes from the log, the schedule perhaps from outside
        finding.failure = _reason(e)


def _run(findings: Sequence[_Finding], workload: Workload, measure: bool, make: MeasurerFactory) -> None:
    """Check and time on this machine every candidate that was rebuilt; those over the tolerance a second time."""
    record = findings[0].record
    device = _device_here(record)
    if device is None:
        for finding in findings:
            finding.not_checked = f"not run: this machine has no {record.target['name']}"
        return
    same = matches_device(record, device)
    todo = [f for f in findings if f.candidate is not None]
    for finding in todo:
        finding.time_counts = measure and same
        if measure and not same:
            finding.not_checked = f"time not compared: recorded on {record.target['name']}, this is {device.name}"
    if not todo:
        return
    schedules = {f.schedule.name: f.schedule for f in todo if f.schedule is not None}
    try:
        with contextlib.closing(make(workload, list(schedules.values()), device)) as measurer:
            _measure(todo, measurer)
            # A second look at the slow ones: a clock that had not ramped up, or a neighbour on the machine, is not a regression.
            _measure([f for f in todo if f.time_counts and (_ratio(f) or 0) > 1 + TIME_TOLERANCE], measurer)
    except KronschedError as e:  # nothing of this workload can be measured here; records of others may be
        for finding in todo:
            if finding.measured is None:
                finding.failure = _reason(e)


def _measure(findings: Sequence[_Finding], measurer: Measurer) -> None:
    wanted: dict[str, list[_Finding]] = {}
    for finding in findings:
        if finding.candidate is not None:
            wanted.setdefault(finding.candidate.key, []).append(finding)
    batch = [group[0].candidate for group in wanted.values() if group[0].candidate is not None]
    for measured in measurer.measure(batch) if batch else ():
        for finding in wanted.get(measured.candidate.key, ()):
            before = finding.measured
            if before is None or (measured.median_us or float("inf")) < (before.median_us or float("inf")):
                finding.measured = measured


def _ratio(finding: _Finding) -> float | None:
    now = finding.measured.median_us if finding.measured is not None else None
    return now / finding.record.median_us if now is not None and finding.record.median_us else None


def _judge(finding: _Finding) -> ReplayResult:
    """One status from the findings, the gravest first."""
    record, measured = finding.record, finding.measured
    recorded: str | None = record.kernel.get("source_sha256")
    matches = finding.digest == recorded if finding.digest and recorded else None
    differing = _differing_versions(record)
    ratio = _ratio(finding) if finding.time_counts else None
    if finding.failure is not None:
        status, error = "failed", finding.failure
    elif measured is not None and measured.status == "wrong_result":
        status, error = "wrong_result", measured.error or "the result differs from the reference"
    elif measured is not None and measured.status != "ok":
        status, error = "failed", f"{measured.status}: {measured.error or 'no message'}"
    elif matches is False:
        because = ", ".join(f"{name} {old} -> {new}" for name, (old, new) in differing.items()) or "no recorded version differs"
        status, error = "source_differs", f"source is {str(finding.digest)[:12]}, recorded {str(recorded)[:12]} ({because})"
    elif ratio is not None and ratio > 1 + TIME_TOLERANCE:
        status, error = "slower", f"{ratio:.2f} times the recorded median, in two measurements"
    elif finding.not_checked is not None:
        status, error = "skipped", finding.not_checked
    elif matches is None and measured is None:
        status, error = "skipped", "the record has no source digest to compare"
    else:
        status, error = "reproduced", None
    return ReplayResult(
        record=record,
        status=status,
        digest_matches=matches,
        measured_us=measured.median_us if measured is not None and finding.time_counts else None,
        max_relative_error=measured.run.max_relative_error if measured is not None and measured.run is not None else None,
        error=None if error is None else " ".join(error.split())[:500],
        versions=differing,
    )


def _differing_versions(record: TuningRecord) -> dict[str, tuple[str | None, str | None]]:
    here, there = versions(), record.versions
    pairs = {name: (None if there.get(name) is None else str(there[name]), here.get(name)) for name in PACKAGES if name in there}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def _reason(e: Exception) -> str:
    return str(e) if isinstance(e, KronschedError) else f"{type(e).__name__}: {e}"


def _live(compiler: str) -> MeasurerFactory:
    def make(workload: Workload, schedules: Sequence[Schedule], device: Device) -> Measurer:
        from kronsched.measure.live import LiveMeasurer

        # No dedupe: the second look at a slow time must be a new measurement, not the first one handed out again.
        live: Measurer = LiveMeasurer(workload, schedules, device, compiler=compiler, dedupe=False)
        return live

    return make
