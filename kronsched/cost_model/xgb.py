"""The learned cost model: gradient-boosted trees that rank the candidates of one workload.

Read first: `XgbModel.predict` (fits when there is something new), `labels` (what is learned), `Booster` (a fitted model and its
file format), `fit_groups` (a prior from other shapes).

A tuning run has tens of observations, so the model is refitted from all of them each round (about 20 ms). What other shapes
have taught comes in as a prior: a second, fixed booster whose score is the margin the fitted trees start from. So a wrong prior
is corrected by few observations, and its size costs nothing in a round.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from kronsched.cost_model.base import CostModel, ModelError
from kronsched.cost_model.features import Columns, Featurizer
from kronsched.errors import choose
from kronsched.space import Candidate

if TYPE_CHECKING:
    from kronsched.search.base import Observation

FORMAT = 1
LEVELS = 31
"""Grades of relevance."""
OBJECTIVES = ("rank", "log", "throughput")


@dataclass(frozen=True)
class XgbOptions:
    """Options of `XgbModel`.

    objective: "rank" (pairwise ranking), "log" (regression on log time) or "throughput" (regression on best time / time).
    trees, depth, eta: size of the ensemble.  pairs: pairs drawn a candidate for ranking.  clip: times over e^clip times the best
    are all as bad.  prior_weight: factor on the score of the prior.  prior_fades: observations after which that factor has
    halved, since what was measured here says more than other shapes do.  threads: of xgboost.
    """

    objective: str = "rank"
    trees: int = 60
    depth: int = 4
    eta: float = 0.15
    pairs: int = 8
    clip: float = 2.5
    prior_weight: float = 0.3
    prior_fades: float = 16.0
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

    # -- file ---------------------------------------------------------------------------------------

    def save(self, path: str | Path, options: XgbOptions | None = None) -> None:
        """Write one JSON object: format, xgboost version, columns, options, the model in xgboost's own JSON."""
        import xgboost

        data = {
            "format": FORMAT,
            "xgboost": xgboost.__version__,
            "columns": list(self.columns),
            "options": None if options is None else asdict(options),
            "model": json.loads(bytes(self._model.save_raw("json"))),
        }
        Path(path).write_text(json.dumps(data, separators=(",", ":")), encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path, columns: Columns | None = None, threads: int = 1) -> Booster:
        """Read what `save` wrote; nothing is unpickled.

        columns: empty columns are filled with the model's, others must begin with them.  Raises ModelError when the file is no
        model, was written by a newer format or another major version of xgboost, or has other columns.
        """
        import xgboost

        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
            form, version, names, model = data["format"], str(data["xgboost"]), list(data["columns"]), data["model"]
        except OSError as e:
            raise ModelError(f"cost model {str(path)!r} cannot be read: {e.strerror or e}") from None
        except (ValueError, KeyError, TypeError, RecursionError) as e:
            raise ModelError(f"cost model {str(path)!r} is damaged: {type(e).__name__}: {e}") from None
        if form != FORMAT:
            raise ModelError(f"cost model {str(path)!r}: format={form!r} is not supported, only {FORMAT}")
        if version.split(".")[0] != xgboost.__version__.split(".")[0]:
            raise ModelError(f"cost model {str(path)!r} was written by xgboost {version}, this is {xgboost.__version__}")
        if not all(isinstance(n, str) for n in names):
            raise ModelError(f"cost model {str(path)!r} is damaged: columns must be strings")
        if columns is not None:
            if len(columns) == 0:
                for name in names:
                    columns.index(name)
            elif columns.names[: len(names)] != names:
                raise ModelError(f"cost model {str(path)!r} has other columns than are used here")
        booster = xgboost.Booster({"nthread": threads})
        try:
            booster.load_model(bytearray(json.dumps(model), "utf-8"))
            width = booster.num_features()
        except xgboost.core.XGBoostError as e:
            raise ModelError(f"cost model {str(path)!r} is damaged: {str(e).splitlines()[0]}") from None
        if width != len(names):
            raise ModelError(f"cost model {str(path)!r} is damaged: {len(names)} columns named, {width} in the model")
        return cls(booster, names)


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
    data = xgboost.DMatrix(np.where(np.isfinite(rows), rows, np.nan), label=np.concatenate([y for _, y, _ in parts]))
    params: dict[str, Any] = {
        "max_depth": options.depth,
        "eta": options.eta,
        "nthread": options.threads,
        "seed": seed,
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
    else:
        params["base_score"] = float(np.mean(np.concatenate([y for _, y, _ in parts])))
    if margins:
        data.set_base_margin(np.concatenate([margins[i] for _, _, i in parts]))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        model = xgboost.train(params, data, num_boost_round=options.trees)
    return Booster(model, columns.names)


class XgbModel(CostModel):
    """Ranks the candidates of one space for one workload. Deterministic given seed and observations.

    featurizer: features of the candidates.  prior: a booster from other shapes, fitted on columns that the featurizer's begin
    with.  Before two distinguishable observations the score is the prior's, or zero without one.
    """

    def __init__(
        self, featurizer: Featurizer, options: XgbOptions | None = None, seed: int = 0, prior: Booster | None = None
    ) -> None:
        """Start with the prior only."""
        self.featurizer = featurizer
        self.options = options or XgbOptions()
        self._seed = seed
        self._prior = prior
        self._seen: dict[str, Observation] = {}
        self._booster: Booster | None = None
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
        if not candidates or (self._booster is None and self._prior is None):
            return np.zeros(len(candidates))
        features = self.featurizer.matrix(candidates)
        margin = self._margin(features)
        return margin if self._booster is None else self._booster.score(features, margin)

    def embed(self, candidates: Sequence[Candidate]) -> np.ndarray:
        """Normalised knobs."""
        return self.featurizer.embed(candidates)

    @property
    def trained(self) -> bool:
        """Whether there is a prior or something was learned."""
        if self._stale:
            self._fit()
        return self._prior is not None or self._booster is not None

    def booster(self) -> Booster | None:
        """What was fitted on the observations so far."""
        if self._stale:
            self._fit()
        return self._booster

    def _margin(self, features: np.ndarray) -> np.ndarray:
        if self._prior is None:
            return np.zeros(len(features))
        fade = 1.0 + len(self._seen) / self.options.prior_fades
        return self.options.prior_weight / fade * self._prior.score(features)

    def _fit(self) -> None:
        self._stale = False
        told = list(self._seen.values())
        features = self.featurizer.matrix([o.candidate for o in told])
        costs = np.array([np.nan if o.cost_us is None else o.cost_us for o in told])
        margins = [] if self._prior is None else [self._margin(features)]
        self._booster = fit_groups([Group(features, costs)], self.featurizer.columns, self.options, self._seed, margins)
