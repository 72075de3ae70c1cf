"""A worker of a cluster: a process that measures for one tuner at a time, on the devices of its machine.

    accept ─ handshake ─ hello ─ open ─ measure … done ─ … ─ (the tuner goes) ─ next one

Read first: `Worker.serve`, then `_Session`. Builders and runners are the same as without a cluster (`LiveMeasurer`): a candidate
that hangs or crashes ends as a status, and the worker goes on.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, Listener
from typing import Any

from kronsched import registry
from kronsched.errors import ArgumentError, KronschedError
from kronsched.hardware.device import Device
from kronsched.measure.crew import Crew, as_devices
from kronsched.measure.farm_protocol import (
    ALIVE_S,
    PROTOCOL,
    Channel,
    FarmError,
    accept,
    candidate_from_json,
    device_to_json,
    measured_to_json,
)
from kronsched.measure.live import LiveMeasurer

Say = Callable[[str], None]


class Worker:
    """Serves tuners on an address, one after another; a second one at the same time is told to come back.

    address: (host, port), port 0 for any.  key: shared with the tuners.  devices: of one model.  builders: processes, None for
    the usable cores.  say: gets a line for each event.
    """

    def __init__(
        self, address: tuple[str, int], key: bytes, devices: Sequence[Device], builders: int | None = None, say: Say = print
    ) -> None:
        """Listen; `serve` does the rest."""
        self.devices, self._key, self._say = as_devices(devices), key, say
        self._crew = Crew(self.devices, builders)
        self._busy = threading.Lock()
        try:
            self._listener = Listener(address, "AF_INET6" if ":" in address[0] else "AF_INET", backlog=16)
        except OSError as e:
            raise ArgumentError(f"address {address[0]}:{address[1]} cannot be listened on: {e.strerror or e}") from None

    @property
    def port(self) -> int:
        """The port it listens on."""
        address: Any = self._listener.address
        return int(address[1])

    def serve(self) -> None:
        """For ever, until `close`."""
        while True:
            try:
                connection = self._listener.accept()
            except OSError:
                return  # closed
            peer = f"tuner {self._listener.last_accepted}"
            threading.Thread(target=self._answer, args=(connection, peer), daemon=True).start()

    def close(self) -> None:
        """Stop listening and end the worker processes."""
        self._listener.close()
        self._crew.close()

    def _answer(self, connection: Connection, peer: str) -> None:
        """One tuner, from its call to its end. A stranger without the key gets no further than the handshake."""
        try:
            channel = accept(connection, self._key, peer)
        except FarmError as e:
            self._say(str(e))
            return
        with contextlib.closing(channel):
            if not self._busy.acquire(blocking=False):
                with contextlib.suppress(FarmError):
                    channel.send("failed", message="it is measuring for another tuner")
                return
            try:
                self._say(f"{peer} came")
                _Session(channel, self.devices, self._crew).run()
            except FarmError as e:
                self._say(str(e))
            finally:
                self._busy.release()


class _Session:
    """What one tuner asks for."""

    def __init__(self, channel: Channel, devices: Sequence[Device], crew: Crew) -> None:
        self._channel, self._devices, self._crew = channel, devices, crew
        self._live: LiveMeasurer | None = None
        self._over = threading.Event()

    def run(self) -> None:
        """Until the tuner goes. Another thread shows all the time that this worker is there."""
        import kronsched

        devices = [device_to_json(d) for d in self._devices]
        self._channel.send("hello", protocol=PROTOCOL, version=kronsched.__version__, devices=devices)
        threading.Thread(target=self._show_life, daemon=True).start()
        try:
            while True:
                while not self._channel.waiting(60.0):
                    pass  # a tuner may think for long
                if not self._handle(self._channel.receive()):
                    return
        finally:
            self._over.set()
            if self._live is not None:
                self._live.close()

    def _show_life(self) -> None:
        while not self._over.wait(ALIVE_S):
            try:
                self._channel.send("alive")
            except FarmError:
                return  # the main thread finds out at its next message

    def _handle(self, message: dict[str, Any]) -> bool:
        """One request; False ends the session. A request that cannot be served is answered with a line."""
        try:
            if message["kind"] == "open":
                self._open(message)
            elif message["kind"] == "measure":
                self._measure(message["candidates"])
            else:
                return False
        except FarmError:
            raise
        except (KronschedError, ArithmeticError, LookupError, TypeError, ValueError) as e:
            text = str(e) if isinstance(e, KronschedError) else f"the request is wrong: {type(e).__name__}: {e}"
            self._channel.send("failed", message=text)
        return True

    def _open(self, message: dict[str, Any]) -> None:
        from kronsched.measure.energy import NvmlEnergy

        if self._live is not None:
            self._live.close()
        options = message["options"]
        self._live = LiveMeasurer(
            registry.workload_from_dict(message["workload"]),
            [registry.schedule(name) for name in message["schedules"]],
            self._devices,
            compiler=str(options["compiler"]),
            build_timeout_s=float(options["build_timeout_s"]),
            run_timeout_s=float(options["run_timeout_s"]),
            seed=int(options["seed"]),
            observers=[NvmlEnergy()] if message["energy"] else [],
            crew=self._crew,
        )
        self._channel.send("opened", slots=max(self._live.parallel, len(self._devices)))

    def _measure(self, listed: Sequence[Any]) -> None:
        if self._live is None:
            raise ArgumentError("measure before open")
        candidates = [candidate_from_json(data) for data in listed]
        places: dict[Any, list[int]] = {}
        for index, candidate in enumerate(candidates):
            places.setdefault(candidate, []).append(index)
        for measured in self._live.measure(candidates):
            self._channel.send("result", index=places[measured.candidate].pop(), **measured_to_json(measured))
        self._channel.send("done")
