"""Suites of shapes: `suites/<family>.json` holds "source" and named lists of workload fields."""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any

from kronsched import registry
from kronsched.errors import choose
from kronsched.workloads.base import Workload

_NOT_FIELDS = ("check",)
"""Keys of a case that say something to tests, not to the workload."""


def suite_families() -> list[str]:
    """Families that have suites."""
    return sorted(
        p.name.removesuffix(".json") for p in files("kronsched.bench").joinpath("suites").iterdir() if p.name.endswith(".json")
    )


def suite_names(family: str) -> list[str]:
    """Names of the suites of a family, in the order of the file."""
    return [name for name, cases in _read(family).items() if isinstance(cases, list)]


def load_suite(family: str, name: str, dtype: str | None = None) -> list[Workload]:
    """The workloads of a suite. dtype: for the cases that name none. ArgumentError lists what is allowed."""
    if name not in suite_names(family):
        raise choose("suite", name, suite_names(family))
    workloads = []
    for case in _read(family)[name]:
        fields = {k: v for k, v in case.items() if k not in _NOT_FIELDS}
        if dtype is not None:
            fields.setdefault("dtype", dtype)
        workloads.append(registry.workload_from_dict({"family": family, **fields}))
    return workloads


def _read(family: str) -> dict[str, Any]:
    if family not in suite_families():
        raise choose("suite family", family, suite_families())
    data: dict[str, Any] = json.loads(files("kronsched.bench").joinpath("suites", f"{family}.json").read_text(encoding="utf-8"))
    return data
