from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest

from kronsched import KSMatmul
from kronsched.bench.peers import PEERS, PeerUnavailable
from kronsched.bench.row import Row
from kronsched.bench.suites import Case
from kronsched.cli.root import run
from kronsched.hardware import resolve_target

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
    assert seen[0] == (1, False) and seen[-1] == (2, True)
    assert json.loads(path.read_text())["suite"] == str(suite)
    assert sorted(p.name for p in path.parent.iterdir()) == ["bench.json"]


@pytest.fixture
def suites(tmp_path: Path) -> Path:
    """A file of two suites, of two shapes and one."""
    path = tmp_path / "suites.json"
    one, two = ([{"family": "ks", "batch": n, "pattern": [1, 2, 2, 2]} for n in batches] for batches in ((3, 4), (5, 3)))
    path.write_text(json.dumps({"one": one, "two": two}))
    return path


def test_shards_of_several_suites_add_up_in_one_file(
    suites: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    timed: list[list[int]] = []

    def fake(cases: list[Case], device: object, peers: object, *, known: dict[str, Row], progress: Any, **more: Any) -> None:
        timed.append([c.workload.batch for c in cases if c.workload.key not in known])  # type: ignore[attr-defined]
        for case in cases:
            progress(known.get(case.workload.key) or Row(case.workload, 1.0, {"bmm": 2.0}, 0.5))

    monkeypatch.setattr("kronsched.bench.grid.run_grid", fake)
    out = tmp_path / "out.json"
    args = [
        "bench",
        str(suites),
        "--suite",
        "one,two",
        "--target",
        "cpu",
        "--peers",
        "bmm",
        "--quick",
        "-o",
        str(out),
        "--resume",
    ]
    for shard in ("1/2", "2/2", "1/1"):
        assert run([*args, "--shard", shard]) == 0
    assert sorted(map(len, timed)) == [0, 1, 2] and sorted(itertools.chain(*timed)) == [3, 4, 5]
    data = json.loads(out.read_text())
    assert sorted(r["workload"]["batch"] for r in data["rows"]) == [3, 4, 5] and data["complete"]
    assert data["best_geomean"] == 2.0 and data["groups"][0]["rows"] == 3
    printed = capfd.readouterr().out
    assert "float32 batch_first d>1" in printed and "best peer / ours" in printed


def test_a_quick_tune_is_told_what_to_beat(suites: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    workload = KSMatmul(batch=3, pattern=(1, 2, 2, 2))
    beat, asked = tmp_path / "before.json", []
    row = Row(workload, 1.0, {"bmm": 2.0, "dense": 1.5}, 0.5)
    beat.write_text(json.dumps({"device": {"name": resolve_target("cpu").name}, "rows": [row.to_dict()]}))
    monkeypatch.setattr("kronsched.bench.grid.run_grid", lambda *args, **more: None)
    monkeypatch.setattr("kronsched.bench.grid_tuning.tune_grid", lambda *args, **more: asked.append((args, more)))
    run(["bench", str(suites), "--target", "cpu", "--quick", "--tune", "7", "--tune-for", "9", "--beat", str(beat)])
    [(args, more)] = asked
    assert [w.batch for w in args[0]] == [3, 4] and args[2] == 7
    assert more["seconds"] == 9 and more["targets"] == {workload.key: 1.5}


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--log", "a.jsonl", "--log-dir", "b"], "--log and --log-dir are not allowed together"),
        (["--dtype", "float12"], "dtype='float12' is not allowed"),
        (["-o", "/proc/no/such.json"], "cannot be written"),
        (["--tune", "-1"], "'--tune'"),
        (["--shard", "3/2"], "'3/2' is not allowed: write I/N"),
        (["--shard", "x"], "'x' is not allowed: write I/N"),
        (["--resume"], "--resume needs --output"),
        (["--for", "1"], "--energy, --for and --resume are only allowed with --quick"),
        (["--quick", "--beat", "r.json"], "--beat is only allowed with --quick and --tune"),
        (["--quick", "--tune", "1", "--beat", "/no/such.json"], "results '/no/such.json' cannot be read"),
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
