"""How Conv2d by TMA and wgmma is cut up: pure arithmetic, no TVM. The schedule, its constraints and its features read it.

    D (pixels × c_out) = A (pixels × depth) · Bᵀ,  B = w as (c_out × depth),  depth = (kh, kw, c_in) from slow to fast

A chunk is what a tap of the kernel sees of up to 128 bytes of channels: one TMA copy brings it for all pixels of a tile (im2col
mode: zeros where the tap lies outside of x), another one the same part of w. With split > 1, the blocks of a cluster take a
share of the chunks each and add up their sums through each other's shared memory. Layers with few channels are folded first.

Read first: `TmaPlan`, `plan_tma`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import ceil
from typing import TYPE_CHECKING

from kronsched.dtypes import DTYPES
from kronsched.errors import InvalidConfig
from kronsched.schedules.conv2d_fold import Fold, fold_of, pair_of
from kronsched.space import Config
from kronsched.workloads.conv2d import FOUR_BIT, Conv2d

if TYPE_CHECKING:
    from kronsched.hardware import Device

MAX_SUMS = 200
"""Accumulators a thread may have."""
OTHER_REGISTERS = 32
"""What a thread needs besides its sums, about."""
REGISTERS = (40, 232)
"""Registers a thread of the copying and of the multiplying warpgroups where they are not shared evenly."""
PANEL_ROWS = 16
"""Pixels of a staging panel: those of a warp's results."""
ENOUGH = 4
"""Fewer stages than this are only worth trying where no more fit."""
_WIDTHS = (128, 64, 32)
FEW_TRIPS = 8
"""Up to so many trips, a panel may still be on its way to y when the next tile's results come."""


@dataclass(frozen=True)
class TmaPlan:
    """One kernel.

    conv: the layer, folded where `fold` is given.  block_m, …, per_sm: knobs, as search_spaces/conv2d_cuda_tma.toml says.
    blocks: launched, a multiple of split.  panels: staging panels a warp has; with two, it fills one while the other is stored.
    early: whether scale and bias of a block's only tile are read before its products, into registers.
    """

    conv: Conv2d
    block_m: int
    block_n: int
    row_groups: int
    col_groups: int
    stages: int
    depth: int
    split: int
    per_sm: int
    blocks: int = 1
    panels: int = 1
    fold: Fold | None = None
    early: bool = False

    # -- the product --------------------------------------------------------------------------------

    @property
    def item(self) -> int:
        """Bytes of an element of x."""
        return DTYPES[self.conv.in_dtype].itemsize

    @property
    def out_item(self) -> int:
        """Bytes of an element of y."""
        return DTYPES[self.conv.out_dtype].itemsize

    @property
    def width(self) -> int:
        """Bytes of channels of a chunk, and of the swizzle."""
        return chunk_width(self.conv)

    @property
    def chunks_per_tap(self) -> int:
        """Chunks of a tap of the kernel."""
        return self.conv.c_in * self.item // self.width

    @property
    def chunks(self) -> int:
        """Chunks of a row of A."""
        return self.conv.kernel[0] * self.conv.kernel[1] * self.chunks_per_tap

    @property
    def trips(self) -> int:
        """Stages that a tile goes through, all of a cluster's blocks together."""
        return self.chunks // self.depth

    @property
    def pairs(self) -> bool:
        """Whether two neighbouring pixels of y are one of the layer that is computed."""
        return self.fold is not None and self.fold.pairs

    @property
    def pointwise(self) -> bool:
        """Whether A is x itself."""
        return self.conv.kernel == (1, 1) and self.conv.stride == (1, 1) and self.conv.padding == (0, 0)

    @property
    def tiles(self) -> tuple[int, int]:
        """Tiles along the pixels and along the channels of y."""
        return ceil(self.conv.pixels / self.block_m), ceil(self.conv.c_out / self.block_n)

    @property
    def grid(self) -> int:
        """Tiles."""
        return self.tiles[0] * self.tiles[1]

    @property
    def workers(self) -> int:
        """Blocks, or clusters, that take tiles in turn."""
        return self.blocks // self.split

    @property
    def persistent(self) -> bool:
        """Whether a block goes through several tiles."""
        return self.grid > self.workers

    # -- threads ------------------------------------------------------------------------------------

    @property
    def consumers(self) -> int:
        """Threads that multiply."""
        return 128 * self.row_groups * self.col_groups

    @property
    def uneven(self) -> bool:
        """Whether registers pass from a whole copying warpgroup to two multiplying ones, which have too many sums otherwise."""
        return self.sums > 136 and self.consumers == 256 and self.per_sm == 1

    @property
    def threads(self) -> int:
        """Threads a block: the consumers, and a warp or warpgroup one of whose threads starts copies."""
        return self.consumers + (128 if self.uneven else 32)

    @property
    def slabs(self) -> int:
        """Row tiles of 64 a warpgroup owns."""
        return self.block_m // (64 * self.row_groups)

    @property
    def wide(self) -> int:
        """Channels a warpgroup multiplies."""
        return self.block_n // self.col_groups

    @property
    def mma_n(self) -> int:
        """Channels of an instruction: integer products go up to 224."""
        return self.wide // 2 if self.conv.in_dtype == "int8" and self.wide > 224 else self.wide

    @property
    def sums(self) -> int:
        """Accumulators a thread."""
        return self.slabs * self.wide // 2

    @property
    def stored(self) -> int:
        """Channels a warpgroup stores: with split > 1, each block stores a share."""
        return self.wide // self.split

    # -- the order of channels ------------------------------------------------------------------------

    @property
    def group(self) -> int:
        """Tiles of 8 accumulator columns that make 16 bytes of a pixel of y: a thread holds 4 bytes of those."""
        return 2 // self.out_item

    @property
    def vector(self) -> int:
        """Bytes of y that a thread holds next to each other."""
        return 4

    # -- shared memory ------------------------------------------------------------------------------

    @property
    def a_bytes(self) -> int:
        """A's part of a chunk."""
        return self.block_m * self.width

    @property
    def chunk_bytes(self) -> int:
        """A chunk of A and B."""
        return (self.block_m + self.block_n) * self.width

    @property
    def stage_bytes(self) -> int:
        """A stage: A's and B's parts of one chunk after the other."""
        return self.depth * self.chunk_bytes

    @property
    def panel_columns(self) -> int:
        """Channels of a staging panel: up to 128 bytes, as wide as a swizzle."""
        size = self.stored * self.out_item
        return next((width for width in _WIDTHS if size % width == 0), _WIDTHS[-1]) // self.out_item

    @property
    def panel_bytes(self) -> int:
        """Bytes of a staging panel."""
        return PANEL_ROWS * self.panel_columns * self.out_item

    @property
    def ring_bytes(self) -> int:
        """The ring of stages, which also takes a split tile's sums in the end."""
        sums = self.block_m * self.block_n * 4 if self.split > 1 else 0
        return ceil(max(self.stages * self.stage_bytes, sums) / 1024) * 1024

    @property
    def panels_bytes(self) -> int:
        """All staging panels."""
        return self.consumers // 32 * self.panels * self.panel_bytes

    @property
    def shared_bytes(self) -> int:
        """Shared memory a block: ring, staging panels, two mbarriers a stage."""
        return self.ring_bytes + self.panels_bytes + 16 * self.stages


