"""Dense Gemm on Hopper's warpgroup tensor cores: TMA, mbarriers and wgmma in a persistent, warp-specialised TIRx tile program.

    main: x, w, [x_scale, w_scale] -> y,  or with split_k > 1  main: x, w -> p,  sum: p, [x_scale, w_scale] -> y
    before it, where TMA cannot read rows of k as they are:  pad: x, w -> x_padded, w_padded

Read first: gemm_dense_wgmma_plan.py (sizes and constraints), gemm_dense_wgmma_kernel.py (the program).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from kronsched.dtypes import DTYPES
from kronsched.errors import InvalidConfig
from kronsched.schedules.base import Launch, Schedule, Scheduled
from kronsched.schedules.gemm_dense_wgmma_plan import ROW_BYTES, DensePlan, dense_features, plan_dense, predicted_us, why_not
from kronsched.space import Config, Knob, SearchSpace, load_knobs
from kronsched.workloads.base import TensorSpec, Workload
from kronsched.workloads.float8 import FLOAT8
from kronsched.workloads.gemm import Gemm

if TYPE_CHECKING:
    from kronsched.hardware import Device

_SHAPE = ("block_m", "block_n", "warpgroups", "split_k", "promote", "pair", "cluster")


class GemmDenseWgmma(Schedule):
    """float16, bfloat16, int8 and float8 on sm_90a; any m, n and k (rows of other than whole 16 bytes are copied first)."""

    name: ClassVar[str] = "gemm_dense_wgmma"
    family: ClassVar[str] = "gemm"
    device_kind: ClassVar[str] = "cuda"
    untuned_share: ClassVar[float] = 0.7

    def supports(self, workload: Workload, device: Device) -> str | None:
        """None for dense weights on sm_90a."""
        assert isinstance(workload, Gemm)
        return why_not(workload, device)

    def space(self, workload: Workload, device: Device) -> SearchSpace:
        """Knobs of search_spaces/gemm_dense_wgmma.toml, less the values that mean nothing for this workload."""
        assert isinstance(workload, Gemm)
        knobs = [_fitting(knob, workload) for knob in load_knobs(self.name)]

        def check(config: Config) -> str | None:
            try:
                plan_dense(workload, config, device)
            except InvalidConfig as e:
                return str(e)
            return None

        return SearchSpace(self.name, knobs, check)

    def default_config(self, workload: Workload, device: Device) -> Config:
        """The tile shape that a rough model finds fastest, with as many stages as fit, in bands that read the fewest rows."""
        assert isinstance(workload, Gemm)
        space = self.space(workload, device)
        values: dict[str, tuple[Any, ...]] = {k.name: k.values for k in space.knobs}
        found: list[tuple[float, int, Config]] = []
        for shape in itertools.product(*(values[name] for name in _SHAPE)):
            tile = dict(zip(_SHAPE, shape, strict=True))
            groups = sorted(values["group"], key=lambda group: _rows_in_flight(group, tile, device))
            for stages, group in itertools.product(sorted(values["stages"], reverse=True), groups):
                config = {**tile, "stages": stages, "group": group}
                config["pingpong"] = values["pingpong"][0]
                config = {knob.name: config[knob.name] for knob in space.knobs}
                if space.invalid(config) is None:
                    found.append((predicted_us(plan_dense(workload, config, device), device), len(found), config))
                    break
        if not found:
            raise InvalidConfig(f"no config of {self.name} is valid for {workload.label} on {device.name}")
        return min(found)[2]

    def apply(self, workload: Workload, config: Config, device: Device) -> Scheduled:
        """One PrimFunc a launch; scratch for partial sums."""
        import tvm

        from kronsched.schedules.gemm_dense_pad import pad_kernel, padded_inputs
        from kronsched.schedules.gemm_dense_sum import sum_kernel
        from kronsched.schedules.gemm_dense_wgmma_kernel import main_kernel

        assert isinstance(workload, Gemm)
        plan: DensePlan = plan_dense(workload, config, device)
        funcs: dict[str, Any] = {"gemm_pad": pad_kernel(workload, plan.workload.k, "gemm_pad")} if plan.padded else {}
        scratch = padded_inputs(plan.workload) if plan.padded else ()
        funcs["gemm_wgmma"] = main_kernel(plan, "gemm_wgmma")
        if plan.split_k > 1:
            scratch += (TensorSpec("p", (plan.split_k, workload.m, workload.n), plan.out_dtype),)
            funcs["gemm_sum"] = sum_kernel(workload, plan.split_k, "gemm_sum")
        launches = tuple(Launch(name, tuple(str(p.name) for p in f.params), overlap=True) for name, f in funcs.items())
        return Scheduled(tvm.IRModule(funcs), launches, scratch)

    def features(self, workload: Workload, config: Config, device: Device) -> Mapping[str, float]:
        """Waves, useful share of tiles, bytes through L2, predicted and roofline time."""
        assert isinstance(workload, Gemm)
        return dense_features(plan_dense(workload, config, device), device)


def _rows_in_flight(group: int, tile: Mapping[str, Any], device: Device) -> float:
    """Rows of x and of w that the tiles in flight read: the fewer, the more is found in the L2 cache."""
    high = group * tile["cluster"]
    return float(high * tile["block_m"] + device.units / high * tile["block_n"])


def _fitting(knob: Knob, w: Gemm) -> Knob:
    """The knob with the values that can matter for this workload (the first one where none does)."""
    values: tuple[Any, ...] = knob.values
    if knob.name == "promote":
        values = tuple(v for v in values if bool(v) == (w.a_dtype in FLOAT8))
    elif knob.name == "pair" and w.a_dtype not in FLOAT8:
        values = (False,)
    elif knob.name == "split_k":
        # Enough tiles for the whole GPU need no split: it would only add traffic.
        trips = -(-w.k * DTYPES[w.a_dtype].itemsize // ROW_BYTES)
        values = tuple(v for v in values if v == 1 or (w.m * w.n <= 2**22 and v <= trips))
    elif knob.name in ("group", "warpgroups"):
        values = tuple(v for v in values if v <= -(-w.m // 64))
    elif knob.name in ("block_m", "block_n"):
        extent = w.m if knob.name == "block_m" else w.n
        values = tuple(v for v in values if v < 2 * extent)
    return Knob(knob.name, values or knob.values[:1], knob.help)
