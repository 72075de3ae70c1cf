"""Stores of the batch-first tensor-core Kronecker-sparse kernel: a tile's sums go to Y. See ks_mma_kernel.py.

    direct   from registers
    pair     two neighbouring lanes exchange halves, so that 32 bytes of a j are written at a time
    quad     lanes two apart exchange 16 bytes, so that the four lanes of a row write 64 bytes at a time (a lane has 32)
    staged   through shared memory, so that whole rows of the slice are

What stores from registers leaves shared memory to more stages of X: quad is the faster one with d = 4 on an H200.
Bulk copies of staged rows, one a row, were slower than either.

An epilogue happens in registers on the way: a lane loads the bias and the residual at the places of its own results, a row's
residual together.

Read first: `stores`: the last part of `store_tile`.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc,valid-type,name-defined"

from typing import Any

from tvm.script import tirx as T

from kronsched.schedules.ks_epilogue import SCRATCH, half_of, word_maker
from kronsched.schedules.ks_mma_maps import own_j
from kronsched.schedules.ks_mma_parts import PACK, VECTOR, group_barrier, inside
from kronsched.schedules.ks_mma_plan import MmaPlan


def stores(p: MmaPlan) -> Any:
    """The inline function that stores a tile: over its number, buffers, and the places of a thread and of its slice."""
    _, b, _, d = p.pattern
    B, DT, ITEM, E, DD = p.batch, p.dtype, p.item, p.per16, p.unit_l
    M, MT, P, LC, LU, LB, JB, NG, NT = p.rows, p.mt, p.pairs, p.lc, p.l_units, p.lb, p.jb, p.groups, p.group_threads
    YR, SB, wide, small, store = p.pattern[0] * b * d, p.store_bytes, p.item == 4, p.small, p.store
    Y0, YP = p.resident_words + NG * p.stages * p.stage_words, p.out_pitch // 4
    ragged_n, ragged_l, ragged_j = B % (M * NG) != 0, d % LB != 0, b % JB != 0
    pack, put, SW = PACK.get(DT, ""), f"st.global{VECTOR[SB]}.b32", SB // 4
    epilogue, fused, make, get = p.epilogue, bool(p.epilogue), word_maker(p.epilogue, DT), f"ld.global.nc{VECTOR[SB]}.b32"
    OW = DD * ITEM  # words of the 4 outputs j × DD l of a lane
    # Staged: pieces of a row of the slice.
    YPJ = (JB * d if small else LB) * ITEM // SB
    NYP = M * (1 if small else JB) * YPJ
    PW = 4 if OW % 4 == 0 else 2
    put_staged = f"st.shared{VECTOR[PW * 4]}.b32"
    sync_group = group_barrier(NG, NT)

    def out_sum(mt, lu, jp, h, index):
        """The accumulator of result `index`, in the order of memory (j, l), of a lane's row half h."""
        q = index // DD
        return (((mt * LC + lu * DD + index % DD) * P + jp) * 2 + q // 2) * 4 + h * 2 + q % 2

    def own_place(t, wj, wl, jb, lb, jp, lu, w):
        """(j, l) of the lane's results from word w on; of "small", l counts from j on: into the next j."""
        j = jb * JB + (wj * P + jp) * 16 + own_j(p, t, 0 if small else w // 4)
        return j, w * 4 // ITEM if small else lb * LB + wl * LC + lu * E + w % 4 * 4 // ITEM

    @T.inline
    def store_tile(tile, y, bias, residual, smem, acc, ow, ex, grp, tx, wm, wj, wl, g, t, ib, jb, lb):
        @T.inline
        def words(mt, h, jp, lu, to):
            """The lane's results as words, in the order of memory: (j, l)."""
            for w in T.unroll(OW):
                if wide:
                    ow[to + w] = T.reinterpret("uint32", acc[out_sum(mt, lu, jp, h, w)])
                else:
                    T.ptx[pack](ow[to + w], acc[out_sum(mt, lu, jp, h, 2 * w + 1)], acc[out_sum(mt, lu, jp, h, 2 * w)])

        @T.inline
        def load_own(words, source, start, n, jp, lu, to):
            """The lane's words of a tensor laid out like a row of y, of y's sample n."""
            for w in T.unroll(OW // SW):
                j, m = T.meta_var(own_place(t, wj, wl, jb, lb, jp, lu, w * SW))
                fine = T.meta_var(inside((ragged_n, n < B), (ragged_j, j * d + m < b * d if small else j < b), (ragged_l, m < d)))
                T.ptx[get](
                    *[words[to + w * SW + z] for z in range(SW)],
                    source.ptr_to([T.Select(fine, start + ib * (b * d) + j * d + m, 0)]),
                )

        @T.inline
        def finished_words(bw, rw, f, mt, h, jp, lu, to):
            """As `words`, with the epilogue."""
            if epilogue.bias:
                load_own(bw, bias, 0, 0, jp, lu, 0)
            for w in T.unroll(OW):
                at = T.meta_var((jp * LU + lu) * OW + w)
                sums = T.meta_var([acc[out_sum(mt, lu, jp, h, i)] for i in ((w,) if wide else (2 * w, 2 * w + 1))])
                make(ow, to + w, f, sums, [half_of(bw[w], e, DT) for e in range(2)], rw[at if epilogue.residual else 0])

        @T.inline
        def store_pair(row, jp, lu):
            """Words of two neighbouring units of l are in ow: even lanes store the first one for both j, odd lanes the second."""
            for ch in T.unroll(4):
                for q in T.unroll(4):
                    T.ptx["shfl_sync.bfly.b32"](
                        ex[q],
                        T.Select(t % 2 == 0, ow[OW + ch * 4 + q], ow[ch * 4 + q]),
                        T.uint32(1),
                        T.uint32(31),
                        T.uint32(0xFFFFFFFF),
                    )
                for z in T.unroll(2):
                    j = T.meta_var(jb * JB + (wj * P + jp) * 16 + ch * 4 + t // 2 * 2 + z)
                    if inside((ragged_n, row < B), (ragged_j, j < b)):
                        T.ptx["st.global.v4.b32"](
                            y.ptr_to([row * YR + ib * (b * d) + j * d + lb * LB + wl * LC + (lu + t % 2) * E]),
                            *[
                                T.Select(t % 2 == z, T.Select(t % 2 == 0, ow[ch * 4 + q], ow[OW + ch * 4 + q]), ex[q])
                                for q in range(4)
                            ],
                        )

        @T.inline
        def store_quad(row, jp):
            """Lanes 0 and 1 keep their first 16 bytes and give the second ones to lanes 2 and 3, which do the same."""
            for q in T.unroll(4):
                T.ptx["shfl_sync.bfly.b32"](ex[q], ow[4 + q], T.uint32(2), T.uint32(31), T.uint32(0xFFFFFFFF))
            for z in T.unroll(2):
                own = T.meta_var(t // 2 == z)
                piece = T.meta_var(T.Select(own, 2 * t, 2 * t + z * 8 - 3))  # of the 16 bytes of these 16 outputs
                at = T.meta_var((jb * JB + (wj * P + jp) * 16) * d + piece * (16 // ITEM))
                if inside((ragged_n, row < B), (ragged_j, at < b * d)):
                    T.ptx["st.global.v4.b32"](
                        y.ptr_to([row * YR + ib * (b * d) + at]), *[T.Select(own, ow[q], ex[q]) for q in range(4)]
                    )

        @T.inline
        def store_direct(row, jp, lu):
            for w in T.unroll(OW // SW):
                j, m = T.meta_var(own_place(t, wj, wl, jb, lb, jp, lu, w * SW))
                if inside((ragged_n, row < B), (ragged_j, j * d + m < b * d if small else j < b), (ragged_l, m < d)):
                    T.ptx[put](y.ptr_to([row * YR + ib * (b * d) + j * d + m]), *[ow[w * SW + z] for z in range(SW)])

        @T.inline
        def stage_out(row, jp, lu):
            for w in T.unroll(OW // PW):
                j = T.meta_var((wj * P + jp) * 16 + own_j(p, t, 0 if small else w * PW // 4))
                m = T.meta_var(w * PW * 4 if small else (wl * LC + lu * E) * ITEM + w * PW % 4 * 4)
                T.ptx[put_staged](
                    smem.ptr_to([Y0 + (grp * M + row) * YP + (j * (LB * ITEM) + m) // 4]), *[ow[w * PW + z] for z in range(PW)]
                )

        @T.inline
        def store_staged(tile):
            for e in T.unroll(T.ceildiv(NYP, NT)):
                piece: T.let = e * NT + tx
                row: T.let = piece // (NYP // M)
                j: T.let = 0 if small else piece // YPJ % JB
                part: T.let = piece % YPJ
                n: T.let = tile * M + row
                m: T.let = part * (SB // ITEM) if small else lb * LB + part * (SB // ITEM)
                if inside(
                    (NYP % NT != 0, piece < NYP),
                    (ragged_n, n < B),
                    (ragged_j, jb * (JB * d) + m < b * d if small else jb * JB + j < b),
                    (ragged_l, m < d),
                ):
                    T.ptx[f"ld.shared{VECTOR[SB]}.b32"](
                        *[ex[z] for z in range(SW)],
                        smem.ptr_to([Y0 + (grp * M + row) * YP + (j * (LB * ITEM) + part * SB) // 4]),
                    )
                    T.ptx[put](y.ptr_to([n * YR + ib * (b * d) + (jb * JB + j) * d + m]), *[ex[z] for z in range(SW)])

        @T.inline
        def make_words(own, mt, h, jp, lu, to):
            if fused:
                finished_words(own[0], own[1], own[2], mt, h, jp, lu, to)
            else:
                words(mt, h, jp, lu, to)

        @T.inline
        def store_rows(own):
            """own: nothing, or what the epilogue works in: words of the bias, words of a row's residual, floats."""
            for mt in T.unroll(MT):
                for h in T.unroll(2):
                    row: T.let = (wm * MT + mt) * 16 + h * 8 + g
                    if epilogue.residual:
                        for jp in T.unroll(P):
                            for lu in T.unroll(LU):
                                load_own(own[1], residual, (tile * M + row) * YR, tile * M + row, jp, lu, (jp * LU + lu) * OW)
                    for jp in T.unroll(P):
                        if store == "pair":
                            for lu in T.unroll(LU // 2):
                                make_words(own, mt, h, jp, 2 * lu, 0)
                                make_words(own, mt, h, jp, 2 * lu + 1, OW)
                                store_pair(tile * M + row, jp, 2 * lu)
                        else:
                            for lu in T.unroll(LU):
                                make_words(own, mt, h, jp, lu, 0)
                                if store == "staged":
                                    stage_out(row, jp, lu)
                                elif store == "quad":
                                    store_quad(tile * M + row, jp)
                                else:
                                    store_direct(tile * M + row, jp, lu)

        held = T.meta_var(P * LU * OW if epilogue.residual else 1)
        own = T.meta_var(
            (T.alloc_local([OW], "uint32"), T.alloc_local([held], "uint32"), T.alloc_local([SCRATCH], "float32")) if fused else ()
        )
        store_rows(own)
        if store == "staged":
            sync_group(grp)
            store_staged(tile)

    return store_tile
