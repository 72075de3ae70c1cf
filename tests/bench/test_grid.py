from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest

from kronsched import KSMatmul, registry
from kronsched.bench import grid_propose, grid_tuning
from kronsched.bench.grid_contest import Contests, Entry
from kronsched.bench.grid_propose import Ask, fit, propose
from kronsched.bench.grid_search import SEED_TRIALS, VISIT_TRIALS, GridSearch, group_of
from kronsched.bench.grid_tuning import tune_grid
from kronsched.bench.row import Row
from kronsched.bench.suites import Case, load_suite
from kronsched.bench.tuning import Logs
from kronsched.errors import UnsupportedError
from kronsched.hardware import PRESETS, resolve_target
from kronsched.measure.base import BuildResult, Measured, RunResult
from kronsched.measure.worker import Session
from kronsched.records.schema import TuningRecord, record_of
from kronsched.space import Candidate
from kronsched.workloads.base import Workload

H200, CPU = PRESETS["nvidia/h200"], resolve_target("cpu")
GRID = [KSMatmul(batch=64, pattern=(a, b, b, d)) for a in (1, 2, 4, 8) for b in (4, 8, 16) for d in (1, 2, 4)]


def _candidate(name: str) -> Candidate:
    return Candidate("s", (("k", name),))


def _record(workload: Workload, name: str, us: float | None) -> TuningRecord:
    run = RunResult("ok", None, (us,)) if us is not None else RunResult("wrong_result", "off")
    build = BuildResult("ok", source_sha256="0" * 64)
    return record_of(workload, H200, "s", "digest", Measured(_candidate(name), build, run), {})


# -- which shape is next --------------------------------------------------------------------------------


def test_every_shape_is_visited_and_the_first_are_far_apart() -> None:
    search = GridSearch(GRID, H200, trials=50)
    visits = []
    for n in range(len(GRID)):
        visit = search.next_visit()
        assert visit is not None and visit.defaults != ()
        visits.append(visit)
        search.tell(_record(GRID[visit.index], f"c{n}", 10.0))
    assert sorted(v.index for v in visits) == list(range(len(GRID)))
    assert {v.trials for v in visits[:12]} == {SEED_TRIALS} and {v.trials for v in visits[12:]} == {VISIT_TRIALS}
    corners = {GRID[v.index].pattern for v in visits[:6]}
    assert {(8, 16, 16, 4), (1, 4, 4, 1)} & corners
    assert not visits[0].hints and visits[-1].hints  # the last hears of its neighbours
    assert visits[0].defaults is visits[1].defaults is None and visits[-1].defaults == (
        "s",
    )  # and tries only what is good for them


def test_with_little_time_first_visits_are_shorter_and_reach_every_shape() -> None:
    search = GridSearch(GRID, H200, trials=50)
    budget, reached = 84.0, set()
    while (visit := search.next_visit(budget=budget)) is not None and len(reached) < len(GRID):
        assert visit.index not in reached
        reached.add(visit.index)
        budget -= visit.trials
        search.tell(_record(GRID[visit.index], f"c{visit.index}", 10.0))
    assert len(reached) == len(GRID) and budget >= -4


def test_groups_do_not_teach_each_other() -> None:
    half = [replace(w, dtype="float16") for w in GRID[:3]]
    assert group_of(half[0]) != group_of(GRID[0]) == group_of(GRID[1])
    search = GridSearch([*GRID[:3], *half], H200, trials=50)
    search.tell(_record(GRID[0], "a", 5.0))
    assert [s.workload for s in search.neighbours(1)] == [GRID[0]] and not search.neighbours(4)


def test_the_best_of_the_nearest_comes_first_and_failures_never() -> None:
    search = GridSearch(GRID, H200, trials=50)
    near, far = GRID.index(KSMatmul(64, (1, 4, 4, 2))), GRID.index(KSMatmul(64, (8, 16, 16, 4)))
    search.tell(_record(GRID[near], "slow", 9.0))
    search.tell(_record(GRID[near], "fast", 3.0))
    search.tell(_record(GRID[near], "wrong", None))
    search.tell(_record(GRID[far], "far", 1.0))
    visit = search._visit(GRID.index(KSMatmul(64, (1, 4, 4, 1))), 4)
    assert visit.hints == (_candidate("fast"), _candidate("far"), _candidate("slow"))


