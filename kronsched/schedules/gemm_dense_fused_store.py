"""The end of a unit of the wgmma Gemm with an epilogue: as gemm_dense_wgmma_store.py, 16 columns at a time.

Panels of int8 are filled by 2-byte stores, which the swizzle spreads over the banks: eight rows' chunks differ.

Read first: `FusedStore._operands`.
"""

from __future__ import annotations

from typing import Any

from kronsched.schedules.gemm_dense_epilogue import PACK
from kronsched.schedules.gemm_dense_fused import Fused
from kronsched.schedules.gemm_dense_wgmma_store import Store

_BATCH = 16


class FusedStore(Store, Fused):
    """Emits the stores of one consumer warpgroup."""

    eights, slots = _BATCH // 8, 3

    def _fill(self, panel: int, first: int, column: Any) -> None:
        """Fill one panel from the sums `first` and on."""
        before = first % (self.plan.block_n // 2) // (_BATCH // 2)  # batches of these rows
        for j in range(self.plan.panel_columns // _BATCH):
            self._operands(before + j, column + _BATCH * j)
            self._emit_batch(panel, first + _BATCH // 2 * j, j)

    def _operands(self, batch: int, column: Any) -> None:
        """Let the slot be that of a batch of 64 rows, whose first column is given; those of later batches are on their way."""
        ahead = self.slots - 1
        for later in range(0 if batch == 0 else ahead, ahead + 1):
            if batch + later < self.plan.block_n // _BATCH:
                self.load((batch + later) % self.slots, column + _BATCH * later, self.eights)
        self.slot = batch % self.slots

    def _direct(self, first: int, row: Any, column: Any, part: Any) -> None:
        """64 rows, pair by pair."""
        from tvm.tirx.script.builder import ir as I

        mine = I.Bind(row + self.warp * 16 + (self.lane >> 2))
        for j in range(self.plan.block_n // 8):
            if j % 2 == 0:
                self._operands(j // 2, column + j * 8)
            self.offset = j % 2 * 2
            at = I.Bind(column + j * 8 + (self.lane & 3) * 2)
            for half in range(2):
                with I.If(mine + 8 * half < self.w.m), I.Then():
                    self.pair(first + 4 * j + 2 * half, mine + 8 * half, at)

    def _emit_batch(self, panel: int, first: int, j: int) -> None:
        """Columns 16 j to 16 j + 15 of a panel from the sums `first` and on."""
        from tvm.script import tirx as T
        from tvm.tirx.script.builder import ir as I

        lane = self.lane
        if self.out in PACK:
            for q in range(4):  # four 8 × 8 matrices
                self.pack(q, first + 2 * q, q // 2 * 2)
            to = self.shared.ptr_to([self._chunk(panel, lane & 15, 2 * j + (lane >> 4))])
            I.evaluate(T.ptx["stmatrix.sync.aligned.m8n8.x4.shared.b16"](to, *(self.packed[q] for q in range(4))))
            return
        for e in range(2):
            for half in range(2):
                row, a = (lane >> 2) + 8 * half, first + 4 * e + 2 * half
                if self.out == "int8":
                    to = self.shared.ptr_to([self._chunk(panel, row, j) + (e * 8 + (lane & 3) * 2)])
                    I.evaluate(T.ptx["st.shared.b16"](to, self.bytes_of(a, 2 * e)))
                else:
                    to = self.shared.ptr_to([self._chunk(panel, row, 4 * j + 2 * e + ((lane & 3) >> 1)) + (lane & 1) * 8])
                    I.evaluate(T.ptx["st.shared.v2.b32"](to, *self.words_of(a, 2 * e)))
