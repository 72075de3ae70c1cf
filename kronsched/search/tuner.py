"""`kronsched.tune`: ask the strategy for a batch, measure it, append each result to the log as it comes, tell the strategy.

Read first: `tune`, then `_Run.loop`.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from kronsched.errors import ArgumentError, CompileError, InvalidConfig, UnsupportedError
from kronsched.hardware import Device, floor_us, raise_ceilings
from kronsched.measure.base import STATUSES, Measured, Measurer
from kronsched.records.schema import TuningRecord, record_of
from kronsched.search.places import place_for
from kronsched.search.portfolio import Portfolio
from kronsched.search.result import TuneEvent, TuneResult
from kronsched.search.setup import Arm, Plan, check_arguments, plan_for
from kronsched.search.table import cost_of, observation_of
from kronsched.space import Candidate

if TYPE_CHECKING:
    from kronsched.workloads.base import Workload

__all__ = ["TuneEvent", "TuneResult", "tune"]

Progress = Callable[[TuneEvent], None]


def tune(
    workload: Workload,
    *,
    target: str | Device = "auto",
    trials: int = 64,
    log: str | os.PathLike[str] | None = None,
    strategy: str = "distinctive",
    seed: int = 0,
    space: str | os.PathLike[str] | None = None,
    compiler: str = "nvrtc",
    warm_start: bool = True,
    objective: str = "time",
    batch: int | None = None,
    builders: int | None = None,
    build_timeout_s: float = 60.0,
    run_timeout_s: float = 20.0,
    strategy_options: Mapping[str, int | float] | None = None,
    progress: Progress | None = None,
    measurer: Measurer | None = None,
    devices: str | Sequence[str | Device] | None = None,
    cluster: str | Sequence[str] | None = None,
    cluster_key: str | os.PathLike[str] | None = None,
) -> TuneResult:
    """Search schedules for a workload, measure them on the target, and log every measurement.

    target: "auto" (a CUDA GPU if there is one, else this CPU), "cpu", "cuda", "cuda:N", a preset such as "nvidia/h200", or a
    `Device`. On a preset nothing is measured: the cost model's choice is compiled and reported as `predicted`.
    trials: new candidates to measure; fewer when the space is exhausted. What the log already holds for this workload, device and
    space is told to the strategy, is never measured again, and does not count. So the same call on the same log goes on.
    log: JSON Lines file to append to; None takes the user's log of this workload, where `load` looks first.
    strategy: a registered name; strategy_options: overrides of its options.  seed: of the search, ≥ 0.
    space: a TOML file with the values of one schedule's knobs; then only that schedule is searched.
    compiler: "nvrtc" or "nvcc".  warm_start: start the cost model from logs of other shapes.
    objective: "time" (median microseconds) or "energy" (joules a call; NVIDIA GPUs).
    batch: candidates a round, None for what the strategy was made for, or more where builders would idle.  builders: build
    processes, None for the cores.
    progress: called with a `TuneEvent` at each step.  measurer: measures instead of this machine; it is not closed.
    devices: instead of target, several devices of one model, such as "cuda:0,cuda:1": each gets an isolated runner, and
    candidates wait in one queue.  cluster: addresses of `kronsched worker`s, such as "host1:7433,host2:7433", which build and
    measure instead of this machine.  cluster_key: the file with their shared key, None for the user's.

    Raises UserError subclasses (ArgumentError, ArgumentTypeError, UnsupportedError) before any work, naming the argument, and
    MeasureError when nothing at all can be measured. A candidate that fails is a record with its status, never an exception.
    """
    begin = time.perf_counter()
    check_arguments(
        workload,
        trials,
        seed,
        strategy,
        objective,
        compiler,
        batch=batch,
        builders=builders,
        build_timeout_s=build_timeout_s,
        run_timeout_s=run_timeout_s,
        progress=progress,
    )
    if measurer is not None and (devices is not None or cluster is not None):
        raise ArgumentError("measurer is not allowed with devices or cluster: it says itself where it measures")
    place = place_for(target, devices, cluster, cluster_key)
    measuring, target = measurer is not None or place.farm is not None, place.target
    plan = plan_for(workload, target, log, strategy, seed, space, objective, warm_start, strategy_options, compiler, measuring)
    run = _Run(plan, trials, batch, strategy, seed, objective, progress or (lambda event: None))
    run.start()
    if not plan.device.present and not measuring:
        return _predict(run, compiler, begin)
    if measurer is not None:
        run.loop(measurer)
    else:
        options = {
            "compiler": compiler,
            "builders": builders,
            "build_timeout_s": build_timeout_s,
            "run_timeout_s": run_timeout_s,
            "seed": seed,
        }
        live = place.measurer(workload, [a.schedule for a in plan.arms], plan.device, objective == "energy", options)
        try:
            run.loop(live)
        finally:
            live.close()
            place.close()
    run.check_floor()
    name, us = _reference(plan, run) if plan.device.present else (None, None)
    run.emit("end")
    return run.result(begin, reference_name=name, reference_us=us)


class _Run:
    """The state of one call of `tune`."""

    def __init__(
        self, plan: Plan, trials: int, batch: int | None, strategy: str, seed: int, objective: str, progress: Progress
    ) -> None:
        self.plan, self.trials, self.strategy, self.seed = plan, trials, strategy, seed
        self.objective, self.progress = objective, progress
        self.search = Portfolio([a.strategy for a in plan.arms])
        self.batch = batch
        self.floor_us = floor_us(plan.workload, plan.device)
        self.records: list[TuningRecord] = []
        self.failures: Counter[str] = Counter()
        self.best: TuningRecord | None = None
        self.round = 0
        self.search_seconds = 0.0

    def start(self) -> None:
        """Tell what the log holds."""
        usable = [r for r in self.plan.known if not r.ok or cost_of(r, self.objective) is not None]
        for record in usable:
            self._note_best(record)
        begin = time.perf_counter()
        self.search.tell([observation_of(r, self.objective) for r in usable])
        self.search_seconds += time.perf_counter() - begin
        self.emit("start")
        for message in self.plan.messages:
            self.emit("message", message=message)
        if usable:
            self.emit("message", message=f"{len(usable)} candidates in {self.plan.journal.path} are known and not measured again")

    def loop(self, measurer: Measurer) -> None:
        """Until `trials` candidates were measured or the space is exhausted."""
        # A larger batch than the strategy was made for costs some trials and saves more time where builders would idle.
        size = self.batch or max(self.search.batch_size, int(getattr(measurer, "parallel", 1)))
        while len(self.records) < self.trials:
            begin = time.perf_counter()
            batch = self.search.ask(min(size, self.trials - len(self.records)))
            ranks = self._ranks(batch)
            seconds = time.perf_counter() - begin
            if not batch:
                self.emit("message", message="every valid candidate of the space was measured")
                break
            new = []
            for measured in measurer.measure(batch):
                record = self._record(measured, ranks.get(measured.candidate), seconds / len(batch))
                # At once: a killed tuner loses no finished measurement.
                self.plan.journal.append(record)
                new.append(record)
                self._count(record)
            begin = time.perf_counter()
            # In the order of asking, so that what is learned does not depend on which builder or device was quicker.
            position = {candidate: i for i, candidate in enumerate(batch)}
            new.sort(key=lambda r: position[r.candidate])
            self.search.tell([observation_of(r, self.objective) for r in new])
            self.search_seconds += seconds + time.perf_counter() - begin
            self.round += 1

    def check_floor(self) -> None:
        """A kernel faster than the roofline shows that the device's ceilings were measured too low: measure them again."""
        us = None if self.best is None else self.best.median_us
        if us is not None and us < self.floor_us:
            self.floor_us = floor_us(self.plan.workload, raise_ceilings(self.plan.device))

    def emit(self, kind: str, record: TuningRecord | None = None, message: str = "") -> None:
        """Report a step."""
        best_cost = None if self.best is None else cost_of(self.best, self.objective)
        done, failures = len(self.records), dict(self.failures)
        self.progress(
            TuneEvent(kind, self.trials, done, self.round, self.best, best_cost, self.floor_us, failures, record, message)
        )

    def result(self, begin: float, **more: object) -> TuneResult:
        """What `tune` returns."""
        return TuneResult(
            workload=self.plan.workload,
            device=self.plan.device,
            best=self.best,
            records=tuple(self.records),
            failures=dict(self.failures),
            trials=len(self.records),
            seconds=time.perf_counter() - begin,
            log=self.plan.journal.path,
            floor_us=self.floor_us,
            objective=self.objective,
            known=len(self.plan.known),
            search_seconds=self.search_seconds,
            strategy=self.strategy,
            space=self.best.space["name"] if self.best is not None else self.plan.arms[0].space.name,
            **more,  # type: ignore[arg-type]
        )

    def _ranks(self, batch: Sequence[Candidate]) -> dict[Candidate, int]:
        """Rank of each candidate in the batch by predicted score, 0 the best; empty for models that know nothing."""
        out: dict[Candidate, int] = {}
        for arm in self.plan.arms:
            own = [c for c in batch if c.space == arm.space.name]
            if own and arm.strategy.uses_model and arm.model.trained:
                order = np.argsort(-arm.model.predict(own), kind="stable")
                out.update((own[i], rank) for rank, i in enumerate(order.tolist()))
        return out

    def _record(self, measured: Measured, rank: int | None, search_seconds: float) -> TuningRecord:
        name = measured.candidate.space
        digest = next(a.space.digest for a in self.plan.arms if a.space.name == name)
        search = {
            "strategy": self.strategy,
            "round": self.round,
            "predicted_rank": rank,
            "seed": self.seed,
            "search_seconds": search_seconds,
            "objective": self.objective,
        }
        return record_of(self.plan.workload, self.plan.device, name, digest, measured, search)

    def _count(self, record: TuningRecord) -> None:
        self.records.append(record)
        if not record.ok:
            self.failures[record.status] += 1
        elif cost_of(record, self.objective) is None:
            raise UnsupportedError(f"objective={self.objective!r} is not supported on {self.plan.device.name}: it has no counter")
        self._note_best(record)
        self.emit("result", record)

    def _note_best(self, record: TuningRecord) -> None:
        cost = cost_of(record, self.objective)
        before = None if self.best is None else cost_of(self.best, self.objective)
        if cost is not None and (before is None or cost < before):
            self.best = record


