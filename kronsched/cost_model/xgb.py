"""The learned cost model: gradient-boosted trees that rank the candidates of one workload.

Read first: `XgbModel.predict` (fits when there is something new), `labels` (what is learned), `Booster` (a fitted
model), `fit_groups` (several workloads at once).

A tuning run has tens of observations, so the model is refitted from all of them each round. What other shapes have taught comes
in as a prior: fixed boosters whose score is the margin that the fitted trees start from, times the trust that the observations
leave in it (`trust`). So a wrong prior is corrected by few observations.
"""

from __future__ import annotations

import gzip
import warnings
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from kronsched.cost_model.base import CostModel, ModelError
from kronsched.cost_model.features import Columns, Featurizer
from kronsched.errors import choose
from kronsched.space import Candidate

if TYPE_CHECKING:
    from kronsched.search.base import Observation

LEVELS = 31
"""Grades of relevance."""
OBJECTIVES = ("rank", "log", "throughput")


@dataclass(frozen=True)
class XgbOptions:
    """Options of `XgbModel`.

    objective: "rank" (pairwise ranking), "log" (regression on log time) or "throughput" (regression on best time / time).
    trees, depth, eta: size of the ensemble.  pairs: pairs drawn a candidate for ranking.  clip: times over e^clip times the best
    are all as bad.  sample, columns: share of the rows a tree and of the columns a node is grown from.  forest: trees grown side
    by side and averaged in each step.  prior_trust: sum of squares of a prior's scores (log units) that it takes to halve the
    trust in one that the observations do not confirm.  threads: of xgboost.
    """

    objective: str = "rank"
    trees: int = 60
    depth: int = 4
    eta: float = 0.15
    pairs: int = 8
    clip: float = 2.0
    sample: float = 1.0
    columns: float = 1.0
    forest: int = 1
    prior_trust: float = 1.0
    threads: int = 1

    def __post_init__(self) -> None:
        """Reject an unknown objective."""
        if self.objective not in OBJECTIVES:
            raise choose("objective", self.objective, OBJECTIVES)


class Group(NamedTuple):
    """Measured candidates of one workload: features (n, columns) and costs (n,), NaN for a failure."""

    features: np.ndarray
    costs: np.ndarray


def labels(costs: np.ndarray, options: XgbOptions) -> np.ndarray | None:
    """What is learned of costs (n,) of one workload: higher is better, failures are the worst. None when all are equal.

    rank: grades 0 … 31 of the log of best / cost, failures 0.  log: that log, failures as the worst.  throughput: best / cost,
    failures 0.
    """
    ok = np.isfinite(costs)
    if not ok.any():
        return None
    with np.errstate(divide="ignore", invalid="ignore"):
        gain = np.where(ok, np.maximum(np.log(np.nanmin(costs[ok]) / costs), -options.clip), -np.inf)
    worst = gain[ok].min()
    if options.objective == "throughput":
        out = np.exp(gain)
    else:
        out = np.where(ok, gain, worst)
        if options.objective == "rank":
            # A failure is one grade below the slowest candidate.
            low = 0 if ok.all() else 1
            spread = out.max() - worst
            grade = np.round((out - worst) / spread * (LEVELS - low)) if spread > 0 else np.zeros(len(out))
            out = np.where(ok, grade + low, 0)
    return out if np.ptp(out) > 0 else None


