"""The tuning log: an append-only JSON Lines file that survives kill -9, several writers, and any bytes.

Read first: `Journal.append` (lock, heal, one write, fsync) and `Journal.read` (skips what it cannot use, with warnings).
"""

from __future__ import annotations

import gzip
import os
import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from filelock import FileLock

from kronsched.errors import ArgumentError, RecordError
from kronsched.records.schema import RecordWarning, TuningRecord

MAX_LINE = 1_000_000
"""Bytes of the longest line that is read or written; a record of 100 samples takes about 3,000."""
MAX_WARNINGS = 10
"""Bad lines of one file that are named one by one; the rest is counted in one more warning."""


class Journal:
    """A tuning log at `path` (.jsonl, or .jsonl.gz which is read-only).

    Any number of processes may append to it at once. Killing one of them at any moment leaves at most one torn line, which
    readers skip and the next append closes with a newline.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Name the file; nothing is opened or created yet."""
        self.path = Path(path)

    # -- writing ------------------------------------------------------------------------------------

    def check_writable(self) -> None:
        """Create the file and its folder when missing; `ArgumentError` with the reason when it cannot be appended to."""
        with self._locked():
            pass

    def append(self, record: TuningRecord) -> None:
        """Add one record: in one write, under the lock, on disk when this returns.

        Raises ArgumentError for an unwritable path, RecordError when the disk refuses the record or it exceeds `MAX_LINE` bytes.
        """
        line = record.to_json().encode("ascii") + b"\n"
        if len(line) > MAX_LINE:
            raise RecordError(f"a record of {len(line)} bytes is too long for a log: at most {MAX_LINE} are allowed")
        with self._locked() as fd:
            try:
                _write(fd, line)
            except OSError as e:
                raise RecordError(f"log {str(self.path)!r} cannot be appended to: {e.strerror or e}") from None

    @contextmanager
    def _locked(self) -> Iterator[int]:
        """The open file descriptor, while holding the lock."""
        if self.path.suffix == ".gz":
            raise ArgumentError(f"log={str(self.path)!r} is not allowed here: a compressed log is read-only")
        lock = FileLock(f"{self.path}.lock")
        fd = None
        try:
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                lock.acquire()
                fd = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
            except (OSError, ValueError) as e:  # ValueError: a NUL in the path
                reason = getattr(e, "strerror", None) or e
                raise ArgumentError(f"log={str(self.path)!r} cannot be written: {reason}") from None
            yield fd
        finally:
            if fd is not None:
                os.close(fd)
            lock.release()

    # -- reading ------------------------------------------------------------------------------------

    def read(self) -> list[TuningRecord]:
        """Every usable record in file order; bad lines are skipped with a `RecordWarning` naming file and line.

        A file that does not exist holds no records; `ArgumentError` when it exists and cannot be opened.
        """
        records, bad = [], 0
        for number, line in self.lines():
            try:
                if line is None:
                    raise RecordError(f"longer than {MAX_LINE} bytes")
                records.append(TuningRecord.from_json(line))
            except RecordError as e:
                bad += 1
                if bad <= MAX_WARNINGS:
                    _warn(f"{self.path}:{number}: skipped: {e}")
        if bad > MAX_WARNINGS:
            _warn(f"{self.path}: {bad - MAX_WARNINGS} more bad lines skipped")
        return records

    def lines(self) -> Iterator[tuple[int, bytes | None]]:
        """(line number from 1, bytes) of each line that is not blank; None for one longer than `MAX_LINE`."""
        try:
            if not self.path.exists():
                return
            raw = self.path.open("rb")
        except OSError as e:
            raise ArgumentError(f"log={str(self.path)!r} cannot be read: {e.strerror or e}") from None
        with raw:
            try:
                yield from _split(gzip.GzipFile(fileobj=raw) if self.path.suffix == ".gz" else raw)
            except (OSError, EOFError, zlib.error) as e:  # a truncated or damaged .gz: what came before it counts
                _warn(f"{self.path}: the rest of the file cannot be read: {e}")


def read_log(log: str | os.PathLike[str]) -> list[TuningRecord]:
    """The records of a log a user named; `ArgumentError` when it does not exist or holds no usable record."""
    path = Path(log)
    if not path.is_file():
        raise ArgumentError(f"log={str(path)!r} is not a file: name a .jsonl or .jsonl.gz tuning log")
    records = Journal(path).read()
    if not records:
        raise ArgumentError(f"log={str(path)!r} holds no usable tuning record")
    return records


def _write(fd: int, line: bytes) -> None:
    data = line
    if os.lseek(fd, 0, os.SEEK_END):
        os.lseek(fd, -1, os.SEEK_END)
        if os.read(fd, 1) != b"\n":  # the torn line of a killed writer
            data = b"\n" + line
    while data:  # one write; more only when the system took a part of it (signal, almost full disk)
        data = data[os.write(fd, data) :]
    os.fsync(fd)


def _split(stream: IO[bytes] | gzip.GzipFile) -> Iterator[tuple[int, bytes | None]]:
    number, long = 1, False
    while piece := stream.readline(MAX_LINE):
        ended = piece.endswith(b"\n")
        if long or (not ended and len(piece) == MAX_LINE):
            if not long:
                yield number, None
            long = not ended
        elif piece.strip():
            yield number, piece
        number += ended


def _warn(message: str) -> None:
    warnings.warn(message, RecordWarning, stacklevel=3)
