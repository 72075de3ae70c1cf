"""The arithmetic of a Conv2d kernel whose taps share a window of x: sizes, constraints, features; the kernel reads it.

Images are laid end to end with the padding between them once: a position is a pixel of a line of `pitch` = w + padding pixels,
a line one of `lines` = h + padding. A tap of the kernel then is a fixed distance between the position of an output and that of
what it sees, so that one window of x, copied once, serves all taps of a tile of consecutive positions. With a stride along h
there are several windows: a phase has each stride-th line.

    D (c_out × positions) = Σ over taps  W[tap] (c_out × c_in) · X (positions + distance of the tap, c_in)ᵀ

Weights are operand A and stay in shared memory; the window is operand B, read from a row further on for each tap.
Positions that are padding are computed and not stored. A layer with few channels is folded first (conv2d_fold.py): then a pixel
is 16 bytes, and 32 bytes of a sum's terms are two neighbouring pixels.

Read first: `WindowPlan`, `plan_window`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil
from typing import TYPE_CHECKING

from kronsched.dtypes import DTYPES
from kronsched.errors import InvalidConfig
from kronsched.schedules.conv2d_fold import Fold, fold_of
from kronsched.schedules.conv2d_tma_plan import chunk_width
from kronsched.space import Config
from kronsched.workloads.conv2d import FOUR_BIT, Conv2d

if TYPE_CHECKING:
    from kronsched.hardware import Device

CHANNELS = 64
"""Channels of y a block: rows of an instruction."""
OTHER_REGISTERS, MANY_SUMS = (32, 36), 64
"""What a thread needs besides its sums: up to so many of them, and for more."""
MOST_ROWS = 1024
"""Pixels that one copy in im2col mode may bring."""
MOST_DEPTH = 1280
"""Bytes of a sum's terms: all its instructions are written out, and more of them keep too many addresses in registers."""
ALIGNED = 1024
"""Bytes that swizzles repeat after."""


