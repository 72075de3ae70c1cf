"""TIR that turns accumulators of an implicit product into y: scale, bias, residual, relu, rounding, vector stores.

The accumulators are those of tensor-core tiles of 16 × 8: a thread holds rows g and g + 8, columns 2t and 2t + 1 of each.
Columns stand for channels in the order of `ConvTile.channel`, so that what a thread holds of `group` tiles are neighbouring
channels: they are packed in registers and stored at once, four threads together 64 bytes of a pixel where `vector` is 16.

int8: halves are rounded to even by adding 1.5 · 2^23, which leaves the integer in the low byte of the float.

Read first: `Epilogue.store`.
"""

from __future__ import annotations

from typing import Any

from kronsched.schedules.conv2d_gather import do, named
from kronsched.schedules.conv2d_tile import ConvTile

PACK = {"float16": "cvt.rn.f16x2.f32", "bfloat16": "cvt.rn.bf16x2.f32"}
STORE = {4: "st.global.b32", 8: "st.global.v2.b32", 16: "st.global.v4.b32"}
_MAGIC = 12582912.0


class Epilogue:
    """The end of a tile. acc: accumulators. tensors: by name. t: lane % 4."""

    def __init__(self, tile: ConvTile, acc: Any, tensors: dict[str, Any], t: Any) -> None:
        """Allocate registers."""
        from tvm.script.ir_builder import IRBuilder
        from tvm.tirx.script.builder import ir as I

        conv = tile.conv
        self.tile, self.conv, self.acc, self.tensors, self.t = tile, conv, acc, tensors, t
        self.width = 2 * tile.group
        self.vector = tile.vector >= 4 and conv.c_out % self.width == 0
        self.words = IRBuilder.name("words", I.alloc_local([max(4, self.width)], "uint32"))
        dtypes = {spec.name: spec.dtype for spec in conv.inputs if spec.name in ("scale", "bias")}
        self.columns = {n: IRBuilder.name(n + "_r", I.alloc_local([self.width], dtype)) for n, dtype in dtypes.items()}
        self.rest = None
        if conv.has_residual:
            self.rest = IRBuilder.name("rest", I.alloc_local([self.width], conv.out_dtype))

    def store(self, n0: Any, group: int, rows: list[tuple[Any, int]]) -> None:
        """Store a group of tiles for several rows: (pixel, index of the accumulator of the group's first column in that row).

        n0: channel that group 0 begins with.
        """
        from tvm.script import tirx as T
        from tvm.tirx.script.builder import ir as I

        conv, tile = self.conv, self.tile
        channel = named("channel", n0 + group * (8 * tile.group) + self.t * self.width)
        self._read_columns(channel)
        for m, a in rows:
            tests = []
            if conv.pixels % tile.block_m:
                tests.append(m < conv.pixels)
            if self.vector and conv.c_out % tile.block_n:
                tests.append(channel < conv.c_out)
            if not tests:
                self._row(m, channel, a)
                continue
            with I.If(tests[0] if len(tests) == 1 else T.And(*tests)), I.Then():
                self._row(m, channel, a)

    def _read_columns(self, channel: Any) -> None:
        """Scale and bias of the thread's channels."""
        from tvm.script import tirx as T
        from tvm.tirx.script.builder import ir as I

        last = self.conv.c_out - self.width if self.vector else self.conv.c_out - 1
        ragged = self.conv.c_out % self.tile.block_n != 0
        for name, into in self.columns.items():
            source = self.tensors[name]
            if not self.vector:
                for i in range(self.width):
                    at = T.min(channel + i, last) if ragged else channel + i
                    I.buffer_store(into, source[at], [i])
                continue
            at = named("at", T.min(channel, last)) if ragged else channel
            kind = "b32" if name == "bias" and self.conv.in_dtype == "int8" else "f32"
            lanes = min(4, self.width)
            load = T.ptx[f"ld.global.nc.v{lanes}.{kind}"]
            for i in range(0, self.width, lanes):
                do(load(*[into[i + e] for e in range(lanes)], source.ptr_to([at + i])))

    def _row(self, m: Any, channel: Any, a: int) -> None:
        """One pixel of the group: accumulators a, a + 1, then four further on for each tile."""
        from tvm.script import tirx as T
        from tvm.tirx.script.builder import ir as I

        conv = self.conv
        at = named("to", m * conv.c_out + channel)
        if self.rest is not None:
            self._read_residual(at, channel)
        index = [a + i // 2 * 4 + i % 2 for i in range(self.width)]
        values = [self._value(acc, i) for i, acc in enumerate(index)]
        if not self.vector:
            for i, value in enumerate(values):
                with I.If(channel + i < conv.c_out), I.Then():
                    I.buffer_store(self.tensors["y"], value, [at + i])
            return
        self._pack(values)
        count = self.tile.vector // 4
        do(T.ptx[STORE[self.tile.vector]](self.tensors["y"].ptr_to([at]), *[self.words[i] for i in range(count)]))

    def _read_residual(self, at: Any, channel: Any) -> None:
        from tvm.script import tirx as T
        from tvm.tirx.script.builder import ir as I

        source = self.tensors["residual"]
        for i in range(self.width):
            where = at + i if self.vector else T.min(at + i, self.conv.output.size - 1)
            I.buffer_store(self.rest, source[where], [i])

    # -- arithmetic ---------------------------------------------------------------------------------

    def _value(self, a: int, i: int) -> Any:
        """The value of y from accumulator a, channel i of the thread's; int8 as float when it is packed, see `_pack`."""
        from tvm.script import tirx as T

        conv = self.conv
        if conv.out_dtype == "int8":
            return self._requantised(a, i)
        if conv.out_dtype == "int32":
            v = T.reinterpret("int32", self.acc[a])
        else:
            v = self.acc[a] * self.columns["scale"][i] if conv.has_scale else self.acc[a]
        if conv.has_bias:
            v = v + self.columns["bias"][i]
        if self.rest is not None:
            v = v + (self.rest[i] if conv.out_dtype == "int32" else T.Cast("float32", self.rest[i]))
        if conv.relu:
            zero = T.int32(0) if conv.out_dtype == "int32" else T.float32(0)
            v = T.Select(v < zero, zero, v)  # not max, which drops NaN
        return v if self.vector or conv.out_dtype == "int32" else T.Cast(conv.out_dtype, v)

    def _requantised(self, a: int, i: int) -> Any:
        from tvm.script import tirx as T

        conv, magic = self.conv, T.float32(_MAGIC)
        v = T.reinterpret("int32", self.acc[a])
        if conv.has_bias:
            v = v + self.columns["bias"][i]
        v = T.Cast("float32", v)
        if conv.has_scale:
            v = v * self.columns["scale"][i]
        if self.rest is not None:
            more = T.Cast("float32", self.rest[i]) * self.tensors["residual_scale"][0]
            v = T.nearbyint(v) + T.nearbyint(more)
        v = T.min(T.max(v, T.float32(0.0 if conv.relu else -128.0)), T.float32(127.0)) + magic
        return v if self.vector else T.Cast("int8", T.Cast("int32", T.reinterpret("uint32", v) & T.uint32(255)))

    def _pack(self, values: list[Any]) -> None:
        """The values of a vector into 32-bit words."""
        from tvm.script import tirx as T
        from tvm.tirx.script.builder import ir as I

        out = self.conv.out_dtype
        if out == "int32":
            for i, v in enumerate(values):
                I.buffer_store(self.words, T.reinterpret("uint32", v), [i])
        elif out == "int8":
            for i, v in enumerate(values):
                I.buffer_store(self.words, T.reinterpret("uint32", v), [i])
            prmt = T.ptx["prmt.b32"]
            for i in range(0, self.width, 4):
                b0, b1, b2, b3 = (self.words[i + e] for e in range(4))
                do(prmt(self.words[i], b0, b1, T.uint32(0x0040)))
                do(prmt(self.words[i + 2], b2, b3, T.uint32(0x0040)))
                do(prmt(self.words[i // 4], self.words[i], self.words[i + 2], T.uint32(0x5410)))
        else:
            for i in range(0, self.width, 2):
                do(T.ptx[PACK[out]](self.words[i // 2], values[i + 1], values[i]))
