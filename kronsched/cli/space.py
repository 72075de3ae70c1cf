"""`kronsched space FAMILY …`: the knobs, values, size and valid share of each schedule's search space."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from kronsched.cli.options import FamilyGroup, json_option, target_option
from kronsched.cli.output import config_text, only_json, print_json, print_table, share_text

if TYPE_CHECKING:
    from kronsched.hardware import Device
    from kronsched.schedules.base import Schedule
    from kronsched.workloads.base import Workload


def _space(workload: Workload, *, target: str, as_json: bool) -> int:
    from kronsched import registry
    from kronsched.errors import UnsupportedError
    from kronsched.hardware import resolve_target

    with only_json(as_json):
        device = resolve_target(target)
        schedules = registry.schedules_for(workload, device)
        if not schedules:
            raise UnsupportedError(f"{workload.label} is not supported on {device.name}: no schedule serves it")
        spaces = [_describe(s, workload, device) for s in schedules]
    if as_json:
        print_json({"workload": workload.to_dict(), "target": device.to_dict(), "spaces": spaces})
        return 0
    click.echo(f"{workload.label} on {device.name}")
    for space in spaces:
        share = ("" if space["exact"] else "about ") + share_text(space["valid_share"])
        rows = [[k["name"], ", ".join(map(str, k["values"])), k["help"]] for k in space["knobs"]]
        print_table(f"\n{space['name']}: {space['size']:,} configs, {share} valid", ["knob", "values", "help"], rows)
        click.echo(f"  default  {config_text(space['default'])}")
    return 0


def _describe(schedule: Schedule, workload: Workload, device: Device) -> dict[str, Any]:
    space = schedule.space(workload, device)
    share, exact = space.valid_share()
    return {
        "name": space.name,
        "digest": space.digest,
        "size": space.size,
        "valid_share": share,
        "exact": exact,
        "knobs": [{"name": k.name, "values": list(k.values), "help": k.help} for k in space.knobs],
        "default": dict(schedule.default_config(workload, device)),
    }


space = FamilyGroup("space", _space, (target_option, json_option), help="List knobs, values, size and valid share.")
