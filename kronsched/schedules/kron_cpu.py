"""Kron-Matmul on a CPU from TensorIR by Schedule primitives, for LLVM.

    parallel ── row block ──┬── group 0: chunk ──┬── step: a tile of outputs in vector registers, p outside ──▶ cache
                            │                    └── step …
                            └── group 1 …

All axes of a chunk are contracted one after another where they stand, and its intermediates stay in cache. A step
    out[a, q, b] = Σp in[a, p, b] · F[p, q]
keeps a tile of outputs in vector registers and walks along p; vectors run along b, which is contiguous, or along q for the last
axis (b = 1). Extents that a tile does not divide get a tail tile of their own (loop partitioning): every shape runs vectorised
and unpadded. With few rows, each group has a parallel loop of its own over chunks of the whole tensor (`nest = "groups"`).

Read first: `_program` (the TensorIR), `_schedule` (the primitives), kron_cpu_plan.py (the arithmetic).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar

from kronsched.dtypes import DTYPES
from kronsched.errors import InvalidConfig
from kronsched.schedules.base import Launch, Schedule, Scheduled
from kronsched.schedules.kron_cpu_plan import (
    CpuPlan,
    Group,
    Step,
    check_registers,
    cpu_features,
    merge_factors,
    plan_cpu,
    register_count,
)
from kronsched.space import Config, Knob, SearchSpace, Value, load_knobs
from kronsched.workloads.base import Workload
from kronsched.workloads.kron import KronMatmul

if TYPE_CHECKING:
    from kronsched.hardware import Device

# A parallel region costs some microseconds: below _SERIAL_FLOPS one core is faster, above _PARALLEL_FLOPS it never is.
_SERIAL_FLOPS = 250_000
_PARALLEL_FLOPS = 4_000_000
_ROW_BLOCK_BYTES = 128 * 1024
_HINT = "pragma_loop_partition_hint"


class KronCpu(Schedule):
    """Fused, vectorised CPU schedule for KronMatmul; float32, float64, and float16 and bfloat16 computed in float32."""

    name: ClassVar[str] = "kron_cpu"
    family: ClassVar[str] = "kron"
    device_kind: ClassVar[str] = "cpu"

    def space(self, workload: Workload, device: Device) -> SearchSpace:
        """Knobs of search_spaces/kron_cpu.toml, less the values that make no difference at this shape."""
        assert isinstance(workload, KronMatmul)
        knobs = [Knob(k.name, _useful(k, workload, device), k.help) for k in load_knobs(self.name)]
        values = {k.name: k.values for k in knobs}

        def check(config: Config) -> str | None:
            try:
                check_registers(plan_cpu(workload, config, device.vector_bytes), register_count(device))
            except InvalidConfig as e:
                return str(e)
            canonical = _canonical(workload, config, values, device)
            idle = next((k for k, v in canonical.items() if config[k] != v), None)
            return (
                None if idle is None else f"{idle}={config[idle]} has no effect here, {idle}={canonical[idle]} is the same kernel"
            )

        return SearchSpace(self.name, knobs, check)

    def default_config(self, workload: Workload, device: Device) -> Config:
        """Row blocks of about 128 KB, 8 vectors of sums, the smallest factors merged; chunks instead when rows are few."""
        assert isinstance(workload, KronMatmul)
        row = max(workload.k_in, workload.k_out) * DTYPES[DTYPES[workload.dtype].accumulate].itemsize
        few = workload.m < device.units and len(workload.factors) > 1 and workload.flops > _PARALLEL_FLOPS
        wanted: dict[str, Any] = {
            "nest": "groups" if few else "rows",
            "chunk": 32768 if few else 0,
            "ctile": 128,
            "rows": min(_ROW_BLOCK_BYTES // row, workload.m // (4 * device.units)),
            "vectors": 1,
            "tq": 8,
            "merge": 8,
            "order": "head",
            "parallel": workload.flops > _SERIAL_FLOPS,
        }
        values = {k.name: k.values for k in self.space(workload, device).knobs}
        config = {name: _nearest(listed, wanted[name]) for name, listed in values.items()}
        return _canonical(workload, config, values, device)

    def apply(self, workload: Workload, config: Config, device: Device) -> Scheduled:
        """One PrimFunc and one launch; intermediates are allocated inside."""
        assert isinstance(workload, KronMatmul)
        plan = plan_cpu(workload, config, device.vector_bytes)
        check_registers(plan, register_count(device))
        sch = _schedule(_program(workload, plan), plan, bool(config["parallel"]))
        args = (*(t.name for t in workload.inputs), workload.output.name)
        return Scheduled(sch.mod, (Launch("main", args),))

    def features(self, workload: Workload, config: Config, device: Device) -> Mapping[str, float]:
        """Parallel blocks, lane use, cache footprint, instructions and traffic of the plan."""
        assert isinstance(workload, KronMatmul)
        return cpu_features(workload, plan_cpu(workload, config, device.vector_bytes), bool(config["parallel"]), device)


def _useful(knob: Knob, w: KronMatmul, device: Device) -> tuple[Value, ...]:
    """The knob's values that can matter at this shape, the first one always among them."""
    several = len(w.factors) > 1
    if knob.name == "parallel":
        return (True,) if device.units > 1 and w.flops > _PARALLEL_FLOPS else knob.values
    if knob.name in ("nest", "order", "chunk", "ctile") and not several:
        return knob.values[:1]
    limit = {"rows": w.m * w.k_in if several else w.m, "tq": max(w.m, *(2 * max(pair) for pair in w.factors))}
    kept = [v for v in knob.values if int(v) <= limit[knob.name]] if knob.name in limit else list(knob.values)
    if knob.name == "merge":
        merged = [merge_factors(w, int(v)) for v in kept]
        kept = [v for n, v in enumerate(kept) if merged[n] not in merged[:n]]
    return tuple(kept) or knob.values[:1]


