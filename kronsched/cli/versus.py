"""`kronsched versus conv2d|gemm|FILE`: our tuner against TVM MetaSchedule, at equal wall time and at equal trials."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kronsched.cli.options import json_option, target_option
from kronsched.cli.output import only_json, print_json, print_table, share_text, time_text
from kronsched.errors import ArgumentError

if TYPE_CHECKING:
    from kronsched.bench.versus import Match

SUITE = "versus"
"""The suite of four layers that is compared by default."""


def _versus(
    *,
    what: str,
    suite: str | None,
    limit: int | None,
    seconds: float | None,
    trials: int | None,
    as_shipped: bool,
    warm_start: bool,
    batch: int | None,
    population: int | None,
    builders: int | None,
    seed: int,
    target: str,
    output: str | None,
    as_json: bool,
) -> int:
    from kronsched.bench.suites import load_cases, load_file, suite_families
    from kronsched.bench.versus import versus

    if seconds is None and trials is None:
        raise ArgumentError("seconds is missing: say how long (--seconds) or how many (--trials) each side may tune")
    if output is not None and not Path(output).parent.is_dir():
        raise ArgumentError(f"output={output!r} cannot be written: there is no folder {str(Path(output).parent)!r}")
    known = what in suite_families()
    cases = load_cases(what, suite or SUITE, limit=limit) if known else load_file(Path(what), suite, limit=limit)
    done: list[Match] = []

    def on_match(match: Match) -> None:
        done.append(match)
        click.echo(_line(match), err=True)
        if output is not None:
            Path(output).write_text(json.dumps(_summary(done, seconds, trials, not as_shipped)) + "\n", encoding="utf-8")

    with only_json(as_json):
        versus(
            [case.workload for case in cases],
            seconds=seconds,
            trials=trials,
            target=target,
            repaired=not as_shipped,
            builders=builders,
            seed=seed,
            warm_start=warm_start,
            peer_options={name: value for name, value in (("batch", batch), ("population", population)) if value is not None},
            on_match=on_match,
        )
    if as_json:
        print_json(_summary(done, seconds, trials, not as_shipped))
    else:
        _print(done)
    return 0 if any(m.ours.best() for m in done) else 1


def _summary(matches: list[Match], seconds: float | None, trials: int | None, repaired: bool) -> dict[str, Any]:
    from kronsched.bench.run import versions
    from kronsched.bench.versus import geomean

    return {
        "seconds": seconds,
        "trials": trials,
        "repaired": repaired,
        "rows": [m.to_dict() for m in matches],
        "geomean_equal_time": geomean([m.equal_time for m in matches]),
        "geomean_equal_trials": geomean([m.equal_trials for m in matches]),
        "versions": versions(),
    }


def _line(match: Match) -> str:
    sides = (f"{s.name} {time_text(s.best_us())} of {len(s.trials)}" + (f" ({s.error})" * bool(s.error)) for s in _sides(match))
    return f"{match.workload.label}: " + ", ".join(sides) + f"; equal time {_times(match.equal_time)}"


def _sides(match: Match) -> tuple[Any, Any]:
    return match.ours, match.peer


def _print(matches: list[Match]) -> None:
    from kronsched.bench.versus import geomean

    columns = ["workload", "ours", "trials", "right", "metaschedule", "trials", "right", "equal time", "equal trials"]
    rows = []
    for m in matches:
        cells = [text for s in _sides(m) for text in (time_text(s.best_us()), str(len(s.trials)), share_text(s.right))]
        rows.append([m.workload.label, *cells, _times(m.equal_time), f"{_times(m.equal_trials)} ({m.common})"])
    print_table("metaschedule / kronsched", columns, rows)
    for m in matches:
        for side in _sides(m):
            if side.error:
                click.echo(f"{m.workload.label}: {side.name}: {side.error}")
    means = [geomean([m.equal_time for m in matches]), geomean([m.equal_trials for m in matches])]
    click.echo(f"geometric mean: {_times(means[0])} at equal time, {_times(means[1])} at equal trials")


def _times(ratio: float | None) -> str:
    return "–" if ratio is None else f"{ratio:.3g}×"


versus = click.Command(
    "versus",
    params=[
        click.Argument(["what"], metavar="FAMILY|FILE"),
        click.Option(["--suite"], default=None, help=f'Name of a suite, or "all". [default: {SUITE}; of a file its first]'),
        click.Option(["--limit"], type=click.IntRange(1), default=None, help="Only the first so many shapes."),
        click.Option(["--seconds"], type=click.FloatRange(0), default=None, help="Wall time of each tuner, for each shape."),
        click.Option(["--trials"], type=click.IntRange(1), default=None, help="Most trials of each tuner, for each shape."),
        click.Option(
            ["--as-shipped"], is_flag=True, help="MetaSchedule with TVM's storage rewrite, after which most candidates fail."
        ),
        click.Option(["--warm-start"], is_flag=True, help="Ours may start from logs of other shapes."),
        click.Option(["--batch"], type=click.IntRange(1), default=None, help="MetaSchedule's candidates a round. [default: 32]"),
        click.Option(
            ["--population"], type=click.IntRange(4), default=None, help="Of MetaSchedule's evolutionary search. [default: 64]"
        ),
        click.Option(["--builders"], type=click.IntRange(1), default=None, help="Build processes of each. [default: the cores]"),
        click.Option(["--seed"], type=click.INT, default=0, help="Seed of both searches. [default: 0]"),
        target_option,
        click.Option(["-o", "--output"], type=click.Path(dir_okay=False), default=None, help="Store the JSON here as it comes."),
        json_option,
    ],
    callback=_versus,
    help="Tune the same shapes with kronsched and with TVM MetaSchedule, each in a process that is ended when its time is up.",
)
"""The command."""
