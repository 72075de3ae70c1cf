"""The JSON file of a bench: written while rows come in, and read back so that a run in pieces ends in one file.

Read first: `Results`.
"""

from __future__ import annotations

import gzip
import json
import tempfile
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kronsched.bench.row import Row
from kronsched.errors import ArgumentError, UserError

_GZIP = b"\x1f\x8b"
SAVE_EVERY_S = 15.0
"""A file of a thousand rows takes some tenths of a second to write."""


class Results:
    """Rows that were timed, kept in a file (none when `path` is None).

    resume: start with the rows that the file holds, if it exists; they must be of the same device.  describe: rows -> what
    the file says. Raises ArgumentError for a file that cannot be written, or read and understood.
    """

    def __init__(
        self, path: Path | None, describe: Callable[[Sequence[Row]], dict[str, Any]], device: str, resume: bool = False
    ) -> None:
        """Open or start the file."""
        self._path, self._describe, self._saved = path, describe, 0.0
        self.rows: dict[str, Row] = {}
        if path is None:
            return
        if resume and path.is_file() and path.stat().st_size:
            self.rows = read_rows(path, device)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            new = not path.exists()
            path.touch()  # raises where no file can be
            if new:
                path.unlink()  # a run that is killed before its first row leaves no empty file
        except OSError as e:
            raise ArgumentError(f"output={str(path)!r} cannot be written: {e.strerror}") from None

    def add(self, row: Row) -> None:
        """Keep a row, in place of an earlier one of the same workload."""
        self.rows[row.workload.key] = row
        if time.monotonic() - self._saved >= SAVE_EVERY_S:
            self.save(complete=False)

    def save(self, complete: bool) -> None:
        """Write the file, whole or not at all."""
        if self._path is None:
            return
        data = {**self._describe(list(self.rows.values())), "complete": complete}
        with tempfile.NamedTemporaryFile(
            "w", dir=self._path.parent, prefix=f".{self._path.name}.", delete=False, encoding="utf-8"
        ) as file:
            json.dump(data, file, indent=1)
            file.write("\n")
        Path(file.name).chmod(0o644)  # a temporary file is private
        Path(file.name).replace(self._path)
        self._saved = time.monotonic()


def read_rows(path: Path, device: str | None = None) -> dict[str, Row]:
    """The rows of a bench's file by workload key. device: the name that the file must be of, None for any.

    Raises ArgumentError as `read_results` does, and for results of another device.
    """
    name, rows = read_results(path)
    if device is not None and name != device:
        raise ArgumentError(f"results {str(path)!r} are of {name}, this is {device}: name another file")
    return rows


def read_results(path: Path) -> tuple[str, dict[str, Row]]:
    """(name of the device, rows by workload key) of a bench's file, which may be compressed by gzip.

    Raises ArgumentError for a file that cannot be read or is no result of a bench.
    """
    try:
        raw = path.read_bytes()
        data = json.loads((gzip.decompress(raw) if raw[:2] == _GZIP else raw).decode())
        found = [Row.from_dict(item) for item in data["rows"]]
        name = str(data["device"]["name"])
    except (gzip.BadGzipFile, EOFError, zlib.error) as e:
        raise ArgumentError(f"results {str(path)!r} are not a whole gzip file: {e}") from None
    except OSError as e:
        raise ArgumentError(f"results {str(path)!r} cannot be read: {e.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, UserError) as e:
        raise ArgumentError(f"{str(path)!r} is not a result of `kronsched bench`: {type(e).__name__}: {e}") from None
    return name, {row.workload.key: row for row in found}
