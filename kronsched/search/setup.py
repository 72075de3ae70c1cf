"""Everything `tune` settles before the first candidate: arguments, device, spaces, strategies, cost models.

Read first: `Plan` (what the loop needs) and `plan_for`.
"""

from __future__ import annotations

import contextlib
import os
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kronsched import registry
from kronsched.cost_model.base import CostModel
from kronsched.cost_model.null import NullModel
from kronsched.errors import ArgumentError, ArgumentTypeError, InvalidConfig, UnsupportedError, choose
from kronsched.hardware import Device, measure_ceilings, resolve_target
from kronsched.records.database import default_log, matches_device, search_dirs
from kronsched.records.journal import Journal
from kronsched.records.schema import TuningRecord
from kronsched.schedules.base import Schedule
from kronsched.search.base import SearchStrategy, make_options
from kronsched.search.table import OBJECTIVES
from kronsched.space import Candidate, Knob, SearchSpace, Value, load_knobs
from kronsched.workloads.base import Workload

COMPILERS = ("nvrtc", "nvcc")
LARGEST_VALUE = 1_000_000
MAX_SEED = 2**63 - 1
SMALL = 100_000
"""Configs of a space file that are looked through for a valid one before the run starts."""


@dataclass(frozen=True)
class Arm:
    """One schedule with its space, the schedule's default candidate, the cost model and the strategy that searches it."""

    schedule: Schedule
    space: SearchSpace
    default: Candidate | None
    model: CostModel
    strategy: SearchStrategy


@dataclass(frozen=True)
class Plan:
    """A tuning run that can start. known: records of the log for this workload, device and these spaces, each config once."""

    workload: Workload
    device: Device
    arms: tuple[Arm, ...]
    journal: Journal
    known: tuple[TuningRecord, ...]
    messages: tuple[str, ...]


def check_arguments(
    workload: object, trials: object, seed: object, strategy: object, objective: object, compiler: object, **others: object
) -> None:
    """Types and ranges of what needs no look at the machine; ArgumentError or ArgumentTypeError names the argument."""
    if not isinstance(workload, Workload):
        raise ArgumentTypeError(f"workload={workload!r} must be a workload, such as kronsched.KronMatmul(...)")
    _integer("trials", trials, least=1)
    _integer("seed", seed, least=0, most=MAX_SEED)
    if not isinstance(strategy, str):
        raise ArgumentTypeError(f"strategy={strategy!r} must be the name of a strategy")
    if objective not in OBJECTIVES:
        raise choose("objective", objective, OBJECTIVES)
    if compiler not in COMPILERS:
        raise choose("compiler", compiler, COMPILERS)
    for name in ("batch", "builders"):
        if others.get(name) is not None:
            _integer(name, others[name], least=1)
    for name in ("build_timeout_s", "run_timeout_s"):
        value = others.get(name, 1.0)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ArgumentTypeError(f"{name}={value!r} must be a number of seconds")
        if not value > 0:
            raise ArgumentError(f"{name}={value!r} is not allowed: a number of seconds > 0 is needed")
    if others.get("progress") is not None and not callable(others["progress"]):
        raise ArgumentTypeError(f"progress={others['progress']!r} must be callable")


def plan_for(
    workload: Workload,
    target: str | Device,
    log: str | os.PathLike[str] | None,
    strategy: str,
    seed: int,
    space_file: str | os.PathLike[str] | None,
    objective: str,
    warm_start: bool,
    options: Mapping[str, int | float] | None,
    compiler: str,
    measuring: bool,
) -> Plan:
    """Settle everything; raises UserError before anything is built or written but the empty log file.

    measuring: an injected measurer can measure even on a device that is not present.
    """
    cls = registry.strategy(strategy)
    make_options(cls, options)
    path = default_log(workload) if log is None else _path("log", log)
    override = None if space_file is None else _path("space", space_file)
    device = resolve_target(target) if not isinstance(target, Device) else target
    schedules = registry.schedules_for(workload, device)
    if not schedules:
        raise UnsupportedError(registry.not_served(workload, device))
    spaces = _spaces(schedules, workload, device, override)
    if objective == "energy" and device.kind != "cuda" and not measuring:
        raise UnsupportedError(f"objective='energy' is not supported on {device.name}: only NVIDIA GPUs have a counter")
    if device.kind == "cuda" and not measuring:
        _check_compiler(compiler)
    journal = Journal(path)
    if device.present or measuring:
        journal.check_writable()
        device = measure_ceilings(device) if not measuring else device
    messages: list[str] = []
    logs = _logs(path) if warm_start and cls.uses_model else []
    arms = []
    for schedule, space in spaces:
        try:
            default = _default(schedule, space, workload, device)
        except InvalidConfig as e:
            messages.append(f"{schedule.name} is left out, it has no default config for {workload.label}: {e}")
            continue
        model, message = _model(cls, schedule, space, workload, device, logs, path, seed)
        if message:
            messages.append(message)
        start = [] if default is None else [default]
        arms.append(Arm(schedule, space, default, model, cls(space, model, seed, start=start, options=options)))
    if not arms:
        raise UnsupportedError(f"{workload.label}: no schedule can start on {device.name}; {'; '.join(messages)}")
    known = known_records(journal, workload, device, [a.space for a in arms])
    return Plan(workload, device, tuple(arms), journal, known, tuple(messages))


def known_records(
    journal: Journal, workload: Workload, device: Device, spaces: Sequence[SearchSpace]
) -> tuple[TuningRecord, ...]:
    """Records of the log that need not be measured again: same workload and device, a config of the spaces; the last of each.

    The config decides, not the digest of the space: after a value was added to a knob, what was measured still counts.
    """
    by_name = {s.name: s for s in spaces}
    found: dict[str, TuningRecord] = {}
    for record in journal.read():
        space = by_name.get(record.space["name"])
        if space is None or record.workload_key != workload.key or not matches_device(record, device):
            continue
        if space.invalid(record.config) is None:
            found[record.candidate.key] = record
    return tuple(found.values())


