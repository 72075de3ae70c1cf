"""Which shape of a grid deserves the next trials, and which configs of other shapes it should be told of. Pure bookkeeping.

A group is what may teach each other: shapes of one family that agree in everything but their numbers (dtype, layout). Within it
the first shapes are far apart and get more trials; then every shape is visited once, in random order, with the configs that are
best for its nearest neighbours; then trials go where the gain that is to be expected is largest.

Read first: `GridSearch.next_visit`, `GridSearch.tell`.
"""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from kronsched.hardware import Device, floor_us
from kronsched.records.schema import TuningRecord
from kronsched.space import Candidate
from kronsched.workloads.base import Workload

SEEDS = 12
"""Shapes of a group that are visited first, as far apart as can be."""
SEED_TRIALS = 12
SEED_SHARE = 0.1
"""Of the time that the first shapes may take together."""
VISIT_TRIALS = 4
LOOK_TRIALS = 2
"""Of the first visit to a shape that a log knows: a default and a hint, for schedules may have changed since."""
NEIGHBOURS = 6
"""Nearest measured shapes of the group that are asked for hints."""
HINTS = 3
"""Configs each of them gives."""
LISTENED = 2
"""Measured neighbours from which on only schedules that are best for one of them are tried."""
REACH = 0.75
"""Quantile of the neighbours' shares of the roofline that a shape is believed to reach."""
UNSURE = 0.3
"""Log of the speed-up that a shape with one trial may hide; falls with the root of the trials."""
MARGIN = 1.06
"""A shape is behind until its target takes so many times as long: less may be noise, and is within reach of a few more trials."""
LOSING = 10.0
"""What a shape is behind counts so many times: those far behind come before any gain over the roofline."""


@dataclass
class Shape:
    """What is known of one shape. costs: microseconds, infinity for a failure.  asked: measured or on the way.

    former: microseconds of kernels whose source has changed since.  best_us: the least of the costs.  target_us: see
    `GridSearch`.  exhausted: there was nothing more to propose.
    """

    workload: Workload
    floor_us: float
    place: np.ndarray
    target_us: float = math.inf
    best_us: float = math.inf
    costs: dict[Candidate, float] = field(default_factory=dict)
    former: dict[Candidate, float] = field(default_factory=dict)
    asked: set[Candidate] = field(default_factory=set)
    visits: int = 0
    exhausted: bool = False

    def best(self, n: int) -> list[Candidate]:
        """The fastest candidates, those that were fast in a former form among them until they are measured again."""
        times = {c: us for c, us in {**self.former, **self.costs}.items() if math.isfinite(us)}
        return sorted(times, key=lambda c: times[c])[:n]


@dataclass(frozen=True)
class Visit:
    """Some trials of one shape. defaults: the schedules whose default configs may be among them, None for all."""

    index: int
    trials: int
    defaults: tuple[str, ...] | None
    hints: tuple[Candidate, ...]


