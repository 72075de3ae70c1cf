"""The ranker: what it learns of costs, its prior, its speed."""

from __future__ import annotations

import time

import numpy as np
import pytest

from kronsched.cost_model.features import Columns, Featurizer
from kronsched.cost_model.xgb import Group, XgbModel, XgbOptions, fit_groups, labels, trust
from kronsched.errors import ArgumentError
from kronsched.search.base import Observation
from tests.search.synthetic import fused_table

NAN = float("nan")


def observations(n: int = 60) -> list[Observation]:
    return [Observation(c, e.status, e.cost) for c, e in list(fused_table())[:: 2470 // max(n, 1)][:n]]


def model(**options: object) -> XgbModel:
    table = fused_table()
    assert table.subject is not None
    s = table.subject
    return XgbModel(Featurizer(table.space, s.workload, s.device, s.schedule), XgbOptions(**options))  # type: ignore[arg-type]


# -- labels ---------------------------------------------------------------------------------------------


def test_rank_labels_grade_log_time_and_put_failures_last() -> None:
    got = labels(np.array([1.0, 2.0, 4.0, NAN]), XgbOptions())
    assert got is not None and got.tolist() == [31.0, 16.0, 1.0, 0.0]


def test_log_and_throughput_labels() -> None:
    costs = np.array([1.0, 2.0, 100.0, NAN])
    log = labels(costs, XgbOptions(objective="log", clip=2.0))
    assert log is not None
    np.testing.assert_allclose(log, [0, -np.log(2), -2, -2])
    share = labels(costs, XgbOptions(objective="throughput", clip=10.0))
    assert share is not None
    np.testing.assert_allclose(share, [1, 0.5, 0.01, 0], atol=1e-12)


@pytest.mark.parametrize("costs", [[], [NAN], [NAN, NAN], [3.0], [3.0, 3.0]])
def test_nothing_to_learn(costs: list[float]) -> None:
    for objective in ("rank", "log", "throughput"):
        assert labels(np.array(costs), XgbOptions(objective=objective)) is None


def test_unknown_objective() -> None:
    with pytest.raises(ArgumentError, match="objective='best'"):
        XgbOptions(objective="best")


# -- fitting --------------------------------------------------------------------------------------------


def test_groups_are_ranked_within_themselves() -> None:
    """Two workloads of very different times: the same column decides in both, the level between them is never learned."""
    x = np.arange(20, dtype=np.float32)
    groups = [Group(np.stack([x, np.full(20, g, np.float32)], axis=1), (x + 1.0) * 1000.0**g) for g in range(2)]
    booster = fit_groups(groups, Columns(["x", "group"]), XgbOptions())
    assert booster is not None
    fast, slow = (booster.score(g.features) for g in groups)
    assert fast[0] > fast[-1] and slow[0] > slow[-1]
    np.testing.assert_allclose(fast, slow, atol=0.3 * np.ptp(fast))


def test_a_group_that_teaches_nothing_is_left_out() -> None:
    bad = Group(np.zeros((3, 2), np.float32), np.array([NAN, NAN, NAN]))
    assert fit_groups([bad], Columns(["x", "y"]), XgbOptions()) is None
    x = np.arange(10, dtype=np.float32)
    good = Group(x[:, None], x + 1.0)  # an older row: one column only
    booster = fit_groups([bad, good], Columns(["x", "y"]), XgbOptions())
    assert booster is not None and booster.score(np.array([[0.0], [9.0]], np.float32))[0] > 0


def test_columns_that_are_nan_or_constant_throughout() -> None:
    x = np.arange(16, dtype=np.float32)
    features = np.stack([np.full(16, np.nan, np.float32), np.full(16, 5, np.float32), x, np.full(16, np.inf, np.float32)], axis=1)
    booster = fit_groups([Group(features, x + 1.0)], Columns(["nan", "constant", "x", "inf"]), XgbOptions())
    assert booster is not None
    scores = booster.score(np.where(np.isfinite(features), features, np.nan))
    assert np.isfinite(scores).all() and scores[0] > scores[-1]


def test_a_wrong_prior_is_corrected_and_a_right_one_helps() -> None:
    table = fused_table()
    rest = [(c, e.cost) for c, e in table if e.cost is not None][1::7]
    costs = np.array([cost for _, cost in rest])

    def order(prior_costs: np.ndarray | None, told: int) -> float:
        columns, prior = Columns(), None
        assert table.subject is not None
        s = table.subject
        featurizer = Featurizer(table.space, s.workload, s.device, s.schedule, columns)
        if prior_costs is not None:
            prior = fit_groups([Group(featurizer.matrix([c for c, _ in rest]), prior_costs)], columns, XgbOptions())
        m = XgbModel(featurizer, prior=prior)
        assert m.trained == (prior is not None)
        m.update(observations(told))
        scores = m.predict([c for c, _ in rest])
        a, b = np.triu_indices(len(costs), 1)
        return float(np.mean(np.sign(scores[a] - scores[b]) == np.sign(costs[b] - costs[a])))

    cold = order(None, 16)
    assert order(costs, 0) > 0.85 and order(costs, 16) > cold
    assert order(1 / costs, 0) < 0.2 and order(1 / costs, 100) > 0.7


def test_a_fit_of_500_rows_is_quick() -> None:
    m = model()
    m.update(observations(494))
    candidates = [c for c, _ in fused_table()][:64]
    m.predict(candidates)
    begin = time.process_time()
    m.update(observations(1))
    m.predict(candidates)
    assert time.process_time() - begin < 0.25  # 0.05 on an idle core


# -- trust in a prior -----------------------------------------------------------------------------------


def test_trust_follows_the_evidence() -> None:
    prior = np.linspace(-1, 0, 20)
    assert trust(prior, None, 1.0) == 1.0 and trust(prior[:1], prior[:1], 1.0) == 1.0
    assert trust(prior, prior, 1.0) == pytest.approx(1.0)
    assert trust(prior, -prior, 0.1) == 0.0
    noise = np.tile([0.0, 1.0, 1.0, 0.0], 5)  # no slope on the prior
    assert 0.2 < trust(prior, noise, 1.0) < 0.6
    assert trust(np.zeros(20), noise, 1.0) == 1.0  # the prior said nothing, and nothing was held against it


def test_a_prior_that_is_wrong_throughout_loses_its_weight() -> None:
    class Upside:
        def score(self, features: np.ndarray) -> np.ndarray:
            return np.linspace(-1, 0, len(features))

    m = model()
    m.prior = Upside()
    told = sorted(observations(40), key=lambda o: o.cost_us or np.inf)  # the prior likes the last ones best
    m.update(told)
    scores = m.predict([o.candidate for o in told])
    assert np.argmax(scores) < 10
