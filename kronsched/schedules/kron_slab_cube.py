"""The 16-bit Kron-Matmul of the last three axes of 64 in one launch: a cluster of eight blocks holds a row of 64^3.

    global ─(TMA)─ X ─ wgmma (a_0) ─ wgmma (a_2) ─ Z ─(bulk copies)─ R of the block that has q_0 ─ wgmma (a_1) ─ global

A block has eight values of a_1 at first. Half of its warpgroups, the senders, contract a_0 and a_2: the rounded sums of the first
product are operand A of the second. Bulk copies take the result to the blocks of the cluster, so that a block has eight values
of q_0. The others, the receivers, contract a_1, while the senders are at the next row. A receiving warpgroup has four values of
q_0, and the senders' warpgroup of the same number starts the copies for it.

Everything lies in shared memory as atoms of eight lines of 128 bytes, which is what wgmma reads with its 128-byte swizzle. X is
(a_0 / 8, a_1, a_0 % 8), a box of TMA for each a_0 / 8. R is (receiver, block that sent, q_0, a_1 % 8). The senders' rows of sums
come in the order q_0 = 8 (m % 8) + m / 8, by the order of the columns of F_0: eight neighbouring ones go to eight blocks. In Z
there are 16 bytes between what different blocks get, so that these rows are in different banks.

    mbarriers of a block    full: a row is in X     received, of each receiver: its part of a row is in R
                            taken: Z has left       free, of each receiver: all blocks' receivers of its number have read their R

Read first: `cube_kernel`.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,misc,valid-type,name-defined"

from __future__ import annotations

from typing import Any

from kronsched.schedules.kron_chain_half32 import STORES
from kronsched.schedules.kron_chain_names import PACK
from kronsched.schedules.kron_mma_kernel import evaluate
from kronsched.schedules.kron_slab_kernel import COPIES, LINE, STMATRIX, chunk_byte, product
from kronsched.schedules.kron_slab_plan import BLOCKS, STAGED_BYTES, CubeLaunch

P = 64
FACTOR = P * P * 2
ATOM = 8 * LINE
"""Bytes of eight lines."""
SHARE = BLOCKS * ATOM
"""Bytes that a block sends to another; in X, from eight values of a_0 to the next."""
PART = SHARE // 2
"""Bytes of that for each of its receivers; in R, from eight values of a_1 to the next."""
SKEW = 16
"""Bytes in Z between what different blocks get."""
_LOAD = "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
_SEND = "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes"


def turn(words: Any, other: Any, o: int, t: Any) -> None:
    """Emit: lane t of a quad gets word t of each of its lanes, in their order, where it had four words of its own."""
    from tvm.script import tirx as T
    from tvm.tirx.script.builder import ir as I

    for bit, pairs in ((1, ((0, 1), (2, 3))), (2, ((0, 2), (1, 3)))):
        odd = T.bitwise_and(t, bit) != 0
        for low, high in pairs:
            mine = T.Select(odd, words[o + low], words[o + high])
            evaluate(T.ptx["shfl_sync.bfly.b32"](other[0], mine, T.uint32(bit), T.uint32(31), T.uint32(0xFFFFFFFF)))
            I.buffer_store(words, T.Select(odd, other[0], words[o + low]), [o + low])
            I.buffer_store(words, T.Select(odd, words[o + high], other[0]), [o + high])


def cube_kernel(launch: CubeLaunch) -> Any:
    """The PrimFunc. Parameters x, f0, f1, f2, y as 16-bit words."""
    from tvm.script import tirx as T

    from kronsched.runtime.tensor_map import ENCODE

    rows, clusters, dtype = launch.rows, launch.clusters, launch.dtype
    size = rows * P**3
    store = STORES[launch.store]
    half = BLOCKS // 2  # slabs of a warpgroup
    data, staged = 3 * FACTOR, 3 * FACTOR + BLOCKS * SHARE
    received = staged + STAGED_BYTES
    bars = received + BLOCKS * SHARE
    apart = SHARE + SKEW
    encode = (dtype, 4)
    # a_2, a_0, a_1, rows
    layout = (P, P, P, rows, 2 * P**2, 2 * P, 2 * P**3, P, 8, BLOCKS, 1, 1, 1, 1, 1, 0, 3, launch.promotion, 0)

    def barrier(sm: Any, i: Any) -> Any:  # 0: full; 1, 2: received; 3, 4: free; 5: taken
        return sm.ptr_to([bars + i * 8])

    @T.prim_func
    def kernel(
        x: T.Buffer((size,), "uint16"),
        f0: T.Buffer((P * P,), "uint16"),
        f1: T.Buffer((P * P,), "uint16"),
        f2: T.Buffer((P * P,), "uint16"),
        y: T.Buffer((size,), "uint16"),
    ):
        x_map: T.let[T.handle("tensormap")] = T.tvm_stack_alloca("tensormap", 1)
        T.call_packed(ENCODE, x_map, *encode, x.data, *layout)
        T.device_entry()
        T.attr({"tirx.launch_bounds_min_blocks_per_sm": 1})
        cluster = T.cluster_id([clusters])
        rank = T.cta_id_in_cluster([BLOCKS])
        tx = T.thread_id([launch.threads])
        group: T.let = tx // 128 % 2
        warp: T.let = tx % 128 // 32
        lane: T.let = tx % 32
        sm = T.alloc_buffer((launch.shared_bytes,), "uint8", scope="shared.dyn", align=1024)
        c = T.alloc_local([P // 2], "float32")
        words = T.alloc_local([P], "uint32")
        operand = T.alloc_local([5], "uint64")  # descriptors: factors, this group's slabs in X, in R
        remote = T.alloc_local([2], "uint32")
        other = T.alloc_local([1], "uint32")
        spot = T.alloc_local([4], "int32")  # bytes of Z where a lane writes: all its places are a constant from one of four
        zero = T.alloc_local([1], "uint32")  # 0, but unknown to the compiler: it keeps too many sums in registers else

        @T.inline
        def factor(F, at):
            for v in T.serial(P * 8 // 512, unroll=True):
                i = T.meta_var(v * 512 + tx)
                T.ptx[COPIES["cg"]](sm.ptr_to([at + chunk_byte(P, i // 8, i % 8)]), F.ptr_to([i * 8]), 16)

        @T.inline
        def first_factor():  # columns m stand for q_0 = 8 (m % 8) + m / 8
            for v in T.serial(P * P // 1024, unroll=True):
                i = T.meta_var((v * 512 + tx) // 32)  # of the contracted axis
                m = T.meta_var(tx % 32 * 2)
                T.ptx["st.shared.b32"](
                    sm.ptr_to([chunk_byte(P, i, m // 8) + m % 8 * 2]),
                    T.cast(f0[i * P + m % 8 * 8 + m // 8], "uint32")
                    | (T.cast(f0[i * P + (m % 8 + 1) * 8 + m // 8], "uint32") << T.uint32(16)),
                )

        @T.inline
        def describe(i, at, step):
            T.cuda.wgmma.encode_matrix_descriptor(T.address_of(operand[i]), sm.ptr_to([at]), ATOM // 16, step // 16, 3)

        @T.inline
        def load(it):
            T.ptx.mbarrier.arrive.expect_tx.shared.b64(barrier(sm, 0), T.uint32(BLOCKS * SHARE))
            for v in T.serial(P // 8):
                T.ptx[_LOAD](
                    sm.ptr_to([data + v * SHARE]),
                    T.address_of(x_map),
                    0, v * 8, rank * BLOCKS, cluster + it * clusters,
                    barrier(sm, 0),
                )  # fmt: skip

        @T.inline
        def there(i, at, block):  # an address in another block's shared memory
            T.ptx.mapa.shared__cluster.u32(remote[i], T.cuda.cvta_generic_to_shared(sm.ptr_to([at])), T.cast(block, "uint32"))

        @T.inline
        def carry(it):  # a lane for each block: what the senders made for the receivers of this group's number
            if it > 0:
                T.cuda.mbarrier_wait(barrier(sm, 3 + group), (it - 1) % 2)
            to = T.meta_var((rank + lane) % BLOCKS)
            there(0, received + (group * BLOCKS + rank) * PART, to)
            there(1, bars + (1 + group) * 8, to)
            T.ptx[_SEND](remote[0], sm.ptr_to([staged + to * apart + group * PART]), T.uint32(PART), remote[1])

        @T.inline
        def send(trips):
            for it in T.serial(trips):
                T.ptx["shr.u32"](zero[0], T.cast(it, "uint32"), T.uint32(24))
                T.cuda.mbarrier_wait(barrier(sm, 0), it % 2)
                for s in T.serial(half, unroll=True):
                    product(
                        P, dtype, c, operand[0], operand[3] + T.cast(zero[0] + T.uint32(s * ATOM // 16), "uint64"), pitch=SHARE
                    )
                    for i in T.serial(16, unroll=True):
                        T.ptx[PACK[dtype]](words[s * 16 + i], c[2 * i + 1], c[2 * i])
                T.ptx.bar.sync(T.uint32(1), T.uint32(256))  # the row has been read
                if tx == 0 and it + 1 < trips:
                    load(it + 1)
                if it > 0:
                    T.cuda.mbarrier_wait(barrier(sm, 5), (it - 1) % 2)
                T.cuda.warp_sync()
                for i in T.serial(4, unroll=True):  # chunk i of 0, 1, 4, 5, by the line
                    row = T.meta_var(lane % 8 * apart + (warp * 2 + lane // 8 % 2) * ATOM)
                    line = T.meta_var(group * half)
                    spot[i] = (
                        T.cast(zero[0], "int32") + staged + row + line * LINE + ((i % 2 + i // 2 * 4 ^ lane // 16 ^ line) << 4)
                    )
                for s in T.serial(half, unroll=True):
                    product(P, dtype, c, [words[s * 16 + i] for i in range(16)], operand[2])
                    for v in T.serial(4, unroll=True):
                        for i in T.serial(4, unroll=True):
                            T.ptx[PACK[dtype]](words[s * 16 + i], c[v * 8 + i * 2 + 1], c[v * 8 + i * 2])
                        T.ptx[STMATRIX](
                            sm.ptr_to([spot[(v * 2 ^ s) & 1 | ((v * 2 ^ s) & 4) // 2] + s * LINE + (v * 2 ^ s) % 4 // 2 * 32]),
                            words[s * 16], words[s * 16 + 1], words[s * 16 + 2], words[s * 16 + 3],
                        )  # fmt: skip
                T.ptx.fence.proxy.async_.shared__cta()
                T.ptx.bar.sync(T.uint32(1), T.uint32(256))
                if tx % 128 < BLOCKS:
                    carry(it)
                T.cuda.warp_sync()

        @T.inline
        def receive(trips):
            there(0, bars + 5 * 8, lane % BLOCKS)
            there(1, bars + (3 + group) * 8, lane % BLOCKS)
            for it in T.serial(trips):
                if tx % 128 == 0:
                    T.ptx.mbarrier.arrive.expect_tx.shared.b64(barrier(sm, 1 + group), T.uint32(BLOCKS * PART))
                T.cuda.warp_sync()
                T.ptx["shr.u32"](zero[0], T.cast(it, "uint32"), T.uint32(24))
                T.cuda.mbarrier_wait(barrier(sm, 1 + group), it % 2)
                if tx % 128 < BLOCKS:
                    T.ptx.mbarrier.arrive.shared__cluster.b64(remote[0])  # it has left the blocks that sent it
                T.cuda.warp_sync()
                for s in T.serial(half, unroll=True):
                    product(
                        P, dtype, c, operand[1], operand[4] + T.cast(zero[0] + T.uint32(s * ATOM // 16), "uint64"), pitch=PART
                    )
                    for i in T.serial(16, unroll=True):  # words[8 h + j]: row 8 h + lane / 4, chunk j
                        T.ptx[PACK[dtype]](words[s * 16 + i % 2 * 8 + i // 2], c[i * 2 + 1], c[i * 2])
                if lane < BLOCKS:
                    T.ptx.mbarrier.arrive.shared__cluster.b64(remote[1])
                T.cuda.warp_sync()
                for s in T.serial(half, unroll=True):
                    for i in T.serial(4, unroll=True):
                        o = T.meta_var(s * 16 + i * 4)
                        turn(words, other, s * 16 + i * 4, lane % 4)
                        q_0 = T.meta_var(rank * BLOCKS + group * half + s)
                        line = T.meta_var(warp * 16 + i // 2 * 8 + lane // 4)
                        at = T.meta_var((cluster + it * clusters) * P**3 + q_0 * P**2 + line * P + (i % 2 * 4 + lane % 4) * 8)
                        T.ptx[store](y.ptr_to([at]), words[o], words[o + 1], words[o + 2], words[o + 3])

        if tx == 0:
            T.ptx["prefetch.tensormap"](T.address_of(x_map))
            for i in T.serial(3, unroll=True):
                T.ptx.mbarrier.init.shared.b64(barrier(sm, i), T.uint32(1))
                T.ptx.mbarrier.init.shared.b64(barrier(sm, 3 + i), T.uint32(4 * BLOCKS if i < 2 else 2 * BLOCKS))
            T.ptx.fence.mbarrier_init.release.cluster()
        T.ptx.griddepcontrol.wait()  # until here, this launch overlaps the one before it
        T.ptx.griddepcontrol.launch_dependents()
        first_factor()
        factor(f1, FACTOR)
        factor(f2, 2 * FACTOR)
        T.ptx.cp.async_.commit_group()
        T.ptx.cp.async_.wait_group(0)
        for i in T.serial(3, unroll=True):
            describe(i, i * FACTOR, ATOM)
        describe(3, data + group * half * ATOM, SHARE)
        describe(4, received + group * (BLOCKS * PART), PART)
        T.ptx.fence.proxy.async_.shared__cta()
        T.ptx["barrier.cluster.arrive.release.aligned"]()
        T.ptx["barrier.cluster.wait.acquire.aligned"]()
        trips: T.let = (rows - cluster + clusters - 1) // clusters
        if tx < 256:
            if tx == 0:
                load(0)
            T.cuda.warp_sync()
            send(trips)
        else:
            receive(trips)
        T.cuda.warp_sync()
        T.ptx["barrier.cluster.arrive.release.aligned"]()  # no block ends while another may still write to it
        T.ptx["barrier.cluster.wait.acquire.aligned"]()

    return kernel
