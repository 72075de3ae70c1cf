"""Progress of a tuning run on stderr: a live bar on a terminal, a line for each new best elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

from kronsched.cli.output import counts_text, share_text, time_text

if TYPE_CHECKING:
    from kronsched.search.result import TuneEvent


@contextmanager
def tuning_progress(quiet: bool, header: str) -> Iterator[Callable[[TuneEvent], None]]:
    """A callback for `tune(progress=…)`; the bar is taken down when the block ends, whatever ends it.

    header: printed when the run starts, so that a wrong argument is one line of error and nothing else.
    """
    if quiet:
        yield lambda event: None
    elif sys.stderr.isatty():
        with _bar(header) as callback:
            yield callback
    else:
        yield _Lines(header)


class _Lines:
    """For logs and pipes: one line when the best improves, and one at the end."""

    def __init__(self, header: str) -> None:
        self.header = header
        self.best: float | None = None

    def __call__(self, event: TuneEvent) -> None:
        if event.kind == "start":
            click.echo(self.header, err=True)
        elif event.kind == "message":
            click.echo(event.message, err=True)
        elif (event.kind == "end" and event.done) or (event.kind == "result" and event.best_cost != self.best):
            self.best = event.best_cost
            click.echo(f"[{event.done}/{event.trials}] {_state(event)}", err=True)


@contextmanager
def _bar(header: str) -> Iterator[Callable[[TuneEvent], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("tuning"),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}", markup=False),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("starting", total=None)

        def show(event: TuneEvent) -> None:
            if event.kind == "start":
                progress.console.print(header, markup=False, highlight=False)
            elif event.kind == "message":
                progress.console.print(event.message, markup=False, highlight=False)
            progress.update(task, total=event.trials, completed=event.done, description=_state(event))

        yield show


def _state(event: TuneEvent) -> str:
    median = None if event.best is None else event.best.median_us
    best = f"best {time_text(median)}, {share_text(event.roofline_fraction)} of the roofline" if median else "nothing ok yet"
    return f"{best}; failures: {counts_text(event.failures)}"
