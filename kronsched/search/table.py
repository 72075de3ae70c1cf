"""An exhaustively measured space as a table, and the measurer that looks candidates up in it instead of running them.

Read first: `Table.load`, `SimulatedMeasurer`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kronsched.cost_model.transfer import Shape, device_of
from kronsched.errors import ArgumentError, KronschedError, choose
from kronsched.measure.base import BuildResult, Measured, RunResult
from kronsched.search.base import Observation
from kronsched.space import Candidate, Config, Knob, SearchSpace, Value

if TYPE_CHECKING:
    from kronsched.hardware import Device
    from kronsched.records.schema import TuningRecord
    from kronsched.schedules.base import Schedule
    from kronsched.workloads.base import Workload


@dataclass(frozen=True)
class Entry:
    """What a table knows of one candidate. `cost`: median microseconds, or joules; None for a failure."""

    status: str
    cost: float | None
    build_seconds: float = 0.0
    run_seconds: float = 0.0
    source_sha256: str | None = None


@dataclass(frozen=True)
class Subject:
    """What a table was measured of, rebuilt from its records, so that the cost model sees more than knobs."""

    workload: Workload
    device: Device
    schedule: Schedule


class Table:
    """Measured candidates of one space for one workload on one device.

    The space holds exactly the candidates of the table: its check is membership. Raises ArgumentError when no entry is ok.
    """

    def __init__(self, name: str, space: str, entries: Mapping[Candidate, Entry], subject: Subject | None = None) -> None:
        """Make a table; every candidate must have the same knobs."""
        self.name = name
        self.subject = subject
        names = list(dict.fromkeys(n for c in entries for n, _ in c.items))
        self._names = tuple(names)
        self._entries: dict[tuple[Value, ...], Entry] = {}
        values: dict[str, dict[Value, None]] = {n: {} for n in names}
        for candidate, entry in entries.items():
            config = candidate.config
            if len(config) != len(names):
                raise ArgumentError(f"table {name}: a config has knobs {sorted(config)}, others have {sorted(names)}")
            for n, v in config.items():
                values[n][v] = None
            self._entries[self._key(config)] = entry
        knobs = [Knob(n, tuple(sorted(v, key=_order))) for n, v in values.items()]
        self.space = SearchSpace(space, knobs, lambda c: None if self._key(c) in self._entries else "not in the table")
        self.costs = sorted(e.cost for e in self._entries.values() if e.cost is not None)
        if not self.costs:
            raise ArgumentError(f"table {name} holds no successful record")

    @classmethod
    def load(cls, path: str | os.PathLike[str], space: str | None = None, objective: str = "time") -> Table:
        """From a log (.jsonl or .jsonl.gz) made by `tune --strategy exhaustive`; of a repeated config the last record counts.

        space: which one, when the log holds several.  objective: "time" or "energy".  Raises ArgumentError when the log holds
        several workloads, devices or spaces, or nothing that can be used.
        """
        from kronsched.records.journal import read_log

        return cls.from_records(str(path), read_log(path), space, objective)

    @classmethod
    def from_records(cls, name: str, records: Sequence[TuningRecord], space: str | None = None, objective: str = "time") -> Table:
        """See `load`."""
        if objective not in OBJECTIVES:
            raise choose("objective", objective, OBJECTIVES)
        if space is not None:
            records = [r for r in records if r.space["name"] == space]
        for what, found in (
            ("space", {str(r.space["name"]) for r in records}),
            ("workload", {r.workload_key for r in records}),
            ("target", {str(r.target["name"]) for r in records}),
        ):
            if len(found) != 1:
                raise ArgumentError(f"table {name}: one {what} is needed, the records hold {', '.join(sorted(found)) or 'none'}")
        entries = {r.candidate: entry_of(r, objective) for r in records}
        return cls(name, records[0].space["name"], entries, _subject(records))

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[tuple[Candidate, Entry]]:
        """Candidates with their entries, in the order of the file."""
        for key, entry in self._entries.items():
            yield Candidate(self.space.name, tuple(zip(self._names, key, strict=True))), entry

    @property
    def optimum(self) -> float:
        """The lowest cost."""
        return self.costs[0]

    def reaching(self, share: float) -> int:
        """How many candidates reach a share of the optimum: cost ≤ optimum / share."""
        return sum(cost <= self.optimum / share for cost in self.costs)

    def get(self, candidate: Candidate) -> Entry | None:
        """The entry of a candidate, None when the table has none."""
        config = candidate.config
        return self._entries.get(self._key(config)) if set(config) == set(self._names) else None

    def default(self) -> list[Candidate]:
        """The schedule's default config when it is known and in the table."""
        if self.subject is None:
            return []
        config = self.subject.schedule.default_config(self.subject.workload, self.subject.device)
        if set(config) != set(self._names) or self.space.invalid(config) is not None:
            return []
        return [self.space.candidate(config)]

    def shape(self) -> Shape | None:
        """What a prior for other shapes can learn from the table; None when it is not known what was measured."""
        if self.subject is None:
            return None
        costs = np.array([np.nan if e.cost is None else e.cost for e in self._entries.values()])
        s = self.subject
        return Shape(s.schedule, s.workload, s.device, tuple(c for c, _ in self), costs)

    def _key(self, config: Config) -> tuple[Value, ...]:
        return tuple(config[n] for n in self._names)


