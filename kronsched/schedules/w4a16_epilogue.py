"""The end of the W4A16 product: sums of the warps along k meet in shared memory, are added in a fixed order, rounded and written.

    flat      every warp along k writes its tile; all threads add them up, slot after slot
    halving   the upper half writes, the lower half adds, and again, in half the memory

Read first: `epilogue`.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator,misc,valid-type,name-defined"

from typing import Any

from tvm.script import tirx as T

from kronsched.schedules.w4a16_plan import W4Tiles


def epilogue(p: W4Tiles) -> Any:
    """An inline (acc, smem, y, tx, strip, wk, g, t, bx, by, bm) that writes the block's part of y, or of the partial results.

    strip: the warp's first strip of 16 columns in the block; its next ones are `strip_step` further on each.
    """
    m, n = p.workload.m, p.workload.n
    STRIPS, STEP, WK, MT, PITCH, COLUMNS, THREADS = p.strips, p.strip_step, p.warps_k, p.mtile, p.pitch, p.columns, p.consumers
    ROWS = min(p.rows, m)
    VECTOR = 4 if n % 4 == 0 else 1
    PIECES = ROWS * COLUMNS // VECTOR
    halving = p.reduction == "halving"
    dtype = "float32" if p.split_k > 1 else p.workload.a_dtype
    LEVELS = WK.bit_length() - 1

    def place(slot: Any, strip: Any, i: Any, q: Any, g: Any, t: Any) -> Any:
        """Where element q of an accumulator (columns g, g + 8; rows 2t, 2t + 1) lies: rows of y are rows there."""
        return (slot * (8 * MT) + i * 8 + t * 2 + q % 2) * PITCH + strip * 16 + g + q // 2 * 8

    @T.inline
    def meet():
        """All threads that hold sums."""
        if p.threads == THREADS:
            T.cuda.cta_sync()
        else:
            T.ptx.bar.sync(T.uint32(1), T.uint32(THREADS))

    @T.inline
    def write(acc, smem, slot, strip, g, t):
        for s in T.unroll(STRIPS):
            for i in T.unroll(MT):
                for q in T.unroll(4):
                    smem[place(slot, strip + s * STEP, i, q, g, t)] = acc[(s * MT + i) * 4 + q]

    @T.inline
    def add(acc, smem, slot, strip, g, t):
        for s in T.unroll(STRIPS):
            for i in T.unroll(MT):
                for q in T.unroll(4):
                    at = T.meta_var((s * MT + i) * 4 + q)
                    acc[at] = acc[at] + smem[place(slot, strip + s * STEP, i, q, g, t)]

    @T.inline
    def finish(acc, smem, y, tx, strip, wk, g, t, bx, by, bm):
        meet()
        if halving:
            for level in T.unroll(LEVELS):
                half = T.meta_var((WK // 2) >> level)
                if wk >= half and wk < 2 * half:
                    write(acc, smem, wk - half, strip, g, t)
                meet()
                if wk < half:
                    add(acc, smem, wk, strip, g, t)
                meet()
            if wk == 0:
                write(acc, smem, 0, strip, g, t)
        else:
            write(acc, smem, wk, strip, g, t)
        meet()
        v = T.alloc_local([VECTOR], "float32")
        for e in T.serial(T.ceildiv(PIECES, THREADS)):
            piece: T.let = e * THREADS + tx
            row: T.let = piece // (COLUMNS // VECTOR)
            column: T.let = piece % (COLUMNS // VECTOR) * VECTOR
            if piece < PIECES and bm * (8 * MT) + row < m and bx * COLUMNS + column < n:
                for q in T.unroll(VECTOR):
                    v[q] = T.float32(0)
                for slot in T.unroll(1 if halving else WK):
                    for q in T.vectorized(VECTOR):
                        v[q] = v[q] + smem[(slot * (8 * MT) + row) * PITCH + column + q]
                for q in T.vectorized(VECTOR):
                    y[by * m + bm * (8 * MT) + row, bx * COLUMNS + column + q] = T.cast(v[q], dtype)

    return finish