def _predict(run: _Run, compiler: str, begin: float) -> TuneResult:
    """For a device that is not here: the best record that logs hold, else what the model or the schedule chooses, compiled.

    Nothing is measured and no log is written; the message says so, and where the candidate comes from.
    """
    from kronsched.records.database import find_best
    from kronsched.runtime.cache import get_or_build
    from kronsched.search.predict import predict_best

    plan = run.plan
    record = find_best(plan.workload, plan.device)
    known = None if record is None else next((a for a in plan.arms if a.space.name == record.space["name"]), None)
    if record is not None and known is not None and known.space.invalid(record.config) is None:
        built = get_or_build(plan.workload, known.schedule, record.config, plan.device, compiler)
        how = f"the best record of the logs, {record.median_us:.4g} µs when it was measured"
        return _unmeasured(run, begin, record.candidate, built, how)
    arm = min(plan.arms, key=lambda a: _expected_us(plan, a))
    trained = arm.strategy.uses_model and arm.model.trained
    chosen = predict_best(arm.space, arm.model, arm.default, seed=run.seed) if arm.default is not None else []
    if not chosen:
        chosen = arm.strategy.ask(1)
    elif not plan.known and not _is_safe(plan, arm, chosen[0]):
        chosen = chosen[::-1]
    artefact, candidate = None, chosen[-1]
    for trial in chosen:
        try:
            artefact, candidate = get_or_build(plan.workload, arm.schedule, trial.config, plan.device, compiler), trial
            break
        except (CompileError, InvalidConfig) as e:
            run.emit("message", message=f"a predicted candidate does not compile and is passed over: {str(e).splitlines()[0]}")
    how = "the cost model's choice" if trained and candidate != arm.default else "the schedule's default"
    return _unmeasured(run, begin, candidate, artefact, f"{how} of {arm.schedule.name}")


