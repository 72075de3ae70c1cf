"""One schedule being searched: its space, its cost model with what other shapes taught it, its strategy.

Read first: `make_arms` (which schedules are searched) and `Arm.known` (which recorded measurements count for it).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kronsched import registry
from kronsched.cost_model.base import CostModel
from kronsched.cost_model.features import Columns, Featurizer
from kronsched.cost_model.null import NullModel
from kronsched.cost_model.xgb import Booster, Group, XgbModel, XgbOptions, fit_groups
from kronsched.errors import ArgumentError, KronschedError, UnsupportedError, choose
from kronsched.search.base import Observation, SearchStrategy
from kronsched.space import Candidate, Knob, SearchSpace, load_knobs

if TYPE_CHECKING:
    import numpy as np

    from kronsched.hardware import Device
    from kronsched.records.schema import TuningRecord
    from kronsched.schedules.base import Schedule
    from kronsched.workloads.base import Workload

PRIOR_TREES = 200
"""Trees of the model of other shapes; it is fitted once a run."""


@dataclass
class Arm:
    """A schedule with the search over its space."""

    schedule: Schedule
    space: SearchSpace
    model: CostModel
    strategy: SearchStrategy

    def observe(self, records: Iterable[TuningRecord], objective: str) -> list[Observation]:
        """The records that are measurements of this space, as observations."""
        out = []
        for record in records:
            if record.space["name"] == self.space.name and self.space.invalid(record.config) is None:
                candidate = self.space.candidate(record.config)
                out.append(Observation(candidate, record.status, cost(record, objective), record.kernel.get("source_sha256")))
        return out


def cost(record: TuningRecord, objective: str) -> float | None:
    """The objective of a record: median microseconds, or joules a call; None for a failure or when it was not measured."""
    if not record.ok:
        return None
    if objective == "time":
        return record.median_us
    value = record.result.get("energy_j")
    return float(value) if value else None


def make_arms(
    workload: Workload,
    device: Device,
    strategy: str,
    seed: int,
    space_file: str | Path | None,
    history: Sequence[TuningRecord],
) -> list[Arm]:
    """An arm for each schedule that serves the workload on the device; with `space_file`, only for the one it is written for.

    history: records of other shapes to warm-start from.  Raises UnsupportedError when no schedule serves the workload,
    ArgumentError for a space file that fits none of them or leaves no valid config.
    """
    schedules = registry.schedules_for(workload, device)
    if not schedules:
        raise UnsupportedError(f"{workload.label}: no schedule of this version serves it on {device.name} ({device.kind})")
    spaces = {s.name: s.space(workload, device) for s in schedules}
    if space_file is not None:
        name, knobs = _read_space(space_file, [s.name for s in schedules])
        schedules = [s for s in schedules if s.name == name]
        spaces[name] = _override(spaces[name], knobs, space_file)
    made = registry.strategy(strategy)
    arms = []
    for schedule in schedules:
        space = spaces[schedule.name]
        model: CostModel = NullModel(space)
        if made.uses_model:
            columns = Columns()
            prior = _prior(history, schedule, columns)
            featurizer = Featurizer(space, workload, device, schedule, columns)
            model = XgbModel(featurizer, seed=seed, prior=prior)
        default = schedule.default_config(workload, device)
        start = [space.candidate(default)] if space.invalid(default) is None else []
        arms.append(Arm(schedule, space, model, made(space, model, seed, start=start)))
    return arms


def _read_space(path: str | Path, names: list[str]) -> tuple[str, list[Knob]]:
    for name in names:
        try:
            return name, load_knobs(name, path)
        except ArgumentError as e:
            if len(names) == 1 or "space=" not in str(e):
                raise
    raise ArgumentError(f"space file {str(path)!r} is for none of this workload's schedules: {', '.join(names)}")


def _override(space: SearchSpace, knobs: Sequence[Knob], path: str | Path) -> SearchSpace:
    """The schedule's space with the file's values; what the workload makes meaningless is left out as in the shipped space."""
    own = {k.name: k for k in space.knobs}
    given = {k.name: k for k in knobs}
    unknown = sorted(set(given) - set(own))
    if unknown:
        raise choose(f"space file {str(path)!r}: knob", unknown[0], list(own))
    values: dict[str, Any] = {}
    for name, knob in given.items():
        fitting = tuple(v for v in knob.values if v in own[name].values)
        # A knob that the workload leaves one value has no effect: the file cannot change that.
        values[name] = own[name].values if len(own[name].values) == 1 else fitting or knob.values
    out = space.restrict(values)
    if next(iter(out), None) is None:
        raise ArgumentError(f"space file {str(path)!r}: no config is valid for this workload on this device")
    return out


def _prior(history: Sequence[TuningRecord], schedule: Schedule, columns: Columns) -> Booster | None:
    """A model of the records of other shapes (each shape compared with itself only); None without usable records."""
    from kronsched.records.replay import recorded_device

    by_problem: dict[tuple[str, str], list[TuningRecord]] = defaultdict(list)
    for record in history:
        if record.space["name"] == schedule.name:
            by_problem[record.workload_key, str(record.target["name"])].append(record)
    groups = []
    for records in by_problem.values():
        try:
            workload = registry.workload_from_dict(records[0].workload)
            device = recorded_device(records[0].target)
            space = schedule.space(workload, device)
            featurizer = Featurizer(space, workload, device, schedule, columns)
            costs = {space.candidate(r.config): cost(r, "time") for r in records}
        except KronschedError:  # written by another version, or by hand: not worth failing a run
            continue
        groups.append(Group(_features(featurizer, list(costs)), _costs(costs)))
    if not groups:
        return None
    return fit_groups(groups, columns, replace(XgbOptions(), trees=PRIOR_TREES))


def _features(featurizer: Featurizer, candidates: list[Candidate]) -> np.ndarray:
    return featurizer.matrix(candidates)


def _costs(costs: dict[Candidate, float | None]) -> np.ndarray:
    import numpy as np

    return np.array([np.nan if c is None else c for c in costs.values()])
