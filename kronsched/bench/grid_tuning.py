"""Tunes a grid of shapes in one go: what is good for one shape is tried on its neighbours, and time goes where it gains most.

    propose (builders) ──► build (builders, several shapes ahead) ──► check and time (runner, a shape at a time) ──► log, tell
                                                                        └──► its peers, on the same inputs ──► row of the bench

The builders of a crew work on coming shapes while the runner measures the present one. Every now and then a builder trains the
cost models anew from the log, and proposals are ranked by them.

Read first: `tune_grid`, then grid_search.py (which shape is next) and grid_propose.py (what is tried).
"""

from __future__ import annotations

import contextlib
import math
import shutil
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kronsched import registry
from kronsched.bench.grid_ahead import Ahead
from kronsched.bench.grid_contest import Contests, Entry
from kronsched.bench.grid_propose import Ask, propose
from kronsched.bench.grid_search import VISIT_TRIALS, GridSearch, Visit
from kronsched.bench.tuning import BUILD_TIMEOUT_S, Logs, build_best
from kronsched.cost_model.pretrained import train
from kronsched.errors import KronschedError, UnsupportedError
from kronsched.hardware import Device, measure_ceilings
from kronsched.measure import worker
from kronsched.measure.crew import Crew
from kronsched.measure.live import LiveMeasurer
from kronsched.measure.timing import TimingPlan
from kronsched.records.database import default_log, matches_device
from kronsched.records.journal import Journal
from kronsched.records.schema import TuningRecord, record_of

if TYPE_CHECKING:
    from kronsched.measure.base import Measured
    from kronsched.schedules.base import Schedule
    from kronsched.space import Candidate
    from kronsched.workloads.base import Workload

PLAN = TimingPlan(budget_s=0.012, wanted=20, fewest=3, sample_us=200.0)
"""A grid needs many short looks; the bench times what they found again."""
AHEAD = 3
"""Candidates that are being built, in multiples of the builders."""
GUESSED_PACE, PACED = 8.0, 50
"""Candidates a second that are assumed before so many were measured."""
PROPOSE_TIMEOUT_S, TRAIN_TIMEOUT_S = 60.0, 600.0
TRAIN_FIRST, TRAIN_GROWTH = 120, 1.5
"""Records before the first training, and by how much they must have grown before each other one."""


@dataclass
class _Coming:
    """A visit on its way: first proposals, then builds."""

    visit: Visit
    proposals: Future[list[Candidate]]
    candidates: list[Candidate] = field(default_factory=list)
    folder: Path | None = None


def tune_grid(
    workloads: Sequence[Workload],
    device: Device,
    trials: int,
    logs: Logs,
    *,
    seconds: float | None = None,
    targets: Mapping[str, float] | None = None,
    contests: Contests | None = None,
    builders: int | None = None,
    seed: int = 0,
    say: Callable[[str], None] = lambda line: None,
) -> int:
    """Tune many shapes of like families on a device of this machine; returns how many candidates were measured.

    trials: most records a shape gets; those in its log count.  seconds: nothing new is measured after so long.  targets: see
    `GridSearch`.  contests: time the peers of a shape after each visit that found a faster kernel; the best peer's time becomes
    its target.  What was measured is in the logs at every moment. Raises UnsupportedError for a device that is not here.
    """
    if not device.present:
        raise UnsupportedError(f"target={device.name!r} is not on this machine: nothing can be measured")
    device = measure_ceilings(device)
    search = GridSearch(workloads, device, trials, targets)
    run = _GridRun(search, device, logs, seed, say, contests)
    run.read_logs()
    say(f"tuning {len(workloads)} shape(s) together on {device.name}, each up to {trials} records")
    with Crew(device, builders) as crew, tempfile.TemporaryDirectory(prefix="kronsched-grid-") as folder:
        return run.loop(crew, Path(folder), seconds)


