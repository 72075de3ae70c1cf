"""A stand-in for our module, so that tests of the bench build no kernel."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from kronsched.bench import contest
from kronsched.bench import run as bench_run
from kronsched.workloads.kron import shuffle


class FakeModule:
    measured = True
    space = "kron_fake"
    config: dict[str, int] = {"rows": 2}  # noqa: RUF012
    origin = "log"
    expected_us: float | None = None
    manifest = SimpleNamespace(launches=(1, 2), constant_launches=lambda names: ())
    workload = SimpleNamespace(weight_names=())

    def __init__(self, fault: float = 0.0) -> None:
        self.fault = fault

    def __call__(self, x: Any, *factors: Any) -> Any:
        return shuffle(x, factors) + self.fault


@pytest.fixture
def ours(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Called with a fault: our kernel's result is off by that much. Timing is short and nothing is built before."""

    def use(fault: float = 0.0) -> None:
        monkeypatch.setattr(bench_run, "load_module", lambda workload, device, logs: FakeModule(fault))
        monkeypatch.setattr(bench_run, "prebuild", lambda *args: None)
        monkeypatch.setitem(contest.ROUNDS, "cpu", 2)
        monkeypatch.setattr(contest, "SETTLE_S", 0.0)

    return use
