"""Kronecker-sparse matmul on tensor cores (CUDA, sm_80 and later), one schedule a layout. One or two launches a factor.

    pack      weights (a, b, c, d) → fragment order, zeros beyond them    (ks_pack.py; not where blocks gather: ks_gather.py)
    multiply  tiles of X against slices of weights → Y                    (ks_mma_kernel.py, ks_last_kernel.py, ks_last_wgmma.py)

`KSCudaSorted`, for large d, sorts X (batch, a, c, d) into (batch, a·d, c) before the product, which is one of the pattern
(a·d, b, c, 1), and merges Y behind it (ks_sort.py): three trips through memory, but full rows and large tiles of j.

A fused chain is these launches one behind the other, each overlapping the next, all of one config (ks_cuda_each.py: of one each):
factors do not share a kernel. In bytes that could save the intermediate's trips, at most 1.25× to 1.4× for the chains of a
ViT-S/16; in 16-bit types it fits in L2 anyway.

Read first: `KSTensorCore.apply`, then ks_mma_plan.py and ks_last_plan.py (tilings), ks_mma_cost.py (how defaults are chosen).
"""

from __future__ import annotations

import abc
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from math import ceil, prod
from typing import TYPE_CHECKING, Any, ClassVar

from kronsched.dtypes import DTYPES
from kronsched.schedules import ks_last_plan, ks_mma_maps
from kronsched.schedules.base import Launch, Schedule, Scheduled
from kronsched.schedules.ks_last_plan import LastPlan, plan_last
from kronsched.schedules.ks_mma_cost import Plan
from kronsched.schedules.ks_mma_limits import can_overlap, sm_number
from kronsched.schedules.ks_mma_plan import MmaPlan, plan_mma
from kronsched.schedules.ks_mma_space import canonical_config, fitting_knobs, least_predicted, mma_features
from kronsched.schedules.ks_pack import Packing, of_slices, pack_kernel
from kronsched.schedules.ks_parts import checked_space, ending, factor_tensors, launch_of, renamed
from kronsched.schedules.ks_sort import pays, sort_kernel, sort_us
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
    sorts: ClassVar[bool] = False
    """Whether launches sort X into slices before each product, and merge Y behind it."""

    @abc.abstractmethod
    def plan(self, workload: KSMatmul, pattern: Pattern, config: Config, device: Device) -> Plan:
        """The plan of one factor."""

    @abc.abstractmethod
    def kernel(self, plan: Any, packing: Packing) -> Any:
        """The PrimFunc over x, weights and y."""

    @abc.abstractmethod
    def packing(self, plan: Any) -> Packing:
        """The order of the packed weights."""

    @abc.abstractmethod
    def runs(self, workload: KSMatmul, pattern: Pattern) -> tuple[int, ...]:
        """Numbers of elements that must be whole 4-byte words, for the copies and stores to be aligned."""

    @abc.abstractmethod
    def most(self, workload: KSMatmul) -> Mapping[str, int]:
        """The largest value that can matter at this shape, by knob."""

    def supports(self, workload: Workload, device: Device) -> str | None:
        """Not float64 or complex, the other layout, GPUs before sm_80, or runs that are an odd number of 16-bit elements."""
        assert isinstance(workload, KSMatmul)
        if workload.dtype not in ("float32", "float16", "bfloat16"):
            return f"{workload.dtype} is not served by these tensor-core kernels"
        if workload.layout != self.layout:
            return f"layout {workload.layout} is not served"
        if sm_number(device) < 80:
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
        """One or two PrimFuncs and launches a factor; scratch: packed weights p0, p1 and a chain's t0, t1 and so on.

        All packing comes first. On sm_90 every launch starts while the one before it still runs, whatever that is, and lets the
        next one start. The first waits for all earlier kernels before it touches anything or lets another start, so none of
        the others ever meets them. The first multiplication reads x before it waits for the packing. The others read packed
        weights before they wait for the factor before them, which had waited for all packing.
        """
        import tvm

        assert isinstance(workload, KSMatmul)
        plans, overlap, dtype = self.plans(workload, device, config), can_overlap(device), workload.dtype
        funcs: dict[str, Any] = {}
        packings: list[Launch] = []
        products: list[Launch] = []
        scratch: list[TensorSpec] = []

        def add(launches: list[Launch], name: str, func: Any, *tensors: TensorSpec) -> None:
            funcs[name] = renamed(func, *tensors).with_attr("global_symbol", name)
            launches.append(replace(launch_of(name, *tensors), overlap=overlap))

        for i, (plan, tensors) in enumerate(zip(plans, factor_tensors(workload, dtype), strict=True)):
            source, weight, target = tensors
            epilogue, more = ending(workload, i)
            pattern, packing = workload.patterns[i], self.packing(plan)
            if self.sorts:
                packing = of_slices(packing, pattern[3])
            scratch += [] if i == len(plans) - 1 else [target]
            if overlap:
                plan = replace(plan, after="factor" if i or self.sorts else "any" if plan.gather else "packing")
            if epilogue:
                plan = replace(plan, epilogue=epilogue)
            if not plan.gather:
                packed = TensorSpec(f"p{i}", (plan.weight_elements,), dtype)
                pack = pack_kernel(pattern, dtype, plan.weight_elements, packing, early=overlap, follows=i > 0)
                add(packings, f"ks_pack_{i}", pack, weight, packed)
                scratch.append(packed)
                weight = packed
            if not self.sorts:
                add(products, f"ks_{i}", self.kernel(plan, packing), source, weight, target, *more)
                continue
            a, b, c, d = pattern
            x, y = (TensorSpec(f"{name}{i}", (prod(of.shape),), dtype) for name, of in (("s", source), ("m", target)))
            scratch += [x, y]
            add(products, f"ks_sort_{i}", sort_kernel(workload.batch * a, c, d, dtype, merge=False, early=overlap), source, x)
            add(products, f"ks_{i}", self.kernel(plan, packing), x, weight, y)
            add(products, f"ks_merge_{i}", sort_kernel(workload.batch * a, b, d, dtype, merge=True, early=overlap), y, target)
        return Scheduled(tvm.IRModule(funcs), (*packings, *products), tuple(scratch))

    def expected_us(self, workload: Workload, config: Config, device: Device) -> float:
        """The time that ks_mma_cost.py predicts."""
        return self.features(workload, config, device)["predicted_us"]

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
        "mt": (1, 2), "warps_m": (2, 4, 8), "warps_j": (1, 2), "warps_l": (1, 2), "pairs": (1, 2, 3, 4), "lunits": (1, 2),
        "ksteps": (1, 2, 4), "stages": (3,), "groups": (1,), "weights": ("resident", "stream", "gather"),
        "store": ("staged", "quad"), "min_blocks": (1, 2), "waves": (1,), "mma": ("sync", "wgmma"),
    }  # fmt: skip

    def plan(self, workload: KSMatmul, pattern: Pattern, config: Config, device: Device) -> Plan:
        """See the base class."""
        return plan_mma(workload, pattern, config, device)

    def kernel(self, plan: MmaPlan, packing: Packing) -> Any:
        """See the base class."""
        from kronsched.schedules.ks_mma_kernel import batch_first_kernel

        return batch_first_kernel(plan, packing)

    def packing(self, plan: MmaPlan) -> Packing:
        """See the base class."""
        _, nj, nl = plan.slices
        low = partial(ks_mma_maps.low_weight, plan) if plan.parts > 1 else None
        return Packing(partial(ks_mma_maps.weight_at, plan), (nj * plan.jb, plan.chunks * plan.ks, nl * plan.lb), low)

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


