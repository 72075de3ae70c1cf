"""`kronsched tune FAMILY …`: search schedules for one shape, measure them, and say what came out."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kronsched.cli.options import FamilyGroup, compiler_option, json_option, target_option
from kronsched.cli.output import config_text, counts_text, only_json, print_json, share_text, time_text
from kronsched.cli.progress import tuning_progress

if TYPE_CHECKING:
    from kronsched.search.result import TuneResult
    from kronsched.workloads.base import Workload

_OPTIONS = (
    click.Option(["--trials"], type=click.INT, default=64, help="New candidates to measure. [default: 64]"),
    target_option,
    click.Option(["--devices"], default=None, help="Instead of --target, GPUs of one model, such as cuda:0,cuda:1."),
    click.Option(["--cluster"], default=None, help="Addresses of `kronsched worker`s, such as host1:7433,host2:7433."),
    click.Option(
        ["--cluster-key"], type=click.Path(dir_okay=False), default=None, help="File with their shared key. [default: yours]"
    ),
    click.Option(
        ["--log"], type=click.Path(), default=None, help="Log to append to. [default: one a workload, in your data directory]"
    ),
    click.Option(["--strategy"], default="distinctive", help="Search strategy. [default: distinctive]"),
    click.Option(["--space"], type=click.Path(), default=None, help="TOML file with the knobs, instead of the shipped one."),
    click.Option(["--seed"], type=click.INT, default=0, help="Seed of the search. [default: 0]"),
    compiler_option,
    click.Option(
        ["--objective"], type=click.Choice(["time", "energy"]), default="time", help="What to minimise a call. [default: time]"
    ),
    click.Option(
        ["--build-timeout", "build_timeout_s"], type=click.FLOAT, default=60.0, help="Seconds of a build. [default: 60]"
    ),
    click.Option(["--run-timeout", "run_timeout_s"], type=click.FLOAT, default=20.0, help="Seconds of a run. [default: 20]"),
    click.Option(
        ["--warm-start/--no-warm-start"], default=True, help="Start the cost model from logs of other shapes. [default: on]"
    ),
    click.Option(["--quiet", "-q"], is_flag=True, help="No progress on stderr."),
    json_option,
)


def _tune(workload: Workload, *, log: str | None, quiet: bool, as_json: bool, **options: Any) -> int:
    from kronsched.records import default_log
    from kronsched.search.tuner import tune as run_tune

    with only_json(as_json):
        try:
            with tuning_progress(quiet, f"{workload.label} on {_where(options)}") as progress:
                result = run_tune(workload, log=log, progress=progress, **options)
        except KeyboardInterrupt:
            kept = Path(log) if log else default_log(workload)
            click.echo(f"stopped; what was measured is kept in {kept}: the same command goes on from there", err=True)
            raise
    if as_json:
        print_json(result.to_dict())
    else:
        _print(result)
    nothing_found = result.best is None and result.predicted is None
    if nothing_found:
        click.echo(f"kronsched: no candidate was ok; failures: {counts_text(result.failures)}", err=True)
    return 1 if nothing_found else 0


def _where(options: dict[str, Any]) -> str:
    """What is tuned on, such as "NVIDIA H200"; raises what `tune` would for a target that is not known."""
    from kronsched.hardware import resolve_target

    if options["cluster"]:
        return f"the cluster {options['cluster']}"
    return str(options["devices"] or resolve_target(options["target"]).name)


def _print(result: TuneResult) -> None:
    workload, device = result.workload, result.device
    click.echo(f"{workload.label} on {device.name}")
    if result.message:
        click.echo(f"  {result.message}")
    if result.predicted is not None:
        click.echo(f"  predicted  {config_text(result.predicted.config)}  (not measured)")
        if result.artefact is not None:
            click.echo(f"  compiled   {result.artefact}")
    if result.best is not None and (us := result.best.median_us):
        rate = workload.flops / us / 1e3
        click.echo(f"  best time  {time_text(us)}   {rate:,.4g} GFLOP/s   {share_text(result.roofline_fraction)} of the roofline")
        if result.reference_us:
            reference = f"{result.reference_name}, {time_text(result.reference_us)}"
            click.echo(f"  speed-up   {result.reference_us / us:.3g}× over {reference}")
        click.echo(f"  config     {result.best.space['name']}: {config_text(result.best.config)}")
    if result.trials or result.known:
        known = f" ({result.known} known before)" if result.known else ""
        click.echo(f"  measured   {result.trials}{known} in {result.seconds:.1f} s; failures: {counts_text(result.failures)}")
        click.echo(f"  log        {result.log}")
    if result.best is not None:
        click.echo(f"  load it    mod = kronsched.load({str(result.log)!r})")


tune = FamilyGroup("tune", _tune, _OPTIONS, help="Search schedules for a shape, measure them, log the results.")
