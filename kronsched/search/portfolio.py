"""One search over several spaces: when more than one schedule can serve a workload, each has a strategy of its own.

Read first: `Portfolio.ask` (how a batch is shared out).
"""

from __future__ import annotations

from collections.abc import Sequence

from kronsched.search.base import Observation, SearchStrategy
from kronsched.space import Candidate


class Portfolio:
    """Shares each batch among strategies of different spaces; with one strategy it only passes through.

    Half of a batch is dealt out evenly, the other half goes to the space of the best candidate so far. So a space that is behind
    is still looked at, and a good one gets most of the trials.
    """

    def __init__(self, strategies: Sequence[SearchStrategy]) -> None:
        """At least one strategy, each with another space."""
        self.strategies = tuple(strategies)
        self._best = [float("inf")] * len(self.strategies)
        self._turn = 0

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
                if len(got) < share:
                    open_.remove(i)
        return out

    def tell(self, observations: Sequence[Observation]) -> None:
        """Tell each strategy the observations of its space; those of other spaces are ignored."""
        for i, strategy in enumerate(self.strategies):
            own = [o for o in observations if o.candidate.space == strategy.space.name]
            if own:
                strategy.tell(own)
                self._best[i] = min([self._best[i], *(o.cost_us for o in own if o.cost_us is not None)])

    def _shares(self, open_: Sequence[int], n: int) -> dict[int, int]:
        leader = min(open_, key=lambda i: self._best[i])
        even = n if self._best[leader] == float("inf") or len(open_) == 1 else max(1, n // 2)
        shares = dict.fromkeys(open_, 0)
        for k in range(even):
            shares[open_[(self._turn + k) % len(open_)]] += 1
        self._turn += even
        shares[leader] += n - even
        return {i: share for i, share in shares.items() if share}
