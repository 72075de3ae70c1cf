"""Kron-Matmul of large 16-bit factors on Hopper's warpgroup tensor cores (wgmma): a TIRx tile program.

The last two axes are contracted in one launch, the sums of the first product being an operand of the second, or the last three
axes of 64 by clusters of blocks; every axis before them takes a launch of its own, in place on the output. Sums are float32 and
are rounded to storage between any two axes. Adjacent smaller factors are multiplied out first, in a short launch.

Read first: kron_slab_plan.py (which launches), kron_slab_kernel.py and kron_slab_cube.py (the kernels).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from kronsched.errors import InvalidConfig
from kronsched.schedules.base import Launch, Schedule, Scheduled
from kronsched.schedules.kron_cuda_chain import renamed
from kronsched.schedules.kron_slab_cube import cube_kernel
from kronsched.schedules.kron_slab_kernel import slab_kernel
from kronsched.schedules.kron_slab_merge import merge_kernel
from kronsched.schedules.kron_slab_plan import (
    CubeLaunch,
    SlabLaunch,
    plan_slabs,
    slab_features,
    whole_factors,
    why_not,
)
from kronsched.space import Config, SearchSpace, load_knobs
from kronsched.space.space import Value
from kronsched.workloads.base import TensorSpec, Workload
from kronsched.workloads.kron import KronMatmul

if TYPE_CHECKING:
    from kronsched.hardware import Device


class KronCudaSlab(Schedule):
    """KronMatmul in 16-bit types with square factors of 64 or 128, or adjacent ones that are so multiplied out, on sm_90a."""

    name: ClassVar[str] = "kron_cuda_slab"
    family: ClassVar[str] = "kron"
    device_kind: ClassVar[str] = "cuda"
    untuned_share: ClassVar[float] = 0.75

    def supports(self, workload: Workload, device: Device) -> str | None:
        """None for 16-bit types, sm_90a, and factors that are 64 or 128, or so when adjacent ones are multiplied out."""
        assert isinstance(workload, KronMatmul)
        return why_not(workload, device)

    def space(self, workload: Workload, device: Device) -> SearchSpace:
        """Knobs of search_spaces/kron_cuda_slab.toml."""
        assert isinstance(workload, KronMatmul)

        def check(config: Config) -> str | None:
            try:
                plan_slabs(workload, config, device)
            except InvalidConfig as e:
                return str(e)
            return None

        return SearchSpace(self.name, load_knobs(self.name), check)

    def default_config(self, workload: Workload, device: Device) -> Config:
        """The first valid one of a short list: fewest launches, then what was fastest on an H200."""
        assert isinstance(workload, KronMatmul)
        space = self.space(workload, device)
        for config in _wishes(workload, device):
            if space.invalid(config) is None:
                return config
        for candidate in space:
            return candidate.config
        raise InvalidConfig(f"no config of {self.name} is valid for {workload.label} on {device.name}")

    def apply(self, workload: Workload, config: Config, device: Device) -> Scheduled:
        """One PrimFunc a launch. The one that reads x writes y; later ones work in place on y."""
        import tvm

        assert isinstance(workload, KronMatmul)
        program = _Program(workload)
        for launch in plan_slabs(workload, config, device):
            program.add(launch)
        return Scheduled(tvm.IRModule(program.funcs), tuple(program.launches), tuple(program.scratch))

    def features(self, workload: Workload, config: Config, device: Device) -> Mapping[str, float]:
        """Waves, occupancy, bytes through each memory level, predicted roofline time."""
        assert isinstance(workload, KronMatmul)
        return slab_features(workload, plan_slabs(workload, config, device), device)


class _Program:
    """Functions, launches and scratch as they are gathered; factors that are multiplied out come first, as g0, g1 and so on."""

    def __init__(self, w: KronMatmul) -> None:
        """The launch that multiplies out adjacent factors, where there are any."""
        self.funcs: dict[str, Any] = {}
        self.launches: list[Launch] = []
        self.scratch: list[TensorSpec] = []
        whole, groups = whole_factors(w)
        p, products = whole.factors[0][0], [group for group in groups if len(group) > 1]
        made = {group: f"g{i}" for i, group in enumerate(products)}
        self.factors = [made.get(group, f"f{group[0]}") for group in groups]
        self.first = True
        if products:
            sizes = [[(axis, w.factors[axis][0]) for axis in group] for group in products]
            self.scratch += [TensorSpec(name, (p, p), w.dtype) for name in made.values()]
            args = (*(f"f{axis}" for group in products for axis in group), *made.values())
            self._call("kron_slab_merge", merge_kernel(sizes, p, w.dtype, "kron_slab_merge"), args)

    def add(self, launch: SlabLaunch | CubeLaunch) -> None:
        """The next launch of a plan."""
        names = {f"f{j}": self.factors[axis] for j, axis in enumerate(launch.axes)} | {"y": "y"}
        func = cube_kernel(launch) if isinstance(launch, CubeLaunch) else slab_kernel(launch, in_place=not self.first)
        if self.first:
            names["x"] = "x"
        self.first = False
        func = renamed(func, names)
        self._call(f"kron_slab_{launch.axes[0]}", func, tuple(str(p.name) for p in func.params))

    def _call(self, name: str, func: Any, args: tuple[str, ...]) -> None:
        self.funcs[name] = func.with_attr("global_symbol", name)
        self.launches.append(Launch(name, args, overlap=True))


def _wishes(w: KronMatmul, device: Device) -> Iterator[Config]:
    """Default configs in order of preference; the first valid one is taken. The fastest found on an H200."""
    whole, _ = whole_factors(w)
    p, n = whole.factors[0][0], len(whole.factors)
    slabs = w.m * w.k_in // (p * p)
    if slabs <= device.units:
        yield _config(groups=1, stages=1, prefetch=True)
    if p == 64 and n > 2:
        if slabs <= 4 * device.units:  # too few clusters
            yield _config(groups=1, stages=1, per_sm=4, prefetch=True)
        ring: dict[str, Value] = {"stages": 4, "per_sm": 4, "load": "tma"} if n > 3 else {}
        yield _config(fuse=3, spare=1, **ring)
    if p == 64:
        if slabs <= 8 * device.units:
            for stages in (4, 3, 2, 1):
                yield _config(groups=1, stages=stages, per_sm=2, ahead=stages > 1, prefetch=True)
        if slabs <= 12 * device.units:
            yield _config(groups=1, stages=2, per_sm=6, prefetch=True)
        yield _config(groups=2, stages=2, per_sm=3, prefetch=True)
    if n > 2:
        yield _config(groups=1, stages=4, ahead=True)
    yield _config(groups=1, stages=3, ahead=True, load="tma", prefetch=True)
    yield _config(groups=1, stages=2, load="tma", prefetch=True)
    yield _config(groups=1, stages=2)
    yield _config(groups=1, stages=1)


def _config(**knobs: Value) -> Config:
    """A config with the first values of the knobs that are not given."""
    first: dict[str, Value] = {
        "fuse": 2, "groups": 1, "spare": 0, "stages": 1, "per_sm": 1,
        "ahead": False, "prefetch": False, "load": "cg", "store": "wb",
    }  # fmt: skip
    return {**first, **knobs}
