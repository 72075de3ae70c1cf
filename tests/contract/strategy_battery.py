"""The contract of a search strategy. A subclass names a registered strategy and gets the whole battery."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from kronsched import registry
from kronsched.cost_model.base import CostModel
from kronsched.cost_model.features import Featurizer
from kronsched.cost_model.xgb import XgbModel, XgbOptions
from kronsched.errors import UserError
from kronsched.search.base import Observation, SearchStrategy
from kronsched.space import Candidate, Config, Knob, SearchSpace

Cost = Callable[[Candidate], float | None]


def sparse(config: Config) -> str | None:
    """About a third of the space."""
    return None if (config["a"] + 2 * config["b"] + config["c"]) % 3 == 0 else "not a multiple of 3"  # type: ignore[operator]


def smooth(candidate: Candidate) -> float:
    c: dict[str, Any] = candidate.config
    return 10.0 + (c["a"] - 3) ** 2 + (c["b"] - 5) ** 2 + {"x": 0.0, "y": 3.0, "z": 6.0}[c["kind"]] + 0.01 * c["c"]


def flaky(candidate: Candidate) -> float | None:
    return None if candidate.config["a"] == 3 else smooth(candidate)


def failing(candidate: Candidate) -> None:
    return None


def constant(candidate: Candidate) -> float:
    return 7.0


class StrategyBattery:
    """Override `name`."""

    name: str

    # -- set-up -------------------------------------------------------------------------------------

    def space(self) -> SearchSpace:
        knobs = [Knob("a", tuple(range(8))), Knob("b", tuple(range(8))), Knob("c", (1, 2, 4, 8)), Knob("kind", ("x", "y", "z"))]
        return SearchSpace("made_up", [*knobs, Knob("one", (5,))], sparse)

    def huge(self) -> SearchSpace:
        """Too large to be enumerated or shuffled; a quarter is valid."""
        knobs = [Knob(f"k{i}", tuple(range(10))) for i in range(12)]
        return SearchSpace("huge", knobs, lambda c: None if (int(c["k0"]) + int(c["k1"])) % 4 == 0 else "no")

    def make(self, space: SearchSpace, seed: int = 0, **more: Any) -> SearchStrategy:
        model: CostModel = XgbModel(Featurizer(space), XgbOptions(trees=10), seed)
        return registry.strategy(self.name)(space, model, seed, **more)

    def drive(self, strategy: SearchStrategy, cost: Cost, trials: int, batch: int = 8) -> list[Candidate]:
        """Ask and tell; checks every batch on the way."""
        asked: list[Candidate] = []
        while len(asked) < trials:
            got = strategy.ask(min(batch, trials - len(asked)))
            if not got:
                break
            self.check(strategy.space, got, asked, batch)
            asked += got
            strategy.tell(observe(got, cost))
        return asked

    def check(self, space: SearchSpace, batch: Sequence[Candidate], before: Sequence[Candidate], limit: int) -> None:
        assert len(batch) <= limit
        for candidate in batch:
            assert candidate.space == space.name and space.invalid(candidate.config) is None
            assert [n for n, _ in candidate.items] == [k.name for k in space.knobs]
        keys = [c.key for c in batch]
        assert len(set(keys)) == len(keys) and not set(keys) & {c.key for c in before}

    # -- the contract -------------------------------------------------------------------------------

    def test_is_what_the_registry_says(self) -> None:
        cls = registry.strategy(self.name)
        assert cls.name == self.name and self.name in registry.strategy_names()
        assert cls.__doc__ and cls.batch_size >= 1

    def test_batches_are_valid_distinct_and_full(self) -> None:
        asked = self.drive(self.make(self.space()), flaky, 96)
        assert len(asked) == 96  # 256 candidates are valid

    def test_a_space_too_large_to_enumerate(self) -> None:
        assert len(self.drive(self.make(self.huge()), lambda c: 1.0 + float(c.config["k2"]), 40)) == 40  # type: ignore[arg-type]

    def test_is_deterministic_given_seed_and_results(self) -> None:
        runs = [self.drive(self.make(self.space(), seed=3), flaky, 48) for _ in range(2)]
        assert runs[0] == runs[1]

    def test_seeds_differ(self) -> None:
        if self.name != "exhaustive":
            runs = [self.drive(self.make(self.space(), seed=seed), flaky, 24) for seed in range(2)]
            assert runs[0] != runs[1]

    @pytest.mark.parametrize("cost", [flaky, failing, constant], ids=lambda f: f.__name__)
    def test_a_space_is_exhausted_exactly(self, cost: Cost) -> None:
        space = self.space()
        asked = self.drive(self.make(space), cost, 10_000, batch=24)
        assert {c.key for c in asked} == {c.key for c in space}

    def test_a_space_of_one_config(self) -> None:
        space = SearchSpace("one", [Knob("a", (1,)), Knob("b", ("x",))])
        strategy = self.make(space)
        only = strategy.ask(8)
        assert [c.config for c in only] == [{"a": 1, "b": "x"}]
        strategy.tell(observe(only, lambda c: 1.0))
        assert strategy.ask(8) == []

    def test_one_valid_config_among_many(self) -> None:
        knobs = [Knob(n, tuple(range(20))) for n in "abc"]
        space = SearchSpace("needle", knobs, lambda c: None if [c["a"], c["b"], c["c"]] == [7, 11, 13] else "no")
        asked = self.drive(self.make(space), constant, 8)
        assert [c.config for c in asked] == [{"a": 7, "b": 11, "c": 13}]

    def test_a_space_without_valid_configs(self) -> None:
        assert self.make(SearchSpace("none", [Knob("a", (1, 2, 3))], lambda c: "no")).ask(8) == []

    def test_all_failing_rounds(self) -> None:
        assert len(self.drive(self.make(self.space()), failing, 64)) == 64

    def test_asking_again_before_telling_repeats_nothing(self) -> None:
        strategy = self.make(self.space())
        first, second = strategy.ask(8), strategy.ask(8)
        self.check(strategy.space, second, first, 8)
        strategy.tell(observe(second, flaky))
        strategy.tell(observe(first, flaky))
        self.check(strategy.space, strategy.ask(8), first + second, 8)

    def test_partial_results(self) -> None:
        """A batch of which only some came back (a crash of the measurer) is not asked again either."""
        strategy = self.make(self.space())
        first = strategy.ask(8)
        strategy.tell(observe(first[:3], flaky))
        self.check(strategy.space, strategy.ask(8), first, 8)

    def test_resume_does_not_repeat_what_was_told(self) -> None:
        before = self.drive(self.make(self.space(), seed=1), flaky, 40)
        resumed = self.make(self.space(), seed=1)
        resumed.tell(observe(before, flaky))
        after = self.drive(resumed, flaky, 40)
        assert not {c.key for c in before} & {c.key for c in after}

    def test_told_candidates_may_be_in_another_knob_order_or_not_in_the_space(self) -> None:
        strategy = self.make(self.space())
        known = next(iter(strategy.space))
        turned = Candidate(known.space, tuple(reversed(known.items)))
        alien = Candidate("made_up", (("a", 1), ("old_knob", 2)))
        strategy.tell([Observation(turned, "ok", 5.0)])
        if not strategy.uses_model:  # the tuner never tells a model what its featurizer cannot see
            strategy.tell([Observation(alien, "ok", 1.0)])
        assert known.key not in {c.key for c in self.drive(strategy, flaky, 300, batch=64)}

    def test_unknown_and_wrong_options(self) -> None:
        for options in ({"no_such_option": 1}, {"no_such_option": "x"}):
            with pytest.raises(UserError, match=f"option.*{self.name}"):
                self.make(self.space(), options=options)


class ModelStrategyBattery(StrategyBattery):
    """For strategies that use the cost model. `plan` is how many results they need before the model decides."""

    plan = 8

    def test_learns(self) -> None:
        """After a plan, half of what it asks for is among the best quarter of the space."""
        values = sorted(smooth(c) for c in self.space())
        good = 0
        for seed in range(3):
            strategy = self.make(self.space(), seed)
            self.drive(strategy, smooth, self.plan, batch=self.plan)
            good += sum(smooth(c) < values[len(values) // 4] for c in strategy.ask(8))
        assert good >= 12


def observe(candidates: Sequence[Candidate], cost: Cost) -> list[Observation]:
    out = []
    for candidate in candidates:
        value = cost(candidate)
        out.append(Observation(candidate, "crash" if value is None else "ok", value))
    return out
