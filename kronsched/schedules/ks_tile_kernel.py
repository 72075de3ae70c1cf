"""The products of a Kronecker-sparse factor by TMA and wgmma: the dense Gemm's program over all slices (i, l), in one launch.

    batch_last     rows of the tile: outputs j, columns: samples.  A = weights, k the fast axis; B = X, samples the fast axis
    batch_first    rows of the tile: samples, columns: outputs j.  A = X, B = weights, both with k as the fast axis

A box of X in batch_last is 64 samples (128 bytes) of 64 steps of k; wgmma reads it transposed ("MN-major").

Read first: `KSTileKernel.place`, `KSTileKernel.fetch`; gemm_dense_wgmma_kernel.py for the rest of the program.
"""

from __future__ import annotations

from typing import Any

from kronsched.schedules.gemm_dense_wgmma_kernel import WgmmaKernel
from kronsched.schedules.gemm_dense_wgmma_mainloop import Ring, evaluate
from kronsched.schedules.gemm_dense_wgmma_plan import PANEL_BYTES, ROW_BYTES
from kronsched.schedules.gemm_dense_wgmma_store import Store
from kronsched.schedules.ks_epilogue import SCRATCH, half_of, word_maker
from kronsched.schedules.ks_tile_plan import ITEM, TensorView, TilePlan

LOAD = "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
STORE = "cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group"
EVICT_FIRST = 0x12F0000000000000
"""The L2 policy, as createpolicy.fractional would make it, for what no kernel of ours reads again."""


def multiply_kernel(plan: TilePlan, name: str) -> Any:
    """The PrimFunc over flat x, w, y, laid out as `plan.data` and `plan.weights` say, then what the epilogue takes."""
    wide = plan.panel_columns
    boxes = {"x": (plan.block_k, plan.block_m), "w": (plan.block_k, plan.block_n), "y": (wide, 64)}
    if not plan.batch_first:
        boxes |= {"x": (wide, plan.block_k), "w": (plan.block_k, plan.block_m)}
    return tile_kernel(KSTileKernel, plan, name, boxes)


def tile_kernel(kind: type[KSTileKernel], plan: TilePlan, name: str, boxes: dict[str, tuple[int, int]]) -> Any:
    """The PrimFunc of a kind of program; boxes: what one TMA instruction moves of each tensor, (fast axis, rows)."""
    from tvm.script.ir_builder import IRBuilder
    from tvm.tirx.script.builder import ir as I

    a, b, c, d = plan.pattern
    dtype = plan.workload.a_dtype
    views = {"x": plan.data(c), "w": plan.weights, "y": plan.data(b)}
    with IRBuilder() as builder:
        with I.prim_func():
            I.func_name(name)
            tensors = {n: I.arg(n, I.buffer((_elements(views[n]),), dtype)) for n in views}
            maps = {n: _tensor_map(tensors[n], n, dtype, views[n], boxes[n]) for n in views}
            sizes = {"bias": a * b * d, "residual": _elements(views["y"])}
            tensors |= {n: I.arg(n, I.buffer((sizes[n],), dtype)) for n in plan.epilogue.tensors}
            I.device_entry()
            with I.attr({"tirx.launch_bounds_min_blocks_per_sm": 1}):
                kind(plan, tensors, tensors["y"], maps).emit()
        return builder.get()


def _elements(view: TensorView) -> int:
    """Elements of the whole tensor: of its slowest axis."""
    return max(extent * stride for extent, stride in zip(view.extents[1:], view.strides, strict=True))


def _tensor_map(tensor: Any, name: str, dtype: str, view: TensorView, box: tuple[int, int]) -> Any:
    """A tensor map with 128B-swizzled boxes of one slice, encoded on the host side."""
    from tvm.script import tirx as T
    from tvm.script.ir_builder import IRBuilder
    from tvm.tirx.script.builder import ir as I

    from kronsched.runtime.tensor_map import ENCODE

    handle = IRBuilder.name(f"{name}_map", I.Bind(T.tvm_stack_alloca("tensormap", 1), var=T.handle("tensormap")))
    strides, l2 = (s * ITEM for s in view.strides), 0 if name == "y" else 3
    I.evaluate(T.call_packed(ENCODE, handle, dtype, 4, tensor.data, *view.extents, *strides, *box, 1, 1, 1, 1, 1, 1, 0, 3, l2, 0))
    return handle


