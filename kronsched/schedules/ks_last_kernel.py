"""The batch-last tensor-core Kronecker-sparse kernel as a TIRx tile program. See ks_last_plan.py for the tiling and its letters.

    weights (fragment order) ── cp.async ── shared, once (resident) or with every chunk (stream) ── A operand
    tiles of X               ── cp.async ── ring of stages ── registers ── B operand ── sums ── Y

float32 goes through TF32 three times, as in ks_mma_kernel.py.

Read first: `batch_last_kernel`: its last part, then `issue`, `multiply`, `store`.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc,valid-type,name-defined"

from typing import Any

from tvm.script import tirx as T

from kronsched.schedules.ks_epilogue import HELD, SCRATCH, prefetch, word_maker
from kronsched.schedules.ks_gather import gathering
from kronsched.schedules.ks_last_plan import UNIT_BYTES, LastPlan, chunk_of
from kronsched.schedules.ks_mma_limits import LANES
from kronsched.schedules.ks_mma_parts import MMA, PACK, VECTOR, half_selector, high_part, inside, low_part
from kronsched.schedules.ks_mma_plan import SUM_STEPS
from kronsched.schedules.ks_pack import Packing
from kronsched.schedules.ks_parts import without_unused


def batch_last_kernel(p: LastPlan, packing: Packing) -> Any:
    """The PrimFunc over x, the weights (in fragment order unless they are gathered), y, and what the epilogue takes."""
    a, b, c, d = p.pattern
    B, DT, ITEM, E, Q = p.batch, p.dtype, p.item, p.per16, p.own
    MJ, U, JB, NB, KS, S, G = p.mj, p.units, p.jb, p.nb, p.ks, p.stages, p.grid_tiles
    WJ, NT, KC, KT = p.warps_j, p.threads, p.chunks, p.ks // p.k_step
    NTL, NSL, nJ = p.tiles, p.slice_count, p.j_slices
    wide, stream, two_sums = ITEM == 4, p.stream, p.two_sums
    CB, WC, XS, PITCH = p.copy_bytes, p.chunk_words, p.stage_words, p.pitch // 4
    WO, X0 = KS * PITCH, p.resident_words
    PPK = NB * ITEM // CB  # pieces of a row of X
    NP = KS * PPK
    ragged_n, ragged_k, ragged_j = B % NB != 0, c % KS != 0, b % JB != 0
    NWL, NSUM = KC * WC // 4, p.sums
    FLUSH, PART = max(1, SUM_STEPS // KS), SUM_STEPS // p.k_step  # chunks, and instructions, of a sum in one part
    mma, pack = MMA[DT], PACK.get(DT, "")
    copy_x = f"cp.async.{'cg' if CB == 16 else 'ca'}.shared.global"
    put, SW = f"st.global{VECTOR[CB]}.b32", CB // 4
    gather = gathering(p.pattern, DT, packing, p.resident_words, NT)
    AHEAD, TJ, after = p.ahead, JB // 16, p.after
    epilogue, fused, make, get = p.epilogue, bool(p.epilogue), word_maker(p.epilogue, DT), f"ld.global.nc{VECTOR[CB]}.b32"

    def pair_of(u, half):
        """Elements of a lane's load that make operand word `half` of instruction u (16-bit): k numbers 2·half and 2·half + 1."""
        return 2 * half * E + u, (2 * half + 1) * E + u

    def sum_at(mj, un, u):
        return ((mj * U + un) * E + u) * 4

    TOGETHER = min(HELD // 4, MJ * U * 4)

    def own_place(jb, wj, wn, g, t, tile, mj, un, h, r):
        """(j, n) of a lane's 16 bytes of samples: row half h, column 2t + r."""
        j = jb * JB + (wj * MJ + mj) * 16 + h * 8 + g
        return j, tile * NB + (wn * U + un) * (UNIT_BYTES // ITEM) + chunk_of(t * 2 + r) * E

    def rest_of(ib, jb, il, tile):
        """(index in Y, whether inside) of output j of a tile and a sample of it."""

        def place(j, sample):
            n = tile * NB + sample
            return ((ib * b + jb * JB + j) * d + il) * B + n, inside((True, n < B), (ragged_j, jb * JB + j < b))

        return place

    # Nothing is read that another kernel may still write: see KSTensorCore.apply.
    wait_first = after in ("factor", "any") or (stream and after == "packing")

    @T.prim_func
    def ks(
        x: T.Buffer((a * c * d * B,), DT),
        wf: T.Buffer((a * b * c * d if p.gather else p.weight_elements,), DT),
        y: T.Buffer((a * b * d * B,), DT),
        bias: T.Buffer((a * b * d,), DT),
        residual: T.Buffer((a * b * d * B,), DT),
    ):
        T.device_entry()
        T.attr({"tirx.launch_bounds_min_blocks_per_sm": p.min_blocks})
        cta = T.cta_id([NSL * G])
        tx = T.thread_id([NT])
        sl: T.let = cta % NSL
        g0: T.let = cta // NSL
        jb: T.let = sl % nJ
        il: T.let = sl // nJ % d
        ib: T.let = sl // (nJ * d)
        warp: T.let = tx // LANES
        lane: T.let = tx % LANES
        wj: T.let = warp % WJ
        wn: T.let = warp // WJ
        g: T.let = lane // 4
        t: T.let = lane % 4
        smem = T.alloc_buffer((p.shared_words,), "uint32", scope="shared.dyn", align=128)
        acc = T.alloc_local([NSUM], "float32")
        tot = T.alloc_local([NSUM if two_sums else 1], "float32")
        raw = T.alloc_local([Q * 4], "uint32")
        A = T.alloc_local([MJ * 4], "uint32")
        Al = T.alloc_local([MJ * 4 if wide else 1], "uint32")
        bh = T.alloc_local([2], "uint32")
        bl = T.alloc_local([2], "uint32")
        ow = T.alloc_local([4], "uint32")

        @T.inline
        def copy_weights(to, chunk, count):
            for e in T.serial(T.ceildiv(count, NT)):
                wi: T.let = e * NT + tx
                if count % NT == 0 or wi < count:
                    T.ptx["cp.async.cg.shared.global"](
                        smem.ptr_to([to + wi * 4]), wf.ptr_to([((sl * KC + chunk) * WC + wi * 4) * 4 // ITEM]), 16
                    )

        @T.inline
        def issue(it):
            tile = T.meta_var(g0 + it // KC * G)
            kc = T.meta_var(it % KC)
            at = T.meta_var(X0 + it % S * XS)
            if tile < NTL:
                for e in T.unroll(T.ceildiv(NP, NT)):
                    piece: T.let = e * NT + tx
                    k: T.let = piece // PPK
                    part: T.let = piece % PPK
                    n: T.let = tile * NB + part * (CB // ITEM)
                    fine: T.let = inside((ragged_n, n < B), (ragged_k, kc * KS + k < c))
                    if NP % NT == 0 or piece < NP:
                        if ragged_n or ragged_k:
                            T.ptx[copy_x](
                                smem.ptr_to([at + k * PITCH + part * SW]),
                                x.ptr_to([T.Select(fine, ((ib * c + kc * KS + k) * d + il) * B + n, 0)]),
                                CB,
                                T.Select(fine, T.uint32(CB), T.uint32(0)),
                            )
                        else:
                            T.ptx[copy_x](
                                smem.ptr_to([at + k * PITCH + part * SW]),
                                x.ptr_to([((ib * c + kc * KS + k) * d + il) * B + n]),
                                CB,
                            )
                if stream:
                    copy_weights(at + WO, kc, WC // 4)
                if epilogue.residual:  # noqa: SIM102 (of these two tests one is Python's, the other the kernel's)
                    if KC == 1 or kc == 0:
                        prefetch(residual, NT, tx, JB, NB, ITEM, rest_of(ib, jb, il, tile))

        @T.inline
        def load_weights(weights, kt):
            for mj in T.unroll(MJ):
                T.ptx["ld.shared.v4.b32"](
                    *[A[mj * 4 + z] for z in range(4)], smem.ptr_to([weights + ((kt * TJ + wj * MJ + mj) * LANES + lane) * 4])
                )
                if wide:
                    for z in T.unroll(4):
                        ow[z] = high_part(A[mj * 4 + z])
                        Al[mj * 4 + z] = low_part(A[mj * 4 + z], ow[z])
                        A[mj * 4 + z] = ow[z]

        @T.inline
        def product(left, right, un, u):
            for mj in T.unroll(MJ):
                T.ptx[mma](
                    *[acc[sum_at(mj, un, u) + r] for r in range(4)],
                    *[left[mj * 4 + r] for r in range(4)],
                    right[0],
                    right[1],
                    *[acc[sum_at(mj, un, u) + r] for r in range(4)],
                )

        @T.inline
        def multiply(at, kt):
            for un in T.unroll(U):
                for q in T.unroll(Q):
                    T.ptx["ld.shared.v4.b32"](
                        *[raw[q * 4 + z] for z in range(4)],
                        smem.ptr_to([at + (kt * p.k_step + q * 4 + t) * PITCH + ((wn * U + un) * 8 + chunk_of(g)) * 4]),
                    )
                for u in T.unroll(E):
                    for half in T.unroll(2):
                        if wide:
                            bh[half] = high_part(raw[half * E + u])
                            bl[half] = low_part(raw[half * E + u], bh[half])
                        else:
                            lo, hi = T.meta_var(pair_of(u, half))
                            T.ptx["prmt.b32"](bh[half], raw[lo // 2], raw[hi // 2], half_selector(lo % 2, hi % 2))
                    if wide:
                        product(A, bl, un, u)
                        product(Al, bh, un, u)
                    product(A, bh, un, u)

        @T.inline
        def put_words(j, n):
            """16 bytes of samples of output j."""
            for w in T.unroll(4 // SW):
                if inside((ragged_j, j < b), (ragged_n, n + w * (CB // ITEM) < B)):
                    T.ptx[put](
                        y.ptr_to([((ib * b + j) * d + il) * B + n + w * (CB // ITEM)]), *[ow[w * SW + z] for z in range(SW)]
                    )

        @T.inline
        def store(tile, mj, un, h, r):
            j, n = T.meta_var(own_place(jb, wj, wn, g, t, tile, mj, un, h, r))
            for w in T.unroll(4):
                if wide:
                    ow[w] = T.reinterpret("uint32", acc[sum_at(mj, un, w) + h * 2 + r])
                else:
                    T.ptx[pack](ow[w], acc[sum_at(mj, un, 2 * w + 1) + h * 2 + r], acc[sum_at(mj, un, 2 * w) + h * 2 + r])
            put_words(j, n)

        @T.inline
        def load_residual(rw, tile, mj, un, h, r, to):
            j, n = T.meta_var(own_place(jb, wj, wn, g, t, tile, mj, un, h, r))
            for w in T.unroll(4 // SW):
                fine = T.meta_var(inside((ragged_j, j < b), (ragged_n, n + w * (CB // ITEM) < B)))
                T.ptx[get](
                    *[rw[to + w * SW + z] for z in range(SW)],
                    residual.ptr_to([T.Select(fine, ((ib * b + j) * d + il) * B + n + w * (CB // ITEM), 0)]),
                )

        @T.inline
        def store_finished(rw, f, tile, mj, un, h, r, of):
            j, n = T.meta_var(own_place(jb, wj, wn, g, t, tile, mj, un, h, r))
            if epilogue.bias:
                f[SCRATCH] = T.Cast("float32", bias[(ib * b + (T.min(j, b - 1) if ragged_j else j)) * d + il])
            for w in T.unroll(4):
                places = T.meta_var([sum_at(mj, un, i) for i in ((w,) if wide else (2 * w, 2 * w + 1))])
                held = T.meta_var(of + w if epilogue.residual else 0)
                make(ow, w, f, [acc[at + h * 2 + r] for at in places], [f[SCRATCH], f[SCRATCH]], rw[held])
            put_words(j, n)

        @T.inline
        def store_with_epilogue(rw, f, tile):
            """Some 16-byte pieces at a time, their residual first."""
            for first in T.unroll(T.ceildiv(MJ * U * 4, TOGETHER)):
                if epilogue.residual:
                    for z in T.unroll(TOGETHER):
                        part = T.meta_var(first * TOGETHER + z)
                        if part < MJ * U * 4:
                            load_residual(rw, tile, part // (U * 4), part // 4 % U, part // 2 % 2, part % 2, z * 4)
                for z in T.unroll(TOGETHER):
                    part = T.meta_var(first * TOGETHER + z)
                    if part < MJ * U * 4:
                        store_finished(rw, f, tile, part // (U * 4), part // 4 % U, part // 2 % 2, part % 2, z * 4)

        @T.inline
        def move_sums():
            for q in T.unroll(NSUM):
                tot[q] = tot[q] + acc[q]
                acc[q] = T.float32(0)

        if p.gather and after == "factor":
            gather(wf, smem, sl, tx)
        if not stream and not p.gather and after != "packing":
            copy_weights(0, 0, NWL)
            T.ptx.cp.async_.commit_group()
        if wait_first:
            T.ptx.griddepcontrol.wait()
        for s in T.unroll(AHEAD):
            issue(s)
            T.ptx.cp.async_.commit_group()
        if p.gather and after != "factor":
            gather(wf, smem, sl, tx)
        if not stream and not p.gather and after == "packing":
            T.ptx.griddepcontrol.wait()
            copy_weights(0, 0, NWL)
            T.ptx.cp.async_.commit_group()
        if after != "":
            T.ptx.griddepcontrol.launch_dependents()
        if not stream:
            if not p.gather:
                T.ptx.cp.async_.wait_group(0 if after == "packing" else AHEAD)
            T.cuda.cta_sync()
        for ti in T.serial(T.ceildiv(NTL - g0, G)):
            for q in T.unroll(NSUM):
                acc[q] = T.float32(0)
            if two_sums:
                for q in T.unroll(NSUM):
                    tot[q] = T.float32(0)
            for kc in T.serial(KC):
                it: T.let = ti * KC + kc
                at: T.let = X0 + it % S * XS
                T.ptx.cp.async_.wait_group(AHEAD - 1)
                T.cuda.cta_sync()
                issue(it + AHEAD)
                T.ptx.cp.async_.commit_group()
                for kt in T.unroll(KT):
                    load_weights(at + WO if stream else kc * WC, kt)
                    multiply(at, kt)
                    if two_sums and PART < KT:  # noqa: SIM102 (as below)
                        if kt % PART == PART - 1 and kt < KT - 1:
                            move_sums()
                if two_sums:  # noqa: SIM102 (of these two tests one is Python's, the other the kernel's)
                    if kc % FLUSH == FLUSH - 1 or kc == KC - 1:
                        move_sums()
            if two_sums:
                for q in T.unroll(NSUM):
                    acc[q] = tot[q]
            tile: T.let = g0 + ti * G
            if fused:
                held = T.meta_var(TOGETHER * 4 if epilogue.residual else 1)
                store_with_epilogue(T.alloc_local([held], "uint32"), T.alloc_local([SCRATCH + 1], "float32"), tile)
            else:
                for mj in T.unroll(MJ):
                    for un in T.unroll(U):
                        for h in T.unroll(2):
                            for r in T.unroll(2):
                                store(tile, mj, un, h, r)
        T.ptx.cp.async_.wait_group(0)

    return without_unused(ks, p.epilogue)
