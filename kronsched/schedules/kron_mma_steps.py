"""The steps of a tensor-core Kron-Matmul in TIRx: loads of mma operands, multiplications, stores, for one warp's unit at a time.

    by columns   out(q, c) = Σ_p F(p, q) x(p, c):  F is the m16 operand (16 outputs), x the n8 operand (8 columns)
    turned       the same with x as the m16 operand (16 columns) and F as the n8 operand (8 outputs)
    by rows      out(r, q) = Σ_p x(r, p) F(p, q):  x is the m16 operand (16 rows), F the n8 operand (twice 8 outputs)

All read the factor from shared memory in the same fragment order (kron_mma_layout.factor_element). float32 goes through TF32 in
three products: with x = hi + lo, F·x ≈ lo·hi + hi·lo + hi·hi, each part rounded to 11 bits. Tensor cores truncate when they add
to an accumulator; along a long axis each k tile is summed from zero and added to the accumulators outside, rounded to nearest
(Ootomo and Yokota, "Recovering single precision accuracy from Tensor Cores while surpassing the FP32 theoretical peak
performance", 2022).

Read first: `StepEmitter.emit`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kronsched.schedules.kron_mma_kernel import Kernel, evaluate
from kronsched.schedules.kron_mma_layout import LANES, spread_index
from kronsched.schedules.kron_mma_plan import Step
from kronsched.schedules.kron_mma_stores import StepStores


class StepEmitter(StepStores):
    """Emits one step of a kernel: `emit()` between two barriers of the caller."""

    def __init__(self, kernel: Kernel, step: Step, store_to: Any = None, between: Callable[[], None] | None = None) -> None:
        """`between` is run when all units are computed, before the first is stored: only where `rounds` is 1."""
        super().__init__(kernel, step, store_to)
        self.between = between

    # -- a unit -------------------------------------------------------------------------------------

    def emit(self) -> None:
        """All units of the step. With `hold`, a barrier separates the last read from the first write."""
        from tvm.tirx.script.builder import ir as I

        k, s = self.k, self.s
        k.name_lanes()
        if self.resident:
            for kt in range(s.k_tiles):
                for q in range(s.q_tiles):
                    self._load_factor(kt, q, 0, (kt * s.q_tiles + q) * 4 * self.parts)

        def each(what: Any, unit: Any) -> None:
            if self.rounds * k.warps == s.units:
                what(unit)
            else:
                with I.If(unit < s.units), I.Then():
                    what(unit)

        if self.between is not None or (s.hold and self.store_to is None):
            each(self._compute, k.warp)
            k.sync()
            if self.between is not None:
                self.between()
                k.name_lanes()
            each(self.store, k.warp)
        elif self.rounds == 1:
            each(self._whole, k.warp)
        else:
            with I.serial(0, self.rounds) as n:
                each(self._whole, n * k.warps + k.warp)

    def _whole(self, unit: Any) -> None:
        self._compute(unit)
        self.store(unit)

    def _compute(self, unit: Any) -> None:
        from tvm.tirx.script.builder import ir as I

        s, k = self.s, self.k
        tile0, q0 = self.place(unit)
        for i in range(s.accumulators):
            I.buffer_store(k.acc, k.zero, [i])
        body = k.plan.unroll
        tail = s.k_tiles % body or (body if s.k_half else 0)
        if s.k_tiles <= body or self.resident:
            tail = s.k_tiles
        if s.k_tiles > tail:
            with I.serial(0, (s.k_tiles - tail) // body) as outer:
                for kt in range(body):
                    self._multiply(tile0, q0, outer * body, kt)
        for kt in range(s.k_tiles - tail, s.k_tiles):
            self._multiply(tile0, q0, 0, kt)

    def _multiply(self, tile0: Any, q0: Any, k_dyn: Any, kt: int) -> None:
        """Add the product along k tile k_dyn + kt to the accumulators."""
        from tvm.tirx.script.builder import ir as I

        s = self.s
        half = s.k_half and isinstance(k_dyn, int) and kt == s.k_tiles - 1
        if s.by_rows:
            self._load_rows(tile0, k_dyn, kt, half)
        elif self.wide:
            self._load_columns_wide(tile0, k_dyn, kt)
        else:
            self._load_columns(tile0, k_dyn, kt, half)
        for q in range(s.q_tiles):
            slot = 0
            if self.resident:
                slot = (kt * s.q_tiles + q) * 4 * self.parts
            else:
                self._load_factor(k_dyn + kt, q, q0, slot)
            # Products outermost, so that neighbouring instructions have different accumulators; the largest last.
            for n, (f_part, x_part) in enumerate([(1, 0), (0, 1), (0, 0)] if self.split else [(0, 0)]):
                for j in range(0, s.width, 2 if s.turned else 1):
                    self._mma(q, j, slot + 4 * f_part, x_part, half, first=n == 0)
            if self.promote:
                for i in range(self.partial_registers):
                    at = q * self.partial_registers + i
                    I.buffer_store(self.k.acc, self.k.acc[at] + self.k.d[i], [at])

    def _mma(self, q: int, j: int, f: int, x_part: int, half: bool, first: bool) -> None:
        """One product of data tile j (two when turned) with q tile q (each half of it when the factor is the n8 operand)."""
        s, k = self.s, self.k
        data = self.data_registers * x_part
        if not s.by_rows and not s.turned:
            a = [k.f[f + r] for r in range(2 if half else 4)]
            b = [k.x[data + j * 2 + r] for r in range(1 if half else 2)]
            self._instruction((q * s.width + j) * 4, q, a, b, half, first)
            return
        for h in range(2):
            if s.q_parts == 1 and q * 16 + h * 8 >= s.q:
                continue
            at = [j * 2 + r for r in (0, 2, 1, 3)] if s.turned else [j * 4 + r for r in range(2 if half else 4)]
            b = [k.f[f + h + r] for r in ([0] if half else [0, 2])]
            self._instruction(self.accumulator(q, j, h), q, [k.x[data + r] for r in at], b, half, first)

    def _instruction(self, acc: int, q: int, a: list[Any], b: list[Any], half: bool, first: bool) -> None:
        """Add a·b to accumulators acc …; with `promote`, to the sums of this k tile, which the first product begins."""
        from tvm.script import tirx as T

        k = self.k
        into = [k.acc[acc + r] for r in range(4)]
        start = into
        if self.promote:
            into = [k.d[acc - q * self.partial_registers + r] for r in range(4)]
            start = [k.zero] * 4 if first else into
        evaluate(T.ptx[k.mma_half if half else k.mma](*into, *a, *b, *start))

    # -- loads --------------------------------------------------------------------------------------

    def _load_factor(self, kt: Any, q: int, q0: Any, slot: int) -> None:
        """Four registers (and the low parts behind them) of q tile q0 + q, k tile kt."""
        from tvm.script import tirx as T

        s, k = self.s, self.k
        tiles = s.factor_q_tiles
        tile = q0 + q
        if s.q_parts * s.q_tiles > tiles:
            tile = T.min(tile, tiles - 1)
        word = s.fragments * (2 if k.plan.early else 1) + ((kt * tiles + tile) * LANES + k.lane) * 4
        k.load4(k.f, slot, k.fragment_address(word))
        if not self.split:
            return
        if k.plan.early:
            k.load4(k.f, slot + 4, k.fragment_address(word + s.words))
        else:
            for r in range(4):
                k.split(k.f, slot + r, k.f, slot + 4 + r)

    def _load_rows(self, tile0: Any, k_dyn: Any, kt: int, half: bool) -> None:
        """m16 operands by ldmatrix: matrices (rows 0-7, 8-15) × (two chunks along p)."""
        from tvm.script import tirx as T

        s, k = self.s, self.k
        matrix, r = k.lane >> 3, k.lane & 7
        spread_row = spread_index(self.row_bits, r & 3, r >> 2)
        for j in range(s.width):
            row, const = tile0 * 16 + (matrix & 1) * 8 + spread_row, 16 * j
            chunk = (matrix >> 1) + k_dyn * 2 if not half else 0
            if s.exact:
                lane, fixed = row * s.stride + chunk, const * s.stride + 2 * kt
            else:
                lane, fixed = T.min(row + const, s.outer - 1) * s.stride + chunk + 2 * kt, 0
            n = 2 if half else 4
            name = f"ldmatrix.sync.aligned.m8n8.x{n}.shared.b16"
            evaluate(T.ptx[name](*[k.x[j * 4 + i] for i in range(n)], k.tile_address(s.src, lane, fixed)))
        self._to_tf32()

    def _load_columns(self, tile0: Any, k_dyn: Any, kt: int, half: bool) -> None:
        """16-bit n8 operands by ldmatrix.trans: matrices of 8 neighbours along p × 8 columns, up to four at a time."""
        from tvm.script import tirx as T

        s, k = self.s, self.k
        per = 1 if half else 2
        at_once = next(n for n in (4, 2, 1) if s.width * per % n == 0)
        matrix, r = (k.lane >> 3) & (at_once - 1), k.lane & 7
        for first in range(0, s.width * per, at_once):
            tile, h = (matrix >> 1, matrix & 1) if per == 2 else (matrix, 0)
            lane, fixed = self.column(tile0, tile, first // per, h * 8 + r + k_dyn * 16, kt * 16, s.p, s.stride)
            into = [k.x[i // per * 2 + i % per] for i in range(first, first + at_once)]
            name = f"ldmatrix.sync.aligned.m8n8.x{at_once}.trans.shared.b16"
            evaluate(T.ptx[name](*into, k.tile_address(s.src, lane, fixed)))

    def _load_columns_wide(self, tile0: Any, k_dyn: Any, kt: int) -> None:
        """float32 n8 operands, `vec` tiles at a time: a lane's columns of them are neighbours, read in one access.

        t stands for the p that `spread` says.
        """
        from tvm.script import tirx as T

        s, k, vec = self.s, self.k, self.vec
        name = "ld.shared.b32" if vec == 1 else f"ld.shared.v{vec}.b32"
        for j in range(0, s.width, vec):
            for h in range(2):
                p = spread_index(self.k_bits, k.t, 0) + k_dyn * 8
                lane, fixed = self.column(tile0, 0, j, p, kt * 8 + (h << self.k_bits[2]), s.p, s.stride)
                chunk, word = self.lane_column()
                address = k.tile_address(s.src, lane + chunk, fixed, word)
                evaluate(T.ptx[name](*[k.x[(j + i) * 2 + h] for i in range(vec)], address))
        self._to_tf32()

    def _to_tf32(self) -> None:
        """Split loaded float32 data into high and low parts, or round it (16-bit data stays as it is)."""
        for i in range(self.data_registers):
            if self.split:
                self.k.split(self.k.x, i, self.k.x, self.data_registers + i)
            elif self.wide:
                self.k.round_up(self.k.x, i)
