"""`kronsched compare`: several runs of one workload."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kronsched.cli.root import run as cli
from kronsched.errors import ArgumentError
from kronsched.records.journal import Journal
from kronsched.report.compare import SHARES, compare_logs
from tests.records.record_factory import A100, make_record


def write(path: Path, medians: list[float | None], strategy: str) -> Path:
    """A run with one record every two seconds."""
    journal = Journal(path)
    for i, us in enumerate(medians):
        journal.append(
            make_record(
                us or 0.0,
                status="ok" if us is not None else "timeout",
                config={"k": i},
                search={"strategy": strategy, "seed": 3, "build_seconds": 0.5, "run_seconds": 0.5},
                timestamp=f"2026-01-02T03:04:{2 * i:02d}.000+00:00",
            )
        )
    return path


def test_trials_and_seconds_to_a_share_of_the_best_of_all(tmp_path: Path) -> None:
    fast = write(tmp_path / "a.jsonl", [None, 20.0, 10.0, 12.0], "distinctive")
    slow = write(tmp_path / "b.jsonl", [30.0, 25.0, 10.8, 15.0], "random")
    found = compare_logs([fast, slow])
    assert found.best_us == 10.0
    a, b = found.runs
    assert (a.strategy, a.trials, a.failures, a.best_us) == ("distinctive", 4, 1, 10.0)
    assert a.reached == ((3.0, 5.0),) * len(SHARES)  # the first record took its own second, the others two
    assert b.reached == ((3.0, 5.0), None, None)
    assert a.after_seconds[0] is None and a.after_seconds[1] == 10.0
    assert a.seconds == 7.0


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = write(tmp_path / "a.jsonl", [20.0, 10.0], "distinctive")
    assert cli(["compare", str(log), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["runs"][0]["best_us"] == 10.0
    assert cli(["compare", str(log)]) == 0
    assert "a: distinctive, seed 3" in capsys.readouterr().out


def test_runs_that_cannot_be_compared(tmp_path: Path) -> None:
    a = write(tmp_path / "a.jsonl", [20.0], "random")
    Journal(tmp_path / "b.jsonl").append(make_record(device=A100))
    with pytest.raises(ArgumentError, match="one device is needed"):
        compare_logs([a, tmp_path / "b.jsonl"])
    with pytest.raises(ArgumentError, match="no successful record"):
        compare_logs([write(tmp_path / "c.jsonl", [None], "random")])
