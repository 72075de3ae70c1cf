"""One tuning record: what was measured, of which candidate, where, by which versions. JSON, schema 1.

Read first: `TuningRecord`. A line of a log is untrusted text: `TuningRecord.from_json` checks every field that
kronsched reads and raises `RecordError` with one line; nothing is evaluated. Fields it does not know are kept.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import math
import platform
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from kronsched.errors import RecordError
from kronsched.measure.base import STATUSES
from kronsched.space import Candidate, Value

if TYPE_CHECKING:
    from kronsched.hardware import Device
    from kronsched.measure.base import Measured
    from kronsched.workloads.base import Workload

SCHEMA = 1
PACKAGES = ("python", "kronsched", "apache-tvm", "apache-tvm-ffi", "torch", "nvidia-cuda-nvrtc")
"""What a record keeps versions of: everything that shapes a kernel's source, its binary or its timing."""
MAX_DEPTH = 32
"""Deepest nesting of objects and lists that is read; a record needs 4."""
MAX_ERROR = 2000
"""Characters of an error message that a record keeps (compiler logs can be megabytes)."""


class RecordWarning(UserWarning):
    """A line of a tuning log was skipped, or was written by a newer version."""


@dataclass(frozen=True, kw_only=True)
class TuningRecord:
    """One measured candidate, self-contained: a pure function of (workload, config, versions) plus what the clock said.

    workload: `Workload.to_dict()`.  target: `Device.to_dict()`.  space: {"name", "digest"}.  config: every knob by name.
    result: status (see `STATUSES`), times_us (all samples, microseconds a call), median_us, max_relative_error, noise,
    energy_j (joules a call), error; numbers are null where unknown.  kernel: source_sha256, registers, shared_bytes, spill_bytes.
    search: strategy, round, predicted_rank, seed, build_seconds, run_seconds, search_seconds.  versions: package to version.
    timestamp: ISO 8601, UTC.  extra: top-level fields this version does not know; unknown fields inside the objects stay there.
    """

    workload: dict[str, Any]
    target: dict[str, Any]
    space: dict[str, Any]
    config: dict[str, Value]
    result: dict[str, Any]
    kernel: dict[str, Any] = field(default_factory=dict)
    search: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, Any] = field(default_factory=dict)
    timestamp: str = ""
    schema: int = SCHEMA
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def status(self) -> str:
        """The outcome, one of `STATUSES`."""
        status: str = self.result["status"]
        return status

    @property
    def ok(self) -> bool:
        """Whether the candidate was right and was timed."""
        return self.status == "ok"

    @property
    def median_us(self) -> float | None:
        """Median microseconds a call of an ok record, else None."""
        return float(self.result["median_us"]) if self.ok else None

    @property
    def candidate(self) -> Candidate:
        """The candidate that was measured, knobs in the order of the record."""
        return Candidate(self.space["name"], tuple(self.config.items()))

    @functools.cached_property
    def workload_key(self) -> str:
        """The same text as `Workload.key`, always computed from `workload`."""
        text = json.dumps(self.workload, sort_keys=True, separators=(",", ":"))
        return f"{self.workload['family']}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"

    def to_dict(self) -> dict[str, Any]:
        """The JSON object of the record, non-finite floats replaced by None."""
        data = {
            "schema": self.schema,
            "workload_key": self.workload_key,
            "workload": self.workload,
            "target": self.target,
            "space": self.space,
            "config": self.config,
            "result": self.result,
            "kernel": self.kernel,
            "search": self.search,
            "versions": self.versions,
            "timestamp": self.timestamp,
        }
        return {k: _finite(v) for k, v in {**self.extra, **data}.items()}

    def to_json(self) -> str:
        """One line of ASCII JSON without the newline; never NaN or Infinity."""
        return json.dumps(self.to_dict(), separators=(",", ":"), allow_nan=False)

    @classmethod
    def from_json(cls, text: str | bytes) -> TuningRecord:
        """Parse and check one line; `RecordError` says in one line what is wrong with it."""
        try:
            data = json.loads(text, parse_constant=lambda _: None, parse_float=_parse_float)
        except RecursionError:
            raise RecordError("the JSON is nested too deeply") from None
        except ValueError as e:  # includes JSONDecodeError, UnicodeDecodeError and integers of more than 4300 digits
            raise RecordError(f"not JSON: {e}") from None
        return cls.from_dict(data)

    @classmethod
    def from_dict(cls, data: Any) -> TuningRecord:
        """Check a parsed JSON value; `RecordError` names the field that is wrong. A newer schema is read with a warning."""
        if not isinstance(data, dict):
            raise RecordError(f"a JSON object is needed, not {type(data).__name__}")
        _check_shape(data)
        for name, (rule, what) in _TOP.items():
            _need(data, name, rule, what)
        for group, fields in _FIELDS.items():
            for name, (rule, what) in fields.items():
                _need(data.get(group, {}), name, rule, what, f"{group}.")
        for knob, value in data["config"].items():
            if not _is_scalar(value):
                raise RecordError(f"config.{_short(knob)} must be a finite number, a string or a boolean")
        if data["schema"] > SCHEMA:
            warnings.warn(
                f"schema {data['schema']} is newer than {SCHEMA}: only known fields are used", RecordWarning, stacklevel=2
            )
        result = dict(data["result"])
        # A null sample is a non-finite one that was written, or a NaN token that was read: it is no sample.
        result["times_us"] = [t for t in result.get("times_us") or [] if t is not None]
        if result["status"] == "ok" and not (_is_number(result.get("median_us")) and result["median_us"] > 0):
            raise RecordError("result.median_us must be a number > 0 when result.status is 'ok'")
        known = {k: data[k] for k in _TOP if k in data and k != "result"}
        extra = {k: v for k, v in data.items() if k not in _TOP and k != "workload_key"}
        return cls(**known, result=result, extra=extra)


