"""Measuring on a cluster: `kronsched worker`s on many hosts, each with the devices of its machine.

    batch ──► one queue ──► a thread a worker takes some, sends them, hands out each result as it comes
                 ▲              │ the worker dies, hangs or says nothing:
                 └──────────────┘ what it had not answered goes back; a candidate that lost two workers is a crash

Chunks become smaller towards the end of a batch, so that no worker holds up the others for long. A worker that was lost is called
again at the next batch.

Why this and not Ray or TVM RPC. What has to travel is a config and a few numbers; what has to run is our own builder and our own
runner, with its guarded buffers, correctness gate and processes that are killed. TVM's RPC server runs a module, not that gate,
and its tracker has no notion of a lost candidate. Ray would start our worker as an actor a host and add nothing to it but its own
daemons, a wheel of 79 MB (2.60.0), one version of Python and Ray on all hosts, and pickled code in messages. Python's own
`multiprocessing.connection` gives authenticated frames; the rest is this file.

Read first: `Farm`, then `FarmMeasurer.measure`.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

from kronsched.errors import ArgumentError
from kronsched.hardware.device import Device
from kronsched.measure.base import BuildResult, Measured
from kronsched.measure.crew import check_same_model
from kronsched.measure.farm_protocol import (
    PROTOCOL,
    Channel,
    FarmError,
    candidate_to_json,
    cluster_key,
    connect,
    device_from_json,
    measured_from_json,
    parse_address,
)
from kronsched.measure.runner import MeasureError
from kronsched.schedules.base import Schedule
from kronsched.space import Candidate
from kronsched.workloads.base import Workload

MAX_LOSSES = 2
"""Workers that may be lost with one candidate; then it is recorded as a crash."""
PREPARE_S = 300.0
"""What a worker may take before its first result: for its processes, inputs and references."""
Request = dict[str, Any]


class Remote:
    """One worker: its address, its devices, and the connection while there is one."""

    def __init__(self, address: tuple[str, int], key: bytes) -> None:
        """Nothing is connected yet."""
        self.name = f"{address[0]}:{address[1]}"
        self._address, self._key = address, key
        self._channel: Channel | None = None
        self._opened: Request | None = None
        self.devices: tuple[Device, ...] = ()
        self.slots = 1

    def connect(self) -> None:
        """Call it and learn its devices; FarmError when it is not there, busy, or of another version."""
        if self._channel is not None:
            return
        channel = connect(self._address, self._key)
        try:
            hello = channel.receive()
            if hello["kind"] == "failed":
                raise FarmError(f"worker {self.name}: {hello['message']}")
            if hello.get("protocol") != PROTOCOL:
                theirs = f"{hello.get('version')} (protocol {hello.get('protocol')})"
                raise FarmError(f"worker {self.name} runs kronsched {theirs}; protocol {PROTOCOL} is needed")
            devices = tuple(device_from_json(d) for d in hello["devices"])
            if self.devices and devices[0].to_dict() != self.devices[0].to_dict():
                raise FarmError(f"worker {self.name} came back with other devices")
            self.devices = (devices[0], *devices[1:])  # at least one
        except (LookupError, TypeError):
            channel.close()
            raise FarmError(f"worker {self.name} does not say what it has") from None
        except FarmError:
            channel.close()
            raise
        self._channel, self._opened = channel, None

    def open(self, request: Request) -> None:
        """Make it ready for a workload; MeasureError when it cannot be."""
        self.connect()
        if self._opened == request:
            return
        assert self._channel is not None
        self._channel.send("open", **request)
        answer = self._next("opened", PREPARE_S)
        self.slots, self._opened = max(1, int(answer["slots"])), request

    def measure(self, candidates: Sequence[Candidate], patience_s: float) -> Iterator[tuple[int, Measured]]:
        """(position, result) as they come. FarmError when it is lost, or has no result for so long."""
        assert self._channel is not None
        self._channel.send("measure", candidates=[candidate_to_json(c) for c in candidates])
        left = set(range(len(candidates)))
        while True:
            message = self._next(None, patience_s)
            if message["kind"] == "done" and not left:
                return
            try:
                index = int(message["index"])
                left.remove(index)
                yield index, measured_from_json(candidates[index], message)
            except (LookupError, TypeError, ValueError) as e:
                raise FarmError(f"worker {self.name} sent a wrong result: {type(e).__name__}: {e}") from None

    def hang_up(self) -> None:
        """From another thread: the one that uses the connection finds it ended."""
        channel = self._channel
        if channel is not None:
            channel.hang_up()

    def close(self) -> None:
        """Say good-bye; the worker is then free for others."""
        channel, self._channel, self._opened = self._channel, None, None
        if channel is not None:
            with contextlib.suppress(FarmError):
                channel.send("close")
            channel.close()

    def _next(self, kind: str | None, patience_s: float) -> dict[str, Any]:
        """The next message that is more than a sign of life."""
        assert self._channel is not None
        start = time.monotonic()
        while True:
            message = self._channel.receive()
            if message["kind"] == "failed":
                raise MeasureError(f"worker {self.name}: {message.get('message')}")
            if message["kind"] != "alive":
                if kind is not None and message["kind"] != kind:
                    raise FarmError(f"worker {self.name} sent {message['kind']!r} where {kind!r} is needed")
                return message
            if time.monotonic() - start > patience_s:
                raise FarmError(f"worker {self.name} lives but has had no result for {patience_s:g} s")


class Farm:
    """The workers of a cluster, all reached, with devices of one model.

    addresses: such as "gpu-node-1:7433".  key_file: None is this user's.
    Raises ArgumentError for a worker that is not there or whose devices are not like those of the first.
    """

    def __init__(self, addresses: Sequence[str], key_file: str | os.PathLike[str] | None = None) -> None:
        """Call every worker."""
        key = cluster_key(key_file)
        places = [parse_address(text) for text in addresses]
        if twice := next((p for p in places if places.count(p) > 1), None):
            raise ArgumentError(f"cluster: {twice[0]}:{twice[1]} is named twice")
        self.remotes = [Remote(place, key) for place in places]
        try:
            for remote in self.remotes:
                remote.connect()
                for device in remote.devices:
                    check_same_model(self.device, device, f"worker {remote.name}")
        except FarmError as e:
            self.close()
            raise ArgumentError(f"cluster: {e}") from None
        except BaseException:
            self.close()
            raise

    @property
    def device(self) -> Device:
        """What all its devices are like; not present on this machine."""
        return self.remotes[0].devices[0]

    def measurer(self, workload: Workload, schedules: Sequence[Schedule], **options: Any) -> FarmMeasurer:
        """A measurer for one workload; see `FarmMeasurer`."""
        return FarmMeasurer(self, workload, schedules, **options)

    def hang_up(self) -> None:
        """End every connection, also one that another thread waits for."""
        for remote in self.remotes:
            remote.hang_up()

    def close(self) -> None:
        """Leave every worker."""
        for remote in self.remotes:
            remote.close()


@dataclass
class _Batch:
    """What is left of one `measure` call. waiting: positions; the lock is the condition's."""

    candidates: Sequence[Candidate]
    waiting: deque[int]
    changed: threading.Condition = field(default_factory=threading.Condition)
    losses: dict[int, int] = field(default_factory=dict)
    open: int = 0
    stopped: bool = False


