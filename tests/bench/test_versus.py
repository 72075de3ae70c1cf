"""Our tuner against MetaSchedule: what is compared, how a side is ended, and the peer itself on a small shape."""

from __future__ import annotations

import json
import math
import queue
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from kronsched import Conv2d, Gemm
from kronsched.bench import versus as bench
from kronsched.bench.metaschedule_program import metaschedule_program
from kronsched.bench.peer_metaschedule import GivenProgram, MetaSchedulePeer, prepare, shares
from kronsched.bench.versus import Match, Side, _follow, geomean, run_side, versus
from kronsched.cli.root import cli, run
from kronsched.cli.shapes import shapes_of
from kronsched.cli.versus import _Progress
from kronsched.errors import ArgumentError, UnsupportedError
from kronsched.hardware import PRESETS
from kronsched.measure.base import BuildResult, Measured, RunResult
from kronsched.runtime.build import lower_source
from kronsched.space import Candidate
from kronsched.workloads.base import Workload

TINY = Conv2d(1, 8, 8, 16, 16, 3, padding=1)


def _trial(us: float | None, status: str = "ok") -> dict[str, Any]:
    return {"status": status, "us": us, "error": "", "seconds": 1.0}


def test_equal_trials_are_the_first_of_both() -> None:
    ours = Side("kronsched", (_trial(8.0), _trial(4.0), _trial(1.0)))
    match = Match(TINY, ours, Side("metaschedule", (_trial(None, "compile_error"), _trial(12.0))))
    assert (match.common, match.equal_time, match.equal_trials) == (2, 12.0, 3.0)
    assert match.peer.right == 0.5
    assert geomean([4.0, None, 1.0]) == pytest.approx(2.0)


def test_a_side_without_results_gives_no_ratio() -> None:
    match = Match(TINY, Side("kronsched", (_trial(8.0),)), Side("metaschedule", (), "died"))
    assert (match.common, match.equal_time, match.equal_trials, match.peer.right) == (0, None, None, None)
    assert json.loads(json.dumps(match.to_dict()))["sides"][1]["error"] == "died"


def _lines(*events: dict[str, Any]) -> queue.Queue[str | None]:
    lines: queue.Queue[str | None] = queue.Queue()
    for event in events:
        lines.put(json.dumps(event))
    return lines


SEARCHING = {"event": "stage", "stage": "search", "seconds": 0.0}


def test_a_side_is_ended_when_its_time_is_up() -> None:
    events: list[Any] = []
    lines = _lines(SEARCHING, {"event": "trial", **_trial(3.0)})
    assert _follow(lines, events.append, seconds=0.05, start_s=5.0) == ""
    assert events == [{"stage": "search", "seconds": 0.0}, _trial(3.0)]
    assert "not ready within 0.01 s" in _follow(_lines({"event": "stage", "stage": "imports"}), print, seconds=5.0, start_s=0.01)
    lines = _lines(SEARCHING)
    lines.put(None)
    assert _follow(lines, print, seconds=5.0, start_s=5.0) == bench.DIED


def test_what_comes_too_late_does_not_count() -> None:
    events: list[Any] = []

    def slow(event: Any) -> None:
        events.append(event)
        time.sleep(0.02)

    assert _follow(_lines(SEARCHING, *[{"event": "trial", **_trial(3.0)}] * 100), slow, seconds=0.1, start_s=5.0) == ""
    assert 2 <= len(events) < 20


def test_progress_shows_stages_and_better_trials(capsys: pytest.CaptureFixture[str]) -> None:
    show = _Progress()
    for event in ({"stage": "search", "seconds": 0.0}, _trial(8.0), _trial(None, "compile_error"), _trial(9.0), _trial(4.0)):
        show(TINY, "metaschedule", event)
    said = capsys.readouterr().err.splitlines()
    assert said == [f"  metaschedule {s}" for s in ("0.0 s: search", "1.0 s: 8 µs, trial 1", "1.0 s: 4 µs, trial 4")]


def test_skip_and_limit_choose_shapes() -> None:
    every = shapes_of("conv2d", None, 0, None)
    assert len(every) == 4
    assert shapes_of("conv2d", None, 2, 1) == every[2:3]
    with pytest.raises(ArgumentError, match="--skip=4 is not allowed: there are 4 shapes"):
        shapes_of("conv2d", None, 4, None)


def test_a_family_without_the_default_suite_has_its_first() -> None:
    assert shapes_of("gemm", None, 0, None)[0].family == "gemm"
    with pytest.raises(ArgumentError, match=r"suite family='cats' is not allowed: choose one of conv2d, .* a JSON file"):
        shapes_of("cats", None, 0, None)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ("versus conv2d", "--seconds or --trials is needed"),
        ("versus conv2d --trials 1 --seed -1", "--seed=-1 is not allowed"),
        ("versus conv2d --trials 1 --build-timeout 1e9", "--build-timeout=1000000000.0 is not allowed"),
        ("versus conv2d --trials 1 --peer-strategy luck", "--peer-strategy='luck' is not allowed: choose one of evolutionary"),
        ("versus kron --trials 1", "MetaSchedule as a peer serves conv2d and dense gemm, not kron"),
        ("versus conv2d --trials 1 -o /none/x.json", "--output='/none/x.json' cannot be written"),
        ("ablate conv2d --schedule none", "--schedule='none' is not allowed: choose one of conv2d_cuda_mma"),
    ],
)
def test_errors_name_the_options(capsys: pytest.CaptureFixture[str], args: str, said: str) -> None:
    assert run(args.split()) == 2
    assert capsys.readouterr().err.startswith(f"kronsched: {said}")


