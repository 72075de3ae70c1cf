from __future__ import annotations

import hashlib
import json
import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest

from kronsched import KronMatmul, registry, replay
from kronsched.errors import ArgumentError, InvalidConfig, KronschedError
from kronsched.hardware import PRESETS, resolve_target
from kronsched.measure.base import BuildResult, Measured, RunResult
from kronsched.records import Journal, TuningRecord
from kronsched.records.replay import REPLAY_STATUSES, ReplayResult, recorded_device
from kronsched.records.schema import versions
from kronsched.schedules.base import Schedule
from kronsched.space import Candidate, Knob, SearchSpace
from tests.records.record_factory import A100, H200, KRON, OTHER_CPU, make_record

HERE = resolve_target("cpu")
OTHER = KronMatmul(m=65, factors=[(8, 8)] * 4)


class ReplayToy(Schedule):
    """Two knobs; its source is a text of the config and of the device's limits."""

    name: ClassVar[str] = "replay_toy"
    family: ClassVar[str] = "kron"
    device_kind: ClassVar[str] = "cpu"

    def space(self, workload, device):
        return SearchSpace(self.name, [Knob("a", (1, 2, 3)), Knob("b", (False, True))])

    def apply(self, workload, config, device):
        raise AssertionError("replay only asks for the source")

    def default_config(self, workload, device):
        return {"a": 1, "b": False}


class ReplayToyCuda(ReplayToy):
    name: ClassVar[str] = "replay_toy_cuda"
    device_kind: ClassVar[str] = "cuda"


def source(workload, config: Mapping[str, Any], device) -> tuple[str, str]:
    if config["a"] == 3:
        raise InvalidConfig("a=3 cannot be scheduled")
    text = json.dumps([workload.to_dict(), dict(config), device.arch, device.units, device.shared_per_block])
    return text, hashlib.sha256(text.encode()).hexdigest()


class FakeMeasurer:
    """Answers from a table a -> (status, [median of the first, second… measurement])."""

    def __init__(self, answers: Mapping[int, tuple[str, list[float]]]) -> None:
        self.answers = answers
        self.batches: list[list[int]] = []
        self.made_for: list[tuple[Any, ...]] = []
        self.closed = 0

    def make(self, workload, schedules, device) -> FakeMeasurer:
        self.made_for.append((workload, [s.name for s in schedules], device))
        return self

    def measure(self, batch: Sequence[Candidate]) -> Iterator[Measured]:
        self.batches.append([c.config["a"] for c in batch])
        for candidate in reversed(batch):  # order of completion is not that of the batch
            status, times = self.answers[candidate.config["a"]]
            run = RunResult(status, None if status == "ok" else "it broke", (times.pop(0),) if status == "ok" else (), 3e-7)
            yield Measured(candidate, BuildResult("ok"), run)

    def close(self) -> None:
        self.closed += 1


@pytest.fixture(autouse=True)
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    registry.register_schedule(ReplayToy)
    registry.register_schedule(ReplayToyCuda)
    fake = types.ModuleType("kronsched.runtime.build")
    fake.lower_source = lambda workload, schedule, config, device: source(workload, config, device)
    monkeypatch.setitem(sys.modules, "kronsched.runtime.build", fake)


def toy_record(
    a: int = 1, us: float = 10.0, *, device=HERE, workload=KRON, digest: str | None = "", **fields: Any
) -> TuningRecord:
    config = {"a": a, "b": True}
    if digest == "":
        digest = source(workload, config, device)[1] if a != 3 else "ee" * 32
    space = {"name": "replay_toy" if device.kind == "cpu" else "replay_toy_cuda", "digest": "00"}
    data = {"device": device, "workload": workload, "config": config, "space": space, "kernel": {"source_sha256": digest}}
    return make_record(us, **{**data, "versions": versions(), **fields})


def write(tmp_path: Path, *records: TuningRecord) -> Path:
    log = tmp_path / "log.jsonl"
    for record in records:
        Journal(log).append(record)
    return log


def statuses(results: Sequence[ReplayResult]) -> list[str]:
    assert all(r.status in REPLAY_STATUSES for r in results)
    assert all((r.error is None) == (r.status == "reproduced") for r in results)
    json.dumps([r.to_dict() for r in results], allow_nan=False)
    return [r.status for r in results]


