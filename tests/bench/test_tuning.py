from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import pytest

import kronsched
from kronsched import KronMatmul, KSMatmul
from kronsched.bench import tuning
from kronsched.bench.run import load_module
from kronsched.bench.suites import Case
from kronsched.bench.tuning import BuiltAhead, Logs, build_best, known_count, prebuild, tune_cases
from kronsched.errors import UnsupportedError
from kronsched.hardware import resolve_target
from kronsched.measure.crew import Crew
from kronsched.search.result import TuneEvent

CPU = resolve_target("cpu")
CASES = [Case(KronMatmul(m, ((4, 4), (2, 2)))) for m in (3, 4)]


def _pools(crew: Crew) -> list[object]:
    builders, runners = crew.workers()
    return [workers._pool for workers in (builders, *runners)]


def test_logs_are_one_file_or_one_a_workload() -> None:
    w = CASES[0].workload
    assert Logs().path(w) is None
    assert Logs(file=Path("a.jsonl")).path(w) == Path("a.jsonl")
    assert Logs(folder=Path("d")).path(w) == Path("d") / f"{w.key}.jsonl"


def test_two_shapes_are_tuned_by_the_same_workers_and_not_again(tmp_path: Path) -> None:
    logs, said = Logs(folder=tmp_path), list[str]()
    with Crew(CPU, builders=1) as crew:
        tune_cases(CASES, CPU, 2, logs, crew, say=said.append)
        pools = _pools(crew)
        assert all(pool is not None and pool.active for pool in pools)  # closing a measurer ended none of them
        assert [known_count(c.workload, CPU, logs) for c in CASES] == [2, 2]
        tune_cases(CASES, CPU, 2, logs, crew, say=said.append)
        assert [known_count(c.workload, CPU, logs) for c in CASES] == [2, 2]
        tune_cases(CASES[:1], CPU, 3, logs, crew, say=said.append)
        assert known_count(CASES[0].workload, CPU, logs) == 3
        assert _pools(crew) == pools
    assert "2 trials" in said[0] and "best" in said[0] and "none added" in said[2] and "1 trials" in said[4]
    module = load_module(CASES[0].workload, CPU, logs)
    assert module.measured and str(tmp_path) in module.origin


def test_a_long_tuning_says_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    said, now = list[str](), [0.0]
    monkeypatch.setattr(tuning.time, "perf_counter", lambda: now[0])
    tick = tuning._Ticker("[1/2] a shape", said.append)
    for done in range(1, 9):
        now[0] += 4.0
        tick(TuneEvent("result", 8, done, 1, None, None, None, {}))
    assert said == [f"[1/2] a shape: {done} of 8 trials, nothing ok yet" for done in (3, 6)]


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
    build_best(workload, CPU)
    built = {p.name for p in (tmp_path / "cache" / "artefacts").iterdir() if p.is_dir()}
    assert len(built) == 1 and load_module(workload, CPU, Logs()).artefact.name in built


class InlineCrew:
    """A crew whose builders work at once, in this process."""

    def workers(self) -> tuple[InlineCrew, list[object]]:
        return self, []

    def schedule(self, function: Callable[..., object], *args: object, timeout: float) -> Future[object]:
        future = Future[object]()
        try:
            future.set_result(function(*args))
        except Exception as e:
            future.set_exception(e)
        return future


def test_what_was_built_ahead_is_what_load_gives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KRONSCHED_CACHE_DIR", str(tmp_path / "cache"))
    log = tmp_path / "log.jsonl"
    kronsched.tune(CASES[0].workload, target="cpu", trials=1, log=log, builders=1)
    ahead = BuiltAhead(CASES, CPU, Logs(file=log), InlineCrew())  # type: ignore[arg-type]
    for case, measured in zip(CASES, (True, False), strict=True):
        module, loaded = ahead.module(case.workload), load_module(case.workload, CPU, Logs(file=log))
        assert (module.measured, module.origin, module.config) == (loaded.measured, loaded.origin, loaded.config)
        assert module.measured is measured and module.expected_us == loaded.expected_us


def test_what_no_builder_built_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def die(*args: object) -> None:
        raise RuntimeError("killed")

    monkeypatch.setattr(tuning, "build_best", die)
    monkeypatch.setattr(tuning, "load_module", lambda workload, device, logs: workload.label)
    ahead = BuiltAhead(CASES[:1], CPU, Logs(), InlineCrew())  # type: ignore[arg-type]
    assert ahead.module(CASES[0].workload) == CASES[0].workload.label  # type: ignore[comparison-overlap]


def test_a_kernel_that_a_peer_runs_is_built_once_when_the_peer_takes_part(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[str]()
    monkeypatch.setattr(tuning, "build_best", lambda workload, *args: asked.append(workload.label))
    fused = [KSMatmul(8, (2, 3, 4, 2), activation=name) for name in ("gelu", "relu")]
    cases = [Case(w) for w in fused]
    BuiltAhead(cases, CPU, Logs(), InlineCrew(), ["bmm", "unfused"])  # type: ignore[arg-type]
    assert asked == [fused[0].label, fused[0].plain.label, fused[1].label]
    asked.clear()
    BuiltAhead(cases, CPU, Logs(), InlineCrew(), ["bmm"])  # type: ignore[arg-type]
    assert asked == [w.label for w in fused]


def test_few_shapes_start_no_workers() -> None:
    with Crew(CPU) as crew:
        prebuild(CASES, CPU, Logs(), crew)
        assert not any(_pools(crew))
