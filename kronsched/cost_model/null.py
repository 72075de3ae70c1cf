"""The cost model of strategies that need none: every score is equal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from kronsched.cost_model.base import CostModel
from kronsched.cost_model.features import Featurizer
from kronsched.space import Candidate, SearchSpace

if TYPE_CHECKING:
    from kronsched.search.base import Observation


class NullModel(CostModel):
    """Learns nothing; embeds knobs as the learned model does, so that diversity is measured alike."""

    def __init__(self, space: SearchSpace) -> None:
        """Bind to a space."""
        self._featurizer = Featurizer(space)

    def update(self, observations: Sequence[Observation]) -> None:
        """Ignore."""

    def predict(self, candidates: Sequence[Candidate]) -> np.ndarray:
        """Zeros."""
        return np.zeros(len(candidates))

    def embed(self, candidates: Sequence[Candidate]) -> np.ndarray:
        """Normalised knobs."""
        return self._featurizer.embed(candidates)

    @property
    def trained(self) -> bool:
        """False."""
        return False
