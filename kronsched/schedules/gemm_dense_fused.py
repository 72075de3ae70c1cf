"""Sums of a dense Gemm with an epilogue on their way out: bias, residual, relu, requantised. Shared by its CUDA schedules.

What a thread needs besides its sums, scale and bias of its columns and its elements of the residual, comes in batches of columns.
With several slots, those of later batches are on their way while one is computed. A conversion to int32 rounds halves to even,
and cvt.pack saturates.

Read first: `Fused.value`; gemm_dense_epilogue.py for where sums are.
"""

from __future__ import annotations

from typing import Any

from kronsched.schedules.gemm_dense_epilogue import PACK, Epilogue
from kronsched.workloads.gemm import Gemm
from kronsched.workloads.gemm_dense import has_scales
from kronsched.workloads.gemm_epilogue import epilogue_inputs, requantised

_RESIDUAL = {2: "ld.global.nc.b16", 4: "ld.global.nc.b32", 8: "ld.global.nc.v2.b32"}


class Fused(Epilogue):
    """Emits what happens to a thread's sums.

    eights: groups of 8 columns in a batch.  slots: batches held at once.  slot: the one that values are made of, from column
    `offset` of the thread's in it on.
    """

    eights, slots = 1, 1

    def __init__(self, w: Gemm, sums: Any, tensors: dict[str, Any], y: Any, lane: Any) -> None:
        """Take the kernel's parts."""
        super().__init__(w, sums, tensors, y, lane)
        self.slot, self.offset = 0, 0
        self.out, self.vector = w.out_dtype, w.n % 2 == 0
        dtypes = {"w_scale": "float32"} if has_scales(w) else {}
        dtypes |= {t.name: t.dtype for t in epilogue_inputs(w) if t.name in ("scale", "bias")}
        count = 2 * self.eights
        self.columns = [{n: _registers(f"{n}_r", count, dtype) for n, dtype in dtypes.items()} for _ in range(self.slots)]
        self.rest: list[Any] = []
        if w.has_residual:
            self.pair_bytes = 2 * {"int8": 1, "int32": 4}.get(self.out, 2)
            words = max(1, self.pair_bytes // 4) if self.vector else 2
            kind = ("uint16" if self.pair_bytes == 2 else "uint32") if self.vector else self.out
            self.rest = [_registers("rest", count * words, kind) for _ in range(self.slots)]
        if self.out == "int8":
            self.whole = _registers("whole", 2, "int32")

    # -- operands -----------------------------------------------------------------------------------

    def load_row_scales(self, row: Any) -> None:
        """As there; the rows g and g + 8 from `row` on are also those of the residual."""
        from tvm.script.ir_builder import IRBuilder
        from tvm.tirx.script.builder import ir as I

        super().load_row_scales(row)
        self.row = IRBuilder.name("line", I.Bind(row + (self.lane >> 2)))

    def load_column_scales(self, column: Any, eights: int) -> None:
        """Everything of the thread's columns in groups of 8 from `column` on, into the first slot."""
        self.slot = 0
        self.load(0, column, eights)

    def load(self, slot: int, column: Any, eights: int) -> None:
        """Start reading a batch."""
        from tvm.script import tirx as T
        from tvm.script.ir_builder import IRBuilder
        from tvm.tirx.script.builder import ir as I

        last = self.w.n - (2 if self.vector else 1)
        for e in range(eights):
            at = IRBuilder.name("at", I.Bind(T.min(column + e * 8 + (self.lane & 3) * 2, last)))
            for name, into in self.columns[slot].items():
                self._read_column(self.tensors[name], into, 2 * e, at)
            for half in range(2 if self.rest else 0):
                line = T.min(self.row + 8 * half, self.w.m - 1)
                self._read_residual(self.rest[slot], 2 * e + half, line, at)

    def _read_column(self, source: Any, into: Any, first: int, at: Any) -> None:
        from tvm.script import tirx as T
        from tvm.tirx.script.builder import ir as I

        if self.vector:
            # Not ld.global.nc: ptxas would keep what two slabs of rows have in common in registers, which are wanted for sums.
            load = T.ptx[f"ld.global.v2.{'b32' if str(into.dtype) == 'int32' else 'f32'}"]
            I.evaluate(load(into[first], into[first + 1], source.ptr_to([at])))
            return
        for i in range(2):
            I.buffer_store(into, source[T.min(at + i, self.w.n - 1)], [first + i])

    def _read_residual(self, into: Any, pair: int, line: Any, at: Any) -> None:
        from tvm.script import tirx as T
        from tvm.tirx.script.builder import ir as I

        source = self.tensors["residual"]
        if not self.vector:
            for i in range(2):
                I.buffer_store(into, source[line, T.min(at + i, self.w.n - 1)], [2 * pair + i])
            return
        words = max(1, self.pair_bytes // 4)
        to = (into[words * pair + i] for i in range(words))
        I.evaluate(T.ptx[_RESIDUAL[self.pair_bytes]](*to, source.ptr_to([line, at])))

    def _residual(self, pair: int, odd: int) -> Any:
        """An element of the residual in int32 or float32."""
        from tvm.script import tirx as T

        rest, out = self.rest[self.slot], self.out
        if not self.vector:
            value = rest[2 * pair + odd]
        elif out == "int32":
            value = T.reinterpret("int32", rest[2 * pair + odd])
        elif out == "int8":
            value = T.shift_right(T.reinterpret("int32", T.Cast("uint32", rest[pair]) << T.uint32(24 - 8 * odd)), 24)
        else:
            value = T.reinterpret(out, T.Cast("uint16", rest[pair] >> T.uint32(16 * odd)))
        return value if out == "int32" else T.Cast("float32", value)

    # -- values -------------------------------------------------------------------------------------

    def value(self, index: int, scale: int) -> Any:
        """The value of y from a sum, in int32 or float32, neither rounded nor saturated. scale: its column in the batch."""
        from tvm.script import tirx as T

        w, columns, half, scale = self.w, self.columns[self.slot], index % 4 // 2, self.offset + scale
        v = T.reinterpret("int32", self.sums[index]) if w.a_dtype == "int8" else self.sums[index]
        residual = self._residual(scale // 2 * 2 + half, scale % 2) if w.has_residual else None
        if requantised(w):
            v = T.Cast("float32", v + columns["bias"][scale] if w.has_bias else v) * columns["scale"][scale]
            if residual is not None:
                v = T.nearbyint(v) + T.nearbyint(residual * self.tensors["residual_scale"][0])
            return T.max(v, T.float32(0)) if w.relu else v
        if self.scaled:
            v = T.Cast("float32", v) * self.row_scales[half] * columns["w_scale"][scale]
        v = v + columns["bias"][scale] if w.has_bias else v
        v = v + residual if residual is not None else v
        zero = T.int32(0) if self.out == "int32" else T.float32(0)
        return T.Select(v < zero, zero, v) if w.relu else v  # not max, which drops NaN

    def bytes_of(self, index: int, scale: int) -> Any:
        """Two neighbouring columns as int8 in 16 bits."""
        from tvm.script import tirx as T
        from tvm.tirx.script.builder import ir as I

        for i in range(2):
            I.evaluate(T.ptx["cvt.rni.s32.f32"](self.whole[i], self.value(index + i, scale + i)))
        I.evaluate(T.ptx["cvt_pack.sat.s8.s32.b32"](self.packed[0], self.whole[1], self.whole[0], T.uint32(0)))
        return T.Cast("uint16", self.packed[0])

    def words_of(self, index: int, scale: int) -> tuple[Any, Any]:
        """Two neighbouring columns of int32."""
        from tvm.script import tirx as T

        low, high = (T.reinterpret("uint32", self.value(index + i, scale + i)) for i in range(2))
        return low, high

    # -- stores -------------------------------------------------------------------------------------

    def pair(self, index: int, line: Any, column: Any, part: Any = 0) -> None:
        """Store two neighbouring columns, the ones at `offset`, of a line inside y; they may lie beyond its last column."""
        from tvm.script import tirx as T
        from tvm.tirx.script.builder import ir as I

        n = self.w.n
        if not self.vector:
            for i in range(2):
                with I.If(column + i < n), I.Then():
                    I.buffer_store(self.y, self._element(index + i, i), [line, column + i])
            return
        with I.If(column < n), I.Then():
            to = self.y.ptr_to([line, column])
            if self.out in PACK:
                self.pack(0, index, 0)
                I.evaluate(T.ptx["st.global.b32"](to, self.packed[0]))
            elif self.out == "int8":
                I.evaluate(T.ptx["st.global.b16"](to, self.bytes_of(index, 0)))
            else:
                I.evaluate(T.ptx["st.global.v2.b32"](to, *self.words_of(index, 0)))

    def _element(self, index: int, scale: int) -> Any:
        """One element of y."""
        from tvm.script import tirx as T

        v = self.value(index, scale)
        if self.out == "int8":
            return T.Cast("int8", T.nearbyint(T.min(T.max(v, T.float32(-128.0)), T.float32(127.0))))
        return v if self.out == "int32" else T.Cast(self.out, v)


def _registers(name: str, count: int, dtype: str) -> Any:
    from tvm.script.ir_builder import IRBuilder
    from tvm.tirx.script.builder import ir as I

    return IRBuilder.name(name, I.alloc_local([count], dtype))
