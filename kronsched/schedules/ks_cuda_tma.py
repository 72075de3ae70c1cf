"""Kronecker-sparse matmul as dense products by TMA and wgmma (CUDA, sm_90a), for all but small blocks.

    pack       weights (a, b, c, d) → (a, b, d, c), where d > 1                            (ks_sort.py, or ks_pack.py)
    sort       batch_first with d > 1: X (batch, a, c, d) → (batch, a, d, c)               (ks_sort.py)
    multiply   a·d dense products in one persistent launch                                 (ks_tile_kernel.py)
    merge      batch_first with d > 1: (batch, a, d, b) → Y (batch, a, b, d)               (ks_sort.py)

The schedules of ks_cuda_mma.py read X and write Y once, but feed tensor cores from registers. They are faster for the smallest
blocks, and in batch_first with d > 1, where sorting needs scratch tensors as large as X and Y, for all but the largest.

Where weights are packed first, the first samples are asked for meanwhile. ks_cuda_tma_last.py turns the products of batch_last.

Read first: `KSCudaTma.apply`, then ks_tile_plan.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar

from kronsched.errors import InvalidConfig
from kronsched.schedules.base import Launch, Schedule, Scheduled
from kronsched.schedules.ks_pack import Packing, pack_kernel
from kronsched.schedules.ks_parts import ending, factor_tensors, launch_of, renamed
from kronsched.schedules.ks_sort import pays, sort_kernel
from kronsched.schedules.ks_tile_plan import TilePlan, fits, parts_us, plan_tile, predicted_us, why_not
from kronsched.space import Config, Knob, SearchSpace, load_knobs
from kronsched.workloads.base import TensorSpec, Workload
from kronsched.workloads.ks import KSMatmul

if TYPE_CHECKING:
    from kronsched.hardware import Device

LEAST = 48
"""Outputs and inputs of a block that fill tiles of 64 well enough."""


class KSCudaTma(Schedule):
    """float16 and bfloat16 with float32 sums, both layouts, chains factor by factor."""

    name: ClassVar[str] = "ks_cuda_tma"
    family: ClassVar[str] = "ks"
    device_kind: ClassVar[str] = "cuda"
    untuned_share: ClassVar[float] = 0.6

    def supports(self, workload: Workload, device: Device) -> str | None:
        """Hopper, 16-bit types, rows that TMA can reach, blocks that fill tiles."""
        assert isinstance(workload, KSMatmul)
        if workload.epilogue and workload.batch_first and workload.patterns[-1][3] > 1:
            return f"pattern {workload.patterns[-1]}: an epilogue is not served where Y is merged from slices"
        if workload.dtype not in ("float16", "bfloat16"):
            return f"{workload.dtype} is not served: 16-bit types are"
        if device.arch != "sm_90a":
            return f"{device.arch}: wgmma needs sm_90a"
        for pattern in workload.patterns:
            if min(pattern[1:3]) < LEAST:
                return f"pattern {pattern}: blocks smaller than {LEAST} x {LEAST} leave tiles empty"
            if workload.batch_first and pattern[3] > 1 and not pays(pattern, workload.dtype):
                return f"pattern {pattern}: blocks are too small for sorting to pay"
            if (reason := why_not(workload, pattern)) is not None:
                return reason
        return None

    def space(self, workload: Workload, device: Device) -> SearchSpace:
        """Knobs of search_spaces/ks_cuda_tma.toml, less tiles that would be half empty."""
        assert isinstance(workload, KSMatmul)

        def check(config: Config) -> str | None:
            try:
                self.plans(workload, config, device)
            except InvalidConfig as e:
                return str(e)
            return None

        return SearchSpace(self.name, [_fitting(knob, self.extents(workload)) for knob in load_knobs(self.name)], check)

    def default_config(self, workload: Workload, device: Device) -> Config:
        """The valid config of least predicted time."""
        assert isinstance(workload, KSMatmul)
        knobs = self.space(workload, device).knobs
        found: list[tuple[float, int, Config]] = []
        # Of equals the last one: with the most stages.
        for n, values in enumerate(itertools.product(*(k.values for k in knobs))):
            config: Config = {k.name: v for k, v in zip(knobs, values, strict=True)}
            try:
                plans = self.plans(workload, config, device)
            except InvalidConfig:
                continue
            found.append((sum(predicted_us(p, device) for p in plans), -n, config))
        if not found:
            raise InvalidConfig(f"no config of {self.name} is valid for {workload.label} on {device.name}")
        return min(found)[2]

    def apply(self, workload: Workload, config: Config, device: Device) -> Scheduled:
        """Scratch: packed weights p0, p1 and so on, a chain's t0, …, sorted inputs s0, … and sorted outputs m0, ….

        All packing comes first. Every launch may start while the one before it runs, and waits for it before it reads anything.
        """
        import tvm

        assert isinstance(workload, KSMatmul)
        plans, dtype = self.plans(workload, config, device), workload.dtype
        funcs: dict[str, Any] = {}
        first: list[Launch] = []
        later: list[Launch] = []
        scratch: list[TensorSpec] = []

        def add(launches: list[Launch], name: str, func: Any, *tensors: TensorSpec) -> None:
            funcs[name] = renamed(func, *tensors).with_attr("global_symbol", name)
            launches.append(replace(launch_of(name, *tensors), overlap=True))

        def scratch_of(name: str, elements: int) -> TensorSpec:
            scratch.append(TensorSpec(name, (elements,), dtype))
            return scratch[-1]

        for i, (plan, (source, weight, target)) in enumerate(zip(plans, factor_tensors(workload, dtype), strict=True)):
            a, b, c, d = plan.pattern
            if i < len(plans) - 1:
                scratch.append(target)
            if plan.packs:
                packed = scratch_of(f"p{i}", a * d * b * plan.pitch)
                add(first, f"ks_pack_{i}", _packed(plan, follows=bool(first)), weight, packed)
                weight = packed
            x, y = source, target
            if plan.sorts:
                x, y = scratch_of(f"s{i}", prod(source.shape)), scratch_of(f"m{i}", prod(target.shape))
                add(later, f"ks_sort_{i}", sort_kernel(workload.batch * a, c, d, dtype, merge=False), source, x)
            epilogue, more = ending(workload, i)
            early = plan.packs and i == 0 and not plan.batch_first
            plan = replace(plan, epilogue=epilogue, last=i == len(plans) - 1 and not plan.sorts, early=early)
            add(later, f"ks_{i}", self.kernel(plan), x, weight, y, *more)
            if plan.sorts:
                add(later, f"ks_merge_{i}", sort_kernel(workload.batch * a, b, d, dtype, merge=True), y, target)
        return Scheduled(tvm.IRModule(funcs), (*first, *later), tuple(scratch))

    def expected_us(self, workload: Workload, config: Config, device: Device) -> float:
        """The time that ks_tile_plan.py predicts."""
        assert isinstance(workload, KSMatmul)
        return sum(predicted_us(p, device) for p in self.plans(workload, config, device))

    def features(self, workload: Workload, config: Config, device: Device) -> Mapping[str, float]:
        """Units, waves, useful share of tiles, time of each part of the GPU, a predicted time. Of a chain: times are sums."""
        assert isinstance(workload, KSMatmul)
        plans = self.plans(workload, config, device)
        parts = [{**parts_us(p, device), "predicted_us": predicted_us(p, device)} for p in plans]
        p = plans[0]
        waves = p.units / p.workers
        useful = p.workload.m * p.workload.n / (p.tiles * p.cluster * p.block_m * p.block_n)
        return {
            **{name: sum(part[name] for part in parts) for name in parts[0]},
            "units": float(p.units),
            "waves": waves,
            "useful_share": useful,
            "shared_kb": p.shared_bytes / 1024,
            "sums": float(p.sums),
            "bytes_in_flight": float(p.stages * p.stage_bytes),
        }

    def extents(self, workload: KSMatmul) -> Mapping[str, int]:
        """Rows and columns of the largest product, by the knob that cuts them."""
        wide = max(b for _, b, _, _ in workload.patterns)
        rows, columns = (workload.batch, wide) if workload.batch_first else (wide, workload.batch)
        return {"block_m": rows, "block_n": columns}

    def kernel(self, plan: TilePlan) -> Any:
        """The PrimFunc of a factor's multiplying launch."""
        from kronsched.schedules.ks_tile_kernel import multiply_kernel

        return multiply_kernel(plan, "multiply")

    def plans(self, workload: KSMatmul, config: Config, device: Device) -> list[TilePlan]:
        """The plan of each factor. Raises InvalidConfig."""
        return [plan_tile(workload, pattern, config, device) for pattern in workload.patterns]


def _fitting(knob: Knob, extents: Mapping[str, int]) -> Knob:
    """The knob with the values that can matter for tiles of products of such extents."""
    extent = extents.get(knob.name)
    return Knob(knob.name, tuple(v for v in knob.values if extent is None or fits(int(v), extent)), knob.help)


def _packed(plan: TilePlan, follows: bool) -> Any:
    """The launch that packs weights; follows: not the first one."""
    a, b, c, d = plan.pattern
    dtype, pitch = plan.workload.a_dtype, plan.pitch
    if pitch == c:
        return sort_kernel(a * b, c, d, dtype, merge=False)

    def at(index: Any) -> tuple[Any, Any, Any, Any]:
        return index // (pitch * d * b), index // (pitch * d) % b, index % pitch, index // pitch % d

    return pack_kernel(plan.pattern, dtype, a * d * b * pitch, Packing(at, (b, pitch, d)), early=True, follows=follows)
