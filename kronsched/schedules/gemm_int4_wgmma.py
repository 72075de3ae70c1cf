"""Gemm of int4 on Hopper, which multiplies no 4-bit integers: unpacked to int8 first, then gemm_dense_wgmma's product.

    unpack: x, w -> x_padded, w_padded      int8, rows of whole 16 bytes
    wgmma: x_padded, w_padded -> y,  or with split_k > 1  wgmma: … -> p,  sum: p -> y

Read first: `as_bytes`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from kronsched.schedules.base import Launch, Schedule, Scheduled
from kronsched.schedules.gemm_dense_wgmma import GemmDenseWgmma
from kronsched.schedules.gemm_dense_wgmma_plan import plan_dense
from kronsched.space import Config, Knob, SearchSpace, load_knobs
from kronsched.workloads.base import TensorSpec, Workload
from kronsched.workloads.conv2d import FOUR_BIT
from kronsched.workloads.gemm import Gemm
from kronsched.workloads.gemm_epilogue import PARTS, as_conv2d

if TYPE_CHECKING:
    from kronsched.hardware import Device

_BYTES = GemmDenseWgmma()


class GemmInt4Wgmma(Schedule):
    """int4 or uint4 times int4 into int32 on sm_90a; any m and n."""

    name: ClassVar[str] = "gemm_int4_wgmma"
    family: ClassVar[str] = "gemm"
    device_kind: ClassVar[str] = "cuda"
    untuned_share: ClassVar[float] = 0.5

    def supports(self, workload: Workload, device: Device) -> str | None:
        """None for dense int4 on sm_90a."""
        assert isinstance(workload, Gemm)
        if not workload.is_dense or workload.a_dtype not in FOUR_BIT:
            return f"a_dtype={workload.a_dtype}, b_dtype={workload.b_dtype}: it multiplies int4 by int4"
        if workload.out_dtype != "int32":
            return f"out_dtype={workload.out_dtype}: there is gemm_int4_cuda for it"
        return _BYTES.supports(as_bytes(workload), device)

    def space(self, workload: Workload, device: Device) -> SearchSpace:
        """Knobs of search_spaces/gemm_int4_wgmma.toml, with the values and constraints of the product of int8."""
        assert isinstance(workload, Gemm)
        inner = _BYTES.space(as_bytes(workload), device)
        values = {k.name: k.values for k in inner.knobs}
        knobs = [_common(knob, values[knob.name]) for knob in load_knobs(self.name)]
        return SearchSpace(self.name, knobs, lambda config: inner.invalid(_whole(config, inner)))

    def default_config(self, workload: Workload, device: Device) -> Config:
        """That of the product of int8."""
        assert isinstance(workload, Gemm)
        config = _BYTES.default_config(as_bytes(workload), device)
        return {knob.name: config[knob.name] for knob in load_knobs(self.name)}

    def apply(self, workload: Workload, config: Config, device: Device) -> Scheduled:
        """Two launches, or three with split_k > 1."""
        import tvm

        from kronsched.schedules.conv2d_int4_kernel import unpack_program
        from kronsched.schedules.gemm_dense_pad import padded_inputs
        from kronsched.schedules.gemm_dense_sum import sum_kernel
        from kronsched.schedules.gemm_dense_wgmma_kernel import main_kernel

        assert isinstance(workload, Gemm)
        wide = as_bytes(workload)
        plan = replace(plan_dense(wide, _whole(config, _BYTES.space(wide, device)), device), padded=True)
        x, w = scratch = padded_inputs(wide)
        funcs: dict[str, Any] = {"gemm_unpack": unpack_program(as_conv2d(workload), (x, w), "gemm_unpack")}
        funcs["gemm_wgmma"] = main_kernel(plan, "gemm_wgmma")
        if plan.split_k > 1:
            scratch += (TensorSpec("p", (plan.split_k, wide.m, wide.n), plan.out_dtype),)
            funcs["gemm_sum"] = sum_kernel(wide, plan.split_k, "gemm_sum")
        launches = [Launch(n, tuple(str(p.name) for p in f.params), n != "gemm_unpack") for n, f in funcs.items()]
        return Scheduled(tvm.IRModule(funcs), tuple(launches), scratch)

    def features(self, workload: Workload, config: Config, device: Device) -> Mapping[str, float]:
        """Those of the product of int8."""
        assert isinstance(workload, Gemm)
        wide = as_bytes(workload)
        return _BYTES.features(wide, _whole(config, _BYTES.space(wide, device)), device)


def as_bytes(gemm: Gemm) -> Gemm:
    """The same product of int8, with zeros at the end of rows of k that are no whole 16 bytes."""
    parts = {name: getattr(gemm, name) for name in PARTS}
    return Gemm(gemm.m, gemm.n, -(-gemm.k // 16) * 16, "int8", "int8", out_dtype="int32", **parts)


def _whole(config: Config, inner: SearchSpace) -> Config:
    """The config with the only values that the other knobs have for int8."""
    return {**{k.name: k.values[0] for k in inner.knobs}, **config}


def _common(knob: Knob, values: tuple[Any, ...]) -> Knob:
    """The knob with those of its values that the product of int8 has too."""
    return Knob(knob.name, tuple(v for v in knob.values if v in values) or values[:1], knob.help)
