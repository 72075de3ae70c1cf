"""The tensor-core weight gradient of a Kronecker-sparse product as a TIRx program. See ks_wgrad_plan.py for the tiling.

    gradient of y, x ── cp.async ── ring of stages ── registers ── mma ── sums of a slice of the samples ── scratch

Batch first: 16-bit values of two samples are joined by prmt, so that features d apart need no transposition. float32 goes through
TF32 three times: with v = hi + lo, v·u ≈ lo·hi + hi·lo + hi·hi, and sums move to a second set every few steps.

Read first: `_Kernel.emit`.
"""

from __future__ import annotations

from typing import Any

from kronsched.schedules.ks_mma_limits import LANES
from kronsched.schedules.ks_wgrad_plan import FLUSH, WgradPlan

_SHARED_LOAD = {4: "ld.shared.b32", 8: "ld.shared.v2.b32", 16: "ld.shared.v4.b32"}


def wgrad_kernel(plan: WgradPlan, name: str, overlap: bool) -> Any:
    """The PrimFunc over the flat g (gradient of y), x and the partial sums p.

    overlap: wait for earlier kernels, and let the next one start, by griddepcontrol (sm_90).
    """
    from tvm.script.ir_builder import IRBuilder
    from tvm.tirx.script.builder import ir as I

    a, b, c, d = plan.pattern
    with IRBuilder() as builder:
        with I.prim_func():
            I.func_name(name)
            g = I.arg("g", I.buffer((plan.batch * a * b * d,), plan.dtype))
            x = I.arg("x", I.buffer((plan.batch * a * c * d,), plan.dtype))
            p = I.arg("p", I.buffer((plan.splits * plan.elements,), "float32"))
            I.device_entry()
            with I.attr({"tirx.launch_bounds_min_blocks_per_sm": plan.min_blocks}):
                _Kernel(plan, (g, x), p, overlap).emit()
        return builder.get()


