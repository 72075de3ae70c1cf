"""What the cost model sees of a candidate, as named columns, and the space in which novelty is measured.

Read first: `Featurizer.row` (the columns of one config) and `Featurizer.matrix` (many candidates, cached).

| group | columns | why |
|---|---|---|
| knob | `knob.<name>` for numbers and booleans, `knob.<name>=<value>` (0/1) for strings | what the search changes |
| sched | `sched.<name>` from `Schedule.features`: waves, occupancy, bytes a memory level… | what decides the time |
| shape | log2 of FLOPs, bytes, intensity and every number of the workload | transfer across shapes; constant in a run |
| device | log2 of units, bandwidth, peak rate, shared memory | transfer across devices; constant in a run |
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from kronsched.errors import KronschedError
from kronsched.space import Candidate, Config, SearchSpace

if TYPE_CHECKING:
    from kronsched.hardware import Device
    from kronsched.schedules.base import Schedule
    from kronsched.workloads.base import Workload

GROUPS = ("knob", "sched", "shape", "device")
"""Groups of columns; a column's group is its name up to the first dot. An ablation leaves groups out."""


class Columns:
    """Column names in a fixed order. New names go to the end, so that a shorter row is a row with missing values."""

    def __init__(self, names: Iterable[str] = ()) -> None:
        """Start from the names of a stored model, or from none."""
        self.names: list[str] = []
        self._index: dict[str, int] = {}
        for name in names:
            self.index(name)

    def __len__(self) -> int:
        return len(self.names)

    def index(self, name: str) -> int:
        """Position of a name, added when new."""
        found = self._index.get(name)
        if found is None:
            found = self._index[name] = len(self.names)
            self.names.append(name)
        return found


class Featurizer:
    """Features of the candidates of one space for one workload on one device.

    Without workload, device and schedule (a table of an unknown family) only the knobs are seen. `columns` is shared by the
    featurizers of several workloads whose rows go into one model. `without` leaves groups of columns out.
    """

    def __init__(
        self,
        space: SearchSpace,
        workload: Workload | None = None,
        device: Device | None = None,
        schedule: Schedule | None = None,
        columns: Columns | None = None,
        without: Sequence[str] = (),
    ) -> None:
        """Bind to a space; nothing is computed yet."""
        self.space = space
        self.columns = columns if columns is not None else Columns()
        self._workload, self._device, self._schedule = workload, device, schedule
        self._without = frozenset(without)
        self._constant: dict[str, float] = {}
        if workload is not None and "shape" not in self._without:
            self._constant.update(_shape_columns(workload))
        if workload is not None and device is not None and "device" not in self._without:
            self._constant.update(_device_columns(workload, device))
        self._number = {k.name for k in space.knobs if all(isinstance(v, int | float) for v in k.values)}
        self._embedding = _Embedding(space)
        self._rows: dict[Candidate, np.ndarray] = {}

    def row(self, config: Config) -> dict[str, float]:
        """Column name to value. Values may be NaN or infinite where the schedule says so; missing columns mean unknown."""
        out = dict(self._constant)
        if "knob" not in self._without:
            for knob in self.space.knobs:
                if knob.name in self._number:
                    out[f"knob.{knob.name}"] = float(config[knob.name])
                elif knob.name in config:
                    for value in knob.values:
                        out[f"knob.{knob.name}={value}"] = float(config[knob.name] == value)
        if self._schedule is not None and "sched" not in self._without:
            assert self._workload is not None and self._device is not None
            try:
                features = self._schedule.features(self._workload, config, self._device)
            except KronschedError:  # a config the plan rejects: all its columns are missing
                features = {}
            out.update((f"sched.{name}", float(value)) for name, value in features.items())
        return out

    def matrix(self, candidates: Sequence[Candidate]) -> np.ndarray:
        """Rows, shape (len(candidates), len(columns)), float32, kept for the next call. Unknown and non-finite values are NaN."""
        rows = []
        for candidate in candidates:
            row = self._rows.get(candidate)
            if row is None:
                row = self._rows[candidate] = self._vector(self.row(candidate.config))
            rows.append(row)
        width = len(self.columns)
        if all(len(row) == width for row in rows):
            return np.array(rows, dtype=np.float32).reshape(len(rows), width)
        out = np.full((len(rows), width), np.nan, dtype=np.float32)
        for i, row in enumerate(rows):
            out[i, : len(row)] = row
        return out

    def embed(self, candidates: Sequence[Candidate]) -> np.ndarray:
        """See `CostModel.embed`: each knob adds at most 1 to the squared distance of two candidates."""
        return self._embedding(candidates)

    def _vector(self, row: Mapping[str, float]) -> np.ndarray:
        at = [(self.columns.index(name), value) for name, value in row.items()]
        out = np.full(len(self.columns), np.nan, dtype=np.float32)
        for i, value in at:
            if math.isfinite(value):
                out[i] = value
        return out


