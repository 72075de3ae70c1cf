"""`kronsched strategies [TABLE…]`: search strategies against each other on recorded tables, on all cores, with no kernel run."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from kronsched.cli.options import json_option
from kronsched.cli.output import only_json, print_json, share_text

if TYPE_CHECKING:
    from kronsched.search.compare import Comparison
    from kronsched.search.simulate import SimulationResult, Spread

STRATEGIES = ("distinctive", "annealing", "evolutionary", "random")


def _compare(
    *,
    tables: tuple[str, ...],
    names: tuple[str, ...],
    seeds: int,
    trials: int,
    warm: bool,
    ablation: bool,
    workers: int | None,
    as_json: bool,
) -> int:
    from kronsched.cost_model.transfer import logs_in
    from kronsched.records.database import shipped_dir
    from kronsched.search.compare import ablation_of, compare, variants_of

    variants = ablation_of() if ablation else variants_of(names or STRATEGIES, warm)
    found = list(tables) or [str(p) for p in logs_in([shipped_dir()], tables=True) if p.parent.name == "tables"]
    if not found:
        raise click.UsageError("no table is named and none ships with this version")
    with only_json(as_json):
        result = compare(
            found,
            variants,
            seeds=seeds,
            trials=trials,
            logs=logs_in([shipped_dir()]),
            workers=workers,
            zero=warm and not ablation,
            progress=_progress,
        )
    if as_json:
        print_json(result.to_dict())
    else:
        click.echo(markdown(result, seeds, trials))
    return 0


def _progress(done: int, jobs: int) -> None:
    if done == jobs or done % max(1, jobs // 20) == 0:
        click.echo(f"{done} of {jobs} jobs", err=True)


def markdown(result: Comparison, seeds: int, trials: int) -> str:
    """The comparison as Markdown: the means, each table, the answer without measuring."""
    parts = [
        f"{len(result.tables)} tables, {seeds} seeds, at most {trials} trials a run; medians [quartiles].",
        f"**Trials to a share of the optimum: geometric mean over the tables of the median; × {result.variants[0]}**",
        _means(result),
    ]
    for table in result.tables:
        first = result.results[table, result.variants[0]]
        reach = ", ".join(f"{n} reach {share_text(s)}" for s, n in first.reaching.items())
        parts += [f"**{table}**: {first.candidates} candidates; {reach}", _one_table(result, table)]
    if result.zero:
        head = ["table", "picked", "by", "model's first", "default"]
        rows = [[z.table, share_text(z.share), z.taken, share_text(z.model), share_text(z.default)] for z in result.zero]
        rows.append(["geometric mean", share_text(result.zero_mean()), "", "", ""])
        parts += ["**Without measuring anything of the shape: share of the optimum**", _table(head, rows)]
    return "\n\n".join(parts)


def _means(result: Comparison) -> str:
    from kronsched.search.simulate import SHARES

    head = ["", *(f"{s:.2f}" for s in SHARES), *(f"× at {s:.2f}" for s in SHARES)]
    head += ["seconds to 0.95", "censored at 0.95", "ms a trial"]
    base = result.variants[0]
    rows = []
    for v in result.variants:
        means = [result.mean_trials(v, s) for s in SHARES]
        ratios = [m / result.mean_trials(base, s) for m, s in zip(means, SHARES, strict=True)]
        seconds = result.mean_seconds(v)
        data = [r.to_dict() for r in result.row(v)]
        cells = [v, *(f"{m:.3g}" for m in means), *(f"{r:.2f}" for r in ratios)]
        cells += ["–" if seconds is None else f"{seconds:.3g}", str(result.censored(v))]
        rows.append([*cells, f"{max(d['search_ms'] for d in data):.2g} at most"])
    calculated = [result.random_trials(s) for s in SHARES]
    ratios = [c / result.mean_trials(base, s) for c, s in zip(calculated, SHARES, strict=True)]
    rows.append(["random, calculated", *(f"{c:.3g}" for c in calculated), *(f"{r:.2f}" for r in ratios), "–", "–", "–"])
    return _table(head, rows)


def _one_table(result: Comparison, table: str) -> str:
    from kronsched.search.simulate import SHARES

    head = ["", *(f"trials to {s:.2f}" for s in SHARES), *(f"s to {s:.2f}" for s in SHARES)]
    head += ["batch distance", "coverage", "pairwise", "top-1", "recall@16"]
    rows = [[v, *_cells(result.results[table, v])] for v in result.variants]
    first = result.results[table, result.variants[0]]
    calculated = [f"{first.random_trials_to(s)[1]:.0f}" for s in SHARES]
    rows.append(["random, calculated", *calculated, *["–"] * (len(head) - 1 - len(SHARES))])
    return _table(head, rows)


def _cells(result: SimulationResult) -> list[str]:
    from kronsched.search.simulate import SHARES

    data = result.to_dict()
    model = data["model"] or {}
    numbers = [data["batch_distance"], data["coverage"], *(model.get(k) for k in ("pairwise", "top1", "recall16"))]
    return [
        *(spread_text(result.trials_to(s)) for s in SHARES),
        *(spread_text(result.seconds_to(s)) for s in SHARES),
        *("–" if n is None else f"{n:.2f}" for n in numbers),
    ]


def spread_text(spread: Spread) -> str:
    """Such as "12 [8, 20]", with the number of runs that never got there."""
    middle, low, high = (">limit" if v is None else f"{v:.3g}" for v in (spread.median, spread.q25, spread.q75))
    return f"{middle} [{low}, {high}]" + (f" {spread.censored} censored" if spread.censored else "")


def _table(head: list[str], rows: list[list[str]]) -> str:
    """A Markdown table whose columns line up in a terminal too."""
    widths = [max(len(r[i]) for r in [head, *rows]) for i in range(len(head))]
    lines = [head, ["-" * w for w in widths], *rows]
    return "\n".join("| " + " | ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) + " |" for line in lines)


strategies = click.Command(
    "strategies",
    params=[
        click.Argument(["tables"], type=click.Path(), nargs=-1, metavar="[TABLE]..."),
        click.Option(
            ["--strategies", "names"],
            default=",".join(STRATEGIES),
            callback=lambda ctx, param, value: tuple(n for n in value.split(",") if n),
            help=f"Comma-separated names. [default: {','.join(STRATEGIES)}]",
        ),
        click.Option(["--seeds"], type=click.IntRange(1), default=20, help="Runs of each. [default: 20]"),
        click.Option(["--trials"], type=click.IntRange(1), default=512, help="Trials after which a run ends. [default: 512]"),
        click.Option(
            ["--warm/--no-warm"], default=True, help="Also start from the other tables and the shipped logs. [default: on]"
        ),
        click.Option(["--ablation"], is_flag=True, help="Instead: distinctive search without one of its parts."),
        click.Option(["--workers"], type=click.IntRange(1), default=None, help="Processes. [default: the cores]"),
        json_option,
    ],
    callback=_compare,
    help="Compare search strategies on measured tables, on a CPU. Without TABLE: on those that ship.",
)
