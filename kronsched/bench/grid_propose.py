"""What to try next for one shape of a grid, worked out in a builder process: what is best for its neighbours, fitted to it.

Read first: `propose`.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from kronsched import registry
from kronsched.cost_model.base import ModelError
from kronsched.errors import InvalidConfig, KronschedError
from kronsched.search.predict import guessed_us
from kronsched.space import Candidate, Config, SearchSpace, Value

if TYPE_CHECKING:
    from kronsched.cost_model.transfer import Prior
    from kronsched.hardware import Device
    from kronsched.workloads.base import Workload

REPAIRS = 4
"""Knobs that may be changed one after another to make a neighbour's config valid here."""
HOPEFUL = 1.5
"""Without hints, changes are tried of the defaults of schedules that are expected to take at most so many times the least."""
HOPELESS = 3.0
"""No default is tried of which so many times the least is expected: a call of it can take longer than all others together."""
TRUSTED = 0.85
"""What is expected of the schedule that is best for the nearest neighbour counts so many times, in the order of the defaults."""
RIVAL = 1.25
"""The default of a schedule that is best for no neighbour is tried as well where so many times the least is expected of it."""
POOL = 128
"""Valid candidates of a space that are scored when there is a model."""


@dataclass(frozen=True)
class Ask:
    """A question to `propose`.

    spaces: names of the schedules whose defaults may be tried.  rivals: of others, tried where much is expected of them.
    hints: configs that are good for neighbours, the best hint first; those of this very shape may be among them.  known:
    candidates that are not wanted again.  n: how many.  models: folder of cost models, "" without.
    """

    workload: Workload
    device: Device
    spaces: tuple[str, ...]
    hints: tuple[Candidate, ...]
    known: tuple[Candidate, ...]
    n: int
    seed: int
    models: str
    rivals: tuple[str, ...] = ()


def propose(ask: Ask) -> list[Candidate]:
    """At most `ask.n` candidates, valid and not known: a default, what is best for a neighbour, other defaults, changes."""
    rng = random.Random(ask.seed)
    seen = {c.key for c in ask.known}
    spaces = {name: space for name in _names(ask) if (space := _space(ask, name)) is not None}
    defaults = _defaults(ask, spaces)
    out = [c for c in defaults if not (c.key in seen or seen.add(c.key))]  # type: ignore[func-returns-value]
    pool: list[Candidate] = []
    for candidate in _moved(ask, spaces, defaults, rng):
        if candidate.key not in seen:
            seen.add(candidate.key)
            pool.append(candidate)
        if len(pool) >= (POOL if ask.models else ask.n):
            break
    ranked = _ranked(ask, spaces, pool)
    lead = 1 if ask.hints else 0
    return [*out[:1], *ranked[:lead], *out[1:], *ranked[lead:]][: ask.n]


def _names(ask: Ask) -> list[str]:
    """The schedules at hand."""
    return list(dict.fromkeys([*ask.spaces, *(h.space for h in ask.hints), *ask.rivals]))


def _space(ask: Ask, name: str) -> SearchSpace | None:
    schedule = registry.schedule(name)
    if schedule.supports(ask.workload, ask.device) is not None:
        return None
    try:
        return schedule.space(ask.workload, ask.device)
    except KronschedError:
        return None


def _defaults(ask: Ask, spaces: Mapping[str, SearchSpace]) -> dict[Candidate, float]:
    """The defaults to be tried with the times expected of them, the least first."""
    found: dict[Candidate, float] = {}
    for name, space in spaces.items():
        if name in ask.spaces or name in ask.rivals:
            try:
                config = registry.schedule(name).default_config(ask.workload, ask.device)
                found[space.candidate(config)] = _expected_us(ask, name, config)
            except InvalidConfig:
                continue
    least, first = min(found.values(), default=0.0), ask.hints[0].space if ask.hints else ""
    kept = {c: us for c, us in found.items() if us <= (HOPELESS if c.space in ask.spaces else RIVAL) * least}
    return dict(sorted(kept.items(), key=lambda pair: pair[1] * (TRUSTED if pair[0].space == first else 1.0)))


def _expected_us(ask: Ask, name: str, config: Config) -> float:
    return guessed_us(registry.schedule(name), ask.workload, ask.device, config)


