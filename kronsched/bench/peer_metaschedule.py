"""TVM MetaSchedule as a peer: its search, its rules and its cost model, with candidates built, checked and timed by kronsched.

    sample and evolve (MetaSchedule) ─► programs ─► build, check, time (LiveMeasurer) ─► run times ─► database, cost model

Its own builder and runner are not used: they check no result, time on a warm cache, compile one candidate after another in the
process that times, and hide what goes wrong. So what is compared is the search and the space, under the same clock.

Where its defaults are for hours, it gets what suits minutes: small populations and rounds, and a cost model that is used from the
second round on (by default after 100 candidates).

Known limits of MetaSchedule in TVM 0.27, whose default is `repaired=False`:
  * tensor intrinsics: wmma 16×16×16 for float16 and int8 only; its rule for int8 pipelines no copies (told to, many
    candidates do not build);
  * TVM's storage rewrite lets buffers of different dtypes share memory, after which wmma's loads of most candidates are refused
    ("tvm_access_ptr element type must match the source buffer"). repaired=True builds with that pass switched off;
  * its kernels include crt/mma.h, which the wheels of CUDA's runtime do not bring along;
  * a batch of candidates is sampled before any is built, which takes seconds to minutes, and more when all before it failed; a
    time limit can only be kept from outside (`versus.py` runs this in a process that it ends);
  * a padded int8 layer that it reads 16 bytes at a time does not compile: TVM writes the zeros as a make_int4 of 16 arguments;
  * what it unrolls into hundreds of kilobytes of source takes ptxas tens of seconds, for which a round waits: give
    `versus.versus` a short `build_timeout_s` where time is short.

Read first: `MetaSchedulePeer.run`.
"""

from __future__ import annotations

import importlib
import inspect
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar
from unittest import mock

from kronsched.bench.metaschedule_program import metaschedule_program
from kronsched.errors import UnsupportedError
from kronsched.runtime.nvrtc import include_dirs
from kronsched.schedules.base import Launch, Schedule, Scheduled
from kronsched.space import Candidate, Config, Knob, SearchSpace

if TYPE_CHECKING:
    from kronsched.hardware import Device
    from kronsched.measure.base import Measured, Measurer
    from kronsched.workloads.base import Workload

BATCH = 16
"""Candidates a round; MetaSchedule's default of 64 is more than fits into a short budget."""
POPULATION = 32
"""Of its evolutionary search; with the default of 512 it samples for minutes before the first candidate is built."""
CUDA_RULES, CPU_RULES = "cuda-tensorcore", "llvm"
STRATEGIES = ("evolutionary", "replay-trace")
"""MetaSchedule's searches: its default, and uniform sampling, which makes several times as many candidates a second."""


@dataclass(frozen=True)
class Trial:
    """One candidate of MetaSchedule. seconds: since the search began.  us: None unless status is "ok"."""

    status: str
    us: float | None
    error: str
    seconds: float


class GivenProgram(Schedule):
    """A scheduled program as it stands: the config's only knob is the program itself."""

    name: ClassVar[str] = "metaschedule"
    family: ClassVar[str] = ""
    device_kind: ClassVar[str] = "cuda"

    def __init__(self, repaired: bool) -> None:
        """repaired: build without TVM's storage rewrite."""
        self.repaired = repaired

    def space(self, workload: Workload, device: Device) -> SearchSpace:
        """One knob, whose values are not known beforehand."""
        return SearchSpace(self.name, [Knob("program", ("",), "TensorIR as JSON")])

    def default_config(self, workload: Workload, device: Device) -> Config:
        """There is none that makes sense."""
        return {"program": ""}

    def apply(self, workload: Workload, config: Config, device: Device) -> Scheduled:
        """The program of a config."""
        import tvm

        names = (*(t.name for t in workload.inputs), workload.output.name)
        passes = {"tirx.disable_storage_rewrite": True} if self.repaired else {}
        return Scheduled(tvm.ir.load_json(str(config["program"])), (Launch("main", names),), pass_config=passes)


