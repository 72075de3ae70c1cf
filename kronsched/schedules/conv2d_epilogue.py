"""TIR that turns accumulators of an implicit product into y: scale, bias, residual, relu, rounding, vector stores.

The accumulators are those of tensor-core tiles of 16 × 8: a thread holds rows g and g + 8, columns 2t and 2t + 1 of each.
Columns stand for channels in the order of `ConvTile.channel`, so that what a thread holds of `group` tiles are neighbouring
channels: they are packed in registers and stored at once, four threads together 64 bytes of a pixel where `vector` is 16.

int8: a conversion to int32 rounds halves to even, and cvt.pack saturates.

Read first: `Epilogue.store`.
"""

from __future__ import annotations

from typing import Any, Protocol

from kronsched.schedules.conv2d_gather import do, named
from kronsched.workloads.conv2d import IMAGES, Conv2d, block_channels

PACK = {"float16": "cvt.rn.f16x2.f32", "bfloat16": "cvt.rn.bf16x2.f32"}
LOAD = {4: "ld.global.nc.b32", 8: "ld.global.nc.v2.b32", 16: "ld.global.nc.v4.b32"}
STORE = {4: "st.global.b32", 8: "st.global.v2.b32", 16: "st.global.v4.b32"}


class Tile(Protocol):
    """What the end of a tile depends on, as ConvTile says: `vector` bytes are stored at once, from `group` tiles of 8 columns."""

    @property
    def conv(self) -> Conv2d: ...  # noqa: D102

    @property
    def block_m(self) -> int: ...  # noqa: D102

    @property
    def block_n(self) -> int: ...  # noqa: D102

    @property
    def vector(self) -> int: ...  # noqa: D102

    @property
    def group(self) -> int: ...  # noqa: D102


class Epilogue:
    """The end of a tile. acc: accumulators. tensors: by name. t: lane % 4."""

    def __init__(self, tile: Tile, acc: Any, tensors: dict[str, Any], t: Any) -> None:
        """Allocate registers."""
        from tvm.script.ir_builder import IRBuilder
        from tvm.tirx.script.builder import ir as I

        conv = tile.conv
        self.tile, self.conv, self.acc, self.tensors, self.t = tile, conv, acc, tensors, t
        self.width = 2 * tile.group
        self.vector = tile.vector >= 4 and conv.c_out % self.width == 0
        self.words = IRBuilder.name("words", I.alloc_local([max(4, self.width)], "uint32"))
        if conv.out_dtype == "int8":
            self.rounded = IRBuilder.name("rounded", I.alloc_local([self.width], "int32"))
        dtypes = {spec.name: spec.dtype for spec in conv.inputs if spec.name in ("scale", "bias")}
        self.columns = {n: IRBuilder.name(n + "_r", I.alloc_local([self.width], dtype)) for n, dtype in dtypes.items()}
        self.rest: Any = None
        if conv.has_residual:
            count, dtype = (self.tile.vector // 4, "uint32") if self.vector else (self.width, conv.out_dtype)
            self.rest = IRBuilder.name("rest", I.alloc_local([count], dtype))

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
        at = named("to", self._place(m, channel))
        if self.rest is not None:
            self._read_residual(at)
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

    def _place(self, m: Any, channel: Any) -> Any:
        """The element of y of a pixel and channel; pixels of NHWCnc count images within a block fastest."""
        conv = self.conv
        if conv.layout == "NHWC":
            return m * conv.c_out + channel
        block = block_channels(conv.out_dtype)
        return (m // IMAGES * (conv.c_out // block) + channel // block) * (IMAGES * block) + m % IMAGES * block + channel % block

    def _read_residual(self, at: Any) -> None:
        """Residual of the thread's channels of a pixel."""
        from tvm.script import tirx as T
        from tvm.tirx.script.builder import ir as I

        source = self.tensors["residual"]
        if self.vector:
            count = self.tile.vector // 4
            do(T.ptx[LOAD[self.tile.vector]](*[self.rest[i] for i in range(count)], source.ptr_to([at])))
            return
        for i in range(self.width):
            I.buffer_store(self.rest, source[T.min(at + i, self.conv.output.size - 1)], [i])

    def _residual(self, i: int) -> Any:
        """The residual of the thread's channel i, in int32 or float32."""
        from tvm.script import tirx as T

        out = self.conv.out_dtype
        if not self.vector:
            value = self.rest[i]
        elif out == "int32":
            value = T.reinterpret("int32", self.rest[i])
        elif out == "int8":
            value = T.shift_right(T.reinterpret("int32", self.rest[i // 4] << T.uint32(24 - i % 4 * 8)), 24)
        else:
            value = T.reinterpret(out, T.Cast("uint16", self.rest[i // 2] >> T.uint32(i % 2 * 16)))
        return value if out == "int32" else T.Cast("float32", value)

    # -- arithmetic ---------------------------------------------------------------------------------

    def _value(self, a: int, i: int) -> Any:
        """The value of y from accumulator a, channel i of the thread's; not yet rounded and saturated when it is packed."""
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
            v = v + self._residual(i)
        if conv.relu:
            zero = T.int32(0) if conv.out_dtype == "int32" else T.float32(0)
            v = T.Select(v < zero, zero, v)  # not max, which drops NaN
        return v if self.vector or conv.out_dtype == "int32" else T.Cast(conv.out_dtype, v)

    def _requantised(self, a: int, i: int) -> Any:
        from tvm.script import tirx as T

        conv = self.conv
        v = T.reinterpret("int32", self.acc[a])
        if conv.has_bias:
            v = v + self.columns["bias"][i]
        v = T.Cast("float32", v)
        if conv.has_scale:
            v = v * self.columns["scale"][i]
        if self.rest is not None:
            more = self._residual(i) * self.tensors["residual_scale"][0]
            v = T.nearbyint(v) + T.nearbyint(more)
        if conv.relu:
            v = T.max(v, T.float32(0.0))
        return v if self.vector else T.Cast("int8", T.nearbyint(T.min(T.max(v, T.float32(-128.0)), T.float32(127.0))))

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
                do(T.ptx["cvt.rni.s32.f32"](self.rounded[i], v))
            pack = T.ptx["cvt_pack.sat.s8.s32.b32"]
            for i in range(0, self.width, 4):
                v0, v1, v2, v3 = (self.rounded[i + e] for e in range(4))
                do(pack(self.words[i // 4], v3, v2, T.uint32(0)))
                do(pack(self.words[i // 4], v1, v0, self.words[i // 4]))
        else:
            for i in range(0, self.width, 2):
                do(T.ptx[PACK[out]](self.words[i // 2], values[i + 1], values[i]))
