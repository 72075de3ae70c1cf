"""The space of the CUDA Kron-Matmul schedules around their plans: which knob values matter, and what the cost model sees.

Pure arithmetic on kron_plan.LaunchPlan, no TVM.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import ceil, prod
from typing import TYPE_CHECKING, Any

from kronsched.dtypes import DTYPES
from kronsched.schedules.kron_plan import LaunchPlan, fused_axes, group_signature, padded_chunk, stage_order
from kronsched.space import Config, Knob
from kronsched.workloads.kron import KronMatmul

if TYPE_CHECKING:
    from kronsched.hardware import Device


def fitting_knob(knob: Knob, w: KronMatmul) -> Knob:
    """The knob with the values that make a difference for this workload (the first one where none does)."""
    n, largest = len(w.factors), max(max(pair) for pair in w.factors)
    values: tuple[Any, ...] = knob.values
    if knob.name == "fuse":
        values = tuple(v for v in values if v <= n)
    elif knob.name in ("grouping", "regs"):
        seen: set[object] = set()
        kept = []
        for v in values:
            regs = (v,) if knob.name == "regs" else (8, 16, 32, 64, 128)
            groupings = (v,) if knob.name == "grouping" else ("tail", "head", "ends")
            signature = tuple(group_signature(w.factors, r, g) for r in regs for g in groupings)
            if signature not in seen:
                seen.add(signature)
                kept.append(v)
        values = tuple(kept)
    elif knob.name == "order" and n == 1:
        values = values[:1]
    elif knob.name == "ctile" and n == 1:
        values = tuple(v for v in values if v == 32)
    elif knob.name in ("tq", "tr") and largest <= 8:
        values = tuple(v for v in values if v == (8 if knob.name == "tq" else 1))
    elif knob.name == "vec":
        bytes_of = DTYPES[w.dtype].itemsize
        lanes = [*w.factors[-1], *([32] if n > 1 else [])]
        values = tuple(v for v in values if v * bytes_of <= 16 and any(lane % v == 0 for lane in lanes))
    return Knob(knob.name, values or knob.values[:1], knob.help)


def canonical_config(plans: tuple[LaunchPlan, ...], config: Config, values: Mapping[str, tuple[Any, ...]]) -> dict[str, Any]:
    """The config with every knob that has no effect on these launches at its one canonical value.

    A config that differs from its canonical form repeats another one's kernel; the space leaves it out.
    """
    out: dict[str, Any] = dict(config)
    axes = sum(p.last - p.first for p in plans)
    fused = fused_axes(axes, int(config["fuse"]))
    out["fuse"] = fused if fused in values["fuse"] else config["fuse"]
    most = max(p.threads for p in plans)
    out["threads"] = min((v for v in values["threads"] if most <= v <= int(config["threads"])), default=config["threads"])
    factors = [p.factors for p in plans]
    regs, grouping, order = int(config["regs"]), str(config["grouping"]), str(config["order"])
    cut = [group_signature(f, regs, grouping) for f in factors]
    out["regs"] = _first(values["regs"], regs, lambda v: [group_signature(f, v, grouping) for f in factors] == cut)
    out["grouping"] = _first(values["grouping"], grouping, lambda v: [group_signature(f, regs, v) for f in factors] == cut)
    steps = [stage_order(f, regs, grouping, order) for f in factors]
    out["order"] = _first(values["order"], order, lambda v: [stage_order(f, regs, grouping, v) for f in factors] == steps)
    fixed: dict[str, Any] = {}
    tiles = [(p, s) for p in plans for s in p.stages if s.tile]
    if not tiles:
        fixed.update(tq=8, tr=1)
    else:
        out["tr"] = _first(values["tr"], config["tr"], lambda v: all(min(v, p.rows) == s.tr for p, s in tiles))
    if all(s.tile for p in plans for s in p.stages):
        fixed["unroll"] = 4096
    if not any(_vectorised(p) for p in plans):
        fixed["vec"] = 1
    if all(p.inner == 1 for p in plans):
        fixed["ctile"] = 32
    if not any(p.stage_in or p.stage_out or len(p.stages) > 1 for p in plans):
        fixed["pad"] = 4
    elif all(int(config["pad"]) % padded_chunk(p.factors, p.stages, p.ct) == 0 for p in plans):
        fixed["pad"] = 0
    for name, value in fixed.items():
        out[name] = value if value in values[name] else values[name][0]
    return out


def _vectorised(plan: LaunchPlan) -> bool:
    """Whether some access of the launch is wider than one element."""
    last = len(plan.factors) - 1
    registers = plan.inner == 1 and any(last in s.axes and not s.tile for s in plan.stages)
    into = plan.vec_in > 1 and (plan.stage_in or registers)
    return into or (plan.vec_out > 1 and (plan.stage_out or registers))


def _first(values: tuple[Any, ...], own: Any, same: Callable[[Any], bool]) -> Any:
    """The first listed value that has the same effect as the config's own."""
    return next(v for v in (*values, own) if v == own or same(v))


