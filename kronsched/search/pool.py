"""The candidates a strategy knows, as integer arrays, so that thousands can be moved and scored at a time.

Read first: `Pool` (known valid candidates, moves, draws without repetition) and `PoolStrategy` (what has been asked).

A row is the position of each knob's value in its list. Whether a row is valid is found out once, by the space's own check,
which is plain Python (10 to 50 µs): it is what limits how many candidates a round may look at.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from kronsched.cost_model.base import CostModel
from kronsched.search.base import Observation, SearchStrategy
from kronsched.space import Candidate, SearchSpace

SHUFFLED = 2**20
"""Spaces up to this size are drawn from in a random order without repetition, so that they can be exhausted."""
INVALID = -1


class Pool:
    """Known valid candidates of a space; a candidate's id is its position."""

    def __init__(self, space: SearchSpace, seed: int) -> None:
        """Know nothing yet."""
        self.space = space
        self.rng = np.random.default_rng(seed)
        self.candidates: list[Candidate] = []
        self._radix = np.array([len(k.values) for k in space.knobs], dtype=np.int64)
        self._movable = np.flatnonzero(self._radix > 1)
        self._names = [k.name for k in space.knobs]
        self._values = [k.values for k in space.knobs]
        self._rows = np.empty((64, len(space.knobs)), dtype=np.int16)
        self._ids: dict[bytes, int] = {}
        self._size = space.size
        self._order: np.ndarray | None = None
        self._drawn = 0

    def __len__(self) -> int:
        return len(self.candidates)

    @property
    def rows(self) -> np.ndarray:
        """Rows of all known candidates, shape (len(self), knobs), int16."""
        return self._rows[: len(self)]

    # -- knowing ------------------------------------------------------------------------------------

    def id_of(self, candidate: Candidate) -> int:
        """The id of a valid candidate; INVALID when it is not in the space (a log of an older space)."""
        config = candidate.config
        if self.space.invalid(config) is not None:
            return INVALID
        own = self.space.candidate(config)  # knobs in the order of this space
        row = np.array([self.space.digits(own)], dtype=np.int16)
        return int(self.ids(row)[0])

    def ids(self, rows: np.ndarray) -> np.ndarray:
        """Ids of rows (n, knobs); INVALID where the space's check says so. Unknown valid rows become known."""
        rows = np.ascontiguousarray(rows, dtype=np.int16)
        data, step = rows.tobytes(), rows.shape[1] * 2
        out = np.empty(len(rows), dtype=np.int64)
        for i in range(len(rows)):
            key = data[i * step : (i + 1) * step]
            found = self._ids.get(key)
            out[i] = self._learn(key, rows[i]) if found is None else found
        return out

    def _learn(self, key: bytes, row: np.ndarray) -> int:
        items = tuple((n, v[d]) for n, v, d in zip(self._names, self._values, row.tolist(), strict=True))
        if self.space.invalid(dict(items)) is not None:
            self._ids[key] = INVALID
            return INVALID
        new = len(self.candidates)
        if new == len(self._rows):
            self._rows = np.concatenate([self._rows, np.empty_like(self._rows)])
        self._rows[new] = row
        self.candidates.append(Candidate(self.space.name, items))
        self._ids[key] = new
        return new

    # -- drawing ------------------------------------------------------------------------------------

    def sample(self, n: int, tries: int = 20_000) -> np.ndarray:
        """Up to `n` distinct ids of valid candidates, uniformly at random; fewer after `tries` checks."""
        found: dict[int, None] = {}
        while len(found) < n and tries > 0:
            count = min(tries, max(16, 2 * (n - len(found))))
            tries -= count
            rows = self.rng.integers(0, self._radix, size=(count, len(self._radix)), dtype=np.int64)
            found.update(dict.fromkeys(i for i in self.ids(rows).tolist() if i != INVALID))
        return np.fromiter(itertools.islice(found, n), dtype=np.int64)

    def draw(self, n: int, tries: int = 20_000) -> np.ndarray:
        """As `sample`, but no candidate is ever drawn twice where the space is `exhaustible`."""
        if not self.exhaustible:
            return self.sample(n, tries)
        if self._order is None:
            self._order = self.rng.permutation(self._size)
        found: list[int] = []
        end = min(self._size, self._drawn + tries)
        while len(found) < n and self._drawn < end:
            index = self._order[self._drawn : min(end, self._drawn + 2 * n)]
            for i in self.ids(self._rows_at(index)).tolist():
                self._drawn += 1
                if i != INVALID:
                    found.append(i)
                if len(found) == n:
                    break  # the rest of `index` stays to be drawn
        return np.array(found, dtype=np.int64)

    @property
    def exhaustible(self) -> bool:
        """Whether the space is small enough to be drawn from without repetition."""
        return self._size <= SHUFFLED

    @property
    def all_drawn(self) -> bool:
        """Whether every config of a space has been drawn; never True for one that is not `exhaustible`."""
        return self._order is not None and self._drawn >= self._size

    def _rows_at(self, index: np.ndarray) -> np.ndarray:
        """Rows of mixed-radix indices."""
        rows = np.empty((len(index), len(self._radix)), dtype=np.int64)
        for j, radix in enumerate(self._radix.tolist()):
            index, rows[:, j] = np.divmod(index, radix)
        return rows

    # -- moving -------------------------------------------------------------------------------------

    def mutate(self, ids: np.ndarray, times: int = 1) -> np.ndarray:
        """Rows that differ from those of `ids` in one random knob (at most `times` knobs); they may be invalid."""
        rows: np.ndarray = self._rows[ids].astype(np.int64)
        if len(self._movable):
            at = np.arange(len(rows))
            for _ in range(times):
                knob = self.rng.choice(self._movable, size=len(rows))
                step = self.rng.integers(1, self._radix[knob])
                rows[at, knob] = (rows[at, knob] + step) % self._radix[knob]
        return rows

    def cross(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        """Rows that take each knob from one of two parents at random; they may be invalid."""
        take = self.rng.random((len(a), len(self._radix))) < 0.5
        out: np.ndarray = np.where(take, self._rows[a], self._rows[b])
        return out

    def neighbours(self, ids: Iterable[int]) -> np.ndarray:
        """All rows that differ from that of one of `ids` in exactly one knob; they may be invalid."""
        out = []
        for i in ids:
            row = self._rows[i]
            for j in self._movable.tolist():
                other = np.repeat(row[None].astype(np.int64), self._radix[j] - 1, axis=0)
                other[:, j] = np.delete(np.arange(self._radix[j]), row[j])
                out.append(other)
        return np.concatenate(out) if out else np.empty((0, len(self._radix)), dtype=np.int64)


class PoolStrategy(SearchStrategy):
    """A strategy over a `Pool`: keeps which candidates were asked or told, and what they cost."""

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
        self.pool = Pool(space, seed)
        self.taken: dict[int, None] = {}
        """Ids asked or told, in that order."""
        self.costs: dict[int, float] = {}
        """Id to cost of those that were measured and ok."""

    def tell(self, observations: Sequence[Observation]) -> None:
        """Learn from results; candidates that are not in the space teach the model only."""
        super().tell(observations)
        for observation in observations:
            i = self.pool.id_of(observation.candidate)
            if i != INVALID:
                self.taken[i] = None
                if observation.cost_us is not None:
                    self.costs[i] = observation.cost_us

    def start_ids(self, n: int) -> list[int]:
        """Up to `n` ids of `start`, for the first batch; none once anything was asked or told."""
        if self.taken:
            return []
        ids: list[int] = self.free(np.array([self.pool.id_of(c) for c in self.start], dtype=np.int64)).tolist()
        return ids[:n]

    def take(self, ids: Iterable[int]) -> list[Candidate]:
        """Mark ids as asked and return their candidates."""
        out = []
        for i in ids:
            self.taken[i] = None
            self.seen.add(self.pool.candidates[i].key)
            out.append(self.pool.candidates[i])
        return out

    def free(self, ids: np.ndarray) -> np.ndarray:
        """Those of `ids` that are valid and not taken, each once, order kept."""
        return np.array([i for i in dict.fromkeys(ids.tolist()) if i != INVALID and i not in self.taken], dtype=np.int64)

    def random_ids(self, n: int) -> list[int]:
        """`n` random ids that are not taken; fewer when the space is exhausted, or too large and sparse to tell."""
        found: dict[int, None] = {}
        while len(found) < n:
            drawn = self.pool.draw(n - len(found))
            if not len(drawn) and (self.pool.all_drawn or not self.pool.exhaustible):
                break
            found.update(dict.fromkeys(self.free(drawn).tolist()))
        if len(found) < n:  # what a move found and no draw did
            rest = [i for i in self.free(np.arange(len(self.pool))).tolist() if i not in found]
            found.update(dict.fromkeys(rest[: n - len(found)]))
        return list(found)

    def best(self, n: int) -> list[int]:
        """Ids of the `n` best measured candidates, best first."""
        return sorted(self.costs, key=lambda i: (self.costs[i], i))[:n]
