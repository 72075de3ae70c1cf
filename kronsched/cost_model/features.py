"""What the cost model sees of a candidate, as named columns, and the space in which novelty is measured.

Read first: `Featurizer.row` (the columns of one config) and `Featurizer.matrix` (many candidates, cached).

| group | columns | why |
|---|---|---|
| knob | `knob.<name>` for numbers and booleans, `knob.<name>=<value>` (0/1) for strings | what the search changes |
| sched | `sched.<name>` from `Schedule.features`: waves, occupancy, bytes a memory level… | what decides the time |
| sched | `sched.<name>` from `derived`: threads that are there at all, rough times | small shapes leave a GPU idle |
| shape | log2 of FLOPs, bytes, intensity and every number of the workload | transfer across shapes; constant in a run |
| device | log2 of units, bandwidth, peak rate, shared memory | transfer across devices; constant in a run |

What a schedule reports in megabytes (`…_mb`) or microseconds (`…_us`) becomes a multiple of the least that the workload needs, so
that a split learned on one shape means the same on another.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from kronsched.errors import KronschedError
from kronsched.hardware import floor_us
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
            self._constant.update(shape_columns(workload))
        self._scale = {"_mb": 1.0, "_us": 1.0}
        if workload is not None and device is not None:
            self._scale = {"_mb": max(1, workload.min_bytes) / 1e6, "_us": max(1e-6, floor_us(workload, device))}
            if "device" not in self._without:
                self._constant.update(_device_columns(workload, device))
        self._number = {k.name for k in space.knobs if all(isinstance(v, int | float) for v in k.values)}
        self._named = {k.name for k in space.knobs} - self._number
        self._embedding = _Embedding(space)
        self._blank = np.empty(0, dtype=np.float32)
        self._store = np.empty((0, 0), dtype=np.float32)
        self._by_value: dict[Candidate, int] = {}
        # Hashing a candidate costs more than all else here; the objects are kept, so that no other gets the same id.
        self._by_id: dict[int, int] = {}
        self._kept: list[Candidate] = []

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
            for name, value in features.items():
                out[f"sched.{name}"] = float(value) / self._scale.get(name[-3:], 1.0)
            more = derived(features, self._scale["_us"], self._device)
            out.update((f"sched.{name}", value) for name, value in more.items())
        return out

    def matrix(self, candidates: Sequence[Candidate]) -> np.ndarray:
        """Rows, shape (len(candidates), len(columns)), float32, kept for the next call. Unknown and non-finite values are NaN."""
        at = self.positions(candidates)
        self._widen()
        out: np.ndarray = self._store[at]
        return out

    def positions(self, candidates: Sequence[Candidate]) -> np.ndarray:
        """A number (n,) for each candidate, the same at every call and counted from 0: for what others keep of candidates."""
        at = [self._by_id.get(id(c), -1) for c in candidates]
        for i, found in enumerate(at):
            if found < 0:
                at[i] = self._position(candidates[i])
        return np.array(at, dtype=np.int64)

    def _position(self, candidate: Candidate) -> int:
        found = self._by_value.get(candidate)
        if found is None:
            found = self._by_value[candidate] = len(self._by_value)
            vector = self._vector(self.row(candidate.config))
            self._widen(found + 1)
            self._store[found] = vector
        self._by_id[id(candidate)] = found
        self._kept.append(candidate)
        return found

    def _widen(self, rows: int = 0) -> None:
        """Make room for rows and for columns that were added since: nothing is known of those in older rows."""
        height, width = self._store.shape
        if rows <= height and width == len(self.columns):
            return
        store = np.tile(self._empty(), (height if rows <= height else max(256, 2 * height), 1))
        store[:height, :width] = self._store
        self._store = store

    def embed(self, candidates: Sequence[Candidate]) -> np.ndarray:
        """See `CostModel.embed`: each knob adds at most 1 to the squared distance of two candidates."""
        return self._embedding(candidates)

    def _vector(self, row: Mapping[str, float]) -> np.ndarray:
        at = [(self.columns.index(name), value) for name, value in row.items()]
        out = self._empty().copy()
        for i, value in at:
            out[i] = value if math.isfinite(value) else np.nan
        return out

    def _empty(self) -> np.ndarray:
        """A row of which nothing is known but that a knob does not have the values that only other shapes' spaces list."""
        if len(self._blank) < len(self.columns):
            names = self.columns.names[len(self._blank) :]
            new = [0.0 if n.startswith("knob.") and n.partition("=")[0][5:] in self._named else np.nan for n in names]
            self._blank = np.concatenate([self._blank, np.array(new, dtype=np.float32)])
        return self._blank


LAUNCH_US = 2.0
"""About what a launch costs on a GPU, however little it does."""
SHARED_RATE = 8.0
"""About how many times as fast as global memory the shared memory of all SMs is together."""
ENOUGH_BYTES = 32_768
"""About how many bytes must be under way to an SM for its share of the bandwidth."""


def derived(features: Mapping[str, float], floor: float, device: Device) -> dict[str, float]:
    """Columns that follow from what CUDA schedules report, none where something is missing. floor: roofline time (µs).

    Of a grid that does not fill the GPU once, only part of the threads that fit an SM are there; what they hold and how long
    each of them works decides the time of small shapes (`active_…`, `serial_…`). `log_…`: rough times of the parts of a kernel,
    as log2 of a multiple of roofline plus launch, so that a bandwidth-bound shape and a tiny one can teach each other.
    """
    try:
        waves, threads = float(features["waves"]), float(features["threads_per_sm"])
        elements, items = float(features["elements_per_thread"]), float(features["items_per_thread"])
        in_flight, blocks, launches = (float(features[n]) for n in ("bytes_in_flight", "blocks", "launches"))
        global_us = float(features["global_mb"]) * 1e3 / device.bandwidth_gbs
        shared_us = float(features["shared_mb"]) * 1e3 / device.bandwidth_gbs / SHARED_RATE
    except KeyError:
        return {}
    if not (math.isfinite(waves) and blocks > 0):
        return {}
    filled = min(1.0, waves)
    serial = items * math.ceil(waves)
    global_us *= max(1.0, ENOUGH_BYTES / max(1.0, in_flight * filled))
    shared_us /= min(1.0, blocks / device.units)
    launch_us, unit = LAUNCH_US * launches, floor + LAUNCH_US
    return {
        "active_threads": threads * filled,
        "active_elements": threads * filled * elements,
        "active_bytes": in_flight * filled,
        "serial_items": serial,
        "serial_elements": serial * elements,
        "log_global": _log(global_us / unit),
        "log_shared": _log(shared_us / unit),
        "log_longest": _log((max(global_us, shared_us) + launch_us) / unit),
        "log_sum": _log((global_us + shared_us + launch_us) / unit),
    }


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


def shape_columns(workload: Workload) -> dict[str, float]:
    """Columns that are the same for every config of a workload, on a log2 scale."""
    out = {
        "shape.flops": _log(workload.flops),
        "shape.bytes": _log(workload.min_bytes),
        "shape.intensity": _log(workload.flops / max(1, workload.min_bytes)),
        "shape.item_bytes": _log(workload.inputs[0].nbytes / max(1, workload.inputs[0].size)),
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
