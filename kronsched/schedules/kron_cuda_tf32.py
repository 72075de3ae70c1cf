"""Kron-Matmul of five 8x8 factors in float32 in one launch, on tensor cores by TF32 products: a TIRx tile program.

As exact as float32: values and factors are split into high and low TF32 parts. `kron_cuda_chain` does the same product by FMA.

Read first: kron_chain_tf32p8_plan.py (where things are), kron_chain_tf32p8.py (the kernel).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from kronsched.errors import InvalidConfig
from kronsched.schedules.base import Launch, Schedule, Scheduled
from kronsched.schedules.kron_chain_tf32p8_plan import chain8_features, plan_chain8
from kronsched.space import Config, SearchSpace, load_knobs
from kronsched.workloads.base import Workload
from kronsched.workloads.kron import KronMatmul

if TYPE_CHECKING:
    from kronsched.hardware import Device


_HINTS: Config = {"l2": "none", "load": "nc", "store": "wb"}


class KronCudaTf32(Schedule):
    """One-launch float32 KronMatmul of 8x8^5 on tensor cores."""

    name: ClassVar[str] = "kron_cuda_tf32"
    family: ClassVar[str] = "kron"
    device_kind: ClassVar[str] = "cuda"
    untuned_share: ClassVar[float] = 0.75

    def supports(self, workload: Workload, device: Device) -> str | None:
        """None for 8x8^5 in float32 on sm_80 or later with the shared memory for a row."""
        assert isinstance(workload, KronMatmul)
        if workload.dtype != "float32" or workload.factors != ((8, 8),) * 5:
            return "the one-launch TF32 kernel serves 8x8^5 in float32 only"
        generation = "".join(c for c in device.arch.removeprefix("sm_") if c.isdigit())
        if generation and int(generation) < 80:
            return f"TF32 tensor cores need sm_80 or later, {device.name} is {device.arch}"
        try:
            plan_chain8(workload.m, {**_HINTS, "threads": 512, "prefetch": "none", "unroll": 1}, device)
        except InvalidConfig as e:
            return str(e)
        return None

    def space(self, workload: Workload, device: Device) -> SearchSpace:
        """Knobs of search_spaces/kron_cuda_tf32.toml."""
        assert isinstance(workload, KronMatmul)
        m = workload.m

        def check(config: Config) -> str | None:
            try:
                plan_chain8(m, config, device)
            except InvalidConfig as e:
                return str(e)
            return None

        return SearchSpace(self.name, load_knobs(self.name), check)

    def default_config(self, workload: Workload, device: Device) -> Config:
        """The fastest found on an H200 for 1024 rows; 512 threads without prefetch where there is no next row for a block."""
        space = self.space(workload, device)
        for threads, prefetch, unroll in ((256, "registers", 2), (512, "none", 1)):
            config: Config = {"threads": threads, "prefetch": prefetch, **_HINTS, "unroll": unroll}
            if space.invalid(config) is None:
                return config
        raise InvalidConfig(f"no config of {self.name} is valid for {workload.label} on {device.name}")

    def apply(self, workload: Workload, config: Config, device: Device) -> Scheduled:
        """One PrimFunc, `kron_0`."""
        import tvm

        from kronsched.schedules.kron_chain_tf32p8 import chain8_tf32

        assert isinstance(workload, KronMatmul)
        plan = plan_chain8(workload.m, config, device)
        func = chain8_tf32(plan).with_attr("global_symbol", "kron_0")
        launch = Launch("kron_0", ("x", "f0", "f1", "f2", "f3", "f4", "y"), overlap=plan.overlap)
        return Scheduled(tvm.IRModule({"kron_0": func}), (launch,))

    def features(self, workload: Workload, config: Config, device: Device) -> Mapping[str, float]:
        """Waves, bytes through each memory level, registers and bytes held by the prefetch."""
        assert isinstance(workload, KronMatmul)
        return chain8_features(plan_chain8(workload.m, config, device), device)
