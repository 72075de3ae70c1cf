"""TIR that brings the chunks of an implicit product from memory into a ring of swizzled stages in shared memory.

A stage holds block_m rows of A and block_n rows of B, 128 bytes each; the 16-byte piece p of row r is at place p ^ (r % 8) of
its row (the 128-byte swizzle of wgmma, and free of bank conflicts for ldmatrix). A thread copies the same piece of every
`step`-th row.

What a thread computes for a copy decides how fast chunks follow each other. So a pixel carries one bit for each tap that lies
inside of x, and the size of a copy (0: zeros are written, nothing is read) is a shift and a mask away.

Read first: `Gather.load`.
"""

from __future__ import annotations

from typing import Any

from kronsched.schedules.conv2d_tile import CHUNK, ConvTile
from kronsched.workloads.conv2d import IMAGES, block_channels

MAX_MASKED = 28
"""Taps that fit in a pixel's mask, above the bits of a copy's size."""


def do(expr: Any) -> None:
    """Evaluate an expression for its effect."""
    from tvm.tirx.script.builder import ir as I

    I.evaluate(expr)


def named(name: str, value: Any) -> Any:
    """Bind a value to a variable of the kernel."""
    from tvm.script.ir_builder import IRBuilder
    from tvm.tirx.script.builder import ir as I

    return IRBuilder.name(name, I.Bind(value))


class Held:
    """Values kept in registers: TVM writes a bound expression out again wherever it is used, an array's element it does not."""

    def __init__(self, name: str, count: int, dtype: str) -> None:
        """Allocate `count` registers."""
        from tvm.script.ir_builder import IRBuilder
        from tvm.tirx.script.builder import ir as I

        self.registers = IRBuilder.name(name, I.alloc_local([count], dtype))

    def set(self, i: int, value: Any) -> Any:
        """Put a value into register i; returns what reads it."""
        from tvm.tirx.script.builder import ir as I

        I.buffer_store(self.registers, value, [i])
        return self.registers[i]


