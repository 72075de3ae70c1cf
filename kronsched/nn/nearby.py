"""What the logs know about one list of factors at other numbers of rows: the source of configs for shapes nobody tuned.

Read first: `tuned_rows`, `usable`.
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
from kronsched.workloads.kron import KronMatmul

if TYPE_CHECKING:
    from kronsched.hardware import Device


def tuned_rows(workload: KronMatmul, device: Device) -> dict[int, TuningRecord]:
    """The fastest record of this device for each m with the workload's factors and dtype, in the user's and the shipped logs."""
    best: dict[int, TuningRecord] = {}
    for folder in database.search_dirs():
        found: dict[int, TuningRecord] = {}
        for record in _records(folder, workload, device):
            m = int(record.workload["m"])
            if m not in found or _time(record) < _time(found[m]):
                found[m] = record
        best = {**found, **best}  # the first folder, the user's, goes before later ones
    return best


def usable(workload: KronMatmul, device: Device, tuned: Mapping[int, TuningRecord]) -> Iterator[TuningRecord]:
    """The records whose config is valid for the workload, those of the nearest m (by ratio) first."""
    for m in sorted(tuned, key=lambda m: (abs(log2(m / workload.m)), -m)):
        record = tuned[m]
        try:
            schedule = registry.schedule(record.space["name"])
        except ArgumentError:  # a space this process does not know
            continue
        if schedule.supports(workload, device) is None and schedule.space(workload, device).invalid(record.config) is None:
            yield record


def _records(folder: Path, workload: KronMatmul, device: Device) -> Iterator[TuningRecord]:
    """Ok records for the factors, dtype and device. Lines are told apart by bytes first: parsing all would take seconds."""
    factors = [list(pair) for pair in workload.factors]
    marks = [json.dumps(factors, separators=pair).encode() for pair in ((",", ":"), (", ", ": "))]
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
            if record.ok and database.matches_device(record, device) and _same_but_m(record, workload, factors):
                yield record


def _same_but_m(record: TuningRecord, workload: KronMatmul, factors: list[list[int]]) -> bool:
    w, m = record.workload, record.workload.get("m")
    same = (w.get("family"), w.get("factors"), w.get("dtype")) == (workload.family, factors, workload.dtype)
    return same and isinstance(m, int) and m > 0


def _time(record: TuningRecord) -> float:
    return record.median_us if record.median_us is not None else float("inf")
