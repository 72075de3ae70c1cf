"""Strategies against each other on recorded tables, many runs on all cores: the evidence that one of them is better.

Read first: `Variant` (one row of the result), `compare` (runs them all), `Comparison` (medians a table, geometric means, JSON).

Cold, every strategy knows the same: nothing; not even the schedule's default config. Warm, it starts from the default and from a
prior fitted on all other tables and on the logs of other shapes: never on a record of the table's own workload.
"""

from __future__ import annotations

import functools
import math
import multiprocessing
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kronsched import registry
from kronsched.cost_model.features import GROUPS
from kronsched.cost_model.transfer import Prior, Shape, fit_prior, records_of_space, shapes_of
from kronsched.errors import ArgumentError
from kronsched.search.base import SearchStrategy
from kronsched.search.simulate import SHARES, SimulationResult, merge, simulate
from kronsched.search.table import Table
from kronsched.search.zero import ZeroTrial, zero_trial

CHUNK = 5
"""Seeds of a job: small enough to keep all cores busy to the end."""
COUNTED = 0.95
"""The share of the optimum for which ratios to other strategies are reported."""


@dataclass(frozen=True)
class Variant:
    """A strategy and how it is run. without: groups of feature columns left out.  warm: with prior and default config."""

    label: str
    strategy: type[SearchStrategy]
    warm: bool = False
    without: tuple[str, ...] = ()
    options: Mapping[str, int | float] = field(default_factory=dict)


def variants_of(strategies: Sequence[str], warm: bool = True) -> list[Variant]:
    """Each strategy cold and, where it uses a cost model, warm."""
    out = []
    for name in dict.fromkeys(strategies):
        cls = registry.strategy(name)
        out.append(Variant(name, cls))
        if warm and cls.uses_model:
            out.append(Variant(f"{name}, warm", cls, warm=True))
    return out


def ablation_of(strategy: str = "distinctive") -> list[Variant]:
    """The strategy, and the strategy without one of its parts: distinctiveness, each group of features, each when warm too."""
    cls = registry.strategy(strategy)
    out = [Variant(strategy, cls)]
    if hasattr(cls.Options(), "novelty"):
        out.append(Variant("no distinctiveness", cls, options={"novelty": 0}))
    # Cold, columns that are the same for every config of a table cannot matter.
    out += [Variant(f"no {group} features", cls, without=(group,)) for group in GROUPS if group in ("knob", "sched")]
    out.append(Variant(f"{strategy}, warm", cls, warm=True))
    if hasattr(cls.Options(), "novelty"):
        out.append(Variant("no distinctiveness, warm", cls, warm=True, options={"novelty": 0}))
    out += [Variant(f"no {group} features, warm", cls, warm=True, without=(group,)) for group in ("knob", "sched")]
    return out


@dataclass(frozen=True)
class Comparison:
    """Results by table and variant, both in the order asked for."""

    tables: tuple[str, ...]
    variants: tuple[str, ...]
    results: Mapping[tuple[str, str], SimulationResult]
    zero: tuple[ZeroTrial, ...] = ()

    def row(self, variant: str) -> list[SimulationResult]:
        """The results of a variant on each table."""
        return [self.results[table, variant] for table in self.tables]

    def mean_trials(self, variant: str, share: float = COUNTED) -> float:
        """Geometric mean over the tables of the median trials; a table whose median is censored counts with the limit."""
        return _geometric(r.limit if (m := r.trials_to(share).median) is None else m for r in self.row(variant))

    def mean_seconds(self, variant: str, share: float = COUNTED) -> float | None:
        """As `mean_trials`, of simulated seconds; None when a median is censored."""
        medians = [r.seconds_to(share).median for r in self.row(variant)]
        return None if None in medians else _geometric(m for m in medians if m is not None)

    def random_trials(self, share: float = COUNTED) -> float:
        """Geometric mean over the tables of the calculated median of random search."""
        return _geometric(r.random_trials_to(share)[1] for r in self.row(self.variants[0]))

    def censored(self, variant: str, share: float = COUNTED) -> int:
        """Runs on all tables that did not get there."""
        return sum(r.trials_to(share).censored for r in self.row(variant))

    def zero_mean(self) -> float | None:
        """Geometric mean over the tables of the share of the optimum that the answer without measuring reaches."""
        return _geometric(z.share for z in self.zero) if self.zero else None

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "tables": list(self.tables),
            "variants": list(self.variants),
            "means": {
                v: {
                    f"{s:.2f}": {
                        "trials": self.mean_trials(v, s),
                        "seconds": self.mean_seconds(v, s),
                        "censored": self.censored(v, s),
                        "share_of_random": self.mean_trials(v, s) / self.random_trials(s),
                    }
                    for s in SHARES
                }
                for v in self.variants
            },
            "random_calculated": {f"{s:.2f}": self.random_trials(s) for s in SHARES},
            "results": {t: {v: self.results[t, v].to_dict() for v in self.variants} for t in self.tables},
            "zero_trial": {"mean": self.zero_mean(), "tables": [z.to_dict() for z in self.zero]},
        }


@dataclass(frozen=True)
class Job:
    """What a worker process does at a time. paths: all tables; index: the one that is run on."""

    paths: tuple[str, ...]
    logs: tuple[str, ...]
    index: int
    variant: Variant | None
    """None: the answer without measuring instead of a search."""
    seeds: tuple[int, ...]
    trials: int


