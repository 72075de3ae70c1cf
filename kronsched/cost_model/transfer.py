"""Warm start: a prior for the cost model from what was measured of other shapes of the same family.

Read first: `Shape` (what was measured of one shape), `fit_prior`, `Prior`. Times of different shapes are never compared: what is
learned is the log of best / time within a (workload, device). How close to the roofline the best of a shape comes is kept beside
it (`Known`), so that the choices of different schedules can be compared before anything is measured.
"""

from __future__ import annotations

import math
import os
import random
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kronsched.cost_model.features import Columns, Featurizer, shape_columns
from kronsched.cost_model.xgb import Booster, Group, XgbOptions, fit_groups
from kronsched.errors import KronschedError
from kronsched.hardware import floor_us
from kronsched.space import Candidate, SearchSpace, Value

if TYPE_CHECKING:
    from kronsched.hardware import Device
    from kronsched.records.schema import TuningRecord
    from kronsched.schedules.base import Schedule
    from kronsched.workloads.base import Workload

PER_GROUP = 300
"""Records of one workload that are used when a prior is fitted at the start of a tuning run; more say little about another."""
TOTAL = 4000
"""Records that are used in all then: about half a second of features and fit."""
PRIOR_OPTIONS = XgbOptions(objective="log", trees=100, depth=6, eta=0.1, clip=1.2, sample=0.7, columns=0.5)
"""Of a prior: what is slower than e^clip times the best is all as bad, since only the fast ones matter to another shape."""
MEMBERS = 4
"""Boosters of a prior, fitted with different seeds; where they disagree, nothing is known."""
OFTEN = 0.01
"""Share of the records in which a value of a knob must occur for the prior to know it."""
LEFT_OUT = ("shape", "device")
"""Groups of columns that a prior does not see: with few shapes, each would be learned by heart."""


