"""Timing of what a user would run without kronsched, in the same fashion as candidates are timed."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from contextlib import nullcontext
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
    with _side_stream(name):
        return statistics.median(time_calls(calls, name, plan))


def _side_stream(device: str) -> Any:
    """A context in which torch's current stream is one that can be captured, ordered after the work queued so far."""
    if not device.startswith("cuda"):
        return nullcontext()
    import torch

    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(device))
    return torch.cuda.stream(stream)
