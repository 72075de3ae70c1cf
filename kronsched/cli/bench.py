"""`kronsched bench FAMILY --suite NAME`: a named suite of shapes against the peers that are installed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from kronsched.cli.options import json_option, target_option
from kronsched.cli.output import only_json, print_json, print_table, share_text, time_text

if TYPE_CHECKING:
    from kronsched.bench.run import Row


def _bench(
    *,
    family: str,
    suite: str,
    peers: str | None,
    dtype: str | None,
    trials: int,
    limit: int | None,
    target: str,
    as_json: bool,
) -> int:
    from kronsched.bench.peers import PEERS
    from kronsched.bench.run import geomean, run_suite, versions
    from kronsched.bench.suites import load_suite
    from kronsched.hardware import resolve_target

    names = list(PEERS.get(family, {})) if peers is None else [p.strip() for p in peers.split(",") if p.strip()]
    workloads = load_suite(family, suite, dtype)[:limit]
    device = resolve_target(target)
    with only_json(as_json):
        rows = run_suite(workloads, device, names, trials, _say)
    ratios = {name: geomean(rows, name) for name in names}
    if as_json:
        print_json(
            {
                "suite": f"{family}/{suite}",
                "device": device.to_dict(),
                "rows": [r.to_dict() for r in rows],
                "geomean": ratios,
                "versions": versions(),
            }
        )
    else:
        table = [
            [r.workload.label, time_text(r.us), share_text(r.floor_us / r.us if r.us else None)]
            + [time_text(r.peers[name]) for name in names]
            + [r.error or ""]
            for r in rows
        ]
        print_table(f"{family}/{suite} on {device.name}", ["workload", "kronsched", "of roofline", *names, "error"], table)
        for name, ratio in ratios.items():
            if ratio is not None:
                click.echo(f"geometric mean of {name} / kronsched: {ratio:.3g}×")
    return 0 if any(r.us is not None for r in rows) else 1


def _say(row: Row) -> None:
    click.echo(f"{row.workload.label}: {time_text(row.us)}" + (f" ({row.error})" if row.error else ""), err=True)
    for name, note in row.notes.items():
        click.echo(f"  {name}: {note}", err=True)


bench = click.Command(
    "bench",
    params=[
        click.Argument(["family"], metavar="FAMILY"),
        click.Option(["--suite"], required=True, help="Name of the suite, such as large."),
        click.Option(["--peers"], default=None, help="Comma-separated names. [default: all of the family]"),
        click.Option(["--dtype"], default=None, help="dtype of the shapes that name none. [default: the family's]"),
        click.Option(["--trials"], type=click.IntRange(0), default=0, help="Tune shapes without a record first. [default: 0]"),
        click.Option(["--limit"], type=click.IntRange(1), default=None, help="Only the first so many shapes."),
        target_option,
        json_option,
    ],
    callback=_bench,
    help="Time a suite of shapes against the peers that are installed.",
)
