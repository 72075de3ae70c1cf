"""`kronsched compare LOG…`: tuning runs of one workload side by side."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import click

from kronsched.cli.options import json_option
from kronsched.cli.output import only_json, print_json, print_table, time_text

if TYPE_CHECKING:
    from kronsched.report.compare import Comparison


def _compare(*, logs: tuple[str, ...], as_json: bool) -> int:
    from kronsched.report.compare import compare_logs

    with only_json(as_json):
        found = compare_logs(logs)
    if as_json:
        print_json(dataclasses.asdict(found))
    else:
        _print(found)
    return 0


def _print(found: Comparison) -> None:
    from kronsched.report.compare import SECONDS, SHARES, TRIALS

    title = f"{found.label} on {found.device}: best of all runs {time_text(found.best_us)}"
    rows = [
        [
            run.name,
            time_text(run.best_us),
            f"{run.trials} ({run.failures})",
            f"{run.seconds:.1f} s",
            *(f"{at[0]:.0f} / {at[1]:.1f} s" if at is not None else "–" for at in run.reached),
        ]
        for run in found.runs
    ]
    print_table(title, ["run", "best", "trials (failed)", "wall", *(f"to {share:.0%}" for share in SHARES)], rows)
    curve = [[run.name, *(time_text(us) for us in (*run.after_trials, *run.after_seconds))] for run in found.runs]
    print_table("best so far", ["run", *(f"{n} trials" for n in TRIALS), *(f"{s:g} s" for s in SECONDS)], curve)


compare = click.Command(
    "compare",
    params=[click.Argument(["logs"], nargs=-1, required=True, type=click.Path()), json_option],
    callback=_compare,
    help="Compare tuning runs of one workload: best so far against trials and wall time.",
)
