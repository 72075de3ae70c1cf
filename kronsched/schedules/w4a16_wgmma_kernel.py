"""The W4A16 product on warpgroup instructions (wgmma) as a TIRx tile program.

    Yᵀ (n × m) = Wᵀ (n × k) Xᵀ: 64 columns of W are the A operand, dequantised in registers; x is the B operand, in shared memory.

What a chunk of 128 rows of k needs comes asynchronously, `stages` chunks in a ring: packed words, scales and zeros by cp.async,
each thread its own; x for all warpgroups side by side, 64 values of k to a swizzled line of 128 bytes, in the order in which the
nibbles of a word stand.

    copies = "threads"  x by cp.async of 4 bytes, reordered on the way; a barrier a chunk
    copies = "x_bulk"   x was prepared (w4a16_prepare.py) and comes by one bulk copy; mbarriers let warpgroups drift apart
    copies = "bulk"     so do the packed words

The products of a group are sums of exact integers times x; they are scaled in float32 when the group is done. Warpgroups along k
have rings and barriers of their own; their sums meet at the end (w4a16_epilogue.py).

There is no fence between cp.async and wgmma: as in CUTLASS's kernels for sm_90 that fill operands so, waiting for the copies and
a barrier order them.

Read first: `main_kernel`: the loop over `it`, then `multiply`; w4a16_wgmma_plan.py (sizes).
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator,misc,valid-type,name-defined,no-redef"
# ruff: noqa: SIM102 - in a tile program `and` would join a Python condition with one of the kernel

from typing import Any

from tvm.script import tirx as T

from kronsched.quant.layout import TILE_K
from kronsched.schedules.w4a16_around import renamed, wait
from kronsched.schedules.w4a16_epilogue import epilogue
from kronsched.schedules.w4a16_fragments import dequantiser, half_to_float, zero_offsets
from kronsched.schedules.w4a16_kernel import Indices
from kronsched.schedules.w4a16_wgmma_plan import W_TILE, WgmmaPlan

COPY_16 = "cp.async.cg.shared.global"
COPY_4 = "cp.async.ca.shared.global"
BULK = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
LINE = 32
"""Words of a line of x in shared memory."""
DESCRIPTOR = 1 << 62 | 1024 // 16 << 32 | 1 << 16
"""Of operand B, less its address: swizzle of 128 bytes, 8 lines are 1024 bytes apart; the last field is not used then."""
BATCH = 4
"""Steps of 16 rows of k whose products are issued together, at most."""


def main_kernel(p: WgmmaPlan) -> Any:
    """The PrimFunc over x (or xs), w, s, [z], [x_sums] and y (or p): see the module."""
    w, at = p.workload, Indices(p)
    dtype, m = w.a_dtype, w.m
    TILES, GN, GK, ROWS, D, TRIPS = p.tiles, p.groups_n, p.groups_k, p.rows, p.stages, p.trips
    GRID_N, GRID_K, GRID_M = p.grid
    THREADS, SHARERS = p.threads, p.sharers
    PARTS, STEPS = TILE_K // p.span, p.span // 16
    N_BATCH, COLUMNS = min(BATCH, STEPS), TILES * PARTS
    SUMS = ROWS // 2  # of a tile, a thread
    STAGE, X_WORDS, W_WORDS = p.stage_bytes // 4, ROWS * 2 * LINE, TILES * GN * W_TILE // 4
    S_AT = X_WORDS + W_WORDS  # scales in a stage
    Z_AT = S_AT + COLUMNS * SHARERS
    zeros, floats = w.zero_point == "asymmetric", w.zero_point == "float"
    bulk_x, bulk_w = p.copies != "threads", p.copies == "bulk"
    BULK_BYTES = 4 * (X_WORDS + (W_WORDS if bulk_w else 0))
    waits, early, whole_m = p.start != "serial", p.start == "early", m % ROWS == 0
    dequantise, offsets_of, to_float = dequantiser(dtype, zeros), zero_offsets(dtype), half_to_float(dtype)
    kind = "f16" if dtype == "float16" else "bf16"
    mma = f"wgmma.mma_async.sync.aligned.m64n{ROWS}k16.f32.{kind}.{kind}"
    finish = epilogue(p)

    @T.inline
    def kernel(x, w, s, z, x_sums, y):
        T.device_entry()
        T.attr({"tirx.launch_bounds_min_blocks_per_sm": 1})
        cta = T.cta_id([GRID_N * GRID_K * GRID_M])
        tx = T.thread_id([THREADS])
        bm: T.let = cta % GRID_M
        by: T.let = cta // GRID_M % GRID_K
        bx: T.let = cta // (GRID_M * GRID_K)
        wk: T.let = tx // SHARERS
        tg: T.let = tx % SHARERS
        wn: T.let = tg // 128
        warp: T.let = tx % 128 // 32
        lane: T.let = tx % 32
        g: T.let = lane // 4
        t: T.let = lane % 4
        strip: T.let = bx * (4 * TILES * GN) + wn * (4 * TILES) + warp  # the warp's first
        count: T.let = T.min(T.max(at.p.chunks - by * (TRIPS * GK) - wk + GK - 1, 0) // GK, TRIPS) if p.ragged_k else TRIPS
        smem = T.alloc_buffer((p.shared_words,), "float32", scope="shared.dyn", align=1024)
        ring: T.let = wk * (D * STAGE)
        full: T.let = p.barrier_word + wk * (2 * D)  # words of the mbarriers, two a stage and kind
        empty: T.let = p.barrier_word + (GK + wk) * (2 * D)
        operand: T.let = T.cuda.cvta_generic_to_shared(smem.ptr_to([ring])) // T.uint32(16)
        acc = T.alloc_local([TILES * SUMS], "float32")
        part = T.alloc_local([TILES * SUMS], "float32")
        scales = T.alloc_local([COLUMNS], "uint32")
        zr = T.alloc_local([COLUMNS if zeros else 1], "uint32")
        zf = T.alloc_local([2 * COLUMNS if floats else 1], "float32")
        sums = T.alloc_local([SUMS // 2 if floats else 1], "float32")
        offsets = T.alloc_local([2], "uint32")
        words = T.alloc_local([8 * TILES], "uint32")
        a = T.alloc_local([32 * TILES], "uint32")
        shifted = T.alloc_local([1], "uint32")

        # -- copies ---------------------------------------------------------------------------------

        @T.inline
        def copy_w(it):
            """The thread's words, scales and zeros of trip `it` on their way into the ring."""
            to: T.let = ring + it % D * STAGE
            for i in T.unroll(TILES):
                tile = T.meta_var(at.tile(strip + 4 * i))
                if not bulk_w:
                    for half in T.unroll(2):
                        T.ptx[COPY_16](
                            smem.ptr_to([to + X_WORDS + (i * 2 + half) * (SHARERS * 4) + tg * 4]),
                            w.ptr_to([tile, at.chunk(it, by, wk), warp * 256 + half * 128 + lane * 4]),
                            16,
                        )
                for group in T.unroll(PARTS):
                    column = T.meta_var(group * TILES + i)
                    source = T.meta_var([tile, at.group(it, by, wk, group), g * 8 + warp * 2])
                    T.ptx[COPY_4](smem.ptr_to([to + S_AT + column * SHARERS + tg]), s.ptr_to(source), 4)
                    if zeros:
                        T.ptx[COPY_4](smem.ptr_to([to + Z_AT + column * SHARERS + tg]), z.ptr_to(source), 4)
                    if floats:
                        T.ptx[COPY_4](smem.ptr_to([to + Z_AT + (column * SHARERS + tg) * 2]), z.ptr_to(source), 8)

        @T.inline
        def copy_x(it):
            """The thread's share of x of trip `it`: word 4 t + j of 32 values goes to place t of the 16-byte piece j."""
            word: T.let = tg % (2 * LINE)
            to: T.let = ring + it % D * STAGE + word // LINE * (ROWS * LINE) + word % 16 // 4
            piece: T.let = word % LINE // 16 * 4 + word % 4
            for e in T.unroll(X_WORDS // SHARERS):
                row = T.meta_var(e * (SHARERS // (2 * LINE)) + tg // (2 * LINE))
                into = T.meta_var(smem.ptr_to([to + row * LINE + (piece ^ (row % 8)) * 4]))
                source = T.meta_var(x.ptr_to([bm * ROWS + row, at.slot(it, by, wk) * TILE_K + word * 2]))
                if whole_m:
                    T.ptx[COPY_4](into, source, 4)
                else:
                    if bm * ROWS + row < m:
                        T.ptx[COPY_4](into, source, 4)

        @T.inline
        def bulk_copy_w(it):
            """One thread: all packed words of trip `it`; the bytes of x are announced too."""
            T.ptx.mbarrier.arrive.expect_tx.shared.b64(smem.ptr_to([full + it % D * 2]), T.uint32(BULK_BYTES))
            if bulk_w:
                for i in T.unroll(TILES * GN):
                    T.ptx[BULK](
                        smem.ptr_to([ring + it % D * STAGE + X_WORDS + i * (W_TILE // 4)]),
                        w.ptr_to([at.tile(bx * (4 * TILES * GN) + i * 4), at.chunk(it, by, wk), 0]),
                        T.uint32(W_TILE),
                        smem.ptr_to([full + it % D * 2]),
                    )

        @T.inline
        def bulk_copy_x(it):
            T.ptx[BULK](
                smem.ptr_to([ring + it % D * STAGE]),
                x.ptr_to([bm, at.slot(it, by, wk), 0]),
                T.uint32(X_WORDS * 4),
                smem.ptr_to([full + it % D * 2]),
            )

        # -- product --------------------------------------------------------------------------------

        @T.inline
        def read_stage(it):
            """The thread's words, scales and zeros of trip `it` into registers."""
            at_stage: T.let = ring + it % D * STAGE
            for i in T.unroll(TILES):
                for half in T.unroll(2):
                    own = T.meta_var((i * 2 + half) * (SHARERS * 4) + tg * 4)
                    tiled = T.meta_var((wn * TILES + i) * (W_TILE // 4) + warp * 256 + half * 128 + lane * 4)
                    T.ptx["ld.shared.v4.b32"](
                        *[words[i * 8 + half * 4 + q] for q in range(4)],
                        smem.ptr_to([at_stage + X_WORDS + (tiled if bulk_w else own)]),
                    )
            for column in T.unroll(COLUMNS):
                T.ptx["ld.shared.b32"](scales[column], smem.ptr_to([at_stage + S_AT + column * SHARERS + tg]))
                if zeros:
                    T.ptx["ld.shared.b32"](zr[column], smem.ptr_to([at_stage + Z_AT + column * SHARERS + tg]))
                if floats:
                    T.ptx["ld.shared.v2.f32"](
                        zf[2 * column], zf[2 * column + 1], smem.ptr_to([at_stage + Z_AT + (column * SHARERS + tg) * 2])
                    )

        @T.inline
        def multiply_steps(it, i, group, batch):
            """Dequantise the A operands of the steps of a batch, then issue their products into part."""
            if zeros:
                offsets_of(offsets, 0, zr[group * TILES + i])
            for step in T.unroll(N_BATCH):
                nth = T.meta_var(group * STEPS + batch * N_BATCH + step)
                dequantise(a, (i * 8 + nth) * 4, words[i * 8 + nth], shifted, offsets, 0)
            T.ptx.wgmma.fence.sync.aligned()
            for step in T.unroll(N_BATCH):
                nth = T.meta_var(group * STEPS + batch * N_BATCH + step)
                b = T.meta_var(operand + T.Cast("uint32", it % D * (STAGE // 4) + nth // 4 * (ROWS * LINE // 4) + nth % 4 * 2))
                T.ptx[mma](
                    *[part[i * SUMS + q] for q in range(SUMS)],
                    *[a[(i * 8 + nth) * 4 + q] for q in range(4)],
                    T.Cast("uint64", b) | T.uint64(DESCRIPTOR), T.bool(batch * N_BATCH + step > 0), 1, 1, 0,
                )  # fmt: skip
            T.ptx.wgmma.commit_group.sync.aligned()

        @T.inline
        def load_sums(it, group):
            """Σ x over a group's rows in the chunk, for the rows of y that this thread holds: 8 j + 2 t and the next one."""
            for j in T.unroll(ROWS // 8):
                source = T.meta_var([at.slot(it, by, wk) * PARTS + group, bm * ROWS + j * 8 + t * 2])
                T.ptx["ld.global.v2.f32"](sums[2 * j], sums[2 * j + 1], x_sums.ptr_to(source))

        @T.inline
        def scale_part(i, group):
            """Add scale · (part - (zero - 8) · Σ x) of a tile and a group to acc."""
            for q in T.unroll(SUMS):
                to, column = T.meta_var(i * SUMS + q), T.meta_var(group * TILES + i)
                scale = T.meta_var(to_float(scales[column], q % 4 // 2))
                if floats:
                    zero = T.meta_var(zf[column * 2 + q % 4 // 2] - T.float32(8))
                    acc[to] = acc[to] + (part[to] - zero * sums[q // 4 * 2 + q % 2]) * scale
                else:
                    acc[to] = acc[to] + part[to] * scale

        @T.inline
        def multiply(it):
            """All of a chunk: the products of a batch run while the next one is dequantised."""
            read_stage(it)
            for group in T.unroll(PARTS):
                if floats:
                    load_sums(it, group)
                for i in T.unroll(TILES):
                    for batch in T.unroll(STEPS // N_BATCH):
                        multiply_steps(it, i, group, batch)
                T.ptx.wgmma.wait_group.sync.aligned(0)
                for i in T.unroll(TILES):
                    scale_part(i, group)

        # -- the program ----------------------------------------------------------------------------

        @T.inline
        def start_bulk():
            """Make the mbarriers and start the bulk copies of weights."""
            if tg == 0:
                for d in T.unroll(D):
                    T.ptx.mbarrier.init.shared.b64(smem.ptr_to([full + d * 2]), T.uint32(1))
                    T.ptx.mbarrier.init.shared.b64(smem.ptr_to([empty + d * 2]), T.uint32(SHARERS // 32))
                T.ptx.fence.mbarrier_init.release.cluster()
                for d in T.unroll(D):
                    if d < count:
                        bulk_copy_w(d)

        @T.inline
        def next_bulk(it):
            """Refill the stage of trip it - 2, which the other warpgroups have had a trip's time to leave."""
            if tg == 0:
                if it >= 2 and it + D - 2 < count:
                    T.cuda.mbarrier_wait(smem.ptr_to([empty + (it - 2) % D * 2]), (it - 2) // D % 2)
                    bulk_copy_w(it + D - 2)
                    bulk_copy_x(it + D - 2)
            T.cuda.warp_sync()

        if waits and not early:
            wait()
        if bulk_x:
            start_bulk()
        for d in T.unroll(D - 1):
            if d < count:
                copy_w(d)
            if bulk_x:
                T.ptx.cp.async_.commit_group()
        if early:
            wait()
        if bulk_x:
            if tg == 0:
                for d in T.unroll(D):
                    if d < count:
                        bulk_copy_x(d)
            T.ptx.bar.sync(T.Cast("uint32", wk + 1), T.uint32(SHARERS))
        else:
            for d in T.unroll(D - 1):
                if d < count:
                    copy_x(d)
                T.ptx.cp.async_.commit_group()
        for i in T.unroll(TILES * SUMS):
            acc[i] = T.float32(0)
        for it in T.serial(count):
            if bulk_x:
                next_bulk(it)
            T.ptx.cp.async_.wait_group(D - 2)
            if not bulk_x:
                T.ptx.bar.sync(T.Cast("uint32", wk + 1), T.uint32(SHARERS))
            if it + D - 1 < count:
                copy_w(it + D - 1)
                if not bulk_x:
                    copy_x(it + D - 1)
            T.ptx.cp.async_.commit_group()
            if bulk_x:
                T.cuda.mbarrier_wait(smem.ptr_to([full + it % D * 2]), it // D % 2)
            multiply(it)
            if bulk_x:
                T.cuda.warp_sync()
                if lane == 0:
                    T.ptx.mbarrier.arrive.shared.b64(smem.ptr_to([empty + it % D * 2]), T.uint32(1))
        T.ptx.cp.async_.wait_group(0)
        finish(acc, smem, y, tx, wn * (4 * TILES) + warp, wk, g, t, bx, by, bm)

    return _function(p, kernel)


def _function(p: WgmmaPlan, kernel: Any) -> Any:
    """The PrimFunc with the parameters that the kind of zero points needs."""
    w, layout, dtype = p.workload, p.workload.layout, p.workload.a_dtype
    x_shape = p.image if p.prepared else (w.m, w.k)
    y_shape, y_dtype = (p.split_k * w.m, w.n), ("float32" if p.split_k > 1 else dtype)

    if w.zero_point == "float":

        @T.prim_func
        def w4a16_wgmma(
            x: T.Buffer(x_shape, dtype),
            w: T.Buffer(layout.words, "int32"),
            s: T.Buffer(layout.columns, dtype),
            z: T.Buffer(layout.columns, "float32"),
            x_sums: T.Buffer(p.x_sums, "float32"),
            y: T.Buffer(y_shape, y_dtype),
        ):
            kernel(x, w, s, z, x_sums, y)

    elif w.zero_point == "asymmetric":

        @T.prim_func
        def w4a16_wgmma(
            x: T.Buffer(x_shape, dtype),
            w: T.Buffer(layout.words, "int32"),
            s: T.Buffer(layout.columns, dtype),
            z: T.Buffer(layout.columns, dtype),
            y: T.Buffer(y_shape, y_dtype),
        ):
            kernel(x, w, s, z, s, y)

    else:

        @T.prim_func
        def w4a16_wgmma(
            x: T.Buffer(x_shape, dtype),
            w: T.Buffer(layout.words, "int32"),
            s: T.Buffer(layout.columns, dtype),
            y: T.Buffer(y_shape, y_dtype),
        ):
            kernel(x, w, s, s, s, y)

    return renamed(w4a16_wgmma, {"x": "xs"} if p.prepared else {}, {"y": "p"} if p.split_k > 1 else {})
