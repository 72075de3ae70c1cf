"""Which shapes `kronsched versus` and `kronsched ablate` take: some of a suite, or of a file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from kronsched.errors import ArgumentError

if TYPE_CHECKING:
    from kronsched.workloads.base import Workload

SUITE = "versus"
"""The suite of four layers that is taken by default."""

shape_options: list[click.Parameter] = [
    click.Argument(["what"], metavar="FAMILY|FILE"),
    click.Option(["--suite"], default=None, help=f'Name of a suite, or "all". [default: {SUITE}; of a file its first]'),
    click.Option(["--skip"], type=click.IntRange(0), default=0, help="Leave out the first so many shapes."),
    click.Option(["--limit"], type=click.IntRange(1), default=None, help="Of the others only the first so many."),
]
"""Arguments of `shapes_of`."""


def shapes_of(what: str, suite: str | None, skip: int, limit: int | None) -> list[Workload]:
    """The workloads that the options mean. ArgumentError when none is left, or for an unknown suite."""
    from kronsched.bench.suites import load_cases, load_file, suite_families

    cases = load_cases(what, suite or SUITE) if what in suite_families() else load_file(Path(what), suite)
    if skip >= len(cases):
        raise ArgumentError(f"skip={skip} is not allowed: there are {len(cases)} shapes")
    return [case.workload for case in cases[skip : None if limit is None else skip + limit]]


def check_output(output: str | None) -> None:
    """ArgumentError for a file whose folder does not exist, before anything is measured."""
    if output is not None and not Path(output).parent.is_dir():
        raise ArgumentError(f"output={output!r} cannot be written: there is no folder {str(Path(output).parent)!r}")
