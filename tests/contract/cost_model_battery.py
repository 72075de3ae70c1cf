"""The contract of a cost model. A subclass makes one for a space and gets the whole battery."""

from __future__ import annotations

import numpy as np
import pytest

from kronsched.cost_model.base import CostModel
from kronsched.search.base import Observation
from kronsched.space import Candidate, Knob, SearchSpace

SPACE = SearchSpace(
    "made_up", [Knob("a", tuple(range(12))), Knob("kind", ("x", "y")), Knob("on", (False, True)), Knob("one", (1,))]
)


def cost(candidate: Candidate) -> float:
    c = candidate.config
    return 1.0 + abs(int(c["a"]) - 4) + (3.0 if c["kind"] == "y" else 0.0)


class CostModelBattery:
    """Override `make`; `learns` is False for a model that ignores observations."""

    learns = True

    def make(self, space: SearchSpace, seed: int = 0) -> CostModel:
        raise NotImplementedError

    def told(self, n: int = 24, failing: int = 0) -> list[Observation]:
        candidates = list(SPACE)[::2][:n]
        return [Observation(c, "crash", None) if i < failing else Observation(c, "ok", cost(c)) for i, c in enumerate(candidates)]

    def check(self, model: CostModel, candidates: list[Candidate]) -> np.ndarray:
        scores = model.predict(candidates)
        assert scores.shape == (len(candidates),) and scores.dtype == np.float64 and np.isfinite(scores).all()
        return scores

    def test_before_any_observation_all_scores_are_equal(self) -> None:
        model = self.make(SPACE)
        assert not model.trained
        assert np.ptp(self.check(model, list(SPACE))) == 0
        model.update([])
        assert not model.trained and np.ptp(self.check(model, list(SPACE))) == 0

    def test_no_candidates(self) -> None:
        model = self.make(SPACE)
        assert self.check(model, []).shape == (0,)
        model.update(self.told())
        assert self.check(model, []).shape == (0,)
        assert model.embed([]).shape == (0, model.embed(list(SPACE)).shape[1])

    def test_higher_is_better(self) -> None:
        model = self.make(SPACE)
        model.update(self.told())
        assert model.trained == self.learns
        candidates = list(SPACE)[1::2]
        scores, costs = self.check(model, candidates), np.array([cost(c) for c in candidates])
        if self.learns:
            a, b = np.triu_indices(len(costs), 1)
            right = np.sign(scores[a] - scores[b]) == np.sign(costs[b] - costs[a])
            assert right[costs[a] != costs[b]].mean() > 0.8
        else:
            assert np.ptp(scores) == 0

    def test_failures_are_worse_than_anything(self) -> None:
        if not self.learns:
            return
        model = self.make(SPACE)
        candidates = list(SPACE)
        model.update([Observation(c, "ok", cost(c)) if c.config["a"] != 4 else Observation(c, "crash", None) for c in candidates])
        failed = np.array([c.config["a"] == 4 for c in candidates])
        scores = self.check(model, candidates)
        assert scores[failed].max() < np.median(scores[~failed])

    @pytest.mark.parametrize("n", [1, 2])
    def test_hardly_any_observation(self, n: int) -> None:
        model = self.make(SPACE)
        model.update(self.told(n))
        self.check(model, list(SPACE))

    def test_all_failing(self) -> None:
        model = self.make(SPACE)
        model.update(self.told(24, failing=24))
        assert not model.trained and np.ptp(self.check(model, list(SPACE))) == 0

    def test_all_equal(self) -> None:
        model = self.make(SPACE)
        model.update([Observation(o.candidate, "ok", 5.0) for o in self.told()])
        assert np.ptp(self.check(model, list(SPACE))) == 0

    def test_one_config(self) -> None:
        space = SearchSpace("one", [Knob("a", (1,))])
        model = self.make(space)
        only = list(space)
        model.update([Observation(only[0], "ok", 3.0)])
        assert self.check(model, only).shape == (1,)
        assert model.embed(only).shape[0] == 1

    def test_told_twice_counts_as_told_last(self) -> None:
        a, b = self.make(SPACE), self.make(SPACE)
        wrong = [Observation(o.candidate, "ok", 100.0 - (o.cost_us or 0)) for o in self.told()]
        a.update(wrong)
        a.predict(list(SPACE))
        a.update(self.told())
        b.update(self.told())
        np.testing.assert_array_equal(a.predict(list(SPACE)), b.predict(list(SPACE)))

    def test_is_deterministic_and_independent_of_how_results_came(self) -> None:
        a, b = self.make(SPACE, seed=5), self.make(SPACE, seed=5)
        a.update(self.told())
        for o in self.told():
            b.update([o])
            b.predict([o.candidate])
        np.testing.assert_array_equal(a.predict(list(SPACE)), b.predict(list(SPACE)))
        one_by_one = np.concatenate([a.predict([c]) for c in SPACE])
        np.testing.assert_allclose(a.predict(list(SPACE)), one_by_one, rtol=1e-6, atol=1e-6)

    def test_embedding_is_normalised(self) -> None:
        model = self.make(SPACE)
        points = model.embed(list(SPACE))
        assert points.dtype == np.float64 and np.isfinite(points).all() and points.min() >= 0 and points.max() <= 1
        first, last = (
            next(c for c in SPACE if c.config["a"] == a and c.config["kind"] == "x" and not c.config["on"]) for a in (0, 11)
        )
        near = next(c for c in SPACE if c.config["a"] == 1 and c.config["kind"] == "x" and not c.config["on"])
        other = next(c for c in SPACE if c.config["a"] == 0 and c.config["kind"] == "y" and not c.config["on"])
        p = model.embed([first, last, near, other])
        assert np.linalg.norm(p[0] - p[2]) < np.linalg.norm(p[0] - p[1])
        np.testing.assert_allclose(np.linalg.norm(p[0] - p[1]), 1.0)  # the ends of one knob
        np.testing.assert_allclose(np.linalg.norm(p[0] - p[3]), 1.0)  # another value of a string
        assert len(np.unique(points.round(9), axis=0)) == len(points)
