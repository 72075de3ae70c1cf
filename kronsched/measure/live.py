"""Measuring for real: a pool of builders and one isolated runner a device.

Read first: `LiveMeasurer.measure`, then runner.py. Candidates are built in parallel and wait in one queue; each runner takes
the next when it is free, and runs one at a time in a process of its own, which is killed when a candidate hangs and replaced
when one breaks it. Whatever a candidate does ends as a status in its result. On CUDA, builds go on while built candidates run.
On a CPU a batch is built first, as builds would disturb the timing.
"""

from __future__ import annotations

import pickle
import shutil
import sys
import tempfile
import warnings
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

from kronsched.errors import ArgumentError
from kronsched.hardware.device import Device
from kronsched.measure import worker
from kronsched.measure.base import BuildResult, Measured, RunResult
from kronsched.measure.crew import Crew, as_devices, default_builders, make_workers
from kronsched.measure.energy import EnergyObserver
from kronsched.measure.pools import describe_exit
from kronsched.measure.runner import MAX_TRIES, Job, MeasureError, Runner, with_log
from kronsched.measure.timing import TimingPlan
from kronsched.schedules.base import Schedule
from kronsched.space import Candidate
from kronsched.workloads.base import Workload

__all__ = ["LiveMeasurer", "MeasureError"]


@dataclass
class _Batch:
    """Where the jobs of one `measure` call are: being built, waiting to run, waiting for an equal one's run, or finished."""

    building: dict[Future[Any], Job] = field(default_factory=dict)
    queue: deque[Job] = field(default_factory=deque)
    twins: dict[str, list[Job]] = field(default_factory=dict)
    finished: deque[Measured] = field(default_factory=deque)


