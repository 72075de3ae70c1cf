"""The model of scaling from a measured result: what it is made of, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kronsched.bench.kron_multi import Case
from kronsched.bench.kron_multi_model import ModelRow, by_flops, model
from kronsched.cli.root import run
from kronsched.errors import ArgumentError
from kronsched.hardware import PRESETS
from kronsched.workloads.kron import KronMatmul

H200 = PRESETS["nvidia/h200"]
DATA: dict[str, Any] = {
    "device": "NVIDIA H200",
    "link": {"gbs": 300.0, "latency_us": 20.0},
    "rows": [{"case": "m=64 64x64^4 float32", "one_us": us} for us in (7000.0, 8000.0, 11000.0)]
    + [{"case": "m=4 128x128^4 float32", "one_us": 14000.0}],
}


def rows(ranks: list[int], **options: Any) -> dict[tuple[str, str, int, int | None], ModelRow]:
    return {(r.case.split()[1], r.mode, r.ranks, r.columns): r for r in model(DATA, ranks, H200, **options)}


def test_splitting_rows_scales_until_there_are_no_more_rows() -> None:
    found = rows([1, 2, 16, 1024])
    for ranks in (1, 2, 16, 1024):
        assert found["64x64^4", "weak", ranks, None].efficiency == pytest.approx(1, abs=0.01)
        assert found["64x64^4", "weak", ranks, None].exchange_bytes == 0
    assert found["64x64^4", "strong", 16, None].efficiency > 0.95
    assert found["64x64^4", "strong", 1024, None].efficiency < 0.1  # 64 rows


def test_splitting_columns_costs_two_exchanges_over_the_link() -> None:
    row = rows([2], columns=(2,))["64x64^4", "weak", 2, 2]
    block = 128 * 64**4 // 2 * 4
    assert row.grid == (1, 2) and row.exchange_bytes == 2 * block // 2
    assert row.exchange_us == pytest.approx(row.exchange_bytes / 300e3 + 2 * row.chunks * 20.0)
    assert row.exchange_us < row.us < 8000 * 1.01 * 2 + row.exchange_us and row.efficiency < 0.7


def test_many_gpus_take_columns_where_rows_run_out() -> None:
    found = rows([16], columns=(None, 8))
    best, eight = found["128x128^4", "strong", 16, None], found["128x128^4", "strong", 16, 8]
    assert best.grid[1] > 1 and best.us <= eight.us and eight.grid == (2, 8)
    assert ("128x128^4", "strong", 4, 8) not in rows([4, 8], columns=(8,))


def test_a_phase_takes_its_share_of_the_arithmetic() -> None:
    time = by_flops(Case(64, ((64, 64),) * 4, "float32"), 8000.0)
    assert time(KronMatmul(m=64, factors=((64, 64),) * 4)) == pytest.approx(8000)
    assert time(KronMatmul(m=64 * 64**3, factors=((64, 64),))) == pytest.approx(2000)


def test_on_the_command_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "measured.json"
    path.write_text(json.dumps(DATA))
    assert run(["bench", "kron-multi", "--model", "16,1024", "--from", str(path), "--json"]) == 0
    listed = json.loads(capfd.readouterr().out)["rows"]
    assert {(r["ranks"], r["columns"]) for r in listed} == {(n, c) for n in (16, 1024) for c in (None, 2, 8)}
    assert run(["bench", "kron-multi", "--from", str(path)]) == 0
    out = capfd.readouterr().out
    assert "nothing is measured here" in out and "300 GB/s" in out and "assumed" in out
    path.write_text("[]")
    for arguments, message in [
        (["--from", str(path)], "is not a result"),
        (["--from", str(tmp_path / "none")], "cannot be read"),
        (["--model", "16"], "--model needs --from"),
    ]:
        assert run(["bench", "kron-multi", *arguments]) == 2
        assert message in capfd.readouterr().err


@pytest.mark.parametrize(("change", "message"), [({"link": None}, "no link"), ({"rows": []}, "no rows")])
def test_other_files_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        model({**DATA, **change}, [2], H200)
