"""Figures of merit: of a cost model on candidates it has not seen, and of the diversity of what a strategy asks for."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass

import numpy as np

from kronsched.cost_model.base import CostModel
from kronsched.search.table import Table
from kronsched.space import Candidate, SearchSpace

TOP = 16
PAIRS = 20_000


@dataclass(frozen=True)
class ModelQuality:
    """A cost model judged on the candidates of a table that it was not told.

    trained_on: observations told.  top1, top16: best true share of the optimum of the rest among the model's first 1 and 16.
    pairwise: share of pairs of ok candidates that it orders rightly, ties counting half.  recall16: share of the true first 16
    among the model's first 16.
    """

    trained_on: int
    top1: float
    top16: float
    pairwise: float
    recall16: float


def model_quality(model: CostModel, table: Table, told: Set[str]) -> ModelQuality | None:
    """Judge a model; None when fewer than two ok candidates are left to judge it on."""
    rest = [(c, e.cost) for c, e in table if c.key not in told]
    costs = np.array([np.inf if cost is None else cost for _, cost in rest])
    ok = np.flatnonzero(np.isfinite(costs))
    if len(ok) < 2:
        return None
    scores = model.predict([c for c, _ in rest])
    order = np.argsort(-scores, kind="stable")
    truly = np.argsort(costs, kind="stable")[:TOP]
    best = costs[ok].min()
    rng = np.random.default_rng(0)
    a, b = rng.choice(ok, PAIRS), rng.choice(ok, PAIRS)
    differ = costs[a] != costs[b]
    agree = np.sign(scores[a] - scores[b])[differ] * np.sign(costs[b] - costs[a])[differ]
    return ModelQuality(
        trained_on=len(told),
        top1=float(best / costs[order[0]]),
        top16=float(best / costs[order[:TOP]].min()),
        pairwise=float(np.mean((agree + 1) / 2)) if len(agree) else 0.5,
        recall16=len(set(order[:TOP].tolist()) & set(truly.tolist())) / len(truly),
    )


def pairwise_distance(points: np.ndarray) -> float:
    """Mean distance of two of points (n, d), n ≥ 2."""
    difference = points[:, None] - points[None]
    n = len(points)
    return float(np.sqrt((difference**2).sum(-1)).sum() / (n * (n - 1)))


def coverage(space: SearchSpace, candidates: Sequence[Candidate]) -> float:
    """Share of all values of all knobs (of more than one value) that occur in the candidates."""
    wanted = {(k.name, v) for k in space.knobs if len(k.values) > 1 for v in k.values}
    if not wanted:
        return 1.0
    return len(wanted & {item for c in candidates for item in c.items}) / len(wanted)
