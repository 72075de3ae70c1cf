"""Which shapes `kronsched versus` and `kronsched ablate` take: some of a suite, or of a file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from kronsched.errors import ArgumentError, choose

if TYPE_CHECKING:
    from kronsched.workloads.base import Workload

SUITE = "versus"
"""The suite of four layers of conv2d that is taken by default."""

shape_options: list[click.Parameter] = [
    click.Argument(["what"], metavar="FAMILY|FILE"),
    click.Option(
        ["--suite"], default=None, help=f'Name of a suite, or "all". [default: {SUITE}, or where there is none the first]'
    ),
    click.Option(["--skip"], type=click.IntRange(0), default=0, help="Leave out the first so many shapes."),
    click.Option(["--limit"], type=click.IntRange(1), default=None, help="Of the others only the first so many."),
]
"""Arguments of `shapes_of`."""


def shapes_of(what: str, suite: str | None, skip: int, limit: int | None) -> list[Workload]:
    """The workloads that the options mean. ArgumentError when none is left, or for an unknown suite or family."""
    from kronsched.bench.suites import load_cases, load_file, suite_families, suite_names

    if what in suite_families():
        cases = load_cases(what, suite or (SUITE if SUITE in suite_names(what) else None))
    elif "." in what or "/" in what:
        cases = load_file(Path(what), suite)
    else:
        raise choose("suite family", what, [*suite_families(), "a JSON file"])
    if skip >= len(cases):
        raise ArgumentError(f"--skip={skip} is not allowed: there are {len(cases)} shapes")
    return [case.workload for case in cases[skip : None if limit is None else skip + limit]]


def check_output(output: str | None) -> None:
    """ArgumentError for a file whose folder does not exist, before anything is measured."""
    if output is not None and not Path(output).parent.is_dir():
        raise ArgumentError(f"--output={output!r} cannot be written: there is no folder {str(Path(output).parent)!r}")
