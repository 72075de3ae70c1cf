"""The comparison of strategies on tables: what is run, what is reported, leave-one-out, the answer without measuring."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kronsched import registry
from kronsched.cli.root import run as run_command
from kronsched.cost_model.transfer import Prior, fit_prior, shapes_of
from kronsched.errors import ArgumentError
from kronsched.measure.base import BuildResult, Measured, RunResult
from kronsched.records.journal import Journal
from kronsched.records.schema import record_of
from kronsched.search import compare as compare_module
from kronsched.search.compare import Comparison, Variant, ablation_of, compare, variants_of
from kronsched.search.distinctive import Distinctive
from kronsched.search.simulate import simulate
from kronsched.search.table import Table
from kronsched.search.zero import zero_trial
from tests.search.synthetic import H200, FusedSchedule, fused_table, fused_workload, records

SHAPES = (64, 1024)


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two small tables of a schedule that worker processes do not know, so they run in this one."""
    registry.register_schedule(FusedSchedule)
    folder, paths = tmp_path_factory.mktemp("tables"), []
    for m in SHAPES:
        paths.append(folder / f"fused_{m}.jsonl")
        journal, table = Journal(paths[-1]), fused_table(m)
        wanted = {c.key for c in table.default()}
        for i, (candidate, entry) in enumerate(table):
            if i % 7 == 0 or candidate.key in wanted:
                run = RunResult(entry.status, times_us=() if entry.cost is None else (entry.cost,), seconds=0.1)
                measured = Measured(candidate, BuildResult("ok", seconds=1.0), run)
                journal.append(record_of(fused_workload(m), H200, "made_up", "d", measured, {}))
    return paths


@pytest.fixture(scope="module")
def result(tables: list[Path]) -> Comparison:
    log = tables[0].parent / "others.jsonl"
    log.write_text("".join(r.to_json() + "\n" for m in (32, 256, 4096) for r in records(m, 200)))
    return compare(tables, variants_of(["distinctive", "random"]), seeds=6, trials=96, logs=[log], workers=1)


def test_every_variant_runs_on_every_table_with_every_seed(result: Comparison) -> None:
    assert result.tables == ("fused_64", "fused_1024") and result.variants == ("distinctive", "distinctive, warm", "random")
    assert set(result.results) == {(t, v) for t in result.tables for v in result.variants}
    assert all([r.seed for r in found.runs] == list(range(6)) for found in result.results.values())


def test_a_part_of_a_comparison_is_the_simulation_it_says_it_is(result: Comparison, tables: list[Path]) -> None:
    alone = simulate(Table.load(tables[1]), "distinctive", seeds=[3], trials=96, default_first=False)
    assert result.results["fused_1024", "distinctive"].runs[3].best == alone.runs[0].best


def test_a_warm_start_pays() -> None:
    """On whole tables; those above are too small for it."""
    prior = fit_prior(shapes_of(FusedSchedule(), H200, [r for m in (32, 256, 4096) for r in records(m, 200)]))
    assert prior is not None

    def trials(**start: Any) -> float:
        results = [simulate(fused_table(m), "distinctive", seeds=6, trials=96, **start) for m in SHAPES]
        medians = [96.0 if (m := r.trials_to(0.95).median) is None else m for r in results]
        return float(np.exp(np.mean(np.log(medians))))

    assert trials(prior=prior) < 0.8 * trials(default_first=False)


def test_the_result_is_json_and_counts_what_was_censored(result: Comparison) -> None:
    data = json.loads(json.dumps(result.to_dict(), allow_nan=False))
    assert set(data["means"]) == set(result.variants) and data["tables"] == list(result.tables)
    assert data["means"]["random"]["0.99"]["censored"] == result.censored("random", 0.99) > 0
    assert data["means"]["distinctive"]["0.95"]["trials"] == pytest.approx(result.mean_trials("distinctive"))
    assert data["random_calculated"]["0.95"] == pytest.approx(result.random_trials())
    assert data["results"]["fused_64"]["random"]["limit"] == 96
    assert [z["table"] for z in data["zero_trial"]["tables"]] == list(result.tables)