def chunk_width(conv: Conv2d) -> int:
    """Bytes of channels of a chunk: the widest swizzle that divides those of a pixel; 0: none does."""
    size = conv.c_in * DTYPES[conv.in_dtype].itemsize
    return next((width for width in _WIDTHS if size % width == 0), 0)


def paired(conv: Conv2d) -> Fold | None:
    """The layer folded by pairs; None where that is no use, or where x has so few channels that it needs a fold of its own."""
    return pair_of(conv) if chunk_width(conv) else None


def computed(conv: Conv2d, pair: bool = False) -> tuple[Conv2d, Fold | None]:
    """The layer itself, or folded where a pixel's channels are too few, or by pairs."""
    fold = paired(conv) if pair else None if chunk_width(conv) else fold_of(conv)
    return (conv, None) if fold is None else (fold.folded, fold)


def why_not(conv: Conv2d, device: Device) -> str | None:
    """None when the schedule serves the workload on the device, else one line."""
    if device.arch != "sm_90a":
        return f"{device.arch}: wgmma and TMA need sm_90a"
    if conv.groups > 1:
        return f"groups={conv.groups}: it serves one group"
    if conv.layout != "NHWC":
        return f"layout={conv.layout}: it reads NHWC"
    if conv.in_dtype in FOUR_BIT:
        return f"in_dtype={conv.in_dtype}: there is conv2d_cuda_int4 for it"
    conv = computed(conv)[0]
    if not chunk_width(conv):
        return f"c_in={conv.c_in}: a pixel's channels are not a multiple of 32 bytes, and not few either"
    if conv.out_dtype == "int32" or conv.c_out % 16:
        return f"c_out={conv.c_out} of {conv.out_dtype}: it stores 16 channels of 8 or 16 bits at a time"
    reach = max((k - 1) * d for k, d in zip(conv.kernel, conv.dilation, strict=True))
    if max(conv.stride) > 8 or max(conv.padding) > 127 or reach > 127:
        return f"stride={conv.stride}, padding={conv.padding}, dilation={conv.dilation}: beyond what TMA can do"
    return None


