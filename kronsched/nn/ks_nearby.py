"""What the logs know about one Kronecker-sparse chain at other batches: the source of configs for batches nobody tuned.

Read first: `tuned_batches`, `usable`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from math import log2
from pathlib import Path
from typing import TYPE_CHECKING

from kronsched import registry
from kronsched.errors import ArgumentError, RecordError
from kronsched.records import database
from kronsched.records.journal import MAX_LINE
from kronsched.records.schema import TuningRecord
from kronsched.workloads.ks import KSMatmul

if TYPE_CHECKING:
    from kronsched.hardware import Device


def tuned_batches(workload: KSMatmul, device: Device) -> dict[int, TuningRecord]:
    """The fastest record of this device for each batch of the workload's patterns, layout and dtype, in all logs."""
    best: dict[int, TuningRecord] = {}
    for folder in database.search_dirs():
        found: dict[int, TuningRecord] = {}
        for record in _records(folder, workload, device):
            batch = int(record.workload["batch"])
            if batch not in found or _time(record) < _time(found[batch]):
                found[batch] = record
        best = {**found, **best}  # the first folder, the user's, goes before later ones
    return best


def usable(workload: KSMatmul, device: Device, tuned: Mapping[int, TuningRecord]) -> Iterator[TuningRecord]:
    """The records whose config is valid for the workload, those of the nearest batch (by ratio) first."""
    for batch in sorted(tuned, key=lambda n: (abs(log2(n / workload.batch)), -n)):
        record = tuned[batch]
        try:
            schedule = registry.schedule(record.space["name"])
        except ArgumentError:  # a space this process does not know
            continue
        if schedule.supports(workload, device) is None and schedule.space(workload, device).invalid(record.config) is None:
            yield record


def _records(folder: Path, workload: KSMatmul, device: Device) -> Iterator[TuningRecord]:
    """Ok records for the chain on the device. Lines are told apart by bytes first: parsing all would take seconds."""
    wanted = workload.to_dict()
    marks = [json.dumps(wanted["pattern"], separators=pair).encode() for pair in ((",", ":"), (", ", ": "))]
    for path in database._logs(folder):
        try:
            data = path.read_bytes()
        except OSError:
            continue
        if not any(mark in data for mark in marks):
            continue
        for line in data.split(b"\n"):
            if len(line) > MAX_LINE or not any(mark in line for mark in marks):
                continue
            try:
                record = TuningRecord.from_json(line)
            except RecordError:  # `load` and `show` warn of it
                continue
            if record.ok and database.matches_device(record, device) and _same_but_batch(record, wanted):
                yield record


def _same_but_batch(record: TuningRecord, wanted: Mapping[str, object]) -> bool:
    given, batch = record.workload, record.workload.get("batch")
    same = all(given.get(name) == value for name, value in wanted.items() if name != "batch")
    return same and isinstance(batch, int) and batch > 0


def _time(record: TuningRecord) -> float:
    return record.median_us if record.median_us is not None else float("inf")
