"""Conv2d on the tensor cores of sm_80 and later (mma.sync): an implicit matrix product as a TIRx tile program.

Read first: conv2d_tile.py (the arithmetic), conv2d_mma_kernel.py (the kernel), conv2d_gather.py and conv2d_epilogue.py (its
ends).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from kronsched.errors import InvalidConfig
from kronsched.schedules.base import Schedule, Scheduled
from kronsched.schedules.conv2d_estimate import estimated_us
from kronsched.schedules.conv2d_launches import conv2d_launches
from kronsched.schedules.conv2d_mma_kernel import Warps, mma_program
from kronsched.schedules.conv2d_tile import (
    ConvTile,
    address_registers,
    fitting_knob,
    make_tile,
    tile_features,
    unfit,
    usual_values,
)
from kronsched.space import Config, Knob, SearchSpace, load_knobs
from kronsched.workloads.base import Workload
from kronsched.workloads.conv2d import Conv2d

if TYPE_CHECKING:
    from kronsched.hardware import Device

_OTHER_REGISTERS = 34
"""Registers besides sums, operands and addresses of copies."""
MMA_RATE = 0.5
"""Of wgmma's rate, on Hopper."""


class Conv2dCudaMma(Schedule):
    """Conv2d without groups: int8, float16 and bfloat16 from sm_80 on, fp8 from sm_89 on."""

    name: ClassVar[str] = "conv2d_cuda_mma"
    family: ClassVar[str] = "conv2d"
    device_kind: ClassVar[str] = "cuda"
    untuned_share: ClassVar[float] = 0.2

    def supports(self, workload: Workload, device: Device) -> str | None:
        """None for one group of channels on a GPU that has the dtype's instruction."""
        assert isinstance(workload, Conv2d)
        number = int("".join(c for c in device.arch if c.isdigit()))
        least = 89 if workload.in_dtype.startswith("float8") else 80
        if number < least:
            return f"{device.arch}: mma.sync with {workload.in_dtype} needs sm_{least} or later"
        if workload.groups > 1:
            return f"groups={workload.groups}: it serves one group"
        return unfit(workload)

    def space(self, workload: Workload, device: Device) -> SearchSpace:
        """Knobs of search_spaces/conv2d_cuda_mma.toml, less the values that mean nothing at this shape."""
        assert isinstance(workload, Conv2d)
        return self.space_of(workload, device, load_knobs(self.name), self.name)

    def space_of(
        self, conv: Conv2d, device: Device, knobs: Sequence[Knob], name: str, fixed: Config | None = None
    ) -> SearchSpace:
        """The space of given knobs under a name, with the constraints of this schedule. fixed: values of knobs left out."""

        def check(config: Config) -> str | None:
            try:
                tile_of(conv, {**config, **(fixed or {})}, device)
            except InvalidConfig as e:
                return str(e)
            return None

        return SearchSpace(name, [fitting_knob(knob, conv, device) for knob in knobs], check)

    def default_config(self, workload: Workload, device: Device) -> Config:
        """The tile with the least estimated time, the widest stores, copies as deep as fit."""
        assert isinstance(workload, Conv2d)
        space = self.space(workload, device).restrict(usual_values(workload, {}))
        best = min((c.config for c in space), key=lambda c: _merit(workload, c, device), default=None)
        if best is None:
            raise InvalidConfig(f"no config of {self.name} is valid for {workload.label} on {device.name}")
        return best

    def apply(self, workload: Workload, config: Config, device: Device) -> Scheduled:
        """One launch, or two where channels are padded first."""
        assert isinstance(workload, Conv2d)
        tile, warps = tile_of(workload, config, device), warps_of(config)
        return conv2d_launches(tile, lambda name, specs: mma_program(tile, warps, name, specs))

    def features(self, workload: Workload, config: Config, device: Device) -> Mapping[str, float]:
        """Waves, occupancy, bytes through each memory level, predicted roofline time."""
        assert isinstance(workload, Conv2d)
        warps = warps_of(config)
        more = {"ldmatrix_per_mma": 1 / warps.column_tiles + 1 / (2 * warps.row_tiles), "sums": float(warps.sums)}
        more["model_us"] = _estimate(workload, config, device)
        return {**tile_features(tile_of(workload, config, device), device), **more}


def warps_of(config: Config) -> Warps:
    """The warps of a config."""
    names = ("block_row_warps", "block_col_warps", "warp_row_tiles", "warp_col_tiles")
    return Warps(*(int(config[name]) for name in names))


def tile_of(conv: Conv2d, config: Config, device: Device) -> ConvTile:
    """The tile of a config. Raises InvalidConfig with one line."""
    warps, per_sm, stages = warps_of(config), int(config["per_sm"]), int(config["stages"])
    needed = warps.sums + 4 * warps.row_tiles + 2 * warps.column_tiles + _OTHER_REGISTERS
    needed += address_registers(conv, warps.block[0], warps.threads)
    registers = min(255, device.registers_per_sm // (warps.threads * per_sm))
    if needed > registers:
        raise InvalidConfig(f"{warps.sums} sums a thread need about {needed} registers, there are {registers}")
    tile = make_tile(conv, config, device, warps.block, warps.threads, stages, max(1, stages - 1))
    if warps.column_tiles % tile.group:
        raise InvalidConfig(f"vector={tile.vector}: {warps.column_tiles} tiles of a warp are not whole groups of {tile.group}")
    return tile


def _estimate(conv: Conv2d, config: Config, device: Device) -> float:
    """Microseconds, roughly. A warp reads its rows of A and B from shared memory."""
    tile, warps = tile_of(conv, config, device), warps_of(config)
    rows = warps.rows * warps.columns * (16 * warps.row_tiles + 8 * warps.column_tiles)
    return estimated_us(tile, device, rows, MMA_RATE)


def _merit(conv: Conv2d, config: Config, device: Device) -> tuple[float, ...]:
    """Smaller is better."""
    return (_estimate(conv, config, device), -float(config["vector"]), -float(config["stages"]))
