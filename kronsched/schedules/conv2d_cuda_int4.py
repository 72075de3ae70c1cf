"""Conv2d of int4 and uint4 on tensor cores: natively on sm_80 to sm_89, by way of int8 elsewhere.

The product is conv2d_cuda_mma's, of a convolution of bytes; see conv2d_int4_kernel.py for what differs. Read first: `bytes_of`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from kronsched.schedules.base import Launch, Schedule, Scheduled
from kronsched.schedules.conv2d_cuda_mma import Conv2dCudaMma, tile_of, warps_of
from kronsched.schedules.conv2d_int4_kernel import int4_kernel, unpack_program
from kronsched.schedules.conv2d_launches import pad_program, pad_scratch
from kronsched.schedules.conv2d_mma_kernel import mma_program
from kronsched.space import Config, Knob, SearchSpace, load_knobs
from kronsched.workloads.base import TensorSpec, Workload
from kronsched.workloads.conv2d import FOUR_BIT, Conv2d

if TYPE_CHECKING:
    from kronsched.hardware import Device

_BYTES = Conv2dCudaMma()


class Conv2dCudaInt4(Schedule):
    """int4 and uint4, one group of channels, sm_80 and later."""

    name: ClassVar[str] = "conv2d_cuda_int4"
    family: ClassVar[str] = "conv2d"
    device_kind: ClassVar[str] = "cuda"
    untuned_share: ClassVar[float] = 0.3

    def supports(self, workload: Workload, device: Device) -> str | None:
        """None for 4 bits, one group, on a GPU whose tensor cores take int8 at least."""
        assert isinstance(workload, Conv2d)
        if workload.in_dtype not in FOUR_BIT:
            return f"in_dtype={workload.in_dtype}: it serves {' and '.join(FOUR_BIT)}"
        if workload.groups > 1:
            return f"groups={workload.groups}: it serves one group"
        return _BYTES.supports(bytes_of(workload, device), device)

    def space(self, workload: Workload, device: Device) -> SearchSpace:
        """Knobs of search_spaces/conv2d_cuda_int4.toml, less what conv2d_cuda_mma would refuse."""
        assert isinstance(workload, Conv2d)
        return self.space_of(workload, device, load_knobs(self.name), self.name)

    def space_of(
        self, conv: Conv2d, device: Device, knobs: Sequence[Knob], name: str, fixed: Config | None = None
    ) -> SearchSpace:
        """The space of given knobs under a name. fixed: values of knobs that it leaves out."""
        return _BYTES.space_of(bytes_of(conv, device), device, knobs, name, fixed)

    def default_config(self, workload: Workload, device: Device) -> Config:
        """As of conv2d_cuda_mma for the convolution of bytes."""
        assert isinstance(workload, Conv2d)
        return _BYTES.default_config(bytes_of(workload, device), device)

    def apply(self, workload: Workload, config: Config, device: Device) -> Scheduled:
        """One launch, or two where channels are unpacked or padded first."""
        import tvm

        assert isinstance(workload, Conv2d)
        native, inner = is_native(device), bytes_of(workload, device)
        tile, warps = tile_of(inner, config, device), warps_of(config)
        scratch: tuple[TensorSpec, ...] = pad_scratch(tile) if tile.padded or not native else ()
        specs = [*(scratch or inner.inputs[:2]), *inner.inputs[2:], workload.output]
        funcs, launches = {}, []
        if scratch:
            first = pad_program(tile, "conv2d_pad") if native else unpack_program(workload, pad_scratch(tile), "conv2d_unpack")
            name = "conv2d_pad" if native else "conv2d_unpack"
            funcs[name] = first
            launches.append(Launch(name, ("x", "w", *(t.name for t in scratch))))
        funcs["conv2d"] = mma_program(tile, warps, "conv2d", specs, int4_kernel(workload, native))
        launches.append(Launch("conv2d", tuple(t.name for t in specs)))
        return Scheduled(tvm.IRModule(funcs), tuple(launches), scratch)

    def features(self, workload: Workload, config: Config, device: Device) -> Mapping[str, float]:
        """As of conv2d_cuda_mma for the convolution of bytes."""
        assert isinstance(workload, Conv2d)
        return _BYTES.features(bytes_of(workload, device), config, device)


def is_native(device: Device) -> bool:
    """Whether the GPU multiplies 4-bit integers: sm_80 to sm_89."""
    return 80 <= int("".join(c for c in device.arch if c.isdigit())) < 90


def bytes_of(conv: Conv2d, device: Device) -> Conv2d:
    """The int8 convolution with the same tiles: of half as many channels, two a byte, or of unpacked ones.

    Its results of 4 bits are counted as int8, so that `vector` means channels.
    """
    channels = conv.c_in // 2 if is_native(device) else conv.c_in
    out = "int32" if conv.out_dtype == "int32" else "int8"
    return replace(conv, in_dtype="int8", out_dtype=out, c_in=channels)
