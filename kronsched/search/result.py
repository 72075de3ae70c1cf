"""What `tune` reports: `TuneEvent` while it runs, `TuneResult` at the end. Plain frozen data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kronsched.space import Candidate

if TYPE_CHECKING:
    from kronsched.hardware import Device
    from kronsched.records.schema import TuningRecord
    from kronsched.workloads.base import Workload


@dataclass(frozen=True)
class TuneEvent:
    """One step of a tuning run, handed to `progress` in the process that called `tune`.

    kind: "start" (once, after resume and warm start), "result" (a candidate was measured; `record` is set), "message"
    (`message` is one line a user should see), "end" (once).
    trials: new measurements asked for.  done: new measurements made so far.  round: batches asked for so far.
    best: the best record known, of this run or of the log, with its objective in `best_cost` (microseconds, or joules when the
    objective is energy).  failures: count by status of this run.
    """

    kind: str
    trials: int
    done: int
    round: int
    best: TuningRecord | None
    best_cost: float | None
    floor_us: float | None
    failures: Mapping[str, int]
    record: TuningRecord | None = None
    message: str = ""

    @property
    def roofline_fraction(self) -> float | None:
        """floor_us / median time of the best record; None without a best record."""
        return _fraction(self.floor_us, self.best)


@dataclass(frozen=True, repr=False)
class TuneResult:
    """The outcome of `tune`.

    best: the best record among this run's and those the log already held for this workload and device; None when every
    candidate failed or nothing could be measured.  records: new records, in order of completion.  known: how many records the
    log already held.  failures: status -> count of this run.  trials: new measurements made.  seconds: wall time of the call;
    search_seconds: of which asking and telling the strategy, the model included.
    floor_us: roofline time.  reference_us, reference_name: what a user would run without kronsched, timed on the same device.
    predicted, artefact: for a device that is not present, the candidate the model (or the default) chose and the directory it
    was compiled into; nothing was measured.  message: one line saying so, else "".
    """

    workload: Workload
    device: Device
    best: TuningRecord | None
    records: tuple[TuningRecord, ...]
    failures: Mapping[str, int]
    trials: int
    seconds: float
    log: Path
    floor_us: float | None = None
    reference_us: float | None = None
    reference_name: str | None = None
    objective: str = "time"
    known: int = 0
    search_seconds: float = 0.0
    predicted: Candidate | None = None
    artefact: Path | None = None
    message: str = ""
    strategy: str = ""
    space: str = field(default="")

    @property
    def roofline_fraction(self) -> float | None:
        """floor_us / median time of the best record; 1.0 means as fast as the hardware limit."""
        return _fraction(self.floor_us, self.best)

    def __repr__(self) -> str:
        """One short line: records hold every sample of every candidate."""
        best = "nothing ok" if self.best is None else f"best {self.best.median_us:.4g} µs by {self.best.space['name']}"
        if self.predicted is not None:
            best = f"predicted {self.predicted.space}, not measured"
        failed = sum(self.failures.values())
        return (
            f"<TuneResult {self.workload.label} on {self.device.name}: {best}, {self.trials} trials, {failed} failed, {self.log}>"
        )

    def to_dict(self) -> dict[str, Any]:
        """The object `kronsched tune --json` prints (contract in ARCHITECTURE.md), JSON-ready."""
        best = None
        if self.best is not None:
            best = {
                "space": self.best.space.get("name"),
                "config": dict(self.best.config),
                "median_us": self.best.median_us,
                "floor_us": self.floor_us,
                "roofline_fraction": self.roofline_fraction,
                "reference_us": self.reference_us,
            }
        out: dict[str, Any] = {
            "workload": self.workload.to_dict(),
            "target": self.device.to_dict(),
            "best": best,
            "trials": self.trials,
            "failures": dict(self.failures),
            "seconds": self.seconds,
            "log": str(self.log),
            "reference": self.reference_name,
            "known": self.known,
            "strategy": self.strategy,
            "objective": self.objective,
            "search_seconds": self.search_seconds,
        }
        if self.predicted is not None:
            out["predicted"] = {
                "space": self.predicted.space,
                "config": self.predicted.config,
                "artefact": None if self.artefact is None else str(self.artefact),
            }
        if self.message:
            out["message"] = self.message
        return out


def _fraction(floor_us: float | None, best: TuningRecord | None) -> float | None:
    if floor_us is None or best is None or not best.median_us:
        return None
    return floor_us / best.median_us
