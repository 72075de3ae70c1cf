"""The answer without measuring: the cost model's first choice, or the schedule's default where the model knows nothing."""

from __future__ import annotations

from kronsched.cost_model.base import CostModel
from kronsched.search.distinctive import Distinctive
from kronsched.space import Candidate, SearchSpace

ROUNDS = 6


def predict_best(space: SearchSpace, model: CostModel, default: Candidate, n: int = 8, seed: int = 0) -> list[Candidate]:
    """The `n` candidates the model likes most, best first, then the default; only the default when the model knows nothing.

    The space is searched by the evolution of `Distinctive`, started from the default: about half a second.
    """
    if not model.trained:
        return [default]
    search = Distinctive(space, model, seed, start=[default])
    ranked = search.ranked(ROUNDS)[:n]
    return [*(c for c in ranked if c != default), default]
