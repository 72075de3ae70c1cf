"""One kernel of the tensor-core Kron-Matmul as a TIRx program.

    factors ─(once a block: Kronecker products, rounded, in fragment order)─ shared
    for each tile of a persistent block:
        global ─(cp.async, swizzled; the next tile while this one is worked on when stages = 2)─ shared
        for each step:  shared ─ mma fragments ─ accumulators ─ shared        (kron_mma_steps.py; a barrier after each)
        shared ─(16-byte chunks)─ global,  or the last step straight from the accumulators

Edges (outer not a multiple of rows, inner not of ct, lines not of 8 elements) are zero in the tile and guarded in global memory.
Where lines are not whole 16-byte chunks, elements are moved one at a time.

Read first: `program`.
"""

from __future__ import annotations

from math import ceil
from typing import Any

from kronsched.schedules.kron_mma_kernel import HALF_ULP, Kernel, evaluate, tf32_parts, total
from kronsched.schedules.kron_mma_layout import CHUNK_BYTES, factor_element, swizzle
from kronsched.schedules.kron_mma_operands import StepOperands
from kronsched.schedules.kron_mma_plan import Axis, LaunchPlan, Step
from kronsched.schedules.kron_mma_steps import StepEmitter

Pair = tuple[int, int]

_UNROLL_COPY = 8
"""Chunks of a copy that a thread has in one loop body."""


def program(
    plan: LaunchPlan,
    dtype: str,
    name: str,
    source: str,
    target: str,
    factors: tuple[tuple[int, int], ...],
    sizes: tuple[int, int],
) -> Any:
    """The PrimFunc of a launch: parameters `source`, f<first> …, `target`, flat, of the tensors' element type.

    source = target, for square factors: in place, the parameters are f<first> …, `target`. A tile is read before it is written.
    factors: (P, Q) of the launch's factors.  sizes: elements of source and target.
    """
    from tvm.script.ir_builder import IRBuilder
    from tvm.tirx.script.builder import ir as I

    with IRBuilder() as builder:
        with I.prim_func():
            I.func_name(name)
            x = I.arg(source, I.buffer((sizes[0],), dtype)) if source != target else None
            fs = [I.arg(f"f{plan.first + i}", I.buffer((p * q,), dtype)) for i, (p, q) in enumerate(factors)]
            y = I.arg(target, I.buffer((sizes[1],), dtype))
            I.device_entry()
            with I.attr({"tirx.launch_bounds_min_blocks_per_sm": plan.blocks}):
                _body(plan, dtype, y if x is None else x, fs, y, factors)
        return builder.get()


