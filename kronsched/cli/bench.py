"""`kronsched bench FAMILY|FILE --suite NAME`: a suite of shapes against the peers that are installed."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kronsched.cli.bench_multi import BenchCommand
from kronsched.cli.bench_output import print_rows, say_row
from kronsched.cli.options import Seconds, json_option, target_option
from kronsched.cli.output import only_json, print_json
from kronsched.errors import ArgumentError

if TYPE_CHECKING:
    from kronsched.bench.row import Row
    from kronsched.bench.suites import Case
    from kronsched.bench.tuning import Logs
    from kronsched.hardware import Device

QUICK_FROM = 48
"""Shapes on a GPU from which a bench is quick unless told otherwise."""


def _shard(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[int, int] | None:
    """Such as 2/8, the second of eight parts."""
    if value is None:
        return None
    number, _, count = value.partition("/")
    if not (number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
        raise click.BadParameter(f"{value!r} is not allowed: write I/N with 1 ≤ I ≤ N, such as 2/8", ctx, param)
    return int(number), int(count)


@dataclass(frozen=True)
class _Job:
    """What is to be timed, on what, and how; see the options of the command."""

    name: str
    cases: Sequence[Case]
    device: Device
    peers: Sequence[str]
    logs: Logs
    trials: int
    tune_seconds: float | None
    targets: Mapping[str, float] | None
    quick: bool
    seconds: float | None
    energy: bool

    def described(self, rows: Sequence[Row]) -> dict[str, Any]:
        """The JSON of these rows."""
        from kronsched.bench.run import summary

        return {**summary(self.name, self.device, rows, self.peers), "mode": "quick" if self.quick else "thorough"}


def _bench(*, output: str | None, resume: bool, as_json: bool, **options: Any) -> int:
    from kronsched.bench.results import Results

    if resume and output is None:
        raise ArgumentError("--resume needs --output: the file whose rows are kept")
    job = _job(resume=resume, **options)
    results = Results(Path(output) if output else None, job.described, job.device.name, resume)
    said: set[str] = set()

    def progress(row: Row) -> None:
        if results.rows.get(row.workload.key) is not row:
            say_row(row, said)
        results.add(row)

    with only_json(as_json):
        try:
            _run(job, results.rows, progress)
        finally:
            results.save(complete={case.workload.key for case in job.cases} <= set(results.rows))
    rows = list(results.rows.values())
    if as_json:
        print_json(job.described(rows))
    else:
        print_rows(job.name, job.device, rows, job.peers)
    return 0 if any(row.us is not None for row in rows) else 1


def _job(
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
) -> _Job:
    """The options, checked."""
    from kronsched.bench.run import choose_peers
    from kronsched.bench.tuning import Logs
    from kronsched.hardware import resolve_target

    if log is not None and log_dir is not None:
        raise ArgumentError("--log and --log-dir are not allowed together: name one file for all shapes, or a folder")
    name, cases = _cases(what, suite, [d for text in dtypes for d in _split(text)], limit, shard)
    names = choose_peers(cases, None if peers is None else _split(peers))
    device = resolve_target(target)
    quick = quick if quick is not None else energy or (device.kind == "cuda" and len(cases) >= QUICK_FROM)
    if not quick and (energy or seconds is not None or resume):
        raise ArgumentError("--energy, --for and --resume are only allowed with --quick")
    if beat is not None and not (quick and trials):
        raise ArgumentError("--beat is only allowed with --quick and --tune")
    targets = _targets(Path(beat), device) if beat is not None else None
    logs = Logs(Path(log) if log else None, Path(log_dir) if log_dir else None)
    return _Job(name, cases, device, names, logs, trials, tune_seconds, targets, quick, seconds, energy)


def _targets(path: Path, device: Device) -> dict[str, float]:
    """The best peer's time of each shape of an earlier run, by workload key."""
    from kronsched.bench.results import read_rows

    rows = read_rows(path, device.name)
    return {key: us for key, row in rows.items() if row.best_peer is not None and (us := row.peers[row.best_peer]) is not None}


def _run(job: _Job, known: Mapping[str, Row], progress: Callable[[Row], None]) -> None:
    """Tune and time. known: rows that need not be timed again."""
    from kronsched.bench.grid import run_grid
    from kronsched.bench.run import run_suite

    every: dict[str, Any] = {"logs": job.logs, "progress": progress, "say": _say}
    if not job.quick:
        run_suite(job.cases, job.device, job.peers, trials=job.trials, tune_seconds=job.tune_seconds, **every)
        return
    known = {**known, **(_tune(job, progress) if job.trials else {})}
    run_grid(job.cases, job.device, job.peers, known=known, seconds=job.seconds, energy=job.energy, **every)


def _tune(job: _Job, progress: Callable[[Row], None]) -> dict[str, Row]:
    """Tune the shapes together; the rows of those whose peers were timed at once."""
    from kronsched.bench.grid_contest import Contests
    from kronsched.bench.grid_tuning import tune_grid

    found: dict[str, Row] = {}

    def keep(row: Row) -> None:
        found[row.workload.key] = row
        progress(row)

    contests = Contests(job.cases, job.peers, keep, job.energy)
    limits: dict[str, Any] = {"seconds": job.tune_seconds, "targets": job.targets}
    tune_grid([c.workload for c in job.cases], job.device, job.trials, job.logs, **limits, contests=contests, say=_say)
    return found


def _say(line: str) -> None:
    click.echo(line, err=True)


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


def _split(text: str) -> list[str]:
    return [piece.strip() for piece in text.split(",") if piece.strip()]


bench = BenchCommand(
    "bench",
    params=[
        click.Argument(["what"], metavar="FAMILY|FILE"),
        click.Option(
            ["--suite"],
            default=None,
            help='Name(s) of suites, such as large, or "all"; an unknown one lists them. [default: the first]',
        ),
        click.Option(["--peers"], default=None, help="Comma-separated names. [default: all of the family]"),
        click.Option(
            ["--dtype", "dtypes"],
            multiple=True,
            help="dtype(s) of the shapes that name none; may be repeated. [default: the family's]",
        ),
        click.Option(["--tune", "trials"], type=click.IntRange(0), default=0, help="First tune each shape up to so many trials."),
        click.Option(
            ["--tune-for", "tune_seconds"],
            type=Seconds(0),
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
        click.Option(["--for", "seconds"], type=Seconds(0), default=None, help="Time no shape after so many seconds (quick)."),
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
