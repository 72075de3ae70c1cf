"""`tune` with a simulated measurer: resume, what is logged and when, failures, warm start, arguments."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from kronsched import registry, tune
from kronsched.errors import ArgumentError, ArgumentTypeError, InvalidConfig, UnsupportedError, UserError
from kronsched.measure.base import Measured
from kronsched.records.journal import Journal
from kronsched.records.schema import TuningRecord
from kronsched.search.result import TuneEvent, TuneResult
from kronsched.search.table import SimulatedMeasurer
from kronsched.space import Candidate
from kronsched.workloads.kron import KronMatmul
from tests.search.synthetic import H200, FusedSchedule, fused_table, fused_workload

W = fused_workload()


class Killed(BaseException):
    """Stands for kill -9: nothing may catch it."""


class Counting(SimulatedMeasurer):
    """Remembers what it was asked; dies after `alive` results; may ask for larger batches."""

    def __init__(self, m: int = 1024, alive: int = 10**9, parallel: int = 1) -> None:
        super().__init__(fused_table(m))
        self.batches: list[list[Candidate]] = []
        self.alive, self.parallel, self.closed = alive, parallel, False

    def measure(self, batch: Sequence[Candidate]) -> Iterator[Measured]:
        self.batches.append(list(batch))
        for result in reversed(list(super().measure(batch))):  # order of completion is not order of asking
            if self.alive == 0:
                raise Killed
            self.alive -= 1
            yield result

    def close(self) -> None:
        self.closed = True


@pytest.fixture(autouse=True)
def only_the_made_up_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    registry.register_schedule(FusedSchedule)
    monkeypatch.setattr(registry, "schedules_for", lambda workload, device: [FusedSchedule()])


def run(path: Path | None, measurer: SimulatedMeasurer | None = None, workload: KronMatmul = W, **options: Any) -> TuneResult:
    measurer = measurer or Counting(workload.m)
    return tune(workload, **{"target": "nvidia/h200", "trials": 24, "log": path, "measurer": measurer, **options})


def keys(records: Sequence[TuningRecord]) -> list[str]:
    return [r.candidate.key for r in records]


# -- what a run does ------------------------------------------------------------------------------------


def test_every_result_is_logged_and_reported(tmp_path: Path) -> None:
    events: list[TuneEvent] = []
    result = run(tmp_path / "a.jsonl", progress=events.append)
    records = Journal(tmp_path / "a.jsonl").read()
    assert result.trials == len(records) == 24 and keys(records) == keys(result.records) and len(set(keys(records))) == 24
    assert [e.kind for e in events] == ["start", *["result"] * 24, "end"]
    assert [e.done for e in events] == [0, *range(1, 25), 24]
    assert [e.record for e in events[1:-1]] == list(result.records)
    assert result.best is not None and result.best.median_us == min(r.median_us for r in records if r.median_us)
    assert events[-1].best == result.best and result.known == 0


def test_a_record_says_how_it_was_found(tmp_path: Path) -> None:
    records = run(tmp_path / "a.jsonl", seed=5).records
    assert [r.search["round"] for r in records] == [0] * 8 + [1] * 8 + [2] * 8
    for r in records:
        assert (r.search["strategy"], r.search["seed"], r.space["name"]) == ("distinctive", 5, "made_up")
        assert r.search["build_seconds"] == 1.2 and r.search["search_seconds"] >= 0
    assert all(r.search["predicted_rank"] is None for r in records[:8])
    assert sorted(r.search["predicted_rank"] for r in records[8:16]) == list(range(8))


def test_failures_are_tallied_by_status(tmp_path: Path) -> None:
    result = run(tmp_path / "a.jsonl", trials=200, strategy="random")
    assert result.failures == dict(Counter(r.status for r in result.records if not r.ok)) and result.failures["crash"] > 0


def test_the_result_is_the_json_of_the_contract(tmp_path: Path) -> None:
    result = run(tmp_path / "a.jsonl")
    data = json.loads(json.dumps(result.to_dict(), allow_nan=False))
    assert {"workload", "target", "best", "trials", "failures", "seconds", "log"} <= set(data)
    assert set(data["best"]) >= {"config", "median_us", "floor_us", "roofline_fraction", "reference_us"}
    assert data["best"]["roofline_fraction"] == pytest.approx(data["best"]["floor_us"] / data["best"]["median_us"])
    assert data["workload"] == W.to_dict() and data["target"]["name"] == "NVIDIA H200"


def test_a_schedule_without_a_default_is_left_out_with_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class NoDefault(FusedSchedule):
        name = "no_default"

        def default_config(self, workload: Any, device: Any) -> Any:
            raise InvalidConfig("nothing fits")

    said: list[str] = []
    monkeypatch.setattr(registry, "schedules_for", lambda workload, device: [NoDefault(), FusedSchedule()])
    result = run(tmp_path / "a.jsonl", trials=2, progress=lambda event: said.append(event.message))
    assert result.trials == 2 and {r.space["name"] for r in result.records} == {FusedSchedule.name}
    assert any("no_default is left out" in text and "nothing fits" in text for text in said)
    monkeypatch.setattr(registry, "schedules_for", lambda workload, device: [NoDefault()])
    with pytest.raises(UnsupportedError, match=r"no schedule can start on .*nothing fits"):
        run(tmp_path / "b.jsonl")


def test_a_result_is_one_short_line(tmp_path: Path) -> None:
    result = run(tmp_path / "a.jsonl")
    assert len(result.records) == 24 and len(repr(result)) < 300
    assert "best" in repr(result) and W.label in repr(result) and "24 trials" in repr(result)


def test_an_injected_measurer_is_left_open(tmp_path: Path) -> None:
    measurer = Counting()
    run(tmp_path / "a.jsonl", measurer)
    assert not measurer.closed


def test_batches_fill_the_builders_unless_told_otherwise(tmp_path: Path) -> None:
    def sizes(name: str, parallel: int, **options: Any) -> list[int]:
        measurer = Counting(parallel=parallel)
        run(tmp_path / name, measurer, **options)
        return [len(b) for b in measurer.batches]

    assert sizes("a.jsonl", 1) == [8, 8, 8]
    assert sizes("b.jsonl", 15) == [15, 9]
    assert sizes("c.jsonl", 15, batch=4) == [4] * 6


def test_the_same_seed_makes_the_same_run(tmp_path: Path) -> None:
    a, b, c = (keys(run(tmp_path / f"{i}.jsonl", seed=s).records) for i, s in enumerate((1, 1, 2)))
    assert a == b != c


def test_an_exhausted_space_ends_the_run(tmp_path: Path) -> None:
    space = tmp_path / "s.toml"
    space.write_text(SPACE_FILE)
    events: list[TuneEvent] = []
    result = run(tmp_path / "a.jsonl", space=space, trials=100, progress=events.append)
    assert 0 < result.trials < 100 and any("every valid candidate" in e.message for e in events)


# -- resume ---------------------------------------------------------------------------------------------


def test_a_second_run_measures_only_what_is_new(tmp_path: Path) -> None:
    log = tmp_path / "a.jsonl"
    first, second = run(log), run(log)
    assert (second.trials, second.known) == (24, 24)
    assert not set(keys(first.records)) & set(keys(second.records))
    assert second.best is not None and first.best is not None and first.best.median_us
    assert second.best.median_us is not None and second.best.median_us <= first.best.median_us


def test_the_model_is_refitted_from_the_log(tmp_path: Path) -> None:
    log = tmp_path / "a.jsonl"
    run(log)
    assert all(r.search["predicted_rank"] is not None for r in run(log, trials=8).records)


@pytest.mark.parametrize("alive", [0, 1, 11, 23])
def test_a_killed_run_keeps_every_result_that_came(tmp_path: Path, alive: int) -> None:
    log = tmp_path / "a.jsonl"
    with pytest.raises(Killed):
        run(log, Counting(alive=alive))
    kept = Journal(log).read()
    assert len(kept) == alive
    resumed = run(log)
    assert resumed.known == alive and not set(keys(kept)) & set(keys(resumed.records))


def test_a_torn_line_costs_one_record(tmp_path: Path) -> None:
    log = tmp_path / "a.jsonl"
    run(log)
    log.write_bytes(log.read_bytes()[:-40])
    with pytest.warns(UserWarning, match=r"a\.jsonl:24"):
        assert run(log).known == 23


def test_records_of_another_workload_device_or_space_are_not_known(tmp_path: Path) -> None:
    log = tmp_path / "a.jsonl"
    records = run(tmp_path / "source.jsonl", trials=8).records
    for i, record in enumerate(records):
        fields = vars(record).copy()
        fields.pop("workload_key", None)
        if i < 2:
            fields["target"] = {**record.target, "name": "NVIDIA H100"}
        elif i < 4:
            fields["workload"] = fused_workload(64).to_dict()
        elif i < 6:
            fields["space"] = {"name": "other", "digest": "x"}
        elif i < 7:
            fields["config"] = {**record.config, "rows": 3}
        Journal(log).append(TuningRecord(**fields))
    assert run(log).known == 1


# -- warm start -----------------------------------------------------------------------------------------


def test_other_shapes_of_the_same_log_are_used(tmp_path: Path) -> None:
    log = tmp_path / "a.jsonl"
    run(log, workload=fused_workload(256), trials=200, strategy="random")

    def first(**options: Any) -> tuple[list[TuningRecord], list[str]]:
        copy = tmp_path / f"copy{len(list(tmp_path.iterdir()))}.jsonl"
        copy.write_bytes(log.read_bytes())
        events: list[TuneEvent] = []
        result = run(copy, trials=16, progress=events.append, **options)
        assert result.known == 0
        return list(result.records), [e.message for e in events if e.message]

    warm, said = first()
    assert any("200 records of 1 other" in m for m in said)
    assert warm[0].search["predicted_rank"] is not None
    cold, said = first(warm_start=False)
    assert not said and cold[0].search["predicted_rank"] is None

    def middle(records: Sequence[TuningRecord]) -> float:
        return statistics.median(r.median_us or float("inf") for r in records[:8])

    assert middle(warm) < 0.7 * middle(cold)


def test_the_users_logs_are_used(tmp_path: Path) -> None:
    run(None, workload=fused_workload(256), trials=100, strategy="random")
    events: list[TuneEvent] = []
    run(tmp_path / "a.jsonl", trials=8, progress=events.append)
    assert any("100 records of 1 other" in e.message for e in events)


# -- a device that is not here --------------------------------------------------------------------------


def predicted(monkeypatch: pytest.MonkeyPatch, log: Path, **options: Any) -> TuneResult:
    built: list[dict[str, Any]] = []
    monkeypatch.setattr("kronsched.search.setup._check_compiler", lambda compiler: None)
    monkeypatch.setattr(
        "kronsched.runtime.cache.get_or_build", lambda w, s, config, *rest: built.append(config) or Path("/built")
    )
    said: list[str] = []
    result = tune(W, target="nvidia/h200", log=log, progress=lambda event: said.append(event.message), **options)
    assert not any("nothing was measured" in text for text in said)  # it is the result's message, and would be printed twice
    assert result.predicted is not None and built == [result.predicted.config]
    assert (result.trials, result.best, result.artefact) == (0, None, Path("/built")) and not log.exists()
    assert "nothing was measured" in result.message and result.to_dict()["predicted"]["config"] == result.predicted.config
    return result


def test_without_records_the_default_is_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = predicted(monkeypatch, tmp_path / "a.jsonl")
    assert result.predicted is not None and result.predicted.config == FusedSchedule().default_config(W, H200)
    assert "default" in result.message


def test_with_records_of_other_shapes_the_model_chooses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for m in (256, 4096):
        run(None, workload=fused_workload(m), trials=400, strategy="random")
    monkeypatch.setattr("kronsched.search.predict.CLEARLY", 0.05)  # the made-up table has less to gain
    result, table = predicted(monkeypatch, tmp_path / "a.jsonl"), fused_table()
    assert result.predicted is not None and "model's choice" in result.message
    chosen, default = table.get(result.predicted), table.get(table.default()[0])
    assert chosen is not None and default is not None and chosen.cost and default.cost and chosen.cost < default.cost


# -- arguments ------------------------------------------------------------------------------------------

SPACE_FILE = """
space = "made_up"
[knobs.rows]
values = [1, 2]
[knobs.threads]
values = [128]
[knobs.vec]
values = [4]
[knobs.unroll]
values = [16]
"""


@pytest.mark.parametrize(
    ("options", "error", "names"),
    [
        ({"trials": 0}, ArgumentError, "trials=0"),
        ({"trials": -3}, ArgumentError, "trials=-3"),
        ({"trials": 2.5}, ArgumentTypeError, r"trials=2\.5"),
        ({"trials": True}, ArgumentTypeError, "trials=True"),
        ({"seed": -1}, ArgumentError, "seed=-1"),
        ({"strategy": "luck"}, ArgumentError, "strategy='luck'"),
        ({"strategy": 3}, ArgumentTypeError, "strategy=3"),
        ({"strategy_options": {"nov": 1}}, ArgumentError, "'nov'"),
        ({"strategy_options": {"novelty": "high"}}, ArgumentTypeError, "novelty='high'"),
        ({"strategy_options": {"novelty": -1}}, ArgumentError, "novelty=-1"),
        ({"objective": "speed"}, ArgumentError, "objective='speed'"),
        ({"compiler": "gcc"}, ArgumentError, "compiler='gcc'"),
        ({"batch": 0}, ArgumentError, "batch=0"),
        ({"builders": 0}, ArgumentError, "builders=0"),
        ({"run_timeout_s": 0}, ArgumentError, "run_timeout_s=0"),
        ({"build_timeout_s": "long"}, ArgumentTypeError, "build_timeout_s='long'"),
        ({"progress": 5}, ArgumentTypeError, "progress=5"),
        ({"target": "gpu"}, ArgumentError, "target='gpu'"),
        ({"log": 5}, ArgumentTypeError, "log=5"),
        ({"space": 5}, ArgumentTypeError, "space=5"),
        ({"space": "/none/such.toml"}, ArgumentError, "such.toml"),
    ],
)
def test_a_wrong_argument_is_named_before_any_work(
    tmp_path: Path, options: dict[str, Any], error: type[UserError], names: str
) -> None:
    measurer = Counting()
    with pytest.raises(error, match=names) as e:
        run(tmp_path / "a.jsonl", measurer, **options)
    assert "\n" not in str(e.value) and not measurer.batches and not (tmp_path / "a.jsonl").exists()


def test_not_a_workload(tmp_path: Path) -> None:
    with pytest.raises(ArgumentTypeError, match="workload='kron'"):
        run(tmp_path / "a.jsonl", Counting(), workload="kron")  # type: ignore[arg-type]


def test_an_unwritable_log(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    measurer = Counting()
    with pytest.raises(ArgumentError, match="log="):
        run(tmp_path / "file" / "a.jsonl", measurer)
    assert not measurer.batches


def test_energy_needs_a_counter(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="objective='energy'"):
        tune(W, target="cpu", log=tmp_path / "a.jsonl", objective="energy")
    with pytest.raises(UnsupportedError, match="no counter"):
        run(tmp_path / "b.jsonl", objective="energy")


# -- the space file -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "names"),
    [
        (("made_up", "another"), "space='another'"),
        (("[knobs.rows]", "[knobs.rowz]"), "rowz"),
        (("[128]", "[9999]"), "no config of it is valid"),
        (("values = [1, 2]", "values = 5"), "must be a list"),
        (("values = [1, 2]", 'values = ["a"]'), "'a' is not allowed"),
        (("values = [1, 2]", "values = [nan]"), "nan is not allowed"),
        (("values = [1, 2]", "values = [-1]"), "-1 is not allowed"),
        (("values = [1, 2]", "values = [true]"), "True is not allowed"),
        (("values = [1, 2]", "values = [99999999999999999999]"), "is not allowed: an int from"),
        (('space = "made_up"', 'space = ["made_up"]'), "space="),
        (("space =", "space :"), "not valid TOML"),
    ],
)
def test_a_space_file_that_does_not_fit(tmp_path: Path, change: tuple[str, str], names: str) -> None:
    (tmp_path / "s.toml").write_text(SPACE_FILE.replace(*change))
    with pytest.raises(ArgumentError, match=names):
        run(tmp_path / "a.jsonl", space=tmp_path / "s.toml")


def test_a_space_file_narrows_the_search(tmp_path: Path) -> None:
    (tmp_path / "s.toml").write_text(SPACE_FILE)
    records = run(tmp_path / "a.jsonl", space=tmp_path / "s.toml").records
    assert {r.config["threads"] for r in records} == {128} and {r.config["rows"] for r in records} == {1, 2}
    assert len({r.config["pad"] for r in records}) > 1  # a knob that the file does not name keeps its values


def test_a_kernel_beyond_the_roofline_has_the_ceilings_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ceilings measured on a busy machine are too low; a share of the roofline above 1 would be a false claim."""
    import dataclasses

    from kronsched.search import tuner

    honest = run(tmp_path / "a.jsonl")
    assert honest.roofline_fraction is not None and honest.roofline_fraction < 1
    slow = dataclasses.replace(H200, bandwidth_gbs=1.0)
    asked: list[object] = []
    monkeypatch.setattr(tuner, "raise_ceilings", lambda device: asked.append(device) or H200)
    mended = run(tmp_path / "b.jsonl", target=slow)
    assert asked == [slow]
    assert mended.roofline_fraction == pytest.approx(honest.roofline_fraction)


def test_on_a_device_that_is_not_here_the_best_record_of_the_logs_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel that somebody measured there goes before any prediction."""
    run(None, workload=W, trials=40, strategy="random")  # in the user's log of W, as measured on an H200
    from kronsched.records.database import find_best

    best = find_best(W, H200)
    assert best is not None
    result = predicted(monkeypatch, tmp_path / "a.jsonl")
    assert result.predicted == best.candidate and "best record of the logs" in result.message
