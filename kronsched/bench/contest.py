"""Checks contestants on one shape and times them in turn, all with the same clock and on the same inputs.

Read first: `Contest`. No result counts before it was compared with the float64 reference, ours no more than a peer's.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from types import FunctionType
from typing import TYPE_CHECKING, Any

from kronsched.dtypes import DTYPES
from kronsched.errors import KronschedError
from kronsched.measure.baseline import side_stream
from kronsched.measure.check import max_relative_error, rms
from kronsched.measure.memory import free_bytes
from kronsched.measure.timing import CPU_PLAN, CUDA_PLAN, agree, repeated, sets_for, time_calls

if TYPE_CHECKING:
    import torch

    from kronsched.hardware import Device
    from kronsched.workloads.base import Workload

    Call = Callable[[], Any]
    MakeCall = Callable[[Sequence[torch.Tensor]], Call]

MAX_ROTATION = 64
ROUNDS = {"cuda": 3, "cpu": 8}
PLANS = {"cuda": replace(CUDA_PLAN, budget_s=0.05), "cpu": replace(CPU_PLAN, budget_s=0.15)}
"""Budgets of one round of one contestant; the best round counts. On a CPU, which others may use, many short ones."""
RETIMED = 2
"""How often a time that nothing confirms is taken again."""
FEWEST_ROUNDS, ENOUGH_S = 6, 3.0
"""On a CPU a contestant that took so long in so many rounds is timed no more."""
SETTLE_S = 0.05
"""Rest before each CPU contestant, for the idle threads of the one before to stop spinning."""
CHECK_BYTES = {"cuda": 1 << 29, "cpu": 1 << 24}
"""What comparing a result with its reference needs beside both."""
UNCAPTURED = "launched call by call, as it cannot be captured in a CUDA graph: its time holds launch costs"


class WrongResult(KronschedError):
    """A contestant's result is not what the reference says."""


