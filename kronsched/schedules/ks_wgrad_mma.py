"""The weight gradient of a Kronecker-sparse product on tensor cores by mma.sync: both layouts, any GPU since sm_80.

Read first: ks_wgrad_plan.py (sizes and constraints), ks_wgrad_kernel.py (the program).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from math import ceil
from typing import TYPE_CHECKING, Any, ClassVar

from kronsched.dtypes import DTYPES
from kronsched.errors import InvalidConfig
from kronsched.schedules.base import Launch, Schedule, Scheduled
from kronsched.schedules.ks_mma_limits import can_overlap, sm_number
from kronsched.schedules.ks_mma_space import canonical_config, fitting_knobs
from kronsched.schedules.ks_parts import checked_space
from kronsched.schedules.ks_wgrad_cost import wgrad_features
from kronsched.schedules.ks_wgrad_plan import WgradPlan, plan_wgrad
from kronsched.space import Config, SearchSpace, Value, load_knobs
from kronsched.workloads.base import TensorSpec, Workload
from kronsched.workloads.ks_wgrad import KSWeightGrad

if TYPE_CHECKING:
    from kronsched.hardware import Device

_STARTS = (
    {"vector": 16, "mj": 4, "nk": 8, "warps_j": 2, "warps_k": 2},
    {"vector": 8, "mj": 2, "nk": 4, "warps_j": 4, "warps_k": 2},
    {"vector": 4, "mj": 2, "nk": 4, "warps_j": 2, "warps_k": 2},
    {"vector": 4, "mj": 1, "nk": 2, "warps_j": 2, "warps_k": 2},
    {"vector": 8, "mj": 1, "nk": 2, "lunits": 1, "warps_j": 2, "warps_k": 2},
    {"vector": 16, "mj": 1, "nk": 2, "lunits": 1, "warps_j": 2, "warps_k": 2},
    {"vector": 4, "mj": 1, "nk": 1, "lunits": 1},
)
_COMMON = {"warps_j": 1, "warps_k": 1, "warps_l": 1, "lunits": 0, "steps": 1, "stages": 3, "min_blocks": 1, "waves": 1}
_PAIRS = (
    ("warps_j", "mj"),
    ("warps_k", "nk"),
    ("warps_j", "warps_k"),
    ("mj", "nk"),
    ("min_blocks", "waves"),
    ("steps", "stages"),
)
_ODD_L = 15


class KSWgradMma(Schedule):
    """float16, bfloat16, and float32 by three products of TF32."""

    name: ClassVar[str] = "ks_wgrad_mma"
    family: ClassVar[str] = "ks_wgrad"
    device_kind: ClassVar[str] = "cuda"
    untuned_share: ClassVar[float] = 0.4

    def supports(self, workload: Workload, device: Device) -> str | None:
        """Not float64, GPUs before sm_80, or runs of memory that are an odd number of 16-bit elements."""
        assert isinstance(workload, KSWeightGrad)
        if workload.dtype == "float64":
            return "float64 is not served by these tensor-core kernels"
        if sm_number(device) < 80:
            return f"tensor-core instructions of sm_80 are needed, {device.name} is {device.arch}"
        _, b, c, d = workload.pattern
        item = DTYPES[workload.dtype].itemsize
        runs = (b * d, c * d) if workload.batch_first else (workload.batch,)
        odd = next((run for run in runs if run * item % 4), None)
        if odd is not None:
            return f"runs of {odd} {workload.dtype} are not a multiple of 4 bytes"
        if workload.batch_first and item == 2 and d % 2 and d > _ODD_L:
            return f"d={d} is odd and more than {_ODD_L}"
        return None

    def space(self, workload: Workload, device: Device) -> SearchSpace:
        """Knobs of search_spaces/ks_wgrad_mma.toml, less the values that mean nothing at this shape."""
        assert isinstance(workload, KSWeightGrad)
        _, b, c, _ = workload.pattern
        most = {"mj": ceil(b / 16) + 1, "warps_j": ceil(b / 16), "nk": max(4, ceil(c / 8) + 3), "warps_k": ceil(c / 8)}
        knobs = fitting_knobs(load_knobs(self.name), most)
        values = {k.name: k.values for k in knobs}
        return checked_space(
            self.name, knobs, lambda config: canonical_config(config, values, partial(self._plans, workload, device))
        )

    def default_config(self, workload: Workload, device: Device) -> Config:
        """The config of least predicted time that single changes of knobs, and of some pairs, lead to from a few starts."""
        assert isinstance(workload, KSWeightGrad)
        values: dict[str, tuple[Value, ...]] = {k.name: k.values for k in self.space(workload, device).knobs}

        def time(config: Config) -> float:
            try:
                return wgrad_features(workload, plan_wgrad(workload, config, device), device)["predicted_us"]
            except InvalidConfig:
                return math.inf

        best: tuple[float, dict[str, Value]] = (math.inf, {})
        for start in _STARTS:
            wanted = {**_COMMON, **start}
            config = {name: _nearest(listed, wanted[name]) for name, listed in values.items()}
            found = _improved((time(config), config), values, time)
            best = min(best, found, key=lambda one: one[0])
        if not best[1]:
            raise InvalidConfig(f"no config of {self.name} is valid for {workload.label} on {device.name}")
        return canonical_config(best[1], values, partial(self._plans, workload, device))

    def apply(self, workload: Workload, config: Config, device: Device) -> Scheduled:
        """Two launches: partial sums of slices of the samples, and their sums. Scratch: p."""
        import tvm

        from kronsched.schedules.ks_wgrad_kernel import wgrad_kernel
        from kronsched.schedules.ks_wgrad_sum import sum_kernel

        assert isinstance(workload, KSWeightGrad)
        plan, overlap = plan_wgrad(workload, config, device), can_overlap(device)
        kernel = wgrad_kernel(plan, "ks_wgrad", overlap)
        last = sum_kernel(workload.pattern, workload.dtype, "float32", plan.splits, plan.elements, plan.place, overlap)
        launches = Launch("ks_wgrad", ("g", "x", "p"), overlap), Launch("ks_wgrad_sum", ("p", "dw"), overlap)
        scratch = TensorSpec("p", (plan.splits * plan.elements,), "float32")
        return Scheduled(tvm.IRModule({"ks_wgrad": kernel, "ks_wgrad_sum": last}), launches, (scratch,))

    def expected_us(self, workload: Workload, config: Config, device: Device) -> float:
        """The time that ks_wgrad_cost.py predicts."""
        return self.features(workload, config, device)["predicted_us"]

    def features(self, workload: Workload, config: Config, device: Device) -> Mapping[str, float]:
        """Traffic, waves, occupancy, a predicted time."""
        assert isinstance(workload, KSWeightGrad)
        return wgrad_features(workload, plan_wgrad(workload, config, device), device)

    def _plans(self, workload: KSWeightGrad, device: Device, config: Config) -> list[WgradPlan]:
        return [plan_wgrad(workload, config, device)]


def _nearest(values: tuple[Value, ...], want: int) -> Value:
    """The largest listed number up to `want`, else the smallest."""
    return max((v for v in values if int(v) <= want), default=min(values, key=int), key=int)


def _improved(
    start: tuple[float, dict[str, Value]], values: Mapping[str, tuple[Value, ...]], time: Any
) -> tuple[float, dict[str, Value]]:
    """(time, config) that no change of a knob, or of a pair, makes faster."""
    best, changed = start, True
    while changed:
        changed = False
        for names in (*((name,) for name in values), *_PAIRS):
            options: list[dict[str, Value]] = [{}]
            for name in names:
                options = [{**option, name: value} for option in options for value in values[name]]
            for option in options:
                config = {**best[1], **option}
                if config != best[1] and (found := time(config)) < best[0]:
                    best, changed = (found, config), True
    return best
