"""Timing of what a user would run without kronsched, in the same fashion as candidates are timed."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from kronsched.measure.timing import TimingPlan, time_calls

if TYPE_CHECKING:
    from kronsched.hardware import Device


def time_callable(
    fn: Callable[[], Any] | Sequence[Callable[[], Any]], device: Device | str, plan: TimingPlan | None = None
) -> float:
    """Median microseconds of one call of `fn`, in this process.

    fn: takes no arguments; or several, equal but for the tensors they hold, to be called in turn so that inputs come from
    memory and not from cache (with one, a baseline may run from cache, which candidates may not).  device: a `Device` or a
    torch device string. On CUDA a graph is captured where possible, so launch cost does not count, as for candidates.
    On a CPU the better of the BLAS library's own number of threads and one thread: small products wait for each other's threads,
    and on a busy machine that has made numpy look 30 times slower than it is.
    Raises what `fn` raises.
    """
    name = device if isinstance(device, str) else device.torch_device
    calls = [fn] if callable(fn) else list(fn)
    if name == "cpu":
        from threadpoolctl import threadpool_limits

        medians = [statistics.median(time_calls(calls, name, plan))]
        with threadpool_limits(limits=1):
            medians.append(statistics.median(time_calls(calls, name, plan)))
        return min(medians)
    with side_stream(name):
        return statistics.median(time_calls(calls, name, plan))


def side_stream(device: str) -> AbstractContextManager[Any]:
    """A context in which torch's current stream can be captured.

    That is the one that is current, or in place of the default stream a new one, ordered after the work queued so far.
    """
    if not device.startswith("cuda"):
        return nullcontext()
    import torch

    current = torch.cuda.current_stream(device)
    if current != torch.cuda.default_stream(device):
        return nullcontext()
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(current)
    return torch.cuda.stream(stream)
