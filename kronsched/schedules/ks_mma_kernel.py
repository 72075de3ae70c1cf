"""The batch-first tensor-core Kronecker-sparse kernel as a TIRx tile program. See ks_mma_plan.py for the tiling and its letters.

    weights (fragment order) ── cp.async ── shared, once (resident) or with every chunk (stream)
    tiles of X               ── cp.async ── ring of stages ── registers ── mma or wgmma ── sums ── Y (ks_mma_stores.py)

A block owns a slice and walks over tiles of samples; its groups of warps share the weights and walk over tiles of their own. A
lane's loads from a stage hold the operands of all its l: 16-bit halves are regrouped by prmt, without ldmatrix.
float32 goes through TF32 three times: with x = hi + lo, x·w ≈ lo·hi + hi·lo + hi·hi, hi rounded to 11 bits, sums in float32.

Read first: `batch_first_kernel`: its last part, then `issue`, `multiply`.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc,valid-type,name-defined"

from typing import Any

from tvm.script import tirx as T

from kronsched.schedules.ks_epilogue import prefetch
from kronsched.schedules.ks_gather import gathering
from kronsched.schedules.ks_mma_limits import LANES
from kronsched.schedules.ks_mma_maps import x_word
from kronsched.schedules.ks_mma_parts import KIND, MMA, WGMMA, group_barrier, half_selector, high_part, inside, low_part, zero
from kronsched.schedules.ks_mma_plan import SUM_STEPS, MmaPlan
from kronsched.schedules.ks_mma_stores import stores
from kronsched.schedules.ks_pack import Packing
from kronsched.schedules.ks_parts import without_unused


def batch_first_kernel(p: MmaPlan, packing: Packing) -> Any:
    """The PrimFunc over x, the weights (in fragment order unless they are gathered), y, and what the epilogue takes."""
    a, b, c, d = p.pattern
    B, DT, ITEM, E, DD, Q = p.batch, p.dtype, p.item, p.per16, p.unit_l, p.own
    M, MT, P, LC, LU, LB, JB, KS, S, NG = p.rows, p.mt, p.pairs, p.lc, p.l_units, p.lb, p.jb, p.ks, p.stages, p.groups
    WM, WJ, NT, KC, KT, G = p.warps_m, p.warps_j, p.group_threads, p.chunks, p.ks // p.k_step, p.grid_rows
    NTL, NSL, (_, nJ, nL) = p.tiles, p.slice_count, p.slices
    XR, YR, RW, LW = a * c * d, a * b * d, p.raw_words, p.load_words
    wide, small, stream, two_sums, fresh = ITEM == 4, p.small, p.stream, p.two_sums, p.fresh
    CB, WC, XS = p.copy_bytes, p.chunk_words, p.stage_words
    WO, X0 = M * p.pitch // 4, p.resident_words
    KPW = 1 if small else KS  # pieces of X: (row, k, part of the l), or (row, part of the k and l)
    PPK = (KS * d if small else LB) * ITEM // CB
    NP = M * KPW * PPK
    ragged_n, ragged_k, ragged_l = B % (M * NG) != 0, c % KS != 0, d % LB != 0
    NWL = KC * WC // 4
    NX, AHEAD = NG * G, p.ahead
    NSUM = p.sums
    FLUSH, PART = max(1, SUM_STEPS // KS), SUM_STEPS // p.k_step  # chunks, and instructions, of a sum in one part
    mma = MMA[DT]
    wg, after, JC, PW_LOW = p.wgmma, p.after, JB // 16, JB * p.k_step * ITEM // 16
    product_wg = WGMMA.format(n=16 * P, k=p.k_step, kind=KIND[DT])
    tail = () if wide else (0,)  # operand B is K-major
    load, load_x = "ld.shared.v4.b32", "ld.shared.v4.b32" if LW == 4 else "ld.shared.v2.b32"
    copy_x = f"cp.async.{'cg' if CB == 16 else 'ca'}.shared.global"
    OW = DD * ITEM  # words of the 4 outputs j × DD l of a lane
    sync_group, store_tile = group_barrier(NG, NT), stores(p)
    gather = gathering(p.pattern, DT, packing, p.resident_words, NT * NG)

    def pair_of(ul, q):
        """Elements of a lane's load that make its operand word number q (16-bit): k numbers 2q and 2q + 1."""
        return 2 * q * DD + ul, (2 * q + 1) * DD + ul

    def raw_place(kt, lu, wl, t, w):
        """(step of k in the chunk, byte) of word w of a lane's load."""
        if small:
            return 0, (kt * p.k_step * d + t * Q * d) * ITEM + w * 4
        return kt * p.k_step + w // 4 * 4 + t, (wl * LC + lu * E) * ITEM

    def operand_at(mt, ul):
        """First of the 4 words of operand A: of each l where wgmma reads them later."""
        return (mt * DD + ul) * 4 if wg and not fresh else mt * 4

    FK, SETS = p.fresh_form if fresh else (1, 1)
    FA, FRAW, NSHORT = MT * 4, MT * 2 * RW, p.short_sums  # words of an operand, of what it is made from; sums of an l
    NF = KT // FK * LU * DD  # products of a chunk that start new sums

    AB = p.buffers  # operands A that are held
    NA = MT * 4 * (2 * FK if fresh else DD * AB if wg else 1)
    NACC = SETS * NSHORT if fresh else NSUM

    def weights_at(weights, kt, ul, wj, wl):
        """Where operand B begins, in units of 16 bytes, as the descriptor counts."""
        return weights // 4 + (((wl * LC + ul) * KT + kt) * (JC * p.parts) + wj * P) * LANES

    def rest_of(ib, jb, lb, tile):
        """(index in Y, whether inside) of a run of a tile and an element of it: a run is a row's part of the slice, or a j's."""

        def place(run, element):
            n, j, m = (
                tile * M + (run if small else run // JB),
                jb * JB + (0 if small else run % JB),
                element + (0 if small else lb * LB),
            )
            fine = inside((ragged_n, n < B), (small, j * d + m < b * d), (not small, j < b), (not small, m < d))
            return n * YR + ib * (b * d) + j * d + m, fine

        return place

    # Nothing is read that another kernel may still write: see KSTensorCore.apply.
    wait_first = after in ("factor", "any") or (stream and after == "packing")

    @T.prim_func
    def ks(
        x: T.Buffer((B * XR,), DT),
        wf: T.Buffer((a * b * c * d if p.gather else p.weight_elements,), DT),
        y: T.Buffer((B * YR,), DT),
        bias: T.Buffer((YR,), DT),
        residual: T.Buffer((B * YR,), DT),
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
        acc = T.alloc_local([NACC], "float32")
        tot = T.alloc_local([NSUM if two_sums else 1], "float32")
        raw = T.alloc_local([FK * FRAW], "uint32")
        A = T.alloc_local([NA], "uint32")
        Al = T.alloc_local([NA if wide else 1], "uint32")
        desc = T.alloc_local([1], "uint64")
        wr = T.alloc_local([4], "uint32")
        bh = T.alloc_local([4], "uint32")
        bl = T.alloc_local([4], "uint32")
        ow = T.alloc_local([2 * OW], "uint32")
        ex = T.alloc_local([4], "uint32")

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
                if p.epilogue.residual:  # noqa: SIM102 (of these two tests one is Python's, the other the kernel's)
                    if KC == 1 or kc == 0:
                        prefetch(
                            residual, NT, tx, M * (1 if small else JB), JB * d if small else LB, ITEM, rest_of(ib, jb, lb, tile)
                        )

        @T.inline
        def load_rows(at, kt, lu, to):
            for mt in T.unroll(MT):
                for h in T.unroll(2):
                    for w in T.unroll(RW // LW):
                        T.ptx[load_x](
                            *[raw[to + (mt * 2 + h) * RW + w * LW + z] for z in range(LW)],
                            smem.ptr_to([at + x_word(p, (wm * MT + mt) * 16 + h * 8 + g, *raw_place(kt, lu, wl, t, w * LW))]),
                        )

        @T.inline
        def operands(ul, to_a, of):
            for mt in T.unroll(MT):
                for h in T.unroll(2):
                    for q in T.unroll(2):
                        base = T.meta_var(of + (mt * 2 + h) * RW)
                        if wide:
                            to = T.meta_var(to_a + operand_at(mt, ul) + q * 2 + h)
                            A[to] = high_part(raw[base + q * DD + ul])
                            Al[to] = low_part(raw[base + q * DD + ul], A[to])
                        else:
                            lo, hi = T.meta_var(pair_of(ul, q))
                            T.ptx["prmt.b32"](
                                A[to_a + operand_at(mt, ul) + q * 2 + h],
                                raw[base + lo // 2],
                                raw[base + hi // 2],
                                half_selector(lo % 2, hi % 2),
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
                operands(ul, 0, 0)
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
        def warpgroup_product(left, from_a, weights, ul, mt, more, to):
            T.ptx[product_wg](
                *[acc[to + r] for r in range(P * 8)],
                *[left[from_a + operand_at(mt, ul % DD) + r] for r in range(4)],
                desc[0] + T.Cast("uint64", weights),
                more,
                1,
                1,
                *tail,
            )

        @T.inline
        def fresh_product(weights, kt, lu, ul, z):
            T.ptx.wgmma.fence.sync.aligned()
            for s in T.unroll(FK):
                start: T.let = weights_at(weights, kt + s, lu * DD + ul, wj, wl)
                a0 = T.meta_var((z % 2 * FK + s) * FA)
                for mt in T.unroll(MT):
                    to = T.meta_var(z % SETS * NSHORT + mt * P * 8)
                    warpgroup_product(A, a0, start + PW_LOW, 0, mt, s > 0, to)
                    warpgroup_product(Al, a0, start, 0, mt, T.bool(True), to)
                    warpgroup_product(A, a0, start, 0, mt, T.bool(True), to)
            T.ptx.wgmma.commit_group.sync.aligned()

        @T.inline
        def add_fresh(z):
            first = T.meta_var((z // DD % LU * DD + z % DD) * P * 8)
            for mt in T.unroll(MT):
                for r in T.unroll(P * 8):
                    to = T.meta_var(mt * LC * P * 8 + first + r)
                    tot[to] = tot[to] + acc[z % SETS * NSHORT + mt * P * 8 + r]

        @T.inline
        def multiply_fresh(weights, at):
            """One l after another: its operands are made, and its last sums added up, while other products run."""
            for z in T.unroll(NF):
                kt = T.meta_var(z // (LU * DD) * FK)
                lu = T.meta_var(z // DD % LU)
                if z % DD == 0:
                    for s in T.unroll(FK):
                        load_rows(at, kt + s, lu, s * FRAW)
                for s in T.unroll(FK):
                    operands(z % DD, (z % 2 * FK + s) * FA, s * FRAW)
                if SETS == 1 and z > 0:
                    T.ptx.wgmma.wait_group.sync.aligned(0)
                    add_fresh(z - 1)
                fresh_product(weights, kt, lu, z % DD, z)
                if SETS == 2 and z > 0:
                    T.ptx.wgmma.wait_group.sync.aligned(1)
                    add_fresh(z - 1)
            T.ptx.wgmma.wait_group.sync.aligned(0)
            add_fresh(NF - 1)

        @T.inline
        def multiply_wg(weights, kt, lu):
            a0 = T.meta_var((kt * LU + lu) % AB * (MT * 4 * DD))
            if AB == 1:
                T.ptx.wgmma.wait_group.sync.aligned(0)  # operand A is free again
            for ul in T.unroll(DD):
                operands(ul, a0, 0)
            T.ptx.wgmma.fence.sync.aligned()
            for ul in T.unroll(DD):
                start: T.let = weights_at(weights, kt, lu * DD + ul, wj, wl)
                for mt in T.unroll(MT):
                    to = T.meta_var((mt * LC + lu * DD + ul) * P * 8)
                    if wide:
                        warpgroup_product(A, a0, start + PW_LOW, ul, mt, T.bool(True), to)
                        warpgroup_product(Al, a0, start, ul, mt, T.bool(True), to)
                    warpgroup_product(A, a0, start, ul, mt, T.bool(True), to)
            T.ptx.wgmma.commit_group.sync.aligned()
            if AB == 2:
                T.ptx.wgmma.wait_group.sync.aligned(1)  # the other operand A is free again

        @T.inline
        def move_sums():
            for q in T.unroll(NSUM):
                tot[q] = tot[q] + acc[q]
                acc[q] = T.float32(0)

        if p.gather and after == "factor":
            gather(wf, smem, sl, txa)
        if not stream and not p.gather and after != "packing":
            copy_weights(0, 0, NWL, NT * NG, txa)
            T.ptx.cp.async_.commit_group()
        if wait_first:
            T.ptx.griddepcontrol.wait()
        for s in T.unroll(AHEAD):
            issue(s)
            T.ptx.cp.async_.commit_group()
        if p.gather and after != "factor":
            gather(wf, smem, sl, txa)
        if not stream and not p.gather and after == "packing":
            T.ptx.griddepcontrol.wait()
            copy_weights(0, 0, NWL, NT * NG, txa)
            T.ptx.cp.async_.commit_group()
        if after != "":
            T.ptx.griddepcontrol.launch_dependents()
        if not stream:
            if not p.gather:
                T.ptx.cp.async_.wait_group(0 if after == "packing" else AHEAD)
            if wg:
                T.ptx.fence.proxy.async_.shared__cta()
            T.cuda.cta_sync()
        if wg:
            T.cuda.wgmma.encode_matrix_descriptor(T.address_of(desc), smem.ptr_to([0]), 8, 16, 0)
        for ti in T.serial(T.ceildiv(NTL - g0, NX)):
            for q in T.unroll(NACC):
                acc[q] = T.float32(0)
            if fresh:
                for q in T.unroll(NSUM):
                    tot[q] = zero(cta, q // (P * 8) % LC)
            elif two_sums:
                for q in T.unroll(NSUM):
                    tot[q] = T.float32(0)
            for kc in T.serial(KC):
                it: T.let = ti * KC + kc
                at: T.let = X0 + (grp * S + it % S) * XS
                T.ptx.cp.async_.wait_group(AHEAD - 1)
                if wg and ((stream and AHEAD == S - 1) or (AB == 2 and KT * LU % 2 == 1)):
                    T.ptx.wgmma.wait_group.sync.aligned(0)
                if wg and stream:
                    T.ptx.fence.proxy.async_.shared__cta()
                sync_group(grp)
                issue(it + AHEAD)
                T.ptx.cp.async_.commit_group()
                if fresh:
                    multiply_fresh(at + WO if stream else kc * WC, at)
                else:
                    for kt in T.unroll(KT):
                        for lu in T.unroll(LU):
                            load_rows(at, kt, lu, 0)
                            if wg:
                                multiply_wg(at + WO if stream else kc * WC, kt, lu)
                            else:
                                multiply(at + WO if stream else kc * WC, kt, lu)
                        if two_sums and PART < KT:  # noqa: SIM102 (as below)
                            if kt % PART == PART - 1 and kt < KT - 1:
                                move_sums()
                if two_sums and not fresh:  # noqa: SIM102 (of these two tests one is Python's, the other the kernel's)
                    if kc % FLUSH == FLUSH - 1 or kc == KC - 1:
                        move_sums()
            if wg:
                T.ptx.wgmma.wait_group.sync.aligned(0)
            tile: T.let = g0 + ti * NX
            if two_sums:
                store_tile(tile, y, bias, residual, smem, tot, ow, ex, grp, tx, wm, wj, wl, g, t, ib, jb, lb)
            else:
                store_tile(tile, y, bias, residual, smem, acc, ow, ex, grp, tx, wm, wj, wl, g, t, ib, jb, lb)
        T.ptx.cp.async_.wait_group(0)

    return without_unused(ks, p.epilogue)
