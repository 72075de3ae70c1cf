"""Evolutionary search on the model's score, as TVM's MetaSchedule does it: no diversity within a batch.

Source: Shao et al., "Tensor Program Optimization with Probabilistic Programs", NeurIPS 2022 (arXiv 2205.13603), and TVM's
EvolutionarySearch, whose defaults are the options here. A mutation changes one knob, as MetaSchedule's mutators change one
sampling decision.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from kronsched.search.base import option
from kronsched.search.pool import INVALID, PoolStrategy
from kronsched.search.scores import Scores
from kronsched.space import Candidate


@dataclass(frozen=True)
class EvolutionaryOptions:
    """MetaSchedule's defaults."""

    population: int = option(512, "candidates of a generation")
    generations: int = option(4, "generations a round")
    mutation: float = option(0.85, "probability that a parent is mutated instead of kept")
    measured: float = option(0.2, "share of the first generation that are the best measured candidates; the rest is random")
    epsilon: float = option(0.05, "share of a batch that is random instead")
    tries: int = option(10, "mutations tried for a child before the parent is kept")


class Evolutionary(PoolStrategy):
    """MetaSchedule's search: evolve a population on the model's score and measure the best 64 that it met."""

    name: ClassVar[str] = "evolutionary"
    Options = EvolutionaryOptions
    batch_size: int = 64

    def ask(self, n: int) -> list[Candidate]:
        """A batch; the schedule's default before all, random ones before the model knows anything."""
        out = self.take(self.start_ids(n))
        n -= len(out)
        if not self.model.trained:
            return out + self.take(self.random_ids(n))
        picked = self._evolve()[: n - round(self.options.epsilon * n)]
        more = self.random_ids(n)
        return out + self.take(picked + [i for i in more if i not in picked][: n - len(picked)])

    def _evolve(self) -> list[int]:
        """Every free id met, best score first."""
        o, pool = self.options, self.pool
        kept = self.best(int(o.measured * o.population))
        drawn = pool.sample(o.population - len(kept))
        population = np.concatenate([np.array(kept, dtype=np.int64), drawn])
        if len(pool) and len(population) < o.population:  # a small space: repeat what is known
            population = np.concatenate([population, pool.rng.integers(0, len(pool), o.population - len(population))])
        if not len(population):
            return []
        scores = Scores(self.model, pool)
        met = [population]
        for _ in range(o.generations):
            weight = np.maximum(scores(population), 0.0)
            total = weight.sum()
            parents = pool.rng.choice(population, size=len(population), p=weight / total if total > 0 else None)
            population = self._children(parents)
            met.append(population)
        scores(population)
        ids = self.free(np.concatenate(met))
        out: list[int] = ids[np.argsort(-scores(ids), kind="stable")].tolist()
        return out

    def _children(self, parents: np.ndarray) -> np.ndarray:
        out = parents.copy()
        waiting = np.flatnonzero(self.pool.rng.random(len(parents)) < self.options.mutation)
        for _ in range(self.options.tries):
            if not len(waiting):
                break
            child = self.pool.ids(self.pool.mutate(parents[waiting]))
            good = child != INVALID
            out[waiting[good]] = child[good]
            waiting = waiting[~good]
        return out
