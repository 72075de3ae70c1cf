"""What a tuner and the workers of a cluster say to each other: JSON over authenticated TCP, with nothing unpickled.

    tuner → worker    open (workload, names of schedules, options) · measure (candidates) · close
    worker → tuner    hello (version, devices) · opened (slots) · result (index, build, run) · done · failed (message) · alive

The connection is `multiprocessing.connection`, part of Python: frames and a mutual HMAC challenge with a shared key. Only bytes
of JSON are sent, never objects, so a worker runs nothing but its own schedules by name. Nothing is encrypted: use a trusted
network or a tunnel.

Read first: `Channel`, `cluster_key`.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import tempfile
import threading
from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from pathlib import Path
from typing import Any

import platformdirs

from kronsched.errors import ArgumentError, KronschedError
from kronsched.hardware.device import Device
from kronsched.measure.base import BuildResult, Measured, RunResult
from kronsched.space import Candidate

PROTOCOL = 1
DEFAULT_PORT = 7433
ALIVE_S = 5.0
"""A worker with nothing else to say sends a sign of life so often."""
SILENCE_S = 30.0
"""A peer that says nothing for so long is lost."""
HANDSHAKE_S = 10.0
MAX_MESSAGE = 64 << 20


class FarmError(KronschedError):
    """A peer of the cluster was lost or says something unexpected."""


class Channel:
    """A connection that carries JSON objects. `send` may be called from several threads, `receive` from one."""

    def __init__(self, connection: Connection, peer: str) -> None:
        """Wrap a connection that is authenticated already. peer: its name in messages."""
        self._connection, self.peer = connection, peer
        self._lock = threading.Lock()

    def send(self, kind: str, **content: Any) -> None:
        """Send one message; FarmError when the peer is gone."""
        data = json.dumps({"kind": kind, **content}).encode()
        try:
            with self._lock:
                self._connection.send_bytes(data)
        except (OSError, ValueError) as e:
            raise FarmError(f"{self.peer} is gone: {e}") from None

    def receive(self, silence_s: float = SILENCE_S) -> dict[str, Any]:
        """The next message; FarmError when the peer is gone, silent for so long, or sends something else."""
        try:
            if not self._connection.poll(silence_s):
                raise FarmError(f"{self.peer} said nothing for {silence_s:g} s")
            found = json.loads(self._connection.recv_bytes(MAX_MESSAGE))
        except (OSError, EOFError) as e:
            raise FarmError(f"{self.peer} is gone: {str(e) or 'it ended'}") from None
        except (ValueError, RecursionError):
            raise FarmError(f"{self.peer} sent something that is not a message") from None
        if not isinstance(found, dict) or not isinstance(found.get("kind"), str):
            raise FarmError(f"{self.peer} sent something that is not a message")
        return found

    def waiting(self, seconds: float) -> bool:
        """Whether a message arrives (or the peer goes) within so many seconds."""
        try:
            return self._connection.poll(seconds)
        except (OSError, EOFError):
            return True

    def hang_up(self) -> None:
        """End the connection for both sides; a thread that waits in `receive` gets a FarmError, and closes."""
        with contextlib.suppress(OSError, ValueError), socket.socket(fileno=os.dup(self._connection.fileno())) as same:
            same.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Let go of the connection. Safe to call twice."""
        self._connection.close()


# -- addresses and keys ---------------------------------------------------------------------------------


def parse_address(text: str) -> tuple[str, int]:
    """(host, port) of "host", "host:port" or "[::1]:port"; a port of 0 is allowed."""
    host, colon, port = text.strip().rpartition(":")
    if not colon or (host.count(":") and not host.endswith("]")):
        host, port = text.strip(), str(DEFAULT_PORT)
    if not host or not port.isdigit() or int(port) > 65535:
        raise ArgumentError(f"address {text!r} is not allowed: write host or host:port, such as gpu-node-1:{DEFAULT_PORT}")
    return host.strip("[]"), int(port)


def default_key_file() -> Path:
    """Where this user's key of the cluster is kept."""
    return Path(platformdirs.user_config_dir("kronsched", appauthor=False)) / "cluster.key"


