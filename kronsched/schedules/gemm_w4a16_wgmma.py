"""W4A16 Gemm on Hopper's warpgroup products: the schedule around two TIRx kernels.

    copies = "threads"          w4a16_wgmma_kernel.py: the threads that multiply also fetch
    copies = "fetch", "ring"    w4a16_ring_kernel.py: producers fetch for them; "ring" after a first launch that reorders x

    [prepare: x -> xs, [x_sums]]  ->  main: x or xs, w, s, [z] -> y or p  ->  [sum: p -> y]

For 9 rows of x and more: what is read of x serves more columns, and the product runs at twice the rate of `mma.sync`.

Read first: w4a16_wgmma_plan.py (sizes and constraints), then the kernels.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from kronsched.errors import InvalidConfig
from kronsched.quant.layout import TILE_N
from kronsched.schedules.base import Launch, Schedule, Scheduled
from kronsched.schedules.w4a16_wgmma_plan import must_prepare, plan_wgmma, wgmma_features
from kronsched.space import Config, Knob, SearchSpace, load_knobs
from kronsched.workloads.base import TensorSpec, Workload
from kronsched.workloads.gemm import Gemm

if TYPE_CHECKING:
    from kronsched.hardware import Device

PREPARE = "w4a16_prepare"
FEWEST_ROWS = 9
"""From here on a tile of 16 rows is at least half full."""
ENOUGH = 0.7
"""Blocks for each multiprocessor that leave few of them idle."""
_SMALL = 2**25
"""Weights; up to here a launch's other costs outweigh the copies."""


class GemmW4A16Wgmma(Schedule):
    """Fused dequantise and product with `wgmma`; float16 and bfloat16 x, m ≥ 9, any n and k."""

    name: ClassVar[str] = "gemm_w4a16_wgmma"
    family: ClassVar[str] = "gemm"
    device_kind: ClassVar[str] = "cuda"
    untuned_share: ClassVar[float] = 0.5

    def supports(self, workload: Workload, device: Device) -> str | None:
        """None for 4-bit weights and m ≥ 9 on sm_90a."""
        assert isinstance(workload, Gemm)
        if workload.is_dense:
            return f"{self.name} takes 4-bit weights, not dense ones"
        if device.arch != "sm_90a":
            return f"{self.name} needs sm_90a, {device.name} is {device.arch}"
        if workload.m < FEWEST_ROWS:
            return f"m={workload.m}: {FEWEST_ROWS} rows at least are needed"
        return None

    def space(self, workload: Workload, device: Device) -> SearchSpace:
        """Knobs of search_spaces/gemm_w4a16_wgmma.toml, less the values that mean nothing for this workload."""
        assert isinstance(workload, Gemm)
        knobs = [_fitting(knob, workload) for knob in load_knobs(self.name)]

        def check(config: Config) -> str | None:
            try:
                plan_wgmma(workload, config, device)
            except InvalidConfig as e:
                return str(e)
            return None

        return SearchSpace(self.name, knobs, check)

    def default_config(self, workload: Workload, device: Device) -> Config:
        """What won where it was measured, else the widest block for which there are enough blocks; k split as a last resort."""
        assert isinstance(workload, Gemm)
        space = self.space(workload, device)
        values: dict[str, tuple[Any, ...]] = {k.name: k.values for k in space.knobs}
        rows = max(v for v in values["rows"] if v <= 128)
        for choice in (*_winners(workload, device, rows), *_wide_enough()):
            stages = choice["stages"]
            for split_k, choice["stages"] in itertools.product(values["split_k"], range(stages, 1, -1)):
                config = {"rows": rows, "copies": values["copies"][-1], **choice, "split_k": split_k}
                config = {k.name: config[k.name] if config[k.name] in k.values else k.values[-1] for k in space.knobs}
                if space.invalid(config) is None:
                    grid = plan_wgmma(workload, config, device).grid
                    if split_k == max(values["split_k"]) or grid[0] * grid[1] * grid[2] >= ENOUGH * device.units:
                        return config
        for candidate in space:
            return candidate.config
        raise InvalidConfig(f"no config of {self.name} is valid for {workload.label} on {device.name}")

    def apply(self, workload: Workload, config: Config, device: Device) -> Scheduled:
        """One PrimFunc a launch; scratch for the prepared x and for partial results."""
        import tvm

        from kronsched.schedules.w4a16_around import sum_kernel
        from kronsched.schedules.w4a16_prepare import prepare_kernel
        from kronsched.schedules.w4a16_ring_kernel import ring_kernel
        from kronsched.schedules.w4a16_wgmma_kernel import main_kernel

        assert isinstance(workload, Gemm)
        plan = plan_wgmma(workload, config, device)
        funcs: dict[str, Any] = {}
        launches, scratch = [], []

        def launch(name: str, func: Any) -> None:
            funcs[name] = func.with_attr("global_symbol", name)
            # A gather that starts early gets the few multiprocessors that the kernel before leaves idle, and is bound by them.
            overlaps = plan.start != "serial" and not (workload.act_order and name == PREPARE)
            launches.append(Launch(name, tuple(str(p.name) for p in func.params), overlap=overlaps))

        if plan.prepared:
            scratch.append(TensorSpec("xs", plan.image, workload.a_dtype))
            if workload.zero_point == "float":
                scratch.append(TensorSpec("x_sums", plan.x_sums, "float32"))
            launch(PREPARE, prepare_kernel(plan))
        launch("w4a16_wgmma", (ring_kernel if plan.producers else main_kernel)(plan))
        if plan.split_k > 1:
            scratch.append(TensorSpec("p", (plan.split_k * workload.m, workload.n), "float32"))
            launch("w4a16_sum", sum_kernel(plan))
        return Scheduled(tvm.IRModule(funcs), tuple(launches), tuple(scratch))

    def features(self, workload: Workload, config: Config, device: Device) -> Mapping[str, float]:
        """Blocks, waves, occupancy, bytes through memory, roofline time."""
        assert isinstance(workload, Gemm)
        return wgmma_features(plan_wgmma(workload, config, device), device)


