"""The spaces of the tensor-core Kronecker-sparse schedules: which knob values matter, the default config, features.

Pure arithmetic on the plans of both layouts, no TVM.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING, Any

from kronsched.errors import InvalidConfig
from kronsched.schedules.ks_last_plan import LastPlan
from kronsched.schedules.ks_mma_plan import MmaPlan
from kronsched.space import Config, Knob, Value
from kronsched.workloads.ks import KSMatmul, pattern_in, pattern_out

if TYPE_CHECKING:
    from kronsched.hardware import Device

# Constants of the predicted time. It ranks configs where nothing was measured; it is no claim.
_IN_FLIGHT = 32 * 1024  # bytes an SM must have under way to keep its share of the memory busy: bandwidth × latency
_MMA_SHARE = 0.6  # of the peak rate that mma.sync reaches on Hopper
_SHARED_RATE = 128 * 1.7  # shared-memory bytes a nanosecond of an SM
_PACK_US = 2.0  # the launch that packs the weights
_SECTOR = 32

Plan = MmaPlan | LastPlan
Planner = Callable[[Config], Sequence[Plan]]


def fitting_knobs(knobs: Sequence[Knob], most: Mapping[str, int]) -> list[Knob]:
    """The knobs with the values up to `most` (the first one where none is)."""
    kept = {k.name: tuple(v for v in k.values if k.name not in most or int(v) <= most[k.name]) for k in knobs}
    return [Knob(k.name, kept[k.name] or k.values[:1], k.help) for k in knobs]


def canonical_config(config: Config, values: Mapping[str, tuple[Value, ...]], plan: Planner) -> dict[str, Value]:
    """The config with each knob at the first listed value that gives the same plans. Raises InvalidConfig as `plan` does."""
    out, plans = dict(config), plan(config)
    for name, listed in values.items():
        for value in listed:
            try:
                same = value == out[name] or plan({**out, name: value}) == plans
            except InvalidConfig:
                continue
            if same:
                out[name] = value
                break
    return out


def least_predicted(
    values: Mapping[str, tuple[Value, ...]], few: Mapping[str, tuple[Any, ...]], plan: Planner, w: KSMatmul, device: Device
) -> dict[str, Value]:
    """The config of least predicted time among the values of `few`, else among all; InvalidConfig when none is valid."""
    for wanted in (few, values):
        best: tuple[float, dict[str, Value]] | None = None
        for config in _product({k: [v for v in wanted[k] if v in listed] or listed[:1] for k, listed in values.items()}):
            try:
                plans = plan(config)
            except InvalidConfig:
                continue
            time = mma_features(w, plans, device)["predicted_us"]
            if best is None or time < best[0]:
                best = time, config
        if best is not None:
            return best[1]
    raise InvalidConfig(f"no config is valid for {w.label} on {device.name}")


def _product(knobs: Mapping[str, Sequence[Value]]) -> list[dict[str, Value]]:
    configs: list[dict[str, Value]] = [{}]
    for name, listed in knobs.items():
        configs = [{**config, name: value} for config in configs for value in listed]
    return configs


def mma_features(w: KSMatmul, plans: Sequence[Plan], device: Device) -> dict[str, float]:
    """Waves, occupancy, bytes through each memory level, and a predicted time; times in µs, sizes as named."""
    parts = [_features(p, _geometry(p), device) for p in plans]
    main = max(parts, key=lambda one: one["predicted_us"])
    total = ("global_mb", "l2_mb", "shared_mb", "roofline_us", "predicted_us", "mma_us")
    out = {name: sum(one[name] for one in parts) if name in total else value for name, value in main.items()}
    return {**out, "launches": 2.0 * len(plans), "intensity": w.flops / max(1.0, 1e6 * out["global_mb"])}


@dataclass(frozen=True)
class _Geometry:
    """What the layouts differ in. Bytes of a slice's weights; times a tile's weights and rows are read from shared memory."""

    rows: int
    outputs: int  # padded (i, j, l) of all slices
    groups: int
    blocks_a_slice: int
    j_slices: int
    slice_bytes: int
    weight_reads: int
    row_reads: int
    run_in: int
    run_out: int
    sectors_out: float  # sectors touched for each that is needed


def _geometry(p: Plan) -> _Geometry:
    slice_bytes = 4 * p.chunks * p.chunk_words
    if isinstance(p, LastPlan):
        run = p.nb * p.item
        outputs = p.slice_count * p.jb
        return _Geometry(p.nb, outputs, 1, p.grid_tiles, p.j_slices, slice_bytes, p.warps_n, p.warps_j, run, 64, 1.0)
    d = p.pattern[3]
    run_in = p.ks * d * p.item if p.small else p.lb * p.item
    whole = p.jb * d * p.item if p.small else p.lb * p.item
    run_out = {"staged": whole, "pair": 32, "direct": 16}[p.store]
    outputs = p.slice_count * p.jb * p.lb
    spread = 1 + 0.5 * (_SECTOR / min(_SECTOR, run_out) - 1)
    return _Geometry(
        p.rows, outputs, p.groups, p.grid_rows, p.slices[1], slice_bytes, p.warps_m, p.warps_j, run_in, run_out, spread
    )


def _features(p: Plan, s: _Geometry, device: Device) -> dict[str, float]:
    a, b, c, d = p.pattern
    x_bytes, y_bytes = p.item * p.batch * pattern_in(p.pattern), p.item * p.batch * pattern_out(p.pattern)
    w_bytes, blocks = p.item * a * b * c * d, p.slice_count * s.blocks_a_slice
    per_sm = max(1, min(p.min_blocks, device.shared_per_sm // (4 * p.shared_words + 1024)))
    waves = blocks / (device.units * per_sm)
    rounds = ceil(p.tiles / (s.groups * s.blocks_a_slice))
    loads, stores = x_bytes * _SECTOR / min(_SECTOR, s.run_in), y_bytes * s.sectors_out
    weights = s.slice_bytes * (p.tiles * p.slice_count if p.stream else blocks)
    memory = (loads * (1 + 0.3 * (s.j_slices - 1)) + stores + 0.3 * weights + w_bytes) / device.bandwidth_gbs / 1e3
    padded = 2.0 * p.tiles * s.rows * s.outputs * p.chunks * p.ks
    rate = device.peak_gflops.get("float16", 4 * device.peak_gflops["float32"]) * _MMA_SHARE / (1 if p.item == 2 else 6)
    mma = padded / rate / 1e3
    shared = p.tiles * p.slice_count * s.weight_reads * s.slice_bytes + x_bytes * s.j_slices * (1 + s.row_reads)
    flight = per_sm * s.groups * (p.stages - 1) * 4 * p.stage_words
    warps = per_sm * p.threads // 32
    busy, fed = min(1.0, 0.4 + 0.6 * flight / _IN_FLIGHT), min(1.0, warps / 8)
    round_efficiency = p.tiles / (s.groups * s.blocks_a_slice * rounds)
    wave_efficiency = waves / ceil(waves)
    slowest = max(memory / busy, mma / fed, shared / (_SHARED_RATE * device.units) / 1e3)
    return {
        "global_mb": (x_bytes + y_bytes + w_bytes) / 1e6,
        "l2_mb": (loads * s.j_slices + stores + weights) / 1e6,
        "shared_mb": shared / 1e6,
        "roofline_us": max((x_bytes + y_bytes + w_bytes) / device.bandwidth_gbs / 1e3, mma),
        "predicted_us": slowest / (round_efficiency * wave_efficiency) + _PACK_US,
        "mma_us": mma,
        "useful_flops": 2.0 * p.batch * a * b * c * d / padded,
        "shared_kb": 4 * p.shared_words / 1024,
        "blocks": float(blocks),
        "blocks_per_sm": float(per_sm),
        "warps_per_sm": float(warps),
        "waves": waves,
        "wave_efficiency": wave_efficiency,
        "rounds": float(rounds),
        "round_efficiency": round_efficiency,
        "in_flight_kb": flight / 1024,
        "registers": float(p.registers),
        "sums": float(p.sums),
        "slices": float(p.slice_count),
        "coalesced_in": float(min(128, s.run_in)),
        "coalesced_out": float(min(128, s.run_out)),
    }