def plan_features(w: KronMatmul, plans: tuple[LaunchPlan, ...], device: Device) -> dict[str, float]:
    """Launches, waves, occupancy, bytes through each memory level, predicted roofline time (µs) of a config's launches."""
    item = DTYPES[w.dtype].itemsize
    out: dict[str, float] = {"launches": float(len(plans))}
    global_bytes = shared_bytes = time_us = flops = 0.0
    for plan in plans:
        tile_in = plan.rows * plan.ct * prod(p for p, _ in plan.factors)
        tile_out = plan.rows * plan.ct * prod(plan.out_extents)
        blocks = prod(plan.grid)
        traffic = blocks * (tile_in + tile_out) * item
        trips = sum(prod(s.extent) + prod(s.after) for s in plan.stages) * plan.rows * plan.ct * item * blocks
        work = sum(
            2 * plan.rows * plan.ct * blocks * prod(s.extent) * prod(plan.factors[a][1] for a in s.axes) for s in plan.stages
        )
        global_bytes += traffic
        shared_bytes += trips
        flops += work
        time_us += max(traffic / device.bandwidth_gbs, work / device.peak_gflops.get(w.compute_dtype, 1e4)) / 1e3
    main = max(plans, key=lambda p: prod(p.grid) * p.rows * p.ct * prod(q for _, q in p.factors))
    limit_shared = device.shared_per_sm // max(1, main.shared_bytes + 1024)
    limit_threads = device.max_threads_per_sm // main.threads
    per_sm = max(1, min(limit_shared, limit_threads, 32))
    blocks = prod(main.grid)
    waves = blocks / (device.units * per_sm)
    elements = max(prod(s.extent[a] for a in s.axes) if not s.tile else s.tq * s.tr for s in main.stages)
    out.update(
        global_mb=global_bytes / 1e6,
        shared_mb=shared_bytes / 1e6,
        roofline_us=time_us,
        intensity=flops / max(1.0, global_bytes),
        shared_kb=main.shared_bytes / 1024,
        blocks=float(blocks),
        blocks_per_sm=float(per_sm),
        threads_per_sm=float(per_sm * main.threads),
        waves=waves,
        wave_efficiency=waves / ceil(waves),
        stages=float(len(main.stages)),
        items_per_thread=max(s.items for s in main.stages) / main.threads,
        lane_use=min(s.items / (ceil(s.items / main.threads) * main.threads) for s in main.stages),
        elements_per_thread=float(elements),
        bytes_in_flight=float(per_sm * main.rows * main.ct * prod(p for p, _ in main.factors) * item),
        coalesced_in=_lane_run(main, first=True, item=item),
        coalesced_out=_lane_run(main, first=False, item=item),
    )
    return out


def _lane_run(plan: LaunchPlan, first: bool, item: int) -> float:
    """Bytes that neighbouring lanes touch contiguously in global memory at one end of a launch, at most 128."""
    if plan.stage_in if first else plan.stage_out:
        return 128.0
    stage = plan.stages[0 if first else -1]
    if plan.inner > 1:
        return min(128.0, plan.ct * item)
    tail = prod((stage.extent if first else stage.after)[max(stage.axes) + 1 :])
    return min(128.0, float(tail * item))
