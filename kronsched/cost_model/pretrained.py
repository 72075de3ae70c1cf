"""Cost models that ship: trained from tuning logs and tables, one a schedule, in JSON; nothing is unpickled.

Read first: `train` (records -> files), `load_prior` (files -> `Prior`), `pretrained` (the one to use, or a warning and None).

`<space>.json` is the manifest: format, versions, columns, what it was trained on, the files of its boosters.
`<space>.<i>.json.gz` is a booster in xgboost's own JSON. They are looked for in the folder `models` of the user's logs, then
among the shipped logs.
"""

from __future__ import annotations

import functools
import gzip
import hashlib
import json
import tempfile
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kronsched import registry
from kronsched.cost_model.base import ModelError
from kronsched.cost_model.features import Columns, Featurizer
from kronsched.cost_model.transfer import PRIOR_OPTIONS, Known, Prior, Shape, fit_prior, records_of_space, shapes_of
from kronsched.cost_model.xgb import Booster
from kronsched.errors import ArgumentError, KronschedError

if TYPE_CHECKING:
    from kronsched.hardware import Device
    from kronsched.schedules.base import Schedule
    from kronsched.workloads.base import Workload

FORMAT = 1
FOLDER = "models"
UNKNOWN_COLUMNS = 0.25
"""Share of a model's columns that this version may not compute any more; beyond it the model is of no use."""


class ModelWarning(UserWarning):
    """A stored cost model is passed over."""


@dataclass(frozen=True)
class Trained:
    """A model that was trained and written. files: the manifest first."""

    schedule: str
    shapes: int
    records: int
    files: tuple[Path, ...]


def train(family: str, logs: Iterable[Path], out: Path, seed: int = 0) -> list[Trained]:
    """Train a model for each schedule of a family from every record of it in `logs`, and write them into a folder.

    A schedule of which the logs hold nothing usable is left out. Raises ArgumentError when that leaves none, or when the folder
    cannot be written.
    """
    registry.family(family)
    paths, done = list(logs), []
    for schedule in registry.schedules_of(family):
        records = [r for path in paths for r in records_of_space(path, schedule.name)]
        shapes = shapes_of(schedule, _own_device(schedule), records)
        prior = fit_prior(shapes, seed=seed)
        if prior is not None:
            files = save_prior(prior, out, schedule.name, digest_of(shapes))
            done.append(Trained(schedule.name, prior.groups, prior.records, files))
    if not done:
        raise ArgumentError(f"family={family!r}: the {len(paths)} logs hold no record that a cost model can be trained from")
    return done


def digest_of(shapes: Sequence[Shape]) -> str:
    """A digest of what a model was trained on: workloads, devices, configs and times, whatever their order in the files."""
    lines = sorted(
        f"{s.workload.key} {s.device.name} {c.key} {cost:.6g}"
        for s in shapes
        for c, cost in zip(s.candidates, s.costs.tolist(), strict=True)
    )
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


# -- files ----------------------------------------------------------------------------------------------


def save_prior(prior: Prior, folder: Path, space: str, digest: str) -> tuple[Path, ...]:
    """Write the boosters and, last, the manifest; ArgumentError when the folder cannot be written."""
    import xgboost

    import kronsched

    names = [f"{space}.{i}.json.gz" for i in range(len(prior.boosters))]
    files = [gzip.compress(booster.to_json(), mtime=0) for booster in prior.boosters]
    manifest = {
        "format": FORMAT,
        "space": space,
        "boosters": names,
        "sha256": [hashlib.sha256(data).hexdigest() for data in files],
        "columns": list(prior.columns.names),
        "records": prior.records,
        "digest": digest,
        "values": {name: sorted(values, key=str) for name, values in prior.values.items()},
        "known": [asdict(k) for k in prior.known],
        "options": asdict(PRIOR_OPTIONS),
        "versions": {"kronsched": kronsched.__version__, "xgboost": xgboost.__version__},
    }
    path = folder / f"{space}.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, data in zip(names, files, strict=True):
            _replace(folder / name, data)
        _replace(path, (json.dumps(manifest, indent=1) + "\n").encode())
    except OSError as e:
        raise ArgumentError(f"out={str(folder)!r} cannot be written: {e.strerror or e}") from None
    return (path, *(folder / name for name in names))


def _replace(path: Path, data: bytes) -> None:
    """Write a file whole or not at all; between files, the digests in the manifest tell a half-written model."""
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
        file.write(data)
    Path(file.name).chmod(0o644)
    Path(file.name).replace(path)


