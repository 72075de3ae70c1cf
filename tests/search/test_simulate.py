"""Tables, simulation, and the figures it reports."""

from __future__ import annotations

import gzip
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kronsched import registry
from kronsched.errors import ArgumentError
from kronsched.measure.base import BuildResult, Measured, RunResult
from kronsched.records.journal import Journal
from kronsched.records.schema import record_of
from kronsched.schedules.kron_cuda_simt import KronCudaSimt
from kronsched.search.quality import coverage, pairwise_distance
from kronsched.search.simulate import Spread, _finish_times, random_trials, simulate
from kronsched.search.table import SimulatedMeasurer, Table
from kronsched.space import Candidate, Config, Knob, SearchSpace
from kronsched.workloads.base import Workload
from kronsched.workloads.kron import KronMatmul
from tests.search.synthetic import H200, FusedSchedule, fused_table, records, table_of

KRON = KronMatmul(64, [(8, 8)] * 3)


def cost(config: Config) -> float | str | None:
    if config["a"] == 9:
        return "compile_error"
    if config["a"] == 8:
        return "wrong_result"
    if config["a"] == 7 and config["b"] == "y":
        return None  # not in the table
    return 100.0 + 10 * abs(int(config["a"]) - 4) + (5 if config["b"] == "y" else 0)


def small() -> Table:
    return table_of({"a": tuple(range(10)), "b": ("x", "y")}, cost)


def write_log(path: Path, workload: Workload = KRON, n: int = 40, device: Any = H200) -> Path:
    schedule, journal = KronCudaSimt(), Journal(path)
    space = schedule.space(workload, device)
    for i, candidate in zip(range(n), space, strict=False):
        build = BuildResult("ok", source_sha256=f"{i:064x}", seconds=1.5)
        ok = i % 5 > 0
        run = RunResult("ok" if ok else "wrong_result", times_us=(10.0 + i,) if ok else (), seconds=0.25, energy_j=1.0 / (i + 1))
        journal.append(record_of(workload, device, space.name, space.digest, Measured(candidate, build, run), {"strategy": "x"}))
    return path


# -- the table ------------------------------------------------------------------------------------------


def test_the_space_of_a_table_is_its_candidates() -> None:
    table = small()
    assert len(table) == 19 and {c.key for c in table.space} == {c.key for c, _ in table}
    assert table.space.invalid({"a": 7, "b": "y"}) == "not in the table"
    assert table.optimum == 100.0 and [table.reaching(s) for s in (1.0, 0.95, 0.90)] == [1, 2, 4]
    assert table.default() == []


def test_measuring_looks_up() -> None:
    table = small()
    batch = [Candidate("made_up", (("a", a), ("b", "y"))) for a in (4, 7, 8, 9)]
    batch += [Candidate("made_up", (("a", 4), ("b", "q"))), Candidate("made_up", (("z", 1),))]
    got = list(SimulatedMeasurer(table).measure(batch))
    assert [m.candidate for m in got] == batch
    assert [m.status for m in got] == ["ok", "invalid", "wrong_result", "compile_error", "invalid", "invalid"]
    assert [m.median_us for m in got] == [105.0, None, None, None, None, None]
    assert (got[0].build.seconds, got[0].run and got[0].run.seconds, got[1].build.seconds) == (1.0, 0.1, 0.0)
    assert got[1].error is not None and "not in table" in got[1].error


@pytest.mark.parametrize("name", ["log.jsonl", "log.jsonl.gz"])
def test_a_table_is_loaded_from_a_log(tmp_path: Path, name: str) -> None:
    path = write_log(tmp_path / "log.jsonl")
    if name.endswith(".gz"):
        (tmp_path / name).write_bytes(gzip.compress(path.read_bytes()))
    table = Table.load(tmp_path / name)
    assert len(table) == 40 and len(table.costs) == 32 and table.optimum == 11.0
    _, entry = next(iter(table))
    assert (entry.status, entry.build_seconds, entry.run_seconds, entry.source_sha256) == ("wrong_result", 1.5, 0.25, "0" * 64)
    assert table.subject is not None and table.subject.workload == KRON and table.subject.schedule.name == "kron_cuda_simt"
    energy = Table.load(tmp_path / name, objective="energy")
    assert energy.optimum == pytest.approx(1 / 40)
    assert simulate(table, "distinctive", seeds=1, trials=24).runs[0].trials > 0


