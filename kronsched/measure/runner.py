"""One isolated runner of one device: the problems it holds, the candidate it is busy with, and what the end of a run means.

    idle ── begin ──► preparing (a problem it lacks) ──► running ── advance ──► idle, with the job and its result
                                                            └ died from outside, or for no reason of the candidate's: no result

Read first: `Runner.advance`.
"""

from __future__ import annotations

import hashlib
import signal
from concurrent.futures import Future, TimeoutError
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from typing import Any

from pebble import ProcessExpired

from kronsched.errors import KronschedError
from kronsched.hardware.device import Device
from kronsched.measure import worker
from kronsched.measure.base import Measured, RunResult
from kronsched.measure.pools import Workers, describe_exit
from kronsched.space import Candidate

PREPARE_TIMEOUT_S = 900.0
"""For importing torch, opening the device and computing a reference: never a candidate's fault."""
MAX_TRIES = 3
"""Builds, and runs, of one candidate when the process dies without a candidate to blame."""
MAX_KILLS = 2
"""Runs of one candidate whose process was killed from outside: by an administrator, or for want of memory."""
FROM_OUTSIDE = tuple(-int(s) for s in (signal.SIGKILL, signal.SIGTERM)) if hasattr(signal, "SIGKILL") else ()
"""Exit codes of a process that others ended; what a kernel does to its process ends it in another way."""


class MeasureError(KronschedError):
    """Nothing can be measured: worker processes do not start, or the workload's inputs or reference cannot be computed."""


@dataclass
class Job:
    """A candidate on its way through `LiveMeasurer.measure`. tries: of the present step.  kills: runs that ended from outside."""

    candidate: Candidate
    out_dir: str
    build: worker.Built | None = None
    tries: int = 0
    kills: int = 0

    def done(self, run: RunResult | None = None) -> Measured:
        """The candidate with its build and its run."""
        assert self.build is not None
        return Measured(self.candidate, self.build.result, run)


class Runner:
    """Prepares problems and runs built candidates, one at a time, in a process that is killed or replaced when need be.

    workers: a pool of one.  session: of the measurer, for this runner's device.  used: the process may have served another
    session before.
    """

    def __init__(self, workers: Workers, session: worker.Session, device: Device, timeout_s: float, used: bool = False) -> None:
        """Start nothing yet."""
        self._workers, self._session, self._timeout_s = workers, replace(session, device=device), timeout_s
        self.pool_size = 1
        self.future: Future[Any] | None = None
        """What it is busy with; None when it is idle."""
        self.job: Job | None = None
        self._preparing: int | None = None
        self._second = False
        self._ready: set[int] = set()  # problems that the present process has
        self._has_run = used

    @property
    def ready(self) -> bool:
        """Whether its process has any problem."""
        return bool(self._ready)

    @property
    def device(self) -> Device:
        """The device that it runs on."""
        return self._session.device

    def warm_up(self) -> None:
        """Prepare the first problem, so that no candidate waits for it."""
        self._prepare(0)

    def begin(self, job: Job) -> None:
        """Run a built candidate, after preparing what it is checked with."""
        self.job = job
        which = self._which(job.candidate)
        if which in self._ready:
            self._run()
        else:
            self._prepare(which)

    def advance(self) -> tuple[Job | None, RunResult | None]:
        """Take what `future` ended with: (job, result) when a run is over, (job, None) when it has to be run again.

        (None, None) when there is more to do or it was only warmed up. Raises MeasureError when a fresh process cannot prepare.
        """
        assert self.future is not None
        if self._preparing is not None:
            self._end_prepare(self.future, self._preparing)
            return None, None
        future, job, self.future, self.job = self.future, self.job, None, None
        assert job is not None
        return job, self._end_run(future, job)

    def replace(self) -> None:
        """Kill the process and forget what it did; the next call starts a new one."""
        self._workers.replace()
        self.future = self.job = self._preparing = None
        self._second = False
        self._expect_new()

    # -- preparing ----------------------------------------------------------------------------------

    def _prepare(self, which: int) -> None:
        self._preparing = which
        self.future = self._workers.schedule(worker.prepare, self._session, which, timeout=PREPARE_TIMEOUT_S)

    def _end_prepare(self, future: Future[Any], which: int) -> None:
        last = self._second
        try:
            self.pool_size = future.result()
        except (TimeoutError, OSError, BrokenProcessPool) as e:
            reason = describe_exit(e.exitcode) if isinstance(e, ProcessExpired) else str(e)
            text = with_log(self._workers, f"the runner process could not prepare the workload: {reason}")
        except Exception as e:
            text = f"inputs or reference of {self._session.workload.label} cannot be computed: {worker.message(e)}"
            last = last or not self._has_run  # else a candidate may have broken the process
        else:
            self._ready.add(which)
            self.future, self._preparing, self._second = None, None, False
            if self.job is not None:
                self._run()
            return
        if last:
            raise MeasureError(text)
        job = self.job
        self.replace()
        self.job, self._second = job, True
        self._prepare(which)

    # -- running ------------------------------------------------------------------------------------

    def _run(self) -> None:
        job = self.job
        assert job is not None and job.build is not None
        job.tries += 1
        self._has_run = True
        path, which = job.build.result.artefact, self._which(job.candidate)
        self.future = self._workers.schedule(worker.run, self._session, path, which, timeout=self._timeout_s)

    def _end_run(self, future: Future[Any], job: Job) -> RunResult | None:
        try:
            ran: worker.Ran = future.result()
            if ran.replace:
                self.replace()
            elif ran.result.status != "ok":
                self._ready.discard(self._which(job.candidate))
            return ran.result
        except BrokenProcessPool as e:
            self.replace()
            text = f"runner process: {e}"
            return None if job.tries < MAX_TRIES else RunResult("crash", with_log(self._workers, text))
        except TimeoutError:
            self._expect_new()  # pebble has killed and replaced the process
            return RunResult("timeout", f"the run took over {self._timeout_s:g} s", seconds=self._timeout_s)
        except ProcessExpired as e:
            self._expect_new()
            job.kills += e.exitcode in FROM_OUTSIDE
            if e.exitcode in FROM_OUTSIDE and job.kills < MAX_KILLS:
                return None
            return RunResult("crash", with_log(self._workers, f"the runner process {describe_exit(e.exitcode)}"))
        except Exception as e:  # past all handling in the worker: its state is unknown
            self.replace()
            return RunResult("launch_error", worker.message(e))

    def _which(self, candidate: Candidate) -> int:
        """The number of the problem a candidate is checked with, whatever runner checks it."""
        digest = hashlib.sha256(candidate.key.encode()).digest()
        return (int.from_bytes(digest[:8], "little") ^ self._session.seed) % self.pool_size

    def _expect_new(self) -> None:
        self._ready.clear()
        self._has_run = False


def with_log(workers: Workers, text: str) -> str:
    """The text with what the workers printed since the last look."""
    tail = workers.log_tail()
    return f"{text}; it printed: {tail}" if tail else text
