"""Two Kronecker-sparse factors in one batch-first tensor-core kernel (TIRx). See ks_cuda_pair.py for the tiling and its letters.

    weights ──► shared, once                                    per tile of samples, between barriers
    tiles of X ── cp.async ── two stages ──► mma ──► shared, (i, l, k) of the second factor ──► mma ──► X's stage ──► Y

A block stays on its SM and walks over tiles. Operands come from shared memory by ldmatrix; its rows are 4 words longer than a
multiple of 8, so that 8 rows meet no bank twice.

Read first: `pair_kernel`: its last part, then `multiply`.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc,valid-type,name-defined"

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tvm.script import tirx as T

from kronsched.schedules.ks_epilogue import SCRATCH, half_of, prefetch, word_maker
from kronsched.schedules.ks_mma_parts import MMA, PACK
from kronsched.schedules.ks_parts import without_unused

if TYPE_CHECKING:
    from kronsched.schedules.ks_pair_plan import PairPlan

LANES = 32
UNROLLED = 16
"""Steps of k up to which a product is unrolled."""
FLYING = 9
"""Loads of weights that a thread has on their way."""


def pair_kernel(p: PairPlan) -> Any:
    """The PrimFunc over x, w0, w1, y, and what the epilogue takes."""
    (a1, b1, c1, _), (a2, b2, c2, d2) = p.first, p.second
    B, DT, M, WM, WN, NT, G, NTL = p.batch, p.dtype, p.rows, p.warps_m, p.warps_n, p.threads, p.blocks, p.tiles
    F0, F2, P0, P1, PW1, PW2 = (
        p.features[0],
        p.features[2],
        p.stage_pitch,
        p.middle_pitch,
        p.weight_pitches[0],
        p.weight_pitches[1],
    )
    W2, MID, X0, XS = p.second_at, p.middle_at, p.stages_at, p.stage_elements
    MT, U1, U2, N2 = p.mt, p.unit_first, p.unit_second, a2 * b2 * c2 * d2
    NX, NY = M * F0 // 8, M * F2 // 8  # 16-byte pieces of a tile of X and of Y
    ragged = B % M != 0
    mma, pack = MMA[DT], PACK[DT]
    epilogue, fused, make = p.epilogue, bool(p.epilogue), word_maker(p.epilogue, DT)
    get, copy, load = "ld.global.nc.b32", "cp.async.cg.shared.global", "ldmatrix.sync.aligned.m8n8.x{n}.shared.b16"

    def second_sum(mt, n, h, index):
        """The accumulator of result `index`, in the order of memory (j, l), of a lane's row half h."""
        return ((index % d2 * MT + mt) * U2 + n) * 4 + h * 2 + index // d2

    def rest_of(tile):
        """(index in Y, whether inside) of an element of a tile's rows."""
        return lambda _, element: (tile * M * F2 + element, tile * M * F2 + element < B * F2)

    @T.prim_func
    def ks(
        x: T.Buffer((B * F0,), DT),
        w0: T.Buffer((a1 * b1 * c1,), DT),
        w1: T.Buffer((N2,), DT),
        y: T.Buffer((B * F2,), DT),
        bias: T.Buffer((F2,), DT),
        residual: T.Buffer((B * F2,), DT),
    ):
        T.device_entry()
        T.attr({"tirx.launch_bounds_min_blocks_per_sm": p.min_blocks})
        cta = T.cta_id([G])
        tx = T.thread_id([NT])
        warp: T.let = tx // LANES
        wm: T.let = warp % WM
        wn: T.let = warp // WM
        lane: T.let = tx % LANES
        g: T.let = lane // 4
        t: T.let = tx % 4
        smem = T.alloc_buffer((p.shared_elements,), DT, scope="shared.dyn", align=128)
        acc = T.alloc_local([max(U1, U2 * d2) * MT * 4], "float32")
        A = T.alloc_local([MT * 4], "uint32")
        W = T.alloc_local([4], "uint32")
        out = T.alloc_local([d2], "uint32")
        piece4 = T.alloc_local([4], "uint32")
        flying = T.alloc_local([FLYING * 4], "uint32")

        @T.inline
        def issue(tile, at):
            if tile < NTL:
                for e in T.unroll(T.ceildiv(NX, NT)):
                    piece: T.let = e * NT + tx
                    row: T.let = piece // (F0 // 8)
                    n: T.let = tile * M + row
                    if NX % NT == 0 or piece < NX:
                        if ragged:
                            T.ptx[copy](
                                smem.ptr_to([at + row * P0 + piece % (F0 // 8) * 8]),
                                x.ptr_to([T.Select(n < B, n * F0 + piece % (F0 // 8) * 8, 0)]),
                                16,
                                T.Select(n < B, T.uint32(16), T.uint32(0)),
                            )
                        else:
                            T.ptx[copy](
                                smem.ptr_to([at + row * P0 + piece % (F0 // 8) * 8]),
                                x.ptr_to([n * F0 + piece % (F0 // 8) * 8]),
                                16,
                            )
                if epilogue.residual:
                    prefetch(residual, NT, tx, 1, M * F2, 2, rest_of(tile))

        @T.inline
        def copy_first():
            for e in T.serial(T.ceildiv(a1 * b1 * c1 // 8, NT)):
                piece: T.let = e * NT + tx
                if a1 * b1 * c1 // 8 % NT == 0 or piece < a1 * b1 * c1 // 8:
                    T.ptx[copy](smem.ptr_to([piece // (c1 // 8) * PW1 + piece % (c1 // 8) * 8]), w0.ptr_to([piece * 8]), 16)

        @T.inline
        def copy_second():
            """(i, j, k, l) → rows (i, l, j) of k, some 16-byte pieces on their way at a time."""
            for e in T.serial(T.ceildiv(N2 // 8, NT * FLYING)):
                for s in T.unroll(FLYING):
                    piece: T.let = (e * FLYING + s) * NT + tx
                    if N2 // 8 % (NT * FLYING) == 0 or piece < N2 // 8:
                        T.ptx["ld.global.v4.b32"](*[flying[s * 4 + z] for z in range(4)], w1.ptr_to([piece * 8]))
                for s in T.unroll(FLYING):
                    again: T.let = (e * FLYING + s) * NT + tx
                    row: T.let = again // (c2 * d2 // 8)
                    if N2 // 8 % (NT * FLYING) == 0 or again < N2 // 8:
                        for z in T.unroll(8):
                            at = T.meta_var(again % (c2 * d2 // 8) * 8 + z)
                            to = T.meta_var(W2 + ((row // b2 * d2 + at % d2) * b2 + row % b2) * PW2 + at // d2)
                            smem[to] = T.reinterpret(DT, T.Cast("uint16", flying[s * 4 + z // 2] >> T.uint32(16 * (z % 2))))

        @T.inline
        def products(n, unit, e, to):
            """The warp's rows against 8 rows of weights, pair e of the words in W."""
            for mt in T.unroll(MT):
                T.ptx[mma](
                    *[acc[to + (mt * unit + n) * 4 + r] for r in range(4)],
                    *[A[mt * 4 + r] for r in range(4)],
                    W[e * 2],
                    W[e * 2 + 1],
                    *[acc[to + (mt * unit + n) * 4 + r] for r in range(4)],
                )

        @T.inline
        def multiply(data, weights, pitch, steps, unit, to):
            """Sums of one l: the warp's rows at `data` against `unit` times 8 rows of weights."""
            for kt in T.unroll(steps) if steps <= UNROLLED else T.serial(steps):
                for mt in T.unroll(MT):
                    T.ptx[load.format(n=4)](
                        *[A[mt * 4 + q] for q in range(4)],
                        smem.ptr_to([data[0] + (mt * 16 + lane % 16) * data[1] + kt * 16 + lane // 16 * 8]),
                    )
                for n in T.unroll(unit // 2):
                    T.ptx[load.format(n=4)](
                        *[W[q] for q in range(4)],
                        smem.ptr_to([weights + (n * 16 + lane // 16 * 8 + lane % 8) * pitch + kt * 16 + lane // 8 % 2 * 8]),
                    )
                    for e in T.unroll(2):
                        products(n * 2 + e, unit, e, to)
                if unit % 2 == 1:
                    T.ptx[load.format(n=2)](
                        *[W[q] for q in range(2)],
                        smem.ptr_to([weights + ((unit - 1) * 8 + lane % 8) * pitch + kt * 16 + lane // 8 % 2 * 8]),
                    )
                    products(unit - 1, unit, 0, to)

        @T.inline
        def clear(count):
            for r in T.unroll(count):
                acc[r] = T.float32(0)

        @T.inline
        def first_factor(at):
            for turn in T.serial(T.ceildiv(a1 * b1 // (8 * U1), WN)):
                unit: T.let = turn * WN + wn
                if unit < a1 * b1 // (8 * U1):
                    clear(MT * U1 * 4)
                    i: T.let = unit // (b1 // (8 * U1))
                    source = T.meta_var((at + wm * (16 * MT) * P0 + i * c1, P0))
                    multiply(source, unit * (8 * U1) * PW1, PW1, c1 // 16, U1, 0)
                    for z in T.unroll(MT * U1 * 2):
                        mt = T.meta_var(z // (U1 * 2))
                        n = T.meta_var(z // 2 % U1)
                        h = T.meta_var(z % 2)
                        row = T.meta_var(MID + ((wm * MT + mt) * 16 + h * 8 + g) * P1)
                        f = T.meta_var(unit * (8 * U1) + n * 8 + t * 2)
                        q = T.meta_var((mt * U1 + n) * 4 + h * 2)
                        T.ptx[pack](out[0], acc[q + 1], acc[q])
                        if d2 == 1:
                            T.ptx["st.shared.b32"](smem.ptr_to([row + f]), out[0])
                        else:
                            for e in T.unroll(2):
                                # Features of the middle are (i, k, l) of the second factor: they go to (i, l, k).
                                to = T.meta_var((f + e) // (c2 * d2) * (c2 * d2) + (f + e) % d2 * c2 + (f + e) // d2 % c2)
                                smem[row + to] = T.reinterpret(DT, T.Cast("uint16", out[0] >> T.uint32(16 * e)))

        @T.inline
        def load_words(own, tile, i, j):
            """The lane's words of the residual: on their way while the products are made."""
            for z in T.unroll(MT * U2 * 2):
                row = T.meta_var(tile * M + (wm * MT + z // (U2 * 2)) * 16 + z % 2 * 8 + g)
                f = T.meta_var((i * b2 + j + z // 2 % U2 * 8 + t * 2) * d2)
                for w in T.unroll(d2):
                    T.ptx[get](
                        own[0][z * d2 + w],
                        residual.ptr_to([T.Select(row < B, row * F2 + f + 2 * w, 0) if ragged else row * F2 + f + 2 * w]),
                    )

        @T.inline
        def finish_word(own, z, w, f, low, high):
            if epilogue.bias:
                T.ptx[get](own[1][0], bias.ptr_to([f + 2 * w]))
            make(
                out,
                w,
                own[2],
                [low, high],
                [half_of(own[1][0], e, DT) for e in range(2)],
                own[0][z * d2 + w if epilogue.residual else 0],
            )

        @T.inline
        def second_factor(own, tile, at):
            """own: nothing, or what the epilogue works in: words of the residual, one of the bias, floats."""
            for turn in T.serial(T.ceildiv(a2 * b2 // (8 * U2), WN)):
                unit: T.let = turn * WN + wn
                if unit < a2 * b2 // (8 * U2):
                    clear(MT * U2 * d2 * 4)
                    i: T.let = unit // (b2 // (8 * U2))
                    j: T.let = unit % (b2 // (8 * U2)) * (8 * U2)
                    if epilogue.residual:
                        load_words(own, tile, i, j)
                    for m in T.unroll(d2):
                        source = T.meta_var((MID + wm * (16 * MT) * P1 + (i * d2 + m) * c2, P1))
                        multiply(source, W2 + ((i * d2 + m) * b2 + j) * PW2, PW2, c2 // 16, U2, m * MT * U2 * 4)
                    for z in T.unroll(MT * U2 * 2):
                        mt = T.meta_var(z // (U2 * 2))
                        n = T.meta_var(z // 2 % U2)
                        h = T.meta_var(z % 2)
                        row = T.meta_var(at + ((wm * MT + mt) * 16 + h * 8 + g) * P0)
                        f = T.meta_var((i * b2 + j + n * 8 + t * 2) * d2)
                        for w in T.unroll(d2):
                            # Two neighbours of the row: (j, l) number 2w and 2w + 1 of the lane's two j.
                            low = T.meta_var(acc[second_sum(mt, n, h, 2 * w)])
                            high = T.meta_var(acc[second_sum(mt, n, h, 2 * w + 1)])
                            if fused:
                                finish_word(own, z, w, f, low, high)
                            else:
                                T.ptx[pack](out[w], high, low)
                            T.ptx["st.shared.b32"](smem.ptr_to([row + f + 2 * w]), out[w])

        @T.inline
        def store(tile, at):
            for e in T.unroll(T.ceildiv(NY, NT)):
                piece: T.let = e * NT + tx
                row: T.let = piece // (F2 // 8)
                n: T.let = tile * M + row
                if (NY % NT == 0 or piece < NY) and (not ragged or n < B):
                    T.ptx["ld.shared.v4.b32"](
                        *[piece4[z] for z in range(4)], smem.ptr_to([at + row * P0 + piece % (F2 // 8) * 8])
                    )
                    T.ptx["st.global.v4.b32"](y.ptr_to([n * F2 + piece % (F2 // 8) * 8]), *[piece4[z] for z in range(4)])

        if p.overlap:
            T.ptx.griddepcontrol.wait()
            T.ptx.griddepcontrol.launch_dependents()
        copy_first()
        for q in T.unroll(2):
            issue(cta + q * G, X0 + q * XS)
            T.ptx.cp.async_.commit_group()
        copy_second()
        for turn in T.serial(T.ceildiv(NTL - cta, G)):
            tile: T.let = cta + turn * G
            at: T.let = X0 + turn % 2 * XS
            T.ptx.cp.async_.wait_group(1)
            T.cuda.cta_sync()
            first_factor(at)
            T.cuda.cta_sync()
            if fused:
                held = T.meta_var(MT * U2 * 2 * d2 if epilogue.residual else 1)
                second_factor(
                    (T.alloc_local([held], "uint32"), T.alloc_local([1], "uint32"), T.alloc_local([SCRATCH], "float32")), tile, at
                )
            else:
                second_factor((), tile, at)
            T.cuda.cta_sync()
            store(tile, at)
            T.cuda.cta_sync()
            issue(tile + 2 * G, at)
            T.ptx.cp.async_.commit_group()
        T.ptx.cp.async_.wait_group(0)

    return without_unused(ks, p.epilogue)
