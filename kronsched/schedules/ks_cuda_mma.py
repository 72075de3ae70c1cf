"""Kronecker-sparse matmul on tensor cores (CUDA, sm_80 and later), one schedule a layout. Two launches a factor of a chain.

    pack      weights (a, b, c, d) → fragment order, padded with zeros      (TensorIR, ks_parts.pack_weights)
    multiply  tiles of X against slices of packed weights → Y               (TIRx, ks_mma_kernel.py or ks_last_kernel.py)

Read first: `KSTensorCore.apply`, then ks_mma_plan.py and ks_last_plan.py.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping
from functools import partial
from math import ceil
from typing import TYPE_CHECKING, Any, ClassVar

from kronsched.dtypes import DTYPES
from kronsched.schedules import ks_last_plan, ks_mma_plan
from kronsched.schedules.base import Schedule, Scheduled
from kronsched.schedules.ks_last_plan import LastPlan, plan_last
from kronsched.schedules.ks_mma_plan import MmaPlan, plan_mma
from kronsched.schedules.ks_mma_space import Plan, canonical_config, fitting_knobs, least_predicted, mma_features
from kronsched.schedules.ks_parts import checked_space, factor_tensors, launch_of, pack_weights, renamed
from kronsched.space import Config, SearchSpace, load_knobs
from kronsched.workloads.base import TensorSpec, Workload
from kronsched.workloads.ks import KSMatmul, Pattern

if TYPE_CHECKING:
    from kronsched.hardware import Device


class KSTensorCore(Schedule):
    """What the layouts share: float16 and bfloat16 with float32 sums, float32 by three TF32 products."""

    family: ClassVar[str] = "ks"
    device_kind: ClassVar[str] = "cuda"
    layout: ClassVar[str]
    few: ClassVar[Mapping[str, tuple[Any, ...]]]
    """Values of each knob among which the default config is chosen."""

    @abc.abstractmethod
    def plan(self, workload: KSMatmul, pattern: Pattern, config: Config, device: Device) -> Plan:
        """The plan of one factor."""

    @abc.abstractmethod
    def kernel(self, plan: Any) -> Any:
        """The PrimFunc over x, packed weights and y."""

    @abc.abstractmethod
    def packing(self, plan: Any) -> tuple[Any, tuple[int, int, int]]:
        """(flat index of the packed weights -> (i, j, k, l), extents that j, k and l reach)."""

    @abc.abstractmethod
    def runs(self, workload: KSMatmul, pattern: Pattern) -> tuple[int, ...]:
        """Numbers of elements that must be whole 4-byte words, for the copies and stores to be aligned."""

    @abc.abstractmethod
    def most(self, workload: KSMatmul) -> Mapping[str, int]:
        """The largest value that can matter at this shape, by knob."""

    def supports(self, workload: Workload, device: Device) -> str | None:
        """Not float64, not the other layout, not GPUs before sm_80, not runs that are an odd number of 16-bit elements."""
        assert isinstance(workload, KSMatmul)
        if workload.dtype == "float64":
            return "float64 is not served by these tensor-core kernels"
        if workload.layout != self.layout:
            return f"layout {workload.layout} is not served"
        if not device.arch.startswith("sm_") or int(device.arch[3:].rstrip("af")) < 80:
            return f"tensor-core instructions of sm_80 are needed, {device.name} is {device.arch}"
        item = DTYPES[workload.dtype].itemsize
        for pattern in workload.patterns:
            odd = [run for run in self.runs(workload, pattern) if run * item % 4]
            if odd:
                return f"pattern {pattern}: runs of {odd[0]} {workload.dtype} are not a multiple of 4 bytes"
        return None

    def space(self, workload: Workload, device: Device) -> SearchSpace:
        """Knobs of the TOML named like the schedule, less the values that mean nothing at this shape."""
        assert isinstance(workload, KSMatmul)
        knobs = fitting_knobs(load_knobs(self.name), self.most(workload))
        values = {k.name: k.values for k in knobs}
        planner = partial(self.plans, workload, device)
        return checked_space(self.name, knobs, lambda config: canonical_config(config, values, planner))

    def default_config(self, workload: Workload, device: Device) -> Config:
        """The config of least predicted time among a few values of each knob (`ks_mma_space.least_predicted`)."""
        assert isinstance(workload, KSMatmul)
        values = {k.name: k.values for k in self.space(workload, device).knobs}
        planner = partial(self.plans, workload, device)
        return canonical_config(least_predicted(values, self.few, planner, workload, device), values, planner)

    def apply(self, workload: Workload, config: Config, device: Device) -> Scheduled:
        """Two PrimFuncs and launches a factor; scratch: packed weights p0, p1 and a chain's t0, t1 and so on."""
        import tvm

        assert isinstance(workload, KSMatmul)
        funcs, launches, scratch = {}, [], []
        plans = self.plans(workload, device, config)
        for i, (plan, tensors) in enumerate(zip(plans, factor_tensors(workload, workload.dtype), strict=True)):
            source, weight, target = tensors
            packed = TensorSpec(f"p{i}", (plan.weight_elements,), workload.dtype)
            scratch += [packed, *([target] if i < len(plans) - 1 else [])]
            parts = {
                f"ks_pack_{i}": (pack_weights(weight, packed, *self.packing(plan)), (weight, packed)),
                f"ks_{i}": (renamed(self.kernel(plan), source, packed, target), (source, packed, target)),
            }
            for name, (func, args) in parts.items():
                funcs[name] = func.with_attr("global_symbol", name)
                launches.append(launch_of(name, *args))
        return Scheduled(tvm.IRModule(funcs), tuple(launches), tuple(scratch))

    def features(self, workload: Workload, config: Config, device: Device) -> Mapping[str, float]:
        """Waves, occupancy, bytes through each memory level, a predicted time."""
        assert isinstance(workload, KSMatmul)
        return mma_features(workload, self.plans(workload, device, config), device)

    def plans(self, workload: KSMatmul, device: Device, config: Config) -> list[Plan]:
        """The plan of each factor. Raises InvalidConfig."""
        return [self.plan(workload, pattern, config, device) for pattern in workload.patterns]


