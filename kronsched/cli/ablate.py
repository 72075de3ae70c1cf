"""`kronsched ablate conv2d|FILE`: what each idea of a schedule is worth, by tuning without it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kronsched.cli.options import errors_name_options, json_option, target_option
from kronsched.cli.output import only_json, print_json, print_table, time_text
from kronsched.cli.shapes import check_output, shape_options, shapes_of

if TYPE_CHECKING:
    from kronsched.bench.ablation import Outcome


def _ablate(
    *,
    what: str,
    suite: str | None,
    skip: int,
    limit: int | None,
    schedule: str,
    trials: int,
    builders: int | None,
    seed: int,
    target: str,
    output: str | None,
    as_json: bool,
) -> int:
    from kronsched.bench.ablation import ablate as run
    from kronsched.hardware import resolve_target

    check_output(output)
    workloads = shapes_of(what, suite, skip, limit)
    done: list[Outcome] = []

    def on_outcome(outcome: Outcome) -> None:
        done.append(outcome)
        worth = ", ".join(f"{name} {ratio:.2f}×" for name, ratio in outcome.worth.items())
        click.echo(f"{outcome.workload.label}: {worth or outcome.error or 'nothing found'}", err=True)
        if output is not None:
            Path(output).write_text(json.dumps(_summary(done, trials)) + "\n", encoding="utf-8")

    with only_json(as_json), errors_name_options():
        device = resolve_target(target)
        run(workloads, schedule, device, trials, builders=builders, seed=seed, on_outcome=on_outcome)
    if as_json:
        print_json(_summary(done, trials))
    else:
        _print(schedule, done)
    return 0 if any(o.us for o in done) else 1


def _summary(outcomes: list[Outcome], trials: int) -> dict[str, Any]:
    from kronsched.bench.run import versions

    return {"trials": trials, "rows": [o.to_dict() for o in outcomes], "versions": versions()}


def _print(schedule: str, outcomes: list[Outcome]) -> None:
    from kronsched.bench.ablation import ABLATIONS, BLOCKED, WHOLE

    names = [*ABLATIONS[schedule], BLOCKED]
    rows = []
    for o in outcomes:
        cells = [f"{time_text(o.us.get(n))} {o.worth[n]:.2f}×" if n in o.worth else "–" for n in names]
        rows.append([o.workload.label, time_text(o.us.get(WHOLE)), *cells])
    print_table(f"{schedule}: best time, and what is lost without", ["workload", WHOLE, *names], rows)
    for o in outcomes:
        if o.error:
            click.echo(f"{o.workload.label}: {o.error}")


ablate = click.Command(
    "ablate",
    params=[
        *shape_options,
        click.Option(["--schedule"], default="conv2d_cuda_mma", help="The schedule. [default: conv2d_cuda_mma]"),
        click.Option(["--trials"], type=click.IntRange(1), default=24, help="Of each variant of each shape. [default: 24]"),
        click.Option(["--builders"], type=click.IntRange(1), default=None, help="Build processes. [default: the cores]"),
        click.Option(["--seed"], type=click.INT, default=0, help="Seed of the searches. [default: 0]"),
        target_option,
        click.Option(["-o", "--output"], type=click.Path(dir_okay=False), default=None, help="Store the JSON here as it comes."),
        json_option,
    ],
    callback=_ablate,
    help="Tune shapes with a schedule's whole space and with parts of it that lack one idea each.",
)
"""The command."""
