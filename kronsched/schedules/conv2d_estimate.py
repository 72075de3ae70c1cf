"""A rough model of the time of an implicit product: picks default configs and is a feature for the cost model.

A chunk of a block costs as much as the slowest of what it needs: tensor cores, shared memory (copies in, operands out), the
way from L2, and instructions of the copies. Blocks of an SM share these; a block alone is held up by latencies as well. The
constants, in clocks of an SM, were fitted to try-outs of ResNet-50 layers on an H200, which are not shipped.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kronsched.dtypes import DTYPES
from kronsched.schedules.conv2d_tile import ConvTile

if TYPE_CHECKING:
    from kronsched.hardware import Device

CLOCK = 1755.0
"""MHz."""
MACS_PER_BYTE = 4096.0
"""Bytes of A times rows of B that tensor cores multiply a clock (int8: products; 16-bit types: half as many)."""
SHARED_BYTES = 104.0
L2_BYTES = 43.0
START, END = 3400.0, 600.0
"""From the launch of a block to its first chunk in shared memory, and from its last product to its end."""
PER_CHUNK, PER_COPY = 50.0, 1.0
"""Instructions of a warp for a chunk, and for each copy of it."""
LATENCY = 1.3
"""Clocks between dependent instructions of a warp."""


def estimated_us(tile: ConvTile, device: Device, operand_rows: float, rate: float = 1.0) -> float:
    """Microseconds of a call. operand_rows: rows of A and B read from shared memory for a chunk.  rate: of the tensor cores."""
    alone, shared = _block_cycles(tile, operand_rows, rate)
    held = device.units * tile.per_sm
    full, rest = divmod(tile.grid, held)
    per_sm = -(-rest // device.units)
    if tile.persistent:
        turns = -(-tile.grid // held)
        cycles = max(START + END + turns * (alone - START - END), tile.per_sm * shared * turns + START)
    else:
        cycles = full * max(alone, tile.per_sm * shared) + (max(alone, per_sm * shared) if rest else 0.0)
    memory = tile.conv.min_bytes / (0.8 * device.bandwidth_gbs) / 1e3
    return max(cycles / CLOCK, memory) + 1.0


def _block_cycles(tile: ConvTile, operand_rows: float, rate: float) -> tuple[float, float]:
    """(clocks of a block that has an SM for itself, clocks of the SM's busiest unit that it takes)."""
    copies = (tile.block_m + tile.block_n) * (tile.used / tile.piece) / tile.threads
    instructions = PER_CHUNK + PER_COPY * copies
    warps = tile.threads / 32
    multiply = tile.block_m * tile.block_n * tile.used / (MACS_PER_BYTE * rate)
    copied = (tile.block_m + tile.block_n) * tile.used
    busy = max(
        multiply,
        (copied + operand_rows * tile.used) / SHARED_BYTES,
        copied / L2_BYTES,
        instructions * warps / 4,
    )
    epilogue = tile.block_m * tile.block_n * (8 if DTYPES[tile.conv.out_dtype].itemsize == 1 else 5) / 128
    waiting = max(busy, instructions * max(LATENCY, warps / 4) + 120, multiply + 100)
    waiting = max(waiting, 1200.0 / tile.ahead)  # a copy's latency, shared by those in flight
    alone = START + END + tile.chunks * waiting + epilogue * max(1.0, 4 * LATENCY / warps)
    return alone, tile.chunks * busy + epilogue
