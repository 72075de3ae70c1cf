"""Features of Conv2d by windows, and a rough model of its time, which picks default configs and is one of them.

The constants, in clocks of an SM, were fitted to measured configs of layers with few channels on an H200. Of 323 configs of
thirteen layers, the choice took at most 1.004 times as long as the best for seven layers, and 1.11 times for the worst.

Read first: `estimated_us`.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil
from typing import TYPE_CHECKING

from kronsched.schedules.conv2d_window_plan import CHANNELS, WindowPlan

if TYPE_CHECKING:
    from kronsched.hardware import Device


CLOCK = 1755.0
"""MHz."""
MACS_PER_BYTE = 3320.0
"""Bytes of weights times positions that tensor cores multiply a clock."""
ROWS = 0.4
"""Pixels of a plane that TMA moves a clock."""
PER_RESULT = {1: 7.5, 2: 9.8}
"""Clocks a warp takes for a result of each of its threads, by its bytes."""
IN_TURN = 1.6
"""How much longer than at full speed the products of a warpgroup take whose turn it is."""
LATENCY = 630.0
"""Clocks from asking for a window to having its first pixels."""
ENDS = 2100.0
"""Clocks of a launch beside its tiles; less where the next launch's blocks find room while this one's run."""
ROOM = 1000.0
PER_TILE = 210.0
CHAIN, SHARP = 8.0, 6.0
"""How nearly the larger of two times is what both together take: within a tile, and of products and memory."""
MEMORY = 0.845
"""Share of the memory's speed that is reached."""
LAUNCH_US = 2.19
FOLD_US = 0.65
FOLD_GBS = 4000.0
"""The launch that folds: its own time, and what it reads and writes."""


def estimated_us(plan: WindowPlan, device: Device) -> float:
    """Microseconds of a call."""
    multiply = plan.tile * CHANNELS * plan.depth_bytes / MACS_PER_BYTE
    copies = len(plan.phases) * plan.rows * plan.planes / ROWS
    end = plan.pixels * CHANNELS * PER_RESULT[plan.out_item] / 128
    busy = plan.per_sm * max(multiply, copies)
    chain = (multiply / plan.groups * IN_TURN if plan.in_turn else multiply) + end  # what a warpgroup does, one after the other
    tile = (busy**CHAIN + chain**CHAIN) ** (1 / CHAIN)
    if plan.stages > 1:
        tile = max(tile, (copies + LATENCY) / (plan.stages - 1))
    first = plan.per_sm * (copies + multiply) + LATENCY + end * plan.groups**0.5
    cycles = ENDS + first + (plan.turns - 1) * (tile + PER_TILE)
    if 2 * plan.per_sm * (plan.shared_bytes + 1024) > device.shared_per_sm:
        cycles += ROOM
    memory = plan.conv.min_bytes / (MEMORY * device.bandwidth_gbs) / 1e3
    fold = 0.0
    if plan.fold:
        fold = FOLD_US + (plan.fold.scratch[0].nbytes + plan.fold.conv.inputs[0].nbytes) / FOLD_GBS / 1e3
    # Nearly the larger of the two; of configs that are bound by memory, the one with more time to spare is better.
    return float(((cycles / CLOCK) ** SHARP + (memory + LAUNCH_US) ** SHARP) ** (1 / SHARP)) + fold


def window_features(plan: WindowPlan, device: Device) -> Mapping[str, float]:
    """Waves, occupancy, bytes through each memory level, predicted roofline time (µs)."""
    conv = plan.fold.conv if plan.fold else plan.conv
    grid = plan.tiles[0] * plan.tiles[1]
    waves = grid / (device.units * plan.per_sm)
    flops = 2.0 * grid * plan.tile * CHANNELS * plan.conv.depth
    moved = float(grid) * plan.copied + float(plan.blocks) * plan.weights_bytes
    rate = device.peak_gflops.get(conv.in_dtype, 2e5)
    return {
        "blocks": float(plan.blocks),
        "waves": waves,
        "wave_efficiency": waves / ceil(waves),
        "useful_share": conv.flops / flops,
        "turns": float(plan.turns),
        "shared_kb": plan.shared_bytes / 1024,
        "threads_per_sm": float(plan.threads * plan.per_sm),
        "bytes_in_flight": float(plan.per_sm * plan.stages * plan.stage_bytes),
        "l2_mb": moved / 1e6,
        "intensity": flops / moved,
        "roofline_us": max(conv.min_bytes / device.bandwidth_gbs, conv.flops / rate) / 1e3,
    }
