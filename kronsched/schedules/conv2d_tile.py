"""The arithmetic of Conv2d as an implicit matrix product on tensor cores: sizes of tiles, pieces and rings, without any TIR.

    D (pixels × c_out) = A (pixels × depth) · Bᵀ,  B = w as (c_out × depth),  depth = (kh, kw, c_in) from slow to fast

A row of A is never formed in memory: the 128-byte chunks of it that a stage of the ring in shared memory needs are gathered
from x by cp.async in pieces of 16 bytes (8 or 4 where a pixel's channels are not a multiple of 16 bytes), zeros where a tap
lies outside of x. Where a pixel is not even a multiple of 4 bytes, a first launch copies x and w with more channels, all zero.

Read first: `ConvTile`, `make_tile`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from kronsched.dtypes import DTYPES
from kronsched.errors import InvalidConfig
from kronsched.space import Config, Knob, Value
from kronsched.workloads.conv2d import FOUR_BIT, Conv2d

if TYPE_CHECKING:
    from kronsched.hardware import Device

CHUNK = 128
"""Bytes of a row of A or B in a stage: the width of the swizzle."""
MAX_SUMS = 200
"""Accumulators a thread may have: the rest of its 255 registers is for addresses."""


@dataclass(frozen=True)
class ConvTile:
    """What a block computes and how it moves data.

    block_m, block_n: pixels × channels of y a block.  threads: a block.  stages: of the ring.  ahead: chunks in flight from
    memory. per_sm: blocks an SM.  vector: bytes of y a thread stores at a time.  channels: of x as read, at least c_in. piece:
    bytes of a cp.async.  cache: "l1" keeps what is read of x there, for the taps that share it, "l2" does not.  order: of
    chunks: "tap" (as they stand in a row of B) or "channel" (all taps of 128 bytes of channels, then the next channels).
    """

    conv: Conv2d
    block_m: int
    block_n: int
    threads: int
    stages: int
    ahead: int
    per_sm: int
    vector: int
    channels: int
    piece: int
    cache: str
    order: str
    resident: int = 0

    # -- the product --------------------------------------------------------------------------------

    @property
    def item(self) -> int:
        """Bytes of an element of x."""
        return DTYPES[self.conv.in_dtype].itemsize

    @property
    def row_elements(self) -> int:
        """Elements of a row of B: kh · kw · channels."""
        return self.conv.kernel[0] * self.conv.kernel[1] * self.channels

    @property
    def chunk_elements(self) -> int:
        """Elements of a chunk."""
        return CHUNK // self.item

    @property
    def chunks(self) -> int:
        """Chunks of a row, the last one perhaps not full."""
        return -(-self.row_elements // self.chunk_elements)

    @property
    def used(self) -> int:
        """Bytes of a chunk that are copied and multiplied: fewer than 128 only where a row is one short chunk."""
        return used_bytes(self.conv)

    @property
    def steps(self) -> int:
        """Instructions along a chunk: 32 bytes each."""
        return self.used // 32

    @property
    def tiles(self) -> tuple[int, int]:
        """Blocks along the pixels and along the channels of y."""
        return -(-self.conv.pixels // self.block_m), -(-self.conv.c_out // self.block_n)

    @property
    def grid(self) -> int:
        """Tiles."""
        return self.tiles[0] * self.tiles[1]

    @property
    def persistent(self) -> bool:
        """Whether a block goes through several tiles."""
        return self.resident > 0

    @property
    def launched(self) -> int:
        """Blocks."""
        return self.resident or self.grid

    @property
    def by_channel(self) -> bool:
        """Whether chunks come in the order "channel", which needs chunks of one tap."""
        return self.order == "channel"

    @property
    def padded(self) -> bool:
        """Whether x and w are copied first, with more channels."""
        return self.channels != self.conv.c_in

    # -- shared memory ------------------------------------------------------------------------------

    @property
    def a_bytes(self) -> int:
        """A's part of a stage."""
        return self.block_m * CHUNK

    @property
    def stage_bytes(self) -> int:
        """A stage: A's part, then B's."""
        return (self.block_m + self.block_n) * CHUNK

    @property
    def shared_bytes(self) -> int:
        """Shared memory a block."""
        return self.stages * self.stage_bytes

    # -- the epilogue -------------------------------------------------------------------------------

    @property
    def group(self) -> int:
        """Tiles of 8 accumulator columns whose results make a vector of y: a thread holds two of each."""
        return self.vector // (2 * DTYPES[self.conv.out_dtype].itemsize)

    def channel(self, column: int) -> int:
        """The channel (within a block) that column `column` of the product stands for.

        Rows of B are stored in this order, so that the results of a thread in `group` tiles are neighbouring channels.
        """
        tile, quad, odd = column // 8, column // 2 % 4, column % 2
        return tile // self.group * (8 * self.group) + quad * (2 * self.group) + tile % self.group * 2 + odd