@dataclass(frozen=True)
class Shape:
    """What was measured of one workload with one schedule on one device. costs: microseconds, NaN for a failure."""

    schedule: Schedule
    workload: Workload
    device: Device
    candidates: tuple[Candidate, ...]
    costs: np.ndarray

    @property
    def key(self) -> tuple[str, str]:
        """(workload, device): records with equal keys are comparable."""
        return self.workload.key, self.device.name

    def sample(self, n: int, seed: int) -> Shape:
        """At most `n` of the candidates: a third the fastest, the rest at random."""
        if len(self.candidates) <= n:
            return self
        order = np.argsort(np.where(np.isfinite(self.costs), self.costs, np.inf), kind="stable").tolist()
        kept = order[: n // 3] + random.Random(seed).sample(order[n // 3 :], n - n // 3)
        return replace(self, candidates=tuple(self.candidates[i] for i in kept), costs=self.costs[kept])


@dataclass(frozen=True)
class Known:
    """A shape that a prior was fitted on: its columns (see `shape_columns`), device, and the best share of the roofline."""

    columns: Mapping[str, float]
    device: str
    best_share: float

    def distance(self, columns: Mapping[str, float]) -> float:
        """Mean number of octaves between the shapes' columns; a column that only one has counts as one octave."""
        names = sorted({*self.columns, *columns})
        apart = [abs(self.columns[n] - columns[n]) if n in self.columns and n in columns else 1.0 for n in names]
        return sum(apart) / max(1, len(apart))


@dataclass(frozen=True)
class Prior:
    """What other shapes taught: the mean of boosters that estimate log(best / time), on top of `base` when there is one.

    columns: those the boosters were fitted on; a featurizer continues them.  records: how many it was fitted on.
    """

    boosters: tuple[Booster, ...]
    columns: Columns
    known: tuple[Known, ...]
    records: int
    base: Prior | None = None
    values: Mapping[str, frozenset[Value]] = field(default_factory=dict)
    """Values of each knob that occurred often: of others the prior knows nothing."""

    @property
    def groups(self) -> int:
        """How many shapes it was fitted on."""
        return len(self.known)

    def score(self, features: np.ndarray) -> np.ndarray:
        """Scores (n,) of features (n, columns): estimates of log(best / time)."""
        return self.members(features).mean(axis=0)  # type: ignore[no-any-return]

    def members(self, features: np.ndarray) -> np.ndarray:
        """Scores (boosters, n) of each booster."""
        own = np.stack([b.score(features) for b in self.boosters])
        return own if self.base is None else own + self.base.score(features)


# -- fitting --------------------------------------------------------------------------------------------


def fit_prior(
    shapes: Sequence[Shape],
    options: XgbOptions | None = None,
    seed: int = 0,
    *,
    base: Prior | None = None,
    members: int = MEMBERS,
    without: Sequence[str] = (),
) -> Prior | None:
    """Fit a prior on shapes of one schedule; None when none of them has a success.

    options: default `PRIOR_OPTIONS`.  base: a prior whose errors on these shapes are learned.  without: groups of columns left
    out besides `LEFT_OUT`.
    """
    options = options or PRIOR_OPTIONS
    columns = Columns() if base is None else Columns(base.columns.names)
    shapes = [s for s in shapes if np.isfinite(s.costs).any()]
    left_out = (*LEFT_OUT, *without)
    groups = [
        Group(Featurizer(_space(s), s.workload, s.device, s.schedule, columns, left_out).matrix(s.candidates), s.costs)
        for s in shapes
    ]
    margins = [] if base is None else [base.score(g.features) for g in groups]
    boosters = [fit_groups(groups, columns, options, seed * members + i, margins) for i in range(members)]
    fitted = tuple(b for b in boosters if b is not None)
    if not fitted:
        return None
    known = tuple(_known(s) for s in shapes)
    records = sum(len(s.candidates) for s in shapes)
    counts = Counter(item for s in shapes for c in s.candidates for item in c.items)
    values: dict[str, set[Value]] = defaultdict(set)
    for (name, value), count in counts.items():
        if count >= OFTEN * records:
            values[name].add(value)
    seen = {name: frozenset(found) for name, found in sorted(values.items())}
    return Prior(fitted, columns, known, records, base, seen)


def seen_space(space: SearchSpace, prior: Prior) -> SearchSpace:
    """The part of a space whose knob values the prior has seen, where it has seen any."""
    kept: dict[str, Value | Sequence[Value]] = {}
    for knob in space.knobs:
        values = tuple(v for v in knob.values if v in prior.values.get(knob.name, ()))
        kept[knob.name] = values or knob.values
    return space.restrict(kept)


def prior_for(
    schedule: Schedule,
    workload: Workload,
    device: Device,
    logs: Iterable[Path],
    own_log: Path | None = None,
    options: XgbOptions | None = None,
    seed: int = 0,
    base: Prior | None = None,
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
    left, shapes = TOTAL, []
    for shape in shapes_of(schedule, device, records):
        if left > 0:
            shapes.append(shape.sample(min(PER_GROUP, left), seed))
            left -= len(shapes[-1].candidates)
    return fit_prior(shapes, options, seed, base=base)


# -- where shapes come from -----------------------------------------------------------------------------


def shapes_of(schedule: Schedule, device: Device | None, records: Iterable[TuningRecord]) -> list[Shape]:
    """The shapes of one schedule in records, in a fixed order; what this version does not know is left out.

    device: the device of this run, whose rates a record does not hold; records of other devices count where a preset knows them.
    Of a repeated config the last record counts.
    """
    by_key: dict[tuple[str, str], dict[str, TuningRecord]] = defaultdict(dict)
    for record in records:
        if record.space["name"] == schedule.name:
            by_key[record.workload_key, record.target["name"]][record.candidate.key] = record
    shapes = (_shape(schedule, device, list(by_key[key].values())) for key in sorted(by_key))
    return [s for s in shapes if s is not None]


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


def logs_in(folders: Iterable[Path], tables: bool = False) -> list[Path]:
    """Every log under folders in a fixed order; folders named tables, which are for comparing strategies, only when asked for."""
    found: list[Path] = []
    for folder in folders:
        for root, subdirs, names in os.walk(folder):
            subdirs[:] = sorted(d for d in subdirs if tables or d != "tables")
            found += [Path(root, n) for n in sorted(names) if n.endswith((".jsonl", ".jsonl.gz"))]
    return found


def device_of(target: Mapping[str, Any]) -> Device | None:
    """The preset device of a record's target; None for a CPU or an unknown GPU, whose rates a record does not hold."""
    from kronsched.hardware import PRESETS

    return next((d for d in PRESETS.values() if (d.kind, d.name) == (target["kind"], target["name"])), None)


def _shape(schedule: Schedule, device: Device | None, records: Sequence[TuningRecord]) -> Shape | None:
    from kronsched import registry

    target = records[0].target
    own = device is not None and (target["kind"], target["name"]) == (device.kind, device.name)
    there = device if own else device_of(target)
    if there is None or there.kind != schedule.device_kind:
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
    costs = np.array([np.nan if r.median_us is None else r.median_us for r in usable])
    return Shape(schedule, workload, there, tuple(space.candidate(r.config) for r in usable), costs)


def _space(shape: Shape) -> SearchSpace:
    return shape.schedule.space(shape.workload, shape.device)


def _known(shape: Shape) -> Known:
    best = float(np.nanmin(shape.costs))
    return Known(shape_columns(shape.workload), shape.device.name, floor_us(shape.workload, shape.device) / best)


def predicted_share(known: Iterable[Known], workload: Workload) -> tuple[float, float]:
    """(share of the roofline that the best of a shape is expected to reach, distance of the nearest known shape).

    The mean of the logs over the known shapes, the nearest counting most.
    """
    columns = shape_columns(workload)
    found = [(k.distance(columns), math.log(k.best_share)) for k in known if k.best_share > 0]
    if not found:
        return 1.0, math.inf
    weights = [1.0 / (0.05 + d) ** 2 for d, _ in found]
    mean = sum(w * share for w, (_, share) in zip(weights, found, strict=True)) / sum(weights)
    return math.exp(mean), min(d for d, _ in found)


def _same(a: Path, b: Path) -> bool:
    return a.resolve() == b.resolve()
