"""Strategies against each other on made-up tables: the small version of the comparison on recorded ones.

All runs are deterministic. The bounds are those of the product (half the trials of annealing and of evolution, a quarter of
random search); `test_distinctiveness_pays_where_it_matters` fails when novelty has no effect.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest

from kronsched.search.simulate import SimulationResult, simulate
from kronsched.search.table import Table
from tests.search.synthetic import fused_table

SEEDS = 10


def tables() -> list[Table]:
    return [fused_table(1024), fused_table(1024, "b"), fused_table(16), fused_table(65536)]


def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(float(np.mean(np.log(values))))


def typical(result: SimulationResult) -> float:
    """Geometric mean over the seeds of the trials to 95 % of the optimum; a censored run counts as all its trials."""
    return geometric_mean([result.limit if (hit := r.reached[0.95]) is None else hit[0] for r in result.runs])


def median(result: SimulationResult) -> float:
    spread = result.trials_to(0.95)
    assert spread.median is not None
    return spread.median


@pytest.fixture(scope="module")
def distinctive() -> list[SimulationResult]:
    return [simulate(t, "distinctive", seeds=SEEDS, trials=256) for t in tables()]


@pytest.mark.parametrize("other", ["annealing", "evolutionary"])
def test_half_the_trials_of_model_guided_search_without_diversity(distinctive: list[SimulationResult], other: str) -> None:
    theirs = [simulate(t, other, seeds=SEEDS, trials=512) for t in tables()]
    assert geometric_mean([median(r) for r in distinctive]) <= 0.5 * geometric_mean([median(r) for r in theirs])


def test_a_quarter_of_the_trials_of_random_search(distinctive: list[SimulationResult]) -> None:
    random = [r.random_trials_to(0.95)[1] for r in distinctive]
    assert geometric_mean([median(r) for r in distinctive]) <= 0.25 * geometric_mean(random)


def test_no_run_is_stuck(distinctive: list[SimulationResult]) -> None:
    assert all(r.trials_to(0.95).censored == 0 for r in distinctive)


def test_distinctiveness_pays_where_it_matters() -> None:
    """Novelty does not pay on every table; on this one it did by a quarter when the defaults were chosen."""
    table = fused_table(65536, "b")
    on = simulate(table, "distinctive", seeds=12, trials=256)
    off = simulate(table, "distinctive", seeds=12, trials=256, options={"novelty": 0})
    assert typical(on) < 0.85 * typical(off)


def test_batches_are_distinctive(distinctive: list[SimulationResult]) -> None:
    for table, ours in zip(tables(), distinctive, strict=True):
        plain = simulate(table, "distinctive", seeds=3, trials=64, options={"novelty": 0, "explore": 0, "explore_least": 0})
        if np.mean([r.trials for r in plain.runs]) > 16:  # else most of the run is the start, which is alike
            assert np.mean([r.batch_distance for r in ours.runs]) > 1.1 * np.mean([r.batch_distance for r in plain.runs])


def test_search_is_cheap(distinctive: list[SimulationResult]) -> None:
    """The limit is 20 ms a candidate on an idle core; a loaded machine of a test run gets twice that."""
    assert np.median([r.search_ms for result in distinctive for r in result.runs]) < 40