def record_of(
    workload: Workload,
    device: Device,
    space_name: str,
    space_digest: str,
    measured: Measured,
    search: Mapping[str, Any],
) -> TuningRecord:
    """The record of a measured candidate. `search` holds strategy, round, seed…; build and run seconds are added."""
    build, run = measured.build, measured.run
    error = measured.error
    return TuningRecord(
        workload=workload.to_dict(),
        target=device.to_dict(),
        space={"name": space_name, "digest": space_digest},
        config=measured.candidate.config,
        result=_finite(
            {
                "status": measured.status,
                "times_us": [float(t) for t in run.times_us if math.isfinite(t)] if run else [],
                "median_us": measured.median_us,
                "max_relative_error": run.max_relative_error if run else None,
                "noise": run.noise if run else None,
                "energy_j": run.energy_j if run else None,
                "error": None if error is None else error[:MAX_ERROR].encode(errors="replace").decode(),
            }
        ),
        kernel={
            "source_sha256": build.source_sha256,
            "registers": build.registers,
            "shared_bytes": build.shared_bytes,
            "spill_bytes": build.spill_bytes,
        },
        search=_finite({**search, "build_seconds": build.seconds, "run_seconds": run.seconds if run else None}),
        versions=versions(),
        timestamp=datetime.now(UTC).isoformat(timespec="milliseconds"),
    )


def versions() -> dict[str, str]:
    """Versions of everything that shapes a kernel or its time; read from package metadata, so nothing is imported."""
    return dict(_versions())


@functools.cache
def _versions() -> tuple[tuple[str, str], ...]:
    found = {"python": platform.python_version()}
    for package in PACKAGES[1:]:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return tuple(found.items())


# -- checks ---------------------------------------------------------------------------------------------

Rule = Callable[[Any], bool]


def _is_number(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) < 1e300  # also rejects integers that do not fit a float, and NaN


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63


def _is_scalar(value: Any) -> bool:
    return isinstance(value, str | bool) or _is_number(value)


def _optional(rule: Rule) -> Rule:
    return lambda value: value is None or rule(value)


def _list_of(rule: Rule) -> Rule:
    return lambda value: isinstance(value, list) and all(map(rule, value))


