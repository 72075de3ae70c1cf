"""The batch-last Kronecker-sparse kernel on wgmma (sm_90a) as a TIRx tile program. See ks_last_plan.py for tiling and letters.

    weights (core matrices) ── cp.async ── shared, once (resident) or with every chunk (stream) ── operand B
    tiles of X              ── cp.async ── ring of stages ── registers ── operand A ── sums ── Y

A warpgroup of four warps multiplies its samples (rows of A) with 16·mj outputs j. A lane's loads are two rows of each instruction
at neighbouring samples. So its sums are neighbouring samples of an output, and are stored as they come, 8 or 16 bytes a lane.
float32 goes through TF32 three times, as in ks_mma_kernel.py; the high and low parts of weights are packed apart.

Read first: `batch_last_wgmma`: its last part, then `multiply`, `store`.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc,valid-type,name-defined"

from typing import Any

from tvm.script import tirx as T

from kronsched.schedules.ks_epilogue import HELD, SCRATCH, prefetch, word_maker
from kronsched.schedules.ks_gather import gathering
from kronsched.schedules.ks_last_plan import LastPlan
from kronsched.schedules.ks_mma_limits import LANES
from kronsched.schedules.ks_mma_parts import KIND, PACK, VECTOR, WGMMA, half_selector, high_part, inside, low_part, zero
from kronsched.schedules.ks_pack import Packing
from kronsched.schedules.ks_parts import without_unused


def batch_last_wgmma(p: LastPlan, packing: Packing) -> Any:
    """The PrimFunc over x, the weights (in core matrices unless they are gathered), y, and what the epilogue takes."""
    a, b, c, d = p.pattern
    B, DT, ITEM, E, Q = p.batch, p.dtype, p.item, p.lane_n, p.own
    MJ, U, JB, NB, KS, S, G = p.mj, p.units, p.jb, p.nb, p.ks, p.stages, p.grid_tiles
    WN, NT, KC, KT = p.warps_n, p.threads, p.chunks, p.ks // p.k_step
    NTL, NSL, nJ = p.tiles, p.slice_count, p.j_slices
    wide, stream, fresh, after = ITEM == 4, p.stream, p.fresh, p.after
    CB, WC, XS, PITCH = p.copy_bytes, p.chunk_words, p.stage_words, p.pitch // 4
    WO, X0 = KS * PITCH, p.resident_words
    PPK, CW = NB * ITEM // CB, CB // 4  # pieces of a row of X; words of one
    NP = KS * PPK
    ragged_n, ragged_k, ragged_j = B % NB != 0, c % KS != 0, b % JB != 0
    NWL, NSUM = KC * WC // 4, p.sums
    V, VW, NV = E // 2, p.vector // 4, 8 * MJ  # instructions of a unit, words of a lane's load, sums of an instruction
    product, pack = WGMMA.format(n=16 * MJ, k=p.k_step, kind=KIND[DT]), PACK.get(DT, "")
    AHEAD, AB, NA = p.ahead, p.buffers, U * V * 4  # operands A that are held, words of one
    FK, SETS = p.fresh_form if fresh else (1, 1)
    UV, RAW = U * V, U * Q * VW  # instructions along the samples, words of a lane's loads
    NF = KT // FK * UV  # products of a chunk that start new sums
    AW = 2 * FK * 4 if fresh else AB * NA
    tail = () if wide else (0,)  # operand B is K-major
    LOW, BLOCK = JB * p.k_step * ITEM // 16, JB * p.k_step * ITEM // 16 * p.parts  # in 16 bytes, as the descriptor counts
    copy_x = f"cp.async.{'cg' if CB == 16 else 'ca'}.shared.global"
    load = f"ld.shared{VECTOR[p.vector]}.b32"
    SB = min(CB, p.vector)
    gather = gathering(p.pattern, DT, packing, p.resident_words, NT)
    put, SW = f"st.global{VECTOR[SB]}.b32", SB // 4
    epilogue, fused, make, get = p.epilogue, bool(p.epilogue), word_maker(p.epilogue, DT), f"ld.global.nc{VECTOR[SB]}.b32"

    TOGETHER = min(HELD // VW, U * MJ * 4)

    def own_place(jb, wj, wn, g, t, tile, un, j8, column):
        """(j, first n) of a lane's neighbouring samples."""
        return jb * JB + (wj * MJ * 2 + j8) * 8 + t * 2 + column, tile * NB + ((wn * U + un) * 8 + g) * E

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
        sl: T.let = cta // G if p.in_rows else cta % NSL
        g0: T.let = cta % G if p.in_rows else cta // NSL
        jb: T.let = sl % nJ
        il: T.let = sl // nJ % d
        ib: T.let = sl // (nJ * d)
        warp: T.let = tx // LANES
        lane: T.let = tx % LANES
        wn: T.let = warp % WN
        wj: T.let = warp // WN
        g: T.let = lane // 4
        t: T.let = lane % 4
        smem = T.alloc_buffer((p.shared_words,), "uint32", scope="shared.dyn", align=128)
        acc = T.alloc_local([SETS * NV if fresh else NSUM], "float32")
        tot = T.alloc_local([NSUM if fresh else 1], "float32")
        raw = T.alloc_local([FK * RAW], "uint32")
        A = T.alloc_local([AW], "uint32")
        Al = T.alloc_local([AW if wide else 1], "uint32")
        ow = T.alloc_local([VW], "uint32")
        desc = T.alloc_local([1], "uint64")

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
                                smem.ptr_to([at + k * PITCH + part * CW]),
                                x.ptr_to([T.Select(fine, ((ib * c + kc * KS + k) * d + il) * B + n, 0)]),
                                CB,
                                T.Select(fine, T.uint32(CB), T.uint32(0)),
                            )
                        else:
                            T.ptx[copy_x](
                                smem.ptr_to([at + k * PITCH + part * CW]),
                                x.ptr_to([((ib * c + kc * KS + k) * d + il) * B + n]),
                                CB,
                            )
                if stream:
                    copy_weights(at + WO, kc, WC // 4)
                if epilogue.residual:  # noqa: SIM102 (of these two tests one is Python's, the other the kernel's)
                    if KC == 1 or kc == 0:
                        prefetch(residual, NT, tx, JB, NB, ITEM, rest_of(ib, jb, il, tile))

        @T.inline
        def load_samples(at, kt, to):
            for un in T.unroll(U):
                for q in T.unroll(Q):
                    T.ptx[load](
                        *[raw[to + (un * Q + q) * VW + z] for z in range(VW)],
                        smem.ptr_to([at + (kt * p.k_step + q * 4 + t) * PITCH + ((wn * U + un) * 8 + g) * VW]),
                    )

        @T.inline
        def operand(to_a, un, v, of):
            """Sample 2v + h of a lane is row half h of instruction v."""
            for h in T.unroll(2):
                for q in T.unroll(2):
                    to = T.meta_var(to_a + q * 2 + h)
                    if wide:
                        A[to] = high_part(raw[of + (un * Q + q) * VW + v * 2 + h])
                        Al[to] = low_part(raw[of + (un * Q + q) * VW + v * 2 + h], A[to])
                    else:
                        T.ptx["prmt.b32"](
                            A[to],
                            raw[of + (un * Q + 2 * q) * VW + v],
                            raw[of + (un * Q + 2 * q + 1) * VW + v],
                            half_selector(h, h),
                        )

        @T.inline
        def warpgroup_product(left, from_a, weights, more, to):
            T.ptx[product](
                *[acc[to + r] for r in range(NV)],
                *[left[from_a + r] for r in range(4)],
                desc[0] + T.Cast("uint64", weights),
                more,
                1,
                1,
                *tail,
            )

        @T.inline
        def multiply(weights, kt):
            start: T.let = weights // 4 + kt * BLOCK + wj * MJ * LANES
            a0 = T.meta_var(kt % AB * NA)
            if AB == 1:
                T.ptx.wgmma.wait_group.sync.aligned(0)  # operand A is free again
            for un in T.unroll(U):
                for v in T.unroll(V):
                    operand(a0 + (un * V + v) * 4, un, v, 0)
            T.ptx.wgmma.fence.sync.aligned()
            for uv in T.unroll(UV):
                if wide:
                    warpgroup_product(A, a0 + uv * 4, start + LOW, T.bool(True), uv * NV)
                    warpgroup_product(Al, a0 + uv * 4, start, T.bool(True), uv * NV)
                warpgroup_product(A, a0 + uv * 4, start, T.bool(True), uv * NV)
            T.ptx.wgmma.commit_group.sync.aligned()
            if AB == 2:
                T.ptx.wgmma.wait_group.sync.aligned(1)  # the other operand A is free again

        @T.inline
        def fresh_product(weights, kt, z):
            T.ptx.wgmma.fence.sync.aligned()
            for s in T.unroll(FK):
                start: T.let = weights // 4 + (kt + s) * BLOCK + wj * MJ * LANES
                a0 = T.meta_var((z % 2 * FK + s) * 4)
                warpgroup_product(A, a0, start + LOW, s > 0, z % SETS * NV)
                warpgroup_product(Al, a0, start, T.bool(True), z % SETS * NV)
                warpgroup_product(A, a0, start, T.bool(True), z % SETS * NV)
            T.ptx.wgmma.commit_group.sync.aligned()

        @T.inline
        def add_fresh(z):
            for r in T.unroll(NV):
                tot[z % UV * NV + r] = tot[z % UV * NV + r] + acc[z % SETS * NV + r]

        @T.inline
        def multiply_fresh(weights, at):
            """One instruction along the samples after another; see ks_mma_kernel.py."""
            for z in T.unroll(NF):
                if z % UV == 0:
                    for s in T.unroll(FK):
                        load_samples(at, z // UV * FK + s, s * RAW)
                for s in T.unroll(FK):
                    operand((z % 2 * FK + s) * 4, z % UV // V, z % V, s * RAW)
                if SETS == 1 and z > 0:
                    T.ptx.wgmma.wait_group.sync.aligned(0)
                    add_fresh(z - 1)
                fresh_product(weights, z // UV * FK, z)
                if SETS == 2 and z > 0:
                    T.ptx.wgmma.wait_group.sync.aligned(1)
                    add_fresh(z - 1)
            T.ptx.wgmma.wait_group.sync.aligned(0)
            add_fresh(NF - 1)

        @T.inline
        def put_words(j, n):
            for w in T.unroll(VW // SW):
                if inside((ragged_j, j < b), (ragged_n, n + w * (SB // ITEM) < B)):
                    T.ptx[put](
                        y.ptr_to([((ib * b + j) * d + il) * B + n + w * (SB // ITEM)]), *[ow[w * SW + z] for z in range(SW)]
                    )

        @T.inline
        def store(sums, tile, un, j8, column):
            j, n = T.meta_var(own_place(jb, wj, wn, g, t, tile, un, j8, column))
            for w in T.unroll(VW):
                if wide:
                    ow[w] = T.reinterpret("uint32", sums[(un * V + w // 2) * NV + j8 * 4 + w % 2 * 2 + column])
                else:
                    T.ptx[pack](ow[w], sums[(un * V + w) * NV + j8 * 4 + 2 + column], sums[(un * V + w) * NV + j8 * 4 + column])
            put_words(j, n)

        @T.inline
        def load_residual(rw, tile, un, j8, column, to):
            j, n = T.meta_var(own_place(jb, wj, wn, g, t, tile, un, j8, column))
            for w in T.unroll(VW // SW):
                fine = T.meta_var(inside((ragged_j, j < b), (ragged_n, n + w * (SB // ITEM) < B)))
                T.ptx[get](
                    *[rw[to + w * SW + z] for z in range(SW)],
                    residual.ptr_to([T.Select(fine, ((ib * b + j) * d + il) * B + n + w * (SB // ITEM), 0)]),
                )

        @T.inline
        def store_finished(rw, f, sums, tile, un, j8, column, of):
            j, n = T.meta_var(own_place(jb, wj, wn, g, t, tile, un, j8, column))
            if epilogue.bias:
                f[SCRATCH] = T.Cast("float32", bias[(ib * b + (T.min(j, b - 1) if ragged_j else j)) * d + il])
            for w in T.unroll(VW):
                low = T.meta_var((un * V + w // 2) * NV + j8 * 4 + w % 2 * 2 if wide else (un * V + w) * NV + j8 * 4)
                held = T.meta_var(of + w if epilogue.residual else 0)
                make(ow, w, f, [sums[low + z + column] for z in (0, 2)], [f[SCRATCH], f[SCRATCH]], rw[held])
            put_words(j, n)

        @T.inline
        def store_with_epilogue(rw, f, sums, tile):
            """Some outputs j at a time, their residual first."""
            for first in T.unroll(T.ceildiv(U * MJ * 4, TOGETHER)):
                if epilogue.residual:
                    for z in T.unroll(TOGETHER):
                        part = T.meta_var(first * TOGETHER + z)
                        if part < U * MJ * 4:
                            load_residual(rw, tile, part // (MJ * 4), part // 2 % (MJ * 2), part % 2, z * VW)
                for z in T.unroll(TOGETHER):
                    part = T.meta_var(first * TOGETHER + z)
                    if part < U * MJ * 4:
                        store_finished(rw, f, sums, tile, part // (MJ * 4), part // 2 % (MJ * 2), part % 2, z * VW)

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
            T.ptx.fence.proxy.async_.shared__cta()
            T.cuda.cta_sync()
        T.cuda.wgmma.encode_matrix_descriptor(T.address_of(desc), smem.ptr_to([0]), 8, 16, 0)
        for ti in T.serial(T.ceildiv(NTL - g0, G)):
            if fresh:
                for q in T.unroll(NSUM):
                    tot[q] = zero(cta, q // NV)
            else:
                for q in T.unroll(NSUM):
                    acc[q] = T.float32(0)
            for kc in T.serial(KC):
                it: T.let = ti * KC + kc
                at: T.let = X0 + it % S * XS
                T.ptx.cp.async_.wait_group(AHEAD - 1)
                if (stream and AHEAD == S - 1) or (AB == 2 and KT % 2 == 1):
                    T.ptx.wgmma.wait_group.sync.aligned(0)
                if stream:
                    T.ptx.fence.proxy.async_.shared__cta()
                T.cuda.cta_sync()
                issue(it + AHEAD)
                T.ptx.cp.async_.commit_group()
                if fresh:
                    multiply_fresh(at + WO if stream else kc * WC, at)
                else:
                    for kt in T.unroll(KT):
                        load_samples(at, kt, 0)
                        multiply(at + WO if stream else kc * WC, kt)
            T.ptx.wgmma.wait_group.sync.aligned(0)
            tile: T.let = g0 + ti * G
            if fused:
                held = T.meta_var(TOGETHER * VW if epilogue.residual else 1)
                store_with_epilogue(
                    T.alloc_local([held], "uint32"), T.alloc_local([SCRATCH + 1], "float32"), tot if fresh else acc, tile
                )
            else:
                for un in T.unroll(U):
                    for j8 in T.unroll(MJ * 2):
                        for column in T.unroll(2):
                            if fresh:
                                store(tot, tile, un, j8, column)
                            else:
                                store(acc, tile, un, j8, column)
        T.ptx.cp.async_.wait_group(0)

    return without_unused(ks, p.epilogue)
