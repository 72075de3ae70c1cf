"""What worker processes run: `build` in a builder, `prepare` and `run` in the runner. All arguments and results are picklable.

Read first: `run`, the order of checks a candidate goes through.

Inputs. A check needs fresh random data, and a float64 reference can cost more than the candidate. So a runner keeps a pool of
up to `POOL_SIZE` problems (inputs and their reference), drawn from the session's seed, as many as fit in `POOL_BYTES`
(at least one); a candidate's key decides which one it is checked with. After any failure the problem is made anew, in case the
candidate damaged it.
"""

from __future__ import annotations

import hashlib
import math
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kronsched.dtypes import DTYPES
from kronsched.errors import InvalidConfig
from kronsched.hardware.device import Device
from kronsched.measure.arena import Arena, same_bytes
from kronsched.measure.base import BuildResult, RunResult
from kronsched.measure.check import gate, rms
from kronsched.measure.energy import EnergyObserver, joules_per_call
from kronsched.measure.memory import free_bytes
from kronsched.measure.timing import TimingPlan, noise, repeated, sets_for, time_calls
from kronsched.schedules.base import Schedule
from kronsched.space import Value
from kronsched.workloads.base import Workload

if TYPE_CHECKING:
    import torch

    from kronsched.runtime.executable import Executable

POOL_SIZE = 4
POOL_BYTES = {"cpu": 256 << 20, "cuda": 4 << 30}
MESSAGE_CHARS = 500


# -- building ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BuildTask:
    """One candidate to build into `out_dir`."""

    workload: Workload
    schedule: Schedule
    config: Mapping[str, Value]
    device: Device
    out_dir: str
    compiler: str


@dataclass(frozen=True)
class Built:
    """result: for the record.  same_as: equal for modules that run the same code with the same launches; None without one."""

    result: BuildResult
    same_as: str | None = None


def set_up_builder() -> None:
    """Import TVM once, before any build is timed.

    tvm_ffi imports torch when it finds it, which costs a builder 2.5 s and 200 MB and serves no build; a schedule that needs
    torch can still import it afterwards.
    """
    hide = "torch" not in sys.modules
    if hide:
        sys.modules["torch"] = None  # type: ignore[assignment]
    try:
        import tvm  # noqa: F401
    finally:
        if hide:
            del sys.modules["torch"]


def build(task: BuildTask) -> Built:
    """Build one candidate; every failure becomes a status."""
    from kronsched.runtime.build import build_artefact

    start = time.perf_counter()
    try:
        manifest = build_artefact(task.workload, task.schedule, task.config, task.device, Path(task.out_dir), task.compiler)
    except InvalidConfig as e:
        return Built(BuildResult("invalid", message(e), seconds=time.perf_counter() - start))
    except (Exception, SystemExit) as e:  # whatever a schedule or the compiler raises is this candidate's failure
        return Built(BuildResult("compile_error", message(e), seconds=time.perf_counter() - start))
    result = BuildResult(
        "ok",
        artefact=task.out_dir,
        source_sha256=manifest.source_sha256,
        registers=manifest.registers,
        shared_bytes=manifest.shared_bytes,
        spill_bytes=manifest.spill_bytes,
        seconds=time.perf_counter() - start,
    )
    # Grid and block are not in the CUDA source.
    text = f"{manifest.source_sha256}{manifest.launches!r}{manifest.scratch!r}"
    return Built(result, hashlib.sha256(text.encode()).hexdigest())


# -- running ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Session:
    """What all runs of a `LiveMeasurer` have in common."""

    workload: Workload
    device: Device
    seed: int
    plan: TimingPlan | None = None
    observers: tuple[EnergyObserver, ...] = ()


@dataclass(frozen=True)
class Ran:
    """result: for the record.  replace: the process may be damaged (broken CUDA context, memory written out of bounds)."""

    result: RunResult
    replace: bool = False


def no_set_up() -> None:
    """The runner imports torch in `prepare`, where a failure can be reported."""


def prepare(session: Session, which: int) -> int:
    """Import torch, open the device and make problem number `which`; returns how many problems the pool has.

    Raises what the workload's `make_inputs` or `reference` raises. Not part of any candidate's time-out.
    """
    bench = bench_of(session)
    with bench.stream():
        bench.problem(which)
        bench.arena()
        bench.wait()
    return bench.pool_size


def run(session: Session, artefact: str, which: int) -> Ran:
    """Load, check and time one built candidate on problem `which`.

    load → poison the output, run, compare bands, inputs and result → poison otherwise, run, compare bitwise → time on rotated
    sets → compare bitwise again → energy. The first thing that fails is the status.
    """
    from kronsched.runtime.executable import load_executable

    start = time.perf_counter()
    bench = bench_of(session)
    with bench.stream():
        try:
            executable = load_executable(Path(artefact), session.device.index)
            # libtvm_ffi's handler, installed when it is loaded, prints a backtrace for seconds before the process ends.
            signal.signal(signal.SIGSEGV, signal.SIG_DFL)
            result = _check_and_time(bench, executable, which)
        except Exception as e:
            result = RunResult("launch_error", message(e))
        damaged = (result.error or "").startswith("wrote out of bounds") or not bench.alive()
    if result.status != "ok" and not damaged:
        bench.forget(which)
    return Ran(replace(result, seconds=time.perf_counter() - start), damaged)


