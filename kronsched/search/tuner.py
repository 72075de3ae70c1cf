"""The tuner loop: ask a strategy for candidates, measure them, log each result at once, tell the strategy.

Read first: `tune` (arguments and their checks) and `_Run.search` (the loop).
"""

from __future__ import annotations

import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from kronsched import registry
from kronsched.errors import ArgumentError, ArgumentTypeError, KronschedError, choose
from kronsched.hardware import Device, floor_us, resolve_target
from kronsched.measure.base import Measured, Measurer
from kronsched.records.database import default_log, matches_device, search_dirs
from kronsched.records.journal import Journal
from kronsched.records.schema import TuningRecord, record_of
from kronsched.search.arm import Arm, cost, make_arms
from kronsched.search.base import Observation
from kronsched.search.result import TuneEvent, TuneResult
from kronsched.space import Candidate
from kronsched.workloads.base import Workload

__all__ = ["TuneEvent", "TuneResult", "tune"]

OBJECTIVES = ("time", "energy")
HISTORY_PER_SHAPE = 512
"""Records of one other shape that the warm start reads at most."""


def tune(
    workload: Workload,
    *,
    target: str = "auto",
    trials: int = 64,
    log: str | Path | None = None,
    strategy: str = "distinctive",
    seed: int = 0,
    space: str | Path | None = None,
    compiler: str = "nvrtc",
    warm_start: bool = True,
    objective: str = "time",
    build_timeout_s: float = 60.0,
    run_timeout_s: float = 20.0,
    builders: int | None = None,
    progress: Callable[[TuneEvent], None] | None = None,
    measurer: Measurer | None = None,
) -> TuneResult:
    """Search schedules of a workload, measure them on the target, append every result to a log.

    workload: a shape, such as `KronMatmul(...)`.  target: "auto", "cpu", "cuda", "cuda:N" or a preset; one this machine lacks
    is compiled for and ranked, and nothing is measured.  trials: new candidates to measure.  log: JSON Lines file to append to
    (default: one a workload in the user's data directory, where `load` looks first); what it already holds for this workload and
    device is not measured again.  strategy: "distinctive", "annealing", "evolutionary", "random", "exhaustive" or a registered
    one.  seed: of the search and of the inputs.  space: TOML file with knobs instead of the shipped one.  compiler: "nvrtc" or
    "nvcc".  warm_start: start the cost model from logs of other shapes.  objective: "time", or "energy" (joules a call).
    build_timeout_s, run_timeout_s: seconds of one build and of one run.  builders: processes (default: by cores).
    progress: called with each `TuneEvent`.  measurer: replaces the live one (simulation, tests).

    Raises ArgumentError or ArgumentTypeError naming the argument, before any work; UnsupportedError when nothing serves the
    workload on the target.
    """
    started = time.perf_counter()
    _check(workload, trials, strategy, seed, objective)
    device = resolve_target(target)
    if device.kind == "cuda":
        _check_compiler(compiler)
    path = Path(log) if log is not None else default_log(workload)
    journal = Journal(path)
    journal.check_writable()
    known = journal.read() if path.exists() else []
    mine = [r for r in known if r.workload_key == workload.key and matches_device(r, device)]
    history = _history(workload, known) if warm_start and registry.strategy(strategy).uses_model else []
    arms = make_arms(workload, device, strategy, seed, space, history)
    run = _Run(workload, device, arms, journal, mine, trials, strategy, seed, objective, progress)
    if not device.present and measurer is None:
        return run.predict(compiler, started)
    owned = measurer is None
    live = measurer or _live(workload, arms, device, compiler, build_timeout_s, run_timeout_s, builders, seed, objective)
    try:
        run.search(live)
    finally:
        if owned:
            live.close()
    return run.result(started)


