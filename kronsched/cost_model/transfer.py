"""Warm start: a prior for the cost model from tuning logs of other shapes of the same family.

Read first: `prior_for`. Times of different shapes are never compared: each (workload, device) is a group of its own, ranked
within itself, and columns of the shape say what differs between groups.
"""

from __future__ import annotations

import os
import random
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kronsched.cost_model.features import Columns, Featurizer
from kronsched.cost_model.xgb import Booster, Group, XgbOptions, fit_groups
from kronsched.errors import KronschedError

if TYPE_CHECKING:
    from kronsched.hardware import Device
    from kronsched.records.schema import TuningRecord
    from kronsched.schedules.base import Schedule
    from kronsched.workloads.base import Workload

PER_GROUP = 300
"""Records of one workload that are used; more say little about another workload."""
TOTAL = 4000
"""Records that are used in all: about half a second of features and fit."""
TREES = 200


@dataclass(frozen=True)
class Prior:
    """What other shapes taught. `columns` are those the booster was fitted on; a featurizer continues them."""

    booster: Booster
    columns: Columns
    groups: int
    records: int


def prior_for(
    schedule: Schedule,
    workload: Workload,
    device: Device,
    logs: Iterable[Path],
    own_log: Path | None = None,
    options: XgbOptions | None = None,
    seed: int = 0,
) -> Prior | None:
    """Fit a prior for one schedule's space from the records of other workloads in `logs`; None when they hold too little.

    Records of this very workload on this device count too, unless they are in `own_log`: those are told to the search itself.
    """
    records = []
    for path in logs:
        own = own_log is not None and _same(path, own_log)
        for record in records_of_space(path, schedule.name):
            if not (own and record.workload_key == workload.key):
                records.append(record)
    return fit_prior(schedule, device, records, options, seed)


def fit_prior(
    schedule: Schedule, device: Device, records: Sequence[TuningRecord], options: XgbOptions | None = None, seed: int = 0
) -> Prior | None:
    """Fit a prior from records; those whose workload, device or config this version does not know are left out."""
    options = options or XgbOptions()
    by_group: dict[tuple[str, str], list[TuningRecord]] = defaultdict(list)
    for record in records:
        if record.space["name"] == schedule.name:
            by_group[record.workload_key, record.target["name"]].append(record)
    columns, groups, left = Columns(), [], TOTAL
    for key in sorted(by_group):
        group = _group(schedule, device, _some(by_group[key], min(PER_GROUP, left), seed), columns)
        if group is not None and np.isfinite(group.costs).any():
            groups.append(group)
            left -= len(group.costs)
    if not groups:
        return None
    more = XgbOptions(**{**vars(options), "trees": TREES, "depth": options.depth + 2})
    booster = fit_groups(groups, columns, more, seed)
    if booster is None:
        return None
    return Prior(booster, columns, len(groups), sum(len(g.costs) for g in groups))


def records_of_space(path: Path, space: str) -> list[TuningRecord]:
    """The usable records of one space in a log; a log that does not name the space is not parsed, bad lines are passed over."""
    from kronsched.errors import RecordError
    from kronsched.records.journal import Journal
    from kronsched.records.schema import TuningRecord

    mark, found = space.encode(), []
    for _, line in Journal(path).lines():
        if line is not None and mark in line:
            try:
                record = TuningRecord.from_json(line)
            except RecordError:  # whoever reads the log for its own sake is warned
                continue
            if record.space["name"] == space:
                found.append(record)
    return found


def logs_in(folders: Iterable[Path]) -> list[Path]:
    """Every log under folders in a fixed order, leaving out folders named tables: those are for comparing strategies."""
    found: list[Path] = []
    for folder in folders:
        for root, subdirs, names in os.walk(folder):
            subdirs[:] = sorted(d for d in subdirs if d != "tables")
            found += [Path(root, n) for n in sorted(names) if n.endswith((".jsonl", ".jsonl.gz"))]
    return found


def device_of(target: Mapping[str, Any]) -> Device | None:
    """The preset device of a record's target; None for a CPU or an unknown GPU, whose rates a record does not hold."""
    from kronsched.hardware import PRESETS

    return next((d for d in PRESETS.values() if (d.kind, d.name) == (target["kind"], target["name"])), None)


def _group(schedule: Schedule, device: Device, records: Sequence[TuningRecord], columns: Columns) -> Group | None:
    from kronsched import registry

    if not records:
        return None
    target = records[0].target
    there = device if (target["kind"], target["name"]) == (device.kind, device.name) else device_of(target)
    if there is None or there.kind != device.kind:
        return None
    try:
        workload = registry.workload_from_dict(records[0].workload)
        if workload.family != schedule.family or schedule.supports(workload, there) is not None:
            return None
        space = schedule.space(workload, there)
    except (KronschedError, TypeError):
        return None
    usable = [r for r in records if space.invalid(r.config) is None]
    if not usable:
        return None
    candidates = [space.candidate(r.config) for r in usable]
    costs = np.array([np.nan if r.median_us is None else r.median_us for r in usable])
    return Group(Featurizer(space, workload, there, schedule, columns).matrix(candidates), costs)


def _some(records: Sequence[TuningRecord], n: int, seed: int) -> list[TuningRecord]:
    """At most `n` records, a candidate once: a third the fastest, the rest at random."""
    last = {r.candidate.key: r for r in records}
    ordered = sorted(last.values(), key=lambda r: (r.median_us is None, r.median_us or 0.0))
    if len(ordered) <= n:
        return ordered
    rest = ordered[n // 3 :]
    return ordered[: n // 3] + random.Random(seed).sample(rest, n - n // 3)


def _same(a: Path, b: Path) -> bool:
    return a.resolve() == b.resolve()
