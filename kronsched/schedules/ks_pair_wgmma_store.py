"""Sums of ks_pair_wgmma_kernel.py on their way out of registers: to the middle in shared memory, and to Y.

    middle    rounded, from (i, j) of the first factor to (i, l, k) of the second: panels of 64 k, as wgmma reads them
    results   rounded, from l-major registers to (j, l): staging panels of a warp, 16 samples each ─ Y

wgmma leaves a thread, for every 8 columns, four sums: rows g and g + 8 of its warp's 16, columns 2t and 2t + 1, with
g = lane / 4, t = lane % 4. Of d slices l it then has 2·d neighbours of a row of Y.

Read first: `PairStore.middle`, `PairStore.results`.
"""

from __future__ import annotations

from typing import Any

from kronsched.schedules.gemm_dense_wgmma_mainloop import evaluate
from kronsched.schedules.ks_epilogue import SCRATCH, half_of, word_maker
from kronsched.schedules.ks_pair_wgmma_plan import ITEM, PANEL, STEPS, STORE_ROWS, WgmmaPairPlan
from kronsched.schedules.ks_tile_kernel import EVICT_FIRST

_STORE = "cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group.L2::cache_hint"
_PACK = {"float16": "cvt.rn.f16x2.f32", "bfloat16": "cvt.rn.bf16x2.f32"}
_ROW = STEPS * ITEM


