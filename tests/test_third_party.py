"""A family from outside goes through every door with no other edit: tune, log, show, replay, space, emit, load."""

from __future__ import annotations

import importlib
import json
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import CompletedProcess
from types import ModuleType

import pytest

import kronsched

SOURCE = Path(__file__).parent / "data" / "toy_family.py"
FLAGS = ("--shape", "12x37", "--target", "cpu")
Command = Callable[..., CompletedProcess[str]]


def test_it_is_short() -> None:
    assert len(SOURCE.read_text(encoding="utf-8").splitlines()) < 60


@pytest.fixture
def plugin(tmp_path: Path) -> Path:
    return Path(shutil.copy(SOURCE, tmp_path / "toy_family.py"))


@pytest.fixture
def toy(plugin: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(plugin.parent)
    sys.modules.pop("toy_family", None)  # another test's plugin: its import would register nothing here
    yield importlib.import_module("toy_family")
    sys.modules.pop("toy_family", None)


def test_by_the_api(toy: ModuleType, tmp_path: Path) -> None:
    import numpy as np

    workload = toy.ScaleRows((12, 37))
    log = tmp_path / "toy.jsonl"
    result = kronsched.tune(workload, target="cpu", trials=4, log=log)
    assert result.best is not None and result.trials == 4 and not any(result.failures.values())
    assert [r.status for r in kronsched.replay(log, verify=True)] == ["reproduced"] * 4
    mod = kronsched.load(log, device="cpu")
    assert mod.workload == workload and dict(mod.config) == result.best.config
    x, s = np.random.default_rng(0).normal(size=(12, 37)).astype("float32"), np.arange(12, dtype="float32")
    np.testing.assert_allclose(mod(x, s), x * s[:, None], rtol=1e-6)
    kronsched.export(mod, tmp_path / "out")
    np.testing.assert_allclose(kronsched.load(tmp_path / "out")(x, s), x * s[:, None], rtol=1e-6)


def test_default_log_is_found_by_load(toy: ModuleType) -> None:
    workload = toy.ScaleRows((8, 16))
    result = kronsched.tune(workload, target="cpu", trials=1)
    assert result.best is not None
    mod = kronsched.load(workload, device="cpu")
    assert mod.measured and mod.expected_us == result.best.median_us


def test_by_the_command_line(plugin: Path, tmp_path: Path, kronsched_command: Command) -> None:
    def run(*args: str, name: str = "toy_family") -> dict[str, object]:
        done = kronsched_command("--plugin", name, *args, "--json")
        assert done.returncode == 0, done.stderr
        found: dict[str, object] = json.loads(done.stdout)
        return found

    tuned = run("tune", "scale_rows", *FLAGS, "--trials", "3", "--log", "toy.jsonl")
    assert tuned["workload"] == {"family": "scale_rows", "shape": [12, 37]} and tuned["trials"] == 3 and tuned["best"]
    assert run("show", "toy.jsonl")["records"] == 3
    assert run("replay", "toy.jsonl", "--verify", "--best")["counts"] == {"reproduced": 1}
    [space] = run("space", "scale_rows", *FLAGS)["spaces"]  # type: ignore[misc]
    assert (space["name"], space["size"]) == ("scale_rows_cpu", 4)
    files = run("emit", "toy.jsonl", "-o", "out", name="toy_family.py")["files"]  # a path works as well as a module name
    assert isinstance(files, list) and all((tmp_path / f).is_file() for f in files)


def test_without_the_plugin_the_family_is_unknown(kronsched_command: Command) -> None:
    done = kronsched_command("tune", "scale_rows", *FLAGS)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "kronsched: family='scale_rows' is not allowed: choose one of conv2d, gemm, kron, ks, ks_wgrad\n"


def test_a_log_of_an_unknown_family_is_still_shown(toy: ModuleType, tmp_path: Path, kronsched_command: Command) -> None:
    kronsched.tune(toy.ScaleRows((4, 8)), target="cpu", trials=1, log=tmp_path / "toy.jsonl")
    done = kronsched_command("show", "toy.jsonl")
    assert done.returncode == 0 and "family=scale_rows" in done.stdout
