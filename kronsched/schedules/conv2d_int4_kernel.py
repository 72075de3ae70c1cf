"""Conv2d of 4-bit integers on tensor cores: what differs from the kernel for int8.

    sm_80 .. sm_89   mma.m16n8k64 takes two values a byte: for copies and ldmatrix, c_in channels are c_in / 2 bytes
    others           a first launch unpacks x and w to int8, then mma.m16n8k32; Hopper has no 4-bit tensor cores

Results of 4 bits are saturated and packed in registers, eight to a word, `vector` channels a thread.

Read first: `Int4Kernel`, `unpack_program`.
"""

from __future__ import annotations

from typing import Any

from kronsched.schedules.conv2d_epilogue import Epilogue, Tile
from kronsched.schedules.conv2d_gather import named
from kronsched.schedules.conv2d_mma_kernel import MmaKernel
from kronsched.workloads.base import TensorSpec
from kronsched.workloads.conv2d import FOUR_BIT, LIMITS, Conv2d

MMA_INT4 = "mma.sync.aligned.m16n8k64.row.col.s32.{x}.s4.s32"
THREADS = 256


class Int4Epilogue(Epilogue):
    """Requantises to 4 bits. The tile's vector counts channels, of which two are a byte of y. out_dtype: int4 or uint4."""

    def __init__(self, tile: Tile, acc: Any, tensors: dict[str, Any], t: Any, out_dtype: str) -> None:
        """Allocate registers."""
        super().__init__(tile, acc, tensors, t)
        self.limits = LIMITS[out_dtype]

    def _row(self, m: Any, channel: Any, a: int) -> None:
        from tvm.script import tirx as T
        from tvm.tirx.script.builder import ir as I

        y, c_out = self.tensors["y"], self.conv.c_out
        at = named("to", (m * c_out + channel) // 2)
        index = [a + i // 2 * 4 + i % 2 for i in range(self.width)]
        halves = [self._half(acc, i) for i, acc in enumerate(index)]
        if self.width % 8 or not self.vector:
            for i in range(0, self.width, 2):
                byte = T.Cast("int8", halves[i] | (halves[i + 1] << T.uint32(4)))
                if self.vector:  # the caller has looked
                    I.buffer_store(y, byte, [at + i // 2])
                    continue
                with I.If(channel + i < c_out), I.Then():
                    I.buffer_store(y, byte, [at + i // 2])
            return
        for word in range(self.width // 8):
            value = halves[8 * word]
            for i in range(1, 8):
                value = value | (halves[8 * word + i] << T.uint32(4 * i))
            I.buffer_store(self.words, value, [word])
        store = T.ptx["st.global.b32" if self.width == 8 else f"st.global.v{self.width // 8}.b32"]
        I.evaluate(store(y.ptr_to([at]), *[self.words[i] for i in range(self.width // 8)]))

    def _half(self, a: int, i: int) -> Any:
        """The four bits of a result, in the low bits of a word."""
        from tvm.script import tirx as T

        v = T.reinterpret("int32", self.acc[a])
        if self.conv.has_bias:
            v = v + self.columns["bias"][i]
        v = T.Cast("float32", v)
        if self.conv.has_scale:
            v = v * self.columns["scale"][i]
        low, high = self.limits
        v = T.min(T.max(v, T.float32(max(0, low) if self.conv.relu else low)), T.float32(high))
        return T.reinterpret("uint32", T.Cast("int32", T.nearbyint(v))) & T.uint32(15)


def int4_kernel(conv: Conv2d, native: bool) -> type[MmaKernel]:
    """The kernel class for a workload of 4 bits. native: by the instruction for 4 bits, else on unpacked int8."""
    instruction = MMA_INT4.format(x="u4" if conv.in_dtype == "uint4" else "s4") if native else None

    class Int4Kernel(MmaKernel):
        """See the module's docstring."""

        def instruction(self) -> str:
            return instruction or super().instruction()

        def epilogue(self, t: Any) -> Epilogue:
            if conv.out_dtype in FOUR_BIT:
                return Int4Epilogue(self.tile, self.acc, self.tensors, t, conv.out_dtype)
            return super().epilogue(t)

    return Int4Kernel


def unpack_program(conv: Conv2d, wide: tuple[TensorSpec, TensorSpec], name: str) -> Any:
    """The PrimFunc over x, w, x_wide, w_wide: 4-bit rows of channels to int8 rows, with zeros added at their end.

    A thread unpacks four bytes of a row, or what is left of it.
    """
    from tvm.script import tirx as T
    from tvm.script.ir_builder import IRBuilder
    from tvm.tirx.script.builder import ir as I

    channels = wide[0].shape[-1]
    per_row = -(-channels // 8)
    rows = [t.size // channels for t in wide]
    with IRBuilder() as builder:
        with I.prim_func():
            I.func_name(name)
            x, w = (I.arg(t.name, I.buffer((t.size,), t.dtype)) for t in conv.inputs[:2])
            x_wide, w_wide = (I.arg(t.name, I.buffer((t.size,), t.dtype)) for t in wide)
            I.device_entry()
            block = IRBuilder.name("block", I.cta_id([-(-sum(rows) * per_row // THREADS)]))
            thread = IRBuilder.name("thread", I.thread_id([THREADS]))
            at = named("at", block * THREADS + thread)
            row, part = named("row", at // per_row), named("part", at % per_row * 8)
            with I.If(row < rows[0]), I.Then():
                _unpack(x, x_wide, row, part, conv.c_in, channels, conv.in_dtype == "int4")
            tap = named("tap", row - rows[0])
            with I.If(T.And(tap >= 0, tap < rows[1])), I.Then():
                _unpack(w, w_wide, tap, part, conv.c_in, channels, True)
        return builder.get()


def _unpack_word(source: Any, target: Any, at: Any, signed: bool) -> None:
    """Four bytes, the at-th, to eight.

    Bytes of even channels are the lower halves: the word's upper 16 bits move up by 16, then bytes apart, then halves apart.
    """
    from tvm.script import tirx as T
    from tvm.script.ir_builder import IRBuilder
    from tvm.tirx.script.builder import ir as I

    word = IRBuilder.name("word", I.alloc_local([3], "uint32"))
    I.evaluate(T.ptx["ld.global.nc.b32"](word[0], source.ptr_to([at * 4])))
    for i, half in enumerate((word[0] & T.uint32(0xFFFF), word[0] >> T.uint32(16))):
        apart = (half | (half << T.uint32(8))) & T.uint32(0x00FF00FF)
        halves = (apart | (apart << T.uint32(4))) & T.uint32(0x0F0F0F0F)
        # A byte with bit 3 set gets its upper half set: 8 · 30 = 240.
        value = halves | ((halves & T.uint32(0x08080808)) * T.uint32(30)) if signed else halves
        I.buffer_store(word, value, [1 + i])
    I.evaluate(T.ptx["st.global.v2.b32"](target.ptr_to([at * 8]), word[1], word[2]))


def _unpack(source: Any, target: Any, row: Any, part: Any, c_in: int, channels: int, signed: bool) -> None:
    """Eight channels of a row from channel `part` on."""
    from tvm import tirx
    from tvm.script import tirx as T
    from tvm.tirx.script.builder import ir as I

    if channels == c_in and c_in % 8 == 0:
        _unpack_word(source, target, row * (c_in // 8) + part // 8, signed)
        return
    for i in range(8):
        channel = part + i
        byte = T.Cast("int32", source[row * (c_in // 2) + T.min(channel, c_in - 1) // 2])
        half = (byte >> (i % 2 * 4)) & 15
        value = (half ^ 8) - 8 if signed else half
        value = value if channels == c_in else T.Select(channel < c_in, value, tirx.const(0, "int32"))
        store = T.Cast("int8", value)
        if channels % 8 == 0:
            I.buffer_store(target, store, [row * channels + channel])
            continue
        with I.If(channel < channels), I.Then():
            I.buffer_store(target, store, [row * channels + channel])
