"""A chain of two Kronecker-sparse factors in one launch on tensor cores (CUDA, sm_80 and later), 16-bit, batch-first.

The intermediate of a tile of samples stays in shared memory, and so do the weights of both factors: for small factors, such as
the (2,48,192,1)(1,192,48,2) of a ViT-S/16 (18.6 µs on an H200 at 25088 samples, two launches 20.1, its bytes alone 9.0). Larger
weights go factor by factor (ks_cuda_mma.py): streamed through L2 for every tile, they would move more than the intermediate does.
On Hopper ks_cuda_pair_wgmma.py is faster and serves larger weights, too.

    tile of X (rows, a1·c1) ─ first factor ─► middle (rows, a2, d2, c2) ─ second factor ─► tile of Y (rows, a2·b2·d2)

Read first: `KSCudaPair.apply`, then ks_pair_plan.py and ks_pair_kernel.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace
from math import ceil
from typing import TYPE_CHECKING, ClassVar

from kronsched.errors import InvalidConfig
from kronsched.schedules.base import Schedule, Scheduled
from kronsched.schedules.ks_mma_limits import sm_number
from kronsched.schedules.ks_pair_plan import PairPlan, plan_pair, why_not
from kronsched.schedules.ks_parts import launch_of, renamed
from kronsched.space import Config, SearchSpace, load_knobs
from kronsched.workloads.base import Workload
from kronsched.workloads.ks import KSMatmul

if TYPE_CHECKING:
    from kronsched.hardware import Device


class KSCudaPair(Schedule):
    """Two factors, float16 and bfloat16 with float32 sums; the middle is rounded to 16 bits, as between two launches."""

    name: ClassVar[str] = "ks_cuda_pair"
    family: ClassVar[str] = "ks"
    device_kind: ClassVar[str] = "cuda"
    untuned_share: ClassVar[float] = 0.58

    def supports(self, workload: Workload, device: Device) -> str | None:
        """Chains of two 16-bit factors in batch_first, whose weights and a tile fit in shared memory."""
        assert isinstance(workload, KSMatmul)
        if sm_number(device) < 80:
            return f"tensor-core instructions of sm_80 are needed, {device.name} is {device.arch}"
        if (reason := why_not(workload)) is not None:
            return reason
        try:
            self.default_config(workload, device)
        except InvalidConfig as e:
            return str(e)
        return None

    def space(self, workload: Workload, device: Device) -> SearchSpace:
        """Knobs of search_spaces/ks_cuda_pair.toml."""
        assert isinstance(workload, KSMatmul)

        def check(config: Config) -> str | None:
            try:
                plan_pair(workload, config, device)
            except InvalidConfig as e:
                return str(e)
            return None

        return SearchSpace(self.name, load_knobs(self.name), check)

    def default_config(self, workload: Workload, device: Device) -> Config:
        """The fewest samples for the busiest SM; of equals about one block of 8 warps, 4 of them along the outputs."""
        assert isinstance(workload, KSMatmul)
        knobs = load_knobs(self.name)
        best: tuple[tuple[float, ...], Config] | None = None
        for values in itertools.product(*(k.values for k in knobs)):
            config: Config = {k.name: v for k, v in zip(knobs, values, strict=True)}
            try:
                plan = plan_pair(workload, config, device)
            except InvalidConfig:
                continue
            far = abs(plan.warps_m * plan.warps_n - 8), plan.min_blocks, abs(plan.warps_n - 4), plan.mt
            key = (_samples(plan, device), *map(float, far))
            if best is None or key < best[0]:
                best = key, config
        if best is None:
            raise InvalidConfig(f"the weights of {workload.label} and a tile do not fit in the shared memory of {device.name}")
        return best[1]

    def apply(self, workload: Workload, config: Config, device: Device) -> Scheduled:
        """One launch, no scratch."""
        import tvm

        from kronsched.schedules.ks_pair_kernel import pair_kernel

        assert isinstance(workload, KSMatmul)
        plan = plan_pair(workload, config, device)
        tensors = (*workload.inputs[:3], workload.output, *workload.inputs[3:])
        func = renamed(pair_kernel(plan), *tensors).with_attr("global_symbol", "ks_pair")
        launch = replace(launch_of("ks_pair", *tensors), overlap=plan.overlap)
        return Scheduled(tvm.IRModule({"ks_pair": func}), (launch,), ())

    def features(self, workload: Workload, config: Config, device: Device) -> Mapping[str, float]:
        """Samples of the busiest SM, warps, shared memory."""
        assert isinstance(workload, KSMatmul)
        plan = plan_pair(workload, config, device)
        return {
            "busiest": _samples(plan, device),
            "warps": float(plan.threads // 32 * plan.min_blocks),
            "shared_kb": plan.shared_words / 256,
            "sums": float(plan.registers),
        }


def _samples(plan: PairPlan, device: Device) -> float:
    """Samples that the busiest SM works on."""
    return float(ceil(plan.tiles / plan.blocks) * plan.rows * ceil(plan.blocks / device.units))
