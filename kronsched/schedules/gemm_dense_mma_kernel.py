"""The mma.sync Gemm as a TIRx program: for any shape and any GPU since sm_80.

    for each trip of 128 bytes along k:
        global ─(cp.async, `stages` - 1 trips ahead; zero beyond the ends)─ 128B-swizzled shared ─(ldmatrix)─ mma.m16n8

Rows that are no whole 16-byte chunks, and float8 (widened to float16), are moved element by element instead.

Read first: `_Kernel.emit`.
"""

from __future__ import annotations

from typing import Any

from kronsched.dtypes import DTYPES
from kronsched.schedules.gemm_dense_epilogue import Epilogue
from kronsched.schedules.gemm_dense_fused import Fused
from kronsched.schedules.gemm_dense_mma_plan import ROW_BYTES, MmaPlan
from kronsched.workloads.float8 import FLOAT8, widened
from kronsched.workloads.gemm_dense import dense_inputs
from kronsched.workloads.gemm_epilogue import has_epilogue

_MMA = {
    "float16": "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32",
    "bfloat16": "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32",
    "int8": "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32",
}
_LOAD4 = "ldmatrix.sync.aligned.m8n8.x4.shared.b16"
_COPY = "cp.async.cg.shared.global"
_STEPS = ROW_BYTES // 32


def mma_kernel(plan: MmaPlan, name: str) -> Any:
    """The PrimFunc over the workload's inputs and y."""
    from tvm.script.ir_builder import IRBuilder
    from tvm.tirx.script.builder import ir as I

    w = plan.workload
    with IRBuilder() as builder:
        with I.prim_func():
            I.func_name(name)
            bytes_of = dict.fromkeys(FLOAT8, "uint8")
            tensors = {t.name: I.arg(t.name, I.buffer(t.shape, bytes_of.get(t.dtype, t.dtype))) for t in dense_inputs(w)}
            y = I.arg("y", I.buffer((w.m, w.n), w.out_dtype))
            I.device_entry()
            with I.attr({"tirx.launch_bounds_min_blocks_per_sm": 1}):
                _Kernel(plan, tensors, y).emit()
        return builder.get()


