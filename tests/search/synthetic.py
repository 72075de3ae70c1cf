"""Made-up but GPU-like tables: cliffs of occupancy, bank conflicts, invalid regions, several optima, 2 % noise.

`fused_table` is a fused kernel of any number of rows with the knobs of a CUDA schedule; `table_of` makes a table of any cost.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from kronsched.errors import InvalidConfig
from kronsched.hardware import PRESETS, Device
from kronsched.measure.base import STATUSES, BuildResult, Measured, RunResult
from kronsched.records.schema import TuningRecord, record_of
from kronsched.schedules.base import Schedule, Scheduled
from kronsched.search.table import Entry, Subject, Table
from kronsched.space import Candidate, Config, Knob, SearchSpace
from kronsched.workloads.base import Workload
from kronsched.workloads.kron import KronMatmul

H200 = PRESETS["nvidia/h200"]
KNOBS: dict[str, tuple[Any, ...]] = {
    "rows": (1, 2, 4, 8, 16),
    "threads": (64, 128, 256, 512, 1024),
    "vec": (1, 2, 4),
    "pad": (0, 1, 2, 4, 8),
    "unroll": (0, 16, 64),
    "regs": (8, 16, 32, 64),
    "groups": ("1+1+1+1", "1+1+2", "2+2", "1+3"),
}


def fraction(*parts: object) -> float:
    """A fixed pseudo-random number in [0, 1) of some values: what no feature explains."""
    return int(hashlib.md5(repr(parts).encode()).hexdigest()[:8], 16) / 2**32


@dataclass(frozen=True)
class Figures:
    """What can be known of a config before it is built."""

    shared: float
    registers: float
    blocks_per_sm: int
    waves: float
    exchanges: int
    bytes_in_flight: float


def figures(m: int, k: int, config: Config) -> Figures | None:
    """None for a config that breaks a limit of the device."""
    c: dict[str, Any] = dict(config)
    groups = [int(g) for g in c["groups"].split("+")]
    elements = c["rows"] * k
    if (c["regs"] < 8 ** max(groups) and max(groups) > 1) or c["threads"] * c["regs"] > elements:
        return None
    shared = elements * 4 * (1 + c["pad"] / 32) * (2 if len(groups) > 2 else 1)
    registers = 24 + 1.6 * c["regs"] + {0: 0, 16: 8, 64: 20}[c["unroll"]] + 4 * c["vec"]
    limit = int(65536 // (c["threads"] * min(255, 8 * math.ceil(registers / 8))))
    per_sm = min(int(232448 // (shared + 1024)), 2048 // c["threads"], limit, 32)
    if per_sm < 1:
        return None
    waves = math.ceil(m / c["rows"]) / (132 * per_sm)
    in_flight = per_sm * c["threads"] * c["vec"] * 4.0 * min(4, c["regs"] / c["vec"])
    return Figures(shared, registers, per_sm, waves, len(groups) - 1, in_flight)


def time_us(m: int, k: int, config: Config, salt: str = "") -> float | None:
    """Microseconds of a config, None where the kernel crashes; figures() must not be None."""
    f, c = figures(m, k, config), dict(config)
    assert f is not None
    if fraction(salt, "crash", c["unroll"], c["regs"], c["vec"], c["threads"]) < 0.04:
        return None
    bandwidth = 4.2e6 * (1 - math.exp(-f.bytes_in_flight / 26000)) * {1: 0.8, 2: 0.93, 4: 1.0}[c["vec"]]
    good_pad = {1: 1, 2: 2, 4: 4}[c["vec"]]
    conflicts = 3.2 if c["pad"] == 0 else 1 + 0.3 * abs(math.log2(c["pad"] / good_pad))
    exchange = f.exchanges * 2 * m * k * 4 / (132 * 128 * 1755) * conflicts * (1 + 0.6 / f.blocks_per_sm)
    arithmetic = 2 * m * k * 8 * 4 / (132 * 128 * 1755 * (0.55 + 0.15 * (c["unroll"] > 0) + 0.1 * (c["unroll"] == 64)))
    spill = max(0.0, f.registers - min(255, 65536 / (c["threads"] * f.blocks_per_sm)))
    parts = sorted([2 * m * k * 4 / bandwidth, exchange, arithmetic * (1 + 0.02 * spill)])
    overlap = 0.25 + 0.75 / f.blocks_per_sm
    tail = math.ceil(f.waves) / f.waves if f.waves >= 1 else min(1 / f.waves, 6) / 2 + 0.5
    time = (parts[2] + overlap * (parts[0] + parts[1])) * (0.4 + 0.6 * tail) + 1.5
    time *= 1 + 0.25 * fraction(salt, c["unroll"], c["regs"], c["groups"], c["vec"]) ** 3
    time *= 1 + 0.12 * fraction(salt, c["threads"], c["rows"]) ** 2
    return time * (1 + 0.02 * (2 * fraction(salt, "noise", *c.values()) - 1))


class FusedSchedule(Schedule):
    """The schedule of the made-up kernel: a space, a default, features; it builds nothing."""

    name: ClassVar[str] = "made_up"
    family: ClassVar[str] = "kron"
    device_kind: ClassVar[str] = "cuda"

    def space(self, workload: Workload, device: Device) -> SearchSpace:
        m, k = size(workload)
        knobs = [Knob(n, v) for n, v in KNOBS.items()]
        return SearchSpace(self.name, knobs, lambda c: None if figures(m, k, c) else "breaks a limit of the device")

    def apply(self, workload: Workload, config: Config, device: Device) -> Scheduled:
        raise InvalidConfig("made up")

    def default_config(self, workload: Workload, device: Device) -> Config:
        plain = {"threads": 128, "vec": 2, "pad": 1, "unroll": 16, "regs": 8, "groups": "1+1+1+1"}
        return next(c for rows in KNOBS["rows"] if figures(*size(workload), c := {"rows": rows, **plain}))

    def features(self, workload: Workload, config: Config, device: Device) -> Mapping[str, float]:
        f = figures(*size(workload), config)
        return {} if f is None else {n: float(v) for n, v in vars(f).items()}


def size(workload: Workload) -> tuple[int, int]:
    assert isinstance(workload, KronMatmul)
    return workload.m, workload.k_in


def fused_workload(m: int = 1024) -> KronMatmul:
    return KronMatmul(m, [(8, 8)] * 4)


@functools.cache
def fused_table(m: int = 1024, salt: str = "a") -> Table:
    """About 2,600 valid candidates; some tens crash."""
    workload, schedule = fused_workload(m), FusedSchedule()
    entries = {}
    for candidate in schedule.space(workload, H200):
        us = time_us(*size(workload), candidate.config, salt)
        entries[candidate] = Entry("ok" if us else "crash", us, 1.2, 0.06, source_sha256=candidate.key)
    return Table(f"fused-{m}-{salt}", schedule.name, entries, Subject(workload, H200, schedule))


def records(m: int, n: int) -> list[TuningRecord]:
    """`n` tuning records spread over the fused table of m rows."""
    table, out = fused_table(m), []
    for candidate, entry in list(table)[:: len(table) // n][:n]:
        run = RunResult(entry.status, times_us=() if entry.cost is None else (entry.cost,))
        measured = Measured(candidate, BuildResult("ok"), run)
        out.append(record_of(fused_workload(m), H200, table.space.name, "digest", measured, {}))
    return out


def table_of(
    knobs: Mapping[str, tuple[Any, ...]],
    cost: Callable[[Config], float | str | None],
    name: str = "made-up",
    space: str = "made_up",
) -> Table:
    """A table of every config; cost gives a time, the name of a failure, or None for a config that is left out."""
    entries = {}
    for values in itertools.product(*knobs.values()):
        config = dict(zip(knobs, values, strict=True))
        value = cost(config)
        if isinstance(value, str):
            assert value in STATUSES
            entries[Candidate(space, tuple(config.items()))] = Entry(value, None, 1.0)
        elif value is not None:
            entries[Candidate(space, tuple(config.items()))] = Entry("ok", value, 1.0, 0.1)
    return Table(name, space, entries)