class LiveMeasurer:
    """Builds, checks and times candidates of one workload on devices of this machine. A `Measurer`; also a context manager.

    device: one, or several of one model, each with a runner of its own; the first is the one that candidates are built for. A
    candidate whose runner is killed from outside runs once more; a runner that cannot prepare is left out with a warning while
    others can.
    schedules: those whose name is the `space` of the candidates to come.  work_dir: where artefacts are kept (they stay);
    None makes a temporary directory that `close` removes.  compiler: "nvrtc" or "nvcc".  builders: processes; None takes the
    usable cores (on CUDA one fewer for each runner), at most 32.  build_timeout_s, run_timeout_s: seconds of one build, and of
    one load, check and timing, counted in the worker.  seed: of the inputs candidates are checked with.  observers: energy
    counters, the first with a value fills `energy_j`.  dedupe: candidates that build to the same code and launches are run once
    and share the result.  plan: how long to time.  crew: worker processes to use and to leave running at `close`; `builders` is
    then theirs.

    Raises UnsupportedError for a device that is not there, ArgumentError for parts that worker processes cannot import.
    """

    def __init__(
        self,
        workload: Workload,
        schedules: Sequence[Schedule],
        device: Device | Sequence[Device],
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
        devices = as_devices(device)
        device = devices[0]
        if builders is not None and builders < 1:
            raise ArgumentError(f"builders={builders} is not allowed: an int ≥ 1 is needed")
        self._session = worker.Session(workload, device, seed, plan, tuple(observers))
        self._schedules = {s.name: s for s in schedules}
        import_main = _needs_main((self._session, self._schedules))
        self._compiler, self._dedupe = compiler, dedupe
        self._build_timeout_s = build_timeout_s
        self._overlap = device.kind == "cuda"
        self._dir = Path(work_dir or tempfile.mkdtemp(prefix="kronsched-measure-")).resolve()
        self._dir.mkdir(parents=True, exist_ok=True)
        # Runs at `close`, when the measurer is dropped, or at exit, whichever comes first.
        self._remove = weakref.finalize(self, shutil.rmtree, self._dir, ignore_errors=True) if work_dir is None else None
        self._closed = False
        self._crew = crew
        n = crew.count if crew is not None else builders or default_builders(devices)
        workers = crew.workers(import_main) if crew is not None else make_workers(n, len(devices), self._dir, import_main)
        self._builders = workers[0]
        used = crew is not None  # for another workload, perhaps
        self._runners = [Runner(w, self._session, d, run_timeout_s, used) for w, d in zip(workers[1], devices, strict=True)]
        self.parallel = n if self._overlap else 1
        """Candidates that a batch should hold at least, so that no builder idles while others run."""
        self._numbers = count()
        self._known: dict[str, RunResult] = {}

    # -- the Measurer interface ---------------------------------------------------------------------

    def measure(self, batch: Sequence[Candidate]) -> Iterator[Measured]:
        """Measure a batch; one result a candidate, in order of completion. See `Measurer.measure`.

        Raises MeasureError when no candidate could be measured whatever it is. Leaving the loop early, or an exception such as
        KeyboardInterrupt in it, kills the workers; a later call starts new ones.
        """
        if self._closed:
            raise MeasureError("this measurer is closed")
        work = self._submit_builds(batch)
        complete = False
        try:
            while True:
                self._begin_runs(work)
                # Results are handed out only once builders and runners have work again.
                while work.finished:
                    yield work.finished.popleft()
                busy = {r.future: r for r in self._runners if r.future is not None}
                if not (work.building or work.queue or any(r.job is not None for r in busy.values())):
                    break
                for future in wait([*work.building, *busy], return_when=FIRST_COMPLETED).done:
                    if future in busy:
                        self._advance(busy[future], work)
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
                job = Job(candidate, str(self._dir / f"{next(self._numbers):06d}"))
                batch.building[self._submit_build(job)] = job
            else:
                reason = f"space={candidate.space!r} is not one of {', '.join(self._schedules)}"
                batch.finished.append(Measured(candidate, BuildResult("invalid", reason)))
        return batch

    def _submit_build(self, job: Job) -> Future[Any]:
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
            job.build = worker.Built(BuildResult("crash", with_log(self._builders, f"builder process: {e}")))
        except TimeoutError:
            seconds = self._build_timeout_s
            job.build = worker.Built(BuildResult("timeout", f"the build took over {seconds:g} s", seconds=seconds))
        except ProcessExpired as e:
            text = f"the builder process {describe_exit(e.exitcode)}"
            job.build = worker.Built(BuildResult("crash", with_log(self._builders, text)))
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

    def _begin_runs(self, work: _Batch) -> None:
        """Give idle runners work: the waiting candidates, or when there are none yet, a problem to prepare."""
        for runner in self._runners:
            if runner.future is not None:
                continue
            if not runner.ready and work.building:
                runner.warm_up()
            elif work.queue and (self._overlap or not work.building):
                runner.begin(work.queue.popleft())

    def _advance(self, runner: Runner, work: _Batch) -> None:
        waiting = runner.job
        try:
            job, result = runner.advance()
        except MeasureError as e:
            self._retire(runner, e)
            if waiting is not None:
                work.queue.appendleft(waiting)
            return
        if job is None:
            return
        if result is None:
            work.queue.appendleft(job)
            return
        work.finished.append(job.done(result))
        key = job.build.same_as if job.build is not None else None
        if key is not None and self._dedupe:
            self._known[key] = result
            work.finished.extend(twin.done(result) for twin in work.twins.pop(key, ()))

    def _retire(self, runner: Runner, error: MeasureError) -> None:
        """Go on without a runner that cannot prepare; with none left, that is an error."""
        runner.replace()
        if len(self._runners) == 1:
            raise error
        self._runners.remove(runner)
        warnings.warn(f"{runner.device.torch_device} is used no more: {error}", RuntimeWarning, stacklevel=4)

    # -- processes and files ------------------------------------------------------------------------

    def _stop_workers(self) -> None:
        for runner in self._runners:
            runner.replace()
        self._builders.replace()


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
