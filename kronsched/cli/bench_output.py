"""What `kronsched bench` prints: a line a row on stderr as it is timed, tables and means on stdout at the end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from kronsched.cli.output import print_table, share_text, time_text

if TYPE_CHECKING:
    from kronsched.bench.row import Row
    from kronsched.hardware import Device

LISTED = 100
"""Rows that are printed one by one; of more, only groups and a fifth as many of the rows that lose and of the notes."""


def print_rows(name: str, device: Device, rows: Sequence[Row], peers: Sequence[str]) -> None:
    """Tables of a suite's rows, groups and chains, notes, and means over the rows.

    name: of the suite.  peers: in the order of their columns.
    """
    title = f"{name} on {device.name}"
    published = list(dict.fromkeys(p for row in rows for p in row.published))
    if len(rows) <= LISTED:
        _print_each(title, rows, peers, published)
    _print_groups(title, rows, device.kind == "cuda")
    _print_chains(title, rows)
    for text in list(dict.fromkeys(f"{who}: {note}" for row in rows for who, note in row.notes.items()))[: LISTED // 5]:
        click.echo(text)
    if any(row.kernel is not None and row.kernel.launches > 1 for row in rows):
        click.echo("passes: the floor moves the tensor once; a kernel of n passes moves it n times")
    _print_means(rows, peers, published)


def _print_each(title: str, rows: Sequence[Row], peers: Sequence[str], published: Sequence[str]) -> None:
    earlier = [f"{p} (published)" for p in published]
    columns = ["workload", "kronsched", "floor", "share of floor", *peers, *earlier, "error", "kernel"]
    table = []
    for row in rows:
        times = [_peer_text(row, row.peers.get(p)) for p in peers] + [_peer_text(row, row.published.get(p)) for p in published]
        floor = f"{time_text(row.floor_us)} ({row.floor_by})"
        error = "–" if row.error is None else f"{row.error:.2g}"
        table.append(
            [row.workload.label, time_text(row.us), floor, share_text(row.share_of_floor), *times, error, _kernel_text(row)]
        )
    print_table(title, columns, table)


def _print_means(rows: Sequence[Row], peers: Sequence[str], published: Sequence[str]) -> None:
    """The mean over each peer, and the rows where one is faster."""
    from kronsched.bench.row import geomean, published_geomean, slower_than

    for peer in peers:
        _say_mean(peer, geomean(rows, peer))
    for peer in published:
        _say_mean(f"published {peer}", published_geomean(rows, peer))
    for peer in dict.fromkeys([*peers, *published]):
        if slow := slower_than(rows, peer):
            more = f"; and {len(slow) - LISTED // 5} more" if len(slow) > LISTED // 5 else ""
            click.echo(f"slower than {peer}: " + "; ".join(row.workload.label for row in slow[: LISTED // 5]) + more)


def _print_groups(title: str, rows: Sequence[Row], selection: bool) -> None:
    from kronsched.bench.groups import NEVER_SLOWER, groups

    found = groups(rows, selection)
    columns = ["group", "rows", "failed", "best peer / ours", "lowest", f"below {NEVER_SLOWER}", "time / floor", "error"]
    energy, served = any(g.joules_geomean for g in found), any(g.served_geomean for g in found)
    columns += ["with selection", "lowest", f"below {NEVER_SLOWER}"] if served else []
    columns += ["joules / best peer's"] if energy else []
    table = []
    for g in found:
        line = [g.name, str(g.rows), str(g.failed), _times(g.best_geomean), _times(g.lowest), str(g.lost)]
        line += ["–" if v is None else f"{v:.3g}" for v in (g.over_floor, g.error)]
        if served:
            lost = "–" if g.served_lost is None else str(g.served_lost)
            line += [_times(g.served_geomean), _times(g.served_lowest), lost]
        table.append(line + (["–" if g.joules_geomean is None else f"{g.joules_geomean:.3g}"] if energy else []))
    if rows:
        print_table(title, columns, table)


def _print_chains(title: str, rows: Sequence[Row]) -> None:
    from kronsched.bench.chains import chains

    table = [
        [c.workload.label, time_text(c.us), str(c.passes), time_text(c.factors_us), _times(c.gain), _times(c.most)]
        for c in chains(rows)
    ]
    if table:
        print_table(f"{title}: chains", ["chain", "kronsched", "passes", "its factors", "gain", "at most"], table)
        click.echo(
            "at most: the factors' floors together / the chain's floor, what one pass gains when all run at their roofline."
        )


def _times(ratio: float | None) -> str:
    return "–" if ratio is None else f"{ratio:.3g}×"


def _say_mean(peer: str, ratio: float | None) -> None:
    if ratio is not None:
        click.echo(f"geometric mean of {peer} / kronsched: {ratio:.3g}×")


def _peer_text(row: Row, us: float | None) -> str:
    return time_text(us) + (f" {us / row.us:.2f}×" if us and row.us else "")


def _kernel_text(row: Row) -> str:
    if row.failure is not None:
        return row.failure
    if row.kernel is None:
        return "–"
    return row.kernel.how + (f", {row.kernel.launches} passes" if row.kernel.launches > 1 else "")


def say_row(row: Row, said: set[str]) -> None:
    """One line on stderr, and notes that were not said before. said: the notes so far."""
    line = f"{row.workload.label}: {time_text(row.us)}, {share_text(row.share_of_floor)} of the floor"
    ratios = ", ".join(f"{name} {ratio:.2f}×" for name, ratio in row.ratios.items() if ratio is not None)
    click.echo(line + (f", {ratios}" if ratios else "") + (f" ({row.failure})" if row.failure else ""), err=True)
    for line in (f"  {name}: {note}" for name, note in row.notes.items()):
        if line not in said:
            click.echo(line, err=True)
            said.add(line)
