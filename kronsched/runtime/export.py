"""`export` writes a loaded module to a directory; `emit` builds one for a device that need not be here.

Files: kernel.cu and kernel.cubin (CUDA) or kernel.py and kernel.so (CPU), and manifest.json. `kronsched.load(directory)` loads
it on any machine of the same architecture.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

from kronsched.errors import ArgumentError
from kronsched.hardware import Device, resolve_target
from kronsched.records import database
from kronsched.records.journal import read_log
from kronsched.registry import workload_from_dict
from kronsched.runtime.cache import get_or_build
from kronsched.runtime.load import choose_config
from kronsched.runtime.manifest import FILE_NAME, Manifest
from kronsched.runtime.module import TunedModule
from kronsched.workloads.base import Workload


def export(mod: TunedModule, out_dir: str | os.PathLike[str]) -> list[Path]:
    """Write a module's source, binary and manifest into a directory, made when missing; other files in it are left alone.

    Returns the files written. Raises ArgumentError when the directory cannot be written.
    """
    return _write(mod.artefact, Path(out_dir), mod.expected_us if mod.measured else None, mod.origin)


def emit(
    what: Workload | str | os.PathLike[str],
    out_dir: str | os.PathLike[str],
    target: str = "auto",
    *,
    workload: Workload | None = None,
    compiler: str = "nvrtc",
) -> list[Path]:
    """Build a kernel for a target and write what `export` writes; no GPU is needed.

    what: a workload (the best record for the target, else the schedule's default config) or the path of a tuning log (its best
    record; `workload` chooses when it holds several).  target: "auto" (for a log: the device it was recorded on), "cpu", "cuda"
    or a preset such as "nvidia/h200". Raises ArgumentError, UnsupportedError, CompileError or InvalidConfig.
    """
    origin, expected = "default, not measured", None
    if isinstance(what, Workload):
        chosen, device = what, resolve_target(target)
        record = database.find_best(chosen, device)
    else:
        records = read_log(what)
        wanted = None if target == "auto" else resolve_target(target)
        record = database.best_in(records, workload, wanted)
        if record is None:
            raise ArgumentError(f"log={str(what)!r} holds no successful record" + (f" for {wanted.name}" if wanted else ""))
        chosen = workload_from_dict(record.workload)
        device = wanted if wanted is not None else _recorded(record.target)
    if record is not None:
        space, config = record.space["name"], dict(record.config)
        origin = f"log, measured on {record.target['name']}"
        expected = record.median_us if database.matches_device(record, device) else None
    else:
        space, config, origin = choose_config(chosen, device)  # type: ignore[assignment]
    return _write(get_or_build(chosen, space, config, device, compiler), Path(out_dir), expected, origin)


def _recorded(target: dict[str, object]) -> Device:
    from kronsched.records.replay import recorded_device

    return recorded_device(target)


def _write(artefact: Path, out_dir: Path, expected_us: float | None, origin: str) -> list[Path]:
    manifest = Manifest.load(artefact)
    names = [n for n in (manifest.source_file, manifest.binary_file) if n is not None]
    try:
        out_dir.mkdir(parents=True, exist_ok=True)
        if out_dir.resolve() != artefact:
            for name in names:
                # A new file, not new content: the old library may be mapped by a process that is running it.
                (out_dir / name).unlink(missing_ok=True)
                shutil.copyfile(artefact / name, out_dir / name)
        # Last: a directory with a manifest is complete.
        replace(manifest, expected_us=expected_us, origin=origin).save(out_dir)
    except OSError as e:
        raise ArgumentError(f"out_dir={str(out_dir)!r} cannot be written: {e.strerror or e}") from None
    return [out_dir / name for name in (*names, FILE_NAME)]
