"""Simulated annealing on the model's score, as AutoTVM does it: no diversity within a batch.

Source: Chen et al., "Learning to Optimize Tensor Programs", NeurIPS 2018 (arXiv 1805.08166), and TVM 0.19's ModelBasedTuner and
SimulatedAnnealingOptimizer, whose defaults are the options here. Differences: the objective of the model is whatever the tuner
gives every strategy, and `new` bounds how many configs a plan may look at for the first time (more than a table holds).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from kronsched.cost_model.base import CostModel
from kronsched.search.base import option
from kronsched.search.pool import INVALID, PoolStrategy
from kronsched.search.scores import Scores
from kronsched.space import Candidate, SearchSpace


@dataclass(frozen=True)
class AnnealingOptions:
    """AutoTVM's defaults."""

    chains: int = option(128, "parallel Markov chains; they go on where the last plan left them")
    steps: int = option(500, "steps of a chain")
    temperature: float = option(1.0, "temperature at the first step; it falls linearly to 0")
    plan: int = option(64, "candidates planned at a time, and measured before the model is used")
    epsilon: float = option(0.05, "share of a plan that is random instead")
    patience: int = option(50, "steps without a change in the planned set after which the chains stop")
    new: int = option(12_000, "configs a plan may look at for the first time")


class Annealing(PoolStrategy):
    """AutoTVM's search: plan the 64 best-scored candidates that annealing finds, measure them, refit, repeat."""

    name: ClassVar[str] = "annealing"
    Options = AnnealingOptions
    batch_size: int = 64

    def __init__(
        self,
        space: SearchSpace,
        model: CostModel,
        seed: int = 0,
        *,
        start: Sequence[Candidate] = (),
        options: Mapping[str, int | float] | None = None,
    ) -> None:
        """Bind the strategy to a space and a model."""
        super().__init__(space, model, seed, start=start, options=options)
        self._plan: list[int] = []
        self._chains: np.ndarray | None = None

    def ask(self, n: int) -> list[Candidate]:
        """The next `n` of the plan, a new plan when it is used up; the schedule's default before all."""
        out = self.take(self.start_ids(n))
        while len(out) < n:
            self._plan = [i for i in self._plan if i not in self.taken]
            if not self._plan:
                self._plan = self._new_plan()
                if not self._plan:
                    break
            part, self._plan = self._plan[: n - len(out)], self._plan[n - len(out) :]
            out += self.take(part)
        return out

    def _new_plan(self) -> list[int]:
        size = max(1, self.options.plan)
        # AutoTVM plans at random until a whole plan was measured; an untrained model would score all alike.
        if len(self.taken) < size or not self.model.trained:
            return self.random_ids(size)
        random = int(self.options.epsilon * size)
        planned = self._anneal(size - random)
        more = self.random_ids(size)
        return planned + [i for i in more if i not in planned][: size - len(planned)]

    def _anneal(self, n: int) -> list[int]:
        o, pool = self.options, self.pool
        scores = Scores(self.model, pool)
        if self._chains is None or len(self._chains) == 0:
            self._chains = pool.sample(o.chains)
            if not len(self._chains):  # few valid configs: start from what is known
                self._chains = np.arange(min(len(pool), o.chains))
        at = self._chains
        value = scores(at)
        best = _Top(n, self.taken)
        best.add(at, value)
        limit, unchanged = len(pool) + o.new, 0
        for step in range(o.steps):
            temperature = o.temperature * (1 - step / o.steps)
            to = pool.ids(pool.mutate(at))
            valid = to != INVALID
            gain = np.full(len(at), -np.inf)
            gain[valid] = scores(to[valid]) - value[valid]
            with np.errstate(over="ignore"):
                accept = pool.rng.random(len(at)) < np.exp(np.minimum(gain / (temperature + 1e-5), 1.0))
            changed = best.add(to[valid], gain[valid] + value[valid])
            at = np.where(accept, to, at)
            value = np.where(accept, value + np.where(accept, gain, 0.0), value)
            unchanged = 0 if changed else unchanged + 1
            if unchanged >= o.patience or len(pool) > limit:
                break
        self._chains = at
        return best.ids()


class _Top:
    """The `n` best-scored ids seen that are not taken."""

    def __init__(self, n: int, taken: Mapping[int, None]) -> None:
        self._n, self._taken = n, taken
        self._scores: dict[int, float] = {}
        self._floor = -np.inf

    def add(self, ids: np.ndarray, scores: np.ndarray) -> bool:
        """Whether the set changed."""
        good = scores > self._floor
        new = {
            i: s
            for i, s in zip(ids[good].tolist(), scores[good].tolist(), strict=True)
            if i not in self._taken and i not in self._scores
        }
        if not new:
            return False
        before = set(self._scores)
        ranked = sorted((self._scores | new).items(), key=lambda item: (-item[1], item[0]))[: self._n]
        self._scores = dict(ranked)
        if len(ranked) == self._n:
            self._floor = ranked[-1][1]
        return set(self._scores) != before

    def ids(self) -> list[int]:
        """Best first."""
        return list(self._scores)