def compare(
    paths: Sequence[str | os.PathLike[str]],
    variants: Sequence[Variant],
    *,
    seeds: int = 20,
    trials: int = 512,
    logs: Sequence[str | os.PathLike[str]] = (),
    workers: int | None = None,
    zero: bool = True,
    progress: Callable[[int, int], None] | None = None,
) -> Comparison:
    """Run every variant on every table for several seeds.

    paths: tables (see `Table.load`).  logs: further tuning logs for the priors.  workers: processes, None for the cores; 1 runs
    here.  zero: also judge the answer without measuring.  progress: called with (jobs done, jobs).  Raises ArgumentError before
    any work for a table that cannot be used, or when a label or a table repeats.
    """
    files, names = tuple(map(str, paths)), [_name(p) for p in paths]
    labels = [v.label for v in variants]
    for what, given in (("tables", names), ("variants", labels)):
        if not given:
            raise ArgumentError(f"{what}: at least one is needed")
        if len(set(given)) != len(given):
            raise ArgumentError(f"{what}={given} is not allowed: one of them repeats")
    for what, value in (("seeds", seeds), ("trials", trials), ("workers", 1 if workers is None else workers)):
        if value < 1:
            raise ArgumentError(f"{what}={value} is not allowed: an int ≥ 1 is needed")
    for path in files:
        _table(path)
    jobs = list(_jobs(files, tuple(map(str, logs)), variants, seeds, trials, zero))
    parts: dict[tuple[int, str], list[SimulationResult]] = {}
    zeros: dict[int, ZeroTrial] = {}
    for done, (job, found) in enumerate(_run_all(jobs, workers or os.cpu_count() or 1), start=1):
        if isinstance(found, SimulationResult):
            assert job.variant is not None
            parts.setdefault((job.index, job.variant.label), []).append(found)
        elif found is not None:
            zeros[job.index] = found
        if progress is not None:
            progress(done, len(jobs))
    results = {(names[i], label): replace(merge(p), table=names[i]) for (i, label), p in parts.items()}
    return Comparison(tuple(names), tuple(labels), results, tuple(zeros[i] for i in sorted(zeros)))


def _jobs(
    files: tuple[str, ...], logs: tuple[str, ...], variants: Sequence[Variant], seeds: int, trials: int, zero: bool
) -> Iterator[Job]:
    """Table by table, so that a worker fits few priors."""
    for index in range(len(files)):
        if zero:
            yield Job(files, logs, index, None, (), trials)
        for variant in variants:
            for first in range(0, seeds, CHUNK):
                yield Job(files, logs, index, variant, tuple(range(first, min(seeds, first + CHUNK))), trials)


def _run_all(jobs: Sequence[Job], workers: int) -> Iterator[tuple[Job, SimulationResult | ZeroTrial | None]]:
    if workers == 1:
        for job in jobs:
            yield job, _run(job)
        return
    # Spawned, not forked: xgboost's threads do not survive a fork.
    with ProcessPoolExecutor(min(workers, len(jobs)), multiprocessing.get_context("spawn")) as pool:
        futures = {pool.submit(_run, job): job for job in jobs}
        try:
            for future in as_completed(futures):
                yield futures[future], future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _run(job: Job) -> SimulationResult | ZeroTrial | None:
    table, variant = _table(job.paths[job.index]), job.variant
    if variant is None:
        prior = _prior(job.paths, job.logs, job.index, ())
        return None if prior is None else zero_trial(table, prior, _name(job.paths[job.index]))
    prior = _prior(job.paths, job.logs, job.index, variant.without) if variant.warm else None
    return simulate(
        table,
        variant.strategy,
        seeds=job.seeds,
        trials=job.trials,
        options=variant.options,
        without=variant.without,
        prior=prior,
        default_first=variant.warm,
    )


# -- what worker processes keep -------------------------------------------------------------------------


@functools.lru_cache(maxsize=64)
def _table(path: str) -> Table:
    return Table.load(path)


@functools.lru_cache(maxsize=8)
def _prior(paths: tuple[str, ...], logs: tuple[str, ...], index: int, without: tuple[str, ...]) -> Prior | None:
    """Fitted on everything of the table's schedule but its own workload."""
    own = _table(paths[index]).shape()
    if own is None:
        return None
    shapes = [s for p in paths if (s := _table(p).shape()) is not None] + list(_log_shapes(logs, own.schedule.name))
    others = [s for s in shapes if s.schedule.name == own.schedule.name and s.workload.key != own.workload.key]
    return fit_prior(others, without=without)


@functools.lru_cache(maxsize=16)
def _log_shapes(logs: tuple[str, ...], schedule: str) -> tuple[Shape, ...]:
    records = [r for path in logs for r in records_of_space(Path(path), schedule)]
    return tuple(shapes_of(registry.schedule(schedule), None, records))


def _name(path: str | os.PathLike[str]) -> str:
    return Path(path).name.removesuffix(".gz").removesuffix(".jsonl")


def _geometric(values: Iterator[float] | Sequence[float]) -> float:
    logs = [math.log(max(1e-9, v)) for v in values]
    return math.exp(sum(logs) / len(logs))
