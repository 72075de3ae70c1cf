"""Conv2d on Hopper's warpgroup tensor cores (wgmma): an implicit matrix product as a TIRx tile program.

Read first: conv2d_tile.py (the arithmetic), conv2d_wgmma_kernel.py (the kernel), conv2d_gather.py and conv2d_epilogue.py (its
ends).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from kronsched.errors import InvalidConfig
from kronsched.schedules.base import Schedule, Scheduled
from kronsched.schedules.conv2d_estimate import estimated_us
from kronsched.schedules.conv2d_launches import conv2d_launches
from kronsched.schedules.conv2d_tile import (
    MAX_SUMS,
    ConvTile,
    address_registers,
    fitting_knob,
    make_tile,
    tile_features,
    unfit,
    usual_values,
)
from kronsched.schedules.conv2d_wgmma_kernel import Groups, wgmma_program
from kronsched.space import Config, SearchSpace, load_knobs
from kronsched.workloads.base import Workload
from kronsched.workloads.conv2d import Conv2d

if TYPE_CHECKING:
    from kronsched.hardware import Device


class Conv2dCudaWgmma(Schedule):
    """Conv2d without groups on sm_90a: int8, fp8, float16, bfloat16."""

    name: ClassVar[str] = "conv2d_cuda_wgmma"
    family: ClassVar[str] = "conv2d"
    device_kind: ClassVar[str] = "cuda"
    untuned_share: ClassVar[float] = 0.28

    def supports(self, workload: Workload, device: Device) -> str | None:
        """None for sm_90a and one group of channels."""
        assert isinstance(workload, Conv2d)
        if device.arch != "sm_90a":
            return f"{device.arch}: wgmma needs sm_90a"
        if workload.groups > 1:
            return f"groups={workload.groups}: it serves one group"
        if workload.layout != "NHWC":
            return f"layout={workload.layout}: it reads NHWC"
        return unfit(workload)

    def space(self, workload: Workload, device: Device) -> SearchSpace:
        """Knobs of search_spaces/conv2d_cuda_wgmma.toml, less the values that mean nothing at this shape."""
        assert isinstance(workload, Conv2d)

        def check(config: Config) -> str | None:
            try:
                tile_of(workload, config, device)
            except InvalidConfig as e:
                return str(e)
            return None

        knobs = [fitting_knob(knob, workload, device) for knob in load_knobs(self.name)]
        return SearchSpace(self.name, knobs, check)

    def default_config(self, workload: Workload, device: Device) -> Config:
        """The tile with the least estimated time, the widest stores, copies as deep as fit."""
        assert isinstance(workload, Conv2d)
        space = self.space(workload, device).restrict(usual_values(workload, {"start": "serial"}))
        best = min((c.config for c in space), key=lambda c: _merit(workload, c, device), default=None)
        if best is None:
            raise InvalidConfig(f"no config of {self.name} is valid for {workload.label} on {device.name}")
        return best

    def apply(self, workload: Workload, config: Config, device: Device) -> Scheduled:
        """One launch, or two where channels are padded first."""
        assert isinstance(workload, Conv2d)
        tile, groups = tile_of(workload, config, device), groups_of(config)
        return conv2d_launches(tile, lambda name, specs: wgmma_program(tile, name, specs, groups), groups.waits)

    def features(self, workload: Workload, config: Config, device: Device) -> Mapping[str, float]:
        """Waves, occupancy, bytes through each memory level, predicted roofline time."""
        assert isinstance(workload, Conv2d)
        features = tile_features(tile_of(workload, config, device), device)
        return {**features, "model_us": _estimate(workload, config, device)}


def groups_of(config: Config) -> Groups:
    """The warpgroups of a config."""
    rows, columns = int(config["row_groups"]), int(config["col_groups"])
    return Groups(rows, columns, int(config["overlap"]), config["start"] == "wait")


def tile_of(conv: Conv2d, config: Config, device: Device) -> ConvTile:
    """The tile of a config. Raises InvalidConfig with one line."""
    block_m, block_n, groups = int(config["block_m"]), int(config["block_n"]), groups_of(config)
    stages, overlap, per_sm = int(config["stages"]), groups.overlap, int(config["per_sm"])
    if block_m % (64 * groups.rows) or block_n % (16 * groups.columns):
        raise InvalidConfig(f"{block_m} × {block_n} is not a whole number of products for {groups.rows} × {groups.columns}")
    sums = block_m * block_n // groups.threads
    registers = min(255, device.registers_per_sm // (groups.threads * per_sm) // 8 * 8)
    if sums > MAX_SUMS or sums + address_registers(conv, block_m, groups.threads) > registers:
        raise InvalidConfig(f"{sums} sums a thread do not fit in {registers} registers")
    if stages == 1 and overlap:
        raise InvalidConfig("overlap=1 has no effect with one stage")
    ahead = 1 if stages == 1 else stages - 1 - overlap
    tile = make_tile(conv, config, device, (block_m, block_n), groups.threads, stages, ahead)
    if block_n // groups.columns % (8 * tile.group):
        raise InvalidConfig(f"vector={tile.vector}: a warpgroup's {block_n // groups.columns} channels are not whole groups")
    return tile


def _estimate(conv: Conv2d, config: Config, device: Device) -> float:
    """Microseconds, roughly."""
    tile, columns = tile_of(conv, config, device), int(config["col_groups"])
    return estimated_us(tile, device, tile.block_m * columns + tile.block_m // 64 * tile.block_n)


def _merit(conv: Conv2d, config: Config, device: Device) -> tuple[float, ...]:
    """Smaller is better."""
    return (_estimate(conv, config, device), -float(config["vector"]), -float(config["stages"]))
