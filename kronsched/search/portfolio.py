"""One search over several spaces: when more than one schedule can serve a workload, each has a strategy of its own.

Read first: `Portfolio.ask` (how a batch is shared out) and `Portfolio._hope` (whose turn it is).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from kronsched.search.base import Observation, SearchStrategy
from kronsched.space import Candidate

OPTIMISM = 2.0
"""After n trials a space may still hold something e^(OPTIMISM / √n) times as fast as its best so far."""
FIRST = 8
"""Trials that each space gets before one without a success is given up."""
INSURANCE = 16
"""One trial in so many goes to the space with the fewest, whatever was measured."""


class Portfolio:
    """Shares trials among strategies of different spaces; with one strategy it only passes through.

    A bandit on the best so far: each trial goes to the space whose best, taken optimistically, is lowest. What is optimistic
    falls with the trials that a space had, so a space that is behind is looked at until it is unlikely to catch up.
    """

    def __init__(self, strategies: Sequence[SearchStrategy]) -> None:
        """At least one strategy, each with another space."""
        self.strategies = tuple(strategies)
        self._best = [math.inf] * len(self.strategies)
        self._trials = [0] * len(self.strategies)

    @property
    def batch_size(self) -> int:
        """The largest batch that one of the strategies was designed for."""
        return max(s.batch_size for s in self.strategies)

    def ask(self, n: int) -> list[Candidate]:
        """Up to `n` candidates; fewer only when all spaces are exhausted."""
        out: list[Candidate] = []
        open_ = list(range(len(self.strategies)))
        while open_ and len(out) < n:
            for i, share in self._shares(open_, n - len(out)).items():
                got = self.strategies[i].ask(share)
                out += got
                self._trials[i] += len(got)
                if len(got) < share:
                    open_.remove(i)
        return out

    def tell(self, observations: Sequence[Observation]) -> None:
        """Tell each strategy the observations of its space; those of other spaces are ignored."""
        for i, strategy in enumerate(self.strategies):
            own = [o for o in observations if o.candidate.space == strategy.space.name]
            if own:
                known = len(strategy.seen)
                strategy.tell(own)
                self._trials[i] += len(strategy.seen) - known  # told, not asked: a log that is resumed
                self._best[i] = min([self._best[i], *(o.cost_us for o in own if o.cost_us is not None)])

    def _shares(self, open_: Sequence[int], n: int) -> dict[int, int]:
        trials, shares = list(self._trials), dict.fromkeys(open_, 0)
        for _ in range(n):
            least = min(open_, key=lambda i: trials[i])
            insured = sum(trials) % INSURANCE == INSURANCE - 1
            turn = least if insured else min(open_, key=lambda i: (self._hope(i, trials[i]), trials[i]))
            trials[turn] += 1
            shares[turn] += 1
        return {i: share for i, share in shares.items() if share}

    def _hope(self, i: int, trials: int) -> float:
        """Log of the lowest cost that is hoped for."""
        if trials < FIRST and math.isinf(self._best[i]):
            return -math.inf
        return math.log(max(self._best[i], 1e-12)) - OPTIMISM / math.sqrt(max(1, trials))
