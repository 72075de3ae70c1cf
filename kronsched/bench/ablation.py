"""What each idea of a schedule is worth: the same search with and without it, on the same shapes.

An ablation is a part of a space: some knobs have one value left, as a schedule without the idea would. Every variant is tuned by
itself with as many trials, seed and builders alike. As a part's configs are all in the whole space, the whole space's best is the
best of all of them; the winners are timed again at the end, one after another, several times.

    packing              y is stored as many bytes at a time as knob "vector" says, packed in registers; off: as one accumulator
                         tile leaves them in a thread, two values
    duplicate-aware      overlapping windows read a pixel kh · kw times: on, L1 keeps it ("cache") and chunks of all taps of some
                         channels follow each other ("order"); off: every read goes to L2, in the order of weights
    warp knobs           tiles and warps of a block; off: one middling tile for all shapes
    NHWCnc               not a knob, as it is the caller's tensors that are laid out so: the same layer with x and y in blocks
                         of 8 images × 32 bytes of channels, tuned over the whole space; below 1 where blocks are faster

Read first: `ABLATIONS`, `ablate`.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kronsched import registry
from kronsched.errors import KronschedError, UnsupportedError, UserError, choose
from kronsched.measure.crew import Crew
from kronsched.measure.live import LiveMeasurer

if TYPE_CHECKING:
    from kronsched.hardware import Device
    from kronsched.schedules.base import Schedule
    from kronsched.space import Candidate, SearchSpace
    from kronsched.workloads.base import Workload

WHOLE, BLOCKED = "whole", "NHWCnc"
LEAST = "least"
"""In an ablation: the smallest value that the shape allows."""
_SHARED: dict[str, dict[str, Any]] = {
    "packing off": {"vector": LEAST},
    "duplicate-aware off": {"cache": "l2", "order": "tap"},
}
ABLATIONS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "conv2d_cuda_mma": {
        **_SHARED,
        "warp knobs fixed": {"block_row_warps": 2, "block_col_warps": 2, "warp_row_tiles": 2, "warp_col_tiles": 4},
    },
    "conv2d_cuda_wgmma": {
        **_SHARED,
        "warp knobs fixed": {"block_m": 128, "block_n": 64, "row_groups": 2, "col_groups": 1},
    },
}
"""schedule -> ablation -> the values that are left of some knobs."""
AGAIN = 3
"""Times the winners are timed at the end."""


@dataclass(frozen=True)
class Outcome:
    """One shape under one schedule. us: variant -> microseconds of its best; None where nothing was found.

    worth: ablation -> its time / the whole space's, above 1 where the idea helps; an ablation that leaves the space of the shape
    as it is, or empty, is not in it, nor a layout that the shape or the schedule does not allow.
    """

    workload: Workload
    schedule: str
    us: Mapping[str, float | None]
    configs: Mapping[str, Mapping[str, Any]]
    trials: Mapping[str, int]
    error: str = ""

    @property
    def worth(self) -> dict[str, float]:
        """See above."""
        whole = self.us.get(WHOLE)
        return {name: us / whole for name, us in self.us.items() if whole and us and name != WHOLE}

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "workload": self.workload.to_dict(),
            "label": self.workload.label,
            "schedule": self.schedule,
            "us": dict(self.us),
            "worth": self.worth,
            "configs": {name: dict(c) for name, c in self.configs.items()},
            "trials": dict(self.trials),
            "error": self.error,
        }


def parts_of(space: SearchSpace) -> dict[str, SearchSpace]:
    """The whole space and its ablations, less those that change nothing or leave nothing of it."""
    if space.name not in ABLATIONS:
        raise choose("schedule", space.name, list(ABLATIONS))
    found = {WHOLE: space}
    for name, fixed in ABLATIONS[space.name].items():
        values = {k.name: k.values for k in space.knobs}
        wanted = {knob: min(values[knob]) if value == LEAST else value for knob, value in fixed.items()}
        if any(value not in values[knob] for knob, value in wanted.items()):
            continue
        if any(len(values[knob]) > 1 for knob in wanted) and next(iter(part := space.restrict(wanted)), None) is not None:
            found[name] = part
    return found


def ablate(
    workloads: Sequence[Workload],
    schedule_name: str,
    device: Device,
    trials: int,
    *,
    builders: int | None = None,
    seed: int = 0,
    on_outcome: Callable[[Outcome], None] = lambda outcome: None,
) -> list[Outcome]:
    """Tune every variant of each workload up to so many trials. A shape that fails is an outcome that says why.

    Raises ArgumentError for a schedule without ablations, UnsupportedError for a device that is not here.
    """
    if schedule_name not in ABLATIONS:
        raise choose("schedule", schedule_name, list(ABLATIONS))
    if not device.present:
        raise UnsupportedError(f"target={device.name!r} is not on this machine: nothing can be measured")
    schedule, outcomes = registry.schedule(schedule_name), []
    if schedule.device_kind != device.kind:
        raise UnsupportedError(f"schedule {schedule_name} is for {schedule.device_kind}, target={device.name!r} is {device.kind}")
    with Crew(device, builders) as crew:
        for workload in workloads:
            try:
                outcomes.append(_outcome(workload, schedule, device, trials, crew, seed))
            except KronschedError as e:
                outcomes.append(Outcome(workload, schedule_name, {}, {}, {}, " ".join(str(e).split())))
            on_outcome(outcomes[-1])
    return outcomes


def _outcome(workload: Workload, schedule: Schedule, device: Device, trials: int, crew: Crew, seed: int) -> Outcome:
    reason = schedule.supports(workload, device)
    if reason is not None:
        raise UnsupportedError(reason)
    parts = parts_of(schedule.space(workload, device))
    found = _tune_parts(workload, parts, schedule, device, trials, crew, seed)
    blocked = _in_blocks(workload)
    if blocked is None or schedule.supports(blocked, device) is not None:
        return found
    other = _tune_parts(blocked, {WHOLE: schedule.space(blocked, device)}, schedule, device, trials, crew, seed)
    return replace(
        found,
        us={**found.us, BLOCKED: other.us.get(WHOLE)},
        configs={**found.configs, BLOCKED: other.configs.get(WHOLE, {})},
        trials={**found.trials, BLOCKED: other.trials.get(WHOLE, 0)},
    )


def _in_blocks(workload: Workload) -> Workload | None:
    """The same layer on tensors of the other layout; None for what has none."""
    from kronsched.workloads.conv2d import Conv2d

    try:
        return replace(workload, layout=BLOCKED) if isinstance(workload, Conv2d) else None
    except UserError:
        return None


def _tune_parts(
    workload: Workload,
    parts: Mapping[str, SearchSpace],
    schedule: Schedule,
    device: Device,
    trials: int,
    crew: Crew,
    seed: int,
) -> Outcome:
    """Tune each part, then time the winners again."""
    best: dict[str, tuple[float, Candidate]] = {}
    counts: dict[str, int] = {}
    with LiveMeasurer(workload, [schedule], device, crew=crew, seed=seed) as measurer:
        for name, part in parts.items():
            found, counts[name] = _tuned(workload, device, part, trials, measurer, seed)
            if found is not None:
                best[name] = found
        if best:
            best[WHOLE] = min(best.values(), key=lambda found: found[0])
        again = _timed_again(list({c.key: c for _, c in best.values()}.values()), workload, schedule, device, crew, seed)
    us = {name: again.get(best[name][1].key) if name in best else None for name in parts}
    return Outcome(workload, schedule.name, us, {name: c.config for name, (_, c) in best.items()}, counts)


def _tuned(
    workload: Workload, device: Device, part: SearchSpace, trials: int, measurer: LiveMeasurer, seed: int
) -> tuple[tuple[float, Candidate] | None, int]:
    """((microseconds, candidate) of the best, trials made)."""
    import kronsched

    with tempfile.TemporaryDirectory(prefix="kronsched-ablation-") as folder:
        space = Path(folder) / "space.toml"
        space.write_text(_toml(part), encoding="utf-8")
        result = kronsched.tune(
            workload,
            target=device,
            trials=trials,
            log=Path(folder) / "log.jsonl",
            space=space,
            seed=seed,
            warm_start=False,
            measurer=measurer,
        )
    record = result.best
    if record is None or record.median_us is None:
        return None, result.trials
    return (record.median_us, part.candidate(record.config)), result.trials


def _timed_again(
    winners: Sequence[Candidate], workload: Workload, schedule: Schedule, device: Device, crew: Crew, seed: int
) -> dict[str, float]:
    """Least median of several measurements of each, in turn."""
    least: dict[str, float] = {}
    for _ in range(AGAIN):
        with LiveMeasurer(workload, [schedule], device, crew=crew, seed=seed, dedupe=False) as measurer:
            for measured in measurer.measure(winners):
                if measured.median_us is not None:
                    key = measured.candidate.key
                    least[key] = min(measured.median_us, least.get(key, math.inf))
    return least


def _toml(space: SearchSpace) -> str:
    """The file of a space."""
    tables = [f"[knobs.{k.name}]\nvalues = {json.dumps(list(k.values))}\nhelp = {json.dumps(k.help)}\n" for k in space.knobs]
    return f'space = "{space.name}"\n\n' + "\n".join(tables)
