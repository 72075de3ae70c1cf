"""`kronsched versus conv2d|gemm|FILE`: our tuner against TVM MetaSchedule, at equal wall time and at equal trials."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kronsched.cli.options import Seconds, errors_name_options, json_option, target_option
from kronsched.cli.output import only_json, print_json, print_table, share_text, time_text
from kronsched.cli.shapes import check_output, shape_options, shapes_of
from kronsched.errors import ArgumentError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kronsched.bench.versus import Match, Side
    from kronsched.workloads.base import Workload


def _versus(
    *,
    what: str,
    suite: str | None,
    skip: int,
    limit: int | None,
    seconds: float | None,
    trials: int | None,
    as_shipped: bool,
    warm_start: bool,
    batch: int | None,
    population: int | None,
    peer_strategy: str | None,
    threads: int | None,
    builders: int | None,
    build_timeout: float,
    seed: int,
    target: str,
    output: str | None,
    as_json: bool,
) -> int:
    from kronsched.bench.metaschedule_program import unsupported
    from kronsched.bench.versus import versus

    if seconds is None and trials is None:
        raise ArgumentError("--seconds or --trials is needed: how long, or how many trials, each side may tune")
    check_output(output)
    workloads = shapes_of(what, suite, skip, limit)
    if all(reasons := [unsupported(workload) for workload in workloads]):
        raise UnsupportedError(str(reasons[0]))
    done: list[Match] = []
    single: list[tuple[Workload, Side]] = []

    def store() -> None:
        if output is not None:
            Path(output).write_text(json.dumps(_summary(done, seconds, trials, not as_shipped, single)) + "\n", encoding="utf-8")

    def on_side(workload: Workload, side: Side) -> None:
        single.append((workload, side))
        store()

    def on_match(match: Match) -> None:
        done.append(match)
        single.clear()
        click.echo(_line(match), err=True)
        store()

    options = {"batch": batch, "population": population, "strategy": peer_strategy, "threads": threads}
    with only_json(as_json), errors_name_options(build_timeout_s="--build-timeout", strategy="--peer-strategy"):
        versus(
            workloads,
            seconds=seconds,
            trials=trials,
            target=target,
            repaired=not as_shipped,
            builders=builders,
            seed=seed,
            warm_start=warm_start,
            build_timeout_s=build_timeout,
            peer_options={name: value for name, value in options.items() if value is not None},
            on_event=_Progress(),
            on_side=on_side,
            on_match=on_match,
        )
    if as_json:
        print_json(_summary(done, seconds, trials, not as_shipped))
    else:
        _print(done)
    return 0 if any(m.ours.best() for m in done) else 1


class _Progress:
    """Prints stages, and trials that are better than those before, on stderr."""

    def __init__(self) -> None:
        self._best: dict[tuple[Workload, str], float] = {}
        self._trials: dict[tuple[Workload, str], int] = {}

    def __call__(self, workload: Workload, side: str, event: Mapping[str, Any]) -> None:
        text, key = event.get("stage"), (workload, side)
        if text is None:
            us = event["us"]
            self._trials[key] = self._trials.get(key, 0) + 1
            if us is None or us >= self._best.get(key, math.inf):
                return
            self._best[key] = us
            text = f"{time_text(us)}, trial {self._trials[key]}"
        click.echo(f"  {side} {event['seconds']:.1f} s: {text}", err=True)


def _summary(
    matches: list[Match],
    seconds: float | None,
    trials: int | None,
    repaired: bool,
    single: Sequence[tuple[Workload, Side]] = (),
) -> dict[str, Any]:
    """single: sides whose opponent has not ended yet."""
    from kronsched.bench.run import versions
    from kronsched.bench.versus import geomean

    return {
        "seconds": seconds,
        "trials": trials,
        "repaired": repaired,
        "rows": [m.to_dict() for m in matches],
        "unfinished": [{"label": workload.label, **side.to_dict()} for workload, side in single],
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
        *shape_options,
        click.Option(["--seconds"], type=Seconds(0), default=None, help="Wall time of each tuner, for each shape."),
        click.Option(["--trials"], type=click.IntRange(1), default=None, help="Most trials of each tuner, for each shape."),
        click.Option(
            ["--as-shipped"], is_flag=True, help="MetaSchedule with TVM's storage rewrite, after which most candidates fail."
        ),
        click.Option(["--warm-start"], is_flag=True, help="Ours may start from logs of other shapes."),
        click.Option(["--batch"], type=click.IntRange(1), default=None, help="MetaSchedule's candidates a round. [default: 16]"),
        click.Option(
            ["--population"], type=click.IntRange(4), default=None, help="Of MetaSchedule's evolutionary search. [default: 32]"
        ),
        click.Option(
            ["--peer-strategy"], default=None, help="MetaSchedule's: evolutionary or replay-trace. [default: the first]"
        ),
        click.Option(
            ["--threads"], type=click.IntRange(1), default=None, help="MetaSchedule's for sampling. [default: as builders]"
        ),
        click.Option(["--builders"], type=click.IntRange(1), default=None, help="Build processes of each. [default: the cores]"),
        click.Option(["--build-timeout"], type=Seconds(1), default=30.0, help="Seconds of one build. [default: 30]"),
        click.Option(["--seed"], type=click.INT, default=0, help="Seed of both searches. [default: 0]"),
        target_option,
        click.Option(["-o", "--output"], type=click.Path(dir_okay=False), default=None, help="Store the JSON here as it comes."),
        json_option,
    ],
    callback=_versus,
    help="Tune the same shapes with kronsched and with TVM MetaSchedule, each in a process that is ended when its time is up.",
)
"""The command."""
