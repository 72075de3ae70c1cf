"""The W4A16 tensor-core product as a TIRx tile program.

    Yᵀ (n × m) = Wᵀ (n × k) Xᵀ: the weights are the A operand, 16 columns of W by 16 rows of k a step; x is the B operand.

A block computes `columns` × `rows` of Y over its share of k. Its warps walk over chunks of 128 rows of k: 16-byte loads of packed
words (into registers, reloaded in place, or through a cp.async ring private to each thread), dequantised in registers, multiplied
into `part` (exact integers times x), which is scaled into `acc` at the end of each group. The warps' sums then meet in shared
memory and are added in a fixed order (w4a16_epilogue.py), so results are bitwise repeatable.

The loads are volatile to the compiler: they are issued where they stand. Hence each is written one chunk (x_load = "segment": 32
rows of k) ahead of its use.

Read first: `main_kernel`: the loop over `it`, then `multiply`; w4a16_fragments.py (dequantisation), w4a16_plan.py (sizes).
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator,misc,valid-type,name-defined,no-redef"
# ruff: noqa: SIM102 - in a tile program `and` would join a Python condition with one of the kernel

from typing import Any

from tvm.script import tirx as T

from kronsched.quant.layout import TILE_K
from kronsched.schedules.w4a16_around import renamed, wait
from kronsched.schedules.w4a16_epilogue import epilogue
from kronsched.schedules.w4a16_fragments import MMA, ONES, RAW_ZERO, dequantiser, half_to_float, zero_offsets
from kronsched.schedules.w4a16_indices import Indices
from kronsched.schedules.w4a16_plan import W4Plan

LOAD_W = "ld.global.L1::no_allocate.v4.b32"
LOAD_X = "ld.global.v4.b32"
COPY_W = "cp.async.cg.shared.global"
LOAD_COLUMNS = {1: "ld.global.b32", 2: "ld.global.v2.b32", 4: "ld.global.v4.b32"}
LOAD_ZEROS = {1: "ld.global.v2.f32", 2: "ld.global.v4.f32"}
"""Not the non-coherent loads (.nc): a kernel that overlaps with the one before it may be running while its inputs are written."""


def main_kernel(p: W4Plan) -> Any:
    """The PrimFunc over x (or xs), w, s, [z] and y (or p): see the module."""
    w, at = p.workload, Indices(p)
    layout, dtype, m, n = w.layout, w.a_dtype, w.m, w.n
    STRIPS, WN, MT, BATCH, D, TRIPS = p.strips, p.warps_n, p.mtile, p.batch, p.stages, p.trips
    K, THREADS = p.k, p.threads
    GRID_N, GRID_K, GRID_M = p.grid
    PARTS, STEPS = TILE_K // p.span, p.span // 32  # groups of a chunk, 32-row segments of a group
    WIDE = min(STRIPS, 4)  # strips whose scales one load brings
    LOADS = STRIPS // WIDE
    zeros = {"symmetric": 0, "asymmetric": 1, "float": 2}[w.zero_point]
    by_sum, folded = p.zeros == "sum", zeros == 1 and p.zeros == "fold"
    segment, late, ahead = (p.x_load == kind for kind in ("segment", "late", "ahead"))
    ring, ragged = D > 0, p.ragged_k
    X_STEP = MT * 4 if segment else 4  # registers from one segment of x to the next
    X_TILE = 4 if segment else 16  # and from one row tile to the next
    X_REGS = MT * (8 if segment else 16)
    COLUMN_REGS = STRIPS * PARTS
    y_dtype, z_dtype = ("float32" if GRID_K > 1 else dtype), ("float32" if zeros == 2 else dtype)
    dequantise, offsets_of, to_float = dequantiser(dtype, folded, raw=by_sum), zero_offsets(dtype), half_to_float(dtype)
    mma, ones = MMA[dtype], ONES[dtype]
    finish = epilogue(p)
    bounds = {"tirx.launch_bounds_min_blocks_per_sm": p.per_sm} if p.per_sm else {}
    waits, early = p.start != "serial", p.start == "early"

    def zero_of(zf: Any, zr: Any, column: Any, high: Any) -> Any:
        """The zero of a column as float32."""
        return zf[column * 2 + high] if zeros == 2 else to_float(zr[column], high)

    def sums_at(group: Any) -> Any:
        """Where the sums of x of a group are kept."""
        return group * (MT * 4) if p.kept_sums == PARTS else 0

    @T.inline
    def kernel(x, w, s, z, y):
        T.device_entry()
        T.attr(bounds)
        cta = T.cta_id([GRID_N * GRID_K * GRID_M])
        tx = T.thread_id([THREADS])
        bm: T.let = cta % GRID_M
        by: T.let = cta // GRID_M % GRID_K
        bx: T.let = cta // (GRID_M * GRID_K)
        warp: T.let = tx // 32
        lane: T.let = tx % 32
        wn: T.let = warp % WN
        wk: T.let = warp // WN
        g: T.let = lane // 4
        t: T.let = lane % 4
        strip: T.let = bx * (STRIPS * WN) + wn * STRIPS  # the warp's first
        smem = T.alloc_buffer((p.shared_words,), "float32", scope="shared.dyn", align=128)
        acc = T.alloc_local([STRIPS * MT * 4], "float32")
        part = T.alloc_local([BATCH * MT * 4], "float32")
        xr = T.alloc_local([X_REGS], "uint32")
        x_next = T.alloc_local([X_REGS if ahead else 1], "uint32")
        scales = T.alloc_local([COLUMN_REGS], "uint32")
        scales_next = T.alloc_local([COLUMN_REGS], "uint32")
        zr = T.alloc_local([COLUMN_REGS if zeros == 1 else 1], "uint32")
        zr_next = T.alloc_local([COLUMN_REGS if zeros == 1 else 1], "uint32")
        zf = T.alloc_local([2 * COLUMN_REGS if zeros == 2 else 1], "float32")
        zf_next = T.alloc_local([2 * COLUMN_REGS if zeros == 2 else 1], "float32")
        x_sum = T.alloc_local([p.kept_sums * MT * 4 if by_sum else 1], "float32")
        offsets = T.alloc_local([2 * BATCH], "uint32")
        words = T.alloc_local([2 * BATCH if ring else 8 * STRIPS], "uint32")
        a = T.alloc_local([4 * BATCH], "uint32")
        shifted = T.alloc_local([1], "uint32")

        @T.inline
        def load_words(it, batch):
            """Weights of one batch of strips of trip `it` into registers."""
            for b in T.unroll(BATCH):
                for half in T.unroll(2):
                    i = T.meta_var(batch * BATCH + b)
                    T.ptx[LOAD_W](
                        *[words[(i * 2 + half) * 4 + q] for q in range(4)],
                        w.ptr_to([at.tile(strip + i), at.chunk(it, by, wk), (strip + i) % 4 * 256 + half * 128 + lane * 4]),
                    )

        @T.inline
        def copy_words(it):
            """Weights of trip `it` on their way into the thread's slots of the ring."""
            for i in T.unroll(STRIPS):
                for half in T.unroll(2):
                    T.ptx[COPY_W](
                        smem.ptr_to([((it % D * (2 * STRIPS) + i * 2 + half) * THREADS + tx) * 4]),
                        w.ptr_to([at.tile(strip + i), at.chunk(it, by, wk), (strip + i) % 4 * 256 + half * 128 + lane * 4]),
                        16,
                    )

        @T.inline
        def load_x(into, first, it, i, seg, whole):
            """Of row tile `i` of x the 8 values from 32 seg + 8 t of the chunk on; zeros beyond the end of k if not `whole`."""
            k: T.let = at.slot(it, by, wk) * TILE_K + seg * 32 + t * 8
            T.ptx[LOAD_X](
                *[into[first + q] for q in range(4)],
                x.ptr_to([T.min(bm * (8 * MT) + i * 8 + g, m - 1), k if whole else T.min(k, K - 8)]),
            )
            if not whole:
                for q in T.unroll(4):
                    into[first + q] = T.Select(k < K, into[first + q], T.uint32(0))

        @T.inline
        def load_x_segments(into, first, step, it, start, count, whole):
            for i in T.unroll(MT):
                for seg in T.unroll(count):
                    load_x(into, first + i * step + seg * 4, it, i, start + seg, whole)

        @T.inline
        def load_x_checked(into, first, step, it, start, count):
            """Segments of x. Looking first whether the chunk is whole was a gain with x a chunk ahead, a loss elsewhere."""
            if ragged and ahead and MT == 1:
                if (at.slot(it, by, wk) + 1) * TILE_K <= K:
                    load_x_segments(into, first, step, it, start, count, True)
                else:
                    load_x_segments(into, first, step, it, start, count, False)
            else:
                load_x_segments(into, first, step, it, start, count, not ragged)

        @T.inline
        def load_x_chunk(into, it):
            load_x_checked(into, 0, 16, it, 0, 4)

        @T.inline
        def load_x_segment(it, seg):
            load_x_checked(xr, seg % 2 * X_STEP, 4, it, seg, 1)

        @T.inline
        def load_columns(it):
            """Scales and zeros of trip `it`: a word holds those of columns g and g + 8 of a strip."""
            for part in T.unroll(PARTS):
                for j in T.unroll(LOADS):
                    first = T.meta_var(strip + j * 4)
                    row = T.meta_var([at.tile(first), at.group(it, by, wk, part)])
                    reg = T.meta_var(part * STRIPS + j * 4)
                    T.ptx[LOAD_COLUMNS[WIDE]](
                        *[scales_next[reg + q] for q in range(WIDE)], s.ptr_to([*row, g * 8 + first % 4 * 2])
                    )
                    if zeros == 1:
                        T.ptx[LOAD_COLUMNS[WIDE]](
                            *[zr_next[reg + q] for q in range(WIDE)], z.ptr_to([*row, g * 8 + first % 4 * 2])
                        )
                    if zeros == 2:
                        for i in T.unroll(-(-WIDE // 2)):
                            T.ptx[LOAD_ZEROS[min(WIDE, 2)]](
                                *[zf_next[(reg + i * 2) * 2 + q] for q in range(2 * min(WIDE, 2))],
                                z.ptr_to([*row, g * 8 + (first + i * 2) % 4 * 2]),
                            )

        @T.inline
        def next_columns():
            for i in T.unroll(COLUMN_REGS):
                scales[i] = scales_next[i]
            if zeros == 1:
                for i in T.unroll(COLUMN_REGS):
                    zr[i] = zr_next[i]
            if zeros == 2:
                for i in T.unroll(2 * COLUMN_REGS):
                    zf[i] = zf_next[i]

        @T.inline
        def scale_part(batch, group):
            """Add scale · (part - zero · Σ x) of one batch and one group to acc; what part has as zero already is left out."""
            for b in T.unroll(BATCH):
                for i in T.unroll(MT):
                    for q in T.unroll(4):
                        to = T.meta_var(((batch * BATCH + b) * MT + i) * 4 + q)
                        column = T.meta_var(group * STRIPS + batch * BATCH + b)
                        value = T.meta_var(part[(b * MT + i) * 4 + q])
                        scale = T.meta_var(to_float(scales[column], q // 2))
                        if by_sum:
                            zero = T.meta_var(zero_of(zf, zr, column, q // 2) - T.float32(RAW_ZERO[dtype]))
                            acc[to] = acc[to] + (value - zero * x_sum[sums_at(group) + i * 4 + q]) * scale
                        else:
                            acc[to] = acc[to] + value * scale

        @T.inline
        def multiply(it, batch, group):
            """One batch of strips over the rows of one group in the chunk, into part; and Σ x into x_sum, once if it is kept."""
            for i in T.unroll(BATCH * MT * 4):
                part[i] = T.float32(0)
            if by_sum:
                if batch == 0 or p.kept_sums < PARTS:
                    for i in T.unroll(MT * 4):
                        x_sum[sums_at(group) + i] = T.float32(0)
            if folded:
                for b in T.unroll(BATCH):
                    offsets_of(offsets, b * 2, zr[group * STRIPS + batch * BATCH + b])
            for step in T.unroll(STEPS):
                seg = T.meta_var(group * STEPS + step)
                if segment:
                    if seg < 3:
                        load_x_segment(it, seg + 1)
                    elif it + 1 < TRIPS:
                        load_x_segment(it + 1, 0)
                if ring:
                    for b in T.unroll(BATCH):
                        slot = T.meta_var(it % D * (2 * STRIPS) + (batch * BATCH + b) * 2 + seg // 2)
                        T.ptx["ld.shared.v2.b32"](
                            words[b * 2], words[b * 2 + 1], smem.ptr_to([(slot * THREADS + tx) * 4 + seg % 2 * 2])
                        )
                for h in T.unroll(2):
                    for b in T.unroll(BATCH):
                        word = T.meta_var(b * 2 + h if ring else (batch * BATCH + b) * 8 + seg * 2 + h)
                        dequantise(a, b * 4, words[word], shifted, offsets, b * 2)
                    for i in T.unroll(MT):
                        x0 = T.meta_var(i * X_TILE + (seg % 2 if segment else seg) * X_STEP + 2 * h)
                        for b in T.unroll(BATCH):
                            tile = T.meta_var([part[(b * MT + i) * 4 + q] for q in range(4)])
                            T.ptx[mma](*tile, *[a[b * 4 + q] for q in range(4)], xr[x0], xr[x0 + 1], *tile)
                        if by_sum:
                            tile = T.meta_var([x_sum[sums_at(group) + i * 4 + q] for q in range(4)])
                            if batch == 0 or p.kept_sums < PARTS:
                                T.ptx[mma](*tile, *[T.uint32(ones) for _ in range(4)], xr[x0], xr[x0 + 1], *tile)

        if waits and not early:
            wait()
        if ring:
            for d in T.unroll(D - 1):
                if d < TRIPS:
                    copy_words(d)
                T.ptx.cp.async_.commit_group()
        else:
            for batch in T.unroll(STRIPS // BATCH):
                load_words(0, batch)
        load_columns(0)
        if early:
            wait()
        if late:
            load_x_chunk(xr, 0)
        if ahead:
            load_x_chunk(x_next, 0)
        if segment:
            load_x_segment(0, 0)
        for i in T.unroll(STRIPS * MT * 4):
            acc[i] = T.float32(0)
        for it in T.serial(TRIPS, unroll=p.unroll):
            if ahead:
                for i in T.unroll(X_REGS):
                    xr[i] = x_next[i]
            next_columns()
            if ring:
                if it + D - 1 < TRIPS:
                    copy_words(it + D - 1)
                T.ptx.cp.async_.commit_group()
            if it + 1 < TRIPS:
                if ahead:
                    load_x_chunk(x_next, it + 1)
                load_columns(it + 1)
            if ring:
                T.ptx.cp.async_.wait_group(D - 1)
            for batch in T.unroll(STRIPS // BATCH):
                for group in T.unroll(PARTS):
                    multiply(it, batch, group)
                    scale_part(batch, group)
                if not ring:
                    if it + 1 < TRIPS:
                        load_words(it + 1, batch)
            if late:
                if it + 1 < TRIPS:
                    load_x_chunk(xr, it + 1)
        if ring:
            T.ptx.cp.async_.wait_group(0)
        finish(acc, smem, y, tx, wn * STRIPS, wk, g, t, bx, by, bm)

    if zeros:

        @T.prim_func
        def w4a16(
            x: T.Buffer((m, K), dtype),
            w: T.Buffer(layout.words, "int32"),
            s: T.Buffer(layout.columns, dtype),
            z: T.Buffer(layout.columns, z_dtype),
            y: T.Buffer((GRID_K * m, n), y_dtype),
        ):
            kernel(x, w, s, z, y)

    else:

        @T.prim_func
        def w4a16(
            x: T.Buffer((m, K), dtype),
            w: T.Buffer(layout.words, "int32"),
            s: T.Buffer(layout.columns, dtype),
            y: T.Buffer((GRID_K * m, n), y_dtype),
        ):
            kernel(x, w, s, s, y)

    return renamed(w4a16, {"x": "xs"} if p.prepared else {}, {"y": "p"} if GRID_K > 1 else {})