def _canonical(w: KronMatmul, config: Config, values: Mapping[str, tuple[Value, ...]], device: Device) -> dict[str, Value]:
    """The config with the knobs that most often make no difference at the first value that gives the same plan."""
    out = dict(config)
    for name in ("chunk", "ctile", "order"):
        plan = plan_cpu(w, out, device.vector_bytes)
        same = (v for v in values[name] if v == out[name] or plan_cpu(w, {**out, name: v}, device.vector_bytes) == plan)
        out[name] = next(same, out[name])
    return out


def _nearest(values: tuple[Value, ...], want: Any) -> Value:
    """`want` when listed, else the largest listed number below it, else the first value."""
    if want in values:
        return next(v for v in values if v == want)
    below = [v for v in values if isinstance(v, int) and isinstance(want, int) and v <= want]
    return max(below, default=values[0])


# -- the program ----------------------------------------------------------------------------------------


def _program(w: KronMatmul, plan: CpuPlan) -> Any:
    """The TensorIR. g{i}: factors as contracted; xs: x converted; a{k}: sums of step k in registers; w{k}, y: where they go."""
    from tvm import te

    acc = DTYPES[w.dtype].accumulate
    first = plan.groups[0]
    x = te.placeholder((first.rows, first.outer, first.size_in, first.inner), name="x", dtype=w.dtype)
    given = [te.placeholder(pair, name=f"f{i}", dtype=w.dtype) for i, pair in enumerate(w.factors)]
    factors = [_factor(w, f.members, given, acc, f"g{i}") for i, f in enumerate(plan.factors)]
    source = te.compute(x.shape, lambda *i: x(*i).astype(acc), name="xs") if _stages_input(w, plan) else x
    steps = [(group, step) for group in plan.groups for step in group.steps]
    read = _first_read(source, first.steps[0])
    for k, (group, step) in enumerate(steps):
        shape = (group.rows, group.outer, step.a, step.q, step.b, group.inner)
        tile = te.compute(shape, _sum(read, factors[step.axis], step, acc), name=f"a{k}")
        if k == len(steps) - 1:
            written = te.compute(shape, _converted(tile, w.dtype), name="y")
        else:
            written = te.compute(shape, _converted(tile, acc), name=f"w{k}")
            read = _next_read(written, steps[k], steps[k + 1])
    return te.create_prim_func([x, *given, written])