class Booster:
    """A fitted xgboost model and the names of the columns it was fitted on."""

    def __init__(self, model: Any, columns: Sequence[str]) -> None:
        """Wrap an `xgboost.Booster`."""
        self._model = model
        self.columns = tuple(columns)

    def score(self, features: np.ndarray, margin: np.ndarray | None = None) -> np.ndarray:
        """Scores (n,) of features (n, ≥ columns); further columns are ignored, missing ones are NaN. `margin` is added."""
        n, width = features.shape
        if width < len(self.columns):
            features = np.hstack([features, np.full((n, len(self.columns) - width), np.nan, np.float32)])
        used = np.ascontiguousarray(features[:, : len(self.columns)], dtype=np.float32)
        out: np.ndarray = self._model.inplace_predict(used, predict_type="margin").astype(np.float64)
        return out if margin is None else out + margin

    def to_json(self) -> bytes:
        """The model in xgboost's own JSON."""
        return bytes(self._model.save_raw("json"))

    @classmethod
    def from_json(cls, path: Path, columns: Sequence[str], threads: int = 1) -> Booster:
        """Read what `to_json` gave from a gzip-compressed file; nothing is unpickled. Raises ModelError with one line."""
        import xgboost

        booster = xgboost.Booster({"nthread": threads})
        try:
            booster.load_model(bytearray(gzip.decompress(path.read_bytes())))
            width = booster.num_features()
        except (OSError, EOFError, zlib.error) as e:
            raise ModelError(f"cost model {str(path)!r} cannot be read: {getattr(e, 'strerror', None) or e}") from None
        except xgboost.core.XGBoostError as e:
            raise ModelError(f"cost model {str(path)!r} is damaged: {_first_line(str(e))}") from None
        if width != len(columns):
            raise ModelError(f"cost model {str(path)!r} is damaged: {len(columns)} columns named, {width} in the model")
        return cls(booster, columns)


def _first_line(text: str) -> str:
    return next((line for line in text.splitlines() if line.strip()), "unknown error")


def fit_groups(
    groups: Sequence[Group], columns: Columns, options: XgbOptions, seed: int = 0, margins: Sequence[np.ndarray] = ()
) -> Booster | None:
    """Fit on several workloads at once, comparing candidates only within a workload; None when there is nothing to learn.

    margins: for each group, scores (n,) that the trees start from.
    """
    import xgboost

    parts = [(g.features, label, i) for i, g in enumerate(groups) if (label := labels(g.costs, options)) is not None]
    if not parts:
        return None
    width = len(columns)
    rows = np.vstack([np.pad(f, ((0, 0), (0, width - f.shape[1])), constant_values=np.nan) for f, _, _ in parts])
    # xgboost refuses infinity and takes a column that is NaN throughout.
    label = np.concatenate([y for _, y, _ in parts])
    data = xgboost.DMatrix(np.where(np.isfinite(rows), rows, np.nan), label=label, nthread=options.threads)
    params: dict[str, Any] = {
        "max_depth": options.depth,
        "eta": options.eta,
        "nthread": options.threads,
        "seed": seed,
        "subsample": options.sample,
        "colsample_bynode": options.columns,
        "num_parallel_tree": options.forest,
        "base_score": 0.0,
        "objective": "reg:squarederror",
    }
    if options.objective == "rank":
        data.set_group([len(y) for _, y, _ in parts])
        params |= {
            "objective": "rank:pairwise",
            "lambdarank_pair_method": "mean",
            "lambdarank_num_pair_per_sample": options.pairs,
        }
    elif not margins:
        params["base_score"] = float(np.mean(np.concatenate([y for _, y, _ in parts])))
    if len(parts) > 1 and options.objective != "rank":  # a workload of many records says no more than one of few
        data.set_weight(np.concatenate([np.full(len(y), len(rows) / len(parts) / len(y)) for _, y, _ in parts]))
    if margins:
        shifted = [margins[i] + (0.0 if options.objective == "rank" else np.mean(y - margins[i])) for _, y, i in parts]
        data.set_base_margin(np.concatenate(shifted))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        model = xgboost.train(params, data, num_boost_round=options.trees)
    return Booster(model, columns.names)


class Scorer(Protocol):
    """What a prior must do: score features whose columns are its own, or its own and more."""

    def score(self, features: np.ndarray) -> np.ndarray:
        """Scores (n,) of features (n, columns)."""


