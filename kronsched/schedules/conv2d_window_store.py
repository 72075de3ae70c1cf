"""The end of a tile of Conv2d by windows: sums (channels × positions) ─ scaled, rounded, packed ─(stmatrix)─ panel ─ y.

A thread holds channels of two rows at two neighbouring positions: it packs each position's, and stmatrix, transposing, puts those
of a position next to each other. So a warp writes 16 channels of each position into the panel of its warpgroup, which then reads
it by whole pixels, leaves out positions that are padding, and stores 16 bytes a thread.

Read first: `WindowStore.emit`.
"""

from __future__ import annotations

from typing import Any

from kronsched.schedules.conv2d_epilogue import STORE, Epilogue
from kronsched.schedules.conv2d_gather import do, named
from kronsched.schedules.conv2d_window_plan import CHANNELS, WindowPlan

_PIECE = 16
"""Bytes that a thread stores at once."""


class WindowStore(Epilogue):
    """Emits the stores of a warpgroup. shared: buffer of shared memory, bytes.  panel: its first byte of the panel."""

    def __init__(self, plan: WindowPlan, sums: Any, tensors: dict[str, Any], shared: Any, panel: Any, tx: Any) -> None:
        """Allocate registers."""
        from tvm.script.ir_builder import IRBuilder
        from tvm.tirx.script.builder import ir as I

        super().__init__(plan, sums, tensors, named("quad", tx & 3))
        self.plan, self.shared, self.panel = plan, shared, panel
        self.thread, self.lane, self.warp = named("thread", tx & 127), named("lane", tx & 31), named("warp", tx >> 5 & 3)
        self.packed = IRBuilder.name("packed", I.alloc_local([4], "uint32"))
        self.read = IRBuilder.name("read", I.alloc_local([4], "uint32"))

    def channel(self, n0: Any, row: int) -> Any:
        """The channel of one of the thread's two rows: rows 8·i + g of 16 are channels 2·g + i, or 8·i + g for 16 bits."""
        from tvm.script import tirx as T

        g = self.lane >> 2
        at = 2 * g + row if self.plan.out_item == 1 else g + 8 * row
        return T.min(n0 + self.warp * 16 + at, self.conv.c_out - 1)

    def read_channels(self, n0: Any) -> None:
        """Scale and bias of the thread's two rows."""
        from tvm.tirx.script.builder import ir as I

        for name, into in self.columns.items():
            for row in range(2):
                I.buffer_store(into, self.tensors[name][self.channel(n0, row)], [row])

    def emit(self, position: Any, n0: Any, barrier: Any) -> None:
        """Store all sums of a warpgroup. position, n0: its first ones.  barrier: number of one for its threads."""
        from tvm.script import tirx as T

        do(T.ptx.bar.sync(barrier, T.uint32(128)))  # the panel's last content has been read
        for start in range(0, self.plan.pixels, 32 // self.plan.out_item):
            self._fill(start)
        do(T.ptx.bar.sync(barrier, T.uint32(128)))
        self._copy(position, n0)

    def _at(self, pixel: Any, piece: Any) -> Any:
        """Where 16 bytes of a pixel are in the panel: swizzled."""
        at = pixel * self.plan.line_bytes + piece * _PIECE
        return self.shared.ptr_to([self.panel + (at ^ (at >> 7 & (self.plan.line_bytes // _PIECE - 1)) << 4)])

    def _fill(self, start: int) -> None:
        """Four matrices of 8 positions by 16 bytes of this warp's channels."""
        from tvm.script import tirx as T
        from tvm.tirx.script.builder import ir as I

        for i in range(4):
            if self.plan.out_item == 1:
                first = (start // 8 + i) * 4
                order = [(first, 0), (first + 2, 1), (first + 1, 0), (first + 3, 1)]
            else:
                first, row = (start // 8 + i // 2) * 4, i % 2
                order = [(first + 2 * row, row), (first + 2 * row + 1, row)]
            self._pack([self._value(a, row) for a, row in order])
            I.buffer_store(self.packed, self.words[0], [i])
        lane = self.lane
        if self.plan.out_item == 1:
            to = self._at(start + lane, self.warp)
        else:
            to = self._at(start + (lane >> 4) * 8 + (lane & 7), self.warp * 2 + (lane >> 3 & 1))
        do(T.ptx["stmatrix.sync.aligned.m8n8.x4.trans.shared.b16"](to, *(self.packed[i] for i in range(4))))

    def _copy(self, position: Any, n0: Any) -> None:
        """The panel to y, 16 bytes of a pixel a thread at a time."""
        from tvm.script import tirx as T
        from tvm.tirx.script.builder import ir as I

        plan, (height, width) = self.plan, self.conv.out_hw
        pieces = plan.line_bytes // _PIECE
        piece = self.thread % pieces
        channel = named("channel", n0 + piece * (_PIECE // plan.out_item))
        for start in range(0, plan.pixels, 128 // pieces):
            pixel = named("pixel", start + self.thread // pieces)
            at = named("at", position + pixel)
            line, x = named("line", at // plan.pitch), named("x", at % plan.pitch)
            image, y = named("image", line // plan.lines), named("y", line % plan.lines)
            inside = T.And(T.And(x < width, y < height), image < self.conv.n)
            if self.conv.c_out % CHANNELS:
                inside = T.And(inside, channel < self.conv.c_out)
            with I.If(inside), I.Then():
                do(T.ptx["ld.shared.v4.b32"](*(self.read[i] for i in range(4)), self._at(pixel, piece)))
                to = self.tensors["y"].ptr_to([((image * height + y) * width + x) * self.conv.c_out + channel])
                do(T.ptx[STORE[_PIECE]](to, *(self.read[i] for i in range(4))))
