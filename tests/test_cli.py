from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest

from kronsched import KronMatmul
from kronsched.cli import output, progress
from kronsched.cli.root import run
from kronsched.errors import CompileError
from kronsched.hardware import PRESETS
from kronsched.records import Journal, TuningRecord
from kronsched.records.replay import ReplayResult
from kronsched.search.result import TuneEvent, TuneResult

WORKLOAD = KronMatmul(4, ((4, 4), (4, 4)))
TUNE = ["tune", "kron", "--m", "4", "--factors", "4x4,4x4", "--target", "cpu", "--trials", "1"]
Command = Callable[..., CompletedProcess[str]]


def record(status: str = "ok", median: float = 12.5, **result: Any) -> TuningRecord:
    times = [median] if status == "ok" else []
    return TuningRecord(
        workload=WORKLOAD.to_dict(),
        target=PRESETS["nvidia/h200"].to_dict(),
        space={"name": "kron_cuda_simt", "digest": "0" * 16},
        config={"rows": 2, "threads": 256},
        result={"status": status, "times_us": times, "median_us": median if times else None, **result},
        timestamp="2026-01-01T00:00:00+00:00",
    )


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "kron.jsonl"
    for item in (record(median=20.0), record("compile_error"), record(median=12.5), record("timeout")):
        Journal(path).append(item)
    return path


def result(**fields: Any) -> TuneResult:
    given: dict[str, Any] = {
        "workload": WORKLOAD,
        "device": PRESETS["nvidia/h200"],
        "best": record(),
        "records": (),
        "failures": {},
        "trials": 3,
        "seconds": 1.5,
        "log": Path("kron.jsonl"),
        "floor_us": 6.25,
        "reference_us": 50.0,
        "reference_name": "torch shuffle",
    }
    return TuneResult(**{**given, **fields})


def tune_gives(monkeypatch: pytest.MonkeyPatch, outcome: Any) -> dict[str, Any]:
    """Replace the tuner; returns the options it was called with."""
    seen: dict[str, Any] = {}

    def fake(workload: KronMatmul, **options: Any) -> TuneResult:
        seen.update(options, workload=workload)
        if isinstance(outcome, BaseException):
            raise outcome
        print("a library writes to stdout")
        os.write(1, b"and C code does\n")
        return outcome  # type: ignore[no-any-return]

    monkeypatch.setattr("kronsched.search.tuner.tune", fake)
    return seen