def read_channels(conv: Conv2d) -> tuple[int, int]:
    """(channels of x as read, bytes of a piece): c_in itself where its bytes are a multiple of 4, else with zeros added."""
    item = DTYPES[conv.in_dtype].itemsize
    size = conv.c_in * item
    for piece in (16, 8, 4):
        if size % piece == 0:
            return conv.c_in, piece
    piece = 16 if size > 8 else 8 if size > 4 else 4
    return -(-size // piece) * piece // item, piece


def used_bytes(conv: Conv2d) -> int:
    """Bytes of a chunk that count: of rows of up to 64 bytes as many as an instruction or two take, else 128."""
    size = conv.kernel[0] * conv.kernel[1] * read_channels(conv)[0] * DTYPES[conv.in_dtype].itemsize
    return next((used for used in (32, 64) if size <= used), CHUNK)


def address_registers(conv: Conv2d, block_m: int, threads: int) -> int:
    """Registers a thread needs besides its sums, about: its pixels' places in x, and some more."""
    rows = -(-block_m * (used_bytes(conv) // read_channels(conv)[1]) // threads)
    return rows * (2 if any(conv.padding) else 1) + 26


def make_tile(
    conv: Conv2d, config: Config, device: Device, block: tuple[int, int], threads: int, stages: int, ahead: int
) -> ConvTile:
    """The tile of a config: knobs per_sm, vector, cache and order are read here. Raises InvalidConfig with one line."""
    channels, piece = read_channels(conv)
    per_sm, vector = int(config["per_sm"]), int(config["vector"])
    cache, order = str(config["cache"]), str(config["order"])
    tile = ConvTile(conv, *block, threads, stages, ahead, per_sm, vector, channels, piece, cache, order)
    if config.get("persistent"):
        tile = replace(tile, resident=device.units * per_sm)
        if tile.grid <= tile.resident:
            raise InvalidConfig(f"persistent=True has no effect: there are {tile.grid} tiles")
    _check_reads(tile)
    if ahead < 1:
        raise InvalidConfig(f"stages={stages} leave no chunk in flight")
    few = ahead > tile.chunks or (stages == 1) != (tile.chunks == 1)
    if stages == 1 if tile.persistent else few:
        raise InvalidConfig(f"stages={stages}: there are {tile.chunks} chunks")
    step = threads * piece // tile.used
    if step % 8 and 8 % step:
        raise InvalidConfig(f"{threads} threads copy {step} rows at a time, which the swizzle of 8 rows does not repeat in")
    if tile.group < 1 or block[1] % (8 * tile.group):
        raise InvalidConfig(f"vector={vector}: {block[1]} channels of {conv.out_dtype} are not whole groups")
    if tile.vector > 4 and conv.c_out * DTYPES[conv.out_dtype].itemsize % vector:
        raise InvalidConfig(f"vector={vector}: a pixel of y is not a multiple of it")
    least = 32 if conv.c_out <= 32 else 64
    if block[1] > least and block[1] >= 2 * conv.c_out:
        raise InvalidConfig(f"block_n={block[1]} is twice as much as the {conv.c_out} channels")
    shared = tile.shared_bytes
    if shared > device.shared_per_block or (shared + 1024) * per_sm > device.shared_per_sm:
        raise InvalidConfig(f"{per_sm} blocks of {shared} bytes of shared memory are more than an SM has")
    if threads * per_sm > device.max_threads_per_sm:
        raise InvalidConfig(f"{per_sm} blocks of {threads} threads are more than an SM takes")
    return tile


def unfit(conv: Conv2d) -> str | None:
    """Why the tensor-core schedules do not serve a shape; None when they do."""
    if conv.in_dtype in FOUR_BIT:
        return f"in_dtype={conv.in_dtype}: there is conv2d_cuda_int4 for it"
    if conv.out_dtype == "int32" and conv.c_out % 2:
        return f"c_out={conv.c_out}: int32 results are stored in pairs of channels"
    return None


def fitting_knob(knob: Knob, conv: Conv2d, device: Device) -> Knob:
    """The knob less the values that are valid in no config of this shape, or the same as another."""
    taps, (channels, piece) = conv.kernel[0] * conv.kernel[1], read_channels(conv)
    item, out = DTYPES[conv.in_dtype].itemsize, DTYPES[conv.out_dtype].itemsize
    chunks = -(-taps * channels * item // CHUNK)
    tiles = -(-conv.pixels // 64) * -(-conv.c_out // 32)
    least = 32 if conv.c_out <= 32 else 64

    def fits(value: Any) -> bool:
        if knob.name == "block_m":
            return bool(value == knob.values[0] or value < 2 * conv.pixels)
        if knob.name == "block_n":
            return bool(value <= least or value < 2 * conv.c_out)
        if knob.name == "vector":
            return bool(value >= 2 * out and (value <= 4 or conv.c_out * out % value == 0 or value == 2 * out))
        if knob.name == "persistent":
            return not value or tiles > device.units
        if knob.name == "stages":
            return bool(value > 1 and value <= chunks + 2) if chunks > 1 else bool(value == 1 or tiles > device.units)
        if knob.name == "cache":
            return bool(value == ("l1" if piece < 16 else "l2")) if taps == 1 or piece < 16 else True
        if knob.name == "order":
            return bool(value == "tap" or (taps > 1 and channels * item % CHUNK == 0 and channels * item > CHUNK))
        return True

    return Knob(knob.name, tuple(v for v in knob.values if fits(v)), knob.help)


def usual_values(conv: Conv2d, more: Mapping[str, Value | tuple[Value, ...]]) -> dict[str, Value | tuple[Value, ...]]:
    """What knobs are restricted to when a default config is looked for: the rest is worth a search only."""
    again = conv.kernel != (1, 1) or read_channels(conv)[1] < 16
    return {"cache": "l1" if again else "l2", "order": "tap", **more}


def _check_reads(tile: ConvTile) -> None:
    """Refuse values of `cache` and `order` that change nothing or do not apply."""
    taps = tile.conv.kernel[0] * tile.conv.kernel[1]
    if tile.cache == "l2" and tile.piece < 16:
        raise InvalidConfig(f"cache=l2: copies of {tile.piece} bytes always go through L1")
    if tile.cache == "l1" and taps == 1 and tile.piece == 16:
        raise InvalidConfig("cache=l1: a kernel of 1x1 reads nothing twice")
    if tile.by_channel and (taps == 1 or tile.channels % tile.chunk_elements or tile.channels == tile.chunk_elements):
        raise InvalidConfig(f"order=channel has no effect with {tile.channels} channels and {taps} taps")


def tile_features(tile: ConvTile, device: Device) -> dict[str, float]:
    """Waves, occupancy, bytes through each memory level, predicted roofline time (µs)."""
    conv = tile.conv
    waves = tile.grid / (device.units * tile.per_sm)
    flops = 2.0 * tile.grid * tile.block_m * tile.block_n * tile.chunks * tile.chunk_elements
    rate = device.peak_gflops.get(conv.in_dtype, 2e5)
    moved = float(tile.grid) * tile.chunks * tile.stage_bytes
    steps = -(-tile.grid // (device.units * tile.per_sm)) * tile.per_sm
    busy = steps * tile.block_m * tile.block_n * tile.chunks * tile.chunk_elements * 2.0
    return {
        "blocks": float(tile.grid),
        "waves": waves,
        "wave_efficiency": waves / -(-tile.grid // (device.units * tile.per_sm)),
        "useful_share": conv.flops / flops,
        "chunks": float(tile.chunks),
        "shared_kb": tile.shared_bytes / 1024,
        "threads_per_sm": float(tile.threads * tile.per_sm),
        "bytes_in_flight": float(tile.per_sm * tile.ahead * tile.stage_bytes),
        "l2_mb": moved / 1e6,
        "intensity": flops / moved,
        "compute_us": busy / (rate / device.units) / 1e3,
        "roofline_us": max(conv.min_bytes / device.bandwidth_gbs, conv.flops / rate) / 1e3,
    }
