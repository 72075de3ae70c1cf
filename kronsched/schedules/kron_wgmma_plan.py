"""How the wgmma Kron-Matmul is cut up: pure arithmetic, no TVM. The schedule, its constraints and its features read it.

A launch contracts the last axis ("line"), the last two of 64 × 64 ("pair"), or one axis that is not last ("column"). Its work is
a list of tiles: 64 rows of operand A; each is read as one or two units of 64 × 64 floats. Warpgroups take tiles on their own.

Read first: `WgmmaLaunch`, `plan_wgmma`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, prod
from typing import TYPE_CHECKING, Any

from kronsched.errors import InvalidConfig
from kronsched.schedules.kron_wgmma_layout import UNIT
from kronsched.space import Config
from kronsched.workloads.kron import KronMatmul

if TYPE_CHECKING:
    from kronsched.hardware import Device

SIZES = (64, 128)
"""P = Q that are served."""
UNIT_BYTES = UNIT * UNIT * 4


@dataclass(frozen=True)
class WgmmaLaunch:
    """One kernel.

    kind: "line", "pair" or "column".  axes: the axes it contracts, in order.  p: their size.  columns: elements after the axis
    (1 for "line" and "pair").  tiles: of 64 rows of operand A.  groups: warpgroups a block.  stages: units in flight a warpgroup.
    per_sm: blocks an SM.  grid: blocks launched.
    """

    kind: str
    axes: tuple[int, ...]
    p: int
    columns: int
    tiles: int
    groups: int
    stages: int
    per_sm: int
    grid: int

    @property
    def threads(self) -> int:
        """Threads a block."""
        return 128 * self.groups

    @property
    def units(self) -> int:
        """Units of 64 × 64 a tile."""
        return self.p // UNIT

    @property
    def factor_bytes(self) -> int:
        """Shared memory of the factors, high and low parts."""
        return len(self.axes) * 2 * self.p * self.p * 4

    @property
    def shared_bytes(self) -> int:
        """Shared memory a block."""
        return self.factor_bytes + self.groups * self.stages * UNIT_BYTES


def plan_wgmma(w: KronMatmul, config: Config, device: Device) -> tuple[WgmmaLaunch, ...]:
    """The launches of a config, last axis first. Raises InvalidConfig with one line."""
    sizes = [p for p, _ in w.factors]
    n = len(sizes)
    cuts: list[tuple[str, tuple[int, ...]]] = []
    if config["pair"] and n > 1 and sizes[-2:] == [UNIT, UNIT]:
        cuts.append(("pair", (n - 1, n - 2)))
    else:
        cuts.append(("line", (n - 1,)))
    cuts += [("column", (i,)) for i in reversed(range(n - len(cuts[0][1])))]
    return tuple(_launch(w, kind, axes, config, device) for kind, axes in cuts)


def _launch(w: KronMatmul, kind: str, axes: tuple[int, ...], config: Mapping[str, Any], device: Device) -> WgmmaLaunch:
    groups, stages, per_sm = int(config["groups"]), int(config["stages"]), int(config["per_sm"])
    p = w.factors[axes[0]][0]
    tiles = w.m * w.k_in // (UNIT * p)
    columns = prod(size for size, _ in w.factors[axes[0] + 1 :]) if kind == "column" else 1
    if groups * per_sm > 4:
        raise InvalidConfig(f"groups={groups}, per_sm={per_sm}: more than 4 warpgroups an SM leave too few registers for one")
    grid = min(ceil(tiles / groups), device.units * per_sm)
    launch = WgmmaLaunch(kind, axes, p, columns, tiles, groups, stages, per_sm, grid)
    if launch.shared_bytes > device.shared_per_block:
        raise InvalidConfig(
            f"a block needs {launch.shared_bytes} bytes of shared memory, the device has {device.shared_per_block}"
        )
    if (launch.shared_bytes + 1024) * per_sm > device.shared_per_sm:
        raise InvalidConfig(
            f"{per_sm} blocks of {launch.shared_bytes} bytes exceed the {device.shared_per_sm} bytes of shared memory of an SM"
        )
    return launch


def why_not(w: KronMatmul, device: Device) -> str | None:
    """None when the schedule serves the workload on the device, else one line."""
    if w.dtype != "float32":
        return f"dtype={w.dtype}: it multiplies float32 by three TF32 products"
    if device.arch != "sm_90a":
        return f"{device.arch}: wgmma needs sm_90a"
    odd = next((pair for pair in w.factors if pair[0] != pair[1] or pair[0] not in SIZES), None)
    if odd is not None:
        return f"a factor of {odd[0]}x{odd[1]}: it serves square factors of {' or '.join(map(str, SIZES))}"
    if w.m * w.k_in // w.factors[-1][0] % UNIT:
        return f"{w.m * w.k_in // w.factors[-1][0]} lines along the last axis: a multiple of {UNIT} is needed"
    return None


def wgmma_features(w: KronMatmul, launches: tuple[WgmmaLaunch, ...], device: Device) -> dict[str, float]:
    """Waves, occupancy, bytes through each memory level, predicted roofline time (µs)."""
    elements = w.m * w.k_in
    rate = device.peak_gflops.get("tfloat32", 4e5)
    traffic = 8.0 * elements * len(launches)
    flops = sum(2.0 * elements * x.p * len(x.axes) for x in launches)
    time = sum(max(8.0 * elements / device.bandwidth_gbs, 6.0 * elements * x.p * len(x.axes) / rate) / 1e3 for x in launches)
    main = max(launches, key=lambda x: x.p * len(x.axes))
    waves = main.tiles / (device.units * main.per_sm * main.groups)
    return {
        "launches": float(len(launches)),
        "global_mb": traffic / 1e6,
        "roofline_us": time,
        "intensity": flops / traffic,
        "shared_kb": main.shared_bytes / 1024,
        "blocks": float(main.grid),
        "waves": waves,
        "wave_efficiency": waves / ceil(waves),
        "warpgroups_per_sm": float(main.groups * main.per_sm),
        "bytes_in_flight": float(main.groups * main.per_sm * main.stages * UNIT_BYTES),
    }
