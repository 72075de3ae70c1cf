from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kronsched import KSMatmul
from kronsched.bench import grid, screen
from kronsched.bench.grid import run_grid
from kronsched.bench.row import Row
from kronsched.bench.screen import OURS, Clock, ScreenedContest
from kronsched.bench.suites import Case
from kronsched.errors import UnsupportedError
from kronsched.hardware import PRESETS, resolve_target

CPU = resolve_target("cpu")
CASES = [Case(KSMatmul(batch=n, pattern=(2, 3, 4, 2))) for n in (4, 5, 6)]


@pytest.fixture
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """torch.cuda with a clock that replays move by what they cost. Graphs are loops that can be told from functions.

    launch_us: what a call outside of a graph takes at least.  glitches: microseconds that the next readings are late.
    """
    world = SimpleNamespace(now=0.0, replays={}, launch_us=0.0, in_graph=False, glitches=[])

    class Event:
        def __init__(self, enable_timing: bool) -> None: ...

        def record(self) -> None:
            self.at = world.now

        def synchronize(self) -> None: ...

        def elapsed_time(self, other: Event) -> float:
            late = world.glitches.pop(0) if world.glitches else 0.0
            return (other.at - self.at + late) / 1e3

    class Graph:
        def __init__(self, calls: list[Callable[[], Any]]) -> None:
            self.calls = calls

        def replay(self) -> None:
            world.in_graph = True
            for call in self.calls:
                call()
            world.in_graph = False

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: SimpleNamespace(wait_stream=lambda s: None))
    monkeypatch.setattr(torch.cuda, "stream", lambda s: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda d: None)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda d: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda d=None: None)
    monkeypatch.setattr(screen, "repeated", lambda calls, n, device: Graph([calls[i % len(calls)] for i in range(n)]).replay)
    return world


def _contest(world: SimpleNamespace, us: dict[str, float]) -> ScreenedContest:
    """A contest on the fake clock: each call of a contestant takes its time."""
    contest = ScreenedContest.__new__(ScreenedContest)
    contest.device, contest.energy, contest.shown, contest.clocks = PRESETS["nvidia/h200"], False, (), {}
    contest._reference, contest.notes, contest.joules, contest.expected = torch.zeros(1), {}, {}, {}

    def call(name: str) -> None:
        world.now += us[name] if world.in_graph else max(us[name], world.launch_us)
        world.replays[name] = world.replays.get(name, 0) + 1

    contest._ready = {name: [partial(call, name)] for name in us}
    return contest


def test_far_slower_peers_are_only_looked_at_and_near_ones_in_rounds(fake_cuda: SimpleNamespace) -> None:
    contest = _contest(fake_cuda, {OURS: 100.0, "near": 50.0, "best": 40.0, "far": 4000.0})
    times = contest.times()
    assert times == pytest.approx({OURS: 100.0, "near": 50.0, "best": 40.0, "far": 4000.0})
    assert contest.finalists() == [OURS, "near", "best"]
    assert fake_cuda.replays["far"] == 2 and fake_cuda.replays["near"] > 20


def test_long_calls_are_timed_in_one_round(fake_cuda: SimpleNamespace) -> None:
    contest = _contest(fake_cuda, {OURS: 5000.0, "best": 4000.0})
    assert contest.times() == pytest.approx({OURS: 5000.0, "best": 4000.0})
    assert fake_cuda.replays == {OURS: 6, "best": 6}  # two looks, a warm-up and three samples


def test_a_first_look_without_a_graph_does_not_outlive_the_rounds(fake_cuda: SimpleNamespace) -> None:
    us = {OURS: 1400.0}
    contest = _contest(fake_cuda, us)
    clock = contest._first_look(OURS, contest._ready[OURS])
    assert clock.us == clock.look_us == pytest.approx(1400.0) and not clock.medians
    us[OURS] = 1500.0
    clock.round(screen.PLAN)
    assert clock.us == pytest.approx(1500.0) and clock.sound


# -- readings that are off ------------------------------------------------------------------------------


@pytest.mark.parametrize("late", [[4000.0], [9000.0, 4000.0], [0.0, 90_000.0]])
def test_late_looks_at_a_short_call_do_not_become_its_time(fake_cuda: SimpleNamespace, late: list[float]) -> None:
    """A host that was busy made 3.6 µs into 62.4 µs: what a launch takes, as calls that look long get no graph."""
    fake_cuda.launch_us, fake_cuda.glitches = 62.4, late
    contest = _contest(fake_cuda, {OURS: 3.6, "best": 5.7})
    assert contest.times() == pytest.approx({OURS: 3.6, "best": 5.7})
    assert not contest.notes


@pytest.mark.parametrize("who", [OURS, "best"])
def test_looks_that_are_all_late_are_found_out_in_the_rounds(fake_cuda: SimpleNamespace, who: str) -> None:
    fake_cuda.launch_us, fake_cuda.glitches = 62.4, [4000.0, 4010.0]
    contest = _contest(fake_cuda, {who: 3.6})
    assert contest.times() == pytest.approx({who: 3.6})
    assert contest.notes == {who: "timed 62.4, 3.6 µs"}


def test_a_peer_that_only_seemed_far_is_not_left_behind(fake_cuda: SimpleNamespace) -> None:
    contest = _contest(fake_cuda, {"best": 40.0, OURS: 100.0, "near": 50.0})
    fake_cuda.glitches = [0.0, 0.0, *[9000.0] * 2]  # two looks, then two of the first round's three samples
    assert contest.times() == pytest.approx({OURS: 100.0, "near": 50.0, "best": 40.0})