def test_times_of_former_kernels_are_hints_that_are_measured_again() -> None:
    search = GridSearch(GRID[:2], H200, trials=50)
    for name, us in (("slow", 9.0), ("fast", 3.0)):
        record = _record(GRID[0], name, us)
        search.tell(replace(record, kernel={**record.kernel, "source_sha256": None}))
    assert not search.shapes[0].costs and not search.shapes[0].asked
    visits = [search.next_visit(), search.next_visit()]
    assert {v.index for v in visits if v} == {0, 1}
    assert all(v and v.hints == (_candidate("fast"), _candidate("slow")) for v in visits)
    search = GridSearch(GRID[:2], H200, trials=50)
    for shape, name, us in ((0, "own", 3.0), (0, "second", 4.0), (1, "theirs", 1.0)):
        record = _record(GRID[shape], name, us)
        search.tell(replace(record, kernel={**record.kernel, "source_sha256": None}))
    visit = search._visit(0, 2)
    assert visit.hints == (_candidate("own"), _candidate("second"), _candidate("theirs")) and visit.defaults == ()


def test_later_visits_go_where_a_target_is_missed() -> None:
    search = GridSearch(GRID, H200, trials=50)
    search.shapes[5].target_us = search.shapes[5].floor_us
    for i, w in enumerate(GRID):
        search.tell(_record(w, f"c{i}", 10.0 * search.shapes[i].floor_us))
        search.tell(_record(w, f"d{i}", 10.0 * search.shapes[i].floor_us))
    search._first.clear()
    visit = search.next_visit()
    assert visit is not None and visit.index == 5
    assert (second := search.next_visit(busy=[5])) is not None and second.index != 5


def test_a_shape_gets_no_more_than_its_trials() -> None:
    search = GridSearch(GRID[:2], H200, trials=3)
    counts = [0, 0]
    for n in range(20):
        visit = search.next_visit()
        if visit is None:
            break
        for k in range(visit.trials):
            search.tell(_record(GRID[visit.index], f"{n} {k}", 5.0))
            counts[visit.index] += 1
    assert counts == [3, 3] and search.next_visit() is None


# -- what is tried --------------------------------------------------------------------------------------


def test_a_config_of_another_shape_is_made_valid() -> None:
    name, rng = "ks_cuda_simt", random.Random(0)
    schedule = registry.schedule(name)
    shapes: Sequence[Workload] = load_suite("ks", "grid", "float16")[::40]
    fitted = 0
    for source, target in pairwise(shapes):
        config = schedule.space(source, H200).sample(rng)
        assert config is not None
        space = schedule.space(target, H200)
        found = fit(space, config.config, rng)
        if found is not None:
            assert space.invalid(found.config) is None
            fitted += 1
    assert fitted >= len(shapes) // 2


def _ask(n: int, **changes: object) -> Ask:
    return replace(Ask(KSMatmul(64, (2, 16, 16, 2)), H200, ("ks_cuda_simt",), (), (), n, 0, ""), **changes)  # type: ignore[arg-type]


def test_proposals_are_new_valid_and_start_with_the_default() -> None:
    ask = _ask(6)
    found = propose(ask)
    schedule = registry.schedule("ks_cuda_simt")
    space = schedule.space(ask.workload, H200)
    assert len({c.key for c in found}) == 6 and all(space.invalid(c.config) is None for c in found)
    assert found[0] == space.candidate(schedule.default_config(ask.workload, H200))
    again = propose(replace(ask, known=tuple(found)))
    assert not {c.key for c in again} & {c.key for c in found}


def test_without_hints_only_defaults_of_a_good_schedule_are_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    ask = _ask(8, spaces=("ks_cuda_simt", "ks_cuda_mma"), workload=KSMatmul(25088, (2, 64, 64, 4), "float16"))
    expected = {"ks_cuda_simt": 20.0, "ks_cuda_mma": 10.0}
    monkeypatch.setattr(grid_propose, "_expected_us", lambda ask, name, config: expected[name])
    found = propose(ask)
    assert [c.space for c in found[:2]] == ["ks_cuda_mma", "ks_cuda_simt"]
    assert {c.space for c in found[2:]} == {"ks_cuda_mma"}
    expected["ks_cuda_simt"] = 31.0
    assert {c.space for c in propose(ask)} == {"ks_cuda_mma"}


def test_the_best_hint_comes_after_the_first_default() -> None:
    space = registry.schedule("ks_cuda_simt").space(_ask(1).workload, H200)
    hint = next(c for c in (space.sample(random.Random(i)) for i in range(9)) if c is not None)
    default = space.candidate(registry.schedule("ks_cuda_simt").default_config(_ask(1).workload, H200))
    assert propose(_ask(2, hints=(hint,))) == [default, hint] and propose(_ask(1, hints=(hint,), spaces=())) == [hint]