def _body(plan: LaunchPlan, dtype: str, x: Any, fs: list[Any], y: Any, shapes: tuple[Pair, ...]) -> None:
    from tvm.script import tirx as T
    from tvm.script.ir_builder import IRBuilder
    from tvm.tirx.script.builder import ir as I

    sizes = [StepOperands(plan, step).registers() for step in plan.steps]
    k = Kernel(plan, dtype, {name: max(4, *(s[name] for s in sizes)) for name in sizes[0]})
    copy = Copies(k)
    copy.read(x, k.block, k.base)
    evaluate(T.ptx.cp.async_.commit_group())
    for step in plan.steps:
        _build_factor(k, step, plan.axes[step.axis], fs, shapes)
    stage_bytes = plan.in_chunks * CHUNK_BYTES
    with I.serial(0, (total(plan) - k.block + plan.grid - 1) // plan.grid) as n:
        tile = IRBuilder.name("tile", I.Bind(k.block + n * plan.grid))
        if plan.stages == 2:
            k.source = IRBuilder.name("source", I.Bind(k.base + T.Cast("uint32", (n & 1) * stage_bytes)))
            with I.If(tile + plan.grid < total(plan)), I.Then():
                copy.read(x, tile + plan.grid, k.base + T.Cast("uint32", (1 - (n & 1)) * stage_bytes))
            evaluate(T.ptx.cp.async_.commit_group())
        evaluate(T.ptx.cp.async_.wait_group(plan.stages - 1))
        k.sync()

        def next_tile() -> None:
            with I.If(tile + plan.grid < total(plan)), I.Then():
                copy.read(x, tile + plan.grid, k.base)
            evaluate(T.ptx.cp.async_.commit_group())

        for step in plan.steps[:-1]:
            StepEmitter(k, step).emit()
            k.sync()
        last = plan.steps[-1]
        # With one stage and every result in registers, the next tile is fetched while this one's results are stored.
        ahead = plan.direct and plan.stages == 1 and StepOperands(plan, last).rounds == 1
        store = copy.direct(y, tile) if plan.direct else None
        StepEmitter(k, last, store, next_tile if ahead else None).emit()
        if not ahead:
            k.sync()
        if not plan.direct:
            copy.write(y, tile, last.dst)
            k.sync()
        if plan.stages == 1 and not ahead:
            next_tile()
    evaluate(T.ptx.cp.async_.wait_group(0))


def _build_factor(k: Kernel, step: Step, axis: Axis, fs: list[Any], shapes: tuple[Pair, ...]) -> None:
    """Write the (merged) factor of a step to shared memory in fragment order, zero beyond its edges."""
    from tvm.script import tirx as T
    from tvm.tirx.script.builder import ir as I

    plan = k.plan
    parts = 2 if plan.early else 1
    start = 4 * (plan.stages * plan.in_chunks + plan.work_chunks) + step.fragments * parts
    operands = StepOperands(plan, step)
    members = [(fs[i - plan.first], shapes[i - plan.first]) for i in range(axis.first, axis.last)]

    def value(p: Any, q: Any) -> Any:
        result: Any = None
        below_p, below_q = axis.p, axis.q
        for buffer, (fp, fq) in members:
            below_p, below_q = below_p // fp, below_q // fq
            element = T.Cast("float32", buffer[p // below_p % fp * fq + q // below_q % fq])
            result = element if result is None else result * element
        return T.if_then_else(T.And(p < axis.p, q < axis.q), result, T.float32(0))

    def store(word: Any) -> None:
        p, q = factor_element(word, step.factor_q_tiles, plan.item, operands.k_bits, operands.q_bits)
        if plan.item == 2:
            evaluate(T.ptx[k.pack](k.r[0], value(p + 1, q), value(p, q)))
            I.buffer_store(k.shared, k.r[0], [start + word])
        elif parts == 2:
            high, low = tf32_parts(value(p, q))
            I.buffer_store(k.shared, high, [start + word])
            I.buffer_store(k.shared, low, [start + step.words + word])
        else:
            bits = T.reinterpret("uint32", value(p, q))
            if plan.products == 1:
                bits = bits + T.uint32(HALF_ULP)
            I.buffer_store(k.shared, bits, [start + word])

    rounds = step.words // plan.threads
    with I.serial(0, ceil(step.words / plan.threads)) as n:
        word = n * plan.threads + k.tx
        with k.guarded([] if rounds * plan.threads == step.words else [word < step.words]):
            store(word)


class Copies:
    """Moves tiles between global memory and the swizzled tile in shared memory."""

    def __init__(self, kernel: Kernel) -> None:
        """Fix the geometry of the launch's tiles."""
        self.k, self.plan = kernel, kernel.plan
        self.chunk = 16 // self.plan.item

    def _corner(self, tile: Any, after: bool) -> tuple[Any, Any]:
        """(first line, first column) of a tile in the global tensor."""
        plan = self.plan
        lines, _, _ = plan.lines(after)
        across = plan.tile_grid[1]
        if across == 1:
            return tile * lines, 0
        return tile // across * lines, tile % across * plan.ct

    def _each(self, count: int, body: Any) -> None:
        """body(i) for all i < count, dealt to the threads of the block."""
        from tvm.tirx.script.builder import ir as I

        self.k.name_lanes()
        threads, tx = self.plan.threads, self.k.tx
        full = count // threads
        unroll = min(full, _UNROLL_COPY)
        if unroll and full > unroll:
            with I.serial(0, full // unroll) as n:
                for e in range(unroll):
                    body((n * unroll + e) * threads + tx)
        else:
            unroll = max(unroll, 1)
            for e in range(full):
                body(e * threads + tx)
        for e in range(full // unroll * unroll, full) if full > unroll else []:
            body(e * threads + tx)
        if full * threads < count:
            with I.If(full * threads + tx < count), I.Then():
                body(full * threads + tx)

    def _valid(self, line: Any, column: Any, line0: Any, after: bool) -> list[Any]:
        """Guards of an element of a tile; `column` counts from the start of the line in global memory."""
        plan = self.plan
        _, length, chunks = plan.lines(after)
        guards = []
        if plan.outer % plan.rows:
            guards.append(line0 + line < plan.all_lines(after))
        if length % (chunks * self.chunk):
            guards.append(column < length)
        return guards

    def read(self, x: Any, tile: Any, base: Any) -> None:
        """Start copying a tile into the stage at byte address `base`; zeros beyond the edges."""
        from tvm.script import tirx as T
        from tvm.tirx.script.builder import ir as I

        plan, k = self.plan, self.k
        lines, length, chunks = plan.lines(after=False)
        line0, column0 = self._corner(tile, after=False)
        if length % self.chunk == 0:

            def move(i: Any) -> None:
                line, column = i // chunks, column0 + i % chunks * self.chunk
                guards = self._valid(line, column, line0, after=False)
                to = base + T.Cast("uint32", swizzle(i, plan.in_chunks) * CHUNK_BYTES)
                offset = (line0 + line) * length + column
                if not guards:
                    evaluate(T.ptx["cp.async.cg.shared.global"](to, x.ptr_to([offset]), 16))
                    return
                inside = _all(guards)
                size = T.Select(inside, T.uint32(16), T.uint32(0))
                evaluate(T.ptx["cp.async.cg.shared.global"](to, x.ptr_to([T.Select(inside, offset, 0)]), 16, size))

            self._each(lines * chunks, move)
            return
        bits = 8 * plan.item

        def element(i: Any) -> None:
            line, inside_line = i // (chunks * self.chunk), i % (chunks * self.chunk)
            guards = self._valid(line, column0 + inside_line, line0, after=False)
            to = base + T.Cast("uint32", swizzle(i // self.chunk, plan.in_chunks) * CHUNK_BYTES + i % self.chunk * plan.item)
            value = _bits(x, (line0 + line) * length + column0 + inside_line, bits)
            if guards:
                value = T.if_then_else(_all(guards), value, T.Cast(f"uint{bits}", 0))
            evaluate(T.ptx[f"st.shared.b{bits}"](to, value))

        count = lines * chunks * self.chunk
        with I.serial(0, ceil(count / plan.threads)) as n:
            i = n * plan.threads + k.tx
            with k.guarded([i < count] if count % plan.threads else []):
                element(i)

    def write(self, y: Any, tile: Any, buffer: int) -> None:
        """Copy the tile in a buffer to global memory."""
        from tvm.script import tirx as T
        from tvm.tirx.script.builder import ir as I

        plan, k = self.plan, self.k
        lines, length, chunks = plan.lines(after=True)
        line0, column0 = self._corner(tile, after=True)
        base, size = k.buffer(buffer)
        if length % self.chunk == 0:

            def move(i: Any) -> None:
                line, column = i // chunks, column0 + i % chunks * self.chunk
                with k.guarded(self._valid(line, column, line0, after=True)):
                    k.load4(k.r, 0, base + T.Cast("uint32", swizzle(i, size) * CHUNK_BYTES))
                    to = y.ptr_to([(line0 + line) * length + column])
                    evaluate(T.ptx["st.global.v4.b32"](to, *[k.r[e] for e in range(4)]))

            self._each(lines * chunks, move)
            return
        width = chunks * self.chunk
        start = self._word_start(buffer)

        def element(i: Any) -> None:
            line, inside = i // width, i % width
            with k.guarded([*self._valid(line, column0 + inside, line0, after=True)]):
                word = start + swizzle(i // self.chunk, size) * 4 + i % self.chunk * plan.item // 4
                value = k.shared[word]
                if plan.item == 2:
                    value = T.Cast("uint16", (value >> T.Cast("uint32", (i & 1) * 16)) & T.uint32(0xFFFF))
                I.buffer_store(y, T.reinterpret(k.dtype, value), [(line0 + line) * length + column0 + inside])

        count = lines * width
        with I.serial(0, ceil(count / plan.threads)) as n:
            i = n * plan.threads + k.tx
            with k.guarded([i < count] if count % plan.threads else []):
                element(i)

    def _word_start(self, buffer: int) -> Any:
        """First 32-bit word of a buffer in shared memory."""
        from tvm.script import tirx as T

        base, _ = self.k.buffer(buffer)
        return T.Cast("int32", (base - self.k.base) >> T.uint32(2))

    def direct(self, y: Any, tile: Any) -> Any:
        """A store of the last step straight to global memory: see `StepEmitter`."""
        plan, k = self.plan, self.k
        _, length, chunks = plan.lines(after=True)
        line0, column0 = self._corner(tile, after=True)

        def store(lane: Any, fixed: int, word: Any, acc: list[int]) -> None:
            line, column = (lane // chunks + fixed // chunks), column0 + (lane % chunks + fixed % chunks) * self.chunk
            guards = self._valid(line, column, line0, after=True)
            offset = (line0 + line) * length + column + word * 4 // plan.item
            with k.guarded(guards):
                k.store(y.ptr_to([offset]), acc, shared=False)

        return store


def _all(conditions: list[Any]) -> Any:
    from tvm.script import tirx as T

    result = conditions[0]
    for other in conditions[1:]:
        result = T.And(result, other)
    return result


def _bits(buffer: Any, at: Any, bits: int) -> Any:
    from tvm.script import tirx as T

    return T.reinterpret(f"uint{bits}", buffer[at])
