"""The search-strategy interface. One strategy a file; the tuner loop asks for batches and tells results.

Read first: `SearchStrategy.ask` / `tell`, and `Observation`, which is all a strategy ever sees of a measurement.
"""

from __future__ import annotations

import abc
import dataclasses
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from kronsched.cost_model.base import CostModel
from kronsched.errors import ArgumentError, ArgumentTypeError, choose
from kronsched.space import Candidate, SearchSpace


@dataclass(frozen=True)
class Observation:
    """A measured candidate. `cost_us` is the objective (median microseconds, or joules) and None for a failure."""

    candidate: Candidate
    status: str
    cost_us: float | None
    source_sha256: str | None = None


@dataclass(frozen=True)
class NoOptions:
    """A strategy without options."""


def option(default: int | float, help: str) -> Any:
    """A field of an options dataclass: a number with one line of help, which makes the strategy's docstring table."""
    return dataclasses.field(default=default, metadata={"help": help})


class SearchStrategy(abc.ABC):
    """Proposes candidates. Deterministic given the seed and the observations.

    `model` is shared with the tuner, which has already warm-started it; a strategy that does not use it ignores it.
    `start` holds candidates worth measuring first (the schedule's default config). All searching strategies here do so: a
    comparison in which only one of them knew the default would compare the default, not the search.
    `options` overrides fields of the class's `Options` by name.
    """

    name: ClassVar[str]
    Options: ClassVar[type[Any]] = NoOptions
    """A frozen dataclass of numbers made with `option`."""
    uses_model: ClassVar[bool] = True
    """False lets the tuner skip the cost model altogether."""
    batch_size: int = 8
    """The batch the strategy was designed for; the tuner asks for at most this many at a time."""

    def __init_subclass__(cls) -> None:
        """Append the table of options to the docstring."""
        super().__init_subclass__()
        fields = dataclasses.fields(cls.Options)
        if "Options" in vars(cls) and fields:
            rows = "\n".join(f"    | {f.name} | {f.default} | {f.metadata.get('help', '')} |" for f in fields)
            cls.__doc__ = f"{cls.__doc__ or ''}\n    | option | default | |\n    |---|---|---|\n{rows}\n    "

    def __init__(
        self,
        space: SearchSpace,
        model: CostModel,
        seed: int = 0,
        *,
        start: Sequence[Candidate] = (),
        options: Mapping[str, int | float] | None = None,
    ) -> None:
        """Bind the strategy to a space and a model. Raises ArgumentError for an option that does not exist."""
        self.space = space
        self.model = model
        self.rng = random.Random(seed)
        self.seen: set[str] = set()
        self.start = tuple(start)
        self.options = make_options(type(self), options)

    @abc.abstractmethod
    def ask(self, n: int) -> list[Candidate]:
        """Up to `n` valid, distinct candidates never asked or told before; empty when the space is exhausted."""

    def tell(self, observations: Sequence[Observation]) -> None:
        """Learn from results, own or recorded earlier (resume). Refits the model when `uses_model`."""
        self.seen.update(o.candidate.key for o in observations)
        if self.uses_model:
            self.model.update(observations)


def make_options(strategy: type[SearchStrategy], given: Mapping[str, int | float] | None) -> Any:
    """The strategy's options with the given ones replaced; ArgumentError or ArgumentTypeError names the wrong one."""
    defaults: dict[str, int | float] = vars(strategy.Options())
    values: dict[str, int | float] = {}
    for name, value in (given or {}).items():
        if name not in defaults:
            raise choose(f"option of strategy {strategy.name}", name, list(defaults) or ["none"])
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ArgumentTypeError(f"option {name}={value!r} of strategy {strategy.name} must be a number")
        if isinstance(defaults[name], int) and value != int(value):
            raise ArgumentTypeError(f"option {name}={value!r} of strategy {strategy.name} must be an integer")
        if value < 0:
            raise ArgumentError(f"option {name}={value!r} of strategy {strategy.name} is not allowed: a number ≥ 0 is needed")
        values[name] = type(defaults[name])(value)
    return strategy.Options(**values)