def plan_tma(conv: Conv2d, config: Config, device: Device) -> TmaPlan:
    """The plan of a config. Raises InvalidConfig with one line."""
    names = ("block_m", "block_n", "row_groups", "col_groups", "stages", "depth", "split", "per_sm")
    pair = bool(config["pair"])
    if pair and paired(conv) is None:
        raise InvalidConfig("pair=True: it folds an even number of outputs a line, of few channels, whose windows overlap")
    conv, fold = computed(conv, pair)
    block_m, block_n, row_groups, col_groups, stages, depth, split, per_sm = (int(config[name]) for name in names)
    plan = TmaPlan(conv, block_m, block_n, row_groups, col_groups, stages, depth, split, per_sm, fold=fold)
    _check_shape(plan, device)
    units = plan.grid * plan.split
    resident = units if plan.split > 1 else device.units * plan.per_sm
    plan = replace(plan, blocks=min(units, resident))
    several = plan.slabs * (plan.stored // plan.panel_columns) > 1 or (plan.persistent and plan.trips <= FEW_TRIPS)
    columns = plan.stored // 4 * sum((bool(conv.has_scale), conv.has_bias))  # registers
    early = not plan.persistent and columns > 0 and plan.sums + columns + OTHER_REGISTERS <= _registers(plan, device)
    plan = replace(plan, early=early)
    if several and _fits(replace(plan, panels=2), device):
        plan = replace(plan, panels=2)
    if plan.split == 1 and plan.per_sm > 1 and plan.grid <= device.units * (plan.per_sm - 1):
        raise InvalidConfig(f"per_sm={plan.per_sm}: there are {plan.grid} tiles")
    if not _fits(plan, device):
        raise InvalidConfig(f"{plan.per_sm} blocks of {plan.shared_bytes} bytes of shared memory are more than an SM has")
    return plan


def check_depth(plan: TmaPlan, device: Device) -> None:
    """Raise InvalidConfig for a ring that works but is not worth a trial: short, with room for more."""
    if plan.stages < min(ENOUGH, plan.trips // plan.split) and _fits(replace(plan, stages=plan.stages + 1), device):
        raise InvalidConfig(f"stages={plan.stages}: there is room for more")


def _fits(plan: TmaPlan, device: Device) -> bool:
    """Whether an SM has the shared memory for its blocks."""
    one = plan.shared_bytes
    return one <= device.shared_per_block and (one + 1024) * plan.per_sm <= device.shared_per_sm


def _registers(plan: TmaPlan, device: Device) -> int:
    """Registers that a consumer may have."""
    return REGISTERS[1] if plan.uneven else min(255, device.registers_per_sm // (plan.threads * plan.per_sm) // 8 * 8)


def _check_shape(plan: TmaPlan, device: Device) -> None:
    conv, shape = plan.conv, f"{plan.block_m} × {plan.block_n}"
    if plan.block_m % (64 * plan.row_groups) or plan.block_n % (8 * plan.group * plan.col_groups):
        raise InvalidConfig(f"{shape} is not a whole number of products for {plan.row_groups} × {plan.col_groups} warpgroups")
    registers = _registers(plan, device)
    if plan.sums > MAX_SUMS or plan.sums + OTHER_REGISTERS > registers:
        raise InvalidConfig(f"{plan.sums} sums a thread do not fit in {registers} registers")
    if plan.threads * plan.per_sm > device.max_threads_per_sm or plan.threads > device.max_threads_per_block:
        raise InvalidConfig(f"{plan.per_sm} blocks of {plan.threads} threads are more than an SM takes")
    if plan.chunks % plan.depth:
        raise InvalidConfig(f"depth={plan.depth}: there are {plan.chunks} chunks")
    if plan.split > 1 and plan.split > plan.trips:
        raise InvalidConfig(f"split={plan.split}: there are {plan.trips} trips")
    if plan.wide % plan.split or plan.stored * plan.out_item % 32 or plan.sums // plan.split % 4:
        raise InvalidConfig(f"split={plan.split}: {plan.wide} channels of a warpgroup are not whole shares")
    least = 32 if conv.c_out <= 32 else 64
    if plan.block_n > least and plan.block_n >= 2 * conv.c_out:
        raise InvalidConfig(f"block_n={plan.block_n} is twice as much as the {conv.c_out} channels")
    own = ceil(plan.trips / plan.split)
    if plan.stages > max(2, own + 1) and (plan.split > 1 or plan.grid <= device.units * plan.per_sm):
        raise InvalidConfig(f"stages={plan.stages}: a block makes {own} trips")


def tma_features(plan: TmaPlan, device: Device) -> Mapping[str, float]:
    """Waves, occupancy, bytes through each memory level, predicted roofline time (µs)."""
    conv = plan.conv
    waves = plan.grid * plan.split / (device.units * plan.per_sm)
    elements = plan.width // plan.item * plan.chunks
    flops = 2.0 * plan.grid * plan.block_m * plan.block_n * elements
    rate = device.peak_gflops.get(conv.in_dtype, 2e5)
    moved = float(plan.grid) * plan.chunks * plan.chunk_bytes
    conv = plan.fold.conv if plan.fold else conv
    return {
        "blocks": float(plan.blocks),
        "waves": waves,
        "wave_efficiency": waves / ceil(waves),
        "useful_share": conv.flops / flops,
        "trips": plan.trips / plan.split,
        "shared_kb": plan.shared_bytes / 1024,
        "threads_per_sm": float(plan.threads * plan.per_sm),
        "bytes_in_flight": float(plan.per_sm * plan.stages * plan.stage_bytes),
        "l2_mb": moved / 1e6,
        "intensity": flops / moved,
        "roofline_us": max(conv.min_bytes / device.bandwidth_gbs, conv.flops / rate) / 1e3,
    }