@pytest.mark.slow
def test_a_side_that_cannot_serve_the_workload_says_so() -> None:
    job = {"side": "metaschedule", "workload": Gemm(8, 8, 8, "bfloat16", "bfloat16").to_dict(), "target": "cpu", "seed": 0}
    side = run_side(
        {**job, "builders": 1, "repaired": True, "peer_options": {}, "build_timeout_s": 30.0, "trials": 1}, seconds=20.0
    )
    assert side.error == "MetaSchedule has tensor intrinsics for int8 and float16, not for bfloat16"


def test_a_device_that_is_not_here_is_refused_at_once() -> None:
    with pytest.raises(UnsupportedError, match="not on this machine"):
        versus([TINY, TINY], seconds=1.0, target="nvidia/h200")


@pytest.mark.parametrize(
    ("named", "said"),
    [
        ({}, "seconds=None"),
        ({"seconds": 0.0}, "seconds=0"),
        ({"trials": 0}, "trials=0"),
        ({"seconds": 1.0, "peer_options": {"strategy": "x"}}, "strategy='x'"),
        ({"trials": 1, "build_timeout_s": math.nan}, "build_timeout_s=nan"),
        ({"trials": 1, "seed": -1}, "seed=-1"),
    ],
)
def test_bad_budgets_are_refused(named: dict[str, Any], said: str) -> None:
    with pytest.raises(ArgumentError, match=said):
        versus([TINY], **named)


@pytest.mark.parametrize(
    "workload",
    [
        Conv2d(1, 5, 6, 8, 8, 3, stride=2, padding=1, has_bias=True, relu=True),
        Conv2d(1, 4, 4, 8, 8, 1, in_dtype="float16"),
        Gemm(5, 7, 24, "int8", "int8"),
    ],
    ids=["int8 conv2d", "float16 1x1", "int8 gemm"],
)
def test_the_program_computes_the_workload(workload: Workload) -> None:
    import tvm

    run = tvm.compile(metaschedule_program(workload), target="llvm")
    inputs = workload.make_inputs(0)
    y = np.zeros(workload.output.shape, workload.output.dtype)
    tensors = [tvm.runtime.tensor(a) for a in (*(t.numpy() for t in inputs), y)]
    run["main"](*tensors)
    error = (torch.from_numpy(tensors[-1].numpy()).double() - workload.reference(*inputs)).abs().max()
    assert error <= (0 if workload.output.dtype == "int8" else 4e-3)


@pytest.mark.parametrize(
    "workload", [Conv2d(1, 5, 5, 8, 8, 3, groups=8), Gemm(8, 8, 128), Conv2d(1, 5, 5, 8, 8, 3, in_dtype="int4")]
)
def test_what_metaschedule_cannot_do_is_refused(workload: Workload) -> None:
    with pytest.raises(UnsupportedError, match="MetaSchedule"):
        metaschedule_program(workload)


class _Lowering:
    """A measurer that only lowers, for a device that is not here."""

    def __init__(self, workload: Workload, schedule: GivenProgram) -> None:
        self.workload, self.schedule = workload, schedule

    def measure(self, batch: Sequence[Candidate]) -> Iterator[Measured]:
        for candidate in batch:
            try:
                lower_source(self.workload, self.schedule, candidate.config, PRESETS["nvidia/h200"])
            except Exception as e:
                yield Measured(candidate, BuildResult("compile_error", str(e)))
            else:
                yield Measured(candidate, BuildResult("ok"), RunResult("ok", times_us=(float(len(candidate.key)),)))

    def close(self) -> None:
        pass


@pytest.mark.slow
def test_its_candidates_use_tensor_cores_and_build_when_repaired() -> None:
    workload = Conv2d(8, 14, 14, 64, 64, 3, padding=1)
    prepare()
    for repaired, least in ((False, 0), (True, 6)):
        peer = MetaSchedulePeer(workload, PRESETS["nvidia/h200"], repaired=repaired, batch=6, population=12)
        peer.run(6, _Lowering(workload, GivenProgram(repaired)))
        built = shares(peer.trials).get("ok", 0)
        assert built >= least
        if not repaired:
            assert built < 6
            assert any("tvm_access_ptr" in t.error for t in peer.trials)


@pytest.mark.slow
def test_both_sides_on_this_cpu(tmp_path: Path) -> None:
    suite, out = tmp_path / "tiny.json", tmp_path / "out.json"
    suite.write_text(json.dumps([TINY.to_dict()]))
    options = ["--target", "cpu", "--trials", "3", "--builders", "1", "--seconds", "300", "--json", "-o", str(out)]
    result = CliRunner().invoke(cli, ["versus", str(suite), *options], standalone_mode=False)
    assert result.return_value == 0
    row = json.loads(out.read_text())["rows"][0]
    assert row["common_trials"] == 3
    assert json.loads(out.read_text())["unfinished"] == []
    for side, stages in zip(row["sides"], (3, 6), strict=True):
        assert [s["stage"] for s in side["stages"]].index("search") == 2
        assert len(side["stages"]) == stages
    assert row["equal_time"] > 0
    assert [s["right_share"] for s in row["sides"]] == [1.0, 1.0]