class KSCudaSorted(KSCudaMma):
    """Tensor-core schedule for KSMatmul in layout batch_first with d > 1: products of sorted slices."""

    name: ClassVar[str] = "ks_cuda_sorted"
    few: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "mt": (1, 2), "warps_m": (4, 8), "warps_j": (1, 2), "pairs": (4, 6, 8), "ksteps": (2, 4), "stages": (3,), "groups": (1,),
        "weights": ("resident", "stream"), "store": ("direct", "staged"), "min_blocks": (1, 2), "waves": (1,),
        "mma": ("sync", "wgmma"),
    }  # fmt: skip
    sorts: ClassVar[bool] = True
    untuned_share: ClassVar[float] = 0.3

    def supports(self, workload: Workload, device: Device) -> str | None:
        """As the base class says; and float32, d > 1, rows of a slice that are whole 16 bytes, blocks that are large enough."""
        assert isinstance(workload, KSMatmul)
        reason = super().supports(workload, device)
        if workload.epilogue:
            return "an epilogue is not served"
        if workload.dtype != "float32":
            return f"{workload.dtype} is not served: float32 is"
        per16 = 16 // DTYPES[workload.dtype].itemsize
        for pattern in workload.patterns if reason is None else ():
            _, b, c, d = pattern
            if d == 1:
                return f"pattern {pattern}: with d = 1 there is nothing to sort"
            odd = [n for n in (b, c) if n % per16]
            if odd:
                return f"pattern {pattern}: rows of {odd[0]} {workload.dtype} are not whole 16 bytes"
            if not pays(pattern, workload.dtype):
                return f"pattern {pattern}: blocks are too small for sorting to pay"
        return reason

    def plan(self, workload: KSMatmul, pattern: Pattern, config: Config, device: Device) -> Plan:
        """See the base class; a plan of sorted slices."""
        a, b, c, d = pattern
        return plan_mma(workload, (a * d, b, c, 1), {**config, "lunits": 1, "warps_l": 1}, device)

    def features(self, workload: Workload, config: Config, device: Device) -> Mapping[str, float]:
        """As the base class says, the copies included."""
        assert isinstance(workload, KSMatmul)
        found = super().features(workload, config, device)
        us = sum(sort_us(workload, pattern, device) for pattern in workload.patterns)
        return {**found, "copies_us": us, "predicted_us": found["predicted_us"] + us}