class _Kernel:
    """A kernel under construction."""

    def __init__(self, plan: MmaPlan, tensors: dict[str, Any], y: Any) -> None:
        from tvm.script.ir_builder import IRBuilder
        from tvm.tirx.script.builder import ir as I

        self.plan, self.tensors, self.y = plan, tensors, y
        name = IRBuilder.name
        cta = name("cta", I.cta_id([plan.blocks]))
        self.tx = name("tx", I.thread_id([plan.threads]))
        self.row = name("row", I.Bind(cta % plan.m_tiles * plan.block_m))
        self.column = name("column", I.Bind(cta // plan.m_tiles * plan.block_n))
        self.lane = name("lane", I.Bind(self.tx & 31))
        self.warp_row = name("warp_row", I.Bind((self.tx >> 5) % plan.warps_m * plan.warp_m))
        self.warp_column = name("warp_column", I.Bind((self.tx >> 5) // plan.warps_m * plan.warp_n))
        self.item = DTYPES[plan.staged].itemsize
        self.shared = name("sm", I.alloc_buffer((plan.shared_bytes // self.item,), plan.staged, scope="shared.dyn", align=128))
        self.sums = name("sums", I.alloc_local([plan.sums], "uint32" if plan.staged == "int8" else "float32"))
        self.a = name("a", I.alloc_local([plan.warp_m // 16 * 4], "uint32"))
        self.b = name("b", I.alloc_local([4], "uint32"))

    def emit(self) -> None:
        """The body."""
        from tvm.script import tirx as T
        from tvm.tirx.script.builder import ir as I

        plan = self.plan
        for i in range(plan.sums):
            I.buffer_store(self.sums, T.uint32(0) if plan.staged == "int8" else T.float32(0), [i])
        for s in range(plan.stages - 1):
            if s < plan.trips:
                self._fetch(s, s)
            I.evaluate(T.ptx.cp.async_.commit_group())
        with I.serial(0, plan.trips) as trip:
            I.evaluate(T.ptx.cp.async_.wait_group(plan.stages - 2))
            I.evaluate(T.cuda.cta_sync())  # the stage has arrived, and the one to be filled next was read by all
            ahead = trip + plan.stages - 1
            with I.If(ahead < plan.trips), I.Then():
                self._fetch(ahead, ahead % plan.stages)
            I.evaluate(T.ptx.cp.async_.commit_group())
            stage = I.Bind(trip % plan.stages * plan.stage_bytes)
            for step in range(_STEPS):
                self._multiply(stage, step)
        self._store()

    # -- global to shared ---------------------------------------------------------------------------

    def _fetch(self, trip: Any, stage: Any) -> None:
        """Start copying the rows of x and w of one trip into a stage."""
        plan, w = self.plan, self.plan.workload
        start = stage * plan.stage_bytes
        self._copy(self.tensors["x"], (self.row, plan.block_m, w.m), trip, start)
        self._copy(self.tensors["w"], (self.column, plan.block_n, w.n), trip, start + plan.block_m * ROW_BYTES)

    def _copy(self, source: Any, rows: tuple[Any, int, int], trip: Any, start: Any) -> None:
        """Copy `count` rows from row `first` on, of which there are `extent`: eight threads a row, 16 bytes each."""
        from tvm.tirx.script.builder import ir as I

        first, count, extent = rows
        threads = self.plan.threads
        with I.unroll(0, -(-count * 8 // threads)) as e:
            at = I.Bind(e * threads + self.tx)

            def chunk() -> None:
                line, chunk = I.Bind(at >> 3), I.Bind(at & 7)
                k = I.Bind(trip * self.plan.block_k + chunk * (16 // self.item))
                to = I.Bind((start + line * ROW_BYTES + ((chunk ^ (line & 7)) << 4)) // self.item)
                self._chunk(source, first + line, extent, k, to)

            if count * 8 % threads:
                with I.If(at < count * 8), I.Then():
                    chunk()
            else:
                chunk()

    def _chunk(self, source: Any, line: Any, extent: int, k: Any, to: Any) -> None:
        """16 bytes of a line, zero beyond the ends."""
        from tvm.script import tirx as T
        from tvm.tirx.script.builder import ir as I

        plan, last = self.plan, self.plan.workload.k
        row = T.min(line, extent - 1)
        if plan.by_chunks:
            inside = T.And(line < extent, k < last)
            size = T.Select(inside, T.uint32(16), T.uint32(0))
            I.evaluate(T.ptx[_COPY](self.shared.ptr_to([to]), source.ptr_to([row, T.Select(k < last, k, 0)]), 16, size))
            return
        for i in range(16 // self.item):
            value = source[row, T.min(k + i, last - 1)]
            if plan.workload.a_dtype in FLOAT8:
                value = widened(value, plan.workload.a_dtype)
            zero = T.Cast(plan.staged, 0)
            I.buffer_store(self.shared, T.if_then_else(T.And(line < extent, k + i < last), value, zero), [to + i])

    # -- shared to registers to sums ----------------------------------------------------------------

    def _matrices(self, into: Any, first: int, stage: Any, row: Any, chunk: Any) -> None:
        """Four 8 × 16-byte matrices; the lanes' rows and chunks are their rows."""
        from tvm.script import tirx as T
        from tvm.tirx.script.builder import ir as I

        at = (stage + row * ROW_BYTES + ((chunk ^ (row & 7)) << 4)) // self.item
        I.evaluate(T.ptx[_LOAD4](*(into[first + q] for q in range(4)), self.shared.ptr_to([at])))

    def _multiply(self, stage: Any, step: int) -> None:
        """Products of one 32-byte step of k."""
        from tvm.script import tirx as T
        from tvm.tirx.script.builder import ir as I

        plan, lane = self.plan, self.lane
        rows = plan.warp_m // 16
        for i in range(rows):  # rows of 16: lower and upper half, then the second 16 bytes of each
            self._matrices(self.a, i * 4, stage, self.warp_row + i * 16 + (lane & 15), 2 * step + (lane >> 4))
        w_row = plan.block_m + self.warp_column + (lane & 7) + (lane >> 4) * 8
        for j in range(plan.warp_n // 16):  # two tiles of 8 columns: both 16-byte halves of each
            self._matrices(self.b, 0, stage, w_row + j * 16, 2 * step + ((lane >> 3) & 1))
            for half in range(2):
                for i in range(rows):
                    tile = [self.sums[((i * (plan.warp_n // 8)) + 2 * j + half) * 4 + q] for q in range(4)]
                    a = [self.a[i * 4 + q] for q in range(4)]
                    I.evaluate(T.ptx[_MMA[plan.staged]](*tile, *a, self.b[2 * half], self.b[2 * half + 1], *tile))

    # -- results ------------------------------------------------------------------------------------

    def _store(self) -> None:
        """All sums of the warp, pair by pair."""
        from tvm.tirx.script.builder import ir as I

        plan, m = self.plan, self.plan.workload.m
        kind = Fused if has_epilogue(plan.workload) else Epilogue
        out = kind(plan.workload, self.sums, self.tensors, self.y, self.lane)
        row, column = I.Bind(self.row + self.warp_row), I.Bind(self.column + self.warp_column)
        for i in range(plan.warp_m // 16):
            out.load_row_scales(row + i * 16)
            line = I.Bind(row + i * 16 + (self.lane >> 2))
            for j in range(plan.warp_n // 8):
                out.load_column_scales(column + j * 8, 1)
                for half in range(2):
                    with I.If(line + half * 8 < m), I.Then():
                        index = (i * (plan.warp_n // 8) + j) * 4 + half * 2
                        out.pair(index, line + half * 8, column + j * 8 + (self.lane & 3) * 2)
