"""`kronsched bench kron-multi` on gloo ranks: what it measures, what it exchanges, and how it is asked."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kronsched.bench.kron_multi import Case, Row, case_of, powers
from kronsched.bench.kron_multi_kernels import needed
from kronsched.cli.root import run
from kronsched.distributed import plan
from kronsched.errors import ArgumentError

ROOT = Path(__file__).parents[2]
FOUR = ((4, 4),) * 4
ROW = Row("c", "weak", 2, 16, (1, 2), 3, 1, False, (3, 1), 200.0, 180.0, 8, 8, 1.0, 1e-7, ((200.0, 3, 1, False),))


@pytest.mark.parametrize(
    ("text", "factors", "rows"),
    [
        ("64^4:3", ((64, 64),) * 4, 3),
        ("4x4^4:8", FOUR, 8),
        ("2x3,3x2^2:7", ((2, 3), (3, 2), (3, 2)), 7),
        ("4^4", FOUR, 1024),  # a mebibyte on a CPU
    ],
)
def test_cases(text: str, factors: Any, rows: int) -> None:
    assert case_of(text, "float32", "cpu") == Case(rows, factors, "float32")


def test_gpus_get_larger_cases() -> None:
    found = [case_of(text, "float32", "cuda").rows for text in ("64x64^4", "128x128^4")]
    assert found == [64, 4]  # 4 GiB


@pytest.mark.parametrize(
    ("text", "dtype", "message"),
    [
        ("4x4:x", "float32", "rows 'x'"),
        ("4x4:0", "float32", "rows 0"),
        ("4y4", "float32", "PxQ"),
        ("4x4", "int8", "dtype='int8'"),
    ],
)
def test_wrong_cases_are_one_line(text: str, dtype: str, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        case_of(text, dtype, "cpu")


def test_labels() -> None:
    assert powers(FOUR) == "4x4^4" and powers(((2, 3), (3, 2))) == "2x3,3x2" and powers(((5, 6),)) == "5x6"


def test_what_speed_up_and_efficiency_mean() -> None:
    assert ROW.efficiency == pytest.approx(0.9) and ROW.speedup == pytest.approx(1.8)
    strong = replace(ROW, mode="strong", us=100.0)
    assert strong.speedup == pytest.approx(1.8) and strong.efficiency == pytest.approx(0.9)
    assert ROW.to_dict()["speedup"] == ROW.speedup


def test_every_product_of_the_measurement_is_built_before() -> None:
    asked = set(needed([Case(8, FOUR, "float32")], ["weak", "strong"], 2, [1, 2]))
    assert {("kron", FOUR, "float32", rows) for rows in (4, 8)} <= asked  # the grid (2, 1), and one rank alone
    assert {("kron", FOUR[1:], "float32", rows) for rows in (32, 16, 8)} <= asked  # grid (1, 2), three factors: 16, 8 or 4 rows
    assert ("kron", FOUR[:1], "float32", 16 * 32) in asked  # then the first
    assert ("ks", (16, 4, 4, 1), "float32", 32) in asked  # or the first in place


def command(*arguments: str) -> list[str]:
    return ["bench", "kron-multi", "4x4^4:8", "--device", "cpu", "--repeats", "1", "--chunks", "1,2", "--json", *arguments]


def check(data: dict[str, Any], ranks: int) -> None:
    assert data["suite"] == "kron-multi" and data["link"]["gbs"] > 0
    seen = {(row["mode"], *row["grid"]) for row in data["rows"]}
    assert seen == {(mode, ranks // columns, columns) for mode in ("weak", "strong") for columns in (1, ranks)}
    for row in data["rows"]:
        options = {"grid": row["grid"], "device": "nvidia/h200", "kernel_us": lambda w: 1.0}
        least, chosen = (plan(row["m"], FOUR, ranks, local=n, **options).exchange_bytes for n in (None, row["local"]))
        assert row["least_bytes"] == least <= row["exchange_bytes"] == chosen and (least > 0) == (row["grid"][1] > 1)
        assert row["error"] < 1e-5 and row["us"] > 0 and row["one_us"] > 0
        assert row["us"] == min(tried[0] for tried in row["tried"])


def test_two_ranks_of_its_own(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rows.json"
    assert run(command("--ranks", "2", "-o", str(path))) == 0
    printed = json.loads(capfd.readouterr().out)
    check(printed, 2)
    assert json.loads(path.read_text()) == printed


@pytest.mark.slow
def test_under_torchrun() -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "kronsched"]
    done = subprocess.run([*launcher, *command()], capture_output=True, text=True, timeout=200, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    check(json.loads(done.stdout), 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--modes", "odd"], "mode='odd' is not allowed: choose one of weak, strong"),
        (["--chunks", "0"], "chunks='0' is not allowed"),
        (["--device", "tpu"], "device='tpu' is not allowed"),
        (["-o", "/no/such/folder/x.json"], "cannot be written"),
    ],
)
def test_wrong_arguments_are_one_line(arguments: list[str], message: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(command(*arguments)) == 2
    assert message in capfd.readouterr().err


def test_bench_itself_is_as_before(capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "no_such_family"]) == 2
    assert "no_such_family" in capfd.readouterr().err