class _Kernel:
    """A kernel under construction. A "side" is 0 for the gradient, with j, or 1 for x, with k."""

    def __init__(self, plan: WgradPlan, sources: tuple[Any, Any], p: Any, overlap: bool) -> None:
        from tvm.script.ir_builder import IRBuilder
        from tvm.tirx.script.builder import ir as I

        self.plan, self.sources, self.p, self.overlap = plan, sources, p, overlap
        name, bind = IRBuilder.name, I.Bind
        cta = name("cta", I.cta_id([plan.tile_count * plan.splits]))
        self.tx = name("tx", I.thread_id([plan.threads]))
        _, nl, nj, nk = plan.tiles
        jb, kb = plan.extents
        self.cta, tile = cta, cta % plan.tile_count
        self.first_of = (name("j0", bind(tile // nk % nj * jb)), name("k0", bind(tile % nk * kb)))
        self.l0 = name("l0", bind(tile // (nk * nj) % nl * plan.lb))
        self.i = name("i", bind(tile // (nk * nj * nl)))
        part = cta // plan.tile_count
        self.chunk0 = name("chunk0", bind(part * plan.chunks // plan.splits))
        self.count = name("count", bind((part + 1) * plan.chunks // plan.splits - self.chunk0))
        lane = name("lane", bind(self.tx % LANES))
        self.g, self.t = name("lane_g", bind(lane // 4)), name("lane_t", bind(lane % 4))
        wj, wk, wl = plan.warp_of(self.tx // LANES)
        self.warp, self.wl = (name("wj", bind(wj)), name("wk", bind(wk))), name("wl", bind(wl))
        self.shared = name("sm", I.alloc_buffer((plan.shared_bytes // 4,), "uint32", scope="shared.dyn", align=128))
        self.acc = name("acc", I.alloc_local([plan.sums], "float32"))
        self.total = name("total", I.alloc_local([plan.sums], "float32")) if plan.wide else self.acc
        pairs = 1 if plan.first else 2
        self.raw = name("raw", I.alloc_local([max(4, plan.unit * plan.item // 4 * (2 if plan.wide else 4))], "uint32"))
        self.op = [name(f"op{s}", I.alloc_local([2 * pairs * plan.held[s] * plan.lw], "uint32")) for s in range(2)]
        low = (2 * plan.held[s] * plan.lw if plan.wide else 1 for s in range(2))
        self.low = [name(f"low{s}", I.alloc_local([size], "uint32")) for s, size in enumerate(low)]

    def emit(self) -> None:
        """The body."""
        from tvm.script import tirx as T
        from tvm.tirx.script.builder import ir as I

        plan = self.plan
        if self.overlap:
            I.evaluate(T.ptx.griddepcontrol.wait())
        for sums in {id(s): s for s in (self.acc, self.total)}.values():
            for q in range(plan.sums):
                I.buffer_store(sums, T.float32(0), [q])
        for s in range(plan.stages - 1):
            with I.If(s < self.count), I.Then():
                self._fetch(self.chunk0 + s, s)
            I.evaluate(T.ptx.cp.async_.commit_group())
        with I.serial(0, self.count) as it:
            I.evaluate(T.ptx.cp.async_.wait_group(plan.stages - 2))
            I.evaluate(T.cuda.cta_sync())  # the stage has arrived, and the one to be filled next was read by all
            ahead = it + plan.stages - 1
            with I.If(ahead < self.count), I.Then():
                self._fetch(self.chunk0 + ahead, ahead % plan.stages)
            I.evaluate(T.ptx.cp.async_.commit_group())
            stage = I.Bind(it % plan.stages * (plan.stage_bytes // 4))
            for step in range(plan.steps):
                self._operands(stage, step)
            if plan.wide:
                self._flush(it)
        if self.overlap:
            I.evaluate(T.ptx.griddepcontrol.launch_dependents())
        self._store()

    # -- global to shared ---------------------------------------------------------------------------

    def _fetch(self, chunk: Any, stage: Any) -> None:
        """Start copying the samples of a chunk into a stage; zeros beyond the ends."""
        from tvm.tirx.script.builder import ir as I

        plan = self.plan
        for side in range(2):
            start = I.Bind(stage * (plan.stage_bytes // 4) + side * (plan.rows(0) * plan.pitch(0) // 4))
            pieces = plan.row_bytes(side) // plan.copy_bytes(side)
            count = plan.rows(side) * pieces
            with I.unroll(0, -(-count // plan.threads)) as e:
                at = I.Bind(e * plan.threads + self.tx)
                row, piece = I.Bind(at // pieces), I.Bind(at % pieces)
                if count % plan.threads:
                    with I.If(at < count), I.Then():
                        self._copy(side, chunk, start, row, piece)
                else:
                    self._copy(side, chunk, start, row, piece)

    def _copy(self, side: int, chunk: Any, start: Any, row: Any, piece: Any) -> None:
        from tvm.script import tirx as T
        from tvm.tirx.script.builder import ir as I

        plan, size = self.plan, self.plan.copy_bytes(side)
        a, d, extent = plan.pattern[0], plan.pattern[3], plan.pattern[1 + side]
        element = piece * (size // plan.item)
        if plan.first:
            n, at = chunk * plan.bn + row, start + (row * plan.pitch(side) + piece * size) // 4
            if plan.small:
                offset = self.first_of[side] * d + element
                fine = offset < extent * d
            else:
                j, m = self.first_of[side] + element // plan.lb, self.l0 + element % plan.lb
                offset, fine = j * d + m, T.And(j < extent, m < d)
            source = n * (a * extent * d) + self.i * (extent * d) + offset
        else:
            n, j = chunk * plan.bn + element, self.first_of[side] + row
            at = start + row * (plan.pitch(side) // 4) + self._swizzled(row, piece * size // 16) * 4 + piece * size % 16 // 4
            source, fine = ((self.i * extent + j) * d + self.l0) * plan.batch + n, j < extent
        fine = I.Bind(T.And(fine, n < plan.batch))
        copy = f"cp.async.{'cg' if size == 16 else 'ca'}.shared.global"
        near, far = self.shared.ptr_to([at]), self.sources[side].ptr_to([T.Select(fine, source, 0)])
        I.evaluate(T.ptx[copy](near, far, size, T.Select(fine, T.uint32(size), T.uint32(0))))

    def _swizzled(self, row: Any, chunk: Any) -> Any:
        """Batch last: where the 16-byte chunk of a row lies, so that neighbouring rows are in different banks."""
        return chunk ^ ((row & 1) << 2) if self.plan.row_bytes(0) >= 128 else chunk

    # -- shared to registers to sums ----------------------------------------------------------------

    def _operands(self, stage: Any, step: int) -> None:
        """Load the operands of a step, and multiply."""
        if self.plan.first:
            for side in range(2):
                for unit in range(self.plan.held[side] // self.plan.jr):
                    self._load_unit(side, stage, step, unit)
            self._multiply(0)
            return
        for side in range(2):
            self._load_samples(side, stage, step)
        for pair in range(2):
            if self.plan.wide:
                self._split(pair)
            self._multiply(pair)

    def _load_unit(self, side: int, stage: Any, step: int, unit: int) -> None:
        """Batch first: a unit of the lane's samples, and the operands in it."""
        from tvm.script import tirx as T
        from tvm.tirx.script.builder import ir as I

        from kronsched.schedules.ks_mma_parts import half_selector, high_part, low_part

        plan, raw = self.plan, self.raw
        samples, words, load = 2 if plan.wide else 4, plan.unit * plan.item // 4, plan.vector * plan.item
        j = plan.place_in(side, self.warp[side], unit * plan.jr, self.g)
        base = stage + side * (plan.rows(0) * plan.pitch(0) // 4) + (j * plan.lb + self.wl * plan.lw) * plan.item // 4
        base = I.Bind(base + (step * plan.step_n + self.t) * (plan.pitch(side) // 4))
        for q in range(samples):
            for w in range(0, words, load // 4):
                near = self.shared.ptr_to([base + q * plan.pitch(side) + w])  # 4 samples further, in words
                I.evaluate(T.ptx[_SHARED_LOAD[load]](*(raw[q * words + w + z] for z in range(load // 4)), near))
        for e in range(plan.unit):
            r, m = divmod(e, plan.lw)
            to = ((unit * plan.jr + r) * plan.lw + m) * 2
            for h in range(2):
                if plan.wide:
                    I.buffer_store(self.op[side], high_part(raw[h * words + e]), [to + h])
                    I.buffer_store(self.low[side], low_part(raw[h * words + e], self.op[side][to + h]), [to + h])
                else:
                    one, other = raw[2 * h * words + e // 2], raw[(2 * h + 1) * words + e // 2]
                    I.evaluate(T.ptx["prmt.b32"](self.op[side][to + h], one, other, half_selector(e % 2, e % 2)))

    def _load_samples(self, side: int, stage: Any, step: int) -> None:
        """Batch last: 16 bytes of samples of each of the lane's features."""
        from tvm.script import tirx as T
        from tvm.tirx.script.builder import ir as I

        plan, held = self.plan, self.plan.held[side]
        base = stage + side * (plan.rows(0) * plan.pitch(0) // 4)
        for h in range(held):
            row = plan.place_in(side, self.warp[side], h, self.g)
            at = base + row * (plan.pitch(side) // 4) + self._swizzled(row, step * 4 + self.t) * 4
            words = [self.op[side][(z // 2 * held + h) * 2 + z % 2] for z in range(4)]
            I.evaluate(T.ptx["ld.shared.v4.b32"](*words, self.shared.ptr_to([at])))

    def _split(self, pair: int) -> None:
        """Batch last, float32: the operands of a product into high and low parts."""
        from tvm.tirx.script.builder import ir as I

        from kronsched.schedules.ks_mma_parts import high_part, low_part

        for side in range(2):
            op, low, count = self.op[side], self.low[side], 2 * self.plan.held[side]
            for q in range(count):
                I.buffer_store(low, op[pair * count + q], [q])
                I.buffer_store(op, high_part(low[q]), [pair * count + q])
                I.buffer_store(low, low_part(low[q], op[pair * count + q]), [q])

    def _multiply(self, pair: int) -> None:
        """Products of all tiles of the warp, by the operands number `pair`."""
        plan = self.plan
        for m in range(plan.lw):
            for nt in range(plan.nk):
                for mt in range(plan.mj):
                    to = ((mt * plan.nk + nt) * plan.lw + m) * 4
                    if plan.wide:
                        self._product(to, (self.op[0], pair), (self.low[1], 0), mt, nt, m)
                        self._product(to, (self.low[0], 0), (self.op[1], pair), mt, nt, m)
                    self._product(to, (self.op[0], pair), (self.op[1], pair), mt, nt, m)

    def _product(self, to: int, left: tuple[Any, int], right: tuple[Any, int], mt: int, nt: int, m: int) -> None:
        from tvm.script import tirx as T
        from tvm.tirx.script.builder import ir as I

        from kronsched.schedules.ks_mma_parts import MMA

        def words(side: int, operand: tuple[Any, int], held: int) -> list[Any]:
            values, pair = operand
            at = ((pair * self.plan.held[side] + held) * self.plan.lw + m) * 2
            return [values[at], values[at + 1]]

        upper, lower = (words(0, left, 2 * mt + h) for h in range(2))
        sums = [self.acc[to + z] for z in range(4)]
        I.evaluate(T.ptx[MMA[self.plan.dtype]](*sums, upper[0], lower[0], upper[1], lower[1], *words(1, right, nt), *sums))

    def _flush(self, it: Any) -> None:
        """float32: add the sums to those of the second set, after some chunks and after the last."""
        from tvm.script import tirx as T
        from tvm.tirx.script.builder import ir as I

        every = max(1, FLUSH * 8 // self.plan.bn)

        def move() -> None:
            for q in range(self.plan.sums):
                I.buffer_store(self.total, self.total[q] + self.acc[q], [q])
                I.buffer_store(self.acc, T.float32(0), [q])

        if every == 1:
            move()
            return
        with I.If(T.Or(it % every == every - 1, it == self.count - 1)), I.Then():
            move()

    def _store(self) -> None:
        """The sums, 16 bytes at a time, as `WgradPlan.place` has them."""
        from tvm.script import tirx as T
        from tvm.tirx.script.builder import ir as I

        plan = self.plan
        quads = plan.sums // 4
        for q in range(quads):
            at = ((self.cta * quads + q) * plan.threads + self.tx) * 4
            words = (T.reinterpret("uint32", self.total[4 * q + z]) for z in range(4))
            I.evaluate(T.ptx["st.global.v4.b32"](self.p.ptr_to([at]), *words))