def _check_and_time(bench: Bench, executable: Executable, which: int) -> RunResult:
    problem, arena = bench.problem(which), bench.arena()
    inputs, output = arena.sets[0]
    arena.load(problem.inputs)
    executable(inputs, output)
    bench.wait()
    if damage := arena.damage(bench.names, problem.inputs):
        return RunResult("wrong_result", damage)
    first = arena.output_bytes().clone()
    verdict = gate(output, problem.reference, bench.output_dtype, problem.reference_rms, bench.session.workload.slack)
    arena.poison(1)
    executable(inputs, output)
    bench.wait()
    same = same_bytes(first, arena.output_bytes())
    if not same and (unwritten := arena.unwritten(first)):
        return RunResult(
            "wrong_result", f"left {unwritten} of {output.numel()} elements of the output unwritten", (), verdict.error
        )
    if verdict.message is not None:
        return RunResult("wrong_result", verdict.message, (), verdict.error)
    if not same:
        return RunResult("flaky", "two runs on the same inputs gave different results", (), verdict.error)
    calls = [partial(executable, *tensors) for tensors in arena.sets]
    times = time_calls(calls, bench.session.device.torch_device, bench.session.plan)
    bench.wait()
    if damage := arena.damage(bench.names, problem.inputs):
        return RunResult("wrong_result", damage, (), verdict.error)
    if not same_bytes(first, arena.output_bytes()):
        return RunResult("flaky", "a run during timing gave another result on the same inputs", (), verdict.error)
    energy = _energy(bench, calls, times)
    return RunResult("ok", None, times, verdict.error, noise(times), energy)


def _energy(bench: Bench, calls: Sequence[Callable[[], Any]], times_us: Sequence[float]) -> float | None:
    """Joules a call from the first observer that has a counter."""
    if not bench.session.observers:
        return None
    count = max(1, min(2048, math.ceil(10_000 / min(times_us))))  # 10 ms between looks at the clock
    burst = repeated(calls, count, bench.session.device.torch_device)
    found = (joules_per_call(observer, burst, count, bench.wait) for observer in bench.session.observers)
    return next((joules for joules in found if joules is not None), None)


@dataclass(frozen=True)
class Problem:
    """Inputs on the device with their float64 reference."""

    inputs: list[torch.Tensor]
    reference: torch.Tensor
    reference_rms: float


class Bench:
    """What a runner process keeps from candidate to candidate."""

    def __init__(self, session: Session) -> None:
        """Import torch and open the device."""
        import torch

        self.session = session
        self.names = [*(t.name for t in session.workload.inputs), session.workload.output.name]
        self.output_dtype = session.workload.output.dtype
        self.pool_size = POOL_SIZE
        self._device = session.device.torch_device
        # CUDA graphs cannot be captured on the default stream; one stream for all, so that scratch is reused.
        on_cuda = session.device.kind == "cuda"
        if on_cuda:
            torch.cuda.empty_cache()  # what the bench of another workload held
        self._stream = torch.cuda.Stream(self._device) if on_cuda else None  # type: ignore[no-untyped-call]
        self._problems: dict[int, Problem] = {}
        self._arena: Arena | None = None

    def stream(self) -> AbstractContextManager[Any]:
        """Makes the runner's stream torch's current one."""
        import torch

        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def problem(self, which: int) -> Problem:
        """Problem `which` of the pool."""
        which %= self.pool_size
        if which not in self._problems:
            workload = self.session.workload
            inputs = [t.contiguous() for t in workload.make_inputs(self.session.seed * POOL_SIZE + which, self._device)]
            reference = workload.reference(*inputs).contiguous()
            self._problems[which] = Problem(inputs, reference, rms(reference))
            size = sum(t.nbytes for t in inputs) + reference.nbytes
            self.pool_size = max(1, min(POOL_SIZE, POOL_BYTES[self.session.device.kind] // max(1, size)))
        return self._problems[which]

    def arena(self) -> Arena:
        """The guarded buffers, made on first use for as many sets as fit."""
        import torch

        if self._arena is None:
            output_spec, inputs = self.session.workload.output, self.problem(0).inputs
            output = torch.empty(output_spec.shape, dtype=DTYPES[output_spec.dtype].torch(), device=self._device)
            size = sum(t.nbytes for t in inputs) + output.nbytes
            self._arena = Arena(inputs, output, sets_for(size, self.session.device, free_bytes(self.session.device)))
        return self._arena

    def forget(self, which: int) -> None:
        """Make the problem and the rotated inputs anew: a failed candidate may have written anywhere."""
        self._problems.pop(which % self.pool_size, None)
        if self._arena is not None:
            self._arena.stale = True

    def wait(self) -> None:
        """Return when the device has finished; raises what its kernels did wrong."""
        import torch

        if self._stream is not None:
            torch.cuda.synchronize(self._device)

    def alive(self) -> bool:
        """False when the CUDA context is broken: every later call in this process would fail."""
        try:
            self.wait()
        except Exception:
            return False
        return True


_benches: dict[str, Bench] = {}
"""The one bench of this runner process. Lives here because a pool's tasks share nothing but their process."""


def bench_of(session: Session) -> Bench:
    """What this process keeps for a session, made anew when the last one was for another."""
    key = f"{session.workload.key} {session.device.torch_device} {session.seed}"
    if key not in _benches:
        _benches.clear()  # a runner serves one workload after another: the tensors of the last one go first
        _benches[key] = Bench(session)
    return _benches[key]


def message(error: BaseException) -> str:
    """An error as one line: its type (unless it is ours) and the first line of its text."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0][:MESSAGE_CHARS] if lines else type(error).__name__
    return text if type(error).__module__.startswith("kronsched") else f"{type(error).__name__}: {text}"
