"""The space of the tensor-core Kron-Matmul around its plans: which knob values matter, an estimate of time, features.

Pure arithmetic on kron_mma_plan.LaunchPlan, no TVM.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil, prod
from typing import TYPE_CHECKING, Any

from kronsched.dtypes import DTYPES
from kronsched.schedules.kron_mma_plan import LaunchPlan, Step, group_sizes, merge_axes
from kronsched.space import Config, Knob
from kronsched.workloads.kron import KronMatmul

if TYPE_CHECKING:
    from kronsched.hardware import Device

_CLOCK_GHZ = 1.7
_MMA_PER_CLOCK = 0.6
"""mma.sync of 2·16·8·16 (16-bit) or 2·16·8·8 (TF32) operations an SM starts a clock; an assumption of the estimate."""
_LAUNCH_US, _BARRIER_US = 3.5, 0.05
_SPLIT_OPERATIONS = 3
_FEW_WARPS = 4


def fitting_knob(knob: Knob, w: KronMatmul) -> Knob:
    """The knob with the values that make a difference for this workload (the first one where none does)."""
    values: tuple[Any, ...] = knob.values
    if knob.name == "merge":
        seen: dict[Any, Any] = {}
        for v in values:
            seen.setdefault(merge_axes(w, v), v)
        values = tuple(seen.values())
    elif knob.name == "fuse":
        values = tuple(v for v in values if v <= len(w.factors))
    elif knob.name == "order" and len(w.factors) == 1:
        values = values[:1]
    elif knob.name == "ctile":
        whole = tuple(v for v in values if v * DTYPES[w.dtype].itemsize >= 32)  # a sector of memory
        values = whole if len(w.factors) > 1 else whole[-1:]
    elif knob.name in ("split", "precision") and w.dtype != "float32":
        values = values[:1]
    return Knob(knob.name, values or knob.values[:1], knob.help)


def canonical_config(
    w: KronMatmul, plans: tuple[LaunchPlan, ...], config: Config, values: Mapping[str, tuple[Any, ...]]
) -> dict[str, Any]:
    """The config with every knob that has no effect on these launches at its one canonical value.

    A config that differs from its canonical form repeats another one's kernel; the space leaves it out.
    """
    out: dict[str, Any] = dict(config)
    n = len(merge_axes(w, int(config["merge"])))
    sizes = group_sizes(n, int(config["fuse"]))
    out["fuse"] = next((v for v in values["fuse"] if group_sizes(n, v) == sizes), config["fuse"])
    if all(len(p.axes) == 1 for p in plans):
        out["order"] = values["order"][0]
    if all(p.inner == 1 for p in plans):
        out["ctile"] = values["ctile"][-1]
    else:
        columns = [min(-(-p.inner // 8) * 8, int(config["ctile"])) for p in plans]
        out["ctile"] = next(
            v for v in values["ctile"] if [min(-(-p.inner // 8) * 8, v) for p in plans] == columns or v == config["ctile"]
        )
    if config["precision"] != "tf32x3":
        out["split"] = values["split"][0]
    if all(prod(p.tile_grid) <= p.grid for p in plans):
        out["stages"] = values["stages"][0]
    depth = [_unrolled(p, int(config["unroll"])) for p in plans]
    out["unroll"] = next(v for v in values["unroll"] if [_unrolled(p, v) for p in plans] == depth or v == config["unroll"])
    rows = [_rows(p, int(config["tile"])) for p in plans]
    out["tile"] = next(v for v in values["tile"] if [_rows(p, v) for p in plans] == rows or v == config["tile"])
    return out


def _unrolled(plan: LaunchPlan, unroll: int) -> list[int]:
    return [s.k_tiles if s.k_tiles <= unroll else unroll for s in plan.steps]


def _rows(plan: LaunchPlan, tile: int) -> int:
    width = max(prod(a.p for a in plan.axes), prod(a.q for a in plan.axes)) * plan.ct
    rows = max(1, tile // width)
    return min(1 << (rows.bit_length() - 1), 1 << (plan.outer - 1).bit_length())


def step_mma(plan: LaunchPlan, step: Step) -> int:
    """Multiply instructions of a step on one tile."""
    operands = step.q_parts * step.q_tiles * step.groups * step.width * step.k_tiles
    eights = step.q_parts * step.q_tiles * 2 if step.q_parts > 1 else ceil(step.q / 8)
    if step.turned:
        return step.groups * (step.width // 2) * step.k_tiles * eights * plan.products
    if step.by_rows:
        return step.groups * step.width * step.k_tiles * eights * plan.products
    return operands * plan.products


def step_shared_bytes(plan: LaunchPlan, step: Step) -> int:
    """Bytes that a step moves between shared memory and registers for one tile: data, results, factor fragments."""
    data = step.groups * step.width * 8 * (2 if step.by_rows else 1)
    read = data * step.p * step.q_parts * plan.item
    write = data * step.q * plan.item
    factor = step.units * step.k_tiles * step.q_tiles * 512 * (2 if plan.early else 1)
    return read + write + factor


def step_instructions(plan: LaunchPlan, step: Step) -> float:
    """Integer instructions of a step on one tile: TF32 splitting, addresses of loads and stores."""
    data = (4 if step.by_rows else 2) * step.width
    per_k = 4.0 / min(plan.unroll, step.k_tiles)  # the loop
    if plan.products == 3:
        per_k += _SPLIT_OPERATIONS * (data + (0 if plan.early else 4 * step.q_tiles))
    loads = step.k_tiles * data / 4  # 16 bytes at a time
    stores = step.accumulators / (4 if plan.item == 4 and not step.by_rows else 2)
    return step.units * (step.k_tiles * per_k + (loads + stores) * (2 if step.exact else 20))


def tile_clocks(plan: LaunchPlan, resident: int) -> float:
    """Clocks an SM spends on one tile with `resident` blocks at work: per step, the busiest unit and a part of the others."""
    clocks = 0.0
    warps = plan.threads // 32
    for step in plan.steps:
        use = step.units / (ceil(step.units / warps) * warps)  # warps with nothing to do
        parts = (
            step_mma(plan, step) / _MMA_PER_CLOCK,
            step_shared_bytes(plan, step) / 128,
            step_instructions(plan, step) / 2,
        )
        busy = max(parts) + 0.15 * (sum(parts) - max(parts))
        clocks += busy * (1 + _FEW_WARPS / (warps * use * resident))
    copies = plan.in_chunks * 16 / 128
    return clocks + copies * (1 if plan.direct else 3)


def estimate_us(plans: tuple[LaunchPlan, ...], device: Device) -> float:
    """A rough time of the launches in microseconds: memory and SMs overlap in part; too few blocks, waves and barriers cost.

    It orders configs for the default and warms up the cost model; its constants are assumptions, not measurements.
    """
    time = 0.0
    for plan in plans:
        tiles = prod(plan.tile_grid)
        waves = ceil(tiles / plan.grid)
        resident = min(plan.blocks, ceil(tiles / device.units))
        compute = waves * resident * tile_clocks(plan, resident) / (_CLOCK_GHZ * 1e3)
        traffic = tiles * 16 * plan.in_chunks + plan.outer * plan.inner * prod(a.q for a in plan.axes) * plan.item
        memory = traffic / (device.bandwidth_gbs * min(1.0, max(tiles / device.units, 0.1))) / 1e3
        if plan.direct and plan.item == 2:
            memory *= 1.15  # half sectors
        alone = 0.15 if plan.stages * resident > 1 else 0.9  # one tile at a time: either memory or the SM waits
        setup = plan.fragment_words / plan.threads * 0.01
        barriers = waves * (len(plan.steps) + 2) * _BARRIER_US
        time += max(compute, memory) + alone * min(compute, memory) + setup + barriers + _LAUNCH_US
    return time


def plan_features(plans: tuple[LaunchPlan, ...], device: Device) -> dict[str, float]:
    """Launches, waves, occupancy, bytes through each memory level, predicted roofline time (µs) of a config's launches."""
    global_bytes = shared_bytes = mma = clocks = 0.0
    for plan in plans:
        tiles = prod(plan.tile_grid)
        global_bytes += tiles * 16 * plan.in_chunks + plan.outer * plan.inner * prod(a.q for a in plan.axes) * plan.item
        shared_bytes += tiles * sum(step_shared_bytes(plan, s) for s in plan.steps)
        mma += tiles * sum(step_mma(plan, s) for s in plan.steps)
        clocks += ceil(tiles / device.units) * tile_clocks(plan, plan.blocks)
    main = max(plans, key=lambda p: prod(p.tile_grid) * p.in_chunks)
    tiles = prod(main.tile_grid)
    waves = tiles / (device.units * main.blocks)
    warps = main.threads // 32
    return {
        "launches": float(len(plans)),
        "global_mb": global_bytes / 1e6,
        "shared_mb": shared_bytes / 1e6,
        "roofline_us": max(global_bytes / device.bandwidth_gbs, clocks / _CLOCK_GHZ) / 1e3,
        "estimate_us": estimate_us(plans, device),
        "multiplications": mma,
        "intensity": mma * 4096 / max(1.0, global_bytes),
        "shared_kb": main.shared_bytes / 1024,
        "factor_kb": main.fragment_words / 256,
        "blocks": float(tiles),
        "blocks_per_sm": float(main.blocks),
        "threads_per_sm": float(main.blocks * main.threads),
        "waves": waves,
        "wave_efficiency": waves / ceil(waves),
        "steps": float(len(main.steps)),
        "barriers": float(sum(2 + len(p.steps) + sum(s.hold for s in p.steps) for p in plans)),
        "items_per_thread": max(s.units for s in main.steps) / warps,
        "warp_use": min(s.units / (ceil(s.units / warps) * warps) for s in main.steps),
        "elements_per_thread": float(max(s.accumulators for s in main.steps)),
        "exact_steps": sum(s.exact for p in plans for s in p.steps) / sum(len(p.steps) for p in plans),
        "in_place": sum(s.src == s.dst for p in plans for s in p.steps) / sum(len(p.steps) for p in plans),
        "bytes_in_flight": float(main.blocks * main.stages * main.in_chunks * 16),
        "row_bytes": float(min(128, (main.ct if main.inner > 1 else main.axes[-1].p) * main.item)),
    }
