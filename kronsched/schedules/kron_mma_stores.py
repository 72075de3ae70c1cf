"""Where a warp's unit lies in the tile, and how its results are stored (kron_mma_steps.py computes them).

float32 columns: with vec = 4, column g of four n8 tiles are four neighbouring columns of the tensor: operands are read and
results written 16 bytes at a time; columns 2t + e of the four tiles are chunk t + 4e. With vec = 2, g stands for two neighbours.
"""

from __future__ import annotations

from typing import Any

from kronsched.schedules.kron_mma_kernel import Kernel
from kronsched.schedules.kron_mma_layout import spread_index
from kronsched.schedules.kron_mma_operands import StepOperands
from kronsched.schedules.kron_mma_plan import Step


class StepStores(StepOperands):
    """Places of a step's operands and the stores of its results."""

    def __init__(self, kernel: Kernel, step: Step, store_to: Any = None) -> None:
        """`store_to(lane's chunk, constant, word, accumulators)` replaces the store to shared memory."""
        super().__init__(kernel.plan, step)
        self.k, self.store_to = kernel, store_to

    # -- places -------------------------------------------------------------------------------------

    def place(self, unit: Any) -> tuple[Any, Any]:
        """(first data tile, first q tile) of a unit."""
        s = self.s
        if s.q_parts == 1:
            return unit * s.width, 0
        return unit % s.groups * s.width, unit // s.groups * s.q_tiles

    def accumulator(self, q: int, j: int, h: int) -> int:
        """First accumulator of the 8 outputs h of q tile q and data tile j (of tiles j and j + 1 when turned)."""
        return ((q * 2 + h) * (self.s.width // 2) + j // 2) * 4 if self.s.turned else ((q * self.s.width + j) * 2 + h) * 4

    def lane_column(self) -> tuple[Any, Any]:
        """(chunk, word) of the float32 column that g stands for, from the start of `vec` n8 tiles."""
        g = self.k.g
        if self.vec == 4:
            return (g >> 1) + ((g & 1) << 2), 0
        if self.vec == 2:
            return g >> 1, (g & 1) * 2
        return g >> 2, g & 3

    def column(self, tile0: Any, tile: Any, tile_c: int, p: Any, p_c: int, size: int, stride: int) -> tuple[Any, int]:
        """(lane's part, constant) of the chunk of n8 tile tile0 + tile + tile_c at index p + p_c of the axis of `size`."""
        from tvm.script import tirx as T

        s = self.s
        across = stride // self.per8  # n8 tiles between neighbours of the axis

        def chunk(n: Any) -> Any:
            return n // across * (size * stride) + n % across * self.per8

        if s.exact:
            return chunk(tile0) + chunk(tile) + p * stride, chunk(tile_c) + p_c * stride
        n, at = tile0 + tile + tile_c, p + p_c
        if s.tiles % s.width:
            n = T.min(n, s.tiles - self.vec)
        if size % 8:
            at = T.min(at, size - 1)
        return chunk(n) + at * stride, 0

    # -- stores -------------------------------------------------------------------------------------

    def store(self, unit: Any) -> None:
        """Store the accumulators of a unit."""
        s = self.s
        tile0, q0 = self.place(unit)
        for q in range(s.q_tiles):
            for h in range(2):
                if s.q_parts == 1 and q * 16 + h * 8 >= s.q:
                    continue
                for j in range(0, s.width, self.vec):
                    if s.by_rows:
                        self._store_rows(tile0, q0, q, j, h)
                    elif s.turned:
                        self._store_turned(tile0, q0, q, j, h)
                    else:
                        self._store_columns(tile0, q0, q, j, h)

    def _store_columns(self, tile0: Any, q0: Any, q: int, j: int, h: int) -> None:
        """Columns of output row 8h + g of q tile q0 + q in `vec` n8 tiles."""
        s, k = self.s, self.k
        row = spread_index(self.row_bits, k.g & 3, k.g >> 2) + q0 * 16
        lane, fixed, guards = self._output(tile0, j, row, q * 16 + h * 8)
        acc = [(q * s.width + j + i) * 4 + 2 * h for i in range(self.vec)]
        if not self.wide:
            self._put(lane, fixed, k.t, [acc[0], acc[0] + 1], guards)
        elif self.vec == 1:
            self._put(lane + (k.t >> 1), fixed, (k.t & 1) * 2, [acc[0], acc[0] + 1], guards)
        elif self.vec == 2:
            self._put(lane + k.t, fixed, 0, [acc[0], acc[1], acc[0] + 1, acc[1] + 1], guards)
        else:
            for e in range(2):
                at, more = (lane + k.t, 4 * e) if s.exact else (lane + k.t + 4 * e, 0)
                self._put(at, fixed + more, 0, [a + e for a in acc], guards)

    def _store_turned(self, tile0: Any, q0: Any, q: int, j: int, h: int) -> None:
        """Outputs 2t and 2t + 1 (as spread) of the lane's columns in `vec` n8 tiles."""
        k = self.k
        chunk, word = self.lane_column()
        for e in range(2):
            row = spread_index(self.k_bits, k.t, 0) + q0 * 16
            lane, fixed, guards = self._output(tile0, j, row, q * 16 + h * 8 + (e << self.k_bits[2]))
            acc = [self.accumulator(q, j + i, h) + (j + i) % 2 * 2 + e for i in range(self.vec)]
            self._put(lane + chunk, fixed, word, acc, guards)

    def _output(self, tile0: Any, j: int, row: Any, const: int) -> tuple[Any, int, list[Any]]:
        """(lane's part, constant, guards) of the chunk of output row + const of n8 tile tile0 + j."""
        s = self.s
        guards = []
        if s.q % 8 or (s.q_parts > 1 and s.q_parts * s.q_tiles * 16 > s.q):
            guards.append(row + const < s.q)
        if s.tiles % s.width:
            guards.append(tile0 + j < s.tiles)
        if s.exact:
            return *self.column(tile0, 0, j, row, const, s.q, s.stride_out), guards
        across = s.stride_out // self.per8
        n = tile0 + j
        lane = n // across * (s.q * s.stride_out) + n % across * self.per8 + (row + const) * s.stride_out
        return lane, 0, guards

    def _store_rows(self, tile0: Any, q0: Any, q: int, j: int, h: int) -> None:
        """Two neighbouring outputs of n8 tile 2 (q0 + q) + h for rows g and g + 8 of m16 tile tile0 + j."""
        s, k = self.s, self.k
        n = q * 2 + h
        for up in range(2):
            row = spread_index(self.row_bits, k.g & 3, k.g >> 2) + tile0 * 16
            const = j * 16 + up * 8
            guards = []
            if s.tiles % s.width or s.outer % 16:
                guards.append(row + const < s.outer)
            if s.q_parts > 1 and s.q_parts * s.q_tiles * 16 > s.q:
                guards.append((q0 * 2 + n) * 8 < s.q)
            if s.exact:
                lane, fixed = row * s.stride_out + q0 * 2 * self.per8, const * s.stride_out + n * self.per8
            else:
                lane, fixed = (row + const) * s.stride_out + (q0 * 2 + n) * self.per8, 0
            chunk, word = (k.t >> 1, (k.t & 1) * 2) if self.wide else (0, k.t)
            acc = self.accumulator(q, j, h) + 2 * up
            self._put(lane + chunk, fixed, word, [acc, acc + 1], guards)

    def _put(self, lane: Any, fixed: int, word: Any, acc: list[int], guards: list[Any]) -> None:
        """Store accumulators side by side from `word` of chunk lane + fixed."""
        k = self.k
        with k.guarded(guards):
            if self.store_to is not None:
                self.store_to(lane, fixed, word, acc)
            else:
                k.store(k.tile_address(self.s.dst, lane, fixed, word), acc, shared=True)