def _winners(w: Gemm, device: Device, rows: int) -> Iterator[dict[str, Any]]:
    """What was fastest, or near it, at the sizes of the bench on an H200.

    Many rows: x is prepared, as each of its values serves few columns before the products take longer than the copies. Few rows:
    that first launch costs more than it saves.
    """
    row_blocks = -(-w.m // rows)

    def filled(columns: int) -> float:
        """The share of multiprocessors at work in all waves of blocks."""
        waves = -(-w.layout.n_packed // columns) * row_blocks / device.units
        return waves / math.ceil(waves)

    narrow = w.layout.n_packed // TILE_N * row_blocks < ENOUGH * device.units
    if rows == 64 and narrow:
        yield {"tiles": 1, "groups_n": 1, "groups_k": 4, "stages": 2, "copies": "ring"}
        yield {"tiles": 1, "groups_n": 1, "groups_k": 2, "stages": 4, "copies": "ring"}
    if rows == 64 or (rows == 32 and not narrow):
        yield {"tiles": 2, "groups_n": 1, "groups_k": 2, "stages": 4, "copies": "ring"}
    if rows == 16 and filled(256) >= max(filled(128), ENOUGH):
        yield {"tiles": 2, "groups_n": 2, "groups_k": 2, "stages": 4, "copies": "fetch"}
    if rows == 16 and filled(128) >= ENOUGH and w.layout.n_packed * w.layout.k_packed > _SMALL:
        yield {"tiles": 2, "groups_n": 1, "groups_k": 4, "stages": 4, "copies": "fetch"}
    if rows <= 32:
        yield {"tiles": 1, "groups_n": 2, "groups_k": 2, "stages": 4, "copies": "threads"}


def _wide_enough() -> Iterator[dict[str, Any]]:
    for groups_n, groups_k in ((2, 2), (2, 1), (1, 2), (1, 1)):
        yield {"tiles": 1, "groups_n": groups_n, "groups_k": groups_k, "stages": 4}


def _fitting(knob: Knob, w: Gemm) -> Knob:
    """The knob with the values that can matter for this workload (the first one where none does)."""
    values: tuple[Any, ...] = knob.values
    chunks = w.layout.k_packed // 128
    if knob.name == "rows":
        values = tuple(sorted(v for v in values if v <= 16 or v < 2 * w.m)[-2:])
    elif knob.name in ("groups_k", "split_k"):
        values = tuple(v for v in values if v <= chunks)
    elif knob.name == "copies" and must_prepare(w):
        values = tuple(v for v in values if v == "ring")
    return Knob(knob.name, values or knob.values[:1], knob.help)
