"""`kronsched.load`: the best known kernel for a workload, from a tuning log, or from an exported directory.

Read first: `load`. Once a module was built, loading it again runs no compiler and imports neither TVM nor torch (on CPU).
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from kronsched import registry
from kronsched.errors import (
    ArgumentError,
    ArgumentTypeError,
    CompileError,
    InvalidConfig,
    RecordError,
    UnsupportedError,
)
from kronsched.hardware import Device, resolve_target
from kronsched.records import database
from kronsched.records.journal import read_log
from kronsched.runtime.cache import get_or_build
from kronsched.runtime.manifest import FILE_NAME, Manifest
from kronsched.runtime.module import TunedModule
from kronsched.workloads.base import Workload

if TYPE_CHECKING:
    from kronsched.records.schema import TuningRecord


WITHOUT_EPILOGUE = "config measured without the epilogue"
"""The origin of a module whose workload was not measured itself."""
DEFAULT = "default, not measured"
"""The origin of a module of which nothing was measured or predicted."""


def load(
    what: Workload | str | os.PathLike[str],
    workload: Workload | None = None,
    *,
    device: str = "auto",
    compiler: str = "nvrtc",
) -> TunedModule:
    """Load a module that can be called.

    what: a workload (its best record for this device: the user's logs first, then the shipped ones; of one with an epilogue and
    no record, the config of the same without it; without any record the cost model's choice or the schedule's default config,
    see `choose_config`, and `TunedModule.measured` is False), the path of a tuning log (its best record; `workload` chooses when
    it holds several), or a directory written by `export`.
    device: "auto" (a CUDA GPU if there is one, else this CPU), "cpu", "cuda" or "cuda:N".  compiler: "nvrtc" or "nvcc".

    Raises ArgumentError for a path or workload that cannot be used and UnsupportedError when this machine lacks the device.
    """
    if isinstance(what, Workload):
        if workload is not None:
            raise ArgumentError("workload= is only allowed with the path of a log, the first argument is a workload already")
        return _load_workload(what, _present(device), compiler)
    if not isinstance(what, str | os.PathLike):
        raise ArgumentTypeError(f"what={what!r} must be a workload, the path of a tuning log, or an exported directory")
    if workload is not None and not isinstance(workload, Workload):
        raise ArgumentTypeError(f"workload={workload!r} must be a workload, such as kronsched.KronMatmul(...)")
    path = Path(what)
    if path.is_dir():
        return _load_directory(path, workload, device)
    return _load_log(path, workload, device, compiler)


def choose_config(workload: Workload, device: Device) -> tuple[str, dict[str, object], str]:
    """(space, config, origin) when nothing was measured: the cost model's choice where it is clearly better, else the default.

    origin: "predicted, not measured" or "default, not measured" (see `kronsched.search.predict`).
    """
    schedules = registry.schedules_for(workload, device)
    if not schedules:
        raise UnsupportedError(registry.not_served(workload, device))
    if len(schedules) == 1 and not _has_model(schedules[0].name):  # then neither xgboost nor the search is imported
        return schedules[0].name, dict(schedules[0].default_config(workload, device)), DEFAULT
    from kronsched.search.predict import predict

    found = predict(workload, device, schedules)
    return found.schedule.name, dict(found.candidate.config), found.origin


def _has_model(space: str) -> bool:
    from kronsched.cost_model.pretrained import model_dirs

    return any((folder / f"{space}.json").is_file() for folder in model_dirs())


# -- the three sources ----------------------------------------------------------------------------------


def _load_workload(workload: Workload, device: Device, compiler: str) -> TunedModule:
    module = _first_that_builds(database.ranked(workload, device), workload, device, compiler, "log")
    module = module or _from_plain(workload, device, compiler)
    if module is not None:
        return module
    space, config, origin = choose_config(workload, device)
    try:
        artefact = get_or_build(workload, space, config, device, compiler)  # type: ignore[arg-type]
    except (CompileError, InvalidConfig) as e:
        if origin == DEFAULT:
            raise
        warnings.warn(f"the predicted config of {workload.label} cannot be built, the default is taken: {e}", stacklevel=3)
        schedule = registry.schedule(space)
        origin = DEFAULT
        artefact = get_or_build(workload, space, dict(schedule.default_config(workload, device)), device, compiler)
    return TunedModule.from_artefact(artefact, device_index=device.index, origin=origin)


def _load_log(path: Path, workload: Workload | None, device: str, compiler: str) -> TunedModule:
    good = [r for r in read_log(path) if r.ok]
    if workload is not None:
        good = [r for r in good if r.workload_key == workload.key]
    if not good:
        which = f" for {workload.label}" if workload is not None else ""
        raise ArgumentError(f"log={str(path)!r} holds no successful record{which}")
    found = {r.workload_key: r for r in good}
    if len(found) > 1:
        labels = "; ".join(_workload(r, path).label for r in found.values())
        raise ArgumentError(f"log={str(path)!r} holds {len(found)} workloads, choose one with workload=…: {labels}")
    chosen = workload if workload is not None else _workload(good[0], path)
    here = _device_for(good, device, path)
    usable = [r for r in good if r.target["kind"] == here.kind and (here.kind == "cpu" or database.matches_device(r, here))]
    usable.sort(key=lambda r: (not database.matches_device(r, here), r.median_us))
    module = _first_that_builds(usable, chosen, here, compiler, f"log {path}")
    if module is None:
        raise UnsupportedError(f"log={str(path)!r}: none of its {len(usable)} records for {here.name} can be built here")
    return module


def _load_directory(path: Path, workload: Workload | None, device: str) -> TunedModule:
    if not (path / FILE_NAME).is_file():
        raise ArgumentError(f"what={str(path)!r} is a directory without {FILE_NAME}: name one written by kronsched.export")
    manifest = Manifest.load(path)
    if workload is not None and workload != registry.workload_from_dict(manifest.workload):
        raise ArgumentError(f"workload={workload.label!r} is not what {str(path)!r} holds")
    here = _present(manifest.kind if device == "auto" else device)
    if here.kind != manifest.kind:
        raise UnsupportedError(
            f"device={device!r} is not allowed: {str(path)!r} was built for {manifest.device} ({manifest.kind})"
        )
    same = (manifest.device, manifest.kind) == (here.name, here.kind)
    return TunedModule.from_artefact(
        path,
        device_index=here.index,
        expected_us=manifest.expected_us if same else None,
        measured=same and manifest.expected_us is not None,
        origin=f"export {path}" + (f" of {manifest.origin}" if manifest.origin else ""),
    )


def _from_plain(workload: Workload, device: Device, compiler: str) -> TunedModule | None:
    """With the best config that was measured of the same workload without its epilogue and that serves this one as well."""
    for record in database.ranked(workload.plain, device) if workload.plain != workload else ():
        try:
            schedule = registry.schedule(record.space["name"])
            if schedule.supports(workload, device) is None and schedule.space(workload, device).invalid(record.config) is None:
                artefact = get_or_build(workload, schedule, record.config, device, compiler)
                return TunedModule.from_artefact(artefact, device_index=device.index, origin=WITHOUT_EPILOGUE)
        except (CompileError, InvalidConfig, ArgumentError):
            continue
    return None


# -- helpers --------------------------------------------------------------------------------------------


def _first_that_builds(
    records: Iterable[TuningRecord], workload: Workload, device: Device, compiler: str, origin: str
) -> TunedModule | None:
    """The module of the first record that this version can build; a warning for each one passed over."""
    for record in records:
        try:
            artefact = get_or_build(workload, record.space["name"], record.config, device, compiler)
        except (CompileError, InvalidConfig, ArgumentError) as e:  # ArgumentError: a space this process does not know
            warnings.warn(f"a record of {workload.label} cannot be built and is passed over: {e}", stacklevel=4)
            continue
        same_device = database.matches_device(record, device)
        sha = record.kernel.get("source_sha256")
        same_source = sha is None or sha == Manifest.load(artefact).source_sha256
        where = f"{origin}, measured on {record.target['name']}" + ("" if same_source else " by another version")
        measured = same_device and same_source
        return TunedModule.from_artefact(
            artefact,
            device_index=device.index,
            expected_us=record.median_us if measured else None,
            measured=measured,
            origin=where,
        )
    return None


def _present(target: str) -> Device:
    device = resolve_target(target)
    if not device.present:
        raise UnsupportedError(f"device={target!r} is not on this machine: `kronsched emit` builds for it")
    return device


def _device_for(records: list[TuningRecord], target: str, path: Path) -> Device:
    """The device of this machine that a log's records are for."""
    here = _present(target)
    kinds = {r.target["kind"] for r in records}
    if target == "auto" and here.kind not in kinds and "cpu" in kinds:
        here = _present("cpu")
    names = sorted({r.target["name"] for r in records})
    fits = any(r.target["kind"] == here.kind and (here.kind == "cpu" or database.matches_device(r, here)) for r in records)
    if not fits:
        raise UnsupportedError(f"log={str(path)!r} was recorded on {', '.join(names)}; this device is {here.name} ({here.kind})")
    return here


def _workload(record: TuningRecord, path: Path) -> Workload:
    try:
        return registry.workload_from_dict(record.workload)
    except (ArgumentError, ArgumentTypeError) as e:
        raise RecordError(f"log={str(path)!r}: {e}") from None
