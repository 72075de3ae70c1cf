"""Stores of the batch-first tensor-core Kronecker-sparse kernel: a tile's sums go to Y. See ks_mma_kernel.py.

    direct   from registers
    pair     two neighbouring lanes exchange halves, so that 32 bytes of a j are written at a time
    staged   through shared memory, so that whole rows of the slice are

Read first: `stores`: the last part of `store_tile`.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc,valid-type,name-defined"

from typing import Any

from tvm.script import tirx as T

from kronsched.schedules.ks_mma_parts import PACK, VECTOR, group_barrier, inside
from kronsched.schedules.ks_mma_plan import MmaPlan, own_j


def stores(p: MmaPlan) -> Any:
    """The inline function that stores a tile: over its number, buffers, and the places of a thread and of its slice."""
    _, b, _, d = p.pattern
    B, DT, ITEM, E, DD = p.batch, p.dtype, p.item, p.per16, p.unit_l
    M, MT, P, LC, LU, LB, JB, NG, NT = p.rows, p.mt, p.pairs, p.lc, p.l_units, p.lb, p.jb, p.groups, p.group_threads
    YR, SB, wide, small, store = p.pattern[0] * b * d, p.store_bytes, p.item == 4, p.small, p.store
    Y0, YP = p.resident_words + NG * p.stages * p.stage_words, p.out_pitch // 4
    ragged_n, ragged_l, ragged_j = B % (M * NG) != 0, d % LB != 0, b % JB != 0
    pack, put, SW = PACK.get(DT, ""), f"st.global{VECTOR[SB]}.b32", SB // 4
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

    @T.inline
    def store_tile(tile, y, smem, acc, ow, ex, grp, tx, wm, wj, wl, g, t, ib, jb, lb):
        @T.inline
        def words(mt, h, jp, lu, to):
            """The lane's results as words, in the order of memory: (j, l)."""
            for w in T.unroll(OW):
                if wide:
                    ow[to + w] = T.reinterpret("uint32", acc[out_sum(mt, lu, jp, h, w)])
                else:
                    T.ptx[pack](ow[to + w], acc[out_sum(mt, lu, jp, h, 2 * w + 1)], acc[out_sum(mt, lu, jp, h, 2 * w)])

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
        def store_direct(row, jp, lu):
            for w in T.unroll(OW // SW):
                # Position in the (j, l) of the row.
                j = T.meta_var(jb * JB + (wj * P + jp) * 16 + own_j(p, t, 0 if small else w * SW // 4))
                m = T.meta_var(w * SW * 4 // ITEM if small else lb * LB + wl * LC + lu * E + w * SW % 4 * 4 // ITEM)
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

        for mt in T.unroll(MT):
            for h in T.unroll(2):
                row: T.let = (wm * MT + mt) * 16 + h * 8 + g
                for jp in T.unroll(P):
                    if store == "pair":
                        for lu in T.unroll(LU // 2):
                            words(mt, h, jp, 2 * lu, 0)
                            words(mt, h, jp, 2 * lu + 1, OW)
                            store_pair(tile * M + row, jp, 2 * lu)
                    else:
                        for lu in T.unroll(LU):
                            words(mt, h, jp, lu, 0)
                            if store == "staged":
                                stage_out(row, jp, lu)
                            else:
                                store_direct(tile * M + row, jp, lu)
        if store == "staged":
            sync_group(grp)
            store_staged(tile)

    return store_tile
