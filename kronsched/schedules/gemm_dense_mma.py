"""Dense Gemm on tensor cores by mma.sync: any shape, any GPU since sm_80; a TIRx tile program.

Read first: gemm_dense_mma_plan.py (sizes and constraints), gemm_dense_mma_kernel.py (the program).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from kronsched.errors import InvalidConfig
from kronsched.schedules.base import Launch, Schedule, Scheduled
from kronsched.schedules.gemm_dense_mma_plan import MmaPlan, mma_features, plan_mma
from kronsched.space import Config, Knob, SearchSpace, load_knobs
from kronsched.workloads.base import Workload
from kronsched.workloads.conv2d import FOUR_BIT
from kronsched.workloads.gemm import Gemm

if TYPE_CHECKING:
    from kronsched.hardware import Device


class GemmDenseMma(Schedule):
    """float16, bfloat16, int8 and (as float16) float8."""

    name: ClassVar[str] = "gemm_dense_cuda_mma"
    family: ClassVar[str] = "gemm"
    device_kind: ClassVar[str] = "cuda"
    untuned_share: ClassVar[float] = 0.3

    def supports(self, workload: Workload, device: Device) -> str | None:
        """None for dense weights on sm_80 and later."""
        assert isinstance(workload, Gemm)
        if not workload.is_dense:
            return f"b_dtype={workload.b_dtype}: {self.name} multiplies dense matrices"
        if workload.a_dtype in FOUR_BIT:
            return f"a_dtype={workload.a_dtype}: there is gemm_int4_cuda for it"
        major = int(device.arch.removeprefix("sm_").rstrip("abcdefghijklmnopqrstuvwxyz")[:-1])
        return None if major >= 8 else f"{self.name} needs sm_80 or later, {device.name} is {device.arch}"

    def space(self, workload: Workload, device: Device) -> SearchSpace:
        """Knobs of search_spaces/gemm_dense_cuda_mma.toml, less tiles much larger than Y."""
        assert isinstance(workload, Gemm)

        def check(config: Config) -> str | None:
            try:
                plan_mma(workload, config, device)
            except InvalidConfig as e:
                return str(e)
            return None

        return SearchSpace(self.name, [_fitting(knob, workload) for knob in load_knobs(self.name)], check)

    def default_config(self, workload: Workload, device: Device) -> Config:
        """The largest tile that still gives most multiprocessors a block, three stages."""
        assert isinstance(workload, Gemm)
        space = self.space(workload, device)
        values: dict[str, tuple[Any, ...]] = {k.name: k.values for k in space.knobs}
        found: list[tuple[float, int, Config]] = []
        for shape in itertools.product(*(values[name] for name in _SHAPE)):
            for stages in sorted(values["stages"], key=lambda s: abs(s - 3)):
                config = {**dict(zip(_SHAPE, shape, strict=True)), "stages": stages}
                config = {knob.name: config[knob.name] for knob in space.knobs}
                if space.invalid(config) is None:
                    found.append((_cost(plan_mma(workload, config, device), device), len(found), config))
                    break
        if not found:
            raise InvalidConfig(f"no config of {self.name} is valid for {workload.label} on {device.name}")
        return min(found)[2]

    def apply(self, workload: Workload, config: Config, device: Device) -> Scheduled:
        """One PrimFunc, one launch."""
        import tvm

        from kronsched.schedules.gemm_dense_mma_kernel import mma_kernel

        assert isinstance(workload, Gemm)
        func = mma_kernel(plan_mma(workload, config, device), "gemm_mma")
        return Scheduled(tvm.IRModule({"gemm_mma": func}), (Launch("gemm_mma", tuple(str(p.name) for p in func.params)),))

    def features(self, workload: Workload, config: Config, device: Device) -> Mapping[str, float]:
        """Waves, useful share of tiles, bytes through L2, roofline time."""
        assert isinstance(workload, Gemm)
        return mma_features(plan_mma(workload, config, device), device)


_SHAPE = ("warps_m", "warps_n", "warp_m", "warp_n")


def _cost(plan: MmaPlan, device: Device) -> float:
    """Something like the time: waves of blocks, each as slow as its products or its reads of shared memory."""
    residents = min(2, max(1, device.shared_per_sm // (plan.shared_bytes + 1024)), max(1, 512 // plan.threads))
    waves = -(-plan.blocks // (device.units * residents))
    products = plan.block_m * plan.block_n
    reads = 24 * (plan.block_m * plan.warps_n + plan.block_n * plan.warps_m)
    few_warps = max(1.0, 8 / (residents * plan.threads // 32))
    return waves * residents * (products + reads) * few_warps


def _fitting(knob: Knob, w: Gemm) -> Knob:
    """The knob with the values that can matter for this shape (the first one where none does)."""
    values: tuple[Any, ...] = knob.values
    extent = {"warp_m": w.m, "warps_m": -(-w.m // 16), "warp_n": w.n, "warps_n": -(-w.n // 16)}.get(knob.name)
    if extent is not None:
        values = tuple(v for v in values if v < 2 * extent)
    return Knob(knob.name, values or knob.values[:1], knob.help)