@dataclass(frozen=True)
class WindowPlan:
    """One kernel.

    conv: the layer, folded where `fold` is given.  pixels, …, in_turn: knobs, as search_spaces/conv2d_cuda_window.toml says.
    blocks: launched, a multiple of the tiles along the channels.
    """

    conv: Conv2d
    pixels: int
    groups: int
    stages: int
    per_sm: int
    in_turn: bool = False
    blocks: int = 1
    fold: Fold | None = None

    # -- positions ----------------------------------------------------------------------------------

    @property
    def pitch(self) -> int:
        """Positions of a line."""
        return self.conv.w + self.conv.padding[1]

    @property
    def lines(self) -> int:
        """Lines of an image in a phase."""
        (kh, _), (dh, _), (sh, _) = self.conv.kernel, self.conv.dilation, self.conv.stride
        return self.conv.h + self.conv.padding[0] if sh == 1 else self.conv.out_hw[0] + (kh - 1) * dh // sh

    @property
    def positions(self) -> int:
        """Positions up to the last output."""
        height, width = self.conv.out_hw
        return ((self.conv.n - 1) * self.lines + height - 1) * self.pitch + width

    @property
    def tile(self) -> int:
        """Positions of a tile."""
        return self.groups * self.pixels

    @property
    def phases(self) -> list[int]:
        """Lines from the first tap to the first line of each phase that a tap sees."""
        return sorted({i * self.conv.dilation[0] % self.conv.stride[0] for i in range(self.conv.kernel[0])})

    @cached_property
    def taps(self) -> list[tuple[int, int]]:
        """For each tap: index of its phase; positions from an output to what it sees, counted from the first tap."""
        (kh, kw), (dh, dw), sh = self.conv.kernel, self.conv.dilation, self.conv.stride[0]
        return [(self.phases.index(i * dh % sh), i * dh // sh * self.pitch + j * dw) for i in range(kh) for j in range(kw)]

    @property
    def rows(self) -> int:
        """Pixels of a window."""
        return self.tile + max(distance for _, distance in self.taps)

    @property
    def tiles(self) -> tuple[int, int]:
        """Tiles along the positions and along the channels of y."""
        return ceil(self.positions / self.tile), ceil(self.conv.c_out / CHANNELS)

    @property
    def workers(self) -> int:
        """Blocks that take the tiles of the same channels in turn."""
        return self.blocks // self.tiles[1]

    @property
    def turns(self) -> int:
        """Tiles a block, at most."""
        return ceil(self.tiles[0] / self.workers)

    # -- products -----------------------------------------------------------------------------------

    @property
    def item(self) -> int:
        """Bytes of an element of x."""
        return DTYPES[self.conv.in_dtype].itemsize

    @property
    def out_item(self) -> int:
        """Bytes of an element of y."""
        return DTYPES[self.conv.out_dtype].itemsize

    @property
    def pixel_bytes(self) -> int:
        """Bytes of a pixel of x."""
        return self.conv.c_in * self.item

    @property
    def piece(self) -> int:
        """Bytes of channels that lie together in a window, and of its swizzle (16: none)."""
        return chunk_width(self.conv) or 16

    @property
    def depth_bytes(self) -> int:
        """Bytes of a sum's terms."""
        return self.conv.depth * self.item

    @property
    def columns(self) -> int:
        """Positions of an instruction: integer products go up to 224."""
        return self.pixels // 2 if self.conv.in_dtype == "int8" and self.pixels > 224 else self.pixels

    @property
    def sums(self) -> int:
        """Accumulators a thread."""
        return self.pixels // 2

    @property
    def consumers(self) -> int:
        """Threads that multiply."""
        return 128 * self.groups

    @property
    def threads(self) -> int:
        """Threads a block: the consumers, and a warp one of whose threads starts copies."""
        return self.consumers + 32

    # -- the order of channels, as the end of a tile wants it -------------------------------------------

    @property
    def block_m(self) -> int:
        """Positions of a tile."""
        return self.tile

    @property
    def block_n(self) -> int:
        """Channels of a tile."""
        return CHANNELS

    @property
    def group(self) -> int:
        """Channels of a pixel in 16 bits of y."""
        return 2 // self.out_item

    @property
    def vector(self) -> int:
        """Bytes that a thread packs at once."""
        return 4

    # -- shared memory ------------------------------------------------------------------------------

    @property
    def width(self) -> int:
        """Bytes of a sum's terms that are copied of w at once, and of their swizzle."""
        return next(width for width in (128, 64, 32) if self.depth_bytes % width == 0)

    @property
    def weights_bytes(self) -> int:
        """Weights of a block's channels."""
        return self.depth_bytes * CHANNELS

    @property
    def planes(self) -> int:
        """Copies of a phase's window: each brings `piece` bytes of channels."""
        return self.pixel_bytes // self.piece

    @property
    def plane_bytes(self) -> int:
        """Bytes of a plane of a window."""
        return ceil(self.rows * self.piece / ALIGNED) * ALIGNED

    @property
    def stage_bytes(self) -> int:
        """The windows of a tile."""
        return len(self.phases) * self.planes * self.plane_bytes

    @property
    def copied(self) -> int:
        """Bytes of x that a tile brings."""
        return len(self.phases) * self.rows * self.pixel_bytes

    def steps(self, size: int) -> list[tuple[int, int]]:
        """For each instruction along a sum, which takes `size` bytes: where its weights are, and its pixels in a stage."""
        found = []
        for k in range(0, self.depth_bytes, size):
            (phase, distance), byte = self.taps[k // self.pixel_bytes], k % self.pixel_bytes
            plane = phase * self.planes + byte // self.piece
            pixels = plane * self.plane_bytes + distance * self.piece + byte % self.piece
            found.append((k // self.width * (self.width * CHANNELS) + k % self.width, pixels))
        return found

    @property
    def line_bytes(self) -> int:
        """A pixel's results in a staging panel."""
        return CHANNELS * self.out_item

    @property
    def panel_bytes(self) -> int:
        """A warpgroup's staging panel."""
        return self.pixels * self.line_bytes

    @property
    def ring(self) -> int:
        """Where the windows begin."""
        return ceil(self.weights_bytes / ALIGNED) * ALIGNED

    @property
    def panels(self) -> int:
        """Where the staging panels begin."""
        return self.ring + self.stages * self.stage_bytes

    @property
    def barriers(self) -> int:
        """Where the mbarriers begin: two a stage, one a warpgroup, one for the weights."""
        return self.panels + self.groups * self.panel_bytes

    @cached_property
    def shared_bytes(self) -> int:
        """Shared memory a block."""
        return self.barriers + 16 * self.stages + 8 * self.groups + 8


def computed(conv: Conv2d) -> tuple[Conv2d, Fold | None]:
    """The layer itself, or folded where a pixel's channels are too few: pixels of 16 bytes, by as many as a window has."""
    fold = None if chunk_width(conv) else fold_of(conv)
    if fold is None:
        return conv, None
    pixel, line = 16 // fold.item, fold.folded.c_in * fold.item // 16
    return replace(fold.folded, w=fold.line // pixel, c_in=pixel, kernel=(conv.kernel[0], line)), fold


def why_not(conv: Conv2d, device: Device) -> str | None:
    """None when the schedule serves the workload on the device, else one line."""
    if device.arch != "sm_90a":
        return f"{device.arch}: wgmma and TMA need sm_90a"
    if conv.groups > 1:
        return f"groups={conv.groups}: it serves one group"
    if conv.layout != "NHWC":
        return f"layout={conv.layout}: it reads NHWC"
    if conv.in_dtype in FOUR_BIT or conv.out_dtype == "int32":
        return f"{conv.in_dtype} to {conv.out_dtype}: it stores 8 or 16 bits, of 8 or 16"
    if conv.has_residual:
        return "has_residual=True: it does not read one"
    layer, fold = computed(conv)
    if conv.c_out % 16 or not (chunk_width(layer) or (fold and fold.step * fold.item == 16 and layer.kernel[1] % 2 == 0)):
        return f"c_in={conv.c_in}, c_out={conv.c_out}: a pixel's channels are not whole 32 bytes nor few, or those of y not 16"
    if layer.stride[1] > 1 or layer.stride[0] > 8 or layer.kernel[0] * layer.kernel[1] <= layer.stride[0]:
        return f"kernel={conv.kernel}, stride={conv.stride}: windows of x are shared by several taps, with no stride along w"
    return _beyond(layer, device)


def _beyond(conv: Conv2d, device: Device) -> str | None:
    """Whether the layer that is computed is too large."""
    reach = [(k - 1) * d for k, d in zip(conv.kernel, conv.dilation, strict=True)]
    if any(p > r for p, r in zip(conv.padding, reach, strict=True)) or max(conv.padding) > 127 or max(reach) > 127:
        return f"padding={conv.padding}: more than the kernel of {conv.kernel} reaches, or than TMA can do"
    plan = WindowPlan(conv, 64, 1, 2, 1)
    if plan.depth_bytes > MOST_DEPTH:
        return f"kernel={conv.kernel}, c_in={conv.c_in}: a sum has terms of {plan.depth_bytes} bytes, more than {MOST_DEPTH}"
    if plan.rows > MOST_ROWS:
        return f"w={conv.w}: the smallest window has {plan.rows} pixels, one copy brings {MOST_ROWS}"
    if plan.shared_bytes > device.shared_per_block:
        return f"weights of {CHANNELS} channels and windows take {plan.shared_bytes} bytes of shared memory"
    return None


def plan_window(conv: Conv2d, config: Config, device: Device) -> WindowPlan:
    """The plan of a config. Raises InvalidConfig with one line."""
    pixels, groups, stages, per_sm = (int(config[name]) for name in ("pixels", "groups", "stages", "per_sm"))
    conv, fold = computed(conv)
    plan = WindowPlan(conv, pixels, groups, stages, per_sm, bool(config["in_turn"]), fold=fold)
    if plan.in_turn and groups == 1:
        raise InvalidConfig("in_turn=True: there is one warpgroup")
    if plan.rows > MOST_ROWS:
        raise InvalidConfig(f"a window has {plan.rows} pixels, one copy brings {MOST_ROWS}")
    registers = min(255, device.registers_per_sm // (ceil(plan.threads / 128) * 128 * per_sm) // 8 * 8)  # of whole warpgroups
    if plan.sums + OTHER_REGISTERS[plan.sums > MANY_SUMS] > registers:
        raise InvalidConfig(f"{plan.sums} sums a thread do not fit in {registers} registers")
    if plan.threads * per_sm > device.max_threads_per_sm or plan.threads > device.max_threads_per_block:
        raise InvalidConfig(f"{per_sm} blocks of {plan.threads} threads are more than an SM takes")
    if plan.shared_bytes > device.shared_per_block or (plan.shared_bytes + 1024) * per_sm > device.shared_per_sm:
        raise InvalidConfig(f"{per_sm} blocks of {plan.shared_bytes} bytes of shared memory are more than an SM has")
    along, across = plan.tiles
    if per_sm > 1 and along * across <= device.units * (per_sm - 1):
        raise InvalidConfig(f"per_sm={per_sm}: there are {along * across} tiles")
    workers = max(1, min(along, device.units * per_sm // across))
    plan = replace(plan, blocks=workers * across)
    if stages > plan.turns or stages == 1 < plan.turns:
        raise InvalidConfig(f"stages={stages}: a block has {plan.turns} tiles")
    return plan