class PairStore:
    """Emits the stores of one consumer warpgroup.

    group: its number.  middle: first byte of its middle in shared memory.  tensors: y, and what the epilogue takes.  y_map: the
    tensor map of Y.
    """

    def __init__(
        self, p: WgmmaPairPlan, tx: Any, group: Any, shared: Any, middle: Any, sums: Any, tensors: dict[str, Any], y_map: Any
    ) -> None:
        """Take the kernel's parts."""
        from tvm.script.ir_builder import IRBuilder
        from tvm.tirx.script.builder import ir as I

        name = IRBuilder.name
        self.p, self.group, self.shared, self.sums, self.y_map = p, group, shared, sums, y_map
        self.tensors, self.y = tensors, tensors["y"]
        self.lane = name("lane", I.Bind(tx & 31))
        self.warp = name("warp", I.Bind((tx & 127) >> 5))
        self.g = name("g", I.Bind(self.lane >> 2))
        self.t = name("t", I.Bind(self.lane & 3))
        self.middle_row = name("middle_row", I.Bind(middle + (self.warp * STORE_ROWS + self.g) * _ROW))
        self.stage = name("stage_at", I.Bind(p.stores_at + (group * 4 + self.warp) * (p.panels * p.store_bytes)))
        self.words = name("words", I.alloc_local([4], "uint32"))
        if p.epilogue:
            self.make = word_maker(p.epilogue, p.dtype)
            self.floats = name("floats", I.alloc_local([SCRATCH], "float32"))
            self.bias = name("bias_word", I.alloc_local([1], "uint32"))
            words = p.store_columns // 4  # of a thread's in a staging panel
            self.rest = name("residual_words", I.alloc_local([words if p.epilogue.residual else 1], "uint32"))

    def sync(self) -> None:
        """A barrier of the warpgroups that share a middle."""
        from tvm.script import tirx as T

        which, threads = (0, 128 * self.p.groups) if self.p.together else (self.group, 128)
        evaluate(T.ptx.bar.sync(T.Cast("uint32", which + 1), T.uint32(threads)))

    def finish(self) -> None:
        """Wait until everything is written."""
        from tvm.script import tirx as T
        from tvm.tirx.script.builder import ir as I

        if self.p.copies:
            with I.If(self.lane == 0), I.Then():
                evaluate(T.ptx.cp.async_.bulk.wait_group(0))

    def _round(self, word: int, low: int, high: int) -> None:
        """Two sums in a word."""
        from tvm.script import tirx as T

        evaluate(T.ptx[_PACK[self.p.dtype]](self.words[word], self.sums[high], self.sums[low]))

    # -- middle -------------------------------------------------------------------------------------

    def middle(self, i: Any) -> None:
        """Put away the sums of block i of the first factor."""
        b = self.p.first[1]
        for eight in range(b // 8):
            column = i * b + eight * 8 + self.t * 2
            for half in range(2):
                self._round(0, eight * 4 + half * 2, eight * 4 + half * 2 + 1)
                self._put(column, half * 8)

    def _put(self, column: Any, row: int) -> None:
        """Store the word of two columns of the middle, `row` rows below the thread's first."""
        from tvm.script import tirx as T
        from tvm.tirx.script.builder import ir as I

        if self.p.second[3] == 1:
            evaluate(T.ptx["st.shared.b32"](self.shared.ptr_to([self._place(column) + row * _ROW]), self.words[0]))
            return
        for e in range(2):
            to = self.shared.ptr_to([self._place(column + e) + row * _ROW])
            half = I.Bind(T.Cast("uint16", self.words[0] >> T.uint32(16 * e)))
            evaluate(T.ptx["st.shared.b16"](to, half))

    def _place(self, column: Any) -> Any:
        """The byte of a column (i, k, l) of the middle in the thread's first row, whose number is g in terms of the swizzle."""
        _, _, c, d = self.p.second
        i, k, l = column // (c * d), column % (c * d) // d, column % d  # noqa: E741
        panel = (i * d + l) * self.p.second_chunks + k // STEPS
        return self.middle_row + panel * PANEL + ((k % STEPS // 8 ^ self.g) << 4) + k % 8 * ITEM

    # -- results ------------------------------------------------------------------------------------

    def results(self, row: Any, i: Any, run: Any) -> None:
        """Store the sums of all l of a run of outputs j of block i; row: first of the warpgroup's samples."""
        from tvm.script import tirx as T
        from tvm.script.ir_builder import IRBuilder
        from tvm.tirx.script.builder import ir as I

        p, d = self.p, self.p.second[3]
        mine = IRBuilder.name("mine", I.Bind(row + self.warp * STORE_ROWS))
        eights = p.store_columns // d // 8
        for n in range(p.block_j // (eights * 8)):
            column = run * (p.block_j * d) + n * p.store_columns
            at = self.stage + n % p.panels * p.store_bytes
            if p.copies:
                with I.If(self.lane == 0), I.Then():  # the panel's last content has left
                    evaluate(T.ptx.cp.async_.bulk.wait_group.read(p.panels - 1))
            evaluate(T.cuda.warp_sync())
            if p.epilogue.residual:
                self._load_residual(mine, i, column, eights)
            for eight in range(eights):
                self._fill(at, eight, n * eights + eight, i, column)
            if p.copies:
                self._send(at, column, mine, i)
            else:
                evaluate(T.cuda.warp_sync())
                self._write(at, column, mine, i)

    def _send(self, at: Any, column: Any, row: Any, i: Any) -> None:
        """One thread has a staging panel copied to Y."""
        from tvm.script import tirx as T
        from tvm.tirx.script.builder import ir as I

        p, (_, b, _, d) = self.p, self.p.second
        evaluate(T.ptx.fence.proxy.async_.shared__cta())
        evaluate(T.cuda.warp_sync())
        with I.If(self.lane == 0), I.Then():
            with I.If(T.And(column < b * d, row < p.batch)), I.Then():
                place = (T.address_of(self.y_map), column, row, i, self.shared.ptr_to([at]))
                evaluate(T.ptx[_STORE](*place, T.uint64(EVICT_FIRST)))
            evaluate(T.ptx.cp.async_.bulk.commit_group())

    def _write(self, at: Any, column: Any, row: Any, i: Any) -> None:
        """The warp writes a staging panel to Y, 16 bytes a thread: neighbouring threads neighbouring bytes."""
        from tvm.script import tirx as T
        from tvm.script.ir_builder import IRBuilder
        from tvm.tirx.script.builder import ir as I

        p, (a, b, _, d) = self.p, self.p.second
        chunks = p.store_columns * ITEM // 16
        words = [self.words[q] for q in range(4)]
        for e in range(STORE_ROWS * chunks // 32):
            piece = IRBuilder.name("piece", I.Bind(e * 32 + self.lane))
            r, chunk = piece // chunks, piece % chunks
            with I.If(T.And(column + chunk * 8 < b * d, row + r < p.batch)), I.Then():
                near = self.shared.ptr_to([at + r * (p.store_columns * ITEM) + (self._swizzled(chunk, r) << 4)])
                evaluate(T.ptx["ld.shared.v4.b32"](*words, near))
                far = self.y.ptr_to([(row + r) * (a * b * d) + i * (b * d) + column + chunk * 8])
                evaluate(T.ptx["st.global.v4.b32"](far, *words))

    def _swizzled(self, chunk: Any, row: Any) -> Any:
        """Where a 16-byte chunk of a row of a staging panel lies: the swizzle of as many bytes as the row has, or none."""
        columns = self.p.store_columns
        return {64: lambda: chunk ^ row % 8, 32: lambda: chunk ^ row // 2 % 4, 48: lambda: chunk}[columns]()

    def _fill(self, at: Any, eight: int, source: int, i: Any, column: Any) -> None:
        """Eight outputs j, number `eight` of a staging panel and `source` of the sums."""
        from tvm.script import tirx as T

        p, d = self.p, self.p.second[3]
        byte = eight * 16 * d + self.t * 4 * d
        for half in range(2):
            for w in range(d):
                self._result(w, eight, source, half, i, column)
            row = self.g + 8 * half
            start = at + row * (p.store_columns * ITEM)
            if d == 3:  # words of a thread may lie in two chunks
                for w in range(d):
                    evaluate(T.ptx["st.shared.b32"](self.shared.ptr_to([start + byte + 4 * w]), self.words[w]))
                continue
            to = self.shared.ptr_to([start + (self._swizzled(byte // 16, row) << 4) + byte % 16])
            kind = "st.shared.b32" if d == 1 else f"st.shared.v{d}.b32"
            evaluate(T.ptx[kind](to, *(self.words[w] for w in range(d))))

    def _result(self, w: int, eight: int, source: int, half: int, i: Any, column: Any) -> None:
        """Word w of the thread's 2·d neighbours of a row, from the sums of its two outputs j."""
        from tvm.script import tirx as T

        p, (_, b, _, d) = self.p, self.p.second
        low, high = (v % d * (p.block_j // 2) + source * 4 + half * 2 + v // d for v in (2 * w, 2 * w + 1))
        if not p.epilogue:
            self._round(w, low, high)
            return
        if p.epilogue.bias:
            at = T.min(column + (eight * 8 + self.t * 2) * d + 2 * w, b * d - 2)
            evaluate(T.ptx["ld.global.nc.b32"](self.bias[0], self.tensors["bias"].ptr_to([i * (b * d) + at])))
        halves = [half_of(self.bias[0], e, p.dtype) for e in range(2)]
        rest = self.rest[(eight * 2 + half) * d + w if p.epilogue.residual else 0]
        self.make(self.words, w, self.floats, (self.sums[low], self.sums[high]), halves, rest)

    def _load_residual(self, row: Any, i: Any, column: Any, eights: int) -> None:
        """The thread's words of the residual for a staging panel."""
        from tvm.script import tirx as T

        p, (a, b, _, d) = self.p, self.p.second
        for eight in range(eights):
            for half in range(2):
                sample = T.min(row + self.g + half * 8, p.batch - 1)
                for w in range(d):
                    at = T.min(column + (eight * 8 + self.t * 2) * d + 2 * w, b * d - 2)
                    source = self.tensors["residual"].ptr_to([sample * (a * b * d) + i * (b * d) + at])
                    evaluate(T.ptx["ld.global.nc.b32"](self.rest[(eight * 2 + half) * d + w], source))
