"""Kron-Matmul on tensor cores: each axis as small GEMMs (mma.sync) on a tile that stays in shared memory.

float16 and bfloat16 multiply in their type and sum in float32; float32 goes through three TF32 products. A result is rounded to
storage once a step. Every shape is accepted; odd extents are padded to the sizes of mma.

Read first: kron_mma_plan.py (how a config cuts the work), kron_mma_program.py (the kernel), kron_mma_steps.py (a contraction).
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Mapping
from math import inf, prod
from typing import TYPE_CHECKING, Any, ClassVar

from kronsched.errors import InvalidConfig
from kronsched.schedules.base import Launch, Schedule, Scheduled
from kronsched.schedules.kron_mma_plan import LaunchPlan, plan_launches, registers_left, registers_needed
from kronsched.schedules.kron_mma_program import program
from kronsched.schedules.kron_mma_space import canonical_config, estimate_us, fitting_knob, plan_features
from kronsched.space import Config, SearchSpace, load_knobs
from kronsched.workloads.base import TensorSpec, Workload
from kronsched.workloads.kron import KronMatmul

if TYPE_CHECKING:
    from kronsched.hardware import Device

_START = {
    "merge": 0, "fuse": 1, "tile": 1024, "ctile": 16, "order": "tail", "cols": 16, "unroll": 1, "threads": 256, "blocks": 1,
    "stages": 1, "store": "shared", "split": "late", "precision": "tf32x3",
}  # fmt: skip
"""Where the search for a default starts: what fits if anything does."""
_SPARE = {"float16": 16, "bfloat16": 16, "float32": 24}
"""Registers that a default leaves free above the estimate, twice that before sm_90: it must not spill."""
_DESCENT = (
    ("tile", "blocks"),
    ("cols", "threads"),
    ("tile", "blocks", "threads"),
    ("ctile", "tile"),
    ("stages", "store", "split"),
)


class KronCudaMma(Schedule):
    """Tensor-core schedule for KronMatmul; float16, bfloat16 and float32 (by TF32), from sm_80."""

    name: ClassVar[str] = "kron_cuda_mma"
    family: ClassVar[str] = "kron"
    device_kind: ClassVar[str] = "cuda"
    untuned_share: ClassVar[float] = 0.35

    def supports(self, workload: Workload, device: Device) -> str | None:
        """No float64, no GPU before sm_80, no factor that does not fit in shared memory."""
        assert isinstance(workload, KronMatmul)
        if workload.dtype == "float64":
            return "dtype=float64: tensor cores are used for float16, bfloat16 and float32 only"
        if compute_capability(device.arch) < 80:
            return f"{device.arch}: mma.sync with bfloat16 and TF32 and cp.async need sm_80 or later"
        for cols in (8, 16):
            config: dict[str, Any] = {**_START, "fuse": 1, "tile": 1, "ctile": 8, "cols": cols, "threads": 128}
            with contextlib.suppress(InvalidConfig):
                plan_for(workload, config, device)
                return None
        p, q = max(workload.factors, key=lambda pair: pair[0] * pair[1])
        return f"a factor of {p}x{q} and a tile of its axis do not fit in {device.shared_per_block} bytes of shared memory"

    def space(self, workload: Workload, device: Device) -> SearchSpace:
        """Knobs of search_spaces/kron_cuda_mma.toml, less the values that mean nothing for this workload."""
        assert isinstance(workload, KronMatmul)
        knobs = [fitting_knob(knob, workload) for knob in load_knobs(self.name)]
        values = {knob.name: knob.values for knob in knobs}

        def check(config: Config) -> str | None:
            try:
                plans = plan_for(workload, config, device)
            except InvalidConfig as e:
                return str(e)
            canonical = canonical_config(workload, plans, config, values)
            idle = next((k for k, v in canonical.items() if config[k] != v), None)
            return (
                None if idle is None else f"{idle}={config[idle]} has no effect here, {idle}={canonical[idle]} is the same kernel"
            )

        return SearchSpace(self.name, knobs, check)

    def default_config(self, workload: Workload, device: Device) -> Config:
        """The config of the smallest estimated time (`kron_mma_space.estimate_us`) that a short descent finds.

        For each way to merge and group the axes, the other knobs are improved a few at a time.
        """
        assert isinstance(workload, KronMatmul)
        space = self.space(workload, device)
        values = {k.name: k.values for k in space.knobs}
        best = descend(values, lambda config: plan_for(workload, config, device), workload.dtype, device)
        if best is not None:
            canonical = canonical_config(workload, plan_for(workload, best, device), best, values)
            if space.invalid(canonical) is None:
                return canonical
        found = next(iter(space), None)
        if found is None:
            raise InvalidConfig(f"no config of {self.name} is valid for {workload.label} on {device.name}")
        return found.config

    def apply(self, workload: Workload, config: Config, device: Device) -> Scheduled:
        """One TIRx PrimFunc a launch; scratch tensors between launches."""
        import tvm

        assert isinstance(workload, KronMatmul)
        plans = plan_for(workload, config, device)
        funcs, launches, scratch = {}, [], []
        source, size = "x", workload.m * workload.k_in
        for i, plan in enumerate(plans):
            out = plan.outer * prod(a.q for a in plan.axes) * plan.inner
            target = "y" if i == len(plans) - 1 else f"s{i}"
            if target != "y":
                scratch.append(TensorSpec(target, (out,), workload.dtype))
            name = f"kron_mma_{i}"
            factors = workload.factors[plan.first : plan.last]
            funcs[name] = program(plan, workload.dtype, name, source, target, factors, (size, out))
            launches.append(Launch(name, (source, *(f"f{j}" for j in range(plan.first, plan.last)), target)))
            source, size = target, out
        return Scheduled(tvm.IRModule(funcs), tuple(launches), tuple(scratch))

    def features(self, workload: Workload, config: Config, device: Device) -> Mapping[str, float]:
        """Launches, waves, occupancy, bytes through each memory level, multiplications, estimated time."""
        assert isinstance(workload, KronMatmul)
        return plan_features(plan_for(workload, config, device), device)


def descend(
    values: Mapping[str, tuple[Any, ...]],
    plans: Callable[[Mapping[str, Any]], tuple[LaunchPlan, ...]],
    dtype: str,
    device: Device,
) -> dict[str, Any] | None:
    """The config of the smallest estimated time that a short descent finds; None when no config is valid.

    values: of every knob.  plans: the launches of a config, or InvalidConfig.
    """
    times: dict[tuple[Any, ...], float] = {}
    spare = _SPARE[dtype] * (1 if compute_capability(device.arch) >= 90 else 2)

    def time(config: Mapping[str, Any]) -> float:
        key = tuple(config.values())
        if key not in times:
            try:
                found = plans(config)
                tight = any(registers_needed(p) + spare > registers_left(p, device.registers_per_sm) for p in found)
                times[key] = inf if tight else estimate_us(found, device)
            except InvalidConfig:
                times[key] = inf
        return times[key]

    best: dict[str, Any] = {name: v[0] for name, v in values.items()}
    for merge, fuse in itertools.product(values["merge"], values["fuse"]):
        config = {**_START, "merge": merge, "fuse": fuse}
        config = {name: config[name] if config.get(name) in v else v[0] for name, v in values.items()}
        for _ in range(2):
            for names in _DESCENT:
                points = itertools.product(*((config[name], *values[name]) for name in names))
                config = min(({**config, **dict(zip(names, p, strict=True))} for p in points), key=time)
        best = min(best, config, key=time)
    return best if time(best) < inf else None


def plan_for(w: KronMatmul, config: Config, device: Device) -> tuple[LaunchPlan, ...]:
    """The launches of a config on a device. Raises InvalidConfig with one line."""
    return plan_launches(w, config, device.shared_per_block, device.shared_per_sm, device.units, device.registers_per_sm)


def compute_capability(arch: str) -> int:
    """80 of "sm_80", 90 of "sm_90a"; 0 where it is not an NVIDIA architecture."""
    digits = "".join(c for c in arch.removeprefix("sm_") if c.isdigit())
    return int(digits) if arch.startswith("sm_") and digits else 0
