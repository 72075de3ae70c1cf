"""`kronsched select RESULTS... [-o TABLE]`: from results of `bench ks`, when a library is faster, and is it predicted."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kronsched.cli.options import json_option
from kronsched.cli.output import print_json, print_table
from kronsched.errors import ArgumentError

if TYPE_CHECKING:
    from kronsched.bench.selection import Verdict


def _select(*, results: tuple[str, ...], out: str | None, as_json: bool) -> int:
    from kronsched.bench.selection import entries_of, judge
    from kronsched.nn.ks_select import save_table

    device, entries = entries_of([Path(p) for p in results])
    if not entries:
        raise ArgumentError("the results hold no row of family ks with a time of a library formulation")
    verdicts = judge(entries)
    if out is not None:
        save_table(Path(out), device, entries)
    if as_json:
        print_json({"device": device, "entries": len(entries), "verdicts": [v.to_dict() for v in verdicts], "table": out})
    else:
        _print(device, len(entries), verdicts)
        if out is not None:
            click.echo(f"{len(entries)} entries -> {out}")
    return 0


def _print(device: str, count: int, verdicts: list[Verdict]) -> None:
    columns = ["group", "rule", "shapes", "time / best", "worst", "right", "library"]
    rows: list[list[Any]] = [
        [v.group, v.rule, str(v.shapes), f"{v.regret:.3f}", f"{v.worst:.2f}", f"{v.right:.0%}", f"{v.library:.0%}"]
        for v in verdicts
    ]
    print_table(f"{count} shapes on {device}", columns, rows)
    click.echo("time / best: geometric mean over the shapes of the time of what the rule runs, over that of the fastest.")


select = click.Command(
    "select",
    params=[
        click.Argument(["results"], type=click.Path(dir_okay=False), nargs=-1, required=True, metavar="RESULTS..."),
        click.Option(
            ["-o", "--output", "out"],
            type=click.Path(dir_okay=False),
            default=None,
            help="Write the table that ks_matmul chooses by, such as ~/.local/share/kronsched/logs/library/ks.json.",
        ),
        json_option,
    ],
    callback=_select,
    help="Compare rules that choose between our Kronecker-sparse kernels and torch's matmuls, on results of `bench ks -o`: "
    "the predictor (each shape without its own measurement), the rule of ksmm's paper, and no choice at all.",
)
