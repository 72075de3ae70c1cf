"""Uniform random search without repetition: the baseline every other strategy must beat."""

from __future__ import annotations

from typing import ClassVar

from kronsched.search.pool import PoolStrategy
from kronsched.space import Candidate


class Random(PoolStrategy):
    """Valid candidates in a random order, none twice."""

    name: ClassVar[str] = "random"
    uses_model: ClassVar[bool] = False

    def ask(self, n: int) -> list[Candidate]:
        """The next `n` of the random order; the schedule's default before all."""
        out = self.take(self.start_ids(n))
        return out + self.take(self.random_ids(n - len(out)))
