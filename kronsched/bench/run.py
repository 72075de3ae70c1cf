"""Times a suite: the best known kernel of each shape, and its peers on the same tensors with the same clock.

Read first: `run_suite`. Every result, ours and a peer's, is checked against the reference before its time counts.
"""

from __future__ import annotations

import importlib.metadata
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from kronsched.bench.peers import PEERS
from kronsched.dtypes import DTYPES
from kronsched.errors import KronschedError, UnsupportedError, choose
from kronsched.hardware import Device, floor_us, measure_ceilings
from kronsched.measure.check import max_relative_error
from kronsched.measure.timing import sets_for

if TYPE_CHECKING:
    import torch

    from kronsched.bench.peers import Peer
    from kronsched.runtime.module import TunedModule
    from kronsched.workloads.base import Workload

    Call = Callable[[], torch.Tensor]

MAX_ROTATION = 64
ROUNDS = 4
SETTLE_S = 0.1
"""Rest before each CPU contestant, for the idle threads of the one before to stop spinning."""
OURS = "kronsched"


@dataclass(frozen=True)
class Row:
    """One shape: microseconds of ours and of each peer (None where there is no valid time), the roofline time, and why not."""

    workload: Workload
    us: float | None
    peers: dict[str, float | None]
    floor_us: float
    error: str | None = None
    notes: dict[str, str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """A row of `bench --json`."""
        return {
            "workload": self.workload.to_dict(),
            "us": self.us,
            "peers": self.peers,
            "floor_us": self.floor_us,
            "error": self.error,
            "notes": self.notes,
        }


def run_suite(
    workloads: Sequence[Workload],
    device: Device,
    peers: Sequence[str],
    trials: int = 0,
    progress: Callable[[Row], None] = lambda row: None,
) -> list[Row]:
    """Time each workload on a device of this machine.

    peers: names from `peers.PEERS`.  trials: when above 0, shapes are first tuned with so many trials (into their default logs).
    progress: called with each row as it is done. A shape that fails gets a row that says so. Raises ArgumentError for an unknown
    peer, UnsupportedError for a device that is not here.
    """
    if not device.present:
        raise UnsupportedError(f"target={device.name!r} is not on this machine: nothing can be timed")
    device = measure_ceilings(device)
    rows = []
    for workload in workloads:
        known = PEERS.get(workload.family, {})
        for name in peers:
            if name not in known:
                raise choose("peer", name, list(known))
        row = _row(workload, device, {name: known[name] for name in peers}, trials)
        rows.append(row)
        progress(row)
    return rows


def geomean(rows: Sequence[Row], peer: str) -> float | None:
    """Geometric mean of peer time / our time over the rows that have both (above 1: ours is faster); None without such rows."""
    logs = [math.log(p / r.us) for r in rows if r.us and (p := r.peers.get(peer))]
    return math.exp(sum(logs) / len(logs)) if logs else None


def versions() -> dict[str, str | None]:
    """Versions of everything that was timed; None for what is not installed."""
    found: dict[str, str | None] = {}
    for name in ("kronsched", "apache-tvm", "torch", "numpy", "linear_operator", "pyfastkron"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def _row(workload: Workload, device: Device, peers: dict[str, Peer], trials: int) -> Row:
    floor = floor_us(workload, device)
    need, free = 4 * workload.min_bytes, _free_bytes(device)
    if need > free:
        reason = f"needs about {need / 1e9:.1f} GB for tensors, reference and peers; {free / 1e9:.1f} GB are free"
        return Row(workload, None, dict.fromkeys(peers), floor, reason)
    # Inputs are rotated as the tuner does, so that they come from memory and not from cache.
    copies = min(MAX_ROTATION, sets_for(workload.min_bytes, device, free // 2))
    sets = [workload.make_inputs(seed, device.torch_device) for seed in range(copies)]
    reference = workload.reference(*sets[0])
    ready: dict[str, list[Call]] = {}
    notes: dict[str, str] = {}
    error = None
    try:
        module = _module(workload, device, trials)
        ready[OURS] = _checked([partial(module, *s) for s in sets], reference, workload)
        if not module.measured:
            notes[OURS] = "not tuned: a predicted or default config"
    except KronschedError as e:
        error = str(e)
    for name, peer in peers.items():
        try:
            ready[name] = _checked([peer(workload, s) for s in sets], reference, workload)
        except Exception as e:  # a peer may fail in any way; that is a finding, not our failure
            notes[name] = " ".join(str(e).split())[:300]
    times = _time(ready, device)
    return Row(workload, times.get(OURS), {name: times.get(name) for name in peers}, floor, error, notes)


def _checked(calls: list[Call], reference: torch.Tensor, workload: Workload) -> list[Call]:
    """The calls, once the first one's result is right; KronschedError when it is not."""
    error = max_relative_error(calls[0]().reshape(reference.shape), reference)
    tolerance = DTYPES[workload.output.dtype].tolerance
    if not error <= tolerance:
        raise KronschedError(f"wrong result: relative error {error:.2g}, {tolerance:.2g} is allowed")
    return calls


def _time(ready: dict[str, list[Call]], device: Device) -> dict[str, float]:
    """Microseconds a call of each contestant: the best of `ROUNDS` medians.

    They take turns, so that a throttled clock or a neighbour on the machine hits all of them, and none in all of its rounds. On a
    CPU every other round gives torch one thread: small products are often faster so, and on a busy machine two threads that wait
    for each other by spinning can be hundreds of times slower than one. A peer is judged by what is best for it.
    """
    import torch

    from kronsched.measure.baseline import time_callable

    best: dict[str, float] = {}
    threads = torch.get_num_threads()
    try:
        for turn in range(ROUNDS):
            for name, calls in ready.items():
                if device.kind == "cpu":
                    torch.set_num_threads(1 if turn % 2 else threads)
                    time.sleep(SETTLE_S)
                best[name] = min(best.get(name, math.inf), time_callable(calls, device))
    finally:
        torch.set_num_threads(threads)
    return best


def _module(workload: Workload, device: Device, trials: int) -> TunedModule:
    import kronsched
    from kronsched.records import find_best

    if trials > 0 and find_best(workload, device) is None:
        kronsched.tune(workload, target=device.torch_device, trials=trials)
    return kronsched.load(workload, device=device.torch_device)


def _free_bytes(device: Device) -> int:
    if device.kind == "cuda":
        import torch

        return int(torch.cuda.mem_get_info(device.index)[0])
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
