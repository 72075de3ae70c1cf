"""Measuring for real: a pool of builders and one isolated runner.

Read first: `LiveMeasurer.measure`. Candidates are built in parallel and run one at a time in a process of its own, which is
killed when a candidate hangs and replaced when one breaks it; whatever a candidate does ends as a status in its result.
On CUDA, builds go on while built candidates run. On a CPU a batch is built first, as builds would disturb the timing.
"""

from __future__ import annotations

import hashlib
import pickle
import shutil
import sys
import tempfile
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, TimeoutError, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from pebble import ProcessExpired

from kronsched.errors import ArgumentError, KronschedError, UnsupportedError
from kronsched.hardware.device import Device
from kronsched.measure import worker
from kronsched.measure.base import BuildResult, Measured, RunResult
from kronsched.measure.crew import Crew, default_builders, make_workers
from kronsched.measure.energy import EnergyObserver
from kronsched.measure.pools import Workers, describe_exit
from kronsched.measure.timing import TimingPlan
from kronsched.schedules.base import Schedule
from kronsched.space import Candidate
from kronsched.workloads.base import Workload

PREPARE_TIMEOUT_S = 900.0
"""For importing torch, opening the device and computing a reference: never a candidate's fault."""
MAX_TRIES = 3
"""Builds, and runs, of one candidate when the process dies without a candidate to blame."""


class MeasureError(KronschedError):
    """Nothing can be measured: worker processes do not start, or the workload's inputs or reference cannot be computed."""


@dataclass
class _Job:
    """A candidate on its way through `measure`."""

    candidate: Candidate
    out_dir: str
    build: worker.Built | None = None
    tries: int = 0

    def done(self, run: RunResult | None = None) -> Measured:
        assert self.build is not None
        return Measured(self.candidate, self.build.result, run)


@dataclass
class _Batch:
    """Where the jobs of one `measure` call are: being built, waiting to run, waiting for an equal one's run, or finished."""

    building: dict[Future[Any], _Job] = field(default_factory=dict)
    queue: deque[_Job] = field(default_factory=deque)
    twins: dict[str, list[_Job]] = field(default_factory=dict)
    finished: deque[Measured] = field(default_factory=deque)


