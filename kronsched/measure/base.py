"""What building and running a candidate yields. Plain data that crosses process borders."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from kronsched.space import Candidate

STATUSES = ("ok", "invalid", "compile_error", "launch_error", "timeout", "crash", "wrong_result", "flaky")
"""Every outcome of a candidate. Only "ok" has a time that counts."""


@dataclass(frozen=True)
class BuildResult:
    """Outcome of building one candidate.

    status: "ok", "invalid", "compile_error", "timeout" or "crash".  artefact: directory of the built module, absolute path.
    source_sha256: digest of the CUDA (or, on CPU, LLVM-IR-level TIR) source.  registers, spill_bytes, shared_bytes: the largest
    over the kernels; None where unknown.  seconds: wall time of the build in its worker.
    """

    status: str
    error: str | None = None
    artefact: str | None = None
    source_sha256: str | None = None
    registers: int | None = None
    shared_bytes: int | None = None
    spill_bytes: int | None = None
    seconds: float = 0.0


@dataclass(frozen=True)
class RunResult:
    """Outcome of checking and timing one built candidate.

    times_us: every timed sample, microseconds a call.  max_relative_error: see `kronsched.measure.check`; None when not reached.
    noise: (75th - 25th percentile) / median of the samples.  energy_j: joules a call when asked for.
    """

    status: str
    error: str | None = None
    times_us: tuple[float, ...] = ()
    max_relative_error: float | None = None
    noise: float | None = None
    energy_j: float | None = None
    seconds: float = 0.0

    @property
    def median_us(self) -> float | None:
        """Median of the samples, None without samples."""
        if not self.times_us:
            return None
        ordered = sorted(self.times_us)
        middle = len(ordered) // 2
        return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


@dataclass(frozen=True)
class Measured:
    """A candidate with its build and (when built) its run."""

    candidate: Candidate
    build: BuildResult
    run: RunResult | None = None

    @property
    def status(self) -> str:
        """The first status that is not "ok", else "ok"."""
        return self.run.status if self.run is not None and self.build.status == "ok" else self.build.status

    @property
    def error(self) -> str | None:
        """The message belonging to `status`."""
        return self.run.error if self.run is not None and self.build.status == "ok" else self.build.error

    @property
    def median_us(self) -> float | None:
        """Median time when status is "ok", else None."""
        return self.run.median_us if self.run is not None and self.status == "ok" else None


class Measurer(Protocol):
    """The only door to an evaluation. The live one builds and runs; the simulated one looks up a table.

    It may have an attribute `parallel`: how many candidates a batch should hold at least to keep it busy (default 1).
    """

    def measure(self, batch: Sequence[Candidate]) -> Iterator[Measured]:
        """Measure a batch; results come in order of completion, one for each candidate, never an exception for a bad one."""

    def close(self) -> None:
        """End worker processes."""