def test_a_table_of_something_unknown_sees_only_knobs(tmp_path: Path) -> None:
    path = write_log(tmp_path / "log.jsonl")
    lines = path.read_text().replace('"family":"kron"', '"family":"unheard_of"')
    path.write_text(lines)
    table = Table.load(path)
    assert table.subject is None
    assert simulate(table, "distinctive", seeds=1, trials=24).runs[0].trials > 0


def test_a_log_that_is_no_table(tmp_path: Path) -> None:
    path = write_log(tmp_path / "log.jsonl")
    write_log(path, KronMatmul(32, [(8, 8)] * 3))
    with pytest.raises(ArgumentError, match="one workload is needed"):
        Table.load(path)
    with pytest.raises(ArgumentError, match="one space is needed"):
        Table.load(write_log(tmp_path / "b.jsonl"), space="kron_cpu")
    with pytest.raises(ArgumentError, match="no successful record"):
        Table.load(write_log(tmp_path / "c.jsonl", n=1))
    with pytest.raises(ArgumentError, match="is not a file"):
        Table.load(tmp_path / "none.jsonl")
    with pytest.raises(ArgumentError, match="objective='speed'"):
        Table.load(path, objective="speed")


# -- the figures ----------------------------------------------------------------------------------------


def test_random_baseline_by_hand() -> None:
    assert random_trials(10, 1) == (5.5, 5.0)
    assert random_trials(4, 4) == (1.0, 1.0)
    mean, median = random_trials(1000, 10)
    assert mean == pytest.approx(1001 / 11)
    miss = math.prod((990 - i) / (1000 - i) for i in range(int(median)))
    assert miss <= 0.5 < miss / ((990 - (median - 1)) / (1000 - (median - 1)))
    with pytest.raises(ArgumentError):
        random_trials(10, 0)


def test_random_search_meets_its_calculated_baseline() -> None:
    table = fused_table(16)
    result = simulate(table, "random", seeds=60, trials=2000)
    mean = np.mean([r.reached[0.95][0] for r in result.runs if r.reached[0.95]])
    assert mean == pytest.approx(result.random_trials_to(0.95)[0], rel=0.4)


def test_quartiles_with_censored_runs() -> None:
    assert Spread.of([3, 1, 2, 4, None]) == Spread(3, 2, 4, 1)
    assert Spread.of([1, None, None, None]) == Spread(None, None, None, 3)
    assert Spread.of([5]) == Spread(5, 5, 5, 0)


def test_finish_times_overlap_builds_and_serialise_runs() -> None:
    def measured(build: float, run: float | None) -> Measured:
        result = None if run is None else RunResult("ok", times_us=(1.0,), seconds=run)
        return Measured(Candidate("s", ()), BuildResult("ok" if result else "compile_error", seconds=build), result)

    batch = [measured(2.0, 1.0), measured(1.0, 1.0), measured(4.0, None), measured(1.0, 0.5)]
    finished, end = _finish_times(batch, builders=8, start=10.0)
    assert finished == [14.0 - 0.5, 12.0, 14.0, 12.5] and end == 14.0
    finished, end = _finish_times(batch, builders=1, start=0.0)
    assert finished == [3.0, 4.0, 7.0, 8.5] and end == 8.5


def test_diversity_by_hand() -> None:
    assert pairwise_distance(np.array([[0.0], [1.0], [3.0]])) == pytest.approx(2.0)
    space = SearchSpace("s", [Knob("a", (1, 2)), Knob("b", ("x", "y")), Knob("c", (1,))])
    assert coverage(space, [space.candidate({"a": 1, "b": "x", "c": 1})]) == 0.5
    assert coverage(space, list(space)) == 1.0 and coverage(space, []) == 0.0


