"""The batch-first tensor-core Kronecker-sparse kernel as a TIRx tile program. See ks_mma_plan.py for the tiling and its letters.

    weights (fragment order) ── cp.async ── shared, once (resident) or with every chunk (stream)
    tiles of X               ── cp.async ── ring of stages ── registers ── mma ── sums ── registers ── Y

A block owns a slice and walks over tiles of samples; its groups of warps share the weights and walk over tiles of their own. A
lane's loads from a stage hold the operands of all its l: 16-bit halves are regrouped by prmt, without ldmatrix.
float32 goes through TF32 three times: with x = hi + lo, x·w ≈ lo·hi + hi·lo + hi·hi, hi rounded to 11 bits, sums in float32.

Stores (knob `store`): "direct" from registers; "pair": two neighbouring lanes exchange halves, so that 32 bytes of a j are
written at a time; "staged": through shared memory, so that whole rows of the slice are.

Read first: `batch_first_kernel`: its last part, then `issue`, `multiply`.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc,valid-type,name-defined"

from typing import Any

from tvm.script import tirx as T

from kronsched.schedules.ks_mma_parts import MMA, PACK, VECTOR, half_selector, high_part, inside, low_part
from kronsched.schedules.ks_mma_plan import LANES, LONG_SUM, MmaPlan, own_j, x_word


def batch_first_kernel(p: MmaPlan) -> Any:
    """The PrimFunc over x, the weights in fragment order, and y."""
    a, b, c, d = p.pattern
    B, DT, ITEM, E, DD, Q = p.batch, p.dtype, p.item, p.per16, p.unit_l, p.own
    M, MT, P, LC, LU, LB, JB, KS, S, NG = p.rows, p.mt, p.pairs, p.lc, p.l_units, p.lb, p.jb, p.ks, p.stages, p.groups
    WM, WJ, NT, KC, KT, G = p.warps_m, p.warps_j, p.group_threads, p.chunks, p.ks // p.k_step, p.grid_rows
    NTL, NSL, (_, nJ, nL) = p.tiles, p.slice_count, p.slices
    XR, YR, RW, LW = a * c * d, a * b * d, p.raw_words, p.load_words
    wide, small, stream, two_sums, store = ITEM == 4, p.small, p.stream, p.two_sums, p.store
    CB, SB, WC, XS = p.copy_bytes, p.store_bytes, p.chunk_words, p.stage_words
    WO, X0 = M * p.pitch // 4, p.resident_words
    Y0, YP = X0 + NG * S * XS, p.out_pitch // 4
    KPW = 1 if small else KS  # pieces of X: (row, k, part of the l), or (row, part of the k and l)
    PPK = (KS * d if small else LB) * ITEM // CB
    NP = M * KPW * PPK
    ragged_n, ragged_k, ragged_l, ragged_j = B % (M * NG) != 0, c % KS != 0, d % LB != 0, b % JB != 0
    NWL = KC * WC // 4
    NX = NG * G
    NSUM = p.sums
    FLUSH = max(1, LONG_SUM // 2 // KS)
    mma = MMA[DT]
    pack = PACK.get(DT, "")
    load, load_x = "ld.shared.v4.b32", "ld.shared.v4.b32" if LW == 4 else "ld.shared.v2.b32"
    copy_x = f"cp.async.{'cg' if CB == 16 else 'ca'}.shared.global"
    put = f"st.global{VECTOR[SB]}.b32"
    SW = SB // 4
    OW = DD * ITEM  # words of the 4 outputs j × DD l of a lane
    # Staged stores: pieces of a row of the slice.
    run = (JB * d if small else LB) * ITEM
    YPJ = run // SB
    NYP = M * (1 if small else JB) * YPJ
    put_staged = f"st.shared{VECTOR[16 if OW % 4 == 0 else 8]}.b32"
    PW = 4 if OW % 4 == 0 else 2

    def pair_of(ul, q):
        """Elements of a lane's load that make its operand word number q (16-bit): k numbers 2q and 2q + 1."""
        return 2 * q * DD + ul, (2 * q + 1) * DD + ul

    def raw_place(kt, lu, wl, t, w):
        """(step of k in the chunk, byte) of word w of a lane's load."""
        if small:
            return 0, (kt * p.k_step * d + t * Q * d) * ITEM + w * 4
        return kt * p.k_step + w // 4 * 4 + t, (wl * LC + lu * E) * ITEM

    def sum_at(mt, ul, jp, q, h):
        """The accumulator of result q (below 4) of a lane: instruction q // 2, column q % 2, row half h."""
        return (((mt * LC + ul) * P + jp) * 2 + q // 2) * 4 + h * 2 + q % 2

    def out_sum(mt, lu, jp, h, index):
        return sum_at(mt, lu * DD + index % DD, jp, index // DD, h)

    @T.prim_func
    def ks(
        x: T.Buffer((B * XR,), DT),
        wf: T.Buffer((p.weight_elements,), DT),
        y: T.Buffer((B * YR,), DT),
    ):
        T.device_entry()
        T.attr({"tirx.launch_bounds_min_blocks_per_sm": p.min_blocks})
        cta = T.cta_id([NSL * G])
        txa = T.thread_id([NT * NG])
        grp: T.let = txa // NT
        tx: T.let = txa % NT
        sl: T.let = cta % NSL
        g0: T.let = cta // NSL * NG + grp
        lb: T.let = sl % nL
        jb: T.let = sl // nL % nJ
        ib: T.let = sl // (nL * nJ)
        warp: T.let = tx // LANES
        lane: T.let = tx % LANES
        wm: T.let = warp % WM
        wj: T.let = warp // WM % WJ
        wl: T.let = warp // (WM * WJ)
        g: T.let = lane // 4
        t: T.let = lane % 4
        smem = T.alloc_buffer((p.shared_words,), "uint32", scope="shared.dyn", align=128)
        acc = T.alloc_local([NSUM], "float32")
        tot = T.alloc_local([NSUM if two_sums else 1], "float32")
        raw = T.alloc_local([MT * 2 * RW], "uint32")
        A = T.alloc_local([MT * 4], "uint32")
        Al = T.alloc_local([MT * 4 if wide else 1], "uint32")
        wr = T.alloc_local([4], "uint32")
        bh = T.alloc_local([4], "uint32")
        bl = T.alloc_local([4], "uint32")
        ow = T.alloc_local([2 * OW], "uint32")
        ex = T.alloc_local([4], "uint32")

        @T.inline
        def sync_group():
            if NG == 1:
                T.cuda.cta_sync()
            else:
                T.ptx.bar.sync(T.Cast("uint32", grp + 1), T.uint32(NT))

        @T.inline
        def copy_weights(to, chunk, count, threads, me):
            for e in T.serial(T.ceildiv(count, threads)):
                wi: T.let = e * threads + me
                if count % threads == 0 or wi < count:
                    T.ptx["cp.async.cg.shared.global"](
                        smem.ptr_to([to + wi * 4]), wf.ptr_to([((sl * KC + chunk) * WC + wi * 4) * 4 // ITEM]), 16
                    )

        @T.inline
        def issue(it):
            tile = T.meta_var(g0 + it // KC * NX)
            kc = T.meta_var(it % KC)
            at = T.meta_var(X0 + (grp * S + it % S) * XS)
            if tile < NTL:
                for e in T.unroll(T.ceildiv(NP, NT)):
                    piece: T.let = e * NT + tx
                    row: T.let = piece // (KPW * PPK)
                    k: T.let = piece // PPK % KPW
                    part: T.let = piece % PPK
                    n: T.let = tile * M + row
                    step: T.let = kc * KS + k
                    # Position of the piece in the (k, l) of its row, and the first element of it beyond the data.
                    offset: T.let = (kc * KS * d + part * (CB // ITEM)) if small else (step * d + lb * LB + part * (CB // ITEM))
                    fine: T.let = inside(
                        (ragged_n, n < B),
                        (ragged_k, offset < c * d if small else step < c),
                        (ragged_l, lb * LB + part * (CB // ITEM) < d),
                    )
                    if NP % NT == 0 or piece < NP:
                        if ragged_n or ragged_k or ragged_l:
                            T.ptx[copy_x](
                                smem.ptr_to([at + x_word(p, row, k, part * CB)]),
                                x.ptr_to([T.Select(fine, n * XR + ib * (c * d) + offset, 0)]),
                                CB,
                                T.Select(fine, T.uint32(CB), T.uint32(0)),
                            )
                        else:
                            T.ptx[copy_x](
                                smem.ptr_to([at + x_word(p, row, k, part * CB)]), x.ptr_to([n * XR + ib * (c * d) + offset]), CB
                            )
                if stream:
                    copy_weights(at + WO, kc, WC // 4, NT, tx)

        @T.inline
        def load_rows(at, kt, lu):
            for mt in T.unroll(MT):
                for h in T.unroll(2):
                    for w in T.unroll(RW // LW):
                        T.ptx[load_x](
                            *[raw[(mt * 2 + h) * RW + w * LW + z] for z in range(LW)],
                            smem.ptr_to([at + x_word(p, (wm * MT + mt) * 16 + h * 8 + g, *raw_place(kt, lu, wl, t, w * LW))]),
                        )

        @T.inline
        def operands(ul):
            for mt in T.unroll(MT):
                for h in T.unroll(2):
                    for q in T.unroll(2):
                        base = T.meta_var((mt * 2 + h) * RW)
                        if wide:
                            A[mt * 4 + q * 2 + h] = high_part(raw[base + q * DD + ul])
                            Al[mt * 4 + q * 2 + h] = low_part(raw[base + q * DD + ul], A[mt * 4 + q * 2 + h])
                        else:
                            lo, hi = T.meta_var(pair_of(ul, q))
                            T.ptx["prmt.b32"](
                                A[mt * 4 + q * 2 + h], raw[base + lo // 2], raw[base + hi // 2], half_selector(lo % 2, hi % 2)
                            )

        @T.inline
        def product(left, right, ul, jp):
            for e in T.unroll(2):
                for mt in T.unroll(MT):
                    T.ptx[mma](
                        *[acc[(((mt * LC + ul) * P + jp) * 2 + e) * 4 + r] for r in range(4)],
                        *[left[mt * 4 + r] for r in range(4)],
                        right[e * 2],
                        right[e * 2 + 1],
                        *[acc[(((mt * LC + ul) * P + jp) * 2 + e) * 4 + r] for r in range(4)],
                    )

        @T.inline
        def multiply(weights, kt, lu):
            for ul in T.unroll(DD):
                operands(ul)
                for jp in T.unroll(P):
                    T.ptx[load](
                        *[wr[z] for z in range(4)],
                        smem.ptr_to(
                            [weights + ((((wl * LC + lu * DD + ul) * KT + kt) * (JB // 16) + wj * P + jp) * LANES + lane) * 4]
                        ),
                    )
                    if wide:
                        for z in T.unroll(4):
                            bh[z] = high_part(wr[z])
                            bl[z] = low_part(wr[z], bh[z])
                        product(A, bl, lu * DD + ul, jp)
                        product(Al, bh, lu * DD + ul, jp)
                        product(A, bh, lu * DD + ul, jp)
                    else:
                        product(A, wr, lu * DD + ul, jp)

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

        if not stream:
            copy_weights(0, 0, NWL, NT * NG, txa)
            T.ptx.cp.async_.commit_group()
        for s in T.unroll(S - 1):
            issue(s)
            T.ptx.cp.async_.commit_group()
        if not stream:
            T.ptx.cp.async_.wait_group(S - 1)
            T.cuda.cta_sync()
        for ti in T.serial(T.ceildiv(NTL - g0, NX)):
            for q in T.unroll(NSUM):
                acc[q] = T.float32(0)
            if two_sums:
                for q in T.unroll(NSUM):
                    tot[q] = T.float32(0)
            for kc in T.serial(KC):
                it: T.let = ti * KC + kc
                at: T.let = X0 + (grp * S + it % S) * XS
                T.ptx.cp.async_.wait_group(S - 2)
                sync_group()
                issue(it + S - 1)
                T.ptx.cp.async_.commit_group()
                for kt in T.unroll(KT):
                    for lu in T.unroll(LU):
                        load_rows(at, kt, lu)
                        multiply(at + WO if stream else kc * WC, kt, lu)
                if two_sums:  # noqa: SIM102 (of these two tests one is Python's, the other the kernel's)
                    if kc % FLUSH == FLUSH - 1 or kc == KC - 1:
                        for q in T.unroll(NSUM):
                            tot[q] = tot[q] + acc[q]
                            acc[q] = T.float32(0)
            if two_sums:
                for q in T.unroll(NSUM):
                    acc[q] = tot[q]
            tile: T.let = g0 + ti * NX
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
                sync_group()
                store_staged(tile)
        T.ptx.cp.async_.wait_group(0)

    return ks
