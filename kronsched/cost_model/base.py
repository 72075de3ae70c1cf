"""The cost-model interface: scores candidates of one workload; higher means predicted faster."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from kronsched.errors import KronschedError
from kronsched.space import Candidate

if TYPE_CHECKING:
    from kronsched.search.base import Observation


class ModelError(KronschedError):
    """A stored cost model cannot be used here: its format, its columns or its xgboost version. One line."""


class CostModel(abc.ABC):
    """Learns from observations of one tuning run (and, before it, from records of other shapes)."""

    @abc.abstractmethod
    def update(self, observations: Sequence[Observation]) -> None:
        """Add observations (failures included); the next `predict` uses them. Told twice, a candidate counts as told last."""

    @abc.abstractmethod
    def predict(self, candidates: Sequence[Candidate]) -> np.ndarray:
        """Scores, shape (len(candidates),), float64; higher is better. Finite, also before any observation (then all equal)."""

    @abc.abstractmethod
    def embed(self, candidates: Sequence[Candidate]) -> np.ndarray:
        """Normalised feature vectors, shape (len(candidates), d), in which distances measure novelty."""

    @property
    def experience(self) -> int:
        """Of how many other shapes the model knew before the run started."""
        return 0

    @property
    @abc.abstractmethod
    def trained(self) -> bool:
        """Whether `predict` carries information."""
