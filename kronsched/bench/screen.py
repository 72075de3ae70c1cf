"""A contest that costs little: one look at everybody, then rounds for us and for the peers that are near the best.

For suites of hundreds of shapes. A peer that is far behind keeps the time of its first look, which is good enough to say that it
is far behind. Short calls are replayed from one CUDA graph a contestant; long ones need none, as their launches take less time
than they do. Peers are checked on a sample of the result, ours on all of it.

Read first: `ScreenedContest.times`.
"""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from types import FunctionType
from typing import TYPE_CHECKING, Any

from kronsched.bench.contest import UNCAPTURED, Contest
from kronsched.measure.energy import NvmlEnergy, device_uuid, joules_per_call
from kronsched.measure.timing import TimingPlan, repeated

if TYPE_CHECKING:
    import torch

    from kronsched.hardware import Device
    from kronsched.workloads.base import Workload

NEAR = 1.25
"""Peers within so many times the fastest one's first look go on."""
ROUNDS = 2
UNGRAPHED_US = 1000.0
"""A call so long keeps the device busy while the next one is launched; of a shorter one, launching may be all that is timed."""
LONG_US = 3000.0
"""A call so long is timed in one round: it is alike each time."""
PLAN = TimingPlan(budget_s=0.006, wanted=20, fewest=3, sample_us=200.0)
"""Of one round of one contestant."""
SAMPLE = 1 << 24
"""Elements, spread over the result, that a peer is judged by."""
OURS = "kronsched"
ENERGY_S = 0.3
"""Of calls whose energy is measured, between two moves of the counter."""
BURST_US = 10_000.0
"""Of calls between two looks at the counter."""


@dataclass
class Clock:
    """A contestant's graph, or loop, of `count` calls. us: microseconds a call, the best of the medians so far.

    rough: `us` comes from the first look alone.
    """

    replay: Callable[[], Any]
    count: int
    us: float = math.inf
    rough: bool = False

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
        us = statistics.median(1e3 * a.elapsed_time(b) / self.count for a, b in pairwise(marks))
        self.us = us if self.rough else min(self.us, us)
        self.rough = False


class ScreenedContest(Contest):
    """A `Contest` whose far slower peers are timed once. On a CPU it is a plain `Contest`."""

    def __init__(self, workload: Workload, device: Device, energy: bool = False, shown: Sequence[str] = ()) -> None:
        """See `Contest`. energy: fill `joules` for us and for the fastest peer that counts.  shown: the peers that do not."""
        super().__init__(workload, device)
        self.energy, self.shown = energy, shown
        self.clocks: dict[str, Clock] = {}

    def _compared(self, name: str, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return (y, self._reference) if name == OURS else sampled(y, self._reference)

    def times(self) -> dict[str, float]:
        """Microseconds a call of each contestant; see `Contest.times`."""
        if self.device.kind == "cpu":
            return super().times()
        del self._reference
        with _side_stream(self.device):
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
        """Joules a call of us and of the fastest peer that counts."""
        import torch

        meter = NvmlEnergy(device_uuid(self.device.index))
        peers = sorted((n for n in self.clocks if n != OURS and n not in self.shown), key=lambda name: self.clocks[name].us)
        for name in [n for n in (OURS, *peers[:1]) if n in self.clocks]:
            clock = self.clocks[name]
            times = max(1, math.ceil(BURST_US / (clock.us * clock.count)))
            wait = partial(torch.cuda.synchronize, self.device.torch_device)
            joules = joules_per_call(meter, partial(_replay, clock, times), times * clock.count, wait, ENERGY_S)
            if joules is not None:
                self.joules[name] = joules

    def _first_look(self, name: str, calls: Sequence[Callable[[], Any]]) -> Clock:
        """The clock of a contestant: a long call timed once, a short one as a graph that is timed a few times."""
        us = _timed_once(calls[0])
        if us < LONG_US:
            us = min(us, _timed_once(calls[0]))  # the first call on a stream may have waited for memory
        count = 1 if us > LONG_US else PLAN.calls(max(us, 0.5), len(calls))
        if us >= UNGRAPHED_US:
            return Clock(partial(_loop, [calls[i % len(calls)] for i in range(count)]), count, us, rough=True)
        replay = repeated(calls, count, self.device.torch_device)
        if isinstance(replay, FunctionType):
            self.notes[name] = UNCAPTURED
        clock = Clock(replay, count)
        clock.round(TimingPlan(budget_s=0.0, wanted=3, fewest=3, sample_us=PLAN.sample_us))
        return clock


def sampled(y: torch.Tensor, reference: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """About `SAMPLE` elements of both: evenly spread rows, an odd number of them apart."""
    step = max(1, y.numel() // SAMPLE) | 1
    return y[::step], reference[::step]


@contextlib.contextmanager
def _side_stream(device: Device) -> Iterator[None]:
    """A stream that graphs can be captured on: torch's current one, or another when that is the default stream."""
    import torch

    current = torch.cuda.current_stream(device.torch_device)
    if current != torch.cuda.default_stream(device.torch_device):
        yield
        return
    stream = torch.cuda.Stream(device.torch_device)  # type: ignore[no-untyped-call]
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        yield


def _timed_once(call: Callable[[], Any]) -> float:
    """Microseconds of one call between events."""
    import torch

    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    call()
    end.record()
    end.synchronize()
    return float(1e3 * start.elapsed_time(end))


def _loop(calls: Sequence[Callable[[], Any]]) -> None:
    for call in calls:
        call()


def _replay(clock: Clock, times: int) -> None:
    for _ in range(times):
        clock.replay()