def _unmeasured(run: _Run, begin: float, candidate: Candidate, artefact: object, how: str) -> TuneResult:
    name = run.plan.device.name
    message = f"{name} is not on this machine: nothing was measured, no log was written, the candidate is {how}"
    run.emit("end")  # the message is the result's: a caller that prints both would say it twice
    return run.result(begin, predicted=candidate, artefact=artefact, message=message)


def _is_safe(plan: Plan, arm: Arm, candidate: Candidate) -> bool:
    """Whether a candidate that the model chose may be taken instead of the default; yes, where nothing can be said."""
    from kronsched.cost_model.transfer import Prior
    from kronsched.cost_model.xgb import XgbModel
    from kronsched.search.predict import choose_safely

    model = arm.model
    if arm.default is None or not isinstance(model, XgbModel) or not isinstance(model.prior, Prior):
        return True
    return choose_safely(plan.workload, model.prior, model, candidate, arm.default)


def _expected_us(plan: Plan, arm: Arm) -> float:
    """What the best of a schedule should take; of a schedule without a model, what its default should take."""
    from kronsched.cost_model.transfer import Prior
    from kronsched.cost_model.xgb import XgbModel
    from kronsched.search.predict import expected_us, guessed_us, predict_best

    model = arm.model
    if arm.default is None:
        return float("inf")
    if not isinstance(model, XgbModel) or not isinstance(model.prior, Prior):
        return guessed_us(arm.schedule, plan.workload, plan.device, arm.default.config)
    first = predict_best(arm.space, model, arm.default, n=1)[0]
    return expected_us(plan.workload, plan.device, model.prior, model, first)


def _reference(plan: Plan, run: _Run) -> tuple[str | None, float | None]:
    """(name, median microseconds) of what a user would run without kronsched; (None, None) when it has none or cannot run."""
    baseline = getattr(plan.workload, "baseline", None)
    if baseline is None:
        return None, None
    from kronsched.measure.baseline import time_callable
    from kronsched.measure.timing import sets_for

    device, name, calls = plan.device, None, []
    size = sum(t.nbytes for t in plan.workload.inputs)
    try:
        for seed in range(min(8, sets_for(size, device, 2 << 30))):
            name, call = baseline(*plan.workload.make_inputs(seed, device.torch_device))
            calls.append(call)
        return name, time_callable(calls, device)
    except Exception as e:  # out of memory, or whatever a baseline from outside raises: the tuning itself is done
        run.emit("message", message=f"the reference could not be timed: {type(e).__name__}: {(str(e).splitlines() or [''])[0]}")
        return name, None


FAILURES = tuple(s for s in STATUSES if s != "ok")
"""The keys that `TuneResult.failures` may have."""
