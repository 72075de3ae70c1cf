"""Predicts, for a Kronecker-sparse product that was not measured, how long our kernel and torch's formulations take.

Each of them has a Gaussian process over the logs of the times that were measured in a group of shapes, relative to bytes and
arithmetic: a trend, linear in the logs of the pattern, of (b + c)/(b·c) and of operations a byte, and what near shapes have in
common. How a prediction becomes a choice, `Rule`, is decided group by group: by the rule that would have served the shapes of
the table best, each of them predicted from the others. Our kernel always is one of these rules, that of ksmm's paper another.

Read first: `Predictor`. Source of `sparsity`: arXiv 2405.15013.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kronsched.workloads.ks import KSMatmul, Pattern

if TYPE_CHECKING:
    import numpy as np

KERNEL = "kernel"
FAR = 3.0
"""Octaves of the batch, plus those of a, b, c and d (mean over the factors), beyond which a shape says nothing of another."""
NEAREST = 4
MARGINS = (0.03, 0.10)
"""Logs of our time over a library's: what a prediction may have to show before the library is chosen."""
CLEARLY = 0.002
"""Mean share of the time that a rule must save over a simpler one."""
BALANCE = {"float16": 150.0, "bfloat16": 150.0, "float32": 20.0, "float64": 10.0}
"""Operations that a GPU of these days does while it moves a byte."""
# Standard deviations of the prior, in logs of a time: the level, each slope, what is local (with its octaves), and noise.
_LEVEL, _SLOPE, _LOCAL, _OCTAVES, _NOISE = 1.0, 0.1, 0.2, 2.0, 0.05


@dataclass(frozen=True)
class Entry:
    """Times of one shape, microseconds a call: of our kernel (None where it has none) and of formulations by name."""

    workload: KSMatmul
    kernel_us: float | None
    library_us: Mapping[str, float]

    @property
    def best_library(self) -> str | None:
        """The fastest formulation."""
        return min(self.library_us, key=lambda name: self.library_us[name]) if self.library_us else None

    @property
    def times(self) -> dict[str, float]:
        """Every time by name."""
        return {**self.library_us, **({KERNEL: self.kernel_us} if self.kernel_us else {})}

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"workload": self.workload.to_dict(), "kernel_us": self.kernel_us, "library_us": dict(self.library_us)}


@dataclass(frozen=True)
class Rule:
    """The library serves where log(our time / its time) ≥ margin, or where (b + c)/(b·c) of a factor is below `dense_below`."""

    margin: float = math.inf
    dense_below: float = 0.0

    def prefers_library(self, gap: float, workload: KSMatmul) -> bool:
        """gap: log of our time over the library's."""
        return gap >= self.margin or not all(paper_prefers_kernel(p, self.dense_below) for p in workload.patterns)


class Predictor:
    """Of one device, from what was measured on it. Nothing is computed before the first question of a group."""

    def __init__(self, entries: Sequence[Entry]) -> None:
        """One entry a shape."""
        self._entries: dict[tuple[Any, ...], list[Entry]] = defaultdict(list)
        for entry in entries:
            self._entries[group_of(entry.workload)].append(entry)
        self._groups: dict[tuple[Any, ...], _Group] = {}

    def times(self, workload: KSMatmul) -> dict[str, float]:
        """The microseconds that are expected, by name. Empty when all is far."""
        group = self._group(workload)
        return {} if group is None else group.times(workload)

    def choose(self, workload: KSMatmul, times: Mapping[str, float]) -> str:
        """What to run, by `times` (or ones that are known better) and the rule of the group."""
        library = {name: us for name, us in times.items() if name != KERNEL}
        group = self._group(workload)
        if not library or group is None:
            return KERNEL
        best = min(library, key=lambda name: library[name])
        if KERNEL not in times:
            return best
        gap = math.log(times[KERNEL] / library[best])
        return best if group.rule.prefers_library(gap, workload) else KERNEL

    def _group(self, workload: KSMatmul) -> _Group | None:
        key = group_of(workload)
        if key not in self._groups and key in self._entries:
            self._groups[key] = _Group(self._entries[key])
        return self._groups.get(key)


