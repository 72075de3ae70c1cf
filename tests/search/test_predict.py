"""The answer without measuring, and a search over several spaces."""

from __future__ import annotations

from collections import Counter

import numpy as np

from kronsched.cost_model.features import Columns, Featurizer
from kronsched.cost_model.null import NullModel
from kronsched.cost_model.transfer import fit_prior
from kronsched.cost_model.xgb import XgbModel
from kronsched.search.base import Observation
from kronsched.search.portfolio import Portfolio
from kronsched.search.predict import predict_best
from kronsched.search.random import Random
from kronsched.space import Candidate, Knob, SearchSpace
from tests.search.synthetic import H200, FusedSchedule, fused_table, records

# -- prediction -----------------------------------------------------------------------------------------


def test_a_model_that_knows_nothing_answers_with_the_default() -> None:
    table = fused_table()
    [default] = table.default()
    assert predict_best(table.space, NullModel(table.space), default) == [default]


def test_a_model_of_other_shapes_answers_with_something_better_and_ends_with_the_default() -> None:
    table = fused_table(1024)
    prior = fit_prior(FusedSchedule(), H200, records(256, 300) + records(4096, 300))
    assert prior is not None and table.subject is not None
    s = table.subject
    model = XgbModel(Featurizer(table.space, s.workload, s.device, s.schedule, Columns(prior.columns.names)), prior=prior.booster)
    [default] = table.default()
    ranked = predict_best(table.space, model, default)
    assert ranked[-1] == default and len({c.key for c in ranked}) == len(ranked) and 2 <= len(ranked) <= 9
    scores = model.predict(ranked[:-1])
    assert list(scores) == sorted(scores, reverse=True)
    assert scores[0] >= np.quantile(model.predict([c for c, _ in table]), 0.99)
    first, last = table.get(ranked[0]), table.get(default)
    assert first is not None and last is not None and first.cost and last.cost and first.cost < last.cost


# -- portfolio ------------------------------------------------------------------------------------------


def spaces(*sizes: int) -> list[SearchSpace]:
    return [SearchSpace(f"s{i}", [Knob("a", tuple(range(n)))]) for i, n in enumerate(sizes)]


def portfolio(*sizes: int) -> Portfolio:
    return Portfolio([Random(s, NullModel(s)) for s in spaces(*sizes)])


def counts(candidates: list[Candidate]) -> dict[str, int]:
    return dict(Counter(c.space for c in candidates))


def tell(p: Portfolio, candidates: list[Candidate], costs: dict[str, float]) -> None:
    p.tell([Observation(c, "ok", costs[c.space]) for c in candidates])


def test_one_space_passes_through() -> None:
    p = portfolio(20)
    assert len(p.ask(8)) == 8 and p.batch_size == 8 and len(p.ask(100)) == 12 and p.ask(1) == []


def test_before_any_result_spaces_share_alike() -> None:
    assert counts(portfolio(99, 99).ask(8)) == {"s0": 4, "s1": 4}
    p = portfolio(99, 99, 99)
    assert counts(p.ask(2) + p.ask(2) + p.ask(2)) == {"s0": 2, "s1": 2, "s2": 2}


def test_the_best_space_gets_half_more_and_the_others_are_still_looked_at() -> None:
    p = portfolio(999, 999)
    tell(p, p.ask(8), {"s0": 5.0, "s1": 3.0})
    assert counts(p.ask(8)) == {"s0": 2, "s1": 6}
    ones = [p.ask(1)[0].space for _ in range(4)]
    assert set(ones) == {"s0", "s1"}


def test_an_exhausted_space_leaves_its_share_to_the_others() -> None:
    p = portfolio(3, 99)
    tell(p, p.ask(8), {"s0": 1.0, "s1": 2.0})
    assert counts(p.ask(16)) == {"s1": 16}
    rest = p.ask(500)
    assert len(rest) == 99 - 5 - 16 and p.ask(4) == []