class _GridRun:
    def __init__(
        self,
        search: GridSearch,
        device: Device,
        logs: Logs,
        seed: int,
        say: Callable[[str], None],
        contests: Contests | None = None,
    ) -> None:
        self.search, self.device, self.logs, self.seed, self.say = search, device, logs, seed, say
        self.contests = contests
        self.rows = 0
        self.seconds = {"waiting for builds and candidates": 0.0, "in contests": 0.0}
        self.begin = time.perf_counter()
        self.measured = 0
        self._first_result = self.begin
        self._known_schedules: dict[str, list[Schedule]] = {}
        self._train_at = TRAIN_FIRST
        self._training: Future[Any] | None = None
        self._said = 0.0

    def read_logs(self) -> None:
        """Tell what the logs know already; a file of many shapes is read once."""
        own = {s.workload.key for s in self.search.shapes}
        for path in dict.fromkeys(self._log(s.workload) for s in self.search.shapes):
            if path.is_file():
                for record in Journal(path).read():
                    if record.workload_key in own and matches_device(record, self.device):
                        self.search.tell(record)

    def loop(self, crew: Crew, folder: Path, seconds: float | None) -> int:
        """Until time or trials are up."""
        ahead = Ahead(crew)
        coming: deque[_Coming] = deque()
        models = folder / "models"
        if self.contests is not None and self.device.kind == "cuda":
            self.contests.warm_up(self.device, ahead.workers()[1][0])
        while True:
            over = seconds is not None and time.perf_counter() - self.begin > seconds
            while not over and self._wanted(coming, crew):
                visit = self.search.next_visit([c.visit.index for c in coming], self._budget(seconds, coming))
                if visit is None:
                    break
                coming.append(_Coming(visit, ahead.submit(propose, self._ask(visit, models), timeout=PROPOSE_TIMEOUT_S)))
            self._start_builds(coming, ahead, folder)
            if not coming or over:
                break
            visit = coming[0].visit
            self._measure(coming.popleft(), ahead, folder)
            if visit.trials >= VISIT_TRIALS:  # with fewer, hints are all there is time for
                self._train(ahead, models)
            self._report()
        self._report(last=True)
        return self.measured

    def _budget(self, seconds: float | None, coming: Sequence[_Coming]) -> float:
        """How many more candidates can be asked for before time is up, at the pace so far."""
        if seconds is None:
            return math.inf
        now = time.perf_counter()
        pace = self.measured / (now - self._first_result) if self.measured >= PACED else GUESSED_PACE
        return pace * (self.begin + seconds - now) - sum(c.visit.trials for c in coming)

    def _wanted(self, coming: Sequence[_Coming], crew: Crew) -> bool:
        if self.device.kind == "cpu":  # builds would disturb the times
            return not coming
        return sum(c.visit.trials for c in coming) < AHEAD * crew.count or len(coming) < 2

    def _ask(self, visit: Visit, models: Path) -> Ask:
        shape = self.search.shapes[visit.index]
        names = tuple(s.name for s in self._schedules(shape.workload))
        wanted = names if visit.defaults is None else tuple(n for n in names if n in visit.defaults)
        rivals = tuple(n for n in names if n not in wanted) if visit.defaults else ()
        trained = models if models.is_dir() else ""
        return Ask(
            shape.workload,
            self.device,
            wanted,
            visit.hints,
            tuple(shape.asked),
            visit.trials,
            self.seed + 1000 * visit.index + shape.visits,
            str(trained),
            rivals,
        )

    def _start_builds(self, coming: Sequence[_Coming], ahead: Ahead, folder: Path, wait: bool = False) -> None:
        """Queue builds of every visit whose proposals are there. wait: for those of the first."""
        for i, one in enumerate(coming):
            if one.folder is not None or not (one.proposals.done() or (wait and i == 0)):
                continue
            shape = self.search.shapes[one.visit.index]
            try:
                one.candidates = one.proposals.result()
            except Exception as e:  # the builder died, or a schedule fails in a way of its own: the shape is left as it is
                self.say(f"{shape.workload.label}: no proposals: {type(e).__name__}: {e}")
            one.folder = Path(tempfile.mkdtemp(dir=folder))
            shape.asked.update(one.candidates)
            shape.exhausted = len(one.candidates) < one.visit.trials
            for number, candidate in enumerate(one.candidates):
                ahead.build(shape.workload, self.device, candidate, one.folder / str(number))
            if shape.visits == 1 and self.contests is not None:
                for other in self.contests.kernels(shape.workload):
                    ahead.submit(build_best, other, self.device, timeout=BUILD_TIMEOUT_S)

    def _measure(self, one: _Coming, ahead: Ahead, folder: Path) -> None:
        """Measure a visit's candidates; time the peers when one of them is the shape's best so far."""
        begin = time.perf_counter()
        self._start_builds([one], ahead, folder, wait=True)
        shape = self.search.shapes[one.visit.index]
        before, journal = shape.best_us, Journal(self._log(shape.workload))
        best: Entry | None = None
        try:
            schedules = self._schedules(shape.workload)
            with LiveMeasurer(shape.workload, schedules, self.device, crew=ahead, plan=PLAN, seed=self.seed) as measurer:
                for measured, record in self._records(shape.workload, measurer.measure(one.candidates)):
                    journal.append(record)
                    self.search.tell(record)
                    self._first_result = self._first_result if self.measured else time.perf_counter()
                    self.measured += 1
                    if record.ok and record.median_us is not None and record.median_us < before:
                        before = record.median_us
                        best = Entry(measured.build.artefact or "", before, f"log {self._log(shape.workload)}")
                self.seconds["waiting for builds and candidates"] += time.perf_counter() - begin
                if best is not None and self.contests is not None:
                    self._contest(one.visit.index, best, ahead, self.contests)
        except KronschedError as e:  # too large for the device, say
            self.say(f"{shape.workload.label}: not measured: {e}")
        finally:
            if one.folder is not None:
                shutil.rmtree(one.folder, ignore_errors=True)

    def _contest(self, index: int, best: Entry, ahead: Ahead, contests: Contests) -> None:
        begin = time.perf_counter()
        shape = self.search.shapes[index]
        session = worker.Session(shape.workload, self.device, self.seed, PLAN)
        try:
            row = contests.row(session, best, ahead.workers()[1][0])
        except Exception as e:  # a peer took too long or ended the runner; the next shape gets a new one
            self.say(f"{shape.workload.label}: peers were not timed: {type(e).__name__}: {e}")
        else:
            self.rows += 1
            shape.target_us = min(shape.target_us, row.peers.get(row.best_peer or "") or math.inf)
        self.seconds["in contests"] += time.perf_counter() - begin

    def _records(self, workload: Workload, results: Iterator[Measured]) -> Iterator[tuple[Measured, TuningRecord]]:
        for measured in results:
            name = measured.candidate.space
            digest = registry.schedule(name).space(workload, self.device).digest
            search = {"strategy": "grid", "seed": self.seed, "objective": "time"}
            yield measured, record_of(workload, self.device, name, digest, measured, search)

    def _train(self, ahead: Ahead, models: Path) -> None:
        """Start a training in a builder when there is enough that is new."""
        if self._training is not None and self._training.done():
            self._training = None
        if self.measured < self._train_at or self._training is not None:
            return
        self._train_at = int(self.measured * TRAIN_GROWTH)
        family = self.search.shapes[0].workload.family
        paths = list(dict.fromkeys(self._log(s.workload) for s in self.search.shapes if s.costs))
        self._training = ahead.submit(_train_models, family, paths, models, timeout=TRAIN_TIMEOUT_S)

    def _schedules(self, workload: Workload) -> list[Schedule]:
        """Those that serve a workload; asked for when it is visited, as a thousand shapes take seconds."""
        if workload.key not in self._known_schedules:
            self._known_schedules[workload.key] = registry.schedules_for(workload, self.device)
        return self._known_schedules[workload.key]

    def _log(self, workload: Workload) -> Path:
        return self.logs.path(workload) or default_log(workload)

    def _report(self, last: bool = False) -> None:
        now = time.perf_counter() - self.begin
        if last or now - self._said > 10.0:
            self._said = now
            shapes = self.search.shapes
            shares = sorted(s.floor_us / s.best_us for s in shapes if s.costs and s.best_us < float("inf"))
            middle = f", median share of the floor {shares[len(shares) // 2]:.0%}" if shares else ""
            rows = f", {self.rows} rows" if self.contests is not None else ""
            self.say(f"{now:.0f} s: {self.measured} candidates, {len(shares)} of {len(shapes)} shapes{rows}{middle}")
        if last and self.contests is not None:
            self.say("; ".join(f"{seconds:.0f} s {what}" for what, seconds in self.seconds.items()))


def _train_models(family: str, logs: Sequence[Path], out: Path) -> None:
    """In a builder: nothing is lost when it fails."""
    with contextlib.suppress(KronschedError):
        train(family, logs, out)