class KSCudaMma(KSTensorCore):
    """Tensor-core schedule for KSMatmul in layout batch_first."""

    name: ClassVar[str] = "ks_cuda_mma"
    layout: ClassVar[str] = "batch_first"
    few: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "mt": (1, 2), "warps_m": (1, 2, 4, 8), "warps_j": (1, 2), "warps_l": (1,), "pairs": (1, 2, 4), "lunits": (1, 2),
        "ksteps": (1, 2, 4), "stages": (3, 2), "groups": (1,), "weights": ("resident", "stream"),
        "store": ("pair", "staged"), "min_blocks": (2, 1, 4), "waves": (1,),
    }  # fmt: skip

    def plan(self, workload: KSMatmul, pattern: Pattern, config: Config, device: Device) -> Plan:
        """See the base class."""
        return plan_mma(workload, pattern, config, device)

    def kernel(self, plan: MmaPlan) -> Any:
        """See the base class."""
        from kronsched.schedules.ks_mma_kernel import batch_first_kernel

        return batch_first_kernel(plan)

    def packing(self, plan: MmaPlan) -> tuple[Any, tuple[int, int, int]]:
        """See the base class."""
        _, nj, nl = plan.slices
        return partial(ks_mma_plan.weight_at, plan), (nj * plan.jb, plan.chunks * plan.ks, nl * plan.lb)

    def runs(self, workload: KSMatmul, pattern: Pattern) -> tuple[int, ...]:
        """See the base class: a row of a block i of X and of Y, and of one k where d fills 16 bytes."""
        _, b, c, d = pattern
        return (b * d, c * d, *([d] if d * DTYPES[workload.dtype].itemsize >= 16 else []))

    def most(self, workload: KSMatmul) -> Mapping[str, int]:
        """See the base class."""
        per16 = 16 // DTYPES[workload.dtype].itemsize
        rows = ceil(workload.batch / 16)
        wide = max(ceil(b / 16) for _, b, _, _ in workload.patterns)
        deep = max(ceil(c / (2 * per16)) for _, _, c, _ in workload.patterns)
        units = max(ceil(d / per16) for *_, d in workload.patterns)
        return {
            "mt": rows, "warps_m": rows, "groups": rows, "pairs": wide, "warps_j": wide, "ksteps": deep, "lunits": units,
            "warps_l": units,
        }  # fmt: skip


class KSCudaMmaLast(KSTensorCore):
    """Tensor-core schedule for KSMatmul in layout batch_last."""

    name: ClassVar[str] = "ks_cuda_mma_last"
    layout: ClassVar[str] = "batch_last"
    few: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "mj": (1, 2, 4), "units": (1, 2), "warps_j": (1, 2, 4), "warps_n": (1, 2, 4), "ksteps": (1, 2, 4), "stages": (3, 2),
        "weights": ("resident", "stream"), "min_blocks": (2, 1, 4), "waves": (1, 4),
    }  # fmt: skip

    def plan(self, workload: KSMatmul, pattern: Pattern, config: Config, device: Device) -> Plan:
        """See the base class."""
        return plan_last(workload, pattern, config, device)

    def kernel(self, plan: LastPlan) -> Any:
        """See the base class."""
        from kronsched.schedules.ks_last_kernel import batch_last_kernel

        return batch_last_kernel(plan)

    def packing(self, plan: LastPlan) -> tuple[Any, tuple[int, int, int]]:
        """See the base class."""
        return partial(ks_last_plan.weight_at, plan), (plan.j_slices * plan.jb, plan.chunks * plan.ks, plan.pattern[3])

    def runs(self, workload: KSMatmul, pattern: Pattern) -> tuple[int, ...]:
        """See the base class: a row of samples."""
        return (workload.batch,)

    def most(self, workload: KSMatmul) -> Mapping[str, int]:
        """See the base class."""
        per16 = 16 // DTYPES[workload.dtype].itemsize
        units, wide = ceil(workload.batch / (8 * per16)), max(ceil(b / 16) for _, b, _, _ in workload.patterns)
        deep = max(ceil(c / (2 * per16)) for _, _, c, _ in workload.patterns)
        return {"mj": wide, "warps_j": wide, "units": units, "warps_n": units, "ksteps": deep}