class LiveMeasurer:
    """Builds, checks and times candidates of one workload on a device of this machine. A `Measurer`; also a context manager.

    schedules: those whose name is the `space` of the candidates to come.  work_dir: where artefacts are kept (they stay);
    None makes a temporary directory that `close` removes.  compiler: "nvrtc" or "nvcc".  builders: processes; None takes the
    usable cores (on CUDA one fewer), at most 32.  build_timeout_s, run_timeout_s: seconds of one build, and of one load, check
    and timing, counted in the worker.  seed: of the inputs candidates are checked with.  observers: energy counters, the first
    with a value fills `energy_j`.  dedupe: candidates that build to the same code and launches are run once and share the
    result.  plan: how long to time.  crew: worker processes to use and to leave running at `close`; `builders` is then theirs.

    Raises UnsupportedError for a device that is not there, ArgumentError for parts that worker processes cannot import.
    """

    def __init__(
        self,
        workload: Workload,
        schedules: Sequence[Schedule],
        device: Device,
        *,
        work_dir: str | Path | None = None,
        compiler: str = "nvrtc",
        builders: int | None = None,
        build_timeout_s: float = 60.0,
        run_timeout_s: float = 20.0,
        seed: int = 0,
        observers: Sequence[EnergyObserver] = (),
        dedupe: bool = True,
        plan: TimingPlan | None = None,
        crew: Crew | None = None,
    ) -> None:
        """Start nothing yet: processes start with the first batch."""
        if not device.present:
            raise UnsupportedError(
                f"device {device.name!r} is a preset that this machine does not have: nothing can be measured on it"
            )
        if builders is not None and builders < 1:
            raise ArgumentError(f"builders={builders} is not allowed: an int ≥ 1 is needed")
        self._session = worker.Session(workload, device, seed, plan, tuple(observers))
        self._schedules = {s.name: s for s in schedules}
        import_main = _needs_main((self._session, self._schedules))
        self._compiler, self._dedupe = compiler, dedupe
        self._build_timeout_s, self._run_timeout_s = build_timeout_s, run_timeout_s
        self._overlap = device.kind == "cuda"
        self._dir = Path(work_dir or tempfile.mkdtemp(prefix="kronsched-measure-")).resolve()
        self._dir.mkdir(parents=True, exist_ok=True)
        # Runs at `close`, when the measurer is dropped, or at exit, whichever comes first.
        self._remove = weakref.finalize(self, shutil.rmtree, self._dir, ignore_errors=True) if work_dir is None else None
        self._closed = False
        self._crew = crew
        n = crew.count if crew is not None else builders or default_builders(device)
        workers = crew.workers(import_main) if crew is not None else make_workers(n, self._dir, import_main)
        self._builders, self._runner = workers
        self.parallel = n if self._overlap else 1
        """Candidates that a batch should hold at least, so that no builder idles while others run."""
        self._numbers = count()
        self._known: dict[str, RunResult] = {}
        self._ready: set[int] = set()  # problems the present runner has
        self._runner_has_run = crew is not None  # for another workload, perhaps
        self._pool_size = 1

    # -- the Measurer interface ---------------------------------------------------------------------

    def measure(self, batch: Sequence[Candidate]) -> Iterator[Measured]:
        """Measure a batch; one result a candidate, in order of completion. See `Measurer.measure`.

        Raises MeasureError when no candidate could be measured whatever it is. Leaving the loop early, or an exception such as
        KeyboardInterrupt in it, kills the workers; a later call starts new ones.
        """
        if self._closed:
            raise MeasureError("this measurer is closed")
        work = self._submit_builds(batch)
        warming = None if self._ready or not work.building else self._submit_prepare(0)
        running: tuple[Future[Any], _Job] | None = None
        complete = False
        try:
            while True:
                if running is None and work.queue and (self._overlap or not work.building):
                    if warming is not None:
                        self._await_prepare(warming, 0)
                        warming = None
                    job = work.queue.popleft()
                    running = self._submit_run(job), job
                # Results are handed out only once builders and runner have work again.
                while work.finished:
                    yield work.finished.popleft()
                waiting = [*work.building, *([running[0]] if running else [])]
                if not waiting:
                    break
                for future in wait(waiting, return_when=FIRST_COMPLETED).done:
                    if running is not None and future is running[0]:
                        self._end_run(future, running[1], work)
                        running = None
                    else:
                        self._end_build(future, work)
            complete = True
        finally:
            if not complete:
                self._stop_workers()

    def close(self) -> None:
        """End worker processes (not those of a crew) and remove the temporary directory. Safe to call twice."""
        self._closed = True
        if self._crew is None:
            self._stop_workers()
        if self._remove is not None:
            self._remove()

    def __enter__(self) -> LiveMeasurer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # -- building -----------------------------------------------------------------------------------

    def _submit_builds(self, candidates: Sequence[Candidate]) -> _Batch:
        batch = _Batch()
        for candidate in candidates:
            if candidate.space in self._schedules:
                job = _Job(candidate, str(self._dir / f"{next(self._numbers):06d}"))
                batch.building[self._submit_build(job)] = job
            else:
                reason = f"space={candidate.space!r} is not one of {', '.join(self._schedules)}"
                batch.finished.append(Measured(candidate, BuildResult("invalid", reason)))
        return batch

    def _submit_build(self, job: _Job) -> Future[Any]:
        job.tries += 1
        session, schedule = self._session, self._schedules[job.candidate.space]
        task = worker.BuildTask(session.workload, schedule, job.candidate.config, session.device, job.out_dir, self._compiler)
        return self._builders.schedule(worker.build, task, timeout=self._build_timeout_s)

    def _end_build(self, future: Future[Any], batch: _Batch) -> None:
        job = batch.building.pop(future)
        try:
            job.build = future.result()
        except BrokenProcessPool as e:
            if job.tries < MAX_TRIES:  # probably another candidate's doing
                batch.building[self._submit_build(job)] = job
                return
            job.build = worker.Built(BuildResult("crash", self._with_log(self._builders, f"builder process: {e}")))
        except TimeoutError:
            seconds = self._build_timeout_s
            job.build = worker.Built(BuildResult("timeout", f"the build took over {seconds:g} s", seconds=seconds))
        except ProcessExpired as e:
            text = f"the builder process {describe_exit(e.exitcode)}"
            job.build = worker.Built(BuildResult("crash", self._with_log(self._builders, text)))
        except Exception as e:  # the task could not be unpickled in the worker
            job.build = worker.Built(BuildResult("compile_error", worker.message(e)))
        job.tries = 0
        key = job.build.same_as if self._dedupe else None
        if job.build.result.status != "ok":
            batch.finished.append(job.done())
        elif key in self._known:
            batch.finished.append(job.done(self._known[key]))
        elif key in batch.twins:
            batch.twins[key].append(job)
        else:
            if key is not None:
                batch.twins[key] = []
            batch.queue.append(job)

    # -- running ------------------------------------------------------------------------------------

    def _submit_run(self, job: _Job) -> Future[Any]:
        job.tries += 1
        assert job.build is not None
        which = self._which(job.candidate)
        if which not in self._ready:
            self._await_prepare(self._submit_prepare(which), which)
        self._runner_has_run = True
        return self._runner.schedule(worker.run, self._session, job.build.result.artefact, which, timeout=self._run_timeout_s)

    def _end_run(self, future: Future[Any], job: _Job, batch: _Batch) -> None:
        try:
            ran: worker.Ran = future.result()
            result = ran.result
            if ran.replace:
                self._replace_runner()
            elif result.status != "ok":
                self._ready.discard(self._which(job.candidate))
        except BrokenProcessPool as e:
            if job.tries < MAX_TRIES:
                self._replace_runner()
                batch.queue.appendleft(job)
                return
            self._replace_runner()
            result = RunResult("crash", self._with_log(self._runner, f"runner process: {e}"))
        except TimeoutError:
            self._expect_new_runner()  # pebble has killed and replaced the process
            result = RunResult("timeout", f"the run took over {self._run_timeout_s:g} s", seconds=self._run_timeout_s)
        except ProcessExpired as e:
            self._expect_new_runner()
            result = RunResult("crash", self._with_log(self._runner, f"the runner process {describe_exit(e.exitcode)}"))
        except Exception as e:  # past all handling in the worker: its state is unknown
            self._replace_runner()
            result = RunResult("launch_error", worker.message(e))
        batch.finished.append(job.done(result))
        key = job.build.same_as if job.build is not None else None
        if key is not None and self._dedupe:
            self._known[key] = result
            batch.finished.extend(twin.done(result) for twin in batch.twins.pop(key, ()))

    def _which(self, candidate: Candidate) -> int:
        """The number of the problem a candidate is checked with."""
        digest = hashlib.sha256(candidate.key.encode()).digest()
        return (int.from_bytes(digest[:8], "little") ^ self._session.seed) % self._pool_size

    def _submit_prepare(self, which: int) -> Future[Any]:
        return self._runner.schedule(worker.prepare, self._session, which, timeout=PREPARE_TIMEOUT_S)

    def _await_prepare(self, future: Future[Any], which: int) -> None:
        """Wait until the runner has problem `which`; MeasureError when a fresh runner cannot make it."""
        for last in (False, True):
            try:
                self._pool_size = future.result()
            except (TimeoutError, OSError, BrokenProcessPool) as e:
                reason = describe_exit(e.exitcode) if isinstance(e, ProcessExpired) else str(e)
                text = self._with_log(self._runner, f"the runner process could not prepare the workload: {reason}")
            except Exception as e:
                text = f"inputs or reference of {self._session.workload.label} cannot be computed: {worker.message(e)}"
                last = last or not self._runner_has_run  # else a candidate may have broken the process
            else:
                self._ready.add(which)
                return
            if last:
                raise MeasureError(text)
            self._replace_runner()
            future = self._submit_prepare(which)

    # -- processes and files ------------------------------------------------------------------------

    def _replace_runner(self) -> None:
        self._runner.replace()
        self._expect_new_runner()

    def _expect_new_runner(self) -> None:
        self._ready.clear()
        self._runner_has_run = False

    def _stop_workers(self) -> None:
        self._replace_runner()
        self._builders.replace()

    @staticmethod
    def _with_log(workers: Workers, text: str) -> str:
        tail = workers.log_tail()
        return f"{text}; it printed: {tail}" if tail else text


def _needs_main(parts: Any) -> bool:
    """Whether worker processes must import the user's script to unpickle the parts; ArgumentError when they cannot."""
    try:
        pickled = pickle.dumps(parts)
    except Exception as e:
        raise ArgumentError(f"workload, schedules and observers must be picklable for worker processes: {e}") from None
    if b"__main__" not in pickled:
        return False
    main = sys.modules["__main__"]
    if getattr(main, "__spec__", None) is None and not getattr(main, "__file__", None):
        raise ArgumentError(
            "a workload, schedule or observer is defined in an interactive session: move its class to a module, so that worker "
            "processes can import it"
        )
    return True
