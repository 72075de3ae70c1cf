"""Timing: samples of the time of one call, in microseconds.

Read first: `time_calls`. It is given one callable for each input set and goes round them, so that a call finds its
inputs in memory and not in cache when the sets together exceed the cache (`sets_for` says how many that takes).

* CUDA: a graph of many calls is captured once and replayed back to back between events; a sample is the time of a replay
  divided by its calls. So the CPU's launch cost does not count, and a replay lasts long enough for the events' resolution.
  What cannot be captured is launched call by call between events.
* CPU: the wall clock around one call (around several when one is short).
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kronsched.hardware.device import Device

Call = Callable[[], Any]

AGREE = 1.25
"""Two times of one call agree when neither is more than so many times the other."""
LOOKS = 3
"""Most single calls that are timed to learn how long one takes."""
NO_GLITCH_US = 100_000.0
"""A call this long is not looked at again: what disturbs one for so long was not seen."""

MAX_SETS = 256
"""More sets than this are not made: below 600 KB a set, part of a 150 MB rotation stays in a GPU's L2."""
MAX_FOOTPRINT = {"cuda": 8 << 30, "cpu": 256 << 20}
UNKNOWN_CACHE = {"cuda": 64 << 20, "cpu": 32 << 20}
"""Last-level cache assumed for a device whose description does not say."""


@dataclass(frozen=True)
class TimingPlan:
    """How long to time. The defaults keep a short GPU kernel under 0.15 s and a short CPU kernel under about 0.5 s.

    budget_s: aim for the timed part.  wanted, fewest: samples taken when the budget allows, and taken anyhow (3 when a call
    lasts over a second).  sample_us: aim for the length of one sample.  longest_us: a sample of several calls is not made
    longer than this.  warmup_s: at least this long is run before.
    """

    budget_s: float
    wanted: int
    fewest: int
    sample_us: float
    longest_us: float = 10_000.0
    warmup_s: float = 0.0

    def calls(self, estimate_us: float, sets: int) -> int:
        """Calls a sample: every set once, and more for a short kernel, fewer for a slow one."""
        wanted = max(sets, math.ceil(self.sample_us / estimate_us))
        wanted = math.ceil(wanted / sets) * sets  # whole rounds
        return max(1, min(wanted, int(self.longest_us / estimate_us)))

    def samples(self, sample_us: float) -> int:
        """Samples to take when one lasts `sample_us`."""
        fewest = self.fewest if sample_us < 1e6 else min(self.fewest, 3)
        return max(fewest, min(self.wanted, int(self.budget_s * 1e6 / sample_us)))


CUDA_PLAN = TimingPlan(budget_s=0.1, wanted=50, fewest=7, sample_us=200.0, warmup_s=0.002)
CPU_PLAN = TimingPlan(budget_s=0.3, wanted=100, fewest=3, sample_us=100.0, longest_us=100.0, warmup_s=0.02)