def test_a_time_that_the_record_denies_is_taken_again_and_noted(fake_cuda: SimpleNamespace) -> None:
    contest = _contest(fake_cuda, {OURS: 100.0, "best": 90.0})
    contest.expected = {OURS: 50.0}
    assert contest.times()[OURS] == pytest.approx(100.0)
    assert contest.notes == {OURS: "timed 100, 100 µs (its record says 50)"}
    contest = _contest(fake_cuda, {OURS: 100.0, "best": 90.0})
    contest.expected = {OURS: 110.0}
    contest.times()
    assert not contest.notes


def test_where_no_two_times_agree_the_middle_one_stays(fake_cuda: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    us = {OURS: 100.0}
    contest = _contest(fake_cuda, us)
    contest.expected = {OURS: 10.0}
    first_look = contest._first_look

    def slower(name: str, calls: Any) -> Clock:
        us[OURS] *= 2
        return first_look(name, calls)

    monkeypatch.setattr(contest, "_first_look", slower)
    assert contest.times()[OURS] == pytest.approx(400.0)
    assert contest.notes == {OURS: "timed 200, 400, 800 µs (its record says 10): no two agree"}


def test_a_sample_is_spread_and_no_multiple_of_two_apart() -> None:
    y = torch.arange(8 * screen.SAMPLE // 1024, dtype=torch.float32)[:, None].expand(-1, 1024)
    part, same = screen.sampled(y, y)
    assert part.shape == same.shape and part.numel() <= screen.SAMPLE
    assert {int(row) % 2 for row in part[:, 0]} == {0, 1} and float(part[-1, 0]) > 0.99 * len(y)
    assert screen.sampled(y[:5], y[:5])[0].shape == y[:5].shape


def test_the_best_round_counts(fake_cuda: SimpleNamespace) -> None:
    clock = Clock(lambda: setattr(fake_cuda, "now", fake_cuda.now + 60.0), 2)
    clock.round(screen.PLAN)
    assert clock.us == pytest.approx(30.0)
    assert not clock.sound  # so far
    clock.replay = lambda: setattr(fake_cuda, "now", fake_cuda.now + 70.0)
    clock.round(screen.PLAN)
    assert clock.us == pytest.approx(30.0) and clock.sound


def test_energy_is_ours_and_the_fastest_peers_that_counts(fake_cuda: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    contest = _contest(fake_cuda, {OURS: 100.0, "near": 50.0, "best": 40.0, "shown": 30.0})
    contest.energy, contest.shown = True, ("shown",)
    asked: list[tuple[int, float]] = []

    def joules(meter: Any, burst: Callable[[], Any], calls: int, wait: Any, seconds: float) -> float:
        before = fake_cuda.now
        burst()
        asked.append((calls, fake_cuda.now - before))
        return 1e-6 * (fake_cuda.now - before) / calls

    monkeypatch.setattr(screen, "joules_per_call", joules)
    monkeypatch.setattr(screen, "device_uuid", lambda index: "GPU-x")
    contest.times()
    assert contest.joules == pytest.approx({OURS: 1e-4, "best": 4e-5})
    assert all(us >= screen.BURST_US for _, us in asked)


# -- the loop -------------------------------------------------------------------------------------------


class Product:
    measured, space, config, origin = False, "fake", {}, "default, not measured"  # type: ignore[var-annotated]
    expected_us = None
    manifest = SimpleNamespace(launches=(1,), constant_launches=lambda names: ())

    def __init__(self, workload: KSMatmul) -> None:
        self.workload = workload

    def __call__(self, *inputs: torch.Tensor) -> torch.Tensor:
        return self.workload.reference(*inputs).float()


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was asked to be built; nothing is."""
    asked: list[str] = []

    class Ahead:
        def __init__(self, cases: list[Case], *args: object) -> None:
            asked.extend(c.workload.key for c in cases)

        def module(self, workload: KSMatmul) -> Product:
            return Product(workload)

    monkeypatch.setattr(grid, "BuiltAhead", Ahead)
    monkeypatch.setitem(screen.Contest.times.__globals__["ROUNDS"], "cpu", 1)
    monkeypatch.setitem(screen.Contest.times.__globals__, "SETTLE_S", 0.0)
    return asked


def test_known_rows_are_kept_and_the_others_timed(built: list[str]) -> None:
    known = Row(CASES[1].workload, 1.0, {}, 1.0)
    seen: list[Row] = []
    said: list[str] = []
    rows = run_grid(CASES, CPU, ["bmm"], known={known.workload.key: known}, progress=seen.append, say=said.append)
    assert len(said) == 1 and said[0].startswith(f"2 shape(s) on {CPU.name}")
    assert rows == seen and rows[1] is known and built == [CASES[0].workload.key, CASES[2].workload.key]
    assert all(r.us and r.peers["bmm"] and r.kernel is not None and r.kernel.how == "default" for r in (rows[0], rows[2]))


def test_no_row_is_started_when_time_is_up(built: list[str]) -> None:
    said: list[str] = []
    assert run_grid(CASES, CPU, ["bmm"], seconds=0.0, say=said.append) == []
    assert said == ["stopped after 0 s: 3 of 3 shapes are left"]


def test_a_device_that_is_not_there_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="not on this machine"):
        run_grid(CASES, PRESETS["nvidia/h200"])
