"""What the logs know about one workload at other numbers of rows (or batches): the source of configs for sizes nobody tuned.

Read first: `tuned_sizes`, `usable`. `field` names the field that varies, such as "m" or "batch"; all others must agree.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from math import log2
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kronsched import registry
from kronsched.errors import ArgumentError, RecordError
from kronsched.records import database
from kronsched.records.journal import MAX_LINE
from kronsched.records.schema import TuningRecord
from kronsched.workloads.base import Workload

if TYPE_CHECKING:
    from kronsched.hardware import Device


def tuned_sizes(workload: Workload, device: Device, field: str) -> dict[int, TuningRecord]:
    """The fastest record of this device for each value of the field, in the user's and the shipped logs."""
    best: dict[int, TuningRecord] = {}
    for folder in database.search_dirs():
        found: dict[int, TuningRecord] = {}
        for record in _records(folder, workload, device, field):
            size = int(record.workload[field])
            if size not in found or _time(record) < _time(found[size]):
                found[size] = record
        best = {**found, **best}  # the first folder, the user's, goes before later ones
    return best


def usable(workload: Workload, device: Device, tuned: Mapping[int, TuningRecord], field: str) -> Iterator[TuningRecord]:
    """The records whose config is valid for the workload, those of the nearest size (by ratio) first."""
    own = int(getattr(workload, field))
    for size in sorted(tuned, key=lambda n: (abs(log2(n / own)), -n)):
        record = tuned[size]
        try:
            schedule = registry.schedule(record.space["name"])
        except ArgumentError:  # a space this process does not know
            continue
        if schedule.supports(workload, device) is None and schedule.space(workload, device).invalid(record.config) is None:
            yield record


def _records(folder: Path, workload: Workload, device: Device, field: str) -> Iterator[TuningRecord]:
    """Ok records of the workload but for the field. Lines are told apart by bytes first: parsing all would take seconds."""
    wanted = {name: value for name, value in workload.to_dict().items() if name != field}
    longest = max(wanted.values(), key=lambda value: len(json.dumps(value)))  # its shape, which few lines share
    marks = [json.dumps(longest, separators=pair).encode() for pair in ((",", ":"), (", ", ": "))]
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
            if record.ok and database.matches_device(record, device) and _agrees(record.workload, wanted, field):
                yield record


def _agrees(given: Mapping[str, Any], wanted: Mapping[str, Any], field: str) -> bool:
    size = given.get(field)
    if not (isinstance(size, int) and size > 0 and all(given.get(name) == value for name, value in wanted.items())):
        return False
    try:  # fields that `wanted` has not must say nothing, such as a default that old logs spell out
        found = registry.workload_from_dict(given).to_dict()
    except ArgumentError:
        return False
    return {name: value for name, value in found.items() if name != field} == wanted


def _time(record: TuningRecord) -> float:
    return record.median_us if record.median_us is not None else float("inf")
