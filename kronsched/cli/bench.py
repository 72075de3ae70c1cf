"""`kronsched bench FAMILY|FILE --suite NAME`: a suite of shapes against the peers that are installed."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kronsched.cli.bench_multi import BenchCommand
from kronsched.cli.options import json_option, target_option
from kronsched.cli.output import only_json, print_json, print_table, share_text, time_text
from kronsched.errors import ArgumentError

if TYPE_CHECKING:
    from kronsched.bench.row import Row
    from kronsched.bench.suites import Case
    from kronsched.hardware import Device

QUICK_FROM = 48
"""Shapes on a GPU from which a bench is quick unless told otherwise."""
LISTED = 100
"""Rows that are printed one by one; of more, only groups and a fifth as many of the rows that lose and of the notes."""


def _shard(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[int, int] | None:
    """Such as 2/8, the second of eight parts."""
    if value is None:
        return None
    number, _, count = value.partition("/")
    if not (number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
        raise click.BadParameter(f"{value!r} is not allowed: write I/N with 1 ≤ I ≤ N, such as 2/8", ctx, param)
    return int(number), int(count)


def _bench(
    *,
    what: str,
    suite: str | None,
    peers: str | None,
    dtypes: tuple[str, ...],
    trials: int,
    tune_seconds: float | None,
    log: str | None,
    log_dir: str | None,
    limit: int | None,
    shard: tuple[int, int] | None,
    quick: bool | None,
    energy: bool,
    seconds: float | None,
    resume: bool,
    beat: str | None,
    target: str,
    output: str | None,
    as_json: bool,
) -> int:
    from kronsched.bench.results import Results, read_rows
    from kronsched.bench.run import choose_peers, summary
    from kronsched.bench.tuning import Logs
    from kronsched.hardware import resolve_target

    if log is not None and log_dir is not None:
        raise ArgumentError("log and log_dir are not allowed together: name one file for all shapes, or a folder")
    if resume and output is None:
        raise ArgumentError("resume needs output: the file whose rows are kept")
    name, cases = _cases(what, suite, [d for text in dtypes for d in _split(text)], limit, shard)
    names = choose_peers(cases, None if peers is None else _split(peers))
    device = resolve_target(target)
    logs = Logs(Path(log) if log else None, Path(log_dir) if log_dir else None)
    quick = quick if quick is not None else energy or (device.kind == "cuda" and len(cases) >= QUICK_FROM)
    if not quick and (energy or seconds is not None or resume):
        raise ArgumentError("energy, for and resume are only allowed with quick")

    def described(rows: Sequence[Row]) -> dict[str, Any]:
        return {**summary(name, device, rows, names), "mode": "quick" if quick else "thorough"}

    results = Results(Path(output) if output else None, described, device.name, resume)
    said: set[str] = set()
    wanted = {case.workload.key for case in cases}

    def progress(row: Row) -> None:
        if results.rows.get(row.workload.key) is not row:
            _say(row, said)
        results.add(row)

    tune: dict[str, Any] = {"trials": trials, "tune_seconds": tune_seconds, "logs": logs}
    if beat is not None:
        if not (quick and trials):
            raise ArgumentError("beat is only allowed with quick and tune")
        rows = read_rows(Path(beat), device.name).items()
        tune["targets"] = {key: row.peers[row.best_peer] for key, row in rows if row.best_peer is not None}
    with only_json(as_json):
        try:
            _run(cases, device, names, tune, quick, seconds, energy, results.rows, progress)
        finally:
            results.save(complete=wanted <= set(results.rows))
    done = list(results.rows.values())
    if as_json:
        print_json(described(done))
    else:
        _print(name, device, done, names)
    return 0 if any(r.us is not None for r in done) else 1


def _run(
    cases: Sequence[Case],
    device: Device,
    peers: Sequence[str],
    tune: Mapping[str, Any],
    quick: bool,
    seconds: float | None,
    energy: bool,
    known: Mapping[str, Row],
    progress: Callable[[Row], None],
) -> None:
    from kronsched.bench.grid import run_grid
    from kronsched.bench.run import run_suite

    def say(line: str) -> None:
        click.echo(line, err=True)

    if not quick:
        run_suite(cases, device, peers, **tune, progress=progress, say=say)
        return
    known = dict(known)
    if tune["trials"]:
        from kronsched.bench.grid_contest import Contests
        from kronsched.bench.grid_tuning import tune_grid

        def keep(row: Row) -> None:
            known[row.workload.key] = row
            progress(row)

        workloads, limits = [c.workload for c in cases], {"seconds": tune["tune_seconds"], "targets": tune.get("targets")}
        tune_grid(
            workloads, device, tune["trials"], tune["logs"], **limits, contests=Contests(cases, peers, keep, energy), say=say
        )
    run_grid(
        cases,
        device,
        peers,
        logs=tune["logs"],
        known=known,
        seconds=seconds,
        energy=energy,
        progress=progress,
        say=say,
    )


def _cases(
    what: str, suite: str | None, dtypes: Sequence[str], limit: int | None, shard: tuple[int, int] | None
) -> tuple[str, list[Case]]:
    """(name, cases) of one or several suites of a family, or of a user's file."""
    from kronsched.bench.suites import load_cases, load_file, suite_names

    cases: list[Case] = []
    if what.endswith(".json") or Path(what).is_file():
        name = what if suite is None else f"{what}/{suite}"
        for one in [None] if suite is None else _split(suite):
            cases += load_file(Path(what), one, dtypes, limit)
    else:
        name = f"{what}/{suite or suite_names(what)[0]}"
        for one in [None] if suite is None else _split(suite):
            cases += load_cases(what, one, dtypes, limit)
    cases = list({case.workload.key: case for case in cases}.values())
    if shard is None:
        return name, cases
    number, count = shard
    random.Random(0).shuffle(cases)  # suites are sorted: every N-th shape of one is no fair part
    return f"{name} {number}/{count}", cases[number - 1 :: count]