class Gather:
    """Copies of one block. x, w: flat buffers. base: shared address of the ring."""

    def __init__(self, tile: ConvTile, x: Any, w: Any, base: Any, thread: Any) -> None:
        """Take registers, and compute where the thread's pieces go."""
        conv = tile.conv
        self.tile, self.x, self.w, self.base = tile, x, w, base
        self.across = tile.used // tile.piece
        self.step = tile.threads // self.across
        last = -(-tile.chunks * tile.chunk_elements // tile.channels)  # tap of the end of the last chunk
        self.masked = any(conv.padding) and last <= MAX_MASKED
        self.piece = named("piece", thread % self.across)
        self.row0 = named("row0", thread // self.across)
        rows, columns = -(-tile.block_m // self.step), -(-tile.block_n // self.step)
        self.held = {n: Held(n, rows, "int32") for n in ("x_at", "x_line", "x_column")}
        self.held |= {"x_mask": Held("x_mask", rows, "uint32"), "w_at": Held("w_at", columns, "int32")}
        self.held |= {"k": Held("k", 4, "int32"), "to": Held("to", 1, "uint32")}
        self.rows: list[tuple[Any, Any, Any]] = []
        self.channels: list[tuple[Any, int]] = []
        places = Held("place", max(1, 8 // self.step), "int32")
        self.places = [places.set(i, self._place(i)) for i in range(max(1, 8 // self.step))]

    def start(self, m0: Any, n0: Any) -> None:
        """Compute where the thread's rows of a tile begin, and which taps are inside. m0, n0: its first pixel and channel."""
        self.rows = [self._pixel(i, m0) for i in range(-(-self.tile.block_m // self.step))]
        self.channels = self._channels(n0)

    # -- rows ---------------------------------------------------------------------------------------

    def _pixel(self, i: int, m0: Any) -> tuple[Any, Any, Any]:
        """(element of x at the first tap of the thread's i-th pixel, its mask, 0) or (element, its line, its column).

        Beyond the last pixel, it is that of the last.
        """
        from tvm.script import tirx as T

        conv, tile = self.tile.conv, self.tile
        (sh, sw), (ph, pw), (oh, ow) = conv.stride, conv.padding, conv.out_hw
        m = m0 + self.row0 + i * self.step
        if conv.pixels % tile.block_m:
            m = T.min(m, conv.pixels - 1)
        m = named(f"m{i}", m)
        images, inside = 1, 0
        if conv.layout != "NHWC":
            images, inside = IMAGES, m % IMAGES * block_channels(conv.in_dtype)
            m = named(f"q{i}", m // IMAGES)
        if conv.kernel == (1, 1) and conv.padding == (0, 0) and conv.stride == (1, 1):
            return self.held["x_at"].set(i, m * (tile.channels * images) + inside), 0, 0
        line = named(f"line{i}", m % (oh * ow) // ow * sh - ph)
        column = named(f"column{i}", m % ow * sw - pw)
        first = (m // (oh * ow) * conv.h + line) * conv.w + column
        at = self.held["x_at"].set(i, first * (tile.channels * images) + inside)
        if self.masked:
            return at, self.held["x_mask"].set(i, self._mask(line, column)), 0
        if not any(conv.padding):
            return at, 0, 0
        return at, self.held["x_line"].set(i, line), self.held["x_column"].set(i, column)

    def _mask(self, line: Any, column: Any) -> Any:
        """A bit for each tap inside of x, tap 0 at the place of the bit of a copy's size."""
        from tvm.script import tirx as T

        conv, shift = self.tile.conv, self.tile.piece.bit_length() - 1
        (kh, kw), (dh, dw) = conv.kernel, conv.dilation

        def bit(inside: Any, at: int) -> Any:
            return T.Select(inside, T.uint32(1 << at), T.uint32(0))

        def inside(at: Any, size: int) -> Any:
            return T.And(at >= 0, at < size)

        columns = T.uint32(0)
        for s in range(kw):
            columns = columns | bit(inside(column + s * dw, conv.w), s + shift)
        columns = named("columns", columns)
        mask = T.uint32(0)
        for r in range(kh):
            mask = mask | T.Select(inside(line + r * dh, conv.h), columns << T.uint32(r * kw), T.uint32(0))
        return mask

    def _channels(self, n0: Any) -> list[tuple[Any, int]]:
        """(variable, constant) parts of the element of w where each of the thread's rows of B begins."""
        from tvm.script import tirx as T

        tile, step = self.tile, self.step
        count, ragged = -(-tile.block_n // step), tile.conv.c_out % tile.block_n != 0
        power = step & (step - 1) == 0
        jumps = [tile.channel(i * step) for i in range(count)]
        even = power and all(tile.channel(r + i * step) == tile.channel(r) + jumps[i] for r in range(step) for i in range(count))
        if even and not ragged:
            first = self.held["w_at"].set(0, (n0 + self._channel(self.row0)) * tile.row_elements)
            return [(first, jump * tile.row_elements) for jump in jumps]
        rows = []
        for i in range(count):
            channel = n0 + self._channel(self.row0 + i * step)
            channel = T.min(channel, tile.conv.c_out - 1) if ragged else channel
            rows.append((self.held["w_at"].set(i, channel * tile.row_elements), 0))
        return rows

    def _channel(self, row: Any) -> Any:
        """`ConvTile.channel` as an expression."""
        group = self.tile.group
        return row // 8 // group * (8 * group) + row // 2 % 4 * (2 * group) + row // 8 % group * 2 + row % 2

    def _place(self, i: int) -> Any:
        """Byte of the thread's piece in its i-th row, and of that row: `step` rows further it is the same for steps of 8 rows."""
        row = self.row0 + i * self.step
        part = self.piece * self.tile.piece
        return row * CHUNK + ((part // 16) ^ (row % 8)) * 16 + part % 16

    # -- copies -------------------------------------------------------------------------------------

    def load(self, chunk: Any, slot: Any) -> None:
        """Start copying a chunk of A and B into a slot of the ring."""
        from tvm.script import tirx as T

        tile = self.tile
        into = self.held["to"].set(0, self.base + T.Cast("uint32", slot * tile.stage_bytes + self.places[0]))
        tap, k, offset, below, right = self._tap(chunk)
        inside = None if tile.row_elements * tile.item % tile.used == 0 else k < tile.row_elements
        for i, (at, line, column) in enumerate(self.rows):
            size = self._size(inside, tap, line, column, below, right)
            self._copy(into, i, tile.block_m, self.x.ptr_to([at + offset]), size, tile.cache == "l1")
        size = None if inside is None else named("size", T.Select(inside, T.uint32(tile.piece), T.uint32(0)))
        at_k: dict[Any, Any] = {}
        for i, (at, jump) in enumerate(self.channels):
            if at not in at_k:
                at_k[at] = T.Cast("int64", at + k)
            self._copy(into + T.uint32(tile.a_bytes), i, tile.block_n, self.w.ptr_to([at_k[at] + T.int64(jump)]), size, False)

    def _tap(self, chunk: Any) -> tuple[Any, Any, Any, Any, Any]:
        """Of the thread's piece of a chunk: tap, element of a row of B; and elements, lines, columns of x after the first tap."""
        tile, conv = self.tile, self.tile.conv
        (kh, kw), (dh, dw) = conv.kernel, conv.dilation
        mine, held = self.piece * (tile.piece // tile.item), self.held["k"]
        if kh * kw == 1:
            k = held.set(0, chunk * tile.chunk_elements + mine)
            whole = tile.row_elements * tile.item % tile.used == 0
            tap = 0 if whole or not self.masked else held.set(1, k // tile.channels)  # past the channels: no bit of a mask
            return tap, k, k if conv.layout == "NHWC" else held.set(2, self._of_channel(k)), 0, 0
        if tile.by_channel:  # all taps of 128 bytes of channels, then the next channels: what taps share is read again soon
            tap = named("tap", chunk % (kh * kw))
            inner = named("inner", chunk // (kh * kw) * tile.chunk_elements + mine)
            k = held.set(0, tap * tile.channels + inner)
        else:
            k = held.set(0, chunk * tile.chunk_elements + mine)
            if tile.channels % tile.chunk_elements == 0:  # all threads are at the same tap
                per_tap = tile.channels // tile.chunk_elements
                tap, inner = named("tap", chunk // per_tap), chunk % per_tap * tile.chunk_elements + mine
            else:
                tap, inner = held.set(1, k // tile.channels), k % tile.channels
        below, right = named("below", tap // kw * dh), named("right", tap % kw * dw)
        pixel = tile.channels * (1 if conv.layout == "NHWC" else IMAGES)
        return tap, k, held.set(2, (below * conv.w + right) * pixel + self._of_channel(inner)), below, right

    def _of_channel(self, channel: Any) -> Any:
        """Elements from the first channel of a pixel to another one."""
        if self.tile.conv.layout == "NHWC":
            return channel
        block = block_channels(self.tile.conv.in_dtype)
        return channel // block * (IMAGES * block) + channel % block

    def _size(self, inside: Any, tap: Any, line: Any, column: Any, below: Any, right: Any) -> Any:
        """Bytes to read of a piece of A, the rest being zeros; None where it is always whole."""
        from tvm.script import tirx as T

        conv, piece = self.tile.conv, self.tile.piece
        if self.masked:
            return (line >> T.Cast("uint32", tap)) & T.uint32(piece)
        tests = [] if inside is None else [inside]
        if conv.padding[0]:
            tests += [line + below >= 0, line + below < conv.h]
        if conv.padding[1]:
            tests += [column + right >= 0, column + right < conv.w]
        if not tests:
            return None
        good = tests[0]
        for test in tests[1:]:
            good = T.And(good, test)
        return T.Select(good, T.uint32(piece), T.uint32(0))

    def _copy(self, into: Any, i: int, rows: int, source: Any, size: Any, keep: bool) -> None:
        """Copy a piece to the i-th row, if there are so many. keep: in L1, where pieces of less than 16 bytes always are."""
        from tvm.script import tirx as T
        from tvm.tirx.script.builder import ir as I

        piece = self.tile.piece
        if self.step >= 8:
            to = into + T.uint32(i * self.step * CHUNK)
        else:
            period = len(self.places)
            to = into + T.Cast("uint32", self.places[i % period] - self.places[0] + i // period * 8 * CHUNK)
        copy = T.ptx[f"cp.async.{'ca' if keep or piece < 16 else 'cg'}.shared.global"]
        started = copy(to, source, piece) if size is None else copy(to, source, piece, size)
        if (i + 1) * self.step <= rows:
            do(started)
            return
        with I.If(self.row0 < rows - i * self.step), I.Then():
            do(started)