def test_schedules_that_won_for_no_neighbour_are_tried_where_much_is_expected(monkeypatch: pytest.MonkeyPatch) -> None:
    ask = _ask(3, spaces=("ks_cuda_simt",), rivals=("ks_cuda_mma",), workload=KSMatmul(64, (2, 16, 16, 2), "float16"))
    expected = {"ks_cuda_simt": 10.0, "ks_cuda_mma": 12.0}
    monkeypatch.setattr(grid_propose, "_expected_us", lambda ask, name, config: expected[name])
    assert [c.space for c in propose(ask)][:2] == ["ks_cuda_simt", "ks_cuda_mma"]
    expected["ks_cuda_mma"] = 13.0
    hint = propose(ask)[-1]
    assert {c.space for c in propose(ask)} == {hint.space} == {"ks_cuda_simt"}
    for us, first in ((5.0, "ks_cuda_mma"), (9.0, "ks_cuda_simt")):  # what is best for a neighbour is preferred where it is near
        expected["ks_cuda_mma"] = us
        assert propose(ask)[0].space == "ks_cuda_mma" and propose(replace(ask, hints=(hint,)))[0].space == first


def test_a_model_reorders_proposals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grid_propose, "_prior", lambda folder, space: object())
    monkeypatch.setattr(grid_propose, "_scores", lambda ask, space, prior, own: [float(c.config["bk"]) for c in own])
    found = propose(_ask(3, models="folder"))
    knobs = registry.schedule("ks_cuda_simt").space(_ask(1).workload, H200).knobs
    assert found[1].config["bk"] == max(next(k.values for k in knobs if k.name == "bk"))
    monkeypatch.setattr(grid_propose, "_prior", lambda folder, space: None)
    assert propose(_ask(3, models="folder"))


# -- all of it ------------------------------------------------------------------------------------------


def test_a_grid_is_tuned_and_goes_on_where_it_stopped(tmp_path: Path) -> None:
    shapes = [KSMatmul(16, (1, 2, 4, 1))]
    logs, said, rows = Logs(tmp_path / "grid.jsonl"), list[str](), list[Row]()
    contests = Contests([Case(w) for w in shapes], ["bmm"], rows.append)
    assert tune_grid(shapes, CPU, 2, logs, builders=1, contests=contests, say=said.append) == 2
    best = logs.best(shapes, CPU)
    assert set(best) == {w.key for w in shapes} and "2 candidates, 1 of 1 shapes, 1 rows" in said[-2]
    assert {r.workload.key for r in rows} == set(best) and all(r.us and r.peers["bmm"] and r.error is not None for r in rows)
    assert all(r.kernel is not None and r.kernel.how == "tuned" and r.kernel.config == best[r.workload.key].config for r in rows)
    assert tune_grid(shapes, CPU, 2, logs, builders=1) == 0  # nothing was left
    assert tune_grid(shapes, CPU, 3, logs, builders=1, seconds=0.0) == 0  # no time


def test_the_best_peer_becomes_the_target_and_a_contest_that_dies_is_said(tmp_path: Path) -> None:
    said: list[str] = []
    run = grid_tuning._GridRun(GridSearch(GRID, H200, 9), H200, Logs(tmp_path / "l.jsonl"), 0, said.append)
    rows = [Row(GRID[3], 9.0, {"bmm": 7.0, "shown": 5.0}, 1.0, information=("shown",)), None]

    class Fake:
        def row(self, session: Session, entry: Entry, runner: object) -> Row:
            assert session.workload == GRID[3] and runner == "runner"
            row = rows.pop(0)
            if row is None:
                raise TimeoutError("too long")
            return row

    ahead = SimpleNamespace(workers=lambda: ("builders", ["runner"]))
    for _ in range(2):
        run._contest(3, Entry("folder", 9.0, "log"), ahead, Fake())  # type: ignore[arg-type]
    assert run.search.shapes[3].target_us == 7.0 and run.rows == 1
    assert len(said) == 1 and "TimeoutError: too long" in said[0]


def test_devices_that_are_not_there_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="not on this machine"):
        tune_grid(GRID, H200, 1, Logs())


def test_models_are_trained_when_there_is_enough_that_is_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[object, ...]] = []

    class Pool:
        def submit(self, function: object, *args: object, timeout: float) -> object:
            asked.append(args)
            return type("Done", (), {"done": lambda self: True})()

    run = grid_tuning._GridRun(GridSearch(GRID, H200, 9), H200, Logs(tmp_path / "l.jsonl"), 0, lambda line: None)
    for count in (119, 120, 130, 150, 180, 181):
        run.measured = count
        run._train(Pool(), tmp_path)  # type: ignore[arg-type]
    assert len(asked) == 2 and asked[0][0] == "ks"
