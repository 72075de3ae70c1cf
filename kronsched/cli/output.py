"""Printing: JSON that stands alone on stdout, tables for people, and how times and rates are written."""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import click


@contextlib.contextmanager
def only_json(as_json: bool) -> Iterator[None]:
    """While a command with --json works, whatever it or a C library writes to stdout goes to stderr instead."""
    if not as_json:
        yield
        return
    sys.stdout.flush()
    saved = os.dup(1)
    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(saved, 1)
        os.close(saved)


def print_json(data: Mapping[str, Any]) -> None:
    """Print one JSON object; NaN and infinities, which JSON lacks, become null."""
    click.echo(json.dumps(_plain(data), allow_nan=False))


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return value


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table on stdout; on a pipe it is wide enough for every cell."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD)
    for column in columns:
        table.add_column(column, no_wrap=not sys.stdout.isatty(), overflow="fold")
    for row in rows:
        table.add_row(*row)
    console = Console(markup=False, highlight=False, width=None if sys.stdout.isatty() else 400)
    with console.capture() as capture:
        console.print(table)
    if title:
        click.echo(title)
    click.echo("\n".join(line.rstrip() for line in capture.get().splitlines()).strip("\n"))


def time_text(us: float | None) -> str:
    """Microseconds in a readable unit: "950 ns", "18.4 µs", "2.39 ms"."""
    if us is None or not math.isfinite(us):
        return "–"
    for scale, unit in ((1e6, "s"), (1e3, "ms"), (1.0, "µs")):
        if us >= scale:
            value = us / scale
            return f"{value:.3g} {unit}" if value < 999.5 else f"{value:.0f} {unit}"
    return f"{us * 1e3:.3g} ns"


def share_text(fraction: float | None) -> str:
    """A share as a percentage: "62%"."""
    return "–" if fraction is None or not math.isfinite(fraction) else f"{100 * fraction:.3g}%"


def config_text(config: Mapping[str, Any]) -> str:
    """A config on one line: "rows=2 threads=256"."""
    return " ".join(f"{k}={v}" for k, v in config.items())


def counts_text(counts: Mapping[str, int]) -> str:
    """Counts by status: "compile_error 2, timeout 1"."""
    return ", ".join(f"{status} {n}" for status, n in sorted(counts.items()) if n) or "none"
