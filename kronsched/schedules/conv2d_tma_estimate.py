"""A rough model of the time of Conv2d by TMA and wgmma: picks default configs and is a feature for the cost model.

A trip of a block costs as much as the slowest of what it needs: tensor cores, shared memory (copies in, operands out), the way
from L2. A block that has an SM for itself also waits for its own latencies, and stores while it does not multiply. The constants,
in clocks of an SM, were fitted to try-outs of ResNet-50 layers on an H200, which are not shipped.
"""

from __future__ import annotations

from math import ceil
from typing import TYPE_CHECKING

from kronsched.schedules.conv2d_tma_plan import TmaPlan

if TYPE_CHECKING:
    from kronsched.hardware import Device

CLOCK = 1755.0
"""MHz."""
MACS_PER_BYTE = 3500.0
"""Bytes of A times rows of B that tensor cores multiply a clock (int8: products; 16-bit types: half as many)."""
SHARED_BYTES = 119.0
L2_BYTES = 66.0
"""Bytes a clock and SM."""
ROWS = 0.49
"""Rows of a chunk that TMA moves a clock."""
LATENCY = 1890.0
"""Clocks from asking for a stage to having it."""
PER_TRIP = 89.0
"""Clocks that a trip takes a warpgroup beside its products."""
ENDS = 1780.0
"""Clocks of a launch beside its tiles; less where the next launch's blocks find room while this one's run."""
ROOM = 470.0
PER_TILE = 100.0
CROWD = 0.04
"""What each warpgroup beyond three adds."""
PER_RESULT = {1: 3.4, 2: 2.8}
"""Instructions of a thread for a result, by its bytes."""
SPLIT = 56.0
SPLIT_BYTES = 65.0
"""Clocks for two barriers of a cluster; bytes a clock of sums that go through shared memory."""
MEMORY = 0.845
"""Share of the memory's speed that is reached."""
LAUNCH_US = 2.19
SHARP = 6.0
FOLD_US = 3.0
FOLD_GBS = 1500.0
"""The launch that folds: its own time, and what it reads and writes."""


def estimated_us(plan: TmaPlan, device: Device) -> float:
    """Microseconds of a call."""
    one, busy = _tile_cycles(plan)
    turns = ceil(plan.grid * plan.split / (device.units * plan.per_sm))
    cycles = ENDS + turns * max(one, plan.per_sm * busy)
    if 2 * plan.per_sm * (plan.shared_bytes + 1024) > device.shared_per_sm:
        cycles += ROOM
    memory = _bytes(plan) / (MEMORY * device.bandwidth_gbs) / 1e3
    fold = 0.0
    if plan.fold:
        copied = 0 if plan.pairs else plan.fold.scratch[0].nbytes + plan.fold.conv.inputs[0].nbytes
        fold = FOLD_US + copied / FOLD_GBS / 1e3
    # Nearly the larger of the two; of configs that are bound by memory, the one with more time to spare is better.
    return float(((cycles / CLOCK) ** SHARP + (memory + LAUNCH_US) ** SHARP) ** (1 / SHARP)) + fold


def _bytes(plan: TmaPlan) -> float:
    """Bytes of memory that are read and written: of x only what the kernel's taps see."""
    conv = plan.conv
    x, w, *others = (t.nbytes for t in conv.inputs)
    seen = conv.pixels * conv.kernel[0] * conv.kernel[1] * conv.c_in * plan.item
    return float(min(x, seen) + w + sum(others) + conv.output.nbytes)


def _tile_cycles(plan: TmaPlan) -> tuple[float, float]:
    """(clocks of a tile in a block that has an SM for itself, clocks of the SM's busiest unit that it takes)."""
    width, rows = plan.width, plan.block_m + plan.block_n
    multiply = plan.block_m * plan.block_n * width / MACS_PER_BYTE
    operands = plan.block_m * plan.block_n * (1 / plan.mma_n + 1 / 64)  # rows of A and B that instructions read
    moved = max((rows + operands) * width / SHARED_BYTES, rows * width / L2_BYTES, rows / ROWS)
    busy = plan.depth * max(multiply, moved)
    alone = plan.depth * multiply + PER_TRIP
    trip = max(busy, alone, (LATENCY + 2 * alone) / plan.stages)
    trips = ceil(plan.trips / plan.split)
    end = plan.block_m * plan.block_n / plan.split * PER_RESULT[plan.out_item] / 128
    if plan.split > 1:
        end += SPLIT + plan.block_m * plan.block_n * 8 / SPLIT_BYTES
    groups = plan.row_groups * plan.col_groups
    one = trips * trip + end * max(1.0, 4.0 / groups) + PER_TILE
    crowd = 1.0 + CROWD * max(0, groups - 3)
    return one * crowd, (trips * busy + end) * crowd
