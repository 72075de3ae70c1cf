"""A contest that costs little: one look at everybody, then rounds for us and for the peers that are near the best.

For suites of hundreds of shapes. A peer that is far behind keeps the time of its first look, which is good enough to say that it
is far behind. Short calls are replayed from one CUDA graph a contestant; long ones need none, as their launches take less time
than they do. Peers are checked on a sample of the result, ours on all of it.

No single reading counts. A look is repeated until two agree; a time that its rounds, or the record of our kernel, do not confirm
is taken again with a new clock, and a note of the row says so.

Read first: `ScreenedContest.times`, then `ScreenedContest._settle`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from types import FunctionType
from typing import TYPE_CHECKING, Any

from kronsched.bench.contest import RETIMED, UNCAPTURED, Contest, retimed_note
from kronsched.measure.baseline import side_stream
from kronsched.measure.energy import NvmlEnergy, device_uuid, joules_per_call
from kronsched.measure.timing import AGREE, LOOKS, TimingPlan, agree, agreed, first_look_us, repeated

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
LOOK = TimingPlan(budget_s=0.0, wanted=3, fewest=3, sample_us=PLAN.sample_us)
"""Of a first look."""
SAMPLE = 1 << 24
"""Elements, spread over the result, that a peer is judged by."""
OURS = "kronsched"
ENERGY_S = 0.3
"""Of calls whose energy is measured, between two moves of the counter."""
BURST_US = 10_000.0
"""Of calls between two looks at the counter."""


@dataclass
class Clock:
    """A contestant's graph, or loop, of `count` calls.

    look_us: of one call by itself.  least_us: a loop whose calls take less than this timed launches.  medians: microseconds a
    call, of each round so far.
    """

    replay: Callable[[], Any]
    count: int
    look_us: float = math.inf
    least_us: float = 0.0
    medians: list[float] = field(default_factory=list)

    @property
    def us(self) -> float:
        """Microseconds a call: the best median, or before the first round what one call took."""
        return min(self.medians, default=self.look_us)

    @property
    def sound(self) -> bool:
        """Whether another round, or of a loop the look before it, confirms the time."""
        return self.us >= self.least_us and agreed([*self.medians, self.look_us])

    def round(self, plan: TimingPlan) -> None:
        """Replay between events."""
        import torch

        guess = 1.0 if math.isinf(self.us) else self.us * self.count
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(plan.samples(guess) + 1)]  # type: ignore[no-untyped-call]
        self.replay()  # clocks and caches are in the state of the samples to come
        marks[0].record()
        for mark in marks[1:]:
            self.replay()
            mark.record()
        marks[-1].synchronize()
        self.medians.append(statistics.median(1e3 * a.elapsed_time(b) / self.count for a, b in pairwise(marks)))


class ScreenedContest(Contest):
    """A `Contest` whose far slower peers are only looked at. On a CPU it is a plain `Contest`."""

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
        with side_stream(self.device.torch_device):
            for name, calls in self._ready.items():
                self.clocks[name] = self._first_look(name, calls)
            for number in range(ROUNDS):
                for name in self.finalists():
                    if number == 0 or self.clocks[name].us * self.clocks[name].count < LONG_US:
                        self.clocks[name].round(PLAN)
            settled: set[str] = set()
            while left := [name for name in self.finalists() if name not in settled]:  # who is near may change
                self._settle(left[0])
                settled.add(left[0])
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

    def _settle(self, name: str) -> None:
        """Take a contestant's time again while neither its record nor an earlier time confirms it; a note says what was seen."""
        record = self.expected.get(name)
        clocks = [self.clocks[name]]
        while len(clocks) <= RETIMED and not _confirmed(clocks, record):
            clock = self._first_look(name, self._ready[name])
            clock.round(PLAN)
            clocks.append(clock)
        if len(clocks) > 1:
            sure = _confirmed(clocks, record)
            self.clocks[name] = clocks[-1] if sure else sorted(clocks, key=lambda clock: clock.us)[len(clocks) // 2]
            self._note(name, retimed_note([clock.us for clock in clocks], record, sure))

    def _first_look(self, name: str, calls: Sequence[Callable[[], Any]]) -> Clock:
        """The clock of a contestant: of a long call a loop, of a short one a graph that is timed a few times."""
        look_us = us = first_look_us(calls[0])
        if us >= UNGRAPHED_US:
            count = 1 if us > LONG_US else PLAN.calls(us, len(calls))
            loop = partial(_loop, [calls[i % len(calls)] for i in range(count)])
            return Clock(loop, count, look_us, UNGRAPHED_US / AGREE)
        for _ in range(LOOKS):  # the call by itself may have been mostly launch: such a graph is too short
            count = PLAN.calls(max(us, 0.2), len(calls))
            replay = repeated(calls, count, self.device.torch_device)
            clock = Clock(replay, count)
            clock.round(LOOK)
            us = clock.us
            if PLAN.calls(max(us, 0.2), len(calls)) <= 2 * count:
                break
        if isinstance(replay, FunctionType):
            self._note(name, UNCAPTURED)
        while len(clock.medians) < LOOKS and not clock.sound:
            clock.round(LOOK)
        return clock


def _confirmed(clocks: Sequence[Clock], record: float | None) -> bool:
    """Whether the last clock is sound and agrees with the record or an earlier sound clock, where there is one or the other."""
    *earlier, last = clocks
    witnesses = [clock.us for clock in earlier if clock.sound] + ([record] if record is not None else [])
    return last.sound and (not witnesses or any(agree(last.us, us) for us in witnesses))


def sampled(y: torch.Tensor, reference: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """About `SAMPLE` elements of both: evenly spread rows, an odd number of them apart."""
    step = max(1, y.numel() // SAMPLE) | 1
    return y[::step], reference[::step]


def _loop(calls: Sequence[Callable[[], Any]]) -> None:
    for call in calls:
        call()


def _replay(clock: Clock, times: int) -> None:
    for _ in range(times):
        clock.replay()