def _stages_input(w: KronMatmul, plan: CpuPlan) -> bool:
    """Whether 16-bit x is converted by a pass of its own: where the first step would convert element by element."""
    return DTYPES[w.dtype].accumulate != w.dtype and plan.groups[0].steps[0].along == "q"


def _factor(w: KronMatmul, members: tuple[int, ...], given: list[Any], acc: str, name: str) -> Any:
    """A factor as it is read: itself, or its conversion or the Kronecker product of neighbours, made once a call."""
    from tvm import te

    if len(members) == 1 and acc == w.dtype:
        return given[members[0]]
    pairs = [w.factors[i] for i in members]

    def element(p: Any, q: Any) -> Any:
        value = None
        for n, i in enumerate(members):
            below_p, below_q = prod(a for a, _ in pairs[n + 1 :]), prod(b for _, b in pairs[n + 1 :])
            part = given[i][p // below_p % pairs[n][0], q // below_q % pairs[n][1]].astype(acc)
            value = part if value is None else value * part
        return value

    return te.compute((prod(p for p, _ in pairs), prod(q for _, q in pairs)), element, name=name)


def _sum(read: Callable[..., Any], factor: Any, s: Step, acc: str) -> Callable[..., Any]:
    from tvm import te

    p = te.reduce_axis((0, s.p), name="p")

    def body(m: Any, o: Any, a: Any, q: Any, b: Any, c: Any) -> Any:
        return te.sum(read(m, o, a, p, b, c).astype(acc) * factor[p, q], axis=p)

    return body


def _converted(tile: Any, dtype: str) -> Callable[..., Any]:
    return lambda m, o, a, q, b, c: tile[m, o, a, q, b, c].astype(dtype)


def _first_read(x: Any, s: Step) -> Callable[..., Any]:
    return lambda m, o, a, p, b, c: x[m, o, (a * s.p + p) * s.b + b, c]


def _next_read(written: Any, old: tuple[Group, Step], new: tuple[Group, Step]) -> Callable[..., Any]:
    """Reads at (row, o, a, p, b, c) of the new step what the old step wrote as (row, o, a, q, b, c) in its own view.

    Both views are of the same memory, (leading, own axis, trailing). The old axis lies in the trailing part of the new view or in
    the leading one; only that part is taken apart. Dividing a flat index instead leaves divisions by vectors in the code.
    """
    (old_group, s), (group, n) = old, new
    same = old_group is group
    inner_old, inner = (1, 1) if same else (old_group.inner, group.inner)
    size_old, size = s.b * inner_old, n.b * inner  # of the trailing parts

    def read(m: Any, o: Any, a: Any, p: Any, b: Any, c: Any) -> Any:
        leading, trailing = a, b
        if not same:
            leading, trailing = (m if group.rows != old_group.rows else o) * n.a + a, b * inner + c
        if n.axis < s.axis:
            leading = (leading * n.p + p) * (size // (size_old * s.q)) + trailing // (size_old * s.q)
            q, trailing = trailing // size_old % s.q, trailing % size_old
        else:
            between = size_old // (n.p * size)
            trailing = ((leading % between) * n.p + p) * size + trailing
            q, leading = leading // between % s.q, leading // (between * s.q)
        if same:
            return written[m, o, leading, q, trailing, c]
        before, a, b, c = leading // s.a, leading % s.a, trailing // inner_old, trailing % inner_old
        return written[m, before, a, q, b, c] if group.rows == old_group.rows else written[before, 0, a, q, b, c]

    return read


# -- the primitives -------------------------------------------------------------------------------------


def _schedule(func: Any, plan: CpuPlan, parallel: bool) -> Any:
    """Apply the primitives, from the last step back to the first."""
    import tvm
    from tvm import s_tir

    sch = s_tir.Schedule(tvm.IRModule({"main": func}))
    blocks = {sch.get(b).name_hint: b for b in sch.get_child_blocks(sch.get_sblock("root"))}
    k = sum(len(g.steps) for g in plan.groups)
    shared = chunk = None
    for group in reversed(plan.groups):
        for n, step in enumerate(reversed(group.steps)):
            k -= 1
            writer = blocks.get(f"w{k}", blocks["y"])
            if n == 0:
                block, chunk = _chunk(sch, writer, group, shared)
                if not plan.nested:
                    chunk = sch.fuse(*sch.get_loops(writer)[:3])
                if parallel and shared is None:
                    sch.parallel(block if plan.nested else chunk)
                shared = block if plan.nested else None
            else:
                sch.compute_at(writer, chunk, preserve_unit_loops=True)
                r, o, *_ = sch.get_loops(writer)[-6:]
                sch.reorder(o, r)
            at = _tile(sch, step, sch.get_loops(writer)[-5:])
            _accumulate(sch, blocks[f"a{k}"], at, step)
    if "xs" in blocks:
        sch.compute_at(blocks["xs"], chunk, preserve_unit_loops=True)
        _vectorise(sch, sch.fuse(*sch.get_loops(blocks["xs"])[-2:]), plan.lanes)
    for i, factor in enumerate(plan.factors):
        if f"g{i}" in blocks and len(factor.members) == 1:
            _vectorise(sch, sch.get_loops(blocks[f"g{i}"])[-1], plan.lanes)
    return sch


def _chunk(sch: Any, writer: Any, group: Group, shared: Any) -> tuple[Any, Any]:
    """Order the loops of a group's last writer: row block, o, columns (these make a chunk), row, a, q, b, column.

    shared: the row-block loop that all groups live in, when there is one already. Returns the row-block and the columns loop.
    """
    if shared is not None:
        sch.compute_at(writer, shared, preserve_unit_loops=True)
    r, o, a, q, b, c = sch.get_loops(writer)[-6:]
    block = shared
    if block is None:
        block, r = sch.split(r, [None, group.block])
    columns, c = sch.split(c, [None, group.ctile])
    sch.reorder(o, columns, r, a, q, b, c)
    return block, columns


def _tile(sch: Any, step: Step, loops: list[Any]) -> Any:
    """Cut the loops of a writer into register tiles; returns the loop over tiles, at which the sums are computed."""
    r, a, q, b, c = loops
    if step.along == "q":
        r, ri = sch.split(r, [None, step.tr])
        a, ai = sch.split(a, [None, step.ta])
        q, qi = sch.split(q, [None, step.tv])
        sch.reorder(r, a, b, c, q, ri, ai, qi)
        inner = [ri, ai, qi]
        # Not ri: a tail of rows has no constant size. Elsewhere LLVM hoists the test of a row itself.
        hints = [a, q, ai, qi, *([r] if step.tr > 1 else [])]
    else:
        q, qi = sch.split(q, [None, step.tq])
        along, other = (b, c) if step.along == "b" else (c, b)
        v, vi = sch.split(along, [None, step.tv])
        sch.reorder(r, a, other, v, q, qi, vi)
        inner = [qi, vi]
        hints = [q, v, qi, vi]
    for loop in hints:
        sch.annotate(loop, _HINT, 1)
    _unroll_and_vectorise(sch, inner, step.tv)
    return q


def _accumulate(sch: Any, block: Any, at: Any, step: Step) -> None:
    """Compute the sums of a tile in registers: p outside, the tile unrolled and vectorised inside."""
    sch.set_scope(block, 0, "local")
    sch.compute_at(block, at, preserve_unit_loops=True)
    r, o, a, q, b, c, p = sch.get_loops(block)[-7:]
    tile = {"q": [r, o, a, b, c, q], "b": [r, o, a, c, q, b], "c": [r, o, a, b, q, c]}[step.along]
    sch.reorder(p, *tile)
    for loop in tile[1:]:
        sch.annotate(loop, _HINT, 1)
    _unroll_and_vectorise(sch, tile, step.tv)
    sch.decompose_reduction(block, p)


def _unroll_and_vectorise(sch: Any, loops: list[Any], width: int) -> None:
    for loop in loops[:-1]:
        sch.unroll(loop)
    (sch.vectorize if width > 1 else sch.unroll)(loops[-1])


def _vectorise(sch: Any, loop: Any, lanes: int) -> None:
    """Vectorise a copy loop of any extent."""
    outer, inner = sch.split(loop, [None, lanes])
    for part in (outer, inner):
        sch.annotate(part, _HINT, 1)
    sch.vectorize(inner)
