"""The end of a tile of Conv2d by TMA and wgmma: sums ─ scaled, rounded, packed ─(stmatrix)─ staging panels ─(TMA)─ y.

Each warp stores the 16 pixels whose sums it has, by panels of up to 128 bytes of their channels, with no barrier but its own. A
thread holds 4 bytes of each 16 bytes of a pixel: what stmatrix takes.

Read first: `TmaStore.emit`.
"""

from __future__ import annotations

from typing import Any

from kronsched.schedules.conv2d_epilogue import Epilogue
from kronsched.schedules.conv2d_gather import do, named
from kronsched.schedules.conv2d_tma_plan import TmaPlan

STORE = "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group"


class _Part:
    """Registers of a larger array, from one of them on."""

    def __init__(self, registers: Any, first: int) -> None:
        self.registers, self.first = registers, first

    def __getitem__(self, i: int) -> Any:
        return self.registers[self.first + i]


class TmaStore(Epilogue):
    """Emits the stores of a warp. shared: buffer of shared memory, bytes.  panels: first byte of all staging panels."""

    def __init__(self, plan: TmaPlan, sums: Any, tensors: dict[str, Any], y_map: Any, shared: Any, panels: int, tx: Any) -> None:
        """Allocate registers."""
        from tvm.script.ir_builder import IRBuilder
        from tvm.tirx.script.builder import ir as I

        super().__init__(plan, sums, tensors, named("quad", tx & 3))
        self.plan, self.y_map, self.shared = plan, y_map, shared
        self.lane = named("lane", tx & 31)
        self.warp_row = named("warp_row", (tx >> 5 & 3) * 16)
        self.panels = named("panels", panels + (tx >> 5) * (plan.panels * plan.panel_bytes))
        self.packed = IRBuilder.name("packed", I.alloc_local([4], "uint32"))
        self.turn = IRBuilder.name("turn", I.alloc_local([1], "int32"))
        I.buffer_store(self.turn, 0, [0])
        self.early: dict[str, Any] = {}

    def read_columns(self, column: Any) -> None:
        """Read scale and bias of the only tile's channels, from `column` on, into registers."""
        from tvm.script.ir_builder import IRBuilder
        from tvm.tirx.script.builder import ir as I

        pieces = self.plan.stored * self.plan.out_item // 16
        for name, part in self.columns.items():
            self.early[name] = IRBuilder.name(name + "_all", I.alloc_local([pieces * self.width], str(part.dtype)))
        for piece in range(pieces):
            self._pick(piece)
            self._read_columns(named("channel", column + piece * 4 * self.width + self.t * self.width))

    def _pick(self, piece: int) -> None:
        """Let `columns` be those of 16 bytes of a pixel."""
        self.columns = {name: _Part(all_of, piece * self.width) for name, all_of in self.early.items()}

    def emit(self, row: Any, column: Any) -> None:
        """Store all sums of a warpgroup: row, column: its first pixel and channel."""
        from tvm.script import tirx as T
        from tvm.tirx.script.builder import ir as I

        plan = self.plan
        for slab in range(plan.slabs):
            m = named("m", row + slab * 64 + self.warp_row)
            for start in range(0, plan.stored, plan.panel_columns):
                with I.If(self.lane == 0), I.Then():  # the panel's last content has left
                    do(T.ptx.cp.async_.bulk.wait_group.read(plan.panels - 1))
                do(T.cuda.warp_sync())
                self._fill(slab * plan.stored // 2 + start // 2, m, column, start)
                do(T.ptx.fence.proxy.async_.shared__cta())
                do(T.cuda.warp_sync())
                with I.If(self.lane == 0), I.Then():
                    self._send(m, column + start)
                    do(T.ptx.cp.async_.bulk.commit_group())
                if plan.panels > 1:
                    I.buffer_store(self.turn, plan.panel_bytes - self.turn[0], [0])

    def finish(self) -> None:
        """Wait until panels may be given up."""
        from tvm.script import tirx as T
        from tvm.tirx.script.builder import ir as I

        with I.If(self.lane == 0), I.Then():
            do(T.ptx.cp.async_.bulk.wait_group.read(0))

    def _send(self, m: Any, channel: Any) -> None:
        """Start the copy of the panel whose turn it is to y, which leaves out what lies beyond it."""
        from tvm.script import tirx as T
        from tvm.tirx.script.builder import ir as I

        source = self.shared.ptr_to([self.panels + self.turn[0]])
        with I.If(T.And(channel < self.conv.c_out, m < self.conv.pixels)), I.Then():
            do(T.ptx[STORE](T.address_of(self.y_map), channel, m, source))

    def _fill(self, first: int, m: Any, column: Any, offset: int) -> None:
        """Fill the panel whose turn it is from the sums `first` and on: 32 bytes of each pixel at a time."""
        from tvm.script import tirx as T

        plan = self.plan
        row_bytes = plan.panel_columns * plan.out_item
        per_piece = 16 // plan.out_item  # channels in 16 bytes
        for two in range(row_bytes // 32):
            for piece in range(2):
                start = (two * 2 + piece) * per_piece
                if self.early:
                    self._pick((offset + start) // per_piece)
                self._piece(piece, first + start // 2, m, column + (offset + start))
            at = (self.lane & 15) * row_bytes + (two * 2 + (self.lane >> 4)) * 16
            at = at ^ (at >> 7 & (row_bytes // 16 - 1)) << 4  # the swizzle
            to = self.shared.ptr_to([self.panels + self.turn[0] + at])
            words = (self.packed[i] for i in range(4))
            do(T.ptx["stmatrix.sync.aligned.m8n8.x4.shared.b16"](to, *words))

    def _piece(self, piece: int, first: int, m: Any, channel: Any) -> None:
        """Pack the thread's 4 of 16 bytes of a pixel and of the one 8 further on."""
        from tvm.script import tirx as T
        from tvm.tirx.script.builder import ir as I

        conv = self.conv
        mine = named("channel", channel + self.t * self.width)
        if not self.early:
            self._read_columns(mine)
        for half in range(2):
            if self.rest is not None:
                pixel = T.min(m + (self.lane >> 2) + half * 8, conv.pixels - 1)
                self._read_residual(named("from", pixel * conv.c_out + T.min(mine, conv.c_out - self.width)))
            index = [first + 2 * half + i // 2 * 4 + i % 2 for i in range(self.width)]
            self._pack([self._value(a, i) for i, a in enumerate(index)])
            I.buffer_store(self.packed, self.words[0], [piece * 2 + half])
