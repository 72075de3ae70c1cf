"""The search-strategy interface. One strategy a file; the tuner loop asks for batches and tells results.

Read first: `SearchStrategy.ask` / `tell`, and `Observation`, which is all a strategy ever sees of a measurement.
"""

from __future__ import annotations

import abc
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from kronsched.cost_model.base import CostModel
from kronsched.space import Candidate, SearchSpace


@dataclass(frozen=True)
class Observation:
    """A measured candidate. `cost_us` is the objective (median microseconds, or joules) and None for a failure."""

    candidate: Candidate
    status: str
    cost_us: float | None
    source_sha256: str | None = None


class SearchStrategy(abc.ABC):
    """Proposes candidates. Deterministic given the seed and the observations.

    `model` is shared with the tuner, which has already warm-started it; a strategy that does not use it ignores it.
    """

    name: ClassVar[str]
    uses_model: ClassVar[bool] = True
    """False lets the tuner skip the cost model altogether."""
    batch_size: int = 8
    """The batch the strategy was designed for; the tuner asks for at most this many at a time."""

    def __init__(self, space: SearchSpace, model: CostModel, seed: int = 0) -> None:
        """Bind the strategy to a space and a model."""
        self.space = space
        self.model = model
        self.rng = random.Random(seed)
        self.seen: set[str] = set()

    @abc.abstractmethod
    def ask(self, n: int) -> list[Candidate]:
        """Up to `n` valid, distinct candidates never asked or told before; empty when the space is exhausted."""

    def tell(self, observations: Sequence[Observation]) -> None:
        """Learn from results, own or recorded earlier (resume). Refits the model when `uses_model`."""
        self.seen.update(o.candidate.key for o in observations)
        if self.uses_model:
            self.model.update(observations)
