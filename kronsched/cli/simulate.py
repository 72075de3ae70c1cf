"""`kronsched simulate TABLE --strategy S`: replay a search strategy against a measured table, with no kernel run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from kronsched.cli.options import json_option
from kronsched.cli.output import only_json, print_json, print_table, share_text
from kronsched.cli.strategies import spread_text

if TYPE_CHECKING:
    from kronsched.search.simulate import SimulationResult


def _simulate(*, table: str, strategies: tuple[str, ...], seeds: int, trials: int, space: str | None, as_json: bool) -> int:
    from kronsched import registry
    from kronsched.search.simulate import simulate as run_simulation
    from kronsched.search.table import Table

    for name in strategies:
        registry.strategy(name)  # an unknown name is said before the first simulation, not after it
    with only_json(as_json):
        loaded = Table.load(table, space)
        results = []
        for name in strategies:
            click.echo(f"{name}: {seeds} seeds of at most {trials} trials", err=True)
            results.append(run_simulation(loaded, name, seeds=seeds, trials=trials))
    if as_json:
        print_json({"table": table, "strategies": {r.strategy: r.to_dict() for r in results}})
    else:
        _print(results)
    return 0


def _print(results: list[SimulationResult]) -> None:
    from kronsched.search.simulate import SHARES

    first = results[0]
    click.echo(
        f"{first.table}: {first.candidates} candidates, best {first.optimum:.4g}, {len(first.runs)} seeds; medians [quartiles]"
    )
    shares = [f"{share:.2f}" for share in SHARES]
    rows = []
    for result in results:
        rows.append(
            [result.strategy]
            + [spread_text(result.trials_to(share)) for share in SHARES]
            + [spread_text(result.seconds_to(share)) for share in SHARES]
            + _means(result.to_dict())
        )
    calculated = [f"{first.random_trials_to(share)[1]:.0f}" for share in SHARES]
    rows.append(["random, calculated", *calculated, *["–"] * (len(SHARES) + 5)])
    columns = ["strategy", *(f"trials to {s}" for s in shares), *(f"s to {s}" for s in shares)]
    print_table("", [*columns, "ms a trial", "distance", "coverage", "pairwise", "recall@16"], rows)
    points = sorted({at for r in results for at, *_ in r.curve()})
    curves = [[r.strategy, *_curve(r, points)] for r in results]
    print_table("best so far, share of the optimum (median), after so many trials", ["strategy", *map(str, points)], curves)


def _means(data: dict[str, Any]) -> list[str]:
    model = data["model"] or {}
    numbers = (data["search_ms"], data["batch_distance"], data["coverage"], model.get("pairwise"), model.get("recall16"))
    return ["–" if n is None else f"{n:.2g}" for n in numbers]


def _curve(result: SimulationResult, points: list[int]) -> list[str]:
    median = {at: middle for at, _, middle, _ in result.curve()}
    return [share_text(median.get(at)) for at in points]


simulate = click.Command(
    "simulate",
    params=[
        click.Argument(["table"], type=click.Path()),
        click.Option(
            ["--strategy", "strategies"], multiple=True, default=("distinctive",), help="May be repeated. [default: distinctive]"
        ),
        click.Option(["--seeds"], type=click.IntRange(1), default=20, help="Runs a strategy. [default: 20]"),
        click.Option(["--trials"], type=click.IntRange(1), default=512, help="Trials after which a run ends. [default: 512]"),
        click.Option(["--space"], default=None, help="Name of the space, when the table holds several."),
        json_option,
    ],
    callback=_simulate,
    help="Replay search strategies against a measured table, on a CPU.",
)
