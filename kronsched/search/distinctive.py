"""Search that measures distinctive candidates: predicted fast, and unlike everything measured or picked so far.

Read first: `Distinctive._ask_model` (one batch) and `novelty.pick` (the greedy choice).

A batch of 8 comes from three places:
1. the model's choice: a pool is grown by evolution on the model's score; the batch is picked from its best candidates
   by score × novelty, so that the model learns from candidates that differ instead of 8 variants of one guess;
2. the best measured candidates' neighbours (one knob changed) that the model likes most: the last per cents are found near by;
3. exploration: random candidates, a share that falls with the number of measurements.
The first batch, before the model knows anything, fills the space: the schedule's default config and candidates as far as
possible from it and from each other. Failures teach the model where not to go: they count as slower than everything.

Source of the idea: distinctive candidates for auto-scheduling (the model improves fastest on candidates that differ), AutoTVM's
diversity-aware batch selection (arXiv 1805.08166, section 3.3). Small batches make better use of the model than 64 at a time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from kronsched.cost_model.base import CostModel
from kronsched.search.base import Observation, option
from kronsched.search.novelty import nearest, pick, spread_out
from kronsched.search.pool import INVALID, PoolStrategy
from kronsched.space import Candidate, SearchSpace


@dataclass(frozen=True)
class DistinctiveOptions:
    """The defaults were chosen on synthetic tables and on public tables of other GPU kernels; most of them matter little."""

    novelty: float = option(2.0, "exponent of novelty against score at the start; 0 turns distinctiveness off")
    explore: float = option(0.12, "share of a batch that is random at the start")
    informed: float = option(0.25, "factor on both where the model knows other shapes; for one shape at least 0.5")
    explore_least: float = option(0.02, "share of a batch that is random in the long run")
    anneal: float = option(150.0, "measurements after which novelty and exploration have fallen to 37 %")
    patience: int = option(32, "measurements without a better one after which exploration rises again")
    reheat: float = option(0.5, "share of a batch that is random after twice that many")
    local: int = option(2, "neighbours of the best measured candidates in a batch of 8")
    parents: int = option(96, "candidates that a generation grows from")
    children: int = option(160, "new configs tried in a generation")
    generations: int = option(2, "generations a round")
    fresh: int = option(32, "random candidates added to the pool a round")
    best_of: int = option(512, "pool candidates with the best scores from which a batch is picked")
    keep: int = option(4096, "candidates scored in a round at most")
    first: int = option(256, "random candidates from which the space-filling start is chosen")


class Distinctive(PoolStrategy):
    """Distinctive-candidate search: batches by predicted score × novelty, with an exploration share annealed over the run."""

    name: ClassVar[str] = "distinctive"
    Options = DistinctiveOptions
    batch_size: int = 8

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
        # One shape says little of another one; several say more.
        self._caution = max(self.options.informed, 0.5 / model.experience) if model.experience else 1.0
        self._active = np.empty(0, dtype=np.int64)
        """Ids that are scored each round."""
        self._points = np.empty((0, 0))
        """Embedding of every id of the pool."""

    def tell(self, observations: Sequence[Observation]) -> None:
        """Learn from results."""
        super().tell(observations)
        self._grow_active(np.fromiter(self.taken, dtype=np.int64))

    def ask(self, n: int) -> list[Candidate]:
        """A batch: space-filling before the model knows anything, else by the model."""
        picked = self.start_ids(n)
        if len(picked) < n:
            ask = self._ask_model if self.model.trained else self._ask_apart
            picked += ask(n - len(picked), picked)
        if len(picked) < n:
            picked += [i for i in self.random_ids(n) if i not in picked][: n - len(picked)]
        return self.take(picked)

    def ranked(self, rounds: int) -> list[Candidate]:
        """All candidates met in some rounds of evolution on the model's score, best first; nothing is marked as asked."""
        self._grow_active(np.array([self.pool.id_of(c) for c in self.start], dtype=np.int64))
        for _ in range(rounds):
            scores = self._grow()
        order = np.argsort(-scores, kind="stable")
        return [self.pool.candidates[i] for i in self._active[order].tolist()]

    # -- where candidates come from -----------------------------------------------------------------

    def _ask_apart(self, n: int, picked: list[int]) -> list[int]:
        """As far as possible from all that was asked and from each other."""
        ids = self.free(self.pool.sample(self.options.first))
        ids = ids[~np.isin(ids, picked)]
        points = self._embed(ids)
        out: list[int] = ids[spread_out(points, n, nearest(points, self._embed_taken(picked)))].tolist()
        return out

    def _ask_model(self, n: int, picked: list[int]) -> list[int]:
        o = self.options
        heat = self._heat() * max(self._caution, self._stagnation())
        scores = self._grow()
        out: list[int] = []

        near = self.free(self.pool.ids(self.pool.neighbours(self.best(3))))
        near = near[~np.isin(near, picked)]
        if len(near):
            order = np.argsort(-self.model.predict([self.pool.candidates[i] for i in near.tolist()]), kind="stable")
            out += near[order[: math.ceil(n * o.local / 8)]].tolist()

        share = max(o.explore * heat, o.explore_least, o.reheat * self._stagnation())
        explored = int(self.pool.rng.binomial(n, min(1.0, share)))
        if explored:
            random = self.free(self.pool.sample(4 * explored, tries=1000))
            out += random[~np.isin(random, picked + out)][:explored].tolist()
        out = out[:n]

        free = np.array([i not in self.taken for i in self._active.tolist()], dtype=bool) & ~np.isin(self._active, picked + out)
        ids, scores = self._active[free], scores[free]
        if len(ids) and len(out) < n:
            top = np.argsort(-scores, kind="stable")[: o.best_of]
            ids, scores = ids[top], scores[top]
            points = self._embed(ids)
            distance = nearest(points, self._embed_taken(picked + out))
            out += ids[pick(scores, points, n - len(out), distance, o.novelty * heat)].tolist()
        return out

    def _heat(self) -> float:
        """Falls from 1 with the number of measurements."""
        cooled = math.exp(-len(self.taken) / self.options.anneal) if self.options.anneal > 0 else 0.0
        return max(cooled, self._stagnation())

    def _stagnation(self) -> float:
        """0 until `patience` measurements brought nothing better, then rising to 1 over as many more."""
        patience = self.options.patience
        if not patience or not self.costs:
            return 0.0
        since = len(self.taken) - 1 - list(self.taken).index(self.best(1)[0])
        return float(min(1.0, max(0.0, since / patience - 1.0)))

    def _grow(self) -> np.ndarray:
        """Evolve the active candidates on the model's score; returns their scores."""
        o, pool = self.options, self.pool
        self._grow_active(pool.sample(o.fresh, tries=200))
        scores = self._score(self._active)
        for _ in range(o.generations):
            if not len(self._active):
                break
            parents = self._active[np.argsort(-scores, kind="stable")[: o.parents]]
            parents = np.concatenate([parents, np.array(self.best(16), dtype=np.int64)])
            one, two, three = (pool.rng.choice(parents, o.children * part // 8) for part in (4, 2, 2))
            rows = [pool.mutate(one), pool.mutate(two, times=2), pool.cross(three, pool.rng.choice(parents, len(three)))]
            before = len(self._active)
            self._grow_active(pool.ids(np.concatenate(rows)))
            scores = np.concatenate([scores, self._score(self._active[before:])])
        if len(self._active) > o.keep:  # forget the worst half
            kept = np.sort(np.argsort(-scores, kind="stable")[: o.keep // 2])
            self._active, scores = self._active[kept], scores[kept]
        return scores

    # -- bookkeeping --------------------------------------------------------------------------------

    def _grow_active(self, ids: np.ndarray) -> None:
        known = np.isin(ids, self._active) | (ids == INVALID)
        self._active = np.concatenate([self._active, np.unique(ids[~known])])

    def _score(self, ids: np.ndarray) -> np.ndarray:
        return self.model.predict([self.pool.candidates[i] for i in ids.tolist()])

    def _embed(self, ids: np.ndarray) -> np.ndarray:
        if len(self._points) < len(self.pool):
            new = self.model.embed(self.pool.candidates[len(self._points) :])
            self._points = new if not len(self._points) else np.concatenate([self._points, new])
        out: np.ndarray = self._points[ids]
        return out

    def _embed_taken(self, more: list[int]) -> np.ndarray:
        return self._embed(np.array([*self.taken, *more], dtype=np.int64))