def _print(name: str, device: Device, rows: Sequence[Row], peers: Sequence[str]) -> None:
    from kronsched.bench.row import geomean, published_geomean, slower_than

    published = list(dict.fromkeys(p for row in rows for p in row.published))
    columns = [
        "workload",
        "kronsched",
        "floor",
        "share of floor",
        *peers,
        *(f"{p} (published)" for p in published),
        "error",
        "kernel",
    ]
    table = []
    for row in rows:
        times = [_peer_text(row, row.peers.get(p)) for p in peers] + [_peer_text(row, row.published.get(p)) for p in published]
        floor = f"{time_text(row.floor_us)} ({row.floor_by})"
        error = "–" if row.error is None else f"{row.error:.2g}"
        table.append(
            [row.workload.label, time_text(row.us), floor, share_text(row.share_of_floor), *times, error, _kernel_text(row)]
        )
    if len(rows) <= LISTED:
        print_table(f"{name} on {device.name}", columns, table)
    _print_groups(f"{name} on {device.name}", rows, device.kind == "cuda")
    _print_chains(f"{name} on {device.name}", rows)
    for text in list(dict.fromkeys(f"{who}: {note}" for row in rows for who, note in row.notes.items()))[: LISTED // 5]:
        click.echo(text)
    if any(row.kernel is not None and row.kernel.launches > 1 for row in rows):
        click.echo("passes: the floor moves the tensor once; a kernel of n passes moves it n times")
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


def _say(row: Row, said: set[str]) -> None:
    """One line on stderr, and notes that were not said before."""
    line = f"{row.workload.label}: {time_text(row.us)}, {share_text(row.share_of_floor)} of the floor"
    ratios = ", ".join(f"{name} {ratio:.2f}×" for name, ratio in row.ratios.items() if ratio is not None)
    click.echo(line + (f", {ratios}" if ratios else "") + (f" ({row.failure})" if row.failure else ""), err=True)
    for line in (f"  {name}: {note}" for name, note in row.notes.items()):
        if line not in said:
            click.echo(line, err=True)
            said.add(line)


def _split(text: str) -> list[str]:
    return [piece.strip() for piece in text.split(",") if piece.strip()]


bench = BenchCommand(
    "bench",
    params=[
        click.Argument(["what"], metavar="FAMILY|FILE"),
        click.Option(["--suite"], default=None, help='Name(s) of suites, such as large, or "all". [default: the first]'),
        click.Option(["--peers"], default=None, help="Comma-separated names. [default: all of the family]"),
        click.Option(
            ["--dtype", "dtypes"],
            multiple=True,
            help="dtype(s) of the shapes that name none; may be repeated. [default: the family's]",
        ),
        click.Option(["--tune", "trials"], type=click.IntRange(0), default=0, help="First tune each shape up to so many trials."),
        click.Option(
            ["--tune-for", "tune_seconds"],
            type=click.FloatRange(0),
            default=None,
            help="Start tuning no shape after so many seconds.",
        ),
        click.Option(["--log"], type=click.Path(dir_okay=False), default=None, help="One tuning log for all shapes."),
        click.Option(
            ["--log-dir"],
            type=click.Path(file_okay=False),
            default=None,
            help="A folder of tuning logs, one a shape, named by its key.",
        ),
        click.Option(["--limit"], type=click.IntRange(1), default=None, help="Only the first so many shapes."),
        click.Option(
            ["--shard"],
            callback=_shard,
            metavar="I/N",
            default=None,
            help="Only the I-th of N random parts, such as 2/8; always the same.",
        ),
        click.Option(
            ["--quick/--thorough"],
            default=None,
            help=f"Time each shape shortly, while the next are built. [default: quick from {QUICK_FROM} shapes on a GPU]",
        ),
        click.Option(["--energy"], is_flag=True, help="Joules a call as well, ours and the best peer's (NVIDIA GPUs; quick)."),
        click.Option(
            ["--for", "seconds"], type=click.FloatRange(0), default=None, help="Time no shape after so many seconds (quick)."
        ),
        click.Option(
            ["--beat"],
            type=click.Path(dir_okay=False),
            default=None,
            help="Results of an earlier run: shapes whose best peer was faster are tuned first (quick).",
        ),
        click.Option(["--resume"], is_flag=True, help="Keep the rows that the output file holds and time the others (quick)."),
        target_option,
        click.Option(
            ["-o", "--output"], type=click.Path(dir_okay=False), default=None, help="Store the JSON here, after every shape anew."
        ),
        json_option,
    ],
    callback=_bench,
    help="Time a suite of a FAMILY, or the workloads listed in a JSON FILE, against the peers that are installed. "
    "`bench kron-multi --help`: several GPUs.",
)