def load_prior(path: Path) -> Prior:
    """Read what `save_prior` wrote, from the path of the manifest. Raises ModelError with one line saying what is wrong."""
    import xgboost

    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        form, names, columns = data["format"], list(data["boosters"]), list(data["columns"])
        digests = list(data["sha256"])
        version, records = str(data["versions"]["xgboost"]), int(data["records"])
        known = tuple(_known(k) for k in data["known"])
        values = {str(name): frozenset(found) for name, found in data["values"].items()}
    except OSError as e:
        raise ModelError(f"cost model {str(path)!r} cannot be read: {e.strerror or e}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as e:
        raise ModelError(f"cost model {str(path)!r} is damaged: {type(e).__name__}: {e}") from None
    if form != FORMAT:
        raise ModelError(f"cost model {str(path)!r}: format={form!r} is not supported, only {FORMAT}")
    if version.split(".")[0] != xgboost.__version__.split(".")[0]:
        raise ModelError(f"cost model {str(path)!r} was written by xgboost {version}, this is {xgboost.__version__}")
    if not names or not all(isinstance(n, str) and Path(n).name == n and "\0" not in n for n in (*names, *columns)):
        raise ModelError(f"cost model {str(path)!r} is damaged: boosters and columns must be plain names")
    if len(set(columns)) != len(columns) or len(digests) != len(names):
        raise ModelError(f"cost model {str(path)!r} is damaged: a column repeats, or boosters and their digests differ in number")
    if data.get("space") != path.stem:
        raise ModelError(f"cost model {str(path)!r} is of space {str(data.get('space'))[:40]!r}")
    for name, digest in zip(names, digests, strict=True):
        _check_digest(path.parent / name, digest)
    boosters = tuple(Booster.from_json(path.parent / n, columns) for n in names)
    return Prior(boosters, Columns(columns), known, records, values=values)


def _check_digest(path: Path, digest: object) -> None:
    """A booster is read by native code, which a damaged file could take down."""
    try:
        found = hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as e:
        raise ModelError(f"cost model {str(path)!r} cannot be read: {e.strerror or e}") from None
    if found != digest:
        raise ModelError(f"cost model {str(path)!r} is damaged: its content is not what the manifest says")


def _known(data: Mapping[str, Any]) -> Known:
    columns = {str(k): float(v) for k, v in data["columns"].items()}
    share = float(data["best_share"])
    if not (0 < share < 100 and all(abs(v) < 1e6 for v in columns.values())):
        raise ValueError("a figure of a known shape is out of range")
    return Known(columns, str(data["device"]), share)


# -- use ------------------------------------------------------------------------------------------------


def pretrained(schedule: Schedule, workload: Workload, device: Device, folders: Sequence[Path] | None = None) -> Prior | None:
    """The model of a schedule from the first folder that has one that can be used; a `ModelWarning` for one that cannot."""
    for folder in model_dirs() if folders is None else folders:
        path = folder / f"{schedule.name}.json"
        if not path.is_file():
            continue
        try:
            prior = _cached(path, path.stat().st_mtime_ns)
            _check_columns(path, prior, schedule, workload, device)
            return prior
        except ModelError as e:
            again = f"`kronsched train --family {schedule.family}` makes a new one"
            warnings.warn(f"{e}; it is passed over, {again}", ModelWarning, stacklevel=2)
    return None


def model_dirs() -> list[Path]:
    """Where models are looked for: the user's, then the shipped ones."""
    from kronsched.records.database import search_dirs

    return [folder / FOLDER for folder in search_dirs()]


@functools.lru_cache(maxsize=16)
def _cached(path: Path, changed: int) -> Prior:
    return load_prior(path)


def _check_columns(path: Path, prior: Prior, schedule: Schedule, workload: Workload, device: Device) -> None:
    """A model whose columns this version does not compute would rank by nothing."""
    try:
        featurizer = Featurizer(schedule.space(workload, device), workload, device, schedule)
        now = featurizer.row(schedule.default_config(workload, device))
    except KronschedError as e:
        raise ModelError(f"cost model {str(path)!r} cannot be used for {workload.label}: {e}") from None
    own = {n.partition("=")[0] for n in now}
    unknown = [n for n in prior.columns.names if n.partition("=")[0] not in own]
    if len(unknown) > UNKNOWN_COLUMNS * len(prior.columns):
        raise ModelError(f"cost model {str(path)!r} uses features that are gone, such as {unknown[0]!r}")


def _own_device(schedule: Schedule) -> Device | None:
    """The CPU that we run on, whose records no preset knows; None for GPUs."""
    from kronsched.hardware import resolve_target

    return resolve_target("cpu") if schedule.device_kind == "cpu" else None
