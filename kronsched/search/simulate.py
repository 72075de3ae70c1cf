"""Replays a strategy against a table: how strategies are compared, on a CPU, with no kernels run.

Read first: `simulate` (many seeds of one strategy) and `SimulationResult` (what comes out).
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from kronsched import registry
from kronsched.cost_model.base import CostModel
from kronsched.cost_model.features import Columns, Featurizer
from kronsched.cost_model.null import NullModel
from kronsched.cost_model.transfer import Prior
from kronsched.cost_model.xgb import XgbModel, XgbOptions
from kronsched.errors import ArgumentError
from kronsched.measure.base import Measured
from kronsched.search.base import Observation, SearchStrategy
from kronsched.search.quality import ModelQuality, coverage, model_quality, pairwise_distance
from kronsched.search.table import SimulatedMeasurer, Table
from kronsched.space import Candidate

SHARES = (0.90, 0.95, 0.99)
"""Shares of the optimum for which the trials to reach them, T_share, are reported."""
CURVE_AT = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 2048, 4096)


@dataclass(frozen=True)
class Spread:
    """Median and quartiles over seeds. None: more seeds than that were censored (did not get there within the trials)."""

    median: float | None
    q25: float | None
    q75: float | None
    censored: int

    @classmethod
    def of(cls, values: Sequence[float | None]) -> Spread:
        """Of values where None is censored."""
        ordered = sorted(np.inf if v is None else v for v in values)
        # Order statistics, not interpolation: half way to infinity is no number of trials.
        low, middle, high = (ordered[round(q * (len(ordered) - 1))] for q in (0.25, 0.5, 0.75))
        return cls(_finite(middle), _finite(low), _finite(high), sum(v is None for v in values))


@dataclass(frozen=True)
class Run:
    """One seed. reached: share of the optimum -> (trials, simulated seconds), None when censored."""

    seed: int
    trials: int
    best: tuple[float, ...]
    """Best cost after each trial as a share of the optimum, 0 before the first success."""
    reached: Mapping[float, tuple[int, float] | None]
    search_ms: float
    """Milliseconds of asking and telling a candidate, the model included."""
    batch_distance: float
    coverage: float
    quality: ModelQuality | None


@dataclass(frozen=True)
class SimulationResult:
    """Runs of one strategy on one table."""

    table: str
    strategy: str
    candidates: int
    optimum: float
    limit: int
    """Trials after which a run is censored."""
    reaching: Mapping[float, int]
    runs: tuple[Run, ...] = field(repr=False)

    def trials_to(self, share: float) -> Spread:
        """T_share in trials."""
        return Spread.of([None if (hit := r.reached[share]) is None else hit[0] for r in self.runs])

    def seconds_to(self, share: float) -> Spread:
        """T_share in simulated seconds of building and running; search itself is `search_ms`."""
        return Spread.of([None if (hit := r.reached[share]) is None else hit[1] for r in self.runs])

    def random_trials_to(self, share: float) -> tuple[float, float]:
        """(mean, median) of T_share of random search without repetition, calculated."""
        return random_trials(self.candidates, self.reaching[share])

    def curve(self) -> list[tuple[int, float, float, float]]:
        """(trials, q25, median, q75) of the best share of the optimum; a run that ended keeps its last value."""
        out = []
        for at in [n for n in CURVE_AT if n <= max(r.trials for r in self.runs)]:
            values = [r.best[min(at, r.trials) - 1] for r in self.runs if r.trials]
            low, middle, high = (float(q) for q in np.quantile(values, (0.25, 0.5, 0.75)))
            out.append((at, low, middle, high))
        return out

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        qualities = [r.quality for r in self.runs if r.quality is not None]
        return {
            "table": self.table,
            "strategy": self.strategy,
            "candidates": self.candidates,
            "optimum": self.optimum,
            "seeds": [r.seed for r in self.runs],
            "limit": self.limit,
            "reaching": {f"{s:.2f}": n for s, n in self.reaching.items()},
            "trials_to": {f"{s:.2f}": asdict(self.trials_to(s)) for s in SHARES},
            "seconds_to": {f"{s:.2f}": asdict(self.seconds_to(s)) for s in SHARES},
            "random_trials_to": {
                f"{s:.2f}": dict(zip(("mean", "median"), self.random_trials_to(s), strict=True)) for s in SHARES
            },
            "curve": [dict(zip(("trials", "q25", "median", "q75"), point, strict=True)) for point in self.curve()],
            "search_ms": float(np.mean([r.search_ms for r in self.runs])),
            "batch_distance": float(np.mean([r.batch_distance for r in self.runs])),
            "coverage": float(np.mean([r.coverage for r in self.runs])),
            "model": {k: float(np.mean([asdict(q)[k] for q in qualities])) for k in asdict(qualities[0])} if qualities else None,
        }


def simulate(
    table: Table,
    strategy: str | type[SearchStrategy] = "distinctive",
    *,
    seeds: int | Sequence[int] = 20,
    trials: int = 512,
    batch: int | None = None,
    options: Mapping[str, int | float] | None = None,
    model: XgbOptions | None = None,
    without: Sequence[str] = (),
    prior: Prior | None = None,
    default_first: bool = True,
    builders: int = 16,
    quality_at: int = 32,
) -> SimulationResult:
    """Run a strategy on a table for several seeds; a run ends at 0.99 of the optimum, after `trials`, or with the table.

    batch: candidates a round, default the strategy's own.  options: of the strategy.  model, without, prior: of the cost model
    (see `XgbModel`, `Featurizer`, `fit_prior`).  default_first: tell the strategy the schedule's default config, as `tune` does.
    builders: of the simulated machine; candidates run one at a time.  quality_at: observations after which the cost model is
    judged on the rest of the table.  Raises ArgumentError for values that are not allowed.
    """
    cls = registry.strategy(strategy) if isinstance(strategy, str) else strategy
    seeds = list(range(seeds)) if isinstance(seeds, int) else list(seeds)
    if not seeds:
        raise ArgumentError("seeds: at least one is needed")
    for name, value in (("trials", trials), ("builders", builders), ("batch", 1 if batch is None else batch)):
        if value < 1:
            raise ArgumentError(f"{name}={value} is not allowed: an int ≥ 1 is needed")
    start = table.default() if default_first else []
    runs = []
    for seed in seeds:
        cost_model = model_for(table, cls, seed, model, without, prior)
        search = cls(table.space, cost_model, seed, start=start, options=options)
        runs.append(_run(table, search, seed, trials, batch or search.batch_size, builders, quality_at))
    reaching = {share: table.reaching(share) for share in SHARES}
    return SimulationResult(table.name, cls.name, len(table), table.optimum, trials, reaching, tuple(runs))


def model_for(
    table: Table,
    strategy: type[SearchStrategy],
    seed: int = 0,
    options: XgbOptions | None = None,
    without: Sequence[str] = (),
    prior: Prior | None = None,
) -> CostModel:
    """A fresh cost model for a run on a table."""
    if not strategy.uses_model:
        return NullModel(table.space)
    # A copy: a run must not add columns to the next one's.
    columns = None if prior is None else Columns(prior.columns.names)
    s = table.subject
    if s is None:
        featurizer = Featurizer(table.space, columns=columns, without=without)
    else:
        featurizer = Featurizer(table.space, s.workload, s.device, s.schedule, columns, without)
    return XgbModel(featurizer, options, seed, prior)


def merge(parts: Sequence[SimulationResult]) -> SimulationResult:
    """One result from those of different seeds of the same strategy on the same table."""
    runs = tuple(sorted((run for part in parts for run in part.runs), key=lambda run: run.seed))
    return replace(parts[0], runs=runs)


def random_trials(candidates: int, good: int) -> tuple[float, float]:
    """(mean, median) of the draws without repetition from `candidates` until one of `good` is drawn."""
    if not 1 <= good <= candidates:
        raise ArgumentError(f"good={good} is not allowed: 1 to {candidates}")
    miss, n = 1.0, 0
    while miss > 0.5:
        miss *= (candidates - good - n) / (candidates - n)
        n += 1
    return (candidates + 1) / (good + 1), float(n)


def _run(table: Table, search: SearchStrategy, seed: int, trials: int, batch: int, builders: int, quality_at: int) -> Run:
    measurer = SimulatedMeasurer(table)
    best, clock, spent = float("inf"), 0.0, 0.0
    curve: list[float] = []
    asked: list[Candidate] = []
    distances: list[float] = []
    reached: dict[float, tuple[int, float] | None] = dict.fromkeys(SHARES)
    quality = None
    while len(asked) < trials and reached[SHARES[-1]] is None:
        begin = time.perf_counter()
        candidates = search.ask(min(batch, trials - len(asked)))
        spent += time.perf_counter() - begin
        if not candidates:
            break
        results = list(measurer.measure(candidates))
        finished, clock = _finish_times(results, builders, clock)
        for result, at in zip(results, finished, strict=True):
            if result.median_us is not None:
                best = min(best, result.median_us)
            asked.append(result.candidate)
            curve.append(table.optimum / best)
            for share in SHARES:
                if reached[share] is None and best <= table.optimum / share:
                    reached[share] = len(curve), at
        begin = time.perf_counter()
        search.tell([Observation(r.candidate, r.status, r.median_us, r.build.source_sha256) for r in results])
        spent += time.perf_counter() - begin
        if len(candidates) > 1:
            distances.append(pairwise_distance(search.model.embed(candidates)))
        done = len(asked) >= trials or reached[SHARES[-1]] is not None
        if quality is None and search.uses_model and search.model.trained and (done or len(asked) >= quality_at):
            quality = model_quality(search.model, table, search.seen)
    return Run(
        seed,
        len(asked),
        tuple(curve),
        reached,
        1e3 * spent / max(1, len(asked)),
        float(np.mean(distances)) if distances else 0.0,
        coverage(table.space, asked[:32]),
        quality,
    )


def _finish_times(results: Sequence[Measured], builders: int, start: float) -> tuple[list[float], float]:
    """When each result is there, and the end of the batch: builds in parallel, each run as its build is done, one at a time."""
    free = [start] * builders
    built = []
    for i, result in enumerate(results):
        done = heapq.heappop(free) + result.build.seconds
        heapq.heappush(free, done)
        built.append((done, i))
    finished, runner = [0.0] * len(results), start
    for done, i in sorted(built):
        run = results[i].run
        if run is None:
            finished[i] = done
        else:
            runner = finished[i] = max(runner, done) + run.seconds
    return finished, max(finished, default=start)


def _finite(value: float) -> float | None:
    return None if np.isinf(value) else float(value)
