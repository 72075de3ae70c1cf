"""Suites of shapes: `suites/<name>.json` holds "source" and named lists of workload fields; a user's own file works as well.

A file belongs to the family it is named after, or to that of its "family": w4a16.json is of the family gemm.

Read first: `load_cases` (built-in suites) and `load_file` (a file by path, for any family, a plugin's too).

A case may hold "published_ms": peer -> milliseconds that somebody measured earlier. They belong to the device and dtype that the
file's "published" object names, and are shown beside what is measured now; they are never mixed with it.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

from kronsched import registry
from kronsched.errors import ArgumentError, ArgumentTypeError, UserError, choose
from kronsched.workloads.base import Workload

ALL = "all"
_NOT_FIELDS = ("check", "published_ms")
"""Keys of a case that say something to tests and to the bench, not to the workload."""


@dataclass(frozen=True)
class Case:
    """One shape of a suite. published: microseconds by peer, for the device named `published_on` only."""

    workload: Workload
    published: Mapping[str, float] = field(default_factory=dict)
    published_on: str = ""


def suite_families() -> list[str]:
    """What has suites: families, and kinds of workloads of a family, such as "w4a16"."""
    return sorted(
        p.name.removesuffix(".json") for p in files("kronsched.bench").joinpath("suites").iterdir() if p.name.endswith(".json")
    )


def suite_names(family: str) -> list[str]:
    """Names of the suites of a family, in the order of the file."""
    return _names(_read(family))


def load_suite(family: str, name: str, dtype: str | None = None) -> list[Workload]:
    """The workloads of a suite. dtype: for the cases that name none. ArgumentError lists what is allowed."""
    return [case.workload for case in load_cases(family, name, [dtype] if dtype is not None else [])]


def load_cases(family: str, name: str | None = None, dtypes: Sequence[str] = (), limit: int | None = None) -> list[Case]:
    """The cases of a built-in suite, in each of the dtypes (the family's default when none are given); no workload twice.

    name: a suite, "all" for every suite of the family, None for its first. A case that names its dtype keeps it and comes once.
    limit: only the first so many shapes, each still in all dtypes.
    """
    data = _read(family)
    return _cases(data, name, dtypes, limit, str(data.get("family", family)), "suite")


def load_file(path: Path, name: str | None = None, dtypes: Sequence[str] = (), limit: int | None = None) -> list[Case]:
    """The cases of a JSON file: a list of workloads (each with its "family"), or an object of such lists by name."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        reason = e.strerror if isinstance(e, OSError) else e
        raise ArgumentError(f"suite file {str(path)!r} cannot be read: {reason}") from None
    if isinstance(data, list):
        data = {path.stem: data}
    if not isinstance(data, dict) or not _names(data):
        raise ArgumentError(f"suite file {str(path)!r}: a list of workloads is needed, or an object of such lists by name")
    return _cases(data, name, dtypes, limit, None, f"suite file {str(path)!r}: suite")


def _cases(
    data: Mapping[str, Any], name: str | None, dtypes: Sequence[str], limit: int | None, family: str | None, what: str
) -> list[Case]:
    names = _names(data)
    wanted = names[:1] if name is None else names if name == ALL else [name]
    if wanted[0] not in names:
        raise choose(what, name, [*names, ALL])
    shapes: dict[str, tuple[dict[str, Any], Any, str]] = {}
    for suite in wanted:
        for n, item in enumerate(data[suite]):
            where = f"{what} {suite!r}: case {n}"
            fields, published = _fields(item, family, where)
            key = json.dumps(fields, sort_keys=True)
            # Of the same shape in two suites, the one with published times counts.
            if published or key not in shapes:
                shapes[key] = fields, published, where
    about = data.get("published")
    found: dict[str, Case] = {}
    for dtype in dtypes or (None,):
        for fields, published, where in list(shapes.values())[:limit]:
            case = _case(fields, dtype, published, about if isinstance(about, Mapping) else {}, where)
            found.setdefault(case.workload.key, case)
    return list(found.values())


def _fields(item: Any, family: str | None, where: str) -> tuple[dict[str, Any], Any]:
    """(the fields of the workload, the published times) of a case."""
    if not isinstance(item, Mapping):
        raise ArgumentTypeError(f"{where} is {item!r}, an object with a workload's fields is needed")
    fields = {k: v for k, v in item.items() if k not in _NOT_FIELDS}
    if family is not None:
        fields.setdefault("family", family)
    return fields, item.get("published_ms", {})


def _case(fields: Mapping[str, Any], dtype: str | None, published: Any, about: Mapping[str, Any], where: str) -> Case:
    try:
        given = dict(fields) if dtype is None else {_dtype_field(fields.get("family")): dtype, **fields}
        return _with_published(registry.workload_from_dict(given), published, about)
    except UserError as e:
        raise ArgumentError(f"{where}: {e}") from None


def _dtype_field(family: Any) -> str:
    """The field that says what a family's workloads compute in: the first whose name ends so, such as "a_dtype" of gemm."""
    names = [f.name for f in dataclasses.fields(registry.family(family))] if isinstance(family, str) else []  # type: ignore[arg-type]
    return next((name for name in names if name.endswith("dtype")), "dtype")


def _with_published(workload: Workload, published: Mapping[str, float], about: Mapping[str, Any]) -> Case:
    if not published or workload.compute_dtype != about.get("dtype"):
        return Case(workload)
    return Case(workload, {name: 1e3 * float(ms) for name, ms in published.items()}, str(about.get("device", "")))


def _names(data: Mapping[str, Any]) -> list[str]:
    return [name for name, cases in data.items() if isinstance(cases, list)]


def _read(family: str) -> dict[str, Any]:
    if family not in suite_families():
        raise choose("suite family", family, suite_families())
    data: dict[str, Any] = json.loads(files("kronsched.bench").joinpath("suites", f"{family}.json").read_text(encoding="utf-8"))
    return data