class FarmMeasurer:
    """A `Measurer` whose builders and runners are the workers of a farm.

    schedules: known by name to the workers.  builders: not allowed, a worker knows its cores.  The other options are those of
    `LiveMeasurer`.
    """

    def __init__(
        self,
        farm: Farm,
        workload: Workload,
        schedules: Sequence[Schedule],
        *,
        compiler: str = "nvrtc",
        builders: int | None = None,
        build_timeout_s: float = 60.0,
        run_timeout_s: float = 20.0,
        seed: int = 0,
        energy: bool = False,
    ) -> None:
        """Open the workload on every worker."""
        if builders is not None:
            raise ArgumentError("builders is not allowed with a cluster: each worker has its own, see `kronsched worker`")
        self._farm = farm
        options = {"compiler": compiler, "build_timeout_s": build_timeout_s, "run_timeout_s": run_timeout_s, "seed": seed}
        names = [s.name for s in schedules]
        self._request = {"workload": workload.to_dict(), "schedules": names, "energy": energy, "options": options}
        self._reasons: list[str] = []
        """Why workers were lost in the present batch."""
        self._patience_s = PREPARE_S + build_timeout_s + 2 * run_timeout_s
        self._each(lambda remote: remote.open(self._request))
        self.parallel = sum(r.slots for r in farm.remotes)
        """Candidates that a batch should hold at least to keep every worker busy."""

    def measure(self, batch: Sequence[Candidate]) -> Iterator[Measured]:
        """One result a candidate, in order of completion. MeasureError when no worker is left."""
        self._reasons.clear()
        work = _Batch(batch, deque(range(len(batch))), open=len(batch))
        results: SimpleQueue[Measured | None] = SimpleQueue()
        threads = [threading.Thread(target=self._serve, args=(r, work, results), daemon=True) for r in self._farm.remotes]
        for thread in threads:
            thread.start()
        ended, given = 0, 0
        try:
            while given < len(batch):
                found = results.get()
                if found is not None:
                    given += 1
                    yield found
                    continue
                ended += 1  # a worker was lost
                if ended == len(threads):
                    raise MeasureError("no worker of the cluster is left: " + "; ".join(self._reasons))
        finally:
            with work.changed:
                work.stopped = True
                work.changed.notify_all()
            if given < len(batch):
                self._farm.hang_up()  # what the workers still do for us is dropped
            for thread in threads:
                thread.join()
            if given < len(batch):
                self._farm.close()

    def close(self) -> None:
        """Leave the workers."""
        self._farm.close()

    # -- one thread a worker ------------------------------------------------------------------------

    def _each(self, call: Any) -> None:
        """Call every worker at once; the first error is raised."""
        errors: list[BaseException] = []

        def guarded(remote: Remote) -> None:
            try:
                call(remote)
            except (FarmError, MeasureError) as e:
                errors.append(e)

        threads = [threading.Thread(target=guarded, args=(r,), daemon=True) for r in self._farm.remotes]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise MeasureError(str(errors[0]))

    def _serve(self, remote: Remote, work: _Batch, results: SimpleQueue[Measured | None]) -> None:
        """Take chunks until the batch is done or the worker is lost; then say so with None."""
        chunk: dict[int, None] = {}
        try:
            remote.open(self._request)  # one that was lost is called again
            while chunk := dict.fromkeys(self._take(work, remote.slots)):
                order = list(chunk)
                for position, measured in remote.measure([work.candidates[i] for i in order], self._patience_s):
                    del chunk[order[position]]
                    self._answer(work, results, measured)
        except (FarmError, MeasureError) as e:
            remote.close()
            self._give_back(work, results, list(chunk), e)
            if not work.stopped:
                self._reasons.append(str(e))
                results.put(None)

    def _take(self, work: _Batch, slots: int) -> list[int]:
        """Some of what waits, fewer towards the end; empty once every candidate has its result."""
        with work.changed:
            while not work.waiting and work.open and not work.stopped:
                work.changed.wait()  # another worker may be lost and give back what it has
            if work.stopped or not work.open:
                return []
            share = -(-len(work.waiting) // (2 * len(self._farm.remotes)))
            return [work.waiting.popleft() for _ in range(max(1, min(slots, share)))]

    def _answer(self, work: _Batch, results: SimpleQueue[Measured | None], measured: Measured) -> None:
        results.put(measured)
        with work.changed:
            work.open -= 1
            work.changed.notify_all()

    def _give_back(self, work: _Batch, results: SimpleQueue[Measured | None], positions: Sequence[int], why: Exception) -> None:
        """What a lost worker had not answered: back to the queue, in front, or a crash when it lost too many workers."""
        if positions and not work.stopped:
            warnings.warn(f"{len(positions)} candidates go back to the queue: {why}", RuntimeWarning, stacklevel=2)
        for position in reversed(positions):
            with work.changed:
                # A worker that says what it cannot do was not lost by a candidate.
                work.losses[position] = work.losses.get(position, 0) + isinstance(why, FarmError)
                if work.losses[position] < MAX_LOSSES:
                    work.waiting.appendleft(position)
                    work.changed.notify_all()
                    continue
            text = f"{MAX_LOSSES} workers were lost with it: {why}"
            self._answer(work, results, Measured(work.candidates[position], BuildResult("crash", text)))