class MetaSchedulePeer:
    """A search of one workload on one device. Trials appear in `trials` as they are measured."""

    def __init__(
        self,
        workload: Workload,
        device: Device,
        *,
        repaired: bool = True,
        batch: int = BATCH,
        population: int = POPULATION,
        strategy: str = STRATEGIES[0],
        threads: int = 1,
        seed: int = 0,
        on_trial: Callable[[Trial], None] = lambda trial: None,
        on_stage: Callable[[str], None] = lambda stage: None,
    ) -> None:
        """Raises UnsupportedError for a workload or dtype that MetaSchedule does not serve.

        strategy: one of `STRATEGIES`.  threads: that sample.  on_stage: called with what was just done, such as "32 candidates
        sampled".
        """
        self.workload, self.device, self.repaired, self.batch = workload, device, repaired, batch
        self.program = metaschedule_program(workload)
        if device.kind == "cuda" and device.present and not any((Path(d) / "crt" / "mma.h").is_file() for d in include_dirs()):
            raise UnsupportedError("MetaSchedule's kernels include crt/mma.h, which is not here: pip install nvidia-cuda-crt")
        self.trials: list[Trial] = []
        self._on_trial, self._on_stage, self._begin = on_trial, on_stage, time.perf_counter()
        self._strategy, self._population, self._threads, self._seed = strategy, population, threads, seed

    def run(self, trials: int, measurer: Measurer, seconds: float | None = None) -> Trial | None:
        """Search until so many candidates were measured or, looked at after each, time is up; the best trial."""
        from tvm.s_tir import meta_schedule as ms

        context = self._context(ms)
        database, model = ms.database.MemoryDatabase(), ms.cost_model.XGBModel(num_warmup_samples=self.batch)
        entry = database.commit_workload(context.mod)
        designs = context.generate_design_space()
        self._on_stage(f"design space of {len(designs)} traces")
        context.pre_tuning(trials, min(self.batch, trials), designs, database, model)
        while not self._over(seconds):
            candidates = context.generate_measure_candidates()
            if not candidates:
                break
            self._on_stage(f"{len(candidates)} candidates sampled")
            results = self._measure(candidates, measurer, seconds)
            runs = [_runner_result(ms, m) for m in results]
            context.notify_runner_results(candidates, runs)
            model.update(context, candidates, runs)
            for candidate, one in zip(candidates, runs, strict=True):
                if one.run_secs is not None:
                    record = ms.database.TuningRecord(
                        candidate.sch.trace, entry, one.run_secs, context.target, candidate.args_info
                    )
                    database.commit_tuning_record(record)
            self._on_stage(f"{len(candidates)} candidates measured and learnt from")
        return self.best

    @property
    def best(self) -> Trial | None:
        """The fastest right candidate so far."""
        return min((t for t in self.trials if t.us is not None), key=lambda t: t.us or 0.0, default=None)

    def _context(self, ms: Any) -> Any:
        prepare()
        rules = CUDA_RULES if self.device.kind == "cuda" else CPU_RULES
        space = ms.space_generator.PostOrderApply(sch_rules=rules, postprocs=rules, mutator_probs=rules)
        if self._strategy == "evolutionary":
            least = min(50, self._population // 2)
            search = ms.search_strategy.EvolutionarySearch(population_size=self._population, init_min_unmeasured=least)
        else:
            search = ms.search_strategy.ReplayTrace()
        return ms.TuneContext(
            mod=self.program["main"],
            target=self.device.tvm_target(),
            space_generator=space,
            search_strategy=search,
            task_name="main",
            num_threads=self._threads,
            rand_state=self._seed + 1,
        )

    def _measure(self, candidates: Any, measurer: Measurer, seconds: float | None) -> list[Measured | None]:
        """Results in the order of candidates; None for what time did not suffice for."""
        import tvm

        asked = [Candidate(GivenProgram.name, (("program", str(tvm.ir.save_json(c.sch.mod))),)) for c in candidates]
        found: dict[Candidate, Measured] = {}
        for measured in measurer.measure(list(dict.fromkeys(asked))):
            found[measured.candidate] = measured
            error = " ".join((measured.error or "").split())[:200]
            self.trials.append(Trial(measured.status, measured.median_us, error, time.perf_counter() - self._begin))
            self._on_trial(self.trials[-1])
            if self._over(seconds):
                break
        return [found.get(one) for one in asked]

    def _over(self, seconds: float | None) -> bool:
        return seconds is not None and time.perf_counter() - self._begin > seconds


def prepare() -> None:
    """Import MetaSchedule, TVM's tensor intrinsics and what its cost model needs.

    The script parser asks `inspect` for the module of every frame below each of 180 functions, which took 40 s of 47 s, and does
    not use the answer.
    """
    module_of = inspect.getmodule

    def quick(thing: object, *more: Any) -> Any:
        return None if inspect.isframe(thing) else module_of(thing, *more)

    with mock.patch.object(inspect, "getmodule", quick):
        importlib.import_module("tvm.s_tir.tensor_intrin")
    for name in ("tvm.s_tir.meta_schedule", "xgboost"):
        importlib.import_module(name)


def shares(trials: list[Trial]) -> Mapping[str, int]:
    """How often each status came."""
    counts: dict[str, int] = {}
    for trial in trials:
        counts[trial.status] = counts.get(trial.status, 0) + 1
    return counts


def _runner_result(ms: Any, measured: Measured | None) -> Any:
    if measured is None or measured.run is None or measured.median_us is None:
        return ms.runner.RunnerResult(None, "not measured" if measured is None else measured.error or measured.status)
    return ms.runner.RunnerResult([us * 1e-6 for us in measured.run.times_us], None)