# -- simulation -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["random", "exhaustive", "annealing", "evolutionary", "distinctive"])
def test_every_strategy_finishes_a_small_table(strategy: str) -> None:
    result = simulate(small(), strategy, seeds=2, trials=100)
    for run in result.runs:
        assert run.best[-1] == 1.0 and run.reached[0.99] is not None and list(run.best) == sorted(run.best)
    data = result.to_dict()
    assert json.loads(json.dumps(data, allow_nan=False)) == data
    assert data["trials_to"]["0.99"]["censored"] == 0 and data["candidates"] == 19


def test_the_first_reaching_trial_counts_and_censoring_is_said() -> None:
    table = table_of({"a": tuple(range(100))}, lambda c: 100.0 - int(c["a"]) if int(c["a"]) < 90 else 1.0)
    run = simulate(table, "exhaustive", seeds=1, trials=100).runs[0]
    assert run.reached[0.99] is not None and run.reached[0.99][0] == 91
    result = simulate(table, "exhaustive", seeds=3, trials=20)
    assert result.trials_to(0.95) == Spread(None, None, None, 3) and result.runs[0].trials == 20
    assert result.to_dict()["trials_to"]["0.95"]["median"] is None


def test_simulation_is_repeatable() -> None:
    a, b = (simulate(fused_table(64), "distinctive", seeds=[7], trials=48) for _ in range(2))
    assert a.runs[0].best == b.runs[0].best and a.runs[0].reached == b.runs[0].reached
    assert a.runs[0].best != simulate(fused_table(64), "distinctive", seeds=[8], trials=48).runs[0].best


@pytest.mark.parametrize("strategy", ["distinctive", "annealing", "evolutionary", "random"])
def test_the_default_config_comes_first_unless_it_must_not(strategy: str) -> None:
    table = fused_table()
    [default] = table.default()
    entry = table.get(default)
    assert entry is not None and entry.cost is not None
    first = simulate(table, strategy, seeds=1, trials=8).runs[0].best[0]
    assert first == table.optimum / entry.cost
    assert simulate(table, strategy, seeds=1, trials=8, default_first=False).runs[0].best[0] != first


def test_the_model_is_judged_on_what_it_has_not_seen() -> None:
    q = simulate(fused_table(1024), "distinctive", seeds=1, trials=64, quality_at=24).runs[0].quality
    assert q is not None and q.trained_on == 24
    assert q.pairwise > 0.6 and 0 < q.top1 <= q.top16 <= 1 and 0 <= q.recall16 <= 1
    assert simulate(fused_table(64), "random", seeds=1, trials=64).runs[0].quality is None


@pytest.mark.parametrize("wrong", [{"trials": 0}, {"batch": 0}, {"builders": 0}, {"seeds": 0}, {"strategy": "luck"}])
def test_wrong_arguments(wrong: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match=next(iter(wrong))):
        simulate(small(), **wrong)


@pytest.mark.parametrize("change", ["missing", "more", "type", "family"])
def test_a_table_that_its_schedule_does_not_fit_is_seen_by_knobs_alone(change: str) -> None:
    registry.register_schedule(FusedSchedule)
    assert Table.from_records("plain", records(1024, 60)).subject is not None
    found = []
    for r in records(1024, 60):
        config = dict(r.config)
        first = next(iter(config))
        if change == "missing":
            del config[first]
        elif change == "more":
            config["zzz"] = 1
        elif change == "type":
            config[first] = "abc"
        workload = {"family": "ks", "batch": 4, "pattern": [1, 2, 2, 1]} if change == "family" else r.workload
        found.append(replace(r, config=config, workload=workload))
    table = Table.from_records("odd", found)
    assert table.subject is None
    assert simulate(table, "distinctive", seeds=1, trials=20).runs[0].trials > 0
