"""W4A16 Gemm on tensor cores: the schedule around the TIRx kernels of w4a16_kernel.py.

    [gather: x -> xs]  ->  main: x, w, s, [z] -> y or p  ->  [sum: p -> y]

The first launch is there with act-order, or when rows of x do not start on 16 bytes; the last with split_k > 1. split_k = 1 is
the data-parallel decomposition of arXiv 2402.00025, split_k > 1 its SplitK with a deterministic sum in place of atomics.

On sm_90 and later launches overlap: a kernel's blocks start while the kernel before it ends, read weights (constants), then wait
for it before they read x or write anything (`W4Tiles.start`).

Read first: w4a16_plan.py (sizes and constraints), w4a16_kernel.py (the program).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from kronsched.errors import InvalidConfig
from kronsched.schedules.base import Launch, Schedule, Scheduled
from kronsched.schedules.w4a16_plan import capability, plan_w4, w4_features, zero_methods
from kronsched.space import Config, Knob, SearchSpace, load_knobs
from kronsched.workloads.base import TensorSpec, Workload
from kronsched.workloads.gemm import Gemm

if TYPE_CHECKING:
    from kronsched.hardware import Device

MOST_ROWS = 64
"""Most rows on sm_90a; beyond, gemm_w4a16_wgmma is the faster one."""
SAFE_REGISTERS = 250
"""Of the estimate: above it some kernels spill."""


class GemmW4A16Cuda(Schedule):
    """Fused dequantise and product with `mma.m16n8k16`; float16 and bfloat16 x, any m, n and k."""

    name: ClassVar[str] = "gemm_w4a16_cuda"
    family: ClassVar[str] = "gemm"
    device_kind: ClassVar[str] = "cuda"

    def supports(self, workload: Workload, device: Device) -> str | None:
        """None for 4-bit weights when the GPU has `mma` of 16-bit floats and cp.async (sm_80); up to m = 64 on sm_90a."""
        assert isinstance(workload, Gemm)
        if workload.is_dense:
            return f"{self.name} takes 4-bit weights, not dense ones"
        if device.arch == "sm_90a" and workload.m > MOST_ROWS:
            return f"m={workload.m}: above m={MOST_ROWS} gemm_w4a16_wgmma takes half the time or less on {device.arch}"
        return None if capability(device) >= 80 else f"{self.name} needs sm_80 or later, {device.name} is {device.arch}"

    def space(self, workload: Workload, device: Device) -> SearchSpace:
        """Knobs of search_spaces/gemm_w4a16_cuda.toml, less the values that mean nothing for this workload."""
        assert isinstance(workload, Gemm)
        knobs = [_fitting(knob, workload) for knob in load_knobs(self.name)]

        def check(config: Config) -> str | None:
            try:
                plan_w4(workload, config, device)
            except InvalidConfig as e:
                return str(e)
            return None

        return SearchSpace(self.name, knobs, check)

    def default_config(self, workload: Workload, device: Device) -> Config:
        """What won where it was measured, else blocks narrow enough that every multiprocessor has one and many warps along k."""
        assert isinstance(workload, Gemm)
        space = self.space(workload, device)
        values: dict[str, tuple[Any, ...]] = {k.name: k.values for k in space.knobs}
        wish: dict[str, Any] = {
            "warps_n": 1, "stages": 0, "x_load": "late", "batch": 1, "unroll": 1, "reduction": "flat", "split_k": 1,
            "zeros": values["zeros"][0],
        }  # fmt: skip
        for mtile in sorted(values["mtile"], reverse=True):
            for choice in (*_winners(workload, device, mtile), *_narrow_enough(workload, device, mtile, values)):
                config = {**wish, "mtile": mtile, **choice}
                config = {k.name: config[k.name] if config[k.name] in k.values else k.values[0] for k in space.knobs}
                if space.invalid(config) is None and plan_w4(workload, config, device).registers <= SAFE_REGISTERS:
                    return config
        for candidate in space:
            return candidate.config
        raise InvalidConfig(f"no config of {self.name} is valid for {workload.label} on {device.name}")

    def apply(self, workload: Workload, config: Config, device: Device) -> Scheduled:
        """One PrimFunc a launch; scratch for the gathered x and for partial results."""
        import tvm

        from kronsched.schedules.w4a16_around import gather_kernel, sum_kernel
        from kronsched.schedules.w4a16_kernel import main_kernel

        assert isinstance(workload, Gemm)
        plan = plan_w4(workload, config, device)
        funcs: dict[str, Any] = {}
        launches, scratch = [], []

        def launch(name: str, func: Any) -> None:
            funcs[name] = func.with_attr("global_symbol", name)
            launches.append(Launch(name, tuple(str(p.name) for p in func.params), overlap=plan.start != "serial"))

        if plan.prepared:
            scratch.append(TensorSpec("xs", (workload.m, plan.k), workload.a_dtype))
            launch("w4a16_gather", gather_kernel(plan))
        launch("w4a16", main_kernel(plan))
        if plan.split_k > 1:
            scratch.append(TensorSpec("p", (plan.split_k * workload.m, workload.n), "float32"))
            launch("w4a16_sum", sum_kernel(plan))
        return Scheduled(tvm.IRModule(funcs), tuple(launches), tuple(scratch))

    def features(self, workload: Workload, config: Config, device: Device) -> Mapping[str, float]:
        """Blocks, waves, occupancy, bytes through memory, roofline time."""
        assert isinstance(workload, Gemm)
        return w4_features(plan_w4(workload, config, device), device)


def _blocks(w: Gemm, strips: int, mtile: int) -> int:
    return -(-w.layout.n_packed // (16 * strips)) * -(-w.m // (8 * mtile))


def _winners(w: Gemm, device: Device, mtile: int) -> Iterator[dict[str, Any]]:
    """What was fastest, or within 3% of it, at the sizes of the bench on an H200. Up to 8 rows of x: about 16 warps an SM."""
    share = _blocks(w, 4, mtile) / device.units  # of blocks of 64 columns, for each multiprocessor
    if mtile == 1:
        yield from _winners_of_one_tile(share, w.zero_point)
    if mtile == 2:
        yield from _winners_of_two_tiles(share, w.zero_point, long=w.layout.k_packed > 2 * w.layout.n_packed)


def _winners_of_one_tile(share: float, zeros: str) -> Iterator[dict[str, Any]]:
    if share >= 2.5 and zeros == "float":
        yield {"strips": 4, "warps_k": 4, "stages": 3, "batch": 4}
    elif share >= 2.5:
        yield {"strips": 2, "warps_k": 4, "stages": 3}
    elif share >= 1.8 and zeros == "symmetric":
        yield {"strips": 4, "warps_k": 8, "unroll": 2}
    elif share >= 1.3:
        yield {"strips": 4, "warps_k": 8, "stages": 2, "batch": 2}
    elif share >= 0.7:
        yield {"strips": 2, "warps_n": 2, "warps_k": 8, "x_load": "ahead", "batch": 2}
    elif share >= 0.35 and zeros == "float":
        yield {"strips": 1, "warps_k": 16, "x_load": "segment"}
    elif share >= 0.35:
        yield {"strips": 2, "warps_k": 16, "batch": 2}


def _winners_of_two_tiles(share: float, zeros: str, long: bool) -> Iterator[dict[str, Any]]:
    if 0.7 <= share < 1.3 and zeros == "float":
        yield {"strips": 2, "warps_n": 2, "warps_k": 8, "x_load": "segment", "batch": 2}
    elif 0.7 <= share < 1.3:
        yield {"strips": 4, "warps_k": 8, "x_load": "ahead"}
    elif 0.35 <= share < 0.7 and long:
        yield {"strips": 2, "warps_n": 2, "warps_k": 8, "x_load": "segment", "batch": 2, "split_k": 2}
    elif 0.35 <= share < 0.7:
        yield {"strips": 1, "warps_n": 2, "warps_k": 8, "x_load": "segment"}


def _narrow_enough(w: Gemm, device: Device, mtile: int, values: Mapping[str, tuple[Any, ...]]) -> Iterator[dict[str, Any]]:
    """The widest blocks that are enough first; k split across blocks as a last resort."""
    enough = [v for v in values["strips"] if _blocks(w, v, mtile) >= 0.7 * device.units]
    order = sorted(values["strips"], key=lambda v: (v not in enough, -v if v in enough else v))
    for strips, warps_k in itertools.product(order, sorted(values["warps_k"], reverse=True)):
        few = _blocks(w, strips, mtile) <= device.units // 4
        for split_k in sorted(values["split_k"], reverse=few):
            yield {"strips": strips, "warps_k": warps_k, "split_k": split_k}


def _fitting(knob: Knob, w: Gemm) -> Knob:
    """The knob with the values that can matter for this workload (the first one where none does)."""
    values: tuple[Any, ...] = knob.values
    if knob.name == "zeros":
        values = tuple(v for v in values if v in zero_methods(w))
    elif knob.name == "mtile":
        values = tuple(sorted(v for v in values if v == 1 or 8 * v < 2 * w.m)[-2:])
    elif knob.name in ("warps_k", "split_k"):
        chunks = w.layout.k_packed // 128
        most = [v for v in values if v <= chunks]
        values = tuple(v for v in most if v >= 4 or chunks < 16) if knob.name == "warps_k" else tuple(most)
    return Knob(knob.name, values or knob.values[:1], knob.help)
