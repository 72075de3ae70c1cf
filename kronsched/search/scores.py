"""The model's scores of a pool's candidates during one round, each computed once, on the scale of a round."""

from __future__ import annotations

import numpy as np

from kronsched.cost_model.base import CostModel
from kronsched.search.pool import Pool


class Scores:
    """Callable on ids. Scores are shifted and scaled so that those of the first call lie in [0, 1].

    So they look like AutoTVM's and MetaSchedule's normalised throughput, for which temperatures and probabilities were made,
    whatever the model's own scale is.
    """

    def __init__(self, model: CostModel, pool: Pool) -> None:
        """Score nothing yet."""
        self._model, self._pool = model, pool
        self._known = np.empty(0)
        self._scale: tuple[float, float] | None = None

    def __call__(self, ids: np.ndarray) -> np.ndarray:
        """Scores (n,) of ids (n,)."""
        if len(self._known) < len(self._pool):
            grown = np.full(max(len(self._pool), 2 * len(self._known)), np.nan)
            grown[: len(self._known)] = self._known
            self._known = grown
        missing = np.unique(ids[np.isnan(self._known[ids])])
        if len(missing):
            raw = self._model.predict([self._pool.candidates[i] for i in missing.tolist()])
            if self._scale is None:
                spread = float(np.ptp(raw))
                self._scale = float(raw.min()), spread if spread > 0 else 1.0
            low, spread = self._scale
            self._known[missing] = (raw - low) / spread
        out: np.ndarray = self._known[ids]
        return out
