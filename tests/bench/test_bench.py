from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from kronsched import KronMatmul
from kronsched.bench import run as bench_run
from kronsched.bench.peers import PEERS, PeerUnavailable
from kronsched.bench.run import Row, geomean, run_suite
from kronsched.bench.suites import load_suite, suite_families, suite_names
from kronsched.cli.root import run
from kronsched.dtypes import DTYPES
from kronsched.errors import ArgumentError
from kronsched.hardware import resolve_target
from kronsched.measure.check import max_relative_error
from kronsched.workloads.kron import shuffle

SMALL = KronMatmul(4, ((4, 3), (3, 4)))


class FakeModule:
    measured = True

    def __init__(self, fault: float = 0.0) -> None:
        self.fault = fault

    def __call__(self, x: Any, *factors: Any) -> Any:
        return shuffle(x, factors) + self.fault


def ours(monkeypatch: pytest.MonkeyPatch, module: Callable[..., Any]) -> None:
    monkeypatch.setattr(bench_run, "_module", lambda workload, device, trials: module)
    monkeypatch.setattr(bench_run, "ROUNDS", 2)
    monkeypatch.setattr(bench_run, "SETTLE_S", 0.0)


def test_every_shipped_suite_is_made_of_valid_workloads() -> None:
    assert suite_families() == ["kron"]
    assert suite_names("kron") == ["large", "tall", "real_world", "gaussian_process", "adversarial"]
    for name in suite_names("kron"):
        assert load_suite("kron", name)


def test_dtype_is_for_the_cases_that_name_none() -> None:
    assert {w.dtype for w in load_suite("kron", "large", "float16")} == {"float16"}  # type: ignore[attr-defined]
    assert load_suite("kron", "adversarial", "float16")[0].dtype == "float32"  # type: ignore[attr-defined]


def test_unknown_suite() -> None:
    with pytest.raises(ArgumentError, match="suite='huge' is not allowed: choose one of large, tall"):
        load_suite("kron", "huge")


@pytest.mark.parametrize("name", sorted(PEERS["kron"]))
@pytest.mark.parametrize("workload", [SMALL, KronMatmul(5, ((2, 2), (3, 3), (2, 4)))], ids=lambda w: w.label)
def test_installed_peers_are_right(name: str, workload: KronMatmul) -> None:
    inputs = workload.make_inputs(0)
    try:
        call = PEERS["kron"][name](workload, inputs)
    except PeerUnavailable as e:
        assert "not installed" in str(e) or "no kernel" in str(e)
        if name in ("torch_shuffle", "gpytorch"):  # in the test extra
            raise
        pytest.skip(str(e))
    assert max_relative_error(call().reshape(workload.output.shape), workload.reference(*inputs)) < DTYPES["float32"].tolerance


def test_a_row_has_checked_times(monkeypatch: pytest.MonkeyPatch) -> None:
    ours(monkeypatch, FakeModule())
    [row] = run_suite([SMALL], resolve_target("cpu"), ["torch_shuffle"])
    assert row.error is None and row.us and row.us > 0 and (row.peers["torch_shuffle"] or 0) > 0 and row.floor_us > 0


def test_a_wrong_result_has_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    ours(monkeypatch, FakeModule(fault=1.0))
    [row] = run_suite([SMALL], resolve_target("cpu"), ["torch_shuffle"])
    assert row.us is None and "wrong result" in (row.error or "") and row.peers["torch_shuffle"]


def test_a_failing_or_wrong_peer_is_null_with_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(workload: Any, inputs: Any) -> Any:
        raise RuntimeError("no such\nkernel")

    ours(monkeypatch, FakeModule())
    peers = {"broken": broken, "wrong": lambda w, inputs: lambda: inputs[0].repeat(1, 2)[:, : w.k_out]}
    monkeypatch.setitem(PEERS, "kron", peers)  # type: ignore[arg-type]
    [row] = run_suite([SMALL], resolve_target("cpu"), ["broken", "wrong"])
    assert row.us and row.peers == {"broken": None, "wrong": None}
    assert row.notes["broken"] == "no such kernel" and "wrong result" in row.notes["wrong"]


def test_what_does_not_fit_is_a_row_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    ours(monkeypatch, FakeModule())
    monkeypatch.setattr(bench_run, "_free_bytes", lambda device: 100)
    [row] = run_suite([SMALL], resolve_target("cpu"), ["torch_shuffle"])
    assert row.us is None and row.peers == {"torch_shuffle": None} and "GB" in (row.error or "")


def test_geomean_is_over_rows_that_have_both() -> None:
    rows = [Row(SMALL, us, {"p": p}, 1.0) for us, p in ((1.0, 2.0), (1.0, 8.0), (None, 5.0), (5.0, None))]
    assert geomean(rows, "p") == pytest.approx(4.0)
    assert geomean(rows[2:], "p") is None


def test_command_prints_the_contracts_object(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    ours(monkeypatch, FakeModule())
    args = ["bench", "kron", "--suite", "adversarial", "--limit", "1", "--peers", "torch_shuffle,gpytorch", "--target", "cpu"]
    assert run([*args, "--json"]) == 0
    found = json.loads(capfd.readouterr().out)
    assert set(found) == {"suite", "device", "rows", "geomean", "versions"} and found["suite"] == "kron/adversarial"
    [row] = found["rows"]
    assert {"workload", "us", "peers", "floor_us", "error"} <= set(row) and set(row["peers"]) == {"torch_shuffle", "gpytorch"}
    assert found["geomean"]["torch_shuffle"] == pytest.approx(row["peers"]["torch_shuffle"] / row["us"])
    assert run(args) == 0
    out, err = capfd.readouterr()
    assert "geometric mean of torch_shuffle / kronsched" in out and "kron m=6" in err