def sets_for(set_bytes: int, device: Device, free_bytes: int) -> int:
    """Input/output sets whose footprint is ≥ 3× the last cache, within `MAX_FOOTPRINT`, half the free memory and `MAX_SETS`."""
    cache = device.l2_bytes if device.kind == "cuda" else int(device.extra.get("l3_bytes") or 0)
    footprint = min(3 * (cache or UNKNOWN_CACHE[device.kind]), MAX_FOOTPRINT[device.kind], free_bytes // 2)
    return max(1, min(MAX_SETS, math.ceil(footprint / max(1, set_bytes))))


def noise(times_us: Sequence[float]) -> float:
    """(75th − 25th percentile) / median; 0.0 for fewer than two samples."""
    if len(times_us) < 2:
        return 0.0
    low, middle, high = statistics.quantiles(times_us, n=4, method="inclusive")
    return (high - low) / middle if middle > 0 else 0.0


def time_calls(calls: Sequence[Call], device: str, plan: TimingPlan | None = None) -> tuple[float, ...]:
    """Samples, microseconds a call, of the callables taken in turn.

    device: a torch device string; on CUDA the work is timed on torch's current stream, which must not be the default stream
    (it cannot be captured). Whatever a callable raises is passed on.
    """
    if device.startswith("cuda"):
        return _time_cuda(calls, device, plan or CUDA_PLAN)
    return _time_cpu(calls, plan or CPU_PLAN)


# -- CPU --------------------------------------------------------------------------------------------


def _time_cpu(calls: Sequence[Call], plan: TimingPlan) -> tuple[float, ...]:
    turn, spent, runs = 0, 0, 0
    while runs < 1 or spent < plan.warmup_s * 1e9:
        spent += _clock_cpu(calls, turn, 1)
        turn, runs = turn + 1, runs + 1
    estimate_us = max(spent / runs / 1e3, 0.05)
    per_sample = plan.calls(estimate_us, 1)
    times = []
    for _ in range(plan.samples(estimate_us * per_sample)):
        times.append(_clock_cpu(calls, turn, per_sample) / 1e3 / per_sample)
        turn += per_sample
    return tuple(times)


def _clock_cpu(calls: Sequence[Call], turn: int, count: int) -> int:
    """Nanoseconds of `count` calls."""
    chosen = [calls[(turn + i) % len(calls)] for i in range(count)]  # outside the clock
    start = time.perf_counter_ns()
    for call in chosen:
        call()
    return time.perf_counter_ns() - start


# -- CUDA -------------------------------------------------------------------------------------------


def _time_cuda(calls: Sequence[Call], device: str, plan: TimingPlan) -> tuple[float, ...]:

    calls[0]()
    sample_us = first_look_us(calls[0])
    replay, count = calls[0], 1
    if sample_us < plan.longest_us:  # else launch gaps and a warm cache are nothing beside the call itself
        count = plan.calls(max(sample_us, 0.5), len(calls))
        replay = repeated(calls, count, device)
        sample_us = once_us(replay)
        wanted = plan.calls(max(sample_us / count, 0.2), len(calls))
        if wanted > 2 * count:  # the first estimate was mostly launch cost
            replay, count = repeated(calls, wanted, device), wanted
            sample_us = once_us(replay)
    for _ in range(int(plan.warmup_s * 1e6 / sample_us)):
        replay()
    marks = [_event() for _ in range(plan.samples(sample_us) + 1)]
    marks[0].record()
    for mark in marks[1:]:
        replay()
        mark.record()
    marks[-1].synchronize()
    return tuple(1e3 * a.elapsed_time(b) / count for a, b in pairwise(marks))


def repeated(calls: Sequence[Call], count: int, device: str) -> Call:
    """One callable that runs `count` calls in turn: on CUDA a graph where capture works, else a loop of calls."""
    chosen = [calls[i % len(calls)] for i in range(count)]

    def loop() -> None:
        for call in chosen:
            call()

    if not device.startswith("cuda"):
        return loop
    import torch

    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        graph.capture_begin()
        try:
            loop()
        finally:
            graph.capture_end()
        graph.replay()
        torch.cuda.synchronize()
    except Exception:
        torch.cuda.synchronize()  # raises again when the kernel itself, not the capture, is at fault
        return loop
    replay: Call = graph.replay
    return replay


def first_look_us(call: Call) -> float:
    """About how long one call takes on the GPU, its launch included: the least of a few looks, two of which agree where they can.

    One is not enough: where the process loses its core between an event and the call, a call of 4 µs looks like one of 4 ms.
    """
    looks = [once_us(call)]
    while len(looks) < LOOKS and min(looks) < NO_GLITCH_US and not agreed(looks):
        looks.append(once_us(call))
    return min(looks)


def once_us(call: Call) -> float:
    """Microseconds of one call between two CUDA events on torch's current stream."""
    start, end = _event(), _event()
    start.record()
    call()
    end.record()
    end.synchronize()
    return 1e3 * float(start.elapsed_time(end))


def agree(a: float, b: float) -> bool:
    """Whether two times are the same but for noise."""
    return max(a, b) <= AGREE * min(a, b)


def agreed(times: Sequence[float]) -> bool:
    """Whether the least of the times is confirmed by another of them."""
    best, *others = sorted(times)
    return bool(others) and agree(best, others[0])


def _event() -> Any:
    import torch

    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
