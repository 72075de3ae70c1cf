"""The artefact cache: what is in its key, damage, concurrent processes."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kronsched import KronMatmul, register_schedule
from kronsched.errors import ArgumentError, InvalidConfig
from kronsched.runtime import cache
from kronsched.runtime.cache import artefact_key, get_or_build, is_complete
from kronsched.runtime.manifest import FILE_NAME, Manifest
from tests.runtime.runtime_toys import A100, H200, Parallel, Toy, W, this_cpu


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Directories that were built."""
    seen: list[Path] = []
    real = cache.build_artefact

    def counted(*args: Any, **kwargs: Any) -> Manifest:
        seen.append(args[4])
        return real(*args, **kwargs)

    monkeypatch.setattr(cache, "build_artefact", counted)
    return seen


def test_builds_once_by_object_or_by_name(tmp_path: Path, builds: list[Path]) -> None:
    register_schedule(Toy)
    path = get_or_build(W, Toy(), {"n": 1}, this_cpu(), root=tmp_path)
    assert is_complete(path) and path.parent == tmp_path / "artefacts"
    assert get_or_build(W, "toy_cpu", {"n": 1}, this_cpu(), root=tmp_path) == path
    assert builds == [path]
    assert get_or_build(W, Toy(), {"n": 2}, this_cpu(), root=tmp_path) != path
    assert len(builds) == 2


def test_default_place_is_the_cache_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KRONSCHED_CACHE_DIR", str(tmp_path / "mine"))
    assert get_or_build(W, Toy(), {"n": 1}, this_cpu()).parent == tmp_path / "mine" / "artefacts"


def test_key_covers_everything_the_binary_depends_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def key(w: Any = W, s: Any = Toy, c: Any = None, d: Any = H200, compiler: str = "nvrtc") -> str:
        return artefact_key(w, s(), {"n": 1} if c is None else c, d, compiler)

    keys = [
        key(),
        key(w=KronMatmul(m=17, factors=W.factors)),
        key(w=replace(W, dtype="float64")),
        key(s=Parallel),
        key(c={"n": 2}),
        key(c={"n": True}),
        key(d=A100),
        key(d=replace(H200, shared_per_block=1)),
        key(compiler="nvcc"),
    ]
    assert len(set(keys)) == len(keys)
    assert all(k.startswith("kron-toy_") for k in keys)
    assert key() == key()
    assert key(d=replace(H200, driver="999", index=3)) == key()  # they do not change the binary
    before = key()
    monkeypatch.setattr(cache, "library_versions", lambda: {"kronsched": "9", "tvm": "9"})
    assert key() != before


def test_key_covers_the_code_of_kronsched_and_of_outside_schedules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "outside_toy.py"
    seen = set()
    for knob in (1, 2):
        file.write_text(f"from tests.runtime.runtime_toys import Toy\nclass Mine(Toy):\n    name = 'mine'\n    knob = {knob}\n")
        spec = importlib.util.spec_from_file_location("outside_toy", file)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, "outside_toy", module)
        spec.loader.exec_module(module)
        seen.add(artefact_key(W, module.Mine(), {}, H200, "nvrtc"))
    monkeypatch.setattr(cache, "_package_code", lambda: "edited")
    seen.add(artefact_key(W, module.Mine(), {}, H200, "nvrtc"))
    assert len(seen) == 3


@pytest.mark.parametrize("damage", ["no manifest", "torn manifest", "no binary", "torn binary", "no source"])
def test_a_damaged_artefact_is_built_again(tmp_path: Path, builds: list[Path], damage: str) -> None:
    path = get_or_build(W, Toy(), {"n": 1}, this_cpu(), root=tmp_path)
    kind, what = damage.split()
    file = path / {"manifest": FILE_NAME, "binary": "kernel.so", "source": "kernel.py"}[what]
    content = file.read_bytes()
    file.unlink()
    if kind == "torn":
        file.write_bytes(content[:-20])
    assert not is_complete(path)
    assert get_or_build(W, Toy(), {"n": 1}, this_cpu(), root=tmp_path) == path
    assert is_complete(path)
    assert len(builds) == 2


def test_a_failed_build_is_not_cached(tmp_path: Path) -> None:
    class Fails(Toy):
        name = "toy_fails"
        fail = True

        def apply(self, *args: Any) -> Any:
            if self.fail:
                raise InvalidConfig("not now")
            return super().apply(*args)

    with pytest.raises(InvalidConfig):
        get_or_build(W, Fails(), {"n": 1}, this_cpu(), root=tmp_path)
    Fails.fail = False
    assert is_complete(get_or_build(W, Fails(), {"n": 1}, this_cpu(), root=tmp_path))


def test_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ArgumentError, match=r"cannot be written .*: set KRONSCHED_CACHE_DIR to one that can"):
        get_or_build(W, Toy(), {"n": 1}, this_cpu(), root=tmp_path / "file")
    with pytest.raises(ArgumentError, match="compiler='icc' is not allowed"):
        get_or_build(W, Toy(), {"n": 1}, this_cpu(), "icc", root=tmp_path)


def test_concurrent_processes_build_once(tmp_path: Path) -> None:
    code = """
import sys, time
from pathlib import Path
from kronsched.runtime import cache
from tests.runtime.runtime_toys import *
real = cache.build_artefact
def counted(*args):
    with open(sys.argv[1] + "/builds", "a") as f: f.write("x")
    time.sleep(1)
    return real(*args)
cache.build_artefact = counted
path = cache.get_or_build(W, Toy(), {"n": 1}, this_cpu(), root=Path(sys.argv[1]))
assert cache.is_complete(path)
"""
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    processes = [subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], env=env) for _ in range(3)]
    assert [p.wait(120) for p in processes] == [0, 0, 0]
    assert (tmp_path / "builds").read_text() == "x"