class Contest:
    """One shape: inputs in as many copies as come from memory and not from cache, the reference, and who takes part."""

    def __init__(self, workload: Workload, device: Device) -> None:
        """Make inputs and reference on the device. Raises MemoryError or torch's out-of-memory error."""
        self.workload, self.device = workload, device
        self._prepare()
        self._ready: dict[str, list[Call]] = {}
        self.errors: dict[str, float] = {}
        self.expected: dict[str, float] = {}
        self.joules: dict[str, float] = {}
        self.notes: dict[str, str] = {}

    def _prepare(self) -> None:
        """Make the input sets, the reference of the first, and its root mean square."""
        copies = min(MAX_ROTATION, sets_for(self.workload.min_bytes, self.device, free_bytes(self.device) // 2))
        self._sets = [self.workload.make_inputs(seed, self.device.torch_device) for seed in range(copies)]
        self._reference = self.workload.reference(*self._sets[0])
        self._rms = rms(self._reference)

    def enter(self, name: str, make: MakeCall, slack: float = 1.0, expected_us: float | None = None) -> None:
        """Let a contestant take part once its result is right.

        make: given inputs, a callable that computes the result.  slack: times the dtype's tolerance is allowed.  expected_us:
        its time on this model of device by an earlier measurement.

        Raises WrongResult, or whatever the contestant raises.
        """
        import torch

        calls = [make(inputs) for inputs in self._sets]
        y = torch.as_tensor(calls[0](), device=self._reference.device)
        error = max_relative_error(*self._compared(name, y.reshape(self._reference.shape)), self._rms)
        slack *= self.workload.slack
        tolerance = slack * (DTYPES[self.workload.output.dtype].tolerance or math.ulp(0.0))  # integers: exact, or infinite slack
        if not error <= tolerance:
            raise WrongResult(f"wrong result: relative error {error:.2g}, {tolerance:.2g} is allowed")
        self.errors[name] = error
        self._ready[name] = calls
        if expected_us is not None:
            self.expected[name] = expected_us

    def _note(self, name: str, text: str) -> None:
        """Add to what is to be known about a contestant's time."""
        known = self.notes.get(name, "")
        if text not in known:
            self.notes[name] = f"{known}; {text}" if known else text

    def _compared(self, name: str, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(result, reference), or the part of both that a contestant is judged by."""
        return y, self._reference

    def times(self) -> dict[str, float]:
        """Microseconds a call of each contestant: the best of some medians.

        They take turns, so that a throttled clock or a neighbour on the machine hits all of them, and none in all of its rounds.
        """
        del self._reference
        return self._times_on_cpu() if self.device.kind == "cpu" else self._times_on_gpu()

    def _times_on_cpu(self) -> dict[str, float]:
        """See `times`. Every other round gives each library one thread, for us and for peers alike.

        Small products are often faster so, and on a busy machine two threads that wait for each other by spinning can be hundreds
        of times slower than one. A peer is judged by what is best for it.
        """
        best = dict.fromkeys(self._ready, math.inf)
        spent = dict.fromkeys(self._ready, 0.0)
        for turn in range(ROUNDS["cpu"]):
            with _one_thread() if turn % 2 else contextlib.nullcontext():
                for name in self._ready:
                    if turn >= FEWEST_ROUNDS and spent[name] > ENOUGH_S:
                        continue
                    time.sleep(SETTLE_S)
                    begin = time.perf_counter()
                    best[name] = min(best[name], self._round(name))
                    spent[name] += time.perf_counter() - begin
        return best

    def _times_on_gpu(self) -> dict[str, float]:
        """See `times`. A best median that neither another round nor the kernel's record confirms is taken again and noted."""
        self.notes |= {name: UNCAPTURED for name, calls in self._ready.items() if not _captures(calls[0], self.device)}
        medians: dict[str, list[float]] = {name: [] for name in self._ready}
        with side_stream(self.device.torch_device):
            for _ in range(ROUNDS["cuda"]):
                for name, found in medians.items():
                    found.append(self._round(name))
            return {name: self._settled(name, found) for name, found in medians.items()}

    def _round(self, name: str) -> float:
        """Median microseconds a call of a contestant."""
        return statistics.median(time_calls(self._ready[name], self.device.torch_device, PLANS[self.device.kind]))

    def _settled(self, name: str, medians: list[float]) -> float:
        """The best median that another one or the record confirms. While that is not the least of them, more rounds are tried."""
        record, again = self.expected.get(name), 0
        while again < RETIMED and _confirmed(medians, record) != min(medians):
            medians.append(self._round(name))
            again += 1
        us = _confirmed(medians, record)
        best = statistics.median(medians) if us is None else us
        if again or (record is not None and not agree(best, record)):
            self._note(name, retimed_note(medians, record, us is not None))
        return best


def _confirmed(medians: Sequence[float], record: float | None) -> float | None:
    """The least median that agrees with the next or with the record."""
    following = [*sorted(medians)[1:], math.inf]
    pairs = zip(sorted(medians), following, strict=True)
    return next((us for us, other in pairs if agree(us, other) or (record is not None and agree(us, record))), None)


def retimed_note(times: Sequence[float], record: float | None, sure: bool) -> str:
    """What is said of a time that was in doubt: all that were taken, and what the record says."""
    text = "timed " + ", ".join(f"{us:.4g}" for us in times) + " µs"
    if record is not None:
        text += f" (its record says {record:.4g})"
    return text + ("" if sure else ": no two agree")


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Torch and the BLAS and OpenMP libraries of this process use one thread."""
    import torch
    from threadpoolctl import threadpool_limits

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with threadpool_limits(limits=1):
            yield
    finally:
        torch.set_num_threads(threads)


def _captures(call: Call, device: Device) -> bool:
    """Whether a CUDA graph of a call can be made; True as well when the call itself fails, which timing will report."""
    import torch

    try:
        with torch.cuda.stream(torch.cuda.Stream(device.torch_device)):  # type: ignore[no-untyped-call]
            call()  # what is set up once, on this stream, is not for the graph
            torch.cuda.synchronize()
            return not isinstance(repeated([call], 1, device.torch_device), FunctionType)
    except Exception:
        return True


def needed_bytes(workload: Workload, device: Device) -> int:
    """About what a contest needs: tensors for us and the peers, and a float64 reference with its own intermediates."""
    elements = max(sum(t.size for t in workload.inputs), workload.output.size)
    return 4 * workload.min_bytes + 24 * elements + CHECK_BYTES[device.kind]
