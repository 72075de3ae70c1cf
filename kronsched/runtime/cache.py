"""The artefact cache: one directory a (workload, space, config, device, compiler, code), built at most once.

Read first: `get_or_build`. Finding an artefact does not import TVM.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock

from kronsched import registry
from kronsched.errors import ArgumentError, RecordError
from kronsched.paths import cache_dir
from kronsched.runtime.build import build_artefact, library_versions
from kronsched.runtime.manifest import Manifest
from kronsched.runtime.nvrtc import check_compiler
from kronsched.schedules.base import Schedule
from kronsched.workloads.base import Workload

if TYPE_CHECKING:
    from kronsched.hardware import Device
    from kronsched.space import Config

_PACKAGE = Path(__file__).resolve().parents[1]
_COMPILING_PARTS = ("workloads", "schedules", "intrinsics", "runtime")


def get_or_build(
    workload: Workload, space: str | Schedule, config: Config, device: Device, compiler: str = "nvrtc", root: Path | None = None
) -> Path:
    """The artefact directory of a candidate, built when the cache does not have it.

    space: a schedule, or its registered name.  compiler: "nvrtc" or "nvcc", for
    CUDA.  root: another cache than `cache_dir()`. Safe with concurrent processes: one builds, the others wait. Raises what
    `build_artefact` raises, and ArgumentError for a cache directory that cannot be written.
    """
    check_compiler(compiler)
    schedule = registry.schedule(space) if isinstance(space, str) else space
    folder = (cache_dir() if root is None else Path(root)) / "artefacts"
    path = folder / artefact_key(workload, schedule, config, device, compiler)
    if is_complete(path):
        return path
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(f"{path}.lock")
        lock.acquire()
    except OSError as e:
        raise ArgumentError(
            f"cache directory {str(folder)!r} cannot be written ({e.strerror or e}): set KRONSCHED_CACHE_DIR to one that can"
        ) from None
    try:
        if not is_complete(path):
            shutil.rmtree(path, ignore_errors=True)  # damaged
            build_artefact(workload, schedule, config, device, path, compiler)
    finally:
        lock.release()
    return path


def is_complete(artefact: Path) -> bool:
    """Whether a directory holds a readable manifest, the source and an undamaged binary (when there is one)."""
    try:
        manifest = Manifest.load(artefact)
        if manifest.binary_file is not None:
            manifest.read_binary(artefact)
    except RecordError:
        return False
    return (artefact / manifest.source_file).is_file()


def artefact_key(workload: Workload, schedule: Schedule, config: Config, device: Device, compiler: str) -> str:
    """The cache key: readable family and space, then a digest of everything the binary depends on."""
    identity: Mapping[str, Any] = {
        "workload": workload.to_dict(),
        "space": schedule.name,
        "config": dict(config),
        "device": {**device.to_dict(), "driver": None, "vector_bytes": device.vector_bytes},
        "compiler": compiler if device.kind == "cuda" else "llvm",
        "versions": library_versions(),
        "code": [_package_code(), *_outside_code(type(workload), type(schedule))],
    }
    text = json.dumps(identity, sort_keys=True, separators=(",", ":"))
    return f"{workload.family}-{schedule.name}-{hashlib.sha256(text.encode()).hexdigest()[:20]}"


@cache
def _package_code() -> str:
    """A digest of the parts of kronsched that shape a binary.

    The version alone would serve stale kernels from an edited checkout.
    """
    digest = hashlib.sha256()
    for part in _COMPILING_PARTS:
        for file in sorted((_PACKAGE / part).glob("*.py")):
            digest.update(file.name.encode() + file.read_bytes())
    return digest.hexdigest()[:16]


def _outside_code(*classes: type) -> list[str]:
    """Digests of the modules that define a family or a schedule from outside the package."""
    found = []
    for cls in classes:
        file = getattr(sys.modules.get(cls.__module__), "__file__", None)
        if file is not None and _PACKAGE not in Path(file).resolve().parents:
            found.append(hashlib.sha256(Path(file).read_bytes()).hexdigest()[:16])
    return found