class _Run:
    """The state of one tuning run."""

    def __init__(
        self,
        workload: Workload,
        device: Device,
        arms: Sequence[Arm],
        journal: Journal,
        known: Sequence[TuningRecord],
        trials: int,
        strategy: str,
        seed: int,
        objective: str,
        progress: Callable[[TuneEvent], None] | None,
    ) -> None:
        self.workload, self.device, self.arms, self.journal = workload, device, list(arms), journal
        self.known, self.trials, self.strategy, self.seed = list(known), trials, strategy, seed
        self.objective, self.progress = objective, progress
        self.records: list[TuningRecord] = []
        self.failures: Counter[str] = Counter()
        self.round = 0
        self.search_seconds = 0.0
        self.floor_us = floor_us(workload, device)
        self.best = self._best_of(self.known)

    # -- the loop -----------------------------------------------------------------------------------

    def search(self, measurer: Measurer) -> None:
        """Measure until `trials` new candidates are done or no space has any left."""
        with self._searching():
            for arm in self.arms:
                arm.strategy.tell(arm.observe(self.known, self.objective))
        self._emit("start")
        parallel = int(getattr(measurer, "parallel", 1))
        live = list(self.arms)
        while live and len(self.records) < self.trials:
            arm = self._turn(live)
            with self._searching() as spent:
                size = min(max(arm.strategy.batch_size, parallel), self.trials - len(self.records))
                batch = arm.strategy.ask(size)
                ranks = _ranks(arm, batch)
            if not batch:
                live.remove(arm)
                continue
            self.round += 1
            told: list[Observation] = []
            share = spent() / len(batch)
            for measured in measurer.measure(batch):
                told.append(self._record(arm, measured, ranks, share))
            with self._searching():
                arm.strategy.tell(told)
        self._emit("end")

    def _turn(self, arms: Sequence[Arm]) -> Arm:
        """Whose batch is next: every schedule once, then the best one's two times out of three."""
        if len(arms) == 1 or self.round < len(arms):
            return arms[self.round % len(arms)]
        leader = next((a for a in arms if self.best is not None and a.space.name == self.best.space["name"]), arms[0])
        others = [a for a in arms if a is not leader]
        return leader if self.round % 3 else others[self.round // 3 % len(others)]

    def _record(self, arm: Arm, measured: Measured, ranks: dict[Candidate, int], search_seconds: float) -> Observation:
        record = record_of(
            self.workload,
            self.device,
            arm.space.name,
            arm.space.digest,
            measured,
            {
                "strategy": self.strategy,
                "seed": self.seed,
                "round": self.round,
                "predicted_rank": ranks.get(measured.candidate),
                "build_seconds": measured.build.seconds,
                "run_seconds": measured.run.seconds if measured.run is not None else 0.0,
                "search_seconds": search_seconds,
                "objective": self.objective,
            },
        )
        self.journal.append(record)
        self.records.append(record)
        if not record.ok:
            self.failures[record.status] += 1
        self.best = self._best_of([r for r in (self.best, record) if r is not None])
        self._emit("result", record)
        return Observation(measured.candidate, record.status, cost(record, self.objective), measured.build.source_sha256)

    def _best_of(self, records: Sequence[TuningRecord]) -> TuningRecord | None:
        spaces = {a.space.name for a in self.arms}
        good = [r for r in records if cost(r, self.objective) is not None and r.space["name"] in spaces]
        return min(good, key=lambda r: cost(r, self.objective) or 0.0, default=None)

    def _searching(self) -> _Stopwatch:
        return _Stopwatch(self)

    def _emit(self, kind: str, record: TuningRecord | None = None, message: str = "") -> None:
        if self.progress is not None:
            value = None if self.best is None else cost(self.best, self.objective)
            event = TuneEvent(
                kind,
                self.trials,
                len(self.records),
                self.round,
                self.best,
                value,
                self.floor_us,
                dict(self.failures),
                record,
                message,
            )
            self.progress(event)

    # -- how it ends --------------------------------------------------------------------------------

    def result(self, started: float) -> TuneResult:
        """The outcome, with the time of what a user would run otherwise."""
        name, reference = _reference(self.workload, self.device)
        return self._result(started, reference_us=reference, reference_name=name)

    def predict(self, compiler: str, started: float) -> TuneResult:
        """For a device that is not here: the candidate that ranks first, compiled; nothing is measured."""
        from kronsched.runtime.cache import get_or_build

        with self._searching():
            for arm in self.arms:
                arm.strategy.tell(arm.observe(self.known, self.objective))
            candidate = self._favourite()
        artefact = get_or_build(self.workload, candidate.space, candidate.config, self.device, compiler)
        how = "ranked first by the cost model" if self.arms[0].model.trained else "the schedule's default"
        message = f"{self.device.name} is not in this machine: nothing was measured; the predicted config is {how}"
        self._emit("message", message=message)
        return self._result(started, predicted=candidate, artefact=artefact, message=message)

    def _favourite(self) -> Candidate:
        arm = self.arms[0]
        default = arm.space.candidate(arm.schedule.default_config(self.workload, self.device))
        if not arm.model.trained:
            return default
        pool = [default, *arm.strategy.ask(32)]
        scores = arm.model.predict(pool)
        return pool[int(scores.argmax())]

    def _result(self, started: float, **more: Any) -> TuneResult:
        return TuneResult(
            workload=self.workload,
            device=self.device,
            best=self.best,
            records=tuple(self.records),
            failures=dict(self.failures),
            trials=len(self.records),
            seconds=time.perf_counter() - started,
            log=self.journal.path,
            floor_us=self.floor_us,
            objective=self.objective,
            known=len(self.known),
            search_seconds=self.search_seconds,
            strategy=self.strategy,
            space=",".join(a.space.name for a in self.arms),
            **more,
        )


class _Stopwatch:
    """Adds the time inside to the run's search seconds; calling the value gives this round's seconds so far."""

    def __init__(self, run: _Run) -> None:
        self._run, self._spent = run, 0.0

    def __enter__(self) -> Callable[[], float]:
        self._from = time.perf_counter()
        return lambda: self._spent or time.perf_counter() - self._from

    def __exit__(self, *exc: object) -> None:
        self._spent = time.perf_counter() - self._from
        self._run.search_seconds += self._spent


# -- checks and parts -----------------------------------------------------------------------------------


def _check(workload: Workload, trials: int, strategy: str, seed: int, objective: str) -> None:
    if not isinstance(workload, Workload):
        raise ArgumentTypeError(f"workload={workload!r} must be a workload, such as KronMatmul(m=…, factors=…)")
    for name, value, least in (("trials", trials, 1), ("seed", seed, 0)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise ArgumentTypeError(f"{name}={value!r} must be an int ≥ {least}")
        if value < least:
            raise ArgumentError(f"{name}={value} is not allowed: an int ≥ {least} is needed")
    registry.strategy(strategy)
    if objective not in OBJECTIVES:
        raise choose("objective", objective, OBJECTIVES)


def _check_compiler(compiler: str) -> None:
    """Fail once, clearly, rather than with every candidate."""
    from kronsched.runtime.nvrtc import compile_cuda

    compile_cuda('extern "C" __global__ void probe() {}', "sm_80", compiler)


def _history(workload: Workload, known: Sequence[TuningRecord]) -> list[TuningRecord]:
    """Records of other shapes of the family: from the given log, the user's logs and the shipped ones."""
    per_shape: Counter[str] = Counter()
    out = []
    for record in _records(known):
        if record.workload.get("family") == workload.family and record.workload_key != workload.key:
            per_shape[record.workload_key] += 1
            if per_shape[record.workload_key] <= HISTORY_PER_SHAPE:
                out.append(record)
    return out


def _records(known: Sequence[TuningRecord]) -> Iterator[TuningRecord]:
    seen = set()
    for record in known:
        seen.add(record.to_json())
        yield record
    for folder in search_dirs():
        for path in sorted(folder.rglob("*.jsonl")) if folder.is_dir() else []:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # damage in a log nobody named is not this run's business
                try:
                    records = Journal(path).read()
                except (OSError, KronschedError):
                    continue
            for record in records:
                text = record.to_json()
                if text not in seen:
                    seen.add(text)
                    yield record


def _live(
    workload: Workload,
    arms: Sequence[Arm],
    device: Device,
    compiler: str,
    build_timeout_s: float,
    run_timeout_s: float,
    builders: int | None,
    seed: int,
    objective: str,
) -> Measurer:
    from kronsched.measure.energy import NvmlEnergy
    from kronsched.measure.live import LiveMeasurer

    if objective == "energy" and device.kind != "cuda":
        raise ArgumentError("objective='energy' is not allowed on a CPU: it is measured by the GPU's energy counter")
    return LiveMeasurer(
        workload,
        [a.schedule for a in arms],
        device,
        compiler=compiler,
        builders=builders,
        build_timeout_s=build_timeout_s,
        run_timeout_s=run_timeout_s,
        seed=seed,
        observers=(NvmlEnergy(),) if objective == "energy" else (),
    )


def _ranks(arm: Arm, batch: Sequence[Candidate]) -> dict[Candidate, int]:
    """Rank of each candidate in its batch by the model, 0 the best; empty without a trained model."""
    if not batch or not arm.model.trained:
        return {}
    order = (-arm.model.predict(batch)).argsort(kind="stable")
    return {batch[int(i)]: rank for rank, i in enumerate(order)}


def _reference(workload: Workload, device: Device) -> tuple[str | None, float | None]:
    """(name, median µs) of the family's baseline on this device; (None, None) when it has none or it cannot run here."""
    baseline = getattr(workload, "baseline", None)
    if baseline is None or not device.present:
        return None, None
    from kronsched.measure.baseline import time_callable

    try:
        name, call = baseline(*workload.make_inputs(0, device.torch_device))
        return name, time_callable(call, device)
    except (RuntimeError, MemoryError) as e:  # out of memory, an operator torch lacks: the baseline's failure, not ours
        warnings.warn(f"the baseline of {workload.label} could not be timed: {str(e).splitlines()[0]}", stacklevel=3)
        return None, None
