"""Fixtures for every test: no test reads or writes the user's own directories, and no test needs a GPU unless marked."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kronsched import registry
from kronsched.hardware import cuda_driver


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip `cuda` tests on a machine without a GPU."""
    if cuda_driver.gpus():
        return
    skip = pytest.mark.skip(reason="no CUDA GPU")
    for item in items:
        if "cuda" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(scope="session", autouse=True)
def session_dirs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A home, data and cache directory for everything outside a single test. The artefact cache is shared by all tests of this
    process, so that a kernel is built, and this CPU measured, once."""
    root = tmp_path_factory.mktemp("session")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("HOME", "XDG_DATA_HOME", "XDG_CACHE_HOME", "KRONSCHED_CACHE_DIR"):
            patch.setenv(name, str(root / name.lower()))
        yield


@pytest.fixture(autouse=True)
def user_dirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, session_dirs: None) -> Path:
    """A home and data directory of its own for each test, inherited by subprocesses; returns the data directory."""
    data = tmp_path / "user-data"
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_DATA_HOME", str(data))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user-cache"))
    return data


@pytest.fixture(autouse=True)
def outside_parts() -> Iterator[None]:
    """Forget families, schedules and strategies that a test registered."""
    before = {kind: dict(parts) for kind, parts in registry._outside.items()}
    yield
    for kind, parts in before.items():
        registry._outside[kind].clear()
        registry._outside[kind].update(parts)


@pytest.fixture
def kronsched_command(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs `kronsched ARGS…` in a fresh process, in `tmp_path`, and returns its exit code and texts."""

    def run(*args: str, timeout: float = 240) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "kronsched", *args]
        return subprocess.run(command, capture_output=True, text=True, timeout=timeout, cwd=tmp_path, env=dict(os.environ))

    return run