class TileStore(Store):
    """Stores panels to the slice `part` of Y, with an epilogue on the way."""

    plan: TilePlan

    def __init__(self, plan: TilePlan, *parts: Any) -> None:
        """Take the kernel's parts."""
        from tvm.script.ir_builder import IRBuilder
        from tvm.tirx.script.builder import ir as I

        super().__init__(plan, *parts)
        self.row: Any = None
        self.part: Any = None
        if plan.epilogue:
            name = IRBuilder.name
            self.make = word_maker(plan.epilogue, plan.out_dtype)
            self.floats = name("floats", I.alloc_local([SCRATCH], "float32"))
            self.bias = name("bias_words", I.alloc_local([2], "uint32" if plan.batch_first else "float32"))
            self.rest = name("residual_words", I.alloc_local([16 if plan.epilogue.residual else 1], "uint32"))

    def emit(self, row: Any, column: Any, part: Any) -> None:
        """See the base class."""
        self.part = part
        super().emit(row, column, part)

    def _send(self, panel: Any, row: Any, column: Any, part: Any) -> None:
        from tvm.script import tirx as T
        from tvm.tirx.script.builder import ir as I

        d = self.plan.pattern[3]
        place = (T.address_of(self.y_map), column, row, part % d, part // d, panel)
        if self.plan.last:
            I.evaluate(T.ptx[f"{STORE}.L2::cache_hint"](*place, T.uint64(EVICT_FIRST)))
        else:
            I.evaluate(T.ptx[STORE](*place))

    # -- epilogue: word q of 16 × 16 sums is of row half q % 2 and of column half q // 2 ------------------

    def load_row_scales(self, row: Any) -> None:
        """Note the first of the warp's 16 rows; in batch_last they are outputs: load the bias of two of them."""
        from tvm.script import tirx as T
        from tvm.tirx.script.builder import ir as I

        self.row, plan = row, self.plan
        if not plan.epilogue.bias or plan.batch_first:
            return
        _, b, _, d = plan.pattern
        for half in range(2):
            j = T.min(row + (self.lane >> 2) + half * 8, b - 1)
            value = self.tensors["bias"][(self.part // d * b + j) * d + self.part % d]
            I.buffer_store(self.bias, T.Cast("float32", value), [half])

    def _fill(self, panel: int, first: int, column: Any) -> None:
        from tvm.script import tirx as T
        from tvm.tirx.script.builder import ir as I

        if not self.plan.epilogue:
            return super()._fill(panel, first, column)
        for word in range(16 if self.plan.epilogue.residual else 0):
            self._load("residual", self.rest, word, column + word // 4 * 16, word % 2, word % 4 // 2)
        for j in range(4):
            if self.plan.epilogue.bias and self.plan.batch_first:
                for eight in range(2):
                    self._load("bias", self.bias, eight, column + j * 16, 0, eight)
            for q in range(4):
                at = first + j * 8 + 2 * q
                rest = self.rest[4 * j + q if self.plan.epilogue.residual else 0]
                self.make(self.packed, q, self.floats, (self.sums[at], self.sums[at + 1]), self._bias_of(q), rest)
            to = self.shared.ptr_to([self._chunk(panel, self.lane & 15, 2 * j + (self.lane >> 4))])
            I.evaluate(T.ptx["stmatrix.sync.aligned.m8n8.x4.shared.b16"](to, *(self.packed[q] for q in range(4))))
        return None

    def _bias_of(self, q: int) -> tuple[Any, Any]:
        if not self.plan.batch_first:
            return self.bias[q % 2], self.bias[q % 2]
        return half_of(self.bias[q // 2], 0, self.plan.out_dtype), half_of(self.bias[q // 2], 1, self.plan.out_dtype)

    def _load(self, name: str, into: Any, word: int, column: Any, half: int, eight: int) -> None:
        """Two neighbouring columns of the residual, or of the bias of batch_first (with d = 1)."""
        from tvm.script import tirx as T
        from tvm.tirx.script.builder import ir as I

        plan, (a, b, _, d) = self.plan, self.plan.pattern
        row, at = self.row + (self.lane >> 2) + half * 8, column + eight * 8 + (self.lane & 3) * 2
        fine = at < self.w.n
        if name == "bias":
            place = self.part * b + at
        elif plan.batch_first:
            place, fine = (row * a + self.part) * b + at, T.And(fine, row < self.w.m)
        else:
            place, fine = ((self.part // d * b + row) * d + self.part % d) * self.w.n + at, T.And(fine, row < self.w.m)
        source = self.tensors[name].ptr_to([T.Select(fine, place, 0)])
        I.evaluate(T.ptx["ld.global.nc.b32"](into[word], source))


class KSTileKernel(WgmmaKernel):
    """A kernel under construction; `part` is the slice i·d + l."""

    plan: TilePlan
    store: type[Store] = TileStore

    def __init__(self, plan: TilePlan, tensors: dict[str, Any], y: Any, maps: dict[str, Any]) -> None:
        """Take the kernel's parts."""
        super().__init__(plan, tensors, y, maps)
        self.k_major = plan.batch_first
        self.begun = False

    def place(self, n: Any) -> tuple[Any, Any, Any, Any, Any]:
        """(first row, first column, slice, first trip, trips) of this block's n-th unit, in the order of `TilePlan.place`."""
        from tvm.script.ir_builder import IRBuilder
        from tvm.tirx.script.builder import ir as I

        plan, name = self.plan, IRBuilder.name
        unit = name("unit", I.Bind(self.worker + n * plan.workers))
        row, column, part = self._tile(unit)
        row, column = name("row", I.Bind(row * plan.block_m)), name("column", I.Bind(column * plan.block_n))
        part = name("part", I.Bind(part))
        return row, column, part, 0, plan.trips

    def _tile(self, unit: Any) -> tuple[Any, Any, Any]:
        """(row, column, slice) of a unit, in tiles."""
        return self.plan.place(unit)

    def _sync(self) -> None:
        """See the base class; then, before this launch waits for the one before it, ask for the first samples."""
        from tvm.script import tirx as T
        from tvm.tirx.script.builder import ir as I

        super()._sync()
        plan = self.plan
        if plan.prefilled and not self.begun:
            with I.If(self.tx == 0), I.Then():
                place = self.place(0)[:3]
                for s in range(plan.prefilled):
                    full = self._full(s)
                    evaluate(T.ptx.mbarrier.arrive.expect_tx.shared.b64(full, T.uint32(plan.stage_bytes)))
                    self._load_samples(s * plan.stage_bytes, full, place, s * plan.block_k)
        self.begun = True

    def _produce(self) -> None:
        """See the base class; the first stages may lack only their weights."""
        from tvm.script import tirx as T
        from tvm.script.ir_builder import IRBuilder
        from tvm.tirx.script.builder import ir as I

        plan = self.plan
        if not plan.prefilled:
            super()._produce()
            return
        place = self.place(0)[:3]
        for s in range(plan.prefilled):
            self._load_weights(s * plan.stage_bytes, self._full(s), place, s * plan.block_k)
        ring = Ring(plan.stages, 1)
        ring.jump(plan.prefilled)
        with self._units() as n:
            row, column, part, _, trips = self.place(n)
            begin = IRBuilder.name("begin", I.Bind(T.Select(n == 0, plan.prefilled, 0)))
            with I.serial(0, trips - begin) as trip:
                evaluate(T.cuda.mbarrier_wait(self._empty(ring.stage), ring.phase))
                full, at = self._full(ring.stage), ring.stage * plan.stage_bytes
                evaluate(T.ptx.mbarrier.arrive.expect_tx.shared.b64(full, T.uint32(plan.stage_bytes)))
                self.fetch(at, full, row, column, part, (begin + trip) * plan.block_k)
                ring.advance()

    def fetch(self, at: Any, full: Any, row: Any, column: Any, part: Any, k: Any) -> None:
        """Copy what a stage holds: rows first, then columns; in batch_last these come 64 samples at a time."""
        place = row, column, part
        if self.plan.batch_first:
            self._load_samples(at, full, place, k)
        self._load_weights(at, full, place, k)
        if not self.plan.batch_first:
            self._load_samples(at, full, place, k)

    def _load_samples(self, at: Any, full: Any, place: tuple[Any, Any, Any], k: Any) -> None:
        plan, (row, column, part) = self.plan, place
        if plan.batch_first:
            self._load("x", at, full, (k, row), part)
            return
        columns = at + plan.block_m * ROW_BYTES
        for i in range(plan.block_n // plan.panel_columns):
            self._load("x", columns + i * PANEL_BYTES, full, (column + i * plan.panel_columns, k), part)

    def _load_weights(self, at: Any, full: Any, place: tuple[Any, Any, Any], k: Any) -> None:
        plan, (row, column, part) = self.plan, place
        if plan.batch_first:
            self._load("w", at + plan.block_m * ROW_BYTES, full, (k, column), part)
        else:
            self._load("w", at, full, (k, row), part)

    def _load(self, name: str, at: Any, full: Any, place: tuple[Any, Any], part: Any, to_all: bool = False) -> None:
        """Copy a box to byte `at` of this block, or of every block of its cluster."""
        from tvm.script import tirx as T

        d = self.plan.pattern[3]
        operands = (self._at(at), T.address_of(self.maps[name]), *place, part % d, part // d, full)
        if to_all:
            evaluate(T.ptx[f"{LOAD}.multicast::cluster"](*operands, T.uint16(2**self.plan.cluster - 1)))
        else:
            evaluate(T.ptx[LOAD](*operands))
