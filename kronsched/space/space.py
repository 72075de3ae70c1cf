"""A finite search space: named knobs with listed values, and constraints that prune before building.

Read first: `SearchSpace`. A config is a plain dict from knob name to value; a `Candidate` is a config with
the name of its space.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from kronsched.errors import ArgumentError, choose

Value = int | float | str | bool
Config = Mapping[str, Value]


@dataclass(frozen=True)
class Knob:
    """One tunable parameter: its name, its ordered values, one line of help."""

    name: str
    values: tuple[Value, ...]
    help: str = ""

    def __post_init__(self) -> None:
        """Reject empty and repeated value lists."""
        if not self.values:
            raise ArgumentError(f"knob {self.name}: values=[] is not allowed: list at least one value")
        if len({(type(v), v) for v in self.values}) != len(self.values):
            raise ArgumentError(f"knob {self.name}: values={list(self.values)} repeats a value")


@dataclass(frozen=True)
class Candidate:
    """A point of a space: the space's name (the schedule's name) and the value of every knob, in knob order."""

    space: str
    items: tuple[tuple[str, Value], ...]

    @property
    def config(self) -> dict[str, Value]:
        """The config as a fresh dict."""
        return dict(self.items)

    @property
    def key(self) -> str:
        """A canonical text, equal for equal candidates in every process."""
        return self.space + ":" + json.dumps(dict(self.items), sort_keys=True, separators=(",", ":"))


class SearchSpace:
    """Knobs plus a constraint. `check(config)` returns None when valid, else one line saying why not."""

    def __init__(self, name: str, knobs: Sequence[Knob], check: Callable[[Config], str | None] | None = None) -> None:
        """Make a space; knob names must differ."""
        names = [k.name for k in knobs]
        if len(set(names)) != len(names):
            raise ArgumentError(f"space {name}: knob names repeat: {names}")
        self.name = name
        self.knobs = tuple(knobs)
        self._check = check
        self._index = {k.name: {v: i for i, v in enumerate(k.values)} for k in knobs}

    # -- description --------------------------------------------------------------------------------

    @property
    def size(self) -> int:
        """Number of configs before constraints."""
        n = 1
        for knob in self.knobs:
            n *= len(knob.values)
        return n

    @property
    def digest(self) -> str:
        """A digest of names and values; logs carry it so that a changed space is noticed."""
        text = json.dumps([self.name, [[k.name, list(k.values)] for k in self.knobs]])
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def restrict(self, fixed: Mapping[str, Value | Sequence[Value]]) -> SearchSpace:
        """The same space with some knobs limited to given values (ablations, debugging)."""
        unknown = sorted(set(fixed) - set(self._index))
        if unknown:
            raise choose("knob", unknown[0], list(self._index))
        knobs = []
        for knob in self.knobs:
            if knob.name in fixed:
                want = fixed[knob.name]
                values = tuple(want) if isinstance(want, list | tuple) else (want,)
                knob = Knob(knob.name, values, knob.help)
            knobs.append(knob)
        return SearchSpace(self.name, knobs, self._check)

    # -- candidates ---------------------------------------------------------------------------------

    def candidate(self, config: Config) -> Candidate:
        """A candidate from a config; every knob must be present (`ArgumentError` names the one that is not)."""
        missing = [k.name for k in self.knobs if k.name not in config]
        if missing:
            raise ArgumentError(f"config of space {self.name}: knob {missing[0]!r} is missing")
        unknown = sorted(set(config) - set(self._index))
        if unknown:
            raise choose(f"knob of space {self.name}", unknown[0], list(self._index))
        return Candidate(self.name, tuple((k.name, config[k.name]) for k in self.knobs))

    def invalid(self, config: Config) -> str | None:
        """None when the config is in the space and meets the constraints, else one line saying why not."""
        for knob in self.knobs:
            if knob.name not in config:
                return f"knob {knob.name!r} is missing"
            if config[knob.name] not in self._index[knob.name]:
                return f"{knob.name}={config[knob.name]!r} is not one of {list(knob.values)}"
        if len(config) > len(self.knobs):
            return f"knob {next(name for name in config if name not in self._index)!r} is unknown"
        return self._check(config) if self._check else None

    def at(self, index: int) -> Candidate:
        """The candidate at a mixed-radix index in [0, size); it may be invalid."""
        items = []
        for knob in self.knobs:
            index, digit = divmod(index, len(knob.values))
            items.append((knob.name, knob.values[digit]))
        return Candidate(self.name, tuple(items))

    def digits(self, candidate: Candidate) -> list[int]:
        """The position of each knob's value in its list."""
        return [self._index[name][value] for name, value in candidate.items]

    def __iter__(self) -> Iterator[Candidate]:
        """All valid candidates, in a fixed order."""
        for values in itertools.product(*(k.values for k in self.knobs)):
            items = tuple(zip((k.name for k in self.knobs), values, strict=True))
            if not (self._check and self._check(dict(items))):
                yield Candidate(self.name, items)

    def sample(self, rng: random.Random, tries: int = 20_000) -> Candidate | None:
        """One valid candidate, uniformly; None when `tries` draws found none."""
        for _ in range(tries):
            candidate = self.at(rng.randrange(self.size))
            if not (self._check and self._check(candidate.config)):
                return candidate
        return None

    def neighbour(self, candidate: Candidate, rng: random.Random, tries: int = 64) -> Candidate:
        """A valid candidate that differs in one knob; the candidate itself when none was found."""
        movable = [i for i, k in enumerate(self.knobs) if len(k.values) > 1]
        for _ in range(tries if movable else 0):
            i = rng.choice(movable)
            name, old = candidate.items[i]
            value = rng.choice([v for v in self.knobs[i].values if v != old])
            items = (*candidate.items[:i], (name, value), *candidate.items[i + 1 :])
            if not (self._check and self._check(dict(items))):
                return Candidate(self.name, items)
        return candidate

    def crossover(self, a: Candidate, b: Candidate, rng: random.Random, tries: int = 16) -> Candidate:
        """A valid child taking each knob from one parent; `a` when none was found."""
        for _ in range(tries):
            items = tuple(rng.choice(pair) for pair in zip(a.items, b.items, strict=True))
            if not (self._check and self._check(dict(items))):
                return Candidate(self.name, items)
        return a

    def valid_share(self, samples: int = 4096, seed: int = 0) -> tuple[float, bool]:
        """(share of configs that meet the constraints, whether it is exact): counted up to 20,000 configs, else sampled."""
        if self.size <= 20_000:
            return sum(1 for _ in self) / self.size, True
        rng = random.Random(seed)
        valid = sum(not (self._check and self._check(self.at(rng.randrange(self.size)).config)) for _ in range(samples))
        return valid / samples, False
