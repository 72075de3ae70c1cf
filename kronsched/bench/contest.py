"""Checks contestants on one shape and times them in turn, all with the same clock and on the same inputs.

Read first: `Contest`. No result counts before it was compared with the float64 reference, ours no more than a peer's.
"""

from __future__ import annotations

import contextlib
import gc
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import FunctionType
from typing import TYPE_CHECKING, Any

from kronsched.dtypes import DTYPES
from kronsched.errors import KronschedError
from kronsched.measure.check import max_relative_error, rms
from kronsched.measure.timing import CPU_PLAN, CUDA_PLAN, repeated, sets_for
from kronsched.measure.worker import free_host_bytes

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
        self.joules: dict[str, float] = {}
        self.notes: dict[str, str] = {}

    def _prepare(self) -> None:
        """Make the input sets, the reference of the first, and its root mean square."""
        copies = min(MAX_ROTATION, sets_for(self.workload.min_bytes, self.device, free_bytes(self.device) // 2))
        self._sets = [self.workload.make_inputs(seed, self.device.torch_device) for seed in range(copies)]
        self._reference = self.workload.reference(*self._sets[0])
        self._rms = rms(self._reference)

    def enter(self, name: str, make: MakeCall, slack: float = 1.0) -> None:
        """Let a contestant take part once its result is right.

        make: given inputs, a callable that computes the result.  slack: times the dtype's tolerance is allowed.

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

    def _compared(self, name: str, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(result, reference), or the part of both that a contestant is judged by."""
        return y, self._reference

    def times(self) -> dict[str, float]:
        """Microseconds a call of each contestant: the best of some medians.

        They take turns, so that a throttled clock or a neighbour on the machine hits all of them, and none in all of its rounds.
        On a CPU every other round gives torch one thread: small products are often faster so, and on a busy machine two threads
        that wait for each other by spinning can be hundreds of times slower than one. A peer is judged by what is best for it.
        """
        import torch

        from kronsched.measure.baseline import time_callable

        del self._reference
        on_cpu = self.device.kind == "cpu"
        if not on_cpu:
            self.notes |= {name: UNCAPTURED for name, calls in self._ready.items() if not _captures(calls[0], self.device)}
        best: dict[str, float] = {}
        threads = torch.get_num_threads()
        try:
            for turn in range(ROUNDS[self.device.kind]):
                for name, calls in self._ready.items():
                    if on_cpu:
                        torch.set_num_threads(1 if turn % 2 else threads)
                        time.sleep(SETTLE_S)
                    us = time_callable(calls, self.device, PLANS[self.device.kind])
                    best[name] = min(best.get(name, math.inf), us)
        finally:
            torch.set_num_threads(threads)
        return best


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


def free_bytes(device: Device) -> int:
    """Memory of the device that this process can still get."""
    if device.kind == "cuda":
        import torch

        return int(torch.cuda.mem_get_info(device.index)[0])
    return free_host_bytes()


def release(device: Device) -> None:
    """Give back what a finished contest held, so that the next one, or another process, can have it."""
    gc.collect()
    if device.kind == "cuda":
        import torch

        with contextlib.suppress(RuntimeError):  # a kernel has broken the CUDA context: every later row will say so
            torch.cuda.empty_cache()
