"""Fused Kron-Matmul on CUDA cores, from TensorIR by Schedule primitives.

One launch contracts the axes s…e of a tensor viewed as (O, P_s, …, P_e, C). A block holds `rows` × `ct` of it:

    global ──(xs: cooperative, vectorised, optional)── shared
      └─ r0 ─ registers ─ t ─ t ─ u0 ── shared ── r1 ─ registers ─ t ─ t ─ u1 ── shared … ── y ── global
         └────── exchange group 0 ─────┘        └────── exchange group 1 ───┘

A register stage gives each thread ΠP elements of its axes and contracts them one after another without leaving the register
file, as a radix-64 FFT does. A tile stage (an axis too large for that) accumulates tq × tr outputs a thread along p. Both edges
(O not a multiple of rows, C not of ct) are padded inside the block and guarded at the two ends in global memory. When a stage has
exactly one item a thread, TVM places its output where its input was: the exchange is in place and a row of 8^5 float32
(128 KB) fits one block.

Read first: `_program` (the TensorIR of a launch), `_schedule` (the primitives), kron_plan.py (the arithmetic).
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Mapping
from math import ceil, prod
from typing import TYPE_CHECKING, Any, ClassVar

from kronsched.dtypes import DTYPES
from kronsched.errors import InvalidConfig
from kronsched.schedules.base import Launch, Schedule, Scheduled
from kronsched.schedules.kron_chain_plan import generation
from kronsched.schedules.kron_cuda_space import canonical_config, fitting_knob, plan_features
from kronsched.schedules.kron_overlap import overlapped
from kronsched.schedules.kron_plan import LaunchPlan, chunk_axis, plan_launches
from kronsched.space import Config, SearchSpace, load_knobs
from kronsched.workloads.base import TensorSpec, Workload
from kronsched.workloads.kron import KronMatmul, contract_axis

if TYPE_CHECKING:
    from kronsched.hardware import Device

_SMALL = 1 << 18
"""Elements of x or y up to which a product is bound by launches: then they overlap where the device can do that."""


class KronCudaSimt(Schedule):
    """Fused SIMT schedule for KronMatmul; float32, float64, float16 and bfloat16."""

    name: ClassVar[str] = "kron_cuda_simt"
    family: ClassVar[str] = "kron"
    device_kind: ClassVar[str] = "cuda"

    def space(self, workload: Workload, device: Device) -> SearchSpace:
        """Knobs of search_spaces/kron_cuda_simt.toml, less the values that mean nothing for these factors."""
        assert isinstance(workload, KronMatmul)
        knobs = [fitting_knob(knob, workload) for knob in load_knobs(self.name)]
        values = {knob.name: knob.values for knob in knobs}

        def check(config: Config) -> str | None:
            try:
                plans = plan_launches(workload, config, device.shared_per_block)
            except InvalidConfig as e:
                return str(e)
            canonical = canonical_config(plans, config, values)
            idle = next((k for k, v in canonical.items() if config[k] != v), None)
            return (
                None if idle is None else f"{idle}={config[idle]} has no effect here, {idle}={canonical[idle]} is the same kernel"
            )

        return SearchSpace(self.name, knobs, check)

    def default_config(self, workload: Workload, device: Device) -> Config:
        """Fuse many axes with tiles of about 8,192 elements; falls back to ever smaller launches.

        Where that makes fewer tiles than the device has SMs: smaller tiles, and more threads with less work each. Factors of 16
        or more rows are contracted in blocks of outputs, two axes a launch; of 64 or more, one.
        """
        assert isinstance(workload, KronMatmul)
        space = self.space(workload, device)
        values = {k.name: k.values for k in space.knobs}
        wish: dict[str, Any] = {
            "regs": 64, "grouping": "tail", "order": "tail", "stage_in": "shared", "stage_out": "direct", "threads": 256,
            "vec": 4, "pad": 4, "ctile": 32, "tq": 8, "tr": 1, "unroll": 4096, "fuse": 1, "tile": 512, "factors_in": "shared",
        }  # fmt: skip
        largest, few = max(max(pair) for pair in workload.factors), workload.m * workload.k_in < device.units * 8192
        tiles, fuses = (8192, 32768, 2048, 512), [int(v) for v in values["fuse"]]
        most = max(fuses)
        if few:
            wish["regs"], tiles = 8, (2048, 8192, 32768, 512)
        if largest >= 16:
            wish["regs"], wish["tr"], most = 8, 4, most if few else min(most, 2)
        if largest >= 64:
            wish["tq"], most = 4, 1
        wish = {k: v if v in values[k] else values[k][-1] for k, v in wish.items()}
        for fuse in sorted(fuses, key=lambda v: (v > most, -v)):
            for tile in tiles:
                for factors_in, stage_in in itertools.product(("shared", "global"), ("shared", "direct")):
                    trial = {**wish, "fuse": fuse, "tile": tile, "factors_in": factors_in, "stage_in": stage_in}
                    try:
                        # Half the device's shared memory: the plan's figure is an estimate, and the default must build.
                        plans = plan_launches(workload, trial, device.shared_per_block // 2)
                    except InvalidConfig:
                        continue
                    config = canonical_config(plans, trial, values)
                    if space.invalid(config) is None:
                        return config
        for candidate in space:
            return candidate.config
        raise InvalidConfig(f"no config of {self.name} is valid for {workload.label} on {device.name}")

    def apply(self, workload: Workload, config: Config, device: Device) -> Scheduled:
        """One PrimFunc a launch; scratch tensors between launches."""
        import tvm

        assert isinstance(workload, KronMatmul)
        plans = plan_launches(workload, config, device.shared_per_block)
        funcs, launches, scratch = {}, [], []
        small = workload.m * max(workload.k_in, workload.k_out) <= _SMALL
        overlap = small and generation(device) >= 90
        source = "x"
        for i, plan in enumerate(plans):
            if i == len(plans) - 1:
                target = "y"
            else:
                target = f"s{i}"
                scratch.append(TensorSpec(target, (plan.outer * prod(plan.out_extents) * plan.inner,), workload.dtype))
            func = _program(plan, workload.dtype, source, target, f"_k{i}")
            sch = _schedule(func, plan, config, f"_k{i}")
            name = f"kron_{i}"
            func = sch.mod["main"].with_attr("global_symbol", name)
            funcs[name] = overlapped(func) if overlap else func
            launches.append(Launch(name, (source, *(f"f{j}" for j in range(plan.first, plan.last)), target), overlap))
            source = target
        return Scheduled(tvm.IRModule(funcs), tuple(launches), tuple(scratch))

    def features(self, workload: Workload, config: Config, device: Device) -> Mapping[str, float]:
        """Launches, waves, occupancy, bytes through each memory level, predicted roofline time."""
        assert isinstance(workload, KronMatmul)
        return plan_features(workload, plan_launches(workload, config, device.shared_per_block), device)


def _guarded(source: Any, shape: tuple[int, ...], plan: LaunchPlan, name: str) -> Any:
    """A copy of the block-padded tensor: zeros beyond the edges of the global one."""
    from tvm import te, tirx

    pad_o, pad_c = shape[0] > plan.outer, plan.inner > 1 and shape[-1] > plan.inner

    def body(*i: Any) -> Any:
        value = source(*i)
        zero = tirx.const(0, source.dtype)
        if pad_c:
            value = tirx.if_then_else(i[-1] < plan.inner, value, zero)
        if pad_o:
            value = tirx.if_then_else(i[0] < plan.outer, value, zero)
        return value

    return te.compute(shape, body, name=name)


def _program(plan: LaunchPlan, dtype: str, source: str, target: str, tag: str) -> Any:
    """The TensorIR of one launch as a chain of te.compute stages, named as in the picture above.

    `tag` ends every name: the kernels of a module share one CUDA source, where equal names of shared arrays would clash.
    """
    from tvm import te

    acc = DTYPES[dtype].accumulate
    tail = (plan.inner,) if plan.inner > 1 else ()
    padded_tail = (ceil(plan.inner / plan.ct) * plan.ct,) if tail else ()
    padded_rows = ceil(plan.outer / plan.rows) * plan.rows
    x = te.placeholder((plan.outer, *(p for p, _ in plan.factors), *tail), name=source, dtype=dtype)
    factors = [te.placeholder(f, name=f"f{plan.first + i}", dtype=dtype) for i, f in enumerate(plan.factors)]

    def shape(extent: tuple[int, ...]) -> tuple[int, ...]:
        return (padded_rows, *extent, *padded_tail)

    current = x
    for i, stage in enumerate(plan.stages):
        if i == 0:
            if plan.stage_in or not stage.tile:
                current = _guarded(current, shape(stage.extent), plan, f"xs{tag}" if plan.stage_in else f"r0{tag}")
            else:
                current = _guarded(current, shape(stage.extent), plan, f"g0{tag}")
        if not stage.tile and (i > 0 or plan.stage_in):
            current = te.compute(shape(stage.extent), _identity(current), name=f"r{i}{tag}")
        extent = list(stage.extent)
        for axis in reversed(stage.axes):
            extent[axis] = plan.factors[axis][1]
            current = contract_axis(current, factors[axis], axis + 1, shape(tuple(extent)), acc, f"t{i}_{axis}{tag}")
        last = i == len(plan.stages) - 1
        if not last or plan.stage_out:
            current = te.compute(shape(stage.after), _cast(current, dtype), name=f"u{i}{tag}")
    y = te.compute((plan.outer, *plan.out_extents, *tail), _cast(current, dtype), name=target)
    return te.create_prim_func([x, *factors, y])


def _identity(source: Any) -> Any:
    return lambda *i: source(*i)


def _cast(source: Any, dtype: str) -> Any:
    return lambda *i: source(*i).astype(dtype)


def _schedule(func: Any, plan: LaunchPlan, config: Config, tag: str) -> Any:
    """Apply the primitives, from the last block of the launch back to the first."""
    import tvm
    from tvm import s_tir

    sch = s_tir.Schedule(tvm.IRModule({"main": func}))
    n, tail = len(plan.factors), plan.inner > 1
    names = _block_names(plan)

    def block_of(name: str) -> Any:
        return sch.get_sblock(name + tag)

    for name in names:
        if name[0] == "g":
            sch.compute_inline(block_of(name))
        elif name[0] in "xu":
            sch.set_scope(block_of(name), 0, "shared.dyn")
        elif name[0] in "rt":
            sch.set_scope(block_of(name), 0, "local")
    out = next(b for b in sch.get_child_blocks(sch.get_sblock("root")) if not str(sch.get(b).name_hint).endswith(tag))

    # Blocks: rows of O × ct of C, one grid dimension.
    loops = sch.get_loops(out)
    bo, ro = sch.split(loops[0], [None, plan.rows])
    axes = list(loops[1 : n + 1])
    if tail:
        bc, ci = sch.split(loops[-1], [None, plan.ct])
        sch.reorder(bo, bc, ro, *axes, ci)
        block = sch.fuse(bo, bc)
    else:
        ci, block = None, bo
    sch.bind(block, "blockIdx.x")

    # Every producer first goes under the block loop, while its consumers' loops are still whole: the regions stay exact.
    for name in reversed(names):
        if name[0] != "g":
            sch.compute_at(block_of(name), block, preserve_unit_loops=True)
    last = len(plan.stages) - 1
    if plan.stage_out:
        _cooperative(sch, [ro, *axes, *([ci] if ci is not None else [])], plan.threads, plan.vec_out)
    for i in range(last, -1, -1):
        stage = plan.stages[i]
        if i < last or plan.stage_out:
            u = block_of(f"u{i}")
            at = _deal(sch, u, *_tile_loops(sch, u, n, tail), plan, i)
        else:
            at = _deal(sch, out, ro, axes, ci, plan, i)
        for axis in stage.axes:
            t = block_of(f"t{i}_{axis}")
            # Not one element: TVM's merging of shared buffers (0.27) loses a buffer of that size next to others.
            if config["factors_in"] == "shared" and prod(plan.factors[axis]) > 1:
                f = sch.cache_read(t, 1, "shared.dyn")
                sch.compute_at(f, block, preserve_unit_loops=True)
                _cooperative(sch, sch.get_loops(f)[1:], plan.threads, 1)
            sch.compute_at(t, at, preserve_unit_loops=True)
            _contract(sch, t, at, stage.tile, int(config["unroll"]))
        if not stage.tile:
            r = block_of(f"r{i}")
            sch.compute_at(r, at, preserve_unit_loops=True)
            _register_copy(sch, r, at, plan, i, reading=True)
    if plan.stage_in:
        ro, axes, ci = _tile_loops(sch, block_of("xs"), n, tail)
        _cooperative(sch, [ro, *axes, *([ci] if ci is not None else [])], plan.threads, plan.vec_in)
    pad = int(config["pad"])
    if pad:
        at_axis = chunk_axis(plan.stages, n)
        for name in names:
            if name[0] in "xu":
                chunk = _inner_size(plan, name, at_axis)
                # The stride of the dimension before the chunk becomes chunk + pad, whatever chunk is.
                sch.storage_align(block_of(name), 0, at_axis, chunk, pad)
    return sch


def _block_names(plan: LaunchPlan) -> list[str]:
    names = []
    for i, stage in enumerate(plan.stages):
        if i == 0 and plan.stage_in:
            names.append("xs")
        elif i == 0 and stage.tile:
            names.append("g0")
        if not stage.tile:
            names.append(f"r{i}")
        names += [f"t{i}_{axis}" for axis in reversed(stage.axes)]
        if i < len(plan.stages) - 1 or plan.stage_out:
            names.append(f"u{i}")
    return names


def _inner_size(plan: LaunchPlan, name: str, axis: int) -> int:
    extent = plan.stages[0].extent if name == "xs" else plan.stages[int(name[1:])].after
    return prod(extent[axis:]) * plan.ct


def _tile_loops(sch: Any, block: Any, n: int, tail: bool) -> tuple[Any, list[Any], Any]:
    """(row loop, axis loops, column loop or None) of a block computed at the block loop."""
    loops = sch.get_loops(block)[1:]
    ro, axes = loops[0], list(loops[1 : n + 1])
    return ro, axes, loops[n + 1] if tail else None


def _cooperative(sch: Any, loops: list[Any], threads: int, vec: int) -> None:
    """Deal a copy to all threads of the block, `vec` neighbouring elements at a time."""
    fused = sch.fuse(*loops)
    if vec > 1:
        _, lane, inner = sch.split(fused, [None, threads, vec])
        sch.vectorize(inner)
    else:
        _, lane = sch.split(fused, [None, threads])
    sch.bind(lane, "threadIdx.x")


def _deal(sch: Any, block: Any, ro: Any, axes: list[Any], ci: Any, plan: LaunchPlan, i: int) -> Any:
    """Deal the work items of stage `i` to threads at its writing block; returns the thread loop."""
    stage = plan.stages[i]
    own = [axes[a] for a in stage.axes]
    others = [axes[a] for a in range(len(axes)) if a not in stage.axes]
    inner_rows = None
    if stage.tile:
        qo, qi = sch.split(own[0], [None, stage.tq])
        own = [qi]
        if stage.tr > 1:
            ro, inner_rows = sch.split(ro, [None, stage.tr])
        # Lanes run along the contiguous dimension: columns, else the q tiles, which read the same x.
        item = [ro, *others, qo] if ci is None else [ro, qo, *others, ci]
    else:
        item = [ro, *others] if ci is None else [ro, *others, ci]
    inner = ([inner_rows] if inner_rows is not None else []) + own
    sch.reorder(*item, *inner)
    _, lane = sch.split(sch.fuse(*item), [None, plan.threads])
    sch.bind(lane, "threadIdx.x")
    _register_copy(sch, block, lane, plan, i, reading=False)
    return lane


def _register_copy(sch: Any, block: Any, at: Any, plan: LaunchPlan, i: int, reading: bool) -> None:
    """Unroll a copy between registers and memory; vectorise its last loop where that is contiguous."""
    loops = _loops_below(sch, block, at)
    if not loops:
        return
    stage = plan.stages[i]
    holds_last = len(plan.factors) - 1 in stage.axes and plan.inner == 1
    vec = plan.vec_in if reading else plan.vec_out
    extent = int(sch.get(loops[-1]).extent)
    if holds_last and vec > 1 and extent % vec == 0 and not stage.tile:
        if extent > vec:
            outer, inner = sch.split(loops[-1], [None, vec])
            loops = [*loops[:-1], outer]
        else:
            inner, loops = loops[-1], loops[:-1]
        sch.vectorize(inner)
    for loop in loops:
        _unroll(sch, loop, 4096)


def _contract(sch: Any, block: Any, at: Any, tile: bool, unroll: int) -> None:
    """Order and unroll the loops of one contraction in registers."""
    from tvm import s_tir

    loops = _loops_below(sch, block, at)
    if tile:
        reduce = loops[-1]
        sch.reorder(reduce, *loops[:-1])
        # Work items that do not divide evenly among the threads have no affine index; then the initialisation stays in the loop.
        with contextlib.suppress(s_tir.ScheduleError):
            sch.decompose_reduction(block, reduce)
        for loop in _loops_below(sch, block, at)[1:]:
            _unroll(sch, loop, 4096)
        return
    for loop in loops:
        _unroll(sch, loop, unroll)


def _unroll(sch: Any, loop: Any, steps: int) -> None:
    """Ask for `#pragma unroll` in the source instead of exploding the loop in the IR."""
    if steps and int(sch.get(loop).extent) > 1:
        sch.annotate(loop, "pragma_auto_unroll_max_step", steps)
        sch.annotate(loop, "pragma_unroll_explicit", 0)


def _loops_below(sch: Any, block: Any, at: Any) -> list[Any]:
    """The loops between a thread loop and a block computed at it."""
    loops = sch.get_loops(block)
    depth = len(sch.get_loops(block)) if at is None else next(k for k, lp in enumerate(loops) if sch.get(lp).same_as(sch.get(at)))
    return list(loops[depth + 1 :])