def test_a_prior_never_sees_the_tables_own_workload(tables: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[set[str]] = []

    def spy(shapes: Any, *args: Any, **options: Any) -> Prior | None:
        seen.append({s.workload.key for s in shapes})
        return fit_prior(shapes, *args, **options)

    monkeypatch.setattr(compare_module, "fit_prior", spy)
    log = tables[0].parent / "own.jsonl"  # a log of one of the tables' workloads, and of another shape
    log.write_text("".join(r.to_json() + "\n" for r in records(1024, 20) + records(4096, 20)))
    compare_module._prior.cache_clear()
    compare(tables, [Variant("warm", Distinctive, warm=True)], seeds=1, trials=8, logs=[log], workers=1, zero=False)
    other = {m: fused_workload(m).key for m in (64, 1024, 4096)}
    assert seen == [{other[1024], other[4096]}, {other[64], other[4096]}]


def test_an_ablation_turns_off_one_part_at_a_time(tables: list[Path]) -> None:
    variants = ablation_of()
    assert len({v.label for v in variants}) == len(variants)
    assert all(bool(v.without) + bool(v.options) <= 1 for v in variants)
    assert {g for v in variants for g in v.without} == {"knob", "sched"} and any(v.options == {"novelty": 0} for v in variants)
    got = compare(tables[:1], [v for v in variants if v.without and not v.warm], seeds=2, trials=64, workers=1, zero=False)
    assert got.mean_trials("no sched features", 0.9) > 0


def test_worker_processes_give_the_same(tables: list[Path]) -> None:
    here, there = (
        compare(tables, variants_of(["random"]), seeds=7, trials=24, workers=n, zero=False).to_dict()["results"] for n in (1, 2)
    )
    for name in ("fused_64", "fused_1024"):
        assert here[name]["random"]["curve"] == there[name]["random"]["curve"]
        assert here[name]["random"]["trials_to"] == there[name]["random"]["trials_to"]


@pytest.mark.parametrize("wrong", [{"seeds": 0}, {"trials": 0}, {"workers": 0}, {"variants": []}, {"paths": []}])
def test_wrong_arguments(tables: list[Path], wrong: dict[str, Any]) -> None:
    given: dict[str, Any] = {"paths": tables, "variants": variants_of(["random"]), **wrong}
    with pytest.raises(ArgumentError, match="tables" if "paths" in wrong else next(iter(wrong))):
        compare(given.pop("paths"), given.pop("variants"), **given)


def test_a_table_or_label_that_repeats_is_refused(tables: list[Path]) -> None:
    with pytest.raises(ArgumentError, match=r"tables=.* repeats"):
        compare([tables[0], tables[0]], variants_of(["random"]))
    with pytest.raises(ArgumentError, match="is not a file"):
        compare([tables[0].parent / "none.jsonl"], variants_of(["random"]))


# -- without measuring ----------------------------------------------------------------------------------


def test_the_answer_without_measuring_is_better_than_the_default_where_the_model_knows(
    tables: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kronsched.search.predict.CLEARLY", 0.05)  # the made-up table has less to gain
    prior = fit_prior(shapes_of(FusedSchedule(), H200, records(256, 300) + records(4096, 300)))
    assert prior is not None
    found = zero_trial(fused_table(1024), prior, "t")
    assert found is not None and found.table == "t" and found.default is not None
    assert found.taken == "model" and found.share == found.model > found.default


def test_far_from_known_shapes_the_default_is_taken() -> None:
    """A prior of the shapes of the last test, as if they had been of a thousand times as many rows."""
    prior = fit_prior(shapes_of(FusedSchedule(), H200, records(256, 100)), members=2)
    assert prior is not None
    [known] = prior.known
    far = {name: value + 10 for name, value in known.columns.items()}
    found = zero_trial(fused_table(1024), replace(prior, known=(replace(known, columns=far),)))
    assert found is not None and found.taken == "default" and found.share == found.default


# -- the commands ---------------------------------------------------------------------------------------


def test_the_command_prints_markdown_and_json(tables: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    args = ["strategies", *map(str, tables), "--strategies", "random,distinctive", "--seeds", "2", "--trials", "16"]
    assert run_command([*args, "--workers", "1"]) == 0
    out, err = capsys.readouterr()
    assert "| distinctive, warm" in out and "random, calculated" in out and "geometric mean" in out and "jobs" in err
    assert run_command([*args, "--workers", "1", "--no-warm", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["variants"] == ["random", "distinctive"] and data["zero_trial"]["tables"] == []


def test_the_command_refuses_what_it_cannot_use(tables: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["strategies", "none.jsonl"]) == 2
    assert run_command(["strategies", str(tables[0]), "--strategies", "luck"]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 2 and "none.jsonl" in lines[0] and "luck" in lines[1]


def test_train_says_what_it_made(tables: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["train", str(tables[0].parent), "--family", "kron", "-o", str(tmp_path / "m"), "--json"]) == 0
    [model] = json.loads(capsys.readouterr().out)["models"]
    assert model["space"] == "made_up" and Path(model["files"][0]).is_file()
    assert run_command(["train", str(tmp_path / "nothing"), "--family", "kron"]) == 2
    assert "does not exist" in capsys.readouterr().err
