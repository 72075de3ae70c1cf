"""How long and over how many input sets is timed, and what comes out; energy."""

from __future__ import annotations

import sys
import time
from dataclasses import replace

import pytest

from kronsched.hardware import PRESETS, resolve_target
from kronsched.measure import energy, timing
from kronsched.measure.baseline import time_callable
from kronsched.measure.energy import NvmlEnergy, joules_per_call
from kronsched.measure.timing import CPU_PLAN, CUDA_PLAN, MAX_SETS, UNKNOWN_CACHE, TimingPlan, noise, sets_for, time_calls

H200 = PRESETS["nvidia/h200"]
PLENTY = 100 << 30


def test_sets_exceed_three_times_the_cache() -> None:
    for set_bytes in (1 << 20, 7 << 20, 40 << 20):
        sets = sets_for(set_bytes, H200, PLENTY)
        assert 3 * H200.l2_bytes <= sets * set_bytes < 3 * H200.l2_bytes + set_bytes
    assert sets_for(1 << 30, H200, PLENTY) == 1
    assert sets_for(1, H200, PLENTY) == MAX_SETS
    assert sets_for(8 << 20, H200, 32 << 20) == 2  # half the free memory
    assert sets_for(64 << 20, H200, 0) == 1


def test_sets_of_a_cpu_follow_its_last_level_cache() -> None:
    cpu = replace(resolve_target("cpu"), extra={"l3_bytes": 10 << 20})
    assert sets_for(1 << 20, cpu, PLENTY) == 30
    assert sets_for(1 << 20, replace(cpu, extra={"l3_bytes": 512 << 20}), PLENTY) == 256  # capped footprint
    assert sets_for(1 << 20, replace(cpu, extra={}), PLENTY) == 3 * UNKNOWN_CACHE["cpu"] >> 20


@pytest.mark.parametrize(
    ("estimate_us", "sets", "calls"),
    [(2.0, 1, 100), (2.0, 75, 150), (300.0, 2, 2), (300.0, 1, 1), (1000.0, 64, 10), (50_000.0, 4, 1)],
)
def test_calls_of_a_graph(estimate_us: float, sets: int, calls: int) -> None:
    assert CUDA_PLAN.calls(estimate_us, sets) == calls


def test_sample_counts_keep_the_budget_and_the_minimum() -> None:
    assert CUDA_PLAN.samples(200.0) == 50
    assert CUDA_PLAN.samples(5_000.0) == 20
    assert CUDA_PLAN.samples(100_000.0) == 7
    assert CUDA_PLAN.samples(2e6) == 3
    assert CPU_PLAN.samples(10_000.0) == 30
    assert CPU_PLAN.samples(5e6) == 3
    # A short kernel's timing stays within 0.15 s.
    for sample_us in (200.0, 1_000.0, 10_000.0):
        assert CUDA_PLAN.samples(sample_us) * sample_us <= 0.15e6


@pytest.mark.parametrize(
    ("readings", "us", "taken"),
    [
        ([3.0, 3.1], 3.0, 2),
        ([4000.0, 3.0, 3.1], 3.0, 3),  # the host was busy
        ([4000.0, 3.0, 9000.0], 3.0, 3),
        ([20_000.0, 19_000.0], 19_000.0, 2),
        ([200_000.0], 200_000.0, 1),
    ],
)
def test_one_late_reading_does_not_say_how_long_a_call_takes(
    monkeypatch: pytest.MonkeyPatch, readings: list[float], us: float, taken: int
) -> None:
    left = list(readings)
    monkeypatch.setattr(timing, "once_us", lambda call: left.pop(0))
    assert timing.first_look_us(lambda: None) == us and len(readings) - len(left) == taken


def test_noise() -> None:
    assert noise([10.0, 10.0, 10.0]) == 0.0
    assert noise([8.0, 9.0, 10.0, 11.0, 12.0]) == pytest.approx(0.2)
    assert noise([5.0]) == 0.0


def test_cpu_calls_are_timed_and_taken_in_turn() -> None:
    seen = []

    def call(i: int) -> None:
        seen.append(i)
        time.sleep(0.002)

    calls = [lambda i=i: call(i) for i in range(3)]
    times = time_calls(calls, "cpu", TimingPlan(budget_s=0.05, wanted=100, fewest=3, sample_us=100, longest_us=100))
    assert 3 <= len(times) <= 30
    assert sorted(times)[0] >= 2000
    assert sorted(times)[len(times) // 2] < 20_000
    assert seen == [i % 3 for i in range(len(seen))]
    assert len(seen) >= len(times)


def test_short_cpu_calls_are_sampled_many_at_a_time() -> None:
    count = 0

    def call() -> None:
        nonlocal count
        count += 1

    times = time_calls([call], "cpu", TimingPlan(budget_s=0.02, wanted=20, fewest=3, sample_us=100, longest_us=100))
    assert all(0 < t < 100 for t in times)
    assert count > 10 * len(times)


def test_an_error_is_passed_on() -> None:
    with pytest.raises(ZeroDivisionError):
        time_calls([lambda: 1 // 0], "cpu")


def test_baseline_median() -> None:
    plan = TimingPlan(budget_s=0.02, wanted=5, fewest=3, sample_us=100)
    assert 1000 <= time_callable(lambda: time.sleep(0.001), "cpu", plan) < 20_000
    called = []
    time_callable([lambda: called.append(0), lambda: called.append(1)], resolve_target("cpu"), plan)
    assert called[:4] == [0, 1, 0, 1]


class Counter:
    """An energy counter that always shows the same."""

    def __init__(self, joules: float | None) -> None:
        self.joules, self.started = joules, 0

    def start(self) -> None:
        self.started += 1

    def stop(self) -> float | None:
        return self.joules


def test_energy_is_divided_by_the_calls() -> None:
    bursts = []
    meter = Counter(12.0)
    joules = joules_per_call(meter, lambda: bursts.append(0), 4, lambda: time.sleep(0.001), seconds=0.02)
    assert meter.started == 1
    assert joules == pytest.approx(12.0 / (4 * (len(bursts) - 1)))  # one burst is warm-up
    assert joules_per_call(Counter(None), lambda: None, 1, lambda: None, seconds=0.0) is None


class Ticking(Counter):
    """A counter that moves by 5 joules with every third burst."""

    def __init__(self) -> None:
        super().__init__(None)
        self.bursts = 0

    def burst(self) -> None:
        self.bursts += 1

    def read(self) -> float | None:
        return 5.0 * (self.bursts // 3)


def test_energy_counts_between_two_moves_of_the_counter() -> None:
    meter = Ticking()
    joules = joules_per_call(meter, meter.burst, 4, lambda: time.sleep(0.001), seconds=0.02)
    assert joules == pytest.approx(5.0 / 12)  # however the window lies to the moves
    assert meter.bursts % 3 == 0


def test_a_counter_that_stands_still_or_is_not_there_tells_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(energy, "STUCK_S", 0.01)
    meter = Ticking()
    assert joules_per_call(meter, lambda: None, 1, lambda: time.sleep(0.001), seconds=0.01) is None
    monkeypatch.setattr(meter, "read", lambda: None)
    assert joules_per_call(meter, meter.burst, 1, lambda: None, seconds=0.0) is None


def test_no_nvml_means_no_energy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    meter = NvmlEnergy()
    meter.start()
    assert meter.stop() is None


def test_an_unknown_gpu_has_no_energy() -> None:
    meter = NvmlEnergy("GPU-00000000-0000-0000-0000-000000000000")
    meter.start()
    assert meter.stop() is None
