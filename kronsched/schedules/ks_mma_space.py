"""The spaces of the tensor-core Kronecker-sparse schedules: which knob values matter, the default config, features.

Pure arithmetic on the plans of both layouts, no TVM.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from math import ceil
from typing import TYPE_CHECKING, Any

from kronsched.errors import InvalidConfig
from kronsched.schedules.ks_mma_cost import Constants, Plan, demand_of, parts_us, predict
from kronsched.schedules.ks_mma_limits import LANES
from kronsched.space import Config, Knob, Value
from kronsched.workloads.ks import KSMatmul, pattern_in, pattern_out

if TYPE_CHECKING:
    from kronsched.hardware import Device

CONSTANTS = Constants()
_KINDS = ("mma", "weights")
_TOGETHER = (
    ("warps_m", "warps_j"),
    ("warps_n", "warps_j"),
    ("pairs", "warps_j"),
    ("mj", "warps_j"),
    ("ksteps", "stages"),
    ("store", "stages"),
)
_STARTS = 3
Planner = Callable[[Config], Sequence[Plan]]


def fitting_knobs(knobs: Sequence[Knob], most: Mapping[str, int]) -> list[Knob]:
    """The knobs with the values up to `most` (the first one where none is)."""
    kept = {k.name: tuple(v for v in k.values if k.name not in most or int(v) <= most[k.name]) for k in knobs}
    return [Knob(k.name, kept[k.name] or k.values[:1], k.help) for k in knobs]


def canonical_config(config: Config, values: Mapping[str, tuple[Value, ...]], plan: Callable[[Config], Any]) -> dict[str, Value]:
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
    """A config of little predicted time: the best of `few` values for each way to multiply and to hold weights, then improved.

    Improved means: one knob after another, and the pairs of `_TOGETHER`, to the best of all values, until nothing changes.
    Raises InvalidConfig when no config is valid.
    """

    def time(config: Config) -> float:
        try:
            return predicted_us(plan(config), device)
        except InvalidConfig:
            return math.inf

    starts: dict[tuple[Value, ...], tuple[float, dict[str, Value]]] = {}
    for wanted in (few, values):
        for config in _product({k: [v for v in wanted.get(k, ()) if v in listed] or listed[:1] for k, listed in values.items()}):
            found, kind = time(config), tuple(config[k] for k in _KINDS if k in config)
            if found < starts.get(kind, (math.inf,))[0]:
                starts[kind] = found, config
        if starts:
            break
    if not starts:
        raise InvalidConfig(f"no config is valid for {w.label} on {device.name}")
    best = sorted(starts.values(), key=lambda start: start[0])[:_STARTS]
    return min((_improved(start, values, time) for start in best), key=lambda end: end[0])[1]


def _improved(
    start: tuple[float, dict[str, Value]], values: Mapping[str, tuple[Value, ...]], time: Callable[[Config], float]
) -> tuple[float, dict[str, Value]]:
    """(time, config) that no move of `least_predicted` makes faster."""
    moves = [tuple(k for k in names if k in values) for names in (*((k,) for k in values), *_TOGETHER)]
    best, changed = start, True
    while changed:
        changed = False
        for names in moves:
            for change in _product({k: values[k] for k in names}):
                config = {**best[1], **change}
                if config != best[1] and (found := time(config)) < best[0]:
                    best, changed = (found, config), True
    return best


def _product(knobs: Mapping[str, Sequence[Value]]) -> list[dict[str, Value]]:
    configs: list[dict[str, Value]] = [{}]
    for name, listed in knobs.items():
        configs = [{**config, name: value} for config in configs for value in listed]
    return configs


def mma_features(w: KSMatmul, plans: Sequence[Plan], device: Device) -> dict[str, float]:
    """What the launches ask of the GPU, and a predicted time; µs, sizes as named. Of a chain: sums, or its slowest part."""
    parts = [_features(p, device) for p in plans]
    main = max(parts, key=lambda one: one["predicted_us"])
    out = {name: sum(one[name] for one in parts) if name.endswith(("_us", "_mb")) else value for name, value in main.items()}
    launches = sum(1 if p.gather else 2 for p in plans)
    return {**out, "launches": float(launches), "intensity": w.flops / max(1.0, 1e6 * out["global_mb"])}


def predicted_us(plans: Sequence[Plan], device: Device) -> float:
    """The predicted time alone."""
    return sum(predict(p, demand_of(p, device), device, CONSTANTS) for p in plans)


def _features(p: Plan, device: Device) -> dict[str, float]:
    a, b, c, d = p.pattern
    need = demand_of(p, device)
    parts = parts_us(p, need, device, CONSTANTS)
    least = p.item * (p.batch * (pattern_in(p.pattern) + pattern_out(p.pattern)) + a * b * c * d)
    waves = need.blocks / (device.units * need.per_sm)
    products = 3 if p.item == 4 else 1
    return {
        **parts,
        "predicted_us": predict(p, need, device, CONSTANTS),
        "roofline_us": max(least / device.bandwidth_gbs / 1e3, parts["mma_us"]),
        "global_mb": least / 1e6,
        "l2_mb": need.l2 / 1e6,
        "shared_mb": need.shared / 1e6,
        "useful_flops": products * 2.0 * p.batch * a * b * c * d / need.flops,
        "shared_kb": 4 * p.shared_words / 1024,
        "blocks": float(need.blocks),
        "blocks_per_sm": float(need.per_sm),
        "warps_per_sm": float(need.per_sm * p.threads // LANES),
        "waves": waves,
        "wave_efficiency": waves / ceil(waves),
        "rounds": float(need.rounds),
        "round_efficiency": need.even,
        "in_flight_kb": need.flight / 1024,
        "registers": float(p.registers),
        "sums": float(p.sums),
        "slices": float(p.slice_count),
        "coalesced_in": float(min(128, need.run_in)),
        "coalesced_out": float(min(128, need.run_out)),
    }