class KSCudaMmaLast(KSTensorCore):
    """Tensor-core schedule for KSMatmul in layout batch_last."""

    name: ClassVar[str] = "ks_cuda_mma_last"
    layout: ClassVar[str] = "batch_last"
    few: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "mj": (1, 2, 4, 6, 8), "units": (1, 2), "warps_j": (1, 2, 4), "warps_n": (1, 2, 4, 8), "ksteps": (2, 4), "stages": (3,),
        "weights": ("resident", "stream", "gather"), "min_blocks": (1, 2), "waves": (1,), "mma": ("sync", "wgmma"),
        "vector": (8, 16),
    }  # fmt: skip

    def plan(self, workload: KSMatmul, pattern: Pattern, config: Config, device: Device) -> Plan:
        """See the base class."""
        return plan_last(workload, pattern, config, device)

    def kernel(self, plan: LastPlan, packing: Packing) -> Any:
        """See the base class."""
        from kronsched.schedules.ks_last_kernel import batch_last_kernel
        from kronsched.schedules.ks_last_wgmma import batch_last_wgmma

        return (batch_last_wgmma if plan.wgmma else batch_last_kernel)(plan, packing)

    def packing(self, plan: LastPlan) -> Packing:
        """See the base class."""
        low = partial(ks_last_plan.low_weight, plan) if plan.parts > 1 else None
        reach = plan.j_slices * plan.jb, plan.chunks * plan.ks
        return Packing(partial(ks_last_plan.weight_at, plan), (*reach, plan.pattern[3]), low, reach[0] * reach[1])

    def runs(self, workload: KSMatmul, pattern: Pattern) -> tuple[int, ...]:
        """See the base class: a row of samples."""
        return (workload.batch,)

    def most(self, workload: KSMatmul) -> Mapping[str, int]:
        """See the base class."""
        per16 = 16 // DTYPES[workload.dtype].itemsize
        units, wide = ceil(workload.batch / (8 * per16)), max(ceil(b / 16) for _, b, _, _ in workload.patterns)
        deep = max(ceil(c / (2 * per16)) for _, _, c, _ in workload.patterns)
        return {"mj": wide, "warps_j": wide, "units": units, "warps_n": units, "ksteps": deep}