def cluster_key(path: str | os.PathLike[str] | None, make: bool = False) -> bytes:
    """The shared key. make: write a new one, readable by this user only, where there is none."""
    file = default_key_file() if path is None else Path(path)
    try:
        if make and not file.exists():
            _make_key(file)
        key = file.read_bytes().strip()
    except OSError as e:
        raise ArgumentError(
            f"cluster_key: {str(file)!r} cannot be read ({e.strerror}): copy it from the machine whose `kronsched worker` made it"
        ) from None
    if len(key) < 16:
        raise ArgumentError(f"cluster_key: {str(file)!r} holds fewer than 16 bytes: remove it, and `kronsched worker` makes one")
    return key


def _make_key(file: Path) -> None:
    """A new key, there as a whole or not at all; of several workers that start at once, one wins."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=file.parent, encoding="ascii") as made:  # mode 0600
        made.write(secrets.token_hex(32) + "\n")
        made.flush()
        with contextlib.suppress(FileExistsError):
            os.link(made.name, file)


def connect(address: tuple[str, int], key: bytes) -> Channel:
    """Call a worker; FarmError when nothing answers or the key differs."""
    peer = f"worker {address[0]}:{address[1]}"
    try:
        with socket.create_connection(address, timeout=HANDSHAKE_S) as plain:
            plain.setblocking(True)
            plain.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            connection = Connection(plain.detach())
    except OSError as e:
        raise FarmError(f"{peer} cannot be reached: {e.strerror or e}") from None
    try:
        _shake(connection, key, first=False)
    except AuthenticationError:
        connection.close()
        raise FarmError(f"{peer} has another key than this machine: copy its cluster.key") from None
    except (OSError, EOFError) as e:
        connection.close()
        raise FarmError(f"{peer} did not finish the handshake: {str(e) or 'it hung up'}") from None
    return Channel(connection, peer)


def accept(connection: Connection, key: bytes, peer: str) -> Channel:
    """The other side of `connect`."""
    try:
        _shake(connection, key, first=True)
    except (OSError, EOFError, AuthenticationError) as e:
        connection.close()
        raise FarmError(f"{peer} did not finish the handshake: {str(e) or 'it hung up'}") from None
    return Channel(connection, peer)


def _shake(connection: Connection, key: bytes, first: bool) -> None:
    """Each side proves that it has the key, and neither waits for ever."""
    for turn in (first, not first):
        if turn:
            deliver_challenge(_Patient(connection), key)  # type: ignore[arg-type]
        else:
            answer_challenge(_Patient(connection), key)  # type: ignore[arg-type]


class _Patient:
    """A connection whose reading gives up: what the challenges of multiprocessing use of it."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.send_bytes = connection.send_bytes

    def recv_bytes(self, maxlength: int | None = None) -> bytes:
        """The next frame."""
        if not self._connection.poll(HANDSHAKE_S):
            raise OSError(f"no answer within {HANDSHAKE_S:g} s")
        return self._connection.recv_bytes(maxlength)


# -- plain data -----------------------------------------------------------------------------------------


def candidate_to_json(candidate: Candidate) -> list[Any]:
    """[space, [[knob, value], …]]."""
    return [candidate.space, [list(item) for item in candidate.items]]


def candidate_from_json(data: Any) -> Candidate:
    """The inverse of `candidate_to_json`."""
    space, items = data
    return Candidate(str(space), tuple((str(name), value) for name, value in items))


def measured_to_json(measured: Measured) -> dict[str, Any]:
    """Build and run. The artefact stays on the worker's disk."""
    build = asdict(replace(measured.build, artefact=None))
    return {"build": build, "run": None if measured.run is None else asdict(measured.run)}


def measured_from_json(candidate: Candidate, data: Mapping[str, Any]) -> Measured:
    """The inverse of `measured_to_json`; fields of a newer version are ignored."""
    run = data["run"]
    if run is not None:
        run = RunResult(**{**_known(RunResult, run), "times_us": tuple(run["times_us"])})
    return Measured(candidate, BuildResult(**_known(BuildResult, data["build"])), run)


def device_to_json(device: Device) -> dict[str, Any]:
    """All of a device's description."""
    return {**asdict(device), "peak_gflops": dict(device.peak_gflops), "extra": dict(device.extra)}


def device_from_json(data: Mapping[str, Any]) -> Device:
    """A device of another machine: not present on this one."""
    return Device(**{**_known(Device, data), "present": False})


def _known(cls: type[Any], data: Mapping[str, Any]) -> dict[str, Any]:
    names = {f.name for f in fields(cls)}
    return {name: value for name, value in data.items() if name in names}