def test_digests_are_compared(tmp_path):
    log = write(
        tmp_path, toy_record(1), toy_record(2, digest="ff" * 32), toy_record(1, status="timeout"), toy_record(2, digest=None)
    )
    seen: list[ReplayResult] = []
    results = replay(log, progress=seen.append)
    assert statuses(results) == ["reproduced", "source_differs", "skipped"]
    assert [r.digest_matches for r in results] == [True, False, None]
    assert "recorded ffffffffffff (no recorded version differs)" in results[1].error
    assert "no source digest" in results[2].error
    assert seen == results and [r.measured_us for r in results] == [None] * 3


def test_measured_times_are_compared(tmp_path):
    log = write(tmp_path, toy_record(1, 10.0), toy_record(2, 10.0), toy_record(1, 5.0))
    fake = FakeMeasurer({1: ("ok", [10.9, 10.9]), 2: ("ok", [8.0])})
    results = replay(log, measure=True, measurer=fake.make)
    assert statuses(results) == ["reproduced", "reproduced", "slower"]
    assert [r.measured_us for r in results] == [10.9, 8.0, 10.9] and results[2].ratio == pytest.approx(2.18)
    assert "2.18 times" in results[2].error and results[0].max_relative_error == 3e-7
    assert fake.batches == [[1, 2], [1]] and fake.closed == 1 and len(fake.made_for) == 1
    assert fake.made_for[0] == (KRON, ["replay_toy"], resolve_target("cpu"))


def test_a_slow_time_gets_a_second_chance(tmp_path):
    log = write(tmp_path, toy_record(1, 10.0), toy_record(2, 10.0))
    fake = FakeMeasurer({1: ("ok", [15.0, 10.5]), 2: ("ok", [15.0, 11.5])})
    results = replay(log, measure=True, measurer=fake.make)
    assert statuses(results) == ["reproduced", "slower"]
    assert [r.measured_us for r in results] == [10.5, 11.5]


@pytest.mark.parametrize(("status", "expected"), [("wrong_result", "wrong_result"), ("crash", "failed"), ("flaky", "failed")])
@pytest.mark.parametrize("digest", ["", "ff" * 32])
def test_bad_runs(tmp_path, status, expected, digest):
    log = write(tmp_path, toy_record(1, digest=digest), toy_record(2))
    fake = FakeMeasurer({1: (status, []), 2: ("ok", [99.0])})
    results = replay(log, verify=True, measurer=fake.make)
    assert statuses(results) == [expected, "reproduced"]  # verify alone does not compare times
    assert "it broke" in results[0].error and results[1].measured_us is None


def test_source_that_differs_is_said_even_when_it_runs_well(tmp_path):
    log = write(tmp_path, toy_record(1, digest="ff" * 32, versions={**versions(), "apache-tvm": "0.1"}))
    (result,) = replay(log, measure=True, measurer=FakeMeasurer({1: ("ok", [10.0])}).make)
    assert result.status == "source_differs" and result.measured_us == 10.0
    assert result.versions == {"apache-tvm": ("0.1", versions()["apache-tvm"])}
    assert "apache-tvm 0.1 -> " in result.error
    assert result.to_dict()["versions"]["apache-tvm"]["recorded"] == "0.1"


def test_records_of_an_absent_gpu(tmp_path):
    log = write(tmp_path, toy_record(1, device=H200), toy_record(2, device=H200, digest="ff" * 32))
    assert statuses(replay(log)) == ["reproduced", "source_differs"]
    fake = FakeMeasurer({})
    results = replay(log, measure=True, verify=True, measurer=fake.make)
    if resolve_target("auto").name != H200.name:
        assert statuses(results) == ["skipped", "source_differs"] and not fake.made_for
        assert results[0].digest_matches and "this machine has no NVIDIA H200" in results[0].error


def test_another_gpu_is_not_the_recorded_one(tmp_path, monkeypatch):
    monkeypatch.setattr("kronsched.records.replay._present", lambda: [A100, HERE])
    log = write(tmp_path, toy_record(1, device=H200), toy_record(2, device=A100))
    fake = FakeMeasurer({2: ("ok", [10.0])})
    results = replay(log, measure=True, verify=True, measurer=fake.make)
    assert statuses(results) == ["skipped", "reproduced"] and fake.made_for == [(KRON, ["replay_toy_cuda"], A100)]


