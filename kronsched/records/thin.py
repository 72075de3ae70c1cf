"""Thinning a log to what simulation and cost models read, so that exhaustive tables are small enough to ship.

Read first: `thin_log`, `best_log` (what `load` needs). All samples of a measurement go (their median and noise stay, rounded),
repeated configs keep the last record, texts that repeat in every record (versions, driver) stay: they compress to nothing and say
where the numbers come from.
"""

from __future__ import annotations

import gzip
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from kronsched.errors import ArgumentError
from kronsched.records.journal import read_log
from kronsched.records.schema import TuningRecord

DIGITS = 5
"""Significant digits of times and errors in a thinned record."""


def thin_log(log: str | os.PathLike[str], out: str | os.PathLike[str]) -> int:
    """Write the thinned records of a log as a gzip-compressed table; the number of records written.

    log: a .jsonl or .jsonl.gz log.  out: the .jsonl.gz to write, replaced when it is there; it may be `log` itself. The bytes
    are a function of the records alone. Raises ArgumentError when a path cannot be used.
    """
    target = Path(out)
    if not target.name.endswith(".jsonl.gz"):
        raise ArgumentError(f"out={str(target)!r} is not allowed: a name that ends in .jsonl.gz is needed")
    kept = {(r.workload_key, r.target["name"], r.space["name"], r.candidate): r for r in read_log(log)}
    text = "".join(json.dumps(_thin(r), separators=(",", ":")) + "\n" for r in kept.values())
    _replace(target, gzip.compress(text.encode(), mtime=0))
    return len(kept)


def _replace(path: Path, data: bytes) -> None:
    """Write a file whole or not at all."""
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        Path(name).chmod(0o644)
        Path(name).replace(path)
    except OSError as e:
        raise ArgumentError(f"out={str(path)!r} cannot be written: {e.strerror or e}") from None


def _thin(record: TuningRecord) -> dict[str, Any]:
    data = record.to_dict()
    for part in ("result", "search"):
        data[part] = {k: _rounded(v) for k, v in data[part].items() if k != "times_us" and v is not None}
    return data


def _rounded(value: Any) -> Any:
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


def best_log(log: str | os.PathLike[str], out: str | os.PathLike[str], count: int = 1) -> int:
    """Write the `count` fastest records of each workload and device, thinned, as a log that `load` reads; how many there are.

    log: a .jsonl or .jsonl.gz log.  out: the .jsonl to write, replaced when it is there. Raises ArgumentError when a path cannot
    be used.
    """
    target = Path(out)
    if target.suffix != ".jsonl":
        raise ArgumentError(f"out={str(target)!r} is not allowed: a name that ends in .jsonl is needed, which `load` reads")
    groups: dict[tuple[str, str], dict[str, TuningRecord]] = {}
    for record in read_log(log):
        if record.ok and record.median_us is not None:
            own = groups.setdefault((record.workload_key, record.target["name"]), {})
            known = own.get(record.candidate.key)
            if known is None or record.median_us < (known.median_us or 0.0):
                own[record.candidate.key] = record
    kept = [r for own in groups.values() for r in sorted(own.values(), key=lambda r: r.median_us or 0.0)[:count]]
    text = "".join(json.dumps(_thin(r), separators=(",", ":")) + "\n" for r in kept)
    _replace(target, text.encode())
    return len(kept)
