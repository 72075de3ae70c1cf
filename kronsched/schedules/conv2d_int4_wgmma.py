"""Conv2d of int4 and uint4 on Hopper, which multiplies no 4-bit integers: unpacked to int8, then conv2d_cuda_wgmma's product.

    unpack: x, w -> x_wide, w_wide           int8, channels padded to whole pieces
    conv2d: x_wide, w_wide, [scale, …] -> y  4-bit results are saturated and packed in registers (conv2d_int4_kernel.py)

Read first: `Conv2dInt4Wgmma.apply`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from kronsched.schedules.base import Launch, Schedule, Scheduled
from kronsched.schedules.conv2d_cuda_int4 import bytes_of
from kronsched.schedules.conv2d_cuda_wgmma import Conv2dCudaWgmma, groups_of, tile_of
from kronsched.schedules.conv2d_epilogue import Epilogue
from kronsched.schedules.conv2d_int4_kernel import Int4Epilogue, unpack_program
from kronsched.schedules.conv2d_launches import pad_scratch
from kronsched.schedules.conv2d_wgmma_kernel import wgmma_program
from kronsched.space import Config, Knob, SearchSpace, load_knobs
from kronsched.workloads.base import Workload
from kronsched.workloads.conv2d import FOUR_BIT, Conv2d

if TYPE_CHECKING:
    from kronsched.hardware import Device

_BYTES = Conv2dCudaWgmma()


class Conv2dInt4Wgmma(Schedule):
    """int4 and uint4, one group of channels, sm_90a."""

    name: ClassVar[str] = "conv2d_int4_wgmma"
    family: ClassVar[str] = "conv2d"
    device_kind: ClassVar[str] = "cuda"
    untuned_share: ClassVar[float] = 0.4

    def supports(self, workload: Workload, device: Device) -> str | None:
        """None for 4 bits, one group, on sm_90a."""
        assert isinstance(workload, Conv2d)
        if workload.in_dtype not in FOUR_BIT:
            return f"in_dtype={workload.in_dtype}: it serves {' and '.join(FOUR_BIT)}"
        return _BYTES.supports(bytes_of(workload, device), device)

    def space(self, workload: Workload, device: Device) -> SearchSpace:
        """Knobs of search_spaces/conv2d_int4_wgmma.toml, with the values and constraints of the convolution of int8."""
        assert isinstance(workload, Conv2d)
        inner = _BYTES.space(bytes_of(workload, device), device)
        own = {k.name: k for k in load_knobs(self.name)}
        knobs = [Knob(k.name, tuple(v for v in k.values if v in own[k.name].values), own[k.name].help) for k in inner.knobs]
        return SearchSpace(self.name, knobs, inner.invalid)

    def default_config(self, workload: Workload, device: Device) -> Config:
        """That of the convolution of int8."""
        assert isinstance(workload, Conv2d)
        return _BYTES.default_config(bytes_of(workload, device), device)

    def apply(self, workload: Workload, config: Config, device: Device) -> Scheduled:
        """Two launches; the second may overlap the end of the first."""
        import tvm

        assert isinstance(workload, Conv2d)
        inner = bytes_of(workload, device)
        tile, groups = tile_of(inner, config, device), groups_of(config)
        scratch = pad_scratch(tile)
        specs = [*scratch, *inner.inputs[2:], workload.output]
        epilogue = partial(Int4Epilogue, out_dtype=workload.out_dtype) if workload.out_dtype in FOUR_BIT else Epilogue
        funcs = {
            "conv2d_unpack": unpack_program(workload, scratch, "conv2d_unpack"),
            "conv2d": wgmma_program(tile, "conv2d", specs, groups, epilogue),
        }
        launches = (
            Launch("conv2d_unpack", ("x", "w", *(t.name for t in scratch))),
            Launch("conv2d", tuple(t.name for t in specs), groups.waits),
        )
        return Scheduled(tvm.IRModule(funcs), launches, scratch)

    def features(self, workload: Workload, config: Config, device: Device) -> Mapping[str, float]:
        """Those of the convolution of int8."""
        assert isinstance(workload, Conv2d)
        return _BYTES.features(bytes_of(workload, device), config, device)
