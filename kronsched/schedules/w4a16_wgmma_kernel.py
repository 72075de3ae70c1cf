"""The W4A16 product on warpgroup instructions (wgmma) whose threads fetch for themselves, as a TIRx tile program.

    Yᵀ (n × m) = Wᵀ (n × k) Xᵀ: 64 columns of W are the A operand, dequantised in registers; x is the B operand, in shared memory.

What a chunk of 128 rows of k needs comes by cp.async, `stages` chunks in a ring: x in pieces of 4 bytes, reordered on the way to
the order in which the nibbles of a word stand, so no launch comes before this one; a barrier a chunk. Warpgroups along k have
rings and barriers of their own; their sums meet at the end (w4a16_epilogue.py).

There is no fence between cp.async and wgmma: as in CUTLASS's kernels for sm_90 that fill operands so, waiting for the copies and
a barrier order them.

Read first: `main_kernel`: the loop over `it`; w4a16_wgmma_product.py (a chunk's products), w4a16_wgmma_plan.py (sizes).
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator,misc,valid-type,name-defined,no-redef"

from typing import Any

from tvm.script import tirx as T

from kronsched.quant.layout import TILE_K
from kronsched.schedules.w4a16_around import wait
from kronsched.schedules.w4a16_epilogue import epilogue
from kronsched.schedules.w4a16_indices import Indices
from kronsched.schedules.w4a16_wgmma_plan import COLUMN_WORDS, W_TILE, WgmmaPlan
from kronsched.schedules.w4a16_wgmma_product import COPY_4, LINE, main_function, product, ring_of, where_whole, x_copier

COPY_16 = "cp.async.cg.shared.global"


def main_kernel(p: WgmmaPlan) -> Any:
    """The PrimFunc over x, w, s, [z] and y (or p): see the module."""
    w, at = p.workload, Indices(p)
    TILES, GK, ROWS, D, TRIPS = p.tiles, p.groups_k, p.rows, p.stages, p.trips
    GRID_N, GRID_K, GRID_M = p.grid
    SHARERS, PARTS, STAGE = p.sharers, TILE_K // p.span, p.stage_bytes // 4
    SUMS = TILES * ROWS // 2  # a thread
    W_AT, S_AT, Z_AT = p.w_at, p.s_at, p.z_at
    zeros = w.zero_point == "asymmetric"
    waits, early = p.start != "serial", p.start == "early"
    finish, multiply, copy_two, when_whole = epilogue(p), product(p), x_copier(p), where_whole(p)

    @T.inline
    def kernel(x, w, s, z, x_sums, y):
        T.device_entry()
        T.attr({"tirx.launch_bounds_min_blocks_per_sm": 1})
        cta = T.cta_id([GRID_N * GRID_K * GRID_M])
        tx = T.thread_id([p.threads])
        bm: T.let = cta % GRID_M
        by: T.let = cta // GRID_M % GRID_K
        bx: T.let = cta // (GRID_M * GRID_K)
        wk: T.let = ring_of(p, tx)
        tg: T.let = tx % SHARERS
        wn: T.let = tg // 128
        warp: T.let = tx % 128 // 32
        lane: T.let = tx % 32
        g: T.let = lane // 4
        t: T.let = lane % 4
        strip: T.let = bx * (p.columns // 16) + wn * (4 * TILES) + warp  # the warp's first
        count: T.let = T.min(T.max(p.chunks - by * (TRIPS * GK) - wk + GK - 1, 0) // GK, TRIPS) if p.ragged_k else TRIPS
        smem = T.alloc_buffer((p.shared_words,), "float32", scope="shared.dyn", align=1024)
        ring: T.let = wk * (D * STAGE)
        acc = T.alloc_local([SUMS], "float32")
        part = T.alloc_local([SUMS], "float32")
        carry = T.alloc_local([1], "uint32")

        @T.inline
        def copy_w(it):
            """The thread's words, scales and zeros of trip `it` on their way into the ring."""
            to: T.let = ring + it % D * STAGE
            for i in T.unroll(TILES):
                tile = T.meta_var(at.tile(strip + 4 * i))
                for half in T.unroll(2):
                    own = T.meta_var(warp * 256 + half * 128 + lane * 4)
                    T.ptx[COPY_16](
                        smem.ptr_to([to + W_AT + (wn * TILES + i) * (W_TILE // 4) + own]),
                        w.ptr_to([tile, at.chunk(it, by, wk), own]),
                        16,
                    )
                if t == 0:
                    for group in T.unroll(PARTS):
                        column = T.meta_var(((wn * TILES + i) * PARTS + group) * COLUMN_WORDS + g * 4 + warp)
                        source = T.meta_var([tile, at.group(it, by, wk, group), g * 8 + warp * 2])
                        T.ptx[COPY_4](smem.ptr_to([to + S_AT + column]), s.ptr_to(source), 4)
                        if zeros:
                            T.ptx[COPY_4](smem.ptr_to([to + Z_AT + column]), z.ptr_to(source), 4)

        @T.inline
        def copy_x(it):
            """The thread's share of x of trip `it`: word 4 t + j of 32 values goes to place t of the 16-byte piece j."""
            word: T.let = tg % (2 * LINE)
            to: T.let = ring + it % D * STAGE + word // LINE * (ROWS * LINE) + word % 16 // 4
            piece: T.let = word % LINE // 16 * 4 + word % 4

            @T.inline
            def copy_rows(whole):
                for e in T.unroll(p.x_words // SHARERS):
                    row = T.meta_var(e * (SHARERS // (2 * LINE)) + tg // (2 * LINE))
                    into = T.meta_var(smem.ptr_to([to + row * LINE + (piece ^ (row % 8)) * 4]))
                    copy_two(into, x, bm * ROWS + row, at.slot(it, by, wk) * TILE_K + word * 2, whole)

            when_whole(at.slot(it, by, wk), copy_rows)

        if waits and not early:
            wait()
        for d in T.unroll(D - 1):
            if d < count:
                copy_w(d)
        if early:
            wait()
        for d in T.unroll(D - 1):
            if d < count:
                copy_x(d)
            T.ptx.cp.async_.commit_group()
        for i in T.unroll(SUMS):
            acc[i] = T.float32(0)
        for it in T.serial(count):
            T.ptx.cp.async_.wait_group(D - 2)
            T.ptx.bar.sync(T.Cast("uint32", wk + 1), T.uint32(SHARERS))
            if it + D - 1 < count:
                copy_w(it + D - 1)
                copy_x(it + D - 1)
            T.ptx.cp.async_.commit_group()
            multiply((acc, part, carry), smem, x_sums, ring + it % D * STAGE, at.slot(it, by, wk), bm, tg, it, None)
        T.ptx.cp.async_.wait_group(0)
        finish(acc, smem, y, tx, wn * (4 * TILES) + warp, wk, g, t, bx, by, bm)

    return main_function(p, kernel)
