"""Where a tuning run measures: one device, several devices of this machine, or the workers of a cluster.

Read first: `place_for`, `Place.measurer`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kronsched.errors import ArgumentError, ArgumentTypeError
from kronsched.hardware import Device, resolve_target
from kronsched.measure.base import Measurer

if TYPE_CHECKING:
    from kronsched.measure.farm import Farm
    from kronsched.schedules.base import Schedule
    from kronsched.workloads.base import Workload


@dataclass(frozen=True)
class Place:
    """target: what the plan is made for.  more: further devices of this machine.  farm: connected workers of a cluster."""

    target: str | Device
    more: tuple[Device, ...] = ()
    farm: Farm | None = None

    def measurer(
        self, workload: Workload, schedules: Sequence[Schedule], device: Device, energy: bool, options: Mapping[str, Any]
    ) -> Measurer:
        """What measures candidates here; the caller closes it. options: those that `LiveMeasurer` and `Farm` share."""
        if self.farm is not None:
            return self.farm.measurer(workload, schedules, energy=energy, **options)
        from kronsched.measure.energy import NvmlEnergy
        from kronsched.measure.live import LiveMeasurer

        observers = [NvmlEnergy()] if energy else []
        return LiveMeasurer(workload, schedules, [device, *self.more], observers=observers, **options)

    def close(self) -> None:
        """Leave the cluster."""
        if self.farm is not None:
            self.farm.close()


def place_for(
    target: str | Device,
    devices: str | Sequence[str | Device] | None,
    cluster: str | Sequence[str] | None,
    cluster_key: str | os.PathLike[str] | None,
) -> Place:
    """The place that the arguments of `tune` mean; raises UserError for devices or workers that cannot be used together."""
    if devices is None and cluster is None:
        return Place(target)
    name = "devices" if cluster is None else "cluster"
    if devices is not None and cluster is not None:
        raise ArgumentError("devices and cluster are not allowed together: a worker of the cluster has its own devices")
    if target != "auto":
        raise ArgumentError(f"target={target!r} is not allowed with {name}, which says where to measure: leave target out")
    if cluster is not None:
        from kronsched.measure.farm import Farm

        farm = Farm(names("cluster", cluster), cluster_key)
        return Place(farm.device, farm=farm)
    from kronsched.measure.crew import as_devices

    asked = names("devices", devices)
    found = as_devices([d if isinstance(d, Device) else resolve_target(d) for d in asked])
    return Place(found[0], found[1:])


def names(argument: str, value: Any) -> list[Any]:
    """The items of a list, or of a text with commas."""
    if isinstance(value, str):
        items: list[Any] = [piece.strip() for piece in value.split(",") if piece.strip()]
    elif isinstance(value, Sequence):
        items = list(value)
    else:
        raise ArgumentTypeError(f"{argument}={value!r} must be a list of names, or one text with commas")
    if wrong := [i for i in items if not isinstance(i, str | Device)]:
        raise ArgumentTypeError(f"{argument}: {wrong[0]!r} must be a name")
    if not items:
        raise ArgumentError(f"{argument}={value!r} is not allowed: at least one is needed")
    return items