class GridSearch:
    """The state of tuning a grid.

    trials: most records a shape gets, those it has already counted.  targets: microseconds by workload key that a shape should
    beat (such as its best peer's); what has not is preferred.
    """

    def __init__(
        self, workloads: Sequence[Workload], device: Device, trials: int, targets: Mapping[str, float] | None = None
    ) -> None:
        """Nothing is measured yet."""
        self.trials = trials
        self.shapes = [Shape(w, floor_us(w, device), place_of(w), (targets or {}).get(w.key, math.inf)) for w in workloads]
        self._index = {w.key: i for i, w in enumerate(workloads)}
        self._groups: dict[str, list[int]] = {}
        for i, w in enumerate(workloads):
            self._groups.setdefault(group_of(w), []).append(i)
        self._nearest = {i: order for members in self._groups.values() for i, order in _nearest(members, self.shapes)}
        orders = [_mixed(_spread(members, self.shapes)) for members in self._groups.values()]
        self._seeds = {i for order in orders for i in order[:SEEDS]}
        # Groups take turns: should time be up early, each has had its share.
        longest = max(map(len, orders), default=0)
        self._first = [order[k] for k in range(longest) for order in orders if k < len(order)][::-1]

    def tell(self, record: TuningRecord) -> None:
        """Learn a measurement, of this run or of a log; of a failure, that it need not be repeated.

        What has no digest of its source is a time of a former kernel: a hint, and worth measuring again.
        """
        index = self._index.get(record.workload_key)
        if index is not None:
            shape = self.shapes[index]
            us = record.median_us if record.ok else None
            if record.ok and record.kernel.get("source_sha256") is None:
                shape.former[record.candidate] = math.inf if us is None else us
                return
            shape.costs[record.candidate] = math.inf if us is None else us
            shape.best_us = min(shape.best_us, shape.costs[record.candidate])
            shape.asked.add(record.candidate)

    def next_visit(self, busy: Sequence[int] = (), budget: float = math.inf) -> Visit | None:
        """The visit that promises most; None when every shape has all its trials.

        busy: shapes that are being visited.  budget: about how many candidates there is time for.
        """
        while self._first:
            index = self._first.pop()
            shape = self.shapes[index]
            if shape.costs:
                continue  # a log knows it: gains decide
            trials = self._first_trials(index, budget)
            if (left := self.trials - len(shape.asked)) > 0:
                return self._visit(index, min(trials, left))
        open_ = [
            i
            for i, s in enumerate(self.shapes)
            if i not in busy and not s.exhausted and len(s.asked) < self.trials and (s.costs or not s.visits)
        ]
        if not open_:
            return None
        index = max(open_, key=self.gain)
        shape = self.shapes[index]
        return self._visit(index, min(VISIT_TRIALS if shape.visits else LOOK_TRIALS, self.trials - len(shape.asked)))

    def _first_trials(self, index: int, budget: float) -> int:
        """Trials of a first visit: fewer where time is too short for all shapes, but a default and a hint where one was good."""
        fair = budget / (len(self._first) + 1)
        fair = max(fair, LOOK_TRIALS) if self.shapes[index].former else fair
        if index in self._seeds:
            share = SEED_SHARE * budget / max(1, len(self._seeds))
            return int(min(SEED_TRIALS, max(1.0, share, min(VISIT_TRIALS, 2 * fair))))
        return int(min(VISIT_TRIALS, max(1.0, fair)))

    def gain(self, index: int) -> float:
        """The log of the speed-up that more trials are expected to bring."""
        shape = self.shapes[index]
        tried = len(shape.asked)
        if not math.isfinite(shape.best_us):
            return 1.0 / (1 + tried)
        shares = sorted(s.floor_us / s.best_us for s in self.neighbours(index))
        reach = shares[int(REACH * (len(shares) - 1))] if shares else 1.0
        gap = max(0.0, math.log(shape.best_us * min(1.0, reach) / shape.floor_us))
        lost = max(0.0, math.log(MARGIN * shape.best_us / shape.target_us)) if math.isfinite(shape.target_us) else 0.0
        return (gap + UNSURE + LOSING * lost) / math.sqrt(1 + tried / VISIT_TRIALS)

    def neighbours(self, index: int) -> list[Shape]:
        """The nearest shapes of the group that have a time, the nearest first; not the shape itself."""
        near = (self.shapes[i] for i in self._nearest[index])
        return list(itertools.islice((s for s in near if math.isfinite(s.best_us)), NEIGHBOURS))

    def _teachers(self, index: int) -> list[Shape]:
        """The nearest shapes of the group that have hints to give."""
        near = (self.shapes[i] for i in self._nearest[index])
        return list(itertools.islice((s for s in near if s.best(1)), NEIGHBOURS))

    def _visit(self, index: int, trials: int) -> Visit:
        shape = self.shapes[index]
        shape.visits += 1
        own = shape.best(HINTS)
        near = [s.best(HINTS) for s in self._teachers(index)]
        theirs = [best[rank] for rank in range(HINTS) for best in near if rank < len(best)]  # everyone's best before a second
        again = not shape.costs and bool(own)  # former kernels of its own are the best hints
        # A schedule that is best for no neighbour is not worth a trial.
        winners = tuple(dict.fromkeys(best[0].space for best in near if best))
        everyone = len(near) < LISTENED
        known = shape.visits > 1 or (again and trials <= LOOK_TRIALS)
        defaults = () if known else None if everyone else winners
        return Visit(index, trials, defaults, tuple(dict.fromkeys([*own, *theirs])))


def group_of(workload: Workload) -> str:
    """The family and every field that is not a number or a list of numbers, and how many numbers there are."""
    data = workload.to_dict()
    named = {k: v for k, v in data.items() if isinstance(v, str | bool)}
    return json.dumps([named, len(_numbers(data))], sort_keys=True)


def place_of(workload: Workload) -> np.ndarray:
    """Where a shape lies among those of its group: the log2 of its numbers."""
    numbers = list(_numbers(workload.to_dict()))
    return np.log2(np.maximum(1, np.array(numbers, dtype=np.float64)))


def _numbers(value: object) -> list[float]:
    if isinstance(value, bool | str) or value is None:
        return []
    if isinstance(value, int | float):
        return [float(value)]
    if isinstance(value, Mapping):
        return [n for v in value.values() for n in _numbers(v)]
    return [n for v in value for n in _numbers(v)] if isinstance(value, list | tuple) else []


def _nearest(members: Sequence[int], shapes: Sequence[Shape]) -> Iterator[tuple[int, list[int]]]:
    """Each member with the others, the nearest first."""
    points = np.array([shapes[i].place for i in members])
    for index, point in zip(members, points, strict=True):
        order = np.argsort(np.abs(points - point).sum(axis=1), kind="stable")
        yield index, [members[i] for i in order.tolist() if members[i] != index]


def _mixed(order: Sequence[int]) -> list[int]:
    """The first shapes as they are, the others in random order: where time is up early, those that were visited are typical."""
    rest = list(order[SEEDS:])
    random.Random(0).shuffle(rest)
    return [*order[:SEEDS], *rest]


def _spread(members: Sequence[int], shapes: Sequence[Shape]) -> list[int]:
    """The members, the first ones as far apart as can be, from the one nearest to the middle on."""
    points = np.array([shapes[i].place for i in members])
    distance = np.abs(points - np.median(points, axis=0)).sum(axis=1)
    order = [int(np.argmin(distance))]
    distance = np.full(len(members), np.inf)
    while len(order) < len(members):
        distance = np.minimum(distance, np.abs(points - points[order[-1]]).sum(axis=1))
        distance[order[-1]] = -1.0
        order.append(int(np.argmax(distance)))
    return [members[i] for i in order]
