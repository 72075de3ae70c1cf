"""Conv2d on Hopper's warpgroup tensor cores, fed by TMA (im2col tensor maps): a TIRx tile program.

Read first: conv2d_tma_plan.py (sizes and constraints), conv2d_tma_kernel.py (the program), conv2d_tma_store.py (its end).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from kronsched.dtypes import DTYPES
from kronsched.errors import InvalidConfig
from kronsched.schedules.base import Schedule, Scheduled
from kronsched.schedules.conv2d_fold import folded_launches
from kronsched.schedules.conv2d_tma_estimate import estimated_us
from kronsched.schedules.conv2d_tma_kernel import tma_program
from kronsched.schedules.conv2d_tma_plan import (
    MAX_SUMS,
    check_depth,
    chunk_width,
    computed,
    paired,
    plan_tma,
    tma_features,
    why_not,
)
from kronsched.space import Config, Knob, SearchSpace, load_knobs
from kronsched.workloads.base import Workload
from kronsched.workloads.conv2d import Conv2d

if TYPE_CHECKING:
    from kronsched.hardware import Device


WORTH = 1.6
"""Configs that are estimated to take more than so many times as long as the best are left out of the space."""


class Conv2dCudaTma(Schedule):
    """int8 to int8, fp8, 16-bit floats on sm_90a: one group, whole 32 bytes of channels or a few, 16 channels of y or more."""

    name: ClassVar[str] = "conv2d_cuda_tma"
    family: ClassVar[str] = "conv2d"
    device_kind: ClassVar[str] = "cuda"
    untuned_share: ClassVar[float] = 0.6

    def supports(self, workload: Workload, device: Device) -> str | None:
        """None for sm_90a, one group, channels in whole pieces."""
        assert isinstance(workload, Conv2d)
        return why_not(workload, device)

    def space(self, workload: Workload, device: Device) -> SearchSpace:
        """Knobs of search_spaces/conv2d_cuda_tma.toml, less what means nothing at this shape or is far from the best estimate."""
        assert isinstance(workload, Conv2d)
        whole = _whole_space(workload, device)

        @functools.cache
        def most() -> float:
            return WORTH * min((estimated_us(plan_tma(workload, c, device), device) for c in _deepest(whole)), default=0.0)

        def check(config: Config) -> str | None:
            reason = whole.invalid(config)
            if reason is None and (us := estimated_us(plan_tma(workload, config, device), device)) > most():
                reason = f"estimated {us:.1f} us: over {WORTH} times the best config's"
            return reason

        return SearchSpace(self.name, whole.knobs, check)

    def default_config(self, workload: Workload, device: Device) -> Config:
        """The tile with the least estimated time, with as many stages as fit; pairs are worth a search only."""
        assert isinstance(workload, Conv2d)
        found = (config for config in _deepest(_whole_space(workload, device)) if not config["pair"])
        best = min(found, key=lambda c: _merit(workload, c, device), default=None)
        if best is None:
            raise InvalidConfig(f"no config of {self.name} is valid for {workload.label} on {device.name}")
        return best

    def apply(self, workload: Workload, config: Config, device: Device) -> Scheduled:
        """One launch, or two where channels are folded first."""
        assert isinstance(workload, Conv2d)
        plan = plan_tma(workload, config, device)
        return folded_launches(plan.fold, tma_program(plan, "conv2d"))

    def expected_us(self, workload: Workload, config: Config, device: Device) -> float | None:
        """By `estimated_us`."""
        assert isinstance(workload, Conv2d)
        return estimated_us(plan_tma(workload, config, device), device)

    def features(self, workload: Workload, config: Config, device: Device) -> Mapping[str, float]:
        """Waves, occupancy, bytes through each memory level, predicted and roofline time."""
        assert isinstance(workload, Conv2d)
        plan = plan_tma(workload, config, device)
        return {**tma_features(plan, device), "model_us": estimated_us(plan, device)}


def _whole_space(conv: Conv2d, device: Device) -> SearchSpace:
    """All configs that can be made and are not plainly worse than another."""

    def check(config: Config) -> str | None:
        try:
            check_depth(plan_tma(conv, config, device), device)
        except InvalidConfig as e:
            return str(e)
        return None

    return SearchSpace(Conv2dCudaTma.name, [_fitting(knob, conv) for knob in load_knobs(Conv2dCudaTma.name)], check)


def _deepest(space: SearchSpace) -> Iterator[Config]:
    """Valid configs, of those that differ in `stages` only the one with the most."""
    values: dict[str, tuple[Any, ...]] = {k.name: k.values for k in space.knobs}
    stages = sorted(values.pop("stages"), reverse=True)
    for others in itertools.product(*values.values()):
        shape = dict(zip(values, others, strict=True))
        if shape["block_m"] * shape["block_n"] > MAX_SUMS * 128 * shape["row_groups"] * shape["col_groups"]:
            continue  # as in `plan_tma`, but at once
        for count in stages:
            config = {knob.name: count if knob.name == "stages" else shape[knob.name] for knob in space.knobs}
            reason = space.invalid(config)
            if reason is None:
                yield config
                break
            if "stages" not in reason and "shared memory" not in reason:
                break


def _merit(conv: Conv2d, config: Config, device: Device) -> tuple[float, ...]:
    """Smaller is better."""
    return (estimated_us(plan_tma(conv, config, device), device), -float(config["stages"]))


def _fitting(knob: Knob, conv: Conv2d) -> Knob:
    """The knob less the values that are valid in no config of this shape."""
    pairs = paired(conv)
    layers = [computed(conv)[0]] + ([pairs.folded] if pairs else [])
    chunks = [c.kernel[0] * c.kernel[1] * (c.c_in * DTYPES[c.in_dtype].itemsize // (chunk_width(c) or 1)) for c in layers]
    c_out, pixels = max(c.c_out for c in layers), layers[0].pixels

    def fits(value: Any) -> bool:
        if knob.name == "block_m":
            return bool(value == knob.values[0] or value < 2 * pixels)
        if knob.name == "block_n":
            return bool(value <= (32 if c_out <= 32 else 64) or value < 2 * c_out)
        if knob.name == "depth":
            return any(count % int(value) == 0 for count in chunks)
        if knob.name == "split":
            return int(value) <= max(chunks)
        if knob.name == "pair":
            return not value or pairs is not None
        return True

    return Knob(knob.name, tuple(v for v in knob.values if fits(v)), knob.help)
