from __future__ import annotations

from pathlib import Path

import pytest

from kronsched import KronMatmul
from kronsched.bench import tuning
from kronsched.bench.run import load_module
from kronsched.bench.suites import Case
from kronsched.bench.tuning import Logs, build_best, known_count, prebuild, tune_cases
from kronsched.errors import UnsupportedError
from kronsched.hardware import resolve_target
from kronsched.measure.crew import Crew

CPU = resolve_target("cpu")
CASES = [Case(KronMatmul(m, ((4, 4), (2, 2)))) for m in (3, 4)]


def test_logs_are_one_file_or_one_a_workload() -> None:
    w = CASES[0].workload
    assert Logs().path(w) is None
    assert Logs(file=Path("a.jsonl")).path(w) == Path("a.jsonl")
    assert Logs(folder=Path("d")).path(w) == Path("d") / f"{w.key}.jsonl"


def test_two_shapes_are_tuned_by_the_same_workers_and_not_again(tmp_path: Path) -> None:
    logs, said = Logs(folder=tmp_path), list[str]()
    with Crew(CPU, builders=1) as crew:
        tune_cases(CASES, CPU, 2, logs, crew, say=said.append)
        pools = [workers._pool for workers in crew.workers()]
        assert all(pool is not None and pool.active for pool in pools)  # closing a measurer ended none of them
        assert [known_count(c.workload, CPU, logs) for c in CASES] == [2, 2]
        tune_cases(CASES, CPU, 2, logs, crew, say=said.append)
        assert [known_count(c.workload, CPU, logs) for c in CASES] == [2, 2]
        tune_cases(CASES[:1], CPU, 3, logs, crew, say=said.append)
        assert known_count(CASES[0].workload, CPU, logs) == 3
        assert [workers._pool for workers in crew.workers()] == pools
    assert "2 trials" in said[0] and "best" in said[0] and "none added" in said[2] and "1 trials" in said[4]
    module = load_module(CASES[0].workload, CPU, logs)
    assert module.measured and str(tmp_path) in module.origin


def test_no_shape_is_started_when_time_is_up(tmp_path: Path) -> None:
    said = list[str]()
    with Crew(CPU) as crew:
        tune_cases(CASES, CPU, 2, Logs(folder=tmp_path), crew, seconds=0.0, say=said.append)
    assert said == ["tuning stopped after 0 s: 2 shapes stay as they are"] and not list(tmp_path.iterdir())


def test_a_shape_that_cannot_be_tuned_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise UnsupportedError("not this one")

    said = list[str]()
    monkeypatch.setattr(tuning, "_tune", refuse)
    with Crew(CPU) as crew:
        tune_cases(CASES, CPU, 2, Logs(folder=tmp_path), crew, say=said.append)
    assert len(said) == 2 and "not tuned: not this one" in said[1]


def test_building_ahead_builds_what_load_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KRONSCHED_CACHE_DIR", str(tmp_path / "cache"))
    workload = KronMatmul(7, ((3, 3),))
    build_best(workload, CPU, None)
    built = {p.name for p in (tmp_path / "cache" / "artefacts").iterdir() if p.is_dir()}
    assert len(built) == 1 and load_module(workload, CPU, Logs()).artefact.name in built


def test_few_shapes_start_no_workers() -> None:
    with Crew(CPU) as crew:
        prebuild(CASES, CPU, Logs(), crew)
        assert all(workers._pool is None for workers in crew.workers())
