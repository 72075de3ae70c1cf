"""The end of a unit of the wgmma Gemm: sums ─ scaled, rounded ─ global memory.

    TMA      each warpgroup, for each 64 rows:  sums ─(stmatrix, or 8-byte stores of int32)─ panels of 64 rows × 128 bytes, 128B
             swizzle ─(TMA, which leaves out what lies beyond Y)─ Y
    direct   pairs of neighbouring columns straight from registers, where rows of Y do not start on 16 bytes, or partial sums

Read first: `Store.emit`; gemm_dense_epilogue.py for where sums are.
"""

from __future__ import annotations

from typing import Any

from kronsched.schedules.gemm_dense_epilogue import Epilogue
from kronsched.schedules.gemm_dense_wgmma_plan import PANEL_BYTES, DensePlan

STORE = "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group"


class Store(Epilogue):
    """Emits the stores of one consumer warpgroup.

    group: its number.  panels: first byte of all staging panels in shared memory.
    """

    def __init__(
        self,
        plan: DensePlan,
        tx: Any,
        group: Any,
        shared: Any,
        panels: int,
        sums: Any,
        tensors: dict[str, Any],
        y: Any,
        y_map: Any,
    ) -> None:
        """Take the kernel's parts."""
        from tvm.script.ir_builder import IRBuilder
        from tvm.tirx.script.builder import ir as I

        name = IRBuilder.name
        super().__init__(plan.workload, sums, tensors, y, name("lane", I.Bind(tx & 31)))
        self.plan, self.group, self.shared, self.y_map = plan, group, shared, y_map
        self.thread = name("thread", I.Bind(tx & 127))
        self.warp = name("warp", I.Bind(self.thread >> 5))
        self.panels = panels + group * (plan.span * PANEL_BYTES)

    def emit(self, row: Any, column: Any, part: Any) -> None:
        """Store all sums of the warpgroup: row, column: its first ones in Y; part: which range of k."""
        plan = self.plan
        for m in range(plan.rows):
            first = m * (plan.block_n // 2)
            self.load_row_scales(row + m * 64 + self.warp * 16)
            if plan.span:
                self._by_tma(first, row + m * 64, column, part)
            else:
                self._direct(first, row + m * 64, column, part)

    def finish(self) -> None:
        """Wait until everything is written."""
        from tvm.script import tirx as T
        from tvm.tirx.script.builder import ir as I

        if self.plan.span:
            with I.If(self.thread == 0), I.Then():
                I.evaluate(T.ptx.cp.async_.bulk.wait_group(0))

    # -- by TMA -------------------------------------------------------------------------------------

    def _by_tma(self, first: int, row: Any, column: Any, part: Any) -> None:
        """64 rows: `span` panels at a time through shared memory."""
        from tvm.script import tirx as T
        from tvm.tirx.script.builder import ir as I

        plan = self.plan
        columns, span = plan.panel_columns, plan.span
        for batch in range(plan.block_n // columns // span):
            with I.If(self.thread == 0), I.Then():  # the panels' last content has left
                I.evaluate(T.ptx.cp.async_.bulk.wait_group.read(0))
            self._sync()
            for p in range(span):
                at = batch * span + p
                self._fill(p, first + at * (columns // 2), column + at * columns)
            I.evaluate(T.ptx.fence.proxy.async_.shared__cta())
            self._sync()
            with I.If(self.thread == 0), I.Then():
                for p in range(span):
                    start = column + (batch * span + p) * columns
                    panel = self.shared.ptr_to([self.panels + p * PANEL_BYTES])
                    with I.If(T.And(start < self.w.n, row < self.w.m)), I.Then():
                        self._send(panel, row, start, part)
                I.evaluate(T.ptx.cp.async_.bulk.commit_group())

    def _send(self, panel: Any, row: Any, column: Any, part: Any) -> None:
        """One thread copies a panel to Y."""
        from tvm.script import tirx as T
        from tvm.tirx.script.builder import ir as I

        I.evaluate(T.ptx[STORE](T.address_of(self.y_map), column, row, panel))

    def _sync(self) -> None:
        """A barrier of the warpgroup."""
        from tvm.script import tirx as T
        from tvm.tirx.script.builder import ir as I

        I.evaluate(T.ptx.bar.sync(T.Cast("uint32", self.group + 1), T.uint32(128)))

    def _chunk(self, panel: int, row: Any, chunk: Any) -> Any:
        """First byte of a 16-byte chunk of a panel: the 128B swizzle."""
        return self.panels + panel * PANEL_BYTES + (self.warp * 16 + row) * 128 + ((chunk ^ (row & 7)) << 4)

    def _fill(self, panel: int, first: int, column: Any) -> None:
        """Fill one panel from the sums `first` and on."""
        from tvm.script import tirx as T
        from tvm.tirx.script.builder import ir as I

        lane = self.lane
        if self.plan.out_dtype == "int32":
            for j in range(4):  # 8 columns are two chunks
                for half in range(2):
                    at = self._chunk(panel, (lane >> 2) + 8 * half, 2 * j + ((lane & 3) >> 1)) + (lane & 1) * 8
                    a = first + 4 * j + 2 * half
                    to = self.shared.ptr_to([at])
                    I.evaluate(T.ptx["st.shared.v2.b32"](to, self.sums[a], self.sums[a + 1]))
            return
        for j in range(4):  # 16 columns: four 8 × 8 matrices
            self.load_column_scales(column + j * 16, 2)
            for q in range(4):
                self.pack(q, first + j * 8 + 2 * q, q // 2 * 2)
            to = self.shared.ptr_to([self._chunk(panel, lane & 15, 2 * j + (lane >> 4))])
            I.evaluate(T.ptx["stmatrix.sync.aligned.m8n8.x4.shared.b16"](to, *(self.packed[q] for q in range(4))))

    # -- direct -------------------------------------------------------------------------------------

    def _direct(self, first: int, row: Any, column: Any, part: Any) -> None:
        """64 rows, pair by pair."""
        from tvm.tirx.script.builder import ir as I

        mine = I.Bind(row + self.warp * 16 + (self.lane >> 2))
        for j in range(self.plan.block_n // 8):
            at = I.Bind(column + j * 8 + (self.lane & 3) * 2)
            self.load_column_scales(column + j * 8, 1)
            for half in range(2):
                with I.If(mine + 8 * half < self.w.m), I.Then():
                    self.pair(first + 4 * j + 2 * half, mine + 8 * half, at, part)