class _Group:
    """The shapes that are compared with each other."""

    def __init__(self, entries: Sequence[Entry]) -> None:
        import numpy as np

        self._entries = entries
        self._places = np.array([_place(e.workload) for e in entries])
        self._trends = np.array([_trend(e.workload) for e in entries])
        self._processes: dict[str, _Process] = {}
        covariance = _covariance(self._places, self._trends, self._places, self._trends)
        inverses: dict[tuple[int, ...], np.ndarray] = {}
        for name in dict.fromkeys(name for e in entries for name in e.times):
            rows = tuple(i for i, e in enumerate(entries) if name in e.times)
            if rows not in inverses:
                inverses[rows] = np.linalg.inv(covariance[np.ix_(rows, rows)] + _NOISE**2 * np.eye(len(rows)))
            values = [math.log(entries[i].times[name] / _work(name, entries[i].workload)) for i in rows]
            self._processes[name] = _Process(rows, values, inverses[rows])

    def times(self, workload: KSMatmul) -> dict[str, float]:
        """See `Predictor.times`."""
        import numpy as np

        place, trend = np.array([_place(workload)]), np.array([_trend(workload)])
        distances = _distances(place, self._places)[0]
        near = [self._entries[i].times for i in np.argsort(distances, kind="stable")[:NEAREST] if distances[i] <= FAR]
        if not near:
            return {}
        to = _covariance(place, trend, self._places, self._trends)[0]
        # What most of the near shapes do not have, such as a dense matrix that is too large, is not there.
        names = [
            name
            for name in self._processes
            if 2 * sum(name in times for times in near) > len(near) and (name == KERNEL or _is_there(name, workload))
        ]
        return {name: math.exp(self._processes[name].at(to)) * _work(name, workload) for name in names}

    @functools.cached_property
    def rule(self) -> Rule:
        """The rule that serves the shapes best, each as if it had not been measured."""
        known = []
        for i, entry in enumerate(self._entries):
            times = {n: p.left_out[i] + math.log(_work(n, entry.workload)) for n, p in self._processes.items() if i in p.left_out}
            ours = times.pop(KERNEL, None)
            if ours is not None and entry.kernel_us and times:
                name = min(times, key=lambda n: times[n])
                known.append((entry.workload, ours - times[name], math.log(entry.kernel_us / entry.library_us[name])))
        best, most = Rule(), 0.0
        for rule in _rules([w for w, _, _ in known]):
            saved = sum(gain for w, gap, gain in known if rule.prefers_library(gap, w))
            if saved > most + CLEARLY * len(known):
                best, most = rule, saved
        return best


class _Process:
    """A Gaussian process over the shapes `rows` of a group, from the inverse of their covariance with noise."""

    def __init__(self, rows: Sequence[int], values: Sequence[float], inverse: np.ndarray) -> None:
        import numpy as np

        self._rows = list(rows)
        self._mean = float(np.mean(values))
        self._weights = inverse @ (np.array(values) - self._mean)
        left_out = np.array(values) - self._weights / inverse.diagonal()
        self.left_out: dict[int, float] = dict(zip(self._rows, left_out.tolist(), strict=True))
        """What is expected of each shape by the others."""

    def at(self, covariance: np.ndarray) -> float:
        """What is expected of a shape with these covariances with the group's."""
        return self._mean + float(covariance[self._rows] @ self._weights)


def group_of(workload: KSMatmul) -> tuple[Any, ...]:
    """What must agree for two shapes to be compared: dtype, layout, number of factors, which of d are 1."""
    return workload.dtype, workload.layout, tuple(d == 1 for *_, d in workload.patterns)


def sparsity(pattern: Pattern) -> float:
    """(b + c)/(b·c) of ksmm's paper: memory moved over arithmetic."""
    _, b, c, _ = pattern
    return (b + c) / (b * c)


def paper_prefers_kernel(pattern: Pattern, threshold: float) -> bool:
    """The rule of ksmm's authors: a sparse kernel pays where `sparsity` is large."""
    return sparsity(pattern) >= threshold


def _rules(workloads: Sequence[KSMatmul]) -> list[Rule]:
    """The rules to choose from, the simpler ones first."""
    least = sorted({min(map(sparsity, w.patterns)) for w in workloads})
    thresholds = [*((x + y) / 2 for x, y in itertools.pairwise(least)), *(2 * t for t in least[-1:])]
    return [*(Rule(margin) for margin in MARGINS), *(Rule(dense_below=t) for t in thresholds)]


def _is_there(name: str, workload: KSMatmul) -> bool:
    from kronsched.nn.ks_select_library import serves

    return all(serves(name, pattern, workload.layout == "batch_first") for pattern in workload.patterns)


@functools.lru_cache(maxsize=1 << 14)
def _work(name: str, workload: KSMatmul) -> float:
    """Bytes moved once, and the arithmetic of a formulation as bytes that a GPU moves meanwhile (a rough balance is enough)."""
    flops = float(workload.flops)
    if name == "dense":
        flops = 2.0 * workload.batch * workload.sizes[0] * workload.sizes[-1]
    elif name == "block_dense":
        flops = sum(2.0 * workload.batch * a * b * c * d * d for a, b, c, d in workload.patterns)
    return workload.min_bytes + flops / BALANCE.get(workload.dtype, BALANCE["float32"])


def _place(workload: KSMatmul) -> list[float]:
    """Where a shape lies, in octaves; `_distances` are sums of differences."""
    count = len(workload.patterns)
    return [math.log2(workload.batch), *(math.log2(n) / count for p in workload.patterns for n in p)]


@functools.lru_cache(maxsize=1 << 12)
def _trend(workload: KSMatmul) -> tuple[float, ...]:
    """What logs of times are linear in: a level, then slopes, about zero for shapes in the middle of ksmm's grid."""
    slopes = [math.log2(workload.batch) - 14]
    for pattern in workload.patterns:
        slopes += [*(math.log2(n) - 3 for n in pattern), math.log2(sparsity(pattern)) + 4]
    slopes.append(math.log2(workload.flops / workload.min_bytes) - 5)
    return (_LEVEL, *(_SLOPE * slope for slope in slopes))


def _distances(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    import numpy as np

    found: np.ndarray = np.abs(one[:, None] - other[None]).sum(-1)
    return found


def _covariance(place: np.ndarray, trend: np.ndarray, places: np.ndarray, trends: np.ndarray) -> np.ndarray:
    import numpy as np

    found: np.ndarray = trend @ trends.T + _LOCAL**2 * np.exp(-_distances(place, places) / _OCTAVES)
    return found
