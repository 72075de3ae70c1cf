"""Gemm of int4 on tensor cores: the convolution of 1x1 with as many pixels as rows (conv2d_cuda_int4.py)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from kronsched.schedules.base import Schedule, Scheduled
from kronsched.schedules.conv2d_cuda_int4 import Conv2dCudaInt4
from kronsched.space import Config, SearchSpace, load_knobs
from kronsched.workloads.base import Workload
from kronsched.workloads.conv2d import FOUR_BIT
from kronsched.workloads.gemm import Gemm
from kronsched.workloads.gemm_epilogue import as_conv2d

if TYPE_CHECKING:
    from kronsched.hardware import Device

_CONV = Conv2dCudaInt4()
_FIXED = ("cache", "order")
"""Knobs of the convolution that a product leaves no choice of."""


class GemmInt4Cuda(Schedule):
    """int4 or uint4 times int4 into int32 or 4 bits: natively on sm_80 to sm_89, by way of int8 elsewhere."""

    name: ClassVar[str] = "gemm_int4_cuda"
    family: ClassVar[str] = "gemm"
    device_kind: ClassVar[str] = "cuda"
    untuned_share: ClassVar[float] = 0.3

    def supports(self, workload: Workload, device: Device) -> str | None:
        """None for dense int4 that conv2d_cuda_int4 takes."""
        assert isinstance(workload, Gemm)
        if not workload.is_dense or workload.a_dtype not in FOUR_BIT:
            return f"a_dtype={workload.a_dtype}, b_dtype={workload.b_dtype}: it multiplies int4 by int4"
        if workload.n % 2:
            return f"n={workload.n}: it stores two columns at a time, so an even n is needed"
        return _CONV.supports(as_conv2d(workload), device)

    def space(self, workload: Workload, device: Device) -> SearchSpace:
        """Knobs of search_spaces/gemm_int4_cuda.toml, less what the convolution would refuse."""
        assert isinstance(workload, Gemm)
        return _CONV.space_of(as_conv2d(workload), device, load_knobs(self.name), self.name, self.fixed(workload, device))

    def default_config(self, workload: Workload, device: Device) -> Config:
        """The convolution's."""
        assert isinstance(workload, Gemm)
        config = _CONV.default_config(as_conv2d(workload), device)
        return {name: value for name, value in config.items() if name not in _FIXED}

    def apply(self, workload: Workload, config: Config, device: Device) -> Scheduled:
        """The convolution's launches, of the same tensors."""
        assert isinstance(workload, Gemm)
        return _CONV.apply(as_conv2d(workload), {**config, **self.fixed(workload, device)}, device)

    def features(self, workload: Workload, config: Config, device: Device) -> Mapping[str, float]:
        """The convolution's."""
        assert isinstance(workload, Gemm)
        return _CONV.features(as_conv2d(workload), {**config, **self.fixed(workload, device)}, device)

    def fixed(self, workload: Gemm, device: Device) -> Config:
        """The values of `_FIXED`: small copies go through L1 whatever is asked for."""
        values = {k.name: k.values[0] for k in _CONV.space(as_conv2d(workload), device).knobs}
        return {name: values[name] for name in _FIXED}
