"""Conv2d on CUDA cores, from TensorIR by Schedule primitives: right for every shape, groups and depthwise among them.

A block is a piece of a row of y by some channels; a thread computes `channels` neighbouring output channels of one pixel, its
sums in registers; the threads of a warp are neighbours along the channels, so that they read the same pixels of x. For speed
on ordinary shapes there are tile programs on tensor cores (conv2d_cuda_mma.py, conv2d_cuda_wgmma.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from kronsched.schedules.base import Launch, Schedule, Scheduled
from kronsched.space import Config, Knob, SearchSpace, load_knobs
from kronsched.workloads.base import Workload
from kronsched.workloads.conv2d import Conv2d
from kronsched.workloads.conv2d_te import conv2d_stages

if TYPE_CHECKING:
    from kronsched.hardware import Device


class Conv2dCudaSimt(Schedule):
    """Direct convolution; every dtype and option of Conv2d."""

    name: ClassVar[str] = "conv2d_cuda_simt"
    family: ClassVar[str] = "conv2d"
    device_kind: ClassVar[str] = "cuda"
    untuned_share: ClassVar[float] = 0.01

    def supports(self, workload: Workload, device: Device) -> str | None:
        """None for NHWC."""
        assert isinstance(workload, Conv2d)
        return None if workload.layout == "NHWC" else f"layout={workload.layout}: it reads NHWC"

    def space(self, workload: Workload, device: Device) -> SearchSpace:
        """Knobs of search_spaces/conv2d_cuda_simt.toml, less the numbers of channels that do not divide c_out."""
        assert isinstance(workload, Conv2d)
        return SearchSpace(self.name, [_fitting(knob, workload) for knob in load_knobs(self.name)])

    def default_config(self, workload: Workload, device: Device) -> Config:
        """One channel a thread, 128 threads."""
        return {"threads": 128, "channels": 1, "unroll": 16}

    def apply(self, workload: Workload, config: Config, device: Device) -> Scheduled:
        """One PrimFunc and one launch."""
        assert isinstance(workload, Conv2d)
        mod = _schedule(workload, config)
        return Scheduled(mod, (Launch("main", (*(t.name for t in workload.inputs), workload.output.name)),))

    def features(self, workload: Workload, config: Config, device: Device) -> Mapping[str, float]:
        """Blocks, waves and what a thread does."""
        assert isinstance(workload, Conv2d)
        channels = int(config["channels"])
        across, along = _threads(workload, config)
        blocks = (
            workload.n
            * workload.out_hw[0]
            * -(-workload.out_hw[1] // along)
            * -(-workload.output.shape[-1] // (across * channels))
        )
        rate = device.peak_gflops.get("float32", 5e4)
        return {
            "blocks": float(blocks),
            "waves": blocks * across * along / (device.units * device.max_threads_per_sm),
            "terms": float(workload.depth * channels),
            "roofline_us": max(workload.min_bytes / device.bandwidth_gbs, workload.flops / rate) / 1e3,
        }


def _fitting(knob: Knob, conv: Conv2d) -> Knob:
    if knob.name != "channels":
        return knob
    values: tuple[Any, ...] = tuple(v for v in knob.values if conv.output.shape[-1] % int(v) == 0)
    return Knob(knob.name, values or (1,), knob.help)


def _threads(conv: Conv2d, config: Config) -> tuple[int, int]:
    """Threads of a block along the channels and along a row of y."""
    across = min(int(config["threads"]), 1 << (conv.output.shape[-1] // int(config["channels"]) - 1).bit_length())
    return across, min(int(config["threads"]) // across, conv.out_hw[1])


def _schedule(conv: Conv2d, config: Config) -> Any:
    import tvm
    from tvm import s_tir, te

    placeholders, stages = conv2d_stages(conv)
    sch = s_tir.Schedule(tvm.IRModule({"main": te.create_prim_func([*placeholders, stages[-1]])}))
    acc, y = sch.get_sblock("acc"), sch.get_sblock("y")
    for name in ("xp", "wt"):
        sch.compute_inline(sch.get_sblock(name))
    n, i, j, o = sch.get_loops(y)
    across, along = _threads(conv, config)
    columns, column = sch.split(j, [None, along])
    tiles, thread, channel = sch.split(o, [None, across, int(config["channels"])])
    sch.reorder(n, i, columns, tiles, column, thread, channel)
    sch.bind(sch.fuse(n, i, columns, tiles), "blockIdx.x")
    sch.bind(column, "threadIdx.y")
    sch.bind(thread, "threadIdx.x")
    sch.set_scope(acc, 0, "local")
    sch.compute_at(acc, thread, preserve_unit_loops=True)
    sch.decompose_reduction(acc, sch.get_loops(acc)[-3])
    if config["unroll"]:
        first = sch.get_loops(acc)[-3]
        sch.annotate(first, "pragma_auto_unroll_max_step", int(config["unroll"]))
        sch.annotate(first, "pragma_unroll_explicit", 0)
    if config["channels"] != 1:
        sch.unroll(channel)
    return sch.mod
