"""Toy schedules of KronMatmul for the runtime's tests, and made-up devices to compile for."""

from __future__ import annotations

from typing import Any

from kronsched import KronMatmul
from kronsched.hardware import Device, resolve_target
from kronsched.schedules.base import Launch, Schedule, Scheduled
from kronsched.space import Config, Knob, SearchSpace
from kronsched.workloads.base import TensorSpec, Workload

H200 = Device("cuda", "NVIDIA H200", "sm_90a", 132, 4280.0, {}, shared_per_block=232448, present=False)
A100 = Device("cuda", "NVIDIA A100-SXM4-80GB", "sm_80", 108, 1835.0, {}, shared_per_block=166912, present=False)
W = KronMatmul(m=16, factors=[(8, 6), (5, 7)])


def this_cpu() -> Device:
    return resolve_target("cpu")


def names(workload: Workload) -> tuple[str, ...]:
    return (*(t.name for t in workload.inputs), workload.output.name)


def bind(schedule: Any, block: str, threads: int) -> None:
    """One thread an output element, `threads` a block."""
    loops = schedule.get_loops(schedule.get_sblock(block))
    outer, inner = schedule.split(schedule.fuse(*loops[:-1]), [None, threads])
    schedule.bind(outer, "blockIdx.x")
    schedule.bind(inner, "threadIdx.x")


class Toy(Schedule):
    """The program as it is; knob `n` does nothing but tell configs apart."""

    name = "toy_cpu"
    family = "kron"
    device_kind = "cpu"

    def space(self, workload: Workload, device: Device) -> SearchSpace:
        return SearchSpace(self.name, [Knob("n", (1, 2, 3))])

    def default_config(self, workload: Workload, device: Device) -> Config:
        return {"n": 1}

    def apply(self, workload: Workload, config: Config, device: Device) -> Scheduled:
        return Scheduled(workload.program(), (Launch("main", names(workload)),))


class Parallel(Toy):
    """The outer loop of every stage on TVM's thread pool, the inner one vectorised."""

    name = "toy_parallel"

    def apply(self, workload: Workload, config: Config, device: Device) -> Scheduled:
        import tvm

        sch = tvm.s_tir.Schedule(workload.program())
        for block in sch.get_child_blocks(sch.get_sblock("root")):
            loops = sch.get_loops(block)
            spatial = [loop for loop, kind in zip(loops, sch.get(block).iter_vars, strict=True) if int(kind.iter_type) == 0]
            sch.parallel(spatial[0])
            if len(loops) == len(spatial):
                sch.vectorize(spatial[-1])
        return Scheduled(sch.mod, (Launch("main", names(workload)),))


def two_stages(workload: Workload, device: Device) -> Scheduled:
    """Contract the last of two factors into scratch `t`, then the first: two functions, float32."""
    import tvm
    from tvm import te

    (p0, q0), (p1, q1) = workload.factors  # type: ignore[attr-defined]
    m = workload.inputs[0].shape[0]
    x = te.placeholder((m, p0, p1), name="x")
    f1 = te.placeholder((p1, q1), name="f1")
    k1 = te.reduce_axis((0, p1), name="k1")
    t = te.compute((m, p0, q1), lambda r, i, j: te.sum(x[r, i, k1] * f1[k1, j], axis=k1), name="t")
    t_in = te.placeholder((m, p0, q1), name="t")
    f0 = te.placeholder((p0, q0), name="f0")
    k0 = te.reduce_axis((0, p0), name="k0")
    y = te.compute((m, q0, q1), lambda r, i, j: te.sum(t_in[r, k0, j] * f0[k0, i], axis=k0), name="y")
    mod = tvm.IRModule({"first": te.create_prim_func([x, f1, t]), "second": te.create_prim_func([t_in, f0, y])})
    if device.kind == "cuda":
        for func, block in (("first", "t"), ("second", "y")):
            sch = tvm.s_tir.Schedule(tvm.IRModule({"main": mod[func]}))
            bind(sch, block, 32)
            mod[func] = sch.mod["main"]
    launches = (Launch("first", ("x", "f1", "t")), Launch("second", ("t", "f0", "y")))
    return Scheduled(mod, launches, (TensorSpec("t", (m, p0, q1), "float32"),))


class TwoStages(Toy):
    name = "toy_two_stages"

    def apply(self, workload: Workload, config: Config, device: Device) -> Scheduled:
        return two_stages(workload, device)


class TwoStagesCuda(TwoStages):
    name = "toy_two_stages_cuda"
    device_kind = "cuda"


class OneKernel(Toy):
    """One factor, one kernel: a row a block; `stage`: the row of x goes through dynamic shared memory."""

    name = "toy_cuda"
    device_kind = "cuda"

    def default_config(self, workload: Workload, device: Device) -> Config:
        return {"threads": 32, "stage": False}

    def apply(self, workload: Workload, config: Config, device: Device) -> Scheduled:
        import tvm

        sch = tvm.s_tir.Schedule(workload.program())
        y = product = sch.get_sblock("y")
        loops = sch.get_loops(y)
        sch.bind(loops[0], "blockIdx.x")
        _, thread = sch.split(loops[1], [None, config["threads"]])
        sch.bind(thread, "threadIdx.x")
        if workload.output.dtype in ("float16", "bfloat16"):  # y only rounds the float32 product t0
            product = sch.get_sblock("t0")
            sch.compute_at(product, thread)
            sch.set_scope(product, 0, "local")
        if config["stage"]:
            staged = sch.cache_read(product, 0, "shared.dyn")
            sch.compute_at(staged, loops[0])
            _, thread = sch.split(sch.get_loops(staged)[-1], [None, config["threads"]])
            sch.bind(thread, "threadIdx.x")
        return Scheduled(sch.mod, (Launch("main", names(workload)),))
