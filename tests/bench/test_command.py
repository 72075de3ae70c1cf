from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest

from kronsched.bench.peers import PEERS, PeerUnavailable
from kronsched.cli.root import run

ARGS = ["bench", "kron", "--suite", "adversarial", "--limit", "1", "--peers", "torch_shuffle,gpytorch", "--target", "cpu"]


def test_command_prints_the_contracts_object(ours: Callable[..., None], capfd: pytest.CaptureFixture[str]) -> None:
    ours()
    assert run([*ARGS, "--json"]) == 0
    found = json.loads(capfd.readouterr().out)
    assert {"suite", "device", "rows", "geomean", "versions"} <= set(found) and found["suite"] == "kron/adversarial"
    [row] = found["rows"]
    assert {"workload", "us", "peers", "floor_us", "error"} <= set(row) and set(row["peers"]) == {"torch_shuffle", "gpytorch"}
    assert 0 < row["error"] < 1e-5 and row["failure"] is None and row["kernel"]["how"] == "tuned"
    assert found["geomean"]["torch_shuffle"] == pytest.approx(row["peers"]["torch_shuffle"] / row["us"])
    assert found["ceilings"]["bandwidth_gbs"] > 0


def test_command_prints_a_table_and_progress(ours: Callable[..., None], capfd: pytest.CaptureFixture[str]) -> None:
    ours()
    assert run(ARGS) == 0
    out, err = capfd.readouterr()
    assert "geometric mean of torch_shuffle / kronsched" in out and "tuned, 2 passes" in out and "kron m=6" in err


def test_results_are_stored_after_every_shape(ours: Callable[..., None], tmp_path: Path) -> None:
    ours()
    path = tmp_path / "new" / "bench.json"
    suite = tmp_path / "two.json"
    suite.write_text(json.dumps([{"family": "kron", "m": m, "factors": [[2, 2]]} for m in (1, 2)]))
    seen: list[tuple[int, bool]] = []
    replace = Path.replace

    def look(self: Path, target: Path) -> Path:
        data = json.loads(self.read_text())
        seen.append((len(data["rows"]), data["complete"]))
        return replace(self, target)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "replace", look)
        assert run(["bench", str(suite), "--peers", "", "--target", "cpu", "-o", str(path)]) == 0
    assert seen == [(1, False), (2, True)]
    assert json.loads(path.read_text())["suite"] == str(suite)
    assert sorted(p.name for p in path.parent.iterdir()) == ["bench.json"]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--log", "a.jsonl", "--log-dir", "b"], "log and log_dir are not allowed together"),
        (["--dtype", "float12"], "dtype='float12' is not allowed"),
        (["-o", "/proc/no/such.json"], "cannot be written"),
        (["--tune", "-1"], "'--tune'"),
    ],
)
def test_wrong_options_are_one_line(more: list[str], message: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "kron", "--suite", "large", "--target", "cpu", *more]) == 2
    err = capfd.readouterr().err.strip()
    assert message in err and "\n" not in err


def test_a_family_from_outside_is_benched_against_its_baseline(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    plugin = str(Path(__file__).parents[1] / "data" / "toy_family.py")
    suite = tmp_path / "toys.json"
    suite.write_text(json.dumps([{"family": "scale_rows", "shape": [8, 16]}]))
    assert run(["--plugin", plugin, "bench", str(suite), "--target", "cpu", "--json"]) == 0
    out, err = capfd.readouterr()
    [row] = json.loads(out)["rows"]
    assert row["us"] > 0 and row["kernel"]["how"] == "default" and row["peers"] == {"baseline": None}
    assert "names no baseline" in err


def test_a_note_on_many_rows_is_said_once(ours: Callable[..., None], capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    ours()
    suite = tmp_path / "halves.json"
    suite.write_text(json.dumps([{"family": "kron", "m": m, "factors": [[2, 2]], "dtype": "float16"} for m in (1, 2)]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(PEERS["kron"], "fastkron", _not_here)
        assert run(["bench", str(suite), "--peers", "fastkron", "--target", "cpu"]) == 0
    out, err = capfd.readouterr()
    assert out.count("fastkron: not here") == 1 and err.count("fastkron: not here") == 1


def _not_here(*args: object) -> NoReturn:
    raise PeerUnavailable("not here")