class _Embedding:
    """Knobs of numbers by the rank of their value, scaled to [0, 1]; strings and booleans as one-hot times √½.

    Ranks, because the values of a knob are chosen to be about equally spaced in effect (powers of two, mostly).
    """

    def __init__(self, space: SearchSpace) -> None:
        self.tables: list[tuple[str, dict[Any, np.ndarray]]] = []
        self.width = 0
        for knob in space.knobs:
            n = len(knob.values)
            if n < 2:
                continue
            if all(isinstance(v, int | float) and not isinstance(v, bool) for v in knob.values):
                order = sorted(knob.values)
                rows = {v: np.array([order.index(v) / (n - 1)]) for v in knob.values}
                self.width += 1
            else:
                rows = {v: np.sqrt(0.5) * np.eye(n)[i] for i, v in enumerate(knob.values)}
                self.width += n
            self.tables.append((knob.name, rows))

    def __call__(self, candidates: Sequence[Candidate]) -> np.ndarray:
        out = np.zeros((len(candidates), self.width))
        for i, candidate in enumerate(candidates):
            config, at = candidate.config, 0
            for name, rows in self.tables:
                size = len(next(iter(rows.values())))
                row = rows.get(config.get(name))
                if row is not None:  # a value of an older space file has no place: it is at the origin
                    out[i, at : at + size] = row
                at += size
        return out


def _shape_columns(workload: Workload) -> dict[str, float]:
    out = {
        "shape.flops": _log(workload.flops),
        "shape.bytes": _log(workload.min_bytes),
        "shape.intensity": _log(workload.flops / max(1, workload.min_bytes)),
        "shape.item_bytes": float(workload.inputs[0].nbytes / max(1, workload.inputs[0].size)),
    }
    for name, value in workload.to_dict().items():
        numbers = list(_numbers(value))
        if isinstance(value, list) and numbers:
            out[f"shape.{name}.count"] = float(len(numbers))
            out[f"shape.{name}.product"] = sum(_log(n) for n in numbers)
            out[f"shape.{name}.largest"] = _log(max(numbers))
            out[f"shape.{name}.smallest"] = _log(min(numbers))
        elif numbers:
            out[f"shape.{name}"] = _log(numbers[0])
    return out


def _device_columns(workload: Workload, device: Device) -> dict[str, float]:
    return {
        "device.units": _log(device.units),
        "device.bandwidth": _log(device.bandwidth_gbs),
        "device.peak": _log(device.peak_gflops.get(workload.compute_dtype, 0.0)),
        "device.shared": _log(device.shared_per_block),
    }


def _numbers(value: Any) -> Iterable[float]:
    if isinstance(value, list | tuple):
        for item in value:
            yield from _numbers(item)
    elif isinstance(value, int | float):
        yield float(value)


def _log(value: float) -> float:
    return math.log2(value) if value > 0 else 0.0
