"""A contest that costs little: one look at everybody, then rounds for us and for the peers that are near the best.

For suites of hundreds of shapes. A peer that is far behind keeps the time of its first look, which is good enough to say that it
is far behind. One CUDA graph a contestant is captured and used throughout.

Read first: `ScreenedContest.times`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from types import FunctionType
from typing import TYPE_CHECKING, Any

from kronsched.bench.contest import UNCAPTURED, Contest
from kronsched.measure.energy import NvmlEnergy, device_uuid, joules_per_call
from kronsched.measure.timing import TimingPlan, repeated

if TYPE_CHECKING:
    from kronsched.hardware import Device
    from kronsched.workloads.base import Workload

NEAR = 1.5
"""Peers within so many times the fastest one's first look go on."""
ROUNDS = 3
LONG_US = 3000.0
"""A call so long is timed in one round and needs no graph: its launch is nothing beside it, and it is alike each time."""
PLAN = TimingPlan(budget_s=0.012, wanted=20, fewest=3, sample_us=200.0)
"""Of one round of one contestant."""
OURS = "kronsched"
ENERGY_S = 0.3
"""Of calls whose energy is measured, between two moves of the counter."""
BURST_US = 10_000.0
"""Of calls between two looks at the counter."""


@dataclass
class Clock:
    """A contestant's graph of `count` calls. us: microseconds a call, the best of the medians so far."""

    replay: Callable[[], Any]
    count: int
    us: float = math.inf

    def round(self, plan: TimingPlan) -> None:
        """Replay between events; keep the median when it is the best."""
        import torch

        guess = 1.0 if math.isinf(self.us) else self.us * self.count
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(plan.samples(guess) + 1)]  # type: ignore[no-untyped-call]
        self.replay()  # clocks and caches are in the state of the samples to come
        marks[0].record()
        for mark in marks[1:]:
            self.replay()
            mark.record()
        marks[-1].synchronize()
        samples = [1e3 * a.elapsed_time(b) / self.count for a, b in pairwise(marks)]
        self.us = min(self.us, statistics.median(samples))


class ScreenedContest(Contest):
    """A `Contest` whose far slower peers are timed once. On a CPU it is a plain `Contest`."""

    def __init__(self, workload: Workload, device: Device, energy: bool = False) -> None:
        """See `Contest`. energy: fill `joules` for us and for the fastest peer."""
        super().__init__(workload, device)
        self.energy = energy
        self.clocks: dict[str, Clock] = {}

    def times(self) -> dict[str, float]:
        """Microseconds a call of each contestant; see `Contest.times`."""
        if self.device.kind == "cpu":
            return super().times()
        import torch

        del self._reference
        stream = torch.cuda.Stream(self.device.torch_device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(self.device.torch_device))
        with torch.cuda.stream(stream):
            for name, calls in self._ready.items():
                self.clocks[name] = self._first_look(name, calls)
            for number in range(ROUNDS):
                for name in self.finalists():
                    if number == 0 or self.clocks[name].us * self.clocks[name].count < LONG_US:
                        self.clocks[name].round(PLAN)
            if self.energy:
                self._measure_joules()
        return {name: clock.us for name, clock in self.clocks.items()}

    def finalists(self) -> list[str]:
        """We and the peers near the fastest peer; decided anew each round, as rounds make times smaller."""
        peers = {name: clock.us for name, clock in self.clocks.items() if name != OURS}
        limit = NEAR * min(peers.values(), default=math.inf)
        return [name for name in self.clocks if name == OURS or peers[name] <= limit]

    def _measure_joules(self) -> None:
        """Joules a call of us and of the two fastest peers (one may be shown for information only)."""
        import torch

        meter = NvmlEnergy(device_uuid(self.device.index))
        peers = sorted((name for name in self.clocks if name != OURS), key=lambda name: self.clocks[name].us)
        for name in [n for n in (OURS, *peers[:2]) if n in self.clocks]:
            clock = self.clocks[name]
            times = max(1, math.ceil(BURST_US / (clock.us * clock.count)))
            wait = partial(torch.cuda.synchronize, self.device.torch_device)
            joules = joules_per_call(meter, partial(_replay, clock, times), times * clock.count, wait, ENERGY_S)
            if joules is not None:
                self.joules[name] = joules

    def _first_look(self, name: str, calls: Sequence[Callable[[], Any]]) -> Clock:
        """The graph of a contestant, timed a few times."""
        import torch

        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        calls[0]()  # torch keeps memory by stream: the first call on this one makes its own
        start.record()
        calls[0]()
        end.record()
        end.synchronize()
        us = 1e3 * start.elapsed_time(end)
        if us > LONG_US:
            return Clock(calls[0], 1, us)
        count = PLAN.calls(max(us, 0.5), len(calls))
        replay = repeated(calls, count, self.device.torch_device)
        if isinstance(replay, FunctionType):
            self.notes[name] = UNCAPTURED
        clock = Clock(replay, count)
        clock.round(TimingPlan(budget_s=0.0, wanted=3, fewest=3, sample_us=PLAN.sample_us))
        return clock


def _replay(clock: Clock, times: int) -> None:
    for _ in range(times):
        clock.replay()
