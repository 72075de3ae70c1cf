"""Kron-Matmul of large float32 factors on Hopper's warpgroup tensor cores (wgmma), by three TF32 products: a TIRx tile program.

The data is operand A, from registers; a factor's high and low parts are operand B and stay in shared memory. The last two axes of
64 × 64 go in one launch, every other axis in one of its own, in place on the output.

Read first: kron_wgmma_plan.py (which launches), kron_wgmma_kernel.py (the kernel), kron_wgmma_layout.py (where things are).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from kronsched.errors import InvalidConfig
from kronsched.schedules.base import Launch, Schedule, Scheduled
from kronsched.schedules.kron_wgmma_kernel import program
from kronsched.schedules.kron_wgmma_layout import UNIT
from kronsched.schedules.kron_wgmma_plan import plan_wgmma, wgmma_features, why_not
from kronsched.space import Config, SearchSpace, load_knobs
from kronsched.workloads.base import Workload
from kronsched.workloads.kron import KronMatmul

if TYPE_CHECKING:
    from kronsched.hardware import Device


class KronCudaWgmma(Schedule):
    """KronMatmul in float32 with square factors of 64 or 128, on sm_90a."""

    name: ClassVar[str] = "kron_cuda_wgmma"
    family: ClassVar[str] = "kron"
    device_kind: ClassVar[str] = "cuda"
    untuned_share: ClassVar[float] = 0.5

    def supports(self, workload: Workload, device: Device) -> str | None:
        """None for float32, sm_90a, factors of 64 × 64 or 128 × 128, and lines along the last axis in multiples of 64."""
        assert isinstance(workload, KronMatmul)
        return why_not(workload, device)

    def space(self, workload: Workload, device: Device) -> SearchSpace:
        """Knobs of search_spaces/kron_cuda_wgmma.toml."""
        assert isinstance(workload, KronMatmul)

        def check(config: Config) -> str | None:
            try:
                launches = plan_wgmma(workload, config, device)
            except InvalidConfig as e:
                return str(e)
            if config["pair"] and launches[0].kind != "pair":
                return "pair=True has no effect here: the last two factors are not both 64x64"
            return None

        return SearchSpace(self.name, load_knobs(self.name), check)

    def default_config(self, workload: Workload, device: Device) -> Config:
        """Fewest launches; then as many warpgroups as keep their sums in registers, in one block; then most units in flight."""
        assert isinstance(workload, KronMatmul)
        space, most = self.space(workload, device), 3 if max(p for p, _ in workload.factors) == UNIT else 2
        best = max(
            (c.config for c in space),
            key=lambda c: (c["pair"], c["per_sm"] == 1, int(c["groups"]) <= most, c["groups"], c["stages"]),
            default=None,
        )
        if best is None:
            raise InvalidConfig(f"no config of {self.name} is valid for {workload.label} on {device.name}")
        return best

    def apply(self, workload: Workload, config: Config, device: Device) -> Scheduled:
        """One TIRx PrimFunc a launch; all but the first work in place on y."""
        import tvm

        assert isinstance(workload, KronMatmul)
        funcs, launches = {}, []
        for i, launch in enumerate(plan_wgmma(workload, config, device)):
            name, source = f"kron_wgmma_{i}", "x" if i == 0 else "y"
            funcs[name] = program(launch, name, source, "y", workload.m * workload.k_in)
            factors = tuple(f"f{axis}" for axis in sorted(launch.axes))
            launches.append(Launch(name, (*(("x",) if i == 0 else ()), *factors, "y")))
        return Scheduled(tvm.IRModule(funcs), tuple(launches))

    def features(self, workload: Workload, config: Config, device: Device) -> Mapping[str, float]:
        """Waves, occupancy, bytes through each memory level, predicted roofline time."""
        assert isinstance(workload, KronMatmul)
        return wgmma_features(workload, plan_wgmma(workload, config, device), device)