class SimulatedMeasurer:
    """A `Measurer` that looks candidates up. A candidate that the table does not have is "invalid", at no cost."""

    def __init__(self, table: Table) -> None:
        """Bind to a table."""
        self.table = table

    def measure(self, batch: Sequence[Candidate]) -> Iterator[Measured]:
        """Results in the order of the batch, with the seconds that building and running took when the table was made."""
        for candidate in batch:
            entry = self.table.get(candidate)
            if entry is None:
                yield Measured(candidate, BuildResult("invalid", f"not in table {self.table.name}"))
                continue
            built = entry.status not in ("invalid", "compile_error")
            build = BuildResult("ok" if built else entry.status, source_sha256=entry.source_sha256, seconds=entry.build_seconds)
            times = () if entry.cost is None else (entry.cost,)
            yield Measured(
                candidate, build, RunResult(entry.status, times_us=times, seconds=entry.run_seconds) if built else None
            )

    def close(self) -> None:
        """Nothing to end."""


OBJECTIVES = ("time", "energy")


def cost_of(record: TuningRecord, objective: str) -> float | None:
    """The objective of a record: median microseconds, or joules a call; None for a failure or where it was not measured."""
    if not record.ok:
        return None
    return record.median_us if objective == "time" else record.result.get("energy_j")


def entry_of(record: TuningRecord, objective: str = "time") -> Entry:
    """What a table keeps of a record."""
    search = record.search
    return Entry(
        record.status,
        cost_of(record, objective),
        float(search.get("build_seconds") or 0.0),
        float(search.get("run_seconds") or 0.0),
        record.kernel.get("source_sha256"),
    )


def observation_of(record: TuningRecord, objective: str = "time") -> Observation:
    """What a strategy is told of a record."""
    return Observation(record.candidate, record.status, cost_of(record, objective), record.kernel.get("source_sha256"))


def _subject(records: Sequence[TuningRecord]) -> Subject | None:
    """None when this version does not know the family, the schedule or the device, or the schedule has other knobs by now.

    Then only knobs are seen.
    """
    from kronsched import registry

    device = device_of(records[0].target)
    if device is None:
        return None
    try:
        workload = registry.workload_from_dict(records[0].workload)
        schedule = registry.schedule(records[0].space["name"])
        if schedule.family != workload.family or schedule.supports(workload, device) is not None:
            return None
        knobs = {k.name: {type(v) for v in k.values} for k in schedule.space(workload, device).knobs}
    except (KronschedError, TypeError):
        return None
    fits = all(r.config.keys() == knobs.keys() and all(type(v) in knobs[n] for n, v in r.config.items()) for r in records)
    return Subject(workload, device, schedule) if fits else None


def _order(value: Value) -> tuple[bool, float, str]:
    number = isinstance(value, int | float)
    return (not number, float(value) if number else 0.0, str(value))