def _spaces(
    schedules: Sequence[Schedule], workload: Workload, device: Device, override: Path | None
) -> list[tuple[Schedule, SearchSpace]]:
    """The space of each schedule; with a file, only the one that the file names, with the file's values."""
    if override is None:
        return [(s, s.space(workload, device)) for s in schedules]
    try:
        name: Any = tomllib.loads(override.read_text(encoding="utf-8")).get("space")
    except (OSError, ValueError):
        name = schedules[0].name  # load_knobs says what is wrong with the file
    found = {s.name: s for s in schedules}
    if not isinstance(name, str) or name not in found:
        raise choose(f"space file {str(override)!r}: space", name, list(found))
    space = _narrowed(found[name].space(workload, device), load_knobs(name, override), override)
    if space.size <= SMALL and next(iter(space), None) is None:
        raise ArgumentError(f"space file {str(override)!r}: no config of it is valid for {workload.label} on {device.name}")
    return [(found[name], space)]


def _narrowed(own: SearchSpace, knobs: Sequence[Knob], path: Path) -> SearchSpace:
    """The schedule's space with the file's values; knobs that the file does not name keep theirs."""
    values = {k.name: k.values for k in own.knobs}
    shipped = dict(values)
    with contextlib.suppress(ArgumentError):  # a schedule from outside may have no shipped file
        shipped |= {k.name: k.values for k in load_knobs(own.name)}
    for knob in knobs:
        if knob.name not in values:
            raise choose(f"space file {str(path)!r}: knob", knob.name, list(values))
        for value in knob.values:
            _check_value(f"space file {str(path)!r}: knobs.{knob.name} value", value, shipped[knob.name])
        # The schedule has left out values that mean nothing for this workload; a file for many workloads may name them.
        fitting = tuple(v for v in knob.values if v in values[knob.name])
        if len(values[knob.name]) > 1:
            values[knob.name] = fitting or knob.values
    return own.restrict(values)


def _check_value(what: str, value: Value, shipped: Sequence[Value]) -> None:
    """A new value must be of the kind of the shipped ones: one of them for strings and booleans, else a number in their range.

    Numbers may be new, up to a million: that is what a user edits a space for.
    """
    if all(isinstance(v, int) and not isinstance(v, bool) for v in shipped):
        least = min(int(v) for v in shipped)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= LARGEST_VALUE:
            raise ArgumentError(f"{what} {value!r} is not allowed: an int from {least} to {LARGEST_VALUE} is needed")
    elif not any(type(value) is type(v) and value == v for v in shipped):
        raise choose(what, value, shipped)


def _check_compiler(compiler: str) -> None:
    """Fail once, clearly, rather than with every candidate."""
    from kronsched.runtime.nvrtc import compile_cuda

    compile_cuda('extern "C" __global__ void probe() {}', "sm_80", compiler)


def _default(schedule: Schedule, space: SearchSpace, workload: Workload, device: Device) -> Candidate | None:
    """The schedule's default, None where a space file leaves it out."""
    config = schedule.default_config(workload, device)
    return space.candidate(config) if space.invalid(config) is None else None


def _model(
    cls: type[SearchStrategy],
    schedule: Schedule,
    space: SearchSpace,
    workload: Workload,
    device: Device,
    logs: Sequence[Path],
    own_log: Path,
    seed: int,
) -> tuple[CostModel, str]:
    """(cost model, one line on its warm start or "")."""
    if not cls.uses_model:
        return NullModel(space), ""
    import xgboost  # noqa: F401  now, so that no round pays for the import

    from kronsched.cost_model.pretrained import pretrained
    from kronsched.cost_model.transfer import prior_for
    from kronsched.search.predict import model_on

    # Without a model that ships, the shipped logs have to do; with one, only what it has not seen is learned on top.
    base = pretrained(schedule, workload, device) if logs else None
    more = _logs_of_user(logs) if base is not None else logs
    prior = prior_for(schedule, workload, device, more, own_log, seed=seed, base=base) if more else None
    model = model_on(prior or base, schedule, space, workload, device, seed)
    what = [] if base is None else [f"a trained model ({base.records} records of {base.groups} shapes)"]
    what += [] if prior is None else [f"{prior.records} records of {prior.groups} other shapes or devices"]
    return model, f"{space.name}: cost model starts from {' and '.join(what)}" if what else ""


def _logs_of_user(logs: Sequence[Path]) -> list[Path]:
    """Logs that no shipped model was trained on."""
    from kronsched.records.database import shipped_dir

    shipped = shipped_dir().resolve()
    return [path for path in logs if not path.resolve().is_relative_to(shipped)]


def _logs(own: Path) -> list[Path]:
    from kronsched.cost_model.transfer import logs_in

    found = logs_in(search_dirs())
    return found if any(p.resolve() == own.resolve() for p in found) else [*found, own]


def _path(name: str, value: object) -> Path:
    if not isinstance(value, str | os.PathLike):
        raise ArgumentTypeError(f"{name}={value!r} must be a path")
    return Path(value)


def _integer(name: str, value: object, least: int, most: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ArgumentTypeError(f"{name}={value!r} must be an int ≥ {least}")
    if value < least:
        raise ArgumentError(f"{name}={value} is not allowed: an int ≥ {least} is needed")
    if most is not None and value > most:
        raise ArgumentError(f"{name}={value} is not allowed: an int ≤ {most} is needed")