def test_records_of_another_cpu_are_verified_but_not_timed(tmp_path):
    log = write(tmp_path, toy_record(1, device=OTHER_CPU))
    fake = FakeMeasurer({1: ("ok", [99.0])})
    (result,) = replay(log, measure=True, verify=True, measurer=fake.make)
    assert result.status == "skipped" and result.digest_matches and result.measured_us is None
    assert result.max_relative_error == 3e-7 and f"recorded on {OTHER_CPU.name}" in result.error
    assert fake.made_for[0][2] == resolve_target("cpu")
    (result,) = replay(log, verify=True, measurer=FakeMeasurer({1: ("ok", [99.0])}).make)
    assert result.status == "reproduced"


def test_what_cannot_be_rebuilt_fails_with_a_reason(tmp_path):
    unknown_family = make_record(workload=KRON, device=HERE)
    unknown_family.workload["family"] = "no_such_family"
    bad_field = make_record(device=HERE)
    bad_field.workload["m"] = 0
    no_field = make_record(device=HERE)
    del no_field.workload["factors"]
    log = write(
        tmp_path,
        toy_record(1),
        unknown_family,
        bad_field,
        no_field,
        toy_record(1, space={"name": "no_such_space"}),
        toy_record(1, space={"name": "replay_toy_cuda"}),
        toy_record(3),
        toy_record(1, config={"a": 1}),
        toy_record(1, config={"a": 1, "b": True, "__class__": "os.system"}),
    )
    fake = FakeMeasurer({1: ("ok", [10.0])})
    results = replay(log, measure=True, verify=True, measurer=fake.make)
    assert statuses(results) == ["reproduced"] + ["failed"] * 8
    wanted = (
        "family='no_such_family'",
        "m=0",
        "factors",
        "space='no_such_space'",
        "serves kron on cuda",
        "a=3 cannot",
        "'b' is missing",
    )
    for result, text in zip(results[1:], (*wanted, "__class__"), strict=True):
        assert text in result.error and "\n" not in result.error


def test_a_workload_that_cannot_be_measured_does_not_end_the_replay(tmp_path):
    log = write(tmp_path, toy_record(1), toy_record(1, workload=OTHER))
    fake = FakeMeasurer({1: ("ok", [10.0])})

    def make(workload, schedules, device):
        if workload == KRON:
            raise KronschedError("no memory for the inputs")
        return fake.make(workload, schedules, device)

    results = replay(log, measure=True, measurer=make)
    assert statuses(results) == ["failed", "reproduced"] and results[0].error == "no memory for the inputs"
    assert results[0].digest_matches and fake.closed == 1


def test_best_and_workload_choose_records(tmp_path):
    records = [toy_record(1, 9.0), toy_record(2, 7.0), toy_record(1, 3.0, workload=OTHER), toy_record(2, 8.0, device=OTHER_CPU)]
    log = write(tmp_path, *records)
    assert [r.record for r in replay(log)] == records
    assert [r.record for r in replay(log, best=True)] == records[1:]
    assert [r.record for r in replay(log, workload=OTHER)] == [records[2]]
    assert [r.recorded_us for r in replay(log, best=True, workload=KRON)] == [7.0, 8.0]


def test_bad_arguments(tmp_path):
    with pytest.raises(ArgumentError, match="is not a file"):
        replay(tmp_path / "none.jsonl")
    log = write(tmp_path, toy_record(1), toy_record(1, workload=OTHER, status="crash"))
    with pytest.raises(ArgumentError, match="no ok record of kron m=65"):
        replay(log, workload=OTHER)
    only_failed = tmp_path / "failed.jsonl"
    Journal(only_failed).append(toy_record(1, status="crash"))
    assert replay(only_failed) == []


def test_recorded_device():
    known = recorded_device({"kind": "cuda", "name": "NVIDIA H200", "arch": "sm_90a", "units": 100, "shared_per_block": 1000})
    assert (known.units, known.shared_per_block, known.l2_bytes) == (100, 1000, PRESETS["nvidia/h200"].l2_bytes)
    unknown = recorded_device({"kind": "cuda", "name": "GPU of 2040", "arch": None})
    assert unknown.name == "GPU of 2040" and not unknown.present
    assert recorded_device(HERE.to_dict()) == resolve_target("cpu")
