"""Judges rules that choose between our Kronecker-sparse kernels and torch's formulations, on results of a bench.

Read first: `judge`. The rules: what `ks_matmul` does (`table`: measured; `predictor`: as if the shape had not been measured), the
rule of ksmm's paper, our kernel always, the fastest formulation always. Predictor and paper's rule are judged on shapes that they
have not seen: the shapes of a group are dealt into `FOLDS` parts, and each part is judged by what the others say.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kronsched.bench.groups import group_of
from kronsched.bench.results import read_results
from kronsched.bench.row import Row
from kronsched.errors import ArgumentError
from kronsched.nn.ks_select import Selector
from kronsched.nn.ks_select_library import FORMULATIONS
from kronsched.nn.ks_select_predict import KERNEL, Entry, paper_prefers_kernel, sparsity
from kronsched.workloads.ks import KSMatmul

FOLDS = 10


@dataclass(frozen=True)
class Verdict:
    """How good a rule is.

    regret: geometric mean of the time of what a rule runs / the least time.  worst: the largest of these.  right: share of
    the shapes where it runs the fastest (within 3%).  library: share where it runs no kernel of ours.
    """

    group: str
    rule: str
    shapes: int
    regret: float
    worst: float
    right: float
    library: float

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def entries_of(paths: Sequence[Path]) -> tuple[str, list[Entry]]:
    """(device, entries) of the ks rows of results; of a shape in several files the last counts. ArgumentError for two devices."""
    rows: dict[str, Row] = {}
    devices: dict[str, None] = {}
    for path in paths:
        device, found = read_results(path)
        rows.update(found)
        devices[device] = None
    if len(devices) > 1:
        raise ArgumentError(f"the results are of several devices: {', '.join(devices)}")
    entries = [e for row in rows.values() if (e := _entry(row)) is not None]
    return next(iter(devices)), entries


def judge(entries: Sequence[Entry]) -> list[Verdict]:
    """Each rule on each group of shapes."""
    by_group: dict[str, list[Entry]] = defaultdict(list)
    for entry in entries:
        by_group[group_of(entry.workload)].append(entry)
    predicted = _by_others(by_group)
    selector = Selector(entries)
    out = []
    for group, own in by_group.items():
        threshold = _best_threshold(own)
        thresholds = _thresholds_of_others(own)
        rules: Mapping[str, Callable[[Entry], str]] = {
            "table": lambda e: selector.choose(e.workload).name,
            "predictor": lambda e: predicted[e.workload.key],
            "paper, (b+c)/(bc) ≥ a threshold": lambda e, ts=thresholds: _by_paper(e, ts[e.workload.key]),  # type: ignore[misc]
            f"paper, the best: {threshold:.3g}": lambda e, t=threshold: _by_paper(e, t),  # type: ignore[misc]
            "kernel always": lambda e: KERNEL,
            "library always": lambda e: e.best_library or KERNEL,
        }
        out += [_verdict(group, name, own, rule) for name, rule in rules.items()]
    return out


def _by_others(by_group: Mapping[str, Sequence[Entry]]) -> dict[str, str]:
    """What is chosen for each shape, by key, by what other parts of its group say."""
    choices: dict[str, str] = {}
    for fold in range(FOLDS):
        seen = [e for own in by_group.values() for i, e in enumerate(own) if i % FOLDS != fold]
        selector = Selector(seen)
        for own in by_group.values():
            choices |= {e.workload.key: selector.choose(e.workload).name for e in own[fold::FOLDS]}
    return choices


def _thresholds_of_others(own: Sequence[Entry]) -> dict[str, float]:
    """The threshold of the paper's rule for each shape, by key, that suits the other parts of its group best."""
    found: dict[str, float] = {}
    for fold in range(FOLDS):
        threshold = _best_threshold([e for i, e in enumerate(own) if i % FOLDS != fold])
        found |= {e.workload.key: threshold for e in own[fold::FOLDS]}
    return found


def _verdict(group: str, name: str, entries: Sequence[Entry], rule: Callable[[Entry], str]) -> Verdict:
    ratios, library = [], 0
    for entry in entries:
        choice = rule(entry)
        library += choice != KERNEL
        ratios.append(_time(entry, choice) / _least(entry))
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    right = sum(ratio <= 1.03 for ratio in ratios) / len(ratios)
    return Verdict(group, name, len(ratios), mean, max(ratios), right, library / len(ratios))


def _time(entry: Entry, name: str) -> float:
    """The time of a choice; of one that there is not, the worst there is."""
    return entry.times.get(name) or max(entry.times.values())


def _least(entry: Entry) -> float:
    return min(entry.times.values())


def _by_paper(entry: Entry, threshold: float) -> str:
    kernel = all(paper_prefers_kernel(p, threshold) for p in entry.workload.patterns)
    return KERNEL if kernel else entry.best_library or KERNEL


def _best_threshold(entries: Sequence[Entry]) -> float:
    """The threshold of the paper's rule with which these shapes take the least time."""
    ratios = sorted({sparsity(p) for e in entries for p in e.workload.patterns})
    candidates = [0.0, *ratios, math.inf]
    return min(candidates, key=lambda t: sum(math.log(_time(e, _by_paper(e, t))) for e in entries))


def _entry(row: Row) -> Entry | None:
    if not isinstance(row.workload, KSMatmul) or row.workload.epilogue:  # the table is of plain products
        return None
    library = {name: us for name, us in row.peers.items() if us and name in FORMULATIONS}
    return Entry(row.workload, row.us, library) if library else None