def trust(prior: np.ndarray, label: np.ndarray | None, evidence: float) -> float:
    """The factor on a prior's scores (n,), given what was measured (n,): 1 without evidence, 0 where it is contradicted.

    The slope of a regression of the labels on the scores, drawn towards 1 with the weight `evidence`. Measured candidates that
    the prior scores alike say little about it, and move the factor little.
    """
    if label is None or len(prior) < 2:
        return 1.0
    x, y = prior - prior.mean(), label - label.mean()
    return float(np.clip((x @ y + evidence) / max(1e-9, float(x @ x) + evidence), 0.0, 1.0))


class XgbModel(CostModel):
    """Ranks the candidates of one space for one workload. Deterministic given seed and observations.

    featurizer: features of the candidates.  prior: what other shapes taught, on columns that the featurizer's begin with; its
    scores are best used when they estimate the log of best / time.  Before two distinguishable observations the score is the
    prior's, or zero without one.
    """

    def __init__(
        self, featurizer: Featurizer, options: XgbOptions | None = None, seed: int = 0, prior: Scorer | None = None
    ) -> None:
        """Start with the prior only."""
        self.featurizer = featurizer
        self.options = options or XgbOptions()
        self._seed = seed
        self.prior = prior
        self._seen: dict[str, Observation] = {}
        self._booster: Booster | None = None
        self._trust = 1.0
        self._known = np.empty(0)
        self._stale = False

    def update(self, observations: Sequence[Observation]) -> None:
        """Add observations; the fit happens in the next `predict`."""
        for observation in observations:
            self._seen[observation.candidate.key] = observation
        self._stale = self._stale or bool(observations)

    def predict(self, candidates: Sequence[Candidate]) -> np.ndarray:
        """Scores; differences mean something, the scale does not."""
        if self._stale:
            self._fit()
        if not candidates or (self._booster is None and self.prior is None):
            return np.zeros(len(candidates))
        features = self.featurizer.matrix(candidates)
        margin = self._trust * self._prior_scores(candidates, features)
        return margin if self._booster is None else self._booster.score(features, margin)

    def embed(self, candidates: Sequence[Candidate]) -> np.ndarray:
        """Normalised knobs."""
        return self.featurizer.embed(candidates)

    @property
    def trained(self) -> bool:
        """Whether there is a prior or something was learned."""
        if self._stale:
            self._fit()
        return self.prior is not None or self._booster is not None

    @property
    def experience(self) -> int:
        """Shapes that the prior was fitted on."""
        return 0 if self.prior is None else int(getattr(self.prior, "groups", 1))

    def booster(self) -> Booster | None:
        """What was fitted on the observations so far."""
        if self._stale:
            self._fit()
        return self._booster

    def _prior_scores(self, candidates: Sequence[Candidate], features: np.ndarray) -> np.ndarray:
        """The prior's scores (n,), each candidate's computed once; zeros without a prior."""
        if self.prior is None:
            return np.zeros(len(candidates))
        at = self.featurizer.positions(candidates)
        if len(self._known) <= at.max(initial=-1):
            self._known = np.concatenate([self._known, np.full(int(at.max()) + 1 + len(self._known), np.nan)])
        new = np.flatnonzero(np.isnan(self._known[at]))
        if len(new):
            self._known[at[new]] = self.prior.score(features[new])
        out: np.ndarray = self._known[at]
        return out

    def _fit(self) -> None:
        self._stale = False
        told = list(self._seen.values())
        features = self.featurizer.matrix([o.candidate for o in told])
        costs = np.array([np.nan if o.cost_us is None else o.cost_us for o in told])
        margins = []
        if self.prior is not None:
            scores = self._prior_scores([o.candidate for o in told], features)
            self._trust = trust(scores, labels(costs, replace(self.options, objective="log")), self.options.prior_trust)
            margins.append(self._trust * scores)
        self._booster = fit_groups([Group(features, costs)], self.featurizer.columns, self.options, self._seed, margins)
