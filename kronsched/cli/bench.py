"""`kronsched bench FAMILY|FILE --suite NAME`: a suite of shapes against the peers that are installed."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kronsched.cli.options import json_option, target_option
from kronsched.cli.output import only_json, print_json, print_table, share_text, time_text
from kronsched.errors import ArgumentError

if TYPE_CHECKING:
    from kronsched.bench.row import Row
    from kronsched.bench.suites import Case
    from kronsched.hardware import Device


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
    target: str,
    output: str | None,
    as_json: bool,
) -> int:
    from kronsched.bench.run import choose_peers, run_suite, summary
    from kronsched.bench.tuning import Logs
    from kronsched.hardware import resolve_target

    if log is not None and log_dir is not None:
        raise ArgumentError("log and log_dir are not allowed together: name one file for all shapes, or a folder")
    name, cases = _cases(what, suite, [d for text in dtypes for d in _split(text)], limit)
    names = choose_peers(cases, None if peers is None else _split(peers))
    device = resolve_target(target)
    logs = Logs(Path(log) if log else None, Path(log_dir) if log_dir else None)
    save = _saver(output, name, device, names)
    rows: list[Row] = []
    said: set[str] = set()

    def progress(row: Row) -> None:
        rows.append(row)
        _say(row, said)
        save(rows, len(rows) == len(cases))

    with only_json(as_json):
        run_suite(
            cases,
            device,
            names,
            trials=trials,
            tune_seconds=tune_seconds,
            logs=logs,
            progress=progress,
            say=lambda line: click.echo(line, err=True),
        )
    if as_json:
        print_json(summary(name, device, rows, names))
    else:
        _print(name, device, rows, names)
    return 0 if any(r.us is not None for r in rows) else 1


def _cases(what: str, suite: str | None, dtypes: Sequence[str], limit: int | None) -> tuple[str, list[Case]]:
    """(name, cases) of a family's suite or of a user's file."""
    from kronsched.bench.suites import load_cases, load_file, suite_names

    if what.endswith(".json") or Path(what).is_file():
        return what if suite is None else f"{what}/{suite}", load_file(Path(what), suite, dtypes, limit)
    cases = load_cases(what, suite, dtypes, limit)
    return f"{what}/{suite or suite_names(what)[0]}", cases


def _saver(output: str | None, name: str, device: Device, peers: Sequence[str]) -> Callable[[Sequence[Row], bool], None]:
    """Writes the rows so far to the output file, whole or not at all, so that a run that is cut short leaves its results."""
    from kronsched.bench.run import summary

    if output is None:
        return lambda rows, complete: None
    path = Path(output)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    except OSError as e:
        raise ArgumentError(f"output={output!r} cannot be written: {e.strerror}") from None

    def save(rows: Sequence[Row], complete: bool) -> None:
        data: dict[str, Any] = {**summary(name, device, rows, peers), "complete": complete}
        with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=f".{path.name}.", delete=False, encoding="utf-8") as file:
            json.dump(data, file, indent=1)
            file.write("\n")
        Path(file.name).chmod(0o644)  # a temporary file is private
        Path(file.name).replace(path)

    return save


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
    print_table(f"{name} on {device.name}", columns, table)
    for text in dict.fromkeys(f"{who}: {note}" for row in rows for who, note in row.notes.items()):
        click.echo(text)
    if any(row.kernel is not None and row.kernel.launches > 1 for row in rows):
        click.echo("passes: the floor moves the tensor once; a kernel of n passes moves it n times")
    for peer in peers:
        _say_mean(peer, geomean(rows, peer))
    for peer in published:
        _say_mean(f"published {peer}", published_geomean(rows, peer))
    for peer in dict.fromkeys([*peers, *published]):
        if slow := slower_than(rows, peer):
            click.echo(f"slower than {peer}: " + "; ".join(row.workload.label for row in slow))


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


bench = click.Command(
    "bench",
    params=[
        click.Argument(["what"], metavar="FAMILY|FILE"),
        click.Option(["--suite"], default=None, help='Name of the suite, such as large, or "all". [default: the first]'),
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
        target_option,
        click.Option(
            ["-o", "--output"], type=click.Path(dir_okay=False), default=None, help="Store the JSON here, after every shape anew."
        ),
        json_option,
    ],
    callback=_bench,
    help="Time a suite of a FAMILY, or the workloads listed in a JSON FILE, against the peers that are installed.",
)