# -- start-up and help -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "args", [["--help"], ["tune", "kron", "--help"], ["--version"], ["tune", "kron", "--m", "0", "--factors", "2x2"]]
)
def test_start_up_imports_no_heavy_library(args: list[str]) -> None:
    code = (
        "import sys; from kronsched.cli.root import run; run(sys.argv[1:]);"
        "print('HEAVY', [m for m in ('torch', 'tvm', 'xgboost', 'numpy', 'rich') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "HEAVY []"


def test_help_lists_every_command(kronsched_command: Command) -> None:
    done = kronsched_command("--help")
    assert done.returncode == 0
    for name in ("tune", "replay", "show", "space", "emit", "bench", "report", "simulate", "doctor"):
        assert f"\n  {name} " in done.stdout


def test_family_options_come_from_the_fields(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["tune", "kron", "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "rows of X [required]" in text and "[default: float32]" in text and "--strategy" in text


# -- tune -------------------------------------------------------------------------------------------------


def test_tune_passes_its_options_on(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = tune_gives(monkeypatch, result())
    extra = [
        "--log",
        "x.jsonl",
        "--strategy",
        "random",
        "--seed",
        "3",
        "--space",
        "s.toml",
        "--no-warm-start",
        "--dtype",
        "float16",
    ]
    assert run([*TUNE, *extra]) == 0
    del seen["progress"]
    assert seen.pop("workload") == KronMatmul(4, ((4, 4), (4, 4)), "float16")
    assert seen == {
        "target": "cpu",
        "devices": None,
        "cluster": None,
        "cluster_key": None,
        "trials": 1,
        "log": "x.jsonl",
        "strategy": "random",
        "seed": 3,
        "space": "s.toml",
        "compiler": "nvrtc",
        "warm_start": False,
        "objective": "time",
        "build_timeout_s": 60.0,
        "run_timeout_s": 20.0,
    }


def test_tune_json_is_one_object_alone_on_stdout(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    tune_gives(monkeypatch, result(floor_us=float("nan")))
    assert run([*TUNE, "--json"]) == 0
    out, err = capfd.readouterr()
    assert out.count("\n") == 1
    found = json.loads(out)
    assert {"workload", "target", "best", "trials", "failures", "seconds", "log"} <= set(found)
    assert {"config", "median_us", "floor_us", "roofline_fraction", "reference_us"} <= set(found["best"])
    assert found["best"]["floor_us"] is None  # JSON has no NaN
    assert "a library writes to stdout" in err and "and C code does" in err


def test_tune_summary_says_what_matters(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    tune_gives(monkeypatch, result(failures={"timeout": 2}))
    assert run(TUNE) == 0
    out = capsys.readouterr().out
    rate = WORKLOAD.flops / 12.5 / 1e3
    for text in (
        "12.5 µs",
        f"{rate:,.4g} GFLOP/s",
        "50% of the roofline",
        "4× over torch shuffle, 50 µs",
        "timeout 2",
        "kron.jsonl",
    ):
        assert text in out
    assert "rows=2 threads=256" in out and "kronsched.load(" in out


def test_tune_fails_when_no_candidate_was_ok(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    tune_gives(monkeypatch, result(best=None, failures={"crash": 3}))
    assert run([*TUNE, "--json"]) == 1
    out, err = capfd.readouterr()
    assert json.loads(out)["best"] is None
    assert err.splitlines()[-1] == "kronsched: no candidate was ok; failures: crash 3"


def test_tune_for_an_absent_device_is_done(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    predicted = record().candidate
    tune_gives(monkeypatch, result(best=None, predicted=predicted, message="nothing was measured", artefact=Path("a/b")))
    assert run(TUNE) == 0
    out = capsys.readouterr().out
    assert "nothing was measured" in out and "rows=2 threads=256  (not measured)" in out and "a/b" in out


def test_ctrl_c_says_where_the_log_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], user_dirs: Path
) -> None:
    tune_gives(monkeypatch, KeyboardInterrupt())
    assert run(TUNE) == 130
    err = capsys.readouterr().err
    assert str(user_dirs) in err and f"{WORKLOAD.key}.jsonl" in err and "Traceback" not in err


@pytest.mark.parametrize(("error", "expected"), [(CompileError("ptxas\nsaid no"), "kronsched: ptxas said no"), (RuntimeError("boom"), "kronsched: unexpected RuntimeError: boom (run `kronsched --debug …` for the traceback)")])  # fmt: skip  # noqa: E501
def test_failures_are_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception, expected: str
) -> None:
    tune_gives(monkeypatch, error)
    assert run([*TUNE, "--quiet"]) == 1
    assert capsys.readouterr().err.splitlines() == [expected]


def test_debug_shows_the_traceback(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    tune_gives(monkeypatch, RuntimeError("boom"))
    assert run(["--debug", *TUNE]) == 1
    err = capsys.readouterr().err
    assert "Traceback" in err and "boom" in err


# -- show, emit, space, doctor ------------------------------------------------------------------------------


def test_show(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["show", str(log), "--top", "1"]) == 0
    out = capsys.readouterr().out
    assert "kron m=4 4x4^2 float32 on NVIDIA H200: 4 records, compile_error 1, ok 2, timeout 1" in out
    assert "12.5 µs" in out and "20 µs" not in out and "rows=2 threads=256" in out


@pytest.fixture
def two(log: Path) -> tuple[Path, str]:
    """A log of two workloads, and the key of the second."""
    other = KronMatmul(8, ((4, 4), (4, 4)))
    Journal(log).append(dataclasses.replace(record(median=3.0), workload=other.to_dict()))
    return log, other.key


def test_a_key_chooses_one_workload_of_a_log(
    two: tuple[Path, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log, key = two
    assert run(["show", str(log), "--key", key[:12]]) == 0
    out = capsys.readouterr().out
    assert f"key {key}" in out and "m=8" in out and "m=4" not in out
    asked: list[Any] = []
    monkeypatch.setattr("kronsched.records.replay.replay", lambda log, workload, **options: asked.append(workload) or [])
    monkeypatch.setattr(
        "kronsched.runtime.export.emit", lambda what, out, target, workload, compiler: asked.append(workload) or []
    )
    monkeypatch.setattr("kronsched.runtime.manifest.Manifest.load", lambda path: None)
    run(["replay", str(log), "--key", key])
    run(["emit", str(log), "-o", "x", "--key", key])
    assert [workload.key for workload in asked] == [key] * 2


@pytest.mark.parametrize(
    ("key", "message"), [("kron-", "names 2 workloads of the log"), ("gemm", "names no workload of the log")]
)
def test_a_key_that_is_no_workload_lists_them(
    key: str, message: str, two: tuple[Path, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["show", str(two[0]), "--key", key]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert message in line and two[1] in line


def test_a_replay_that_could_check_nothing_fails_and_says_why(
    log: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def results(*statuses: str) -> list[ReplayResult]:
        skipped = "not run: this machine has no NVIDIA H200"
        return [ReplayResult(record(median=1.0), s, error=skipped if s == "skipped" else None) for s in statuses]

    monkeypatch.setattr("kronsched.records.replay.replay", lambda log, **options: results("skipped", "skipped"))
    assert run(["replay", str(log), "--measure"]) == 1
    assert "kronsched: all 2 record(s) were skipped" in (err := capsys.readouterr().err) and err.count("no NVIDIA H200") == 1
    monkeypatch.setattr("kronsched.records.replay.replay", lambda log, **options: results("skipped", "reproduced"))
    assert run(["replay", str(log), "--measure"]) == 0


def test_show_json(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["show", str(log), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    [group] = found["workloads"]
    assert found["records"] == 4 and group["statuses"] == {"ok": 2, "compile_error": 1, "timeout": 1}
    assert [r["median_us"] for r in group["best"]] == [12.5, 20.0]


def test_show_warns_of_bad_lines_in_one_line_each(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with log.open("a") as f:
        f.write('{"schema": 1, "workl')
    assert run(["show", str(log)]) == 0
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"kronsched: warning: {log}:5: skipped")


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """A table of 24 configs whose best is rows=8, threads=64."""
    path = tmp_path / "table.jsonl"
    for rows in range(1, 9):
        for threads in (64, 128, 256):
            item = record(median=100.0 - 10 * rows + threads / 64)
            Journal(path).append(dataclasses.replace(item, config={"rows": rows, "threads": threads}))
    return path


def test_simulate_json(table: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = ["simulate", str(table), "--strategy", "random", "--strategy", "exhaustive", "--seeds", "3", "--trials", "24"]
    assert run([*args, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["strategies"]
    assert set(found) == {"random", "exhaustive"}
    assert found["random"]["optimum"] == 21.0 and found["random"]["candidates"] == 24
    assert found["random"]["trials_to"]["0.99"]["censored"] == 0  # 24 trials are the whole table
    assert run(args) == 0
    out = capsys.readouterr().out
    assert "24 candidates, best 21, 3 seeds" in out and "random, calculated" in out and "100%" in out


def test_report(log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.html"
    assert run(["report", str(log), "-o", str(page), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["report"] == str(page)
    assert "NVIDIA H200" in page.read_text(encoding="utf-8")


def test_a_reader_that_goes_away_is_no_error(log: Path) -> None:
    command = f"{sys.executable} -m kronsched show {log} --top 1 | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "")


def test_doctor_json(capfd: pytest.CaptureFixture[str]) -> None:
    code = run(["doctor", "--json"])
    found = json.loads(capfd.readouterr().out)
    checks = {c["name"]: c for c in found["checks"]}
    assert {"python", "llvm", "C compiler", "xgboost", "nvrtc", "gpu", "cache directory", "log directory"} <= set(checks)
    assert (code == 0) == found["ok"] == all(c["status"] != "broken" for c in found["checks"])
    assert checks["llvm"]["status"] == checks["cpu"]["status"] == "ok", checks
    assert all(c["advice"] for c in found["checks"] if c["status"] != "ok")


def test_doctor_finds_an_unwritable_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KRONSCHED_CACHE_DIR", str(tmp_path / "file"))
    assert run(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "BROKEN  cache directory" in out and "set KRONSCHED_CACHE_DIR" in out


# -- printing -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("us", "text"),
    [
        (0.5, "500 ns"),
        (18.44, "18.4 µs"),
        (999.9, "1000 µs"),
        (2391.0, "2.39 ms"),
        (3.2e6, "3.2 s"),
        (None, "–"),
        (float("inf"), "–"),
    ],
)
def test_time_text(us: float | None, text: str) -> None:
    assert output.time_text(us) == text


def event(kind: str, done: int, median: float | None, **fields: Any) -> TuneEvent:
    best = None if median is None else record(median=median)
    return TuneEvent(kind, 8, done, 1, best, median, 5.0, {"timeout": 1}, **fields)


def test_progress_on_a_pipe_is_a_line_for_each_new_best(capsys: pytest.CaptureFixture[str]) -> None:
    with progress.tuning_progress(quiet=False, header="a shape on cpu") as show:
        for item in (event("start", 0, None), event("result", 1, 20.0), event("result", 2, 20.0), event("result", 3, 10.0)):
            show(item)
        show(event("message", 3, 10.0, message="the log was torn"))
        show(event("end", 8, 10.0))
    assert capsys.readouterr().err.splitlines() == [
        "a shape on cpu",
        "[1/8] best 20 µs, 25% of the roofline; failures: timeout 1",
        "[3/8] best 10 µs, 50% of the roofline; failures: timeout 1",
        "the log was torn",
        "[8/8] best 10 µs, 50% of the roofline; failures: timeout 1",
    ]


def test_progress_bar_on_a_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "150")
    with progress._bar("a shape on cpu") as show:
        show(event("start", 0, None))
        show(event("result", 3, 10.0))
        show(event("message", 3, 10.0, message="[not markup]"))
    out, err = capsys.readouterr()
    assert out == "" and "3/8" in err and "best 10 µs, 50% of the roofline; failures: timeout 1" in err and "[not markup]" in err
    assert "a shape on cpu" in err
