"""The W4A16 product on warpgroup instructions (wgmma) fed by producer warps, as a TIRx tile program.

    Yᵀ (n × m) = Wᵀ (n × k) Xᵀ: 64 columns of W are the A operand, dequantised in registers; x is the B operand, in shared memory.

    producers   a warpgroup, shared out to the rings: packed words, scales and zeros of a chunk of 128 rows of k by bulk copies
                copies = "ring": so comes x, which was prepared (w4a16_prepare.py)
                copies = "fetch": x by 4-byte copies of all producers, which reorder it on the way
    consumers   wait until a stage is full; dequantise and multiply; say that the stage is empty

Warpgroups along k do not wait for each other, and none has copies to issue: 143 instructions for a tile and chunk at 64 rows
where the kernel whose threads fetch for themselves (w4a16_wgmma_kernel.py) needs 241. With 64 rows and 16384² weights on an H200
that is 64 µs after 81. What was tried and is not here: sending x to two or four blocks of a cluster at once (within 1% at best,
four: up to 1.8 times slower), and adding up split sums through the shared memory of a cluster (0.9 to 1.8 times the time of a
second launch).

Read first: `ring_kernel`, its `produce_alone` and `consume`; w4a16_wgmma_product.py (a chunk's products), w4a16_wgmma_plan.py.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator,misc,valid-type,name-defined,no-redef"

from typing import Any

from tvm.script import tirx as T

from kronsched.quant.layout import TILE_K
from kronsched.schedules.w4a16_around import wait
from kronsched.schedules.w4a16_epilogue import epilogue
from kronsched.schedules.w4a16_indices import Indices
from kronsched.schedules.w4a16_wgmma_plan import COLUMN_WORDS, W_TILE, WgmmaPlan
from kronsched.schedules.w4a16_wgmma_product import LINE, carried_words, main_function, product, ring_of, where_whole, x_copier

BULK = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"


def ring_kernel(p: WgmmaPlan) -> Any:
    """The PrimFunc over x or xs, w, s, [z], [x_sums] and y (or p): see the module."""
    w, at = p.workload, Indices(p)
    TILES, GN, GK, ROWS, D, TRIPS = p.tiles, p.groups_n, p.groups_k, p.rows, p.stages, p.trips
    GRID_N, GRID_K, GRID_M = p.grid
    CONSUMERS, SHARERS, PARTS = p.consumers, p.sharers, TILE_K // p.span
    STAGE, X_WORDS = p.stage_bytes // 4, p.x_words
    SUMS = TILES * ROWS // 2  # a thread
    W_AT, S_AT, Z_AT = p.w_at, p.s_at, p.z_at
    zeros, floats = w.zero_point == "asymmetric", w.zero_point == "float"
    joined = w.layout.rows_per_group == p.span and not at.clamp_groups  # the columns of a chunk's groups follow one another
    PIECES, JOINED = (1, PARTS) if joined else (PARTS, 1)
    BYTES = 4 * (p.stage_words if p.prepared else p.stage_words - p.x_words)
    waits, early = p.start != "serial", p.start == "early"
    alone = p.prepared
    FETCHERS = 128 // GK  # producers of a ring
    ARRIVALS = 1 if alone else 1 + FETCHERS
    finish, multiply, copy_two, when_whole = epilogue(p), product(p), x_copier(p), where_whole(p)
    moves_registers = p.registers > p.launched

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
        wn: T.let = tx % SHARERS // 128
        warp: T.let = tx % 128 // 32
        lane: T.let = tx % 32
        g: T.let = lane // 4
        t: T.let = lane % 4
        leader: T.let = tx % FETCHERS == 0
        count: T.let = T.min(T.max(p.chunks - by * (TRIPS * GK) - wk + GK - 1, 0) // GK, TRIPS) if p.ragged_k else TRIPS
        smem = T.alloc_buffer((p.shared_words,), "float32", scope="shared.dyn", align=1024)
        ring: T.let = wk * (D * STAGE)
        full: T.let = p.barrier_word + wk * (2 * D)  # words of the mbarriers, two a stage and kind
        empty: T.let = p.barrier_word + (GK + wk) * (2 * D)
        acc = T.alloc_local([SUMS], "float32")
        part = T.alloc_local([SUMS], "float32")
        carry = T.alloc_local([carried_words(p)], "uint32")

        # -- producers ------------------------------------------------------------------------------

        @T.inline
        def start_barriers():
            for d in T.unroll(D):
                T.ptx.mbarrier.init.shared.b64(smem.ptr_to([full + d * 2]), T.uint32(ARRIVALS))
                T.ptx.mbarrier.init.shared.b64(smem.ptr_to([empty + d * 2]), T.uint32(SHARERS // 32))
            T.ptx.fence.mbarrier_init.release.cluster()

        @T.inline
        def fetch_columns(values, to, it, i, words):
            """Scales or zeros of a tile, for all groups in the chunk of trip `it`."""
            for piece in T.unroll(PIECES):
                T.ptx[BULK](
                    smem.ptr_to([to + (i * PARTS + piece) * words]),
                    values.ptr_to([at.tile((bx * (GN * TILES) + i) * 4), at.group(it, by, wk, piece), 0]),
                    T.uint32(JOINED * words * 4),
                    smem.ptr_to([full + it % D * 2]),
                )

        @T.inline
        def fetch_weights(it):
            """Words, scales and zeros of trip `it`; the bytes of x are announced too."""
            stage: T.let = ring + it % D * STAGE
            T.ptx.mbarrier.arrive.expect_tx.shared.b64(smem.ptr_to([full + it % D * 2]), T.uint32(BYTES))
            for i in T.unroll(TILES * GN):
                T.ptx[BULK](
                    smem.ptr_to([stage + W_AT + i * (W_TILE // 4)]),
                    w.ptr_to([at.tile((bx * (GN * TILES) + i) * 4), at.chunk(it, by, wk), 0]),
                    T.uint32(W_TILE),
                    smem.ptr_to([full + it % D * 2]),
                )
                fetch_columns(s, stage + S_AT, it, i, COLUMN_WORDS)
                if zeros:
                    fetch_columns(z, stage + Z_AT, it, i, COLUMN_WORDS)
                if floats:
                    fetch_columns(z, stage + Z_AT, it, i, 2 * COLUMN_WORDS)

        @T.inline
        def fetch_x(it):
            T.ptx[BULK](
                smem.ptr_to([ring + it % D * STAGE]),
                x.ptr_to([bm, at.slot(it, by, wk), 0]),
                T.uint32(4 * X_WORDS),
                smem.ptr_to([full + it % D * 2]),
            )

        @T.inline
        def copy_x(it):
            """The thread's share of x of trip `it`: word 4 t + j of 32 values goes to place t of the 16-byte piece j."""
            word: T.let = tx % LINE
            to: T.let = ring + it % D * STAGE + word % 16 // 4
            piece: T.let = word // 16 * 4 + word % 4

            @T.inline
            def copy_rows(whole):
                for e in T.unroll(X_WORDS // FETCHERS):
                    line = T.meta_var(e * (FETCHERS // LINE) + tx % FETCHERS // LINE)  # half a row of the chunk
                    row, half = T.meta_var(line // 2), T.meta_var(line % 2)
                    into = T.meta_var(smem.ptr_to([to + (half * ROWS + row) * LINE + (piece ^ (row % 8)) * 4]))
                    copy_two(into, x, bm * ROWS + row, at.slot(it, by, wk) * TILE_K + (half * LINE + word) * 2, whole)

            when_whole(at.slot(it, by, wk), copy_rows)
            T.ptx["cp.async.mbarrier.arrive.noinc.shared.b64"](smem.ptr_to([full + it % D * 2]))

        @T.inline
        def produce_alone():
            """The ring's leader fetches what was prepared."""
            if waits:
                wait()
            if not early:
                for d in T.serial(T.min(count, D)):
                    fetch_weights(d)
            for d in T.serial(T.min(count, D)):
                fetch_x(d)
            for it in T.serial(T.max(count - D, 0)):
                T.cuda.mbarrier_wait(smem.ptr_to([empty + it % D * 2]), it // D % 2)
                fetch_weights(it + D)
                fetch_x(it + D)

        @T.inline
        def produce_together():
            """All of the ring's producers copy x, its leader fetches the rest."""
            if waits:
                wait()
            for it in T.serial(count):
                if it >= D:
                    T.cuda.mbarrier_wait(smem.ptr_to([empty + it % D * 2]), (it // D + 1) % 2)
                if leader:
                    if early:
                        if it >= D:
                            fetch_weights(it)
                    else:
                        fetch_weights(it)
                T.cuda.warp_sync()
                copy_x(it)

        # -- consumers ------------------------------------------------------------------------------

        @T.inline
        def release(it):
            """Say that this warp has read the stage of trip `it`."""
            T.cuda.warp_sync()
            if lane == 0:
                T.ptx.mbarrier.arrive.shared.b64(smem.ptr_to([empty + it % D * 2]), T.uint32(1))

        @T.inline
        def take(it, first, last):
            T.cuda.mbarrier_wait(smem.ptr_to([full + it % D * 2]), it // D % 2)
            stage = T.meta_var(ring + it % D * STAGE)
            multiply((acc, part, carry), smem, x_sums, stage, at.slot(it, by, wk), bm, tx % SHARERS, it, release, first, last)

        @T.inline
        def consume():
            for i in T.unroll(SUMS):
                acc[i] = T.float32(0)
            if p.pipelined:
                for pair in T.serial(count // 2):
                    take(2 * pair, True, False)
                    take(2 * pair + 1, False, True)
                if count % 2 == 1:
                    take(count - 1, True, True)
            else:
                for it in T.serial(count):
                    take(it, True, True)

        # -- the program ----------------------------------------------------------------------------

        if tx >= CONSUMERS:
            if leader:
                start_barriers()
                if early:
                    for d in T.serial(T.min(count, D)):
                        fetch_weights(d)
            T.cuda.warp_sync()
        T.cuda.cta_sync()
        if tx >= CONSUMERS:
            if moves_registers:
                T.ptx["setmaxnreg.dec.sync.aligned.u32"](p.kept)
            if alone:
                if leader:
                    produce_alone()
            else:
                produce_together()
            T.cuda.warp_sync()
        else:
            if moves_registers:
                T.ptx["setmaxnreg.inc.sync.aligned.u32"](p.granted)
            consume()
            finish(acc, smem, y, tx, wn * (4 * TILES) + warp, wk, g, t, bx, by, bm)

    return main_function(p, kernel)
