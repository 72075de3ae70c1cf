"""Sums of a dense Gemm on their way out of registers: scaled, rounded, stored pair by pair. Shared by its CUDA schedules.

The m16n8 shapes of mma and wgmma leave a thread, for every 16 rows and 8 columns, four sums: rows g and g + 8, columns 2t and
2t + 1, with g = lane / 4, t = lane % 4.

Read first: `Epilogue.pair`.
"""

from __future__ import annotations

from typing import Any

from kronsched.workloads.gemm import Gemm
from kronsched.workloads.gemm_dense import has_scales

PACK = {"float16": "cvt.rn.f16x2.f32", "bfloat16": "cvt.rn.bf16x2.f32"}


class Epilogue:
    """Emits what happens to a thread's sums.

    sums: the accumulators, float32 (int8: uint32).  tensors: x_scale and w_scale among them where there are any.  y: the output,
    or partial sums (split, m, n) that are stored as they are.
    """

    def __init__(self, w: Gemm, sums: Any, tensors: dict[str, Any], y: Any, lane: Any) -> None:
        """Take the kernel's parts."""
        from tvm.script.ir_builder import IRBuilder
        from tvm.tirx.script.builder import ir as I

        self.w, self.sums, self.tensors, self.y, self.lane = w, sums, tensors, y, lane
        self.partial = len(y.shape) == 3
        self.scaled = has_scales(w) and not self.partial
        name = IRBuilder.name
        self.packed = name("packed", I.alloc_local([4], "uint32"))
        if self.scaled:
            self.row_scales = name("row_scales", I.alloc_local([2], "float32"))
            self.column_scales = name("column_scales", I.alloc_local([4], "float32"))

    # -- scales -------------------------------------------------------------------------------------

    def load_row_scales(self, row: Any) -> None:
        """Scales of rows g and g + 8 of the 16 from `row` on."""
        from tvm.script import tirx as T
        from tvm.tirx.script.builder import ir as I

        if self.scaled:
            for half in range(2):
                at = T.min(row + (self.lane >> 2) + half * 8, self.w.m - 1)
                I.buffer_store(self.row_scales, self.tensors["x_scale"][at], [half])

    def load_column_scales(self, column: Any, eights: int) -> None:
        """Scales of the thread's two columns in one or two groups of 8 from `column` on."""
        from tvm.script import tirx as T
        from tvm.tirx.script.builder import ir as I

        if self.scaled:
            for i in range(2 * eights):
                at = T.min(column + (self.lane & 3) * 2 + i // 2 * 8 + i % 2, self.w.n - 1)
                I.buffer_store(self.column_scales, self.tensors["w_scale"][at], [i])

    # -- values -------------------------------------------------------------------------------------

    def value(self, index: int, scale: int) -> Any:
        """One sum as float32, scaled by its row's scale and one of the loaded columns'."""
        from tvm.script import tirx as T

        value = self.sums[index]
        if not self.scaled:
            return value
        if self.w.a_dtype == "int8":
            value = T.Cast("float32", T.reinterpret("int32", value))
        return value * self.row_scales[index % 4 // 2] * self.column_scales[scale]

    def pack(self, to: int, index: int, scale: int) -> None:
        """Two neighbouring columns, rounded, in one register."""
        from tvm.script import tirx as T
        from tvm.tirx.script.builder import ir as I

        high, low = self.value(index + 1, scale + 1), self.value(index, scale)
        I.evaluate(T.ptx[PACK[str(self.y.dtype)]](self.packed[to], high, low))

    # -- stores -------------------------------------------------------------------------------------

    def pair(self, index: int, line: Any, column: Any, part: Any = 0) -> None:
        """Store two neighbouring columns of a line inside y; they may lie beyond its last column."""
        from tvm.script import tirx as T
        from tvm.tirx.script.builder import ir as I

        n, dtype = self.w.n, str(self.y.dtype)
        place = [part, line] if self.partial else [line]
        if n % 2:
            for i in range(2):
                with I.If(column + i < n), I.Then():
                    I.buffer_store(self.y, self._element(index + i, i), [*place, column + i])
            return
        with I.If(column < n), I.Then():
            to = self.y.ptr_to([*place, column])
            if dtype in PACK:
                self.pack(0, index, 0)
                I.evaluate(T.ptx["st.global.b32"](to, self.packed[0]))
            else:
                I.evaluate(T.ptx["st.global.v2.b32"](to, *(T.reinterpret("uint32", self.sums[index + i]) for i in range(2))))

    def _element(self, index: int, scale: int) -> Any:
        """One element of y."""
        from tvm.script import tirx as T

        dtype = str(self.y.dtype)
        return T.Cast(dtype, self.value(index, scale)) if dtype in PACK else T.reinterpret(dtype, self.sums[index])
