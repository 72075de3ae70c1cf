"""Every search strategy, put through the strategy contract."""

from __future__ import annotations

import pytest

from kronsched import register_strategy
from kronsched.search.base import SearchStrategy
from kronsched.space import Candidate
from tests.contract.strategy_battery import ModelStrategyBattery, StrategyBattery


class TestRandom(StrategyBattery):
    name = "random"


class TestExhaustive(StrategyBattery):
    name = "exhaustive"


class TestAnnealing(ModelStrategyBattery):
    name = "annealing"
    plan = 64


class TestEvolutionary(ModelStrategyBattery):
    name = "evolutionary"
    plan = 64


class TestDistinctive(ModelStrategyBattery):
    name = "distinctive"
    plan = 40


class TestFromOutside(StrategyBattery):
    """A whole strategy as somebody outside would write it."""

    name = "backwards"

    @pytest.fixture(autouse=True)
    def registered(self) -> None:
        @register_strategy
        class Backwards(SearchStrategy):
            """Backwards through the space from a random place."""

            name = "backwards"
            uses_model = False

            def ask(self, n: int) -> list[Candidate]:
                start = self.rng.randrange(self.space.size)
                out: list[Candidate] = []
                for i in range(self.space.size if self.space.size < 1e6 else 10_000):
                    candidate = self.space.at((start - i) % self.space.size)
                    if len(out) < n and candidate.key not in self.seen and self.space.invalid(candidate.config) is None:
                        self.seen.add(candidate.key)
                        out.append(candidate)
                return out
