"""Which record to load: the user's logs first, then the logs shipped with kronsched.

Read first: `find_best`. Every record carries its workload's key as text, so a log is searched by bytes and only lines
that name the key are parsed: a hundred shipped logs take a few milliseconds.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Iterator, Sequence
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

import platformdirs

from kronsched.errors import ArgumentError, RecordError
from kronsched.records.journal import MAX_LINE
from kronsched.records.schema import RecordWarning, TuningRecord

if TYPE_CHECKING:
    from kronsched.hardware import Device
    from kronsched.workloads.base import Workload


def user_dir() -> Path:
    """The folder of the user's logs, such as ~/.local/share/kronsched/logs. It need not exist."""
    return Path(platformdirs.user_data_dir("kronsched", appauthor=False)) / "logs"


def shipped_dir() -> Path:
    """The folder of shipped logs: inside an installed wheel, or at the top of a source checkout."""
    installed = Path(str(files("kronsched"))) / "_data" / "tuning_logs"
    return installed if installed.is_dir() else Path(__file__).resolve().parents[2] / "tuning_logs"


def search_dirs() -> list[Path]:
    """Where records are looked up, first hit first."""
    return [user_dir(), shipped_dir()]


def default_log(workload: Workload) -> Path:
    """The log `tune` appends to when none is named: one file a workload, where `find_best` looks first."""
    return user_dir() / f"{workload.key}.jsonl"


def matches_device(record: TuningRecord, device: Device) -> bool:
    """Whether the record was measured on this model of GPU or CPU, so that its time is to be expected here."""
    return (record.target["kind"], record.target["name"]) == (device.kind, device.name)


def ranked(workload: Workload, device: Device, dirs: Sequence[Path] | None = None) -> list[TuningRecord]:
    """Every ok record that can serve the workload on the device, the one to try first in front.

    A record of another GPU model never serves. Records of this device come first: those of the first folder (the user's)
    before those of later ones, each by time. On a CPU, records of other CPUs follow in the same order; their times say
    nothing about this one (see `matches_device`).
    """
    here: list[TuningRecord] = []
    elsewhere: list[TuningRecord] = []
    for folder in search_dirs() if dirs is None else dirs:
        found = sorted((r for r in _scan(folder, workload.key) if r.ok and r.target["kind"] == device.kind), key=_time)
        here += [r for r in found if matches_device(r, device)]
        if device.kind == "cpu":
            elsewhere += [r for r in found if not matches_device(r, device)]
    return here + elsewhere


def find_best(workload: Workload, device: Device, dirs: Sequence[Path] | None = None) -> TuningRecord | None:
    """The record to load for a workload on a device, None when no log has one. See `ranked` for the order.

    dirs: folders to search instead of `search_dirs()`.
    """
    return next(iter(ranked(workload, device, dirs)), None)


def best_in(
    records: Iterable[TuningRecord], workload: Workload | None = None, device: Device | None = None
) -> TuningRecord | None:
    """The fastest ok record of one workload, None when there is none.

    workload: may be left out when the records hold only one (else `ArgumentError` lists them).
    device: prefer records of this device; on a CPU those of other CPUs serve when it has none; another GPU's never do.
    """
    good = sorted((r for r in records if r.ok), key=_time)
    if workload is not None:
        good = [r for r in good if r.workload_key == workload.key]
    elif len(keys := dict.fromkeys(r.workload_key for r in good)) > 1:
        raise ArgumentError(f"workload: the records hold {len(keys)} workloads, name one of {', '.join(keys)}")
    if device is not None:
        here = [r for r in good if matches_device(r, device)]
        good = here or [r for r in good if device.kind == "cpu" and r.target["kind"] == "cpu"]
    return good[0] if good else None


def _time(record: TuningRecord) -> float:
    return record.median_us if record.median_us is not None else float("inf")


def _scan(folder: Path, key: str) -> Iterator[TuningRecord]:
    """Records of one workload in all logs of a folder; `tables/` holds exhaustive tables for simulation, not logs."""
    mark = key.encode()
    for path in _logs(folder):
        try:
            data = path.read_bytes()
        except OSError as e:
            warnings.warn(f"{path}: cannot be read: {e.strerror}", RecordWarning, stacklevel=2)
            continue
        # A log by another tool may lack the key field: then nothing can be told from the bytes.
        if mark not in data and data.count(b'"workload_key"') >= data.count(b'"workload"'):
            continue
        bad: list[str] = []
        for number, line in enumerate(data.split(b"\n"), start=1):
            if len(line) > MAX_LINE or not line.strip() or (mark not in line and b'"workload_key"' in line):
                continue
            try:
                record = TuningRecord.from_json(line)
            except RecordError as e:
                bad.append(f"{path}:{number}: skipped: {e}")
                continue
            if record.workload_key == key:
                yield record
        if bad:
            more = f" (and {len(bad) - 1} more)" if len(bad) > 1 else ""
            warnings.warn(bad[0] + more, RecordWarning, stacklevel=2)


def _logs(folder: Path) -> list[Path]:
    """The .jsonl files under a folder in a fixed order, leaving out every folder named tables."""
    found = []
    for root, subdirs, names in os.walk(folder):
        subdirs[:] = sorted(d for d in subdirs if d != "tables")
        found += [Path(root, name) for name in sorted(names) if name.endswith(".jsonl")]
    return found
