"""`python -m tests.emulator FAMILY … --schedule NAME [--config JSON]`: the error of an emitted kernel, run on the CPU."""

from __future__ import annotations

import json
import sys
import time

import click

from kronsched import hardware, registry
from kronsched.cli.options import FamilyGroup
from kronsched.errors import KronschedError, choose
from kronsched.workloads.base import Workload
from tests.emulator import ORDERS, EmulatorError, run_schedule

_OPTIONS = (
    click.Option(["--schedule", "space"], required=True, help="Name of the schedule in the registry."),
    click.Option(["--config"], default="{}", help="JSON with the knobs that differ from the default config."),
    click.Option(["--order"], type=click.Choice(ORDERS), multiple=True, help="May be repeated. [default: all three]"),
    click.Option(["--seed"], type=int, default=0),
    click.Option(["--target"], type=click.Choice(list(hardware.PRESETS)), default="nvidia/h200"),
)


def _run(workload: Workload, *, space: str, config: str, order: tuple[str, ...], seed: int, target: str) -> None:
    device, schedule = hardware.PRESETS[target], registry.schedule(space)
    if schedule.family != workload.family:
        raise choose("schedule", space, [s.name for s in registry.schedules_of(workload.family)])
    knobs = {**schedule.default_config(workload, device), **json.loads(config)}
    click.echo(f"{workload.label}, {space}: {json.dumps(knobs)}")
    for each in order or ORDERS:
        start = time.perf_counter()
        error = run_schedule(schedule, workload, knobs, device, seed, each)
        click.echo(f"{each}: max relative error {error:.3g} ({time.perf_counter() - start:.1f} s)")


if __name__ == "__main__":
    try:
        FamilyGroup("emulator", _run, _OPTIONS, help=__doc__)(prog_name="python -m tests.emulator")
    except (KronschedError, EmulatorError) as e:
        sys.exit(f"error: {e}")
