"""Conv2d on a CPU from TensorIR by Schedule primitives, for LLVM.

    xp: x with zeros around it        wt: w as (kh, kw, c, c_out), widened, with channels of zeros up to whole vectors
    parallel ── row of y ── channels ── pixels ──┬── acc: `pixels` × `channels` sums in registers over all taps and channels
                                                └── y: epilogue

Read first: `_schedule`; conv2d_te.py for the program.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil
from typing import TYPE_CHECKING, Any, ClassVar

from kronsched.schedules.base import Launch, Schedule, Scheduled
from kronsched.space import Config, Knob, SearchSpace, load_knobs
from kronsched.workloads.base import Workload
from kronsched.workloads.conv2d import FOUR_BIT, Conv2d
from kronsched.workloads.conv2d_te import conv2d_stages

if TYPE_CHECKING:
    from kronsched.hardware import Device

_SERIAL_FLOPS = 1_000_000  # a parallel region costs some microseconds
_ACCUMULATORS = 12  # vector registers for sums
_LEAST_VECTOR = 8  # channels


class Conv2dCpu(Schedule):
    """Direct convolution in float32 or int32; every dtype and option of Conv2d."""

    name: ClassVar[str] = "conv2d_cpu"
    family: ClassVar[str] = "conv2d"
    device_kind: ClassVar[str] = "cpu"

    def supports(self, workload: Workload, device: Device) -> str | None:
        """None for NHWC."""
        assert isinstance(workload, Conv2d)
        return None if workload.layout == "NHWC" else f"layout={workload.layout}: it reads NHWC"

    def space(self, workload: Workload, device: Device) -> SearchSpace:
        """Knobs of search_spaces/conv2d_cpu.toml, less the values that do not fit this shape."""
        assert isinstance(workload, Conv2d)
        lanes = device.vector_bytes // 4

        def check(config: Config) -> str | None:
            vectors = int(config["pixels"]) * max(1, int(config["channels"]) // lanes)
            if vectors > _ACCUMULATORS:
                return f"pixels={config['pixels']}, channels={config['channels']} need {vectors} vectors of sums"
            return None

        return SearchSpace(self.name, [_fitting(knob, workload) for knob in load_knobs(self.name)], check)

    def default_config(self, workload: Workload, device: Device) -> Config:
        """The most sums that stay in registers, wide in channels first."""
        assert isinstance(workload, Conv2d)
        parallel = workload.flops > _SERIAL_FLOPS
        found = [c.config for c in self.space(workload, device).restrict({"parallel": parallel})]
        return max(found, key=lambda c: (min(16, int(c["channels"])), c["pixels"]))

    def apply(self, workload: Workload, config: Config, device: Device) -> Scheduled:
        """One PrimFunc and one launch; intermediates are allocated inside."""
        assert isinstance(workload, Conv2d)
        mod = _schedule(workload, config)
        return Scheduled(mod, (Launch("main", (*(t.name for t in workload.inputs), workload.output.name)),))

    def features(self, workload: Workload, config: Config, device: Device) -> Mapping[str, float]:
        """Rows of y, registers of sums, roofline time."""
        assert isinstance(workload, Conv2d)
        rows, lanes = workload.n * workload.out_hw[0], device.vector_bytes // 4
        rate = device.peak_gflops.get("float32", 100.0)
        return {
            "rows": float(rows),
            "waves": rows / device.units if config["parallel"] else float(rows),
            "vectors": int(config["pixels"]) * max(1.0, int(config["channels"]) / lanes),
            "roofline_us": max(workload.min_bytes / device.bandwidth_gbs, workload.flops / rate) / 1e3,
        }


def _fitting(knob: Knob, conv: Conv2d) -> Knob:
    """The knob with the values that divide this shape; where channels may be padded, those with less than a vector of zeros."""
    extents = {"pixels": conv.out_hw[1], "channels": conv.c_out // conv.groups if conv.groups < conv.c_out else conv.c_out}
    if knob.name not in extents:
        return knob
    extent, pads = extents[knob.name], knob.name == "channels" and conv.groups == 1 and conv.out_dtype not in FOUR_BIT
    values: tuple[Any, ...] = tuple(v for v in knob.values if extent % int(v) == 0 or (pads and int(v) < extent + _LEAST_VECTOR))
    return Knob(knob.name, values, knob.help)


def _schedule(conv: Conv2d, config: Config) -> Any:
    import tvm
    from tvm import s_tir, te

    channels = int(config["channels"])
    placeholders, stages = conv2d_stages(conv, ceil(conv.c_out / channels) * channels)
    sch = s_tir.Schedule(tvm.IRModule({"main": te.create_prim_func([*placeholders, stages[-1]])}))
    xp, wt, acc, y = (sch.get_sblock(name) for name in ("xp", "wt", "acc", "y"))
    n, i, j, o = sch.get_loops(y)
    row = sch.fuse(n, i)
    jo, ji = sch.split(j, [None, int(config["pixels"])])
    oo, oi = sch.split(o, [None, channels])
    sch.reorder(row, oo, jo, ji, oi)
    sch.compute_at(acc, jo, preserve_unit_loops=True)
    *_, j, o, r, s, c = sch.get_loops(acc)
    sch.reorder(r, s, c, j, o)
    sch.unroll(j)
    if channels > 1:
        sch.vectorize(o)
    if config["parallel"]:
        sch.parallel(row)
        for block in (xp, wt):
            sch.parallel(sch.fuse(*sch.get_loops(block)[:2]))
    init = sch.decompose_reduction(acc, r)
    if channels > 1:
        sch.vectorize(sch.get_loops(init)[-1])
    return sch.mod