def _moved(
    ask: Ask, spaces: Mapping[str, SearchSpace], defaults: Mapping[Candidate, float], rng: random.Random
) -> Iterator[Candidate]:
    """The hints made valid, then ever more changes of them, then anything."""
    fitted = []
    for hint in ask.hints:
        if hint.space in spaces and (found := fit(spaces[hint.space], hint.config, rng)) is not None:
            fitted.append(found)
            yield found
    if not fitted:  # one trial is enough to see that a schedule is far behind
        fitted = [c for c, us in defaults.items() if us <= HOPEFUL * min(defaults.values())]
    for round_ in range(3 * POOL if fitted else 0):
        # Hints come the best first, and so do their children.
        parent = fitted[min(int(rng.expovariate(1.0) * 2), len(fitted) - 1)]
        space = spaces[parent.space]
        child = space.neighbour(parent, rng, tries=8)
        yield space.neighbour(child, rng, tries=8) if round_ % 3 == 2 else child


def fit(space: SearchSpace, config: Config, rng: random.Random) -> Candidate | None:
    """The config with the nearest values that the space lists, and few more changes that make it valid; None without success."""
    near = {k.name: _nearest(k.values, config.get(k.name)) for k in space.knobs}
    for _ in range(REPAIRS):
        reason = space.invalid(near)
        if reason is None:
            return space.candidate(near)
        changed = _repaired(space, near, reason, rng)
        if changed is None:
            return None
        near = changed
    return space.candidate(near) if space.invalid(near) is None else None


def _repaired(space: SearchSpace, config: Mapping[str, Value], reason: str, rng: random.Random) -> dict[str, Value] | None:
    """The config with one knob changed: valid, or at least wrong for another reason."""
    knobs = [k for k in space.knobs if len(k.values) > 1]
    # What a reason names is changed first.
    knobs.sort(key=lambda k: (k.name not in reason, rng.random()))
    other = None
    for knob in knobs:
        at = knob.values.index(config[knob.name])
        for value in sorted(knob.values, key=lambda v: abs(knob.values.index(v) - at))[1:]:
            changed = {**config, knob.name: value}
            now = space.invalid(changed)
            if now is None:
                return changed
            if other is None and now != reason and knob.name in reason:
                other = changed
    return other


def _nearest(values: Sequence[Value], wanted: Value | None) -> Value:
    if wanted in values:
        return wanted  # type: ignore[return-value]
    numbers = [v for v in values if isinstance(v, int | float) and not isinstance(v, bool)]
    if len(numbers) == len(values) and isinstance(wanted, int | float):
        return min(numbers, key=lambda v: abs(np.log2(max(v, 0.5)) - np.log2(max(float(wanted), 0.5))))
    return values[0]


def _ranked(ask: Ask, spaces: Mapping[str, SearchSpace], pool: Sequence[Candidate]) -> list[Candidate]:
    """By the model's score where there is one for every space of the pool, with every fourth as hinted; else as hinted."""
    scores: dict[str, float] = {}
    for name in {c.space for c in pool} if ask.models else ():
        own = [c for c in pool if c.space == name]
        prior = _prior(Path(ask.models), name)
        if prior is None:
            return list(pool)
        scores.update(zip((c.key for c in own), _scores(ask, spaces[name], prior, own), strict=True))
    if not scores:
        return list(pool)
    scored = sorted(pool, key=lambda c: -scores[c.key])
    turns = [c for i, one in enumerate(scored) for c in ([one, pool[i // 3]] if i % 3 == 0 else [one])]
    return list({c.key: c for c in turns}.values())


def _scores(ask: Ask, space: SearchSpace, prior: Prior, candidates: Sequence[Candidate]) -> list[float]:
    from kronsched.search.predict import model_on

    model = model_on(prior, registry.schedule(space.name), space, ask.workload, ask.device, ask.seed)
    return [float(s) for s in prior.score(model.featurizer.matrix(candidates))]


def _prior(folder: Path, space: str) -> Prior | None:
    path = folder / f"{space}.json"
    try:
        return _cached(path, path.stat().st_mtime_ns)
    except (OSError, ModelError):  # not trained yet, or just being replaced
        return None


@functools.lru_cache(maxsize=8)
def _cached(path: Path, changed: int) -> Prior:
    from kronsched.cost_model.pretrained import load_prior

    return load_prior(path)
