"""Every valid candidate in the fixed order of the space: how tables for simulation are made, in slices that resume."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from kronsched.search.base import SearchStrategy
from kronsched.space import Candidate


class Exhaustive(SearchStrategy):
    """All valid candidates in the order of the space, less those already told."""

    name: ClassVar[str] = "exhaustive"
    uses_model: ClassVar[bool] = False
    batch_size: int = 64

    _rest: Iterator[Candidate] | None = None

    def ask(self, n: int) -> list[Candidate]:
        """The next `n` that were not asked or told."""
        if self._rest is None:
            self._rest = iter(self.space)
        out: list[Candidate] = []
        while len(out) < n:
            candidate = next(self._rest, None)
            if candidate is None:
                break
            if candidate.key not in self.seen:
                self.seen.add(candidate.key)
                out.append(candidate)
        return out