_TEXT = (lambda v: isinstance(v, str), "a string")
_MAYBE_TEXT = (_optional(_TEXT[0]), "a string or null")
_MAYBE_INT = (_optional(_is_int), "an integer or null")
_MAYBE_NUMBER = (_optional(_is_number), "a finite number or null")
_OBJECT = (lambda v: isinstance(v, dict), "an object")
_REQUIRED = {"schema", "workload", "target", "space", "config", "result", "family", "kind", "name", "status"}

_TOP: dict[str, tuple[Rule, str]] = {
    "schema": (lambda v: _is_int(v) and v >= 1, "an integer ≥ 1"),
    **dict.fromkeys(("workload", "target", "space", "config", "result", "kernel", "search", "versions"), _OBJECT),
    "timestamp": _TEXT,
}
_FIELDS: dict[str, dict[str, tuple[Rule, str]]] = {
    "workload": {"family": _TEXT},
    "target": {
        "kind": (lambda v: v in ("cuda", "cpu"), "'cuda' or 'cpu'"),
        "name": _TEXT,
        "arch": _MAYBE_TEXT,
        "units": _MAYBE_INT,
        "shared_per_block": _MAYBE_INT,
        "vector_bytes": _MAYBE_INT,
        "driver": _MAYBE_TEXT,
    },
    "space": {"name": _TEXT, "digest": _MAYBE_TEXT},
    "result": {
        "status": (lambda v: v in STATUSES, f"one of {', '.join(STATUSES)}"),
        "times_us": (_optional(_list_of(_optional(lambda v: _is_number(v) and v >= 0))), "a list of finite numbers ≥ 0"),
        "median_us": _MAYBE_NUMBER,
        "max_relative_error": _MAYBE_NUMBER,
        "noise": _MAYBE_NUMBER,
        "energy_j": _MAYBE_NUMBER,
        "error": _MAYBE_TEXT,
    },
    "kernel": {
        "source_sha256": _MAYBE_TEXT,
        "registers": _MAYBE_INT,
        "shared_bytes": _MAYBE_INT,
        "spill_bytes": _MAYBE_INT,
    },
    "search": {
        "strategy": _MAYBE_TEXT,
        "round": _MAYBE_INT,
        "predicted_rank": _MAYBE_NUMBER,
        "seed": _MAYBE_INT,
        "build_seconds": _MAYBE_NUMBER,
        "run_seconds": _MAYBE_NUMBER,
        "search_seconds": _MAYBE_NUMBER,
    },
}


def _need(data: dict[str, Any], name: str, rule: Rule, what: str, where: str = "") -> None:
    if name not in data:
        if name in _REQUIRED:
            raise RecordError(f"{where}{name} is missing")
        return
    if not rule(data[name]):
        raise RecordError(f"{where}{name} must be {what}, not {_short(data[name])}")


def _short(value: Any) -> str:
    """One line of at most 40 characters; an integer too long to print is no reason to fail."""
    if isinstance(value, dict | list):
        return f"a {type(value).__name__} of {len(value)}"
    return repr(value)[:40] if not isinstance(value, int) or abs(value) < 2**63 else "a huge integer"


def _check_shape(data: dict[str, Any]) -> None:
    """Reject deep nesting (recursion in later steps) and text that no file or terminal can encode."""
    stack: list[tuple[Any, int]] = [(data, 1)]
    while stack:
        node, depth = stack.pop()
        if depth > MAX_DEPTH:
            raise RecordError(f"nested deeper than {MAX_DEPTH}")
        if isinstance(node, dict):
            stack += [(v, depth + 1) for v in node.values() if isinstance(v, dict | list)]
            texts = [*node, *(v for v in node.values() if isinstance(v, str))]
        else:
            stack += [(v, depth + 1) for v in node if isinstance(v, dict | list)]
            texts = [v for v in node if isinstance(v, str)]
        for text in texts:
            if not text.isascii() and any("\ud800" <= c <= "\udfff" for c in text):
                raise RecordError("a string holds an unpaired surrogate")


def _parse_float(text: str) -> float | None:
    value = float(text)
    return value if math.isfinite(value) else None


def _finite(value: Any) -> Any:
    """The same JSON value with every non-finite float replaced by None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return value
