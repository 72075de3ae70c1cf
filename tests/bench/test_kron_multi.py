"""`kronsched bench kron-multi` on gloo ranks: what it measures, what it exchanges, and how it is asked."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kronsched.bench.kron_multi import Call, Case, Row, calls, case_of, powers, rows_of
from kronsched.bench.kron_multi_kernels import needed
from kronsched.cli.root import run
from kronsched.distributed import plan
from kronsched.errors import ArgumentError
from kronsched.hardware import PRESETS

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


def asked(case: Case, ranks: int, **options: Any) -> list[Call]:
    return calls([case], ["weak", "strong"], ranks, [1, 2], PRESETS["nvidia/h200"], **options)


def test_every_product_of_the_measurement_is_built_before() -> None:
    found = set(needed(asked(Case(8, FOUR, "float32"), 2)))
    assert {("kron", FOUR, "float32", rows) for rows in (4, 8)} <= found  # the grid (2, 1), and one rank alone
    assert {("kron", FOUR[1:], "float32", rows) for rows in (32, 16, 8)} <= found  # grid (1, 2), three factors: 16, 8 or 4 rows
    assert ("kron", FOUR[:1], "float32", 16 * 32) in found  # then the first
    assert ("ks", (16, 4, 4, 1), "float32", 32) in found  # or the first in place


def test_only_the_best_ways_on_paper_are_measured() -> None:
    every, few = asked(Case(64, ((64, 64),) * 4, "float32"), 2), asked(Case(64, ((64, 64),) * 4, "float32"), 2, tries=2)
    assert [(c.mode, c.grid, c.m) for c in every] == [(c.mode, c.grid, c.m) for c in few]
    assert [(c.mode, c.grid.columns) for c in few] == [("one", 1), ("weak", 1), ("weak", 2), ("strong", 1), ("strong", 2)]
    for all_ways, best in zip(every, few, strict=True):
        assert set(best.pairs) <= set(all_ways.pairs)
        assert len(best.pairs) == (2 if best.grid.columns > 1 else 1)
    assert (1, 1) in every[2].pairs and all(local > 1 and count == 2 for local, count in few[2].pairs)  # 4 exchanges, no overlap


def test_builders_import_no_torch() -> None:
    code = "import sys, kronsched.bench.kron_multi_build; sys.exit('torch' in sys.modules or 'xgboost' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


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
    out, err = capfd.readouterr()
    printed = json.loads(out)
    check(printed, 2)
    for line in ("kernels to build", "kernels built", "2 rank(s) have started", "GB/s leave each rank", "one rank alone takes"):
        assert re.search(rf"^ +[\d.]+ s  .*{re.escape(line)}", err, re.M), err  # a run that is cut off tells where it was
    assert json.loads(path.read_text()) == printed
    assert [row.to_dict() for row in rows_of(printed)] == printed["rows"]
    assert run(["bench", "kron-multi", "--from", str(path)]) == 0  # what was measured, then the model made from it
    shown = capfd.readouterr().out
    assert 0 <= shown.index("kron-multi on 2 rank(s)") < shown.index("model of scaling")


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
