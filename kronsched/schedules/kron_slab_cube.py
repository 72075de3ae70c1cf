"""The 16-bit Kron-Matmul of the last three axes of 64 in one launch: a cluster of eight blocks holds a row of 64^3.

    global ── shared ─ wgmma (a_0) ─ wgmma (a_2) ── shared of the block that has q_0 ── wgmma (a_1) ── global

A block has eight values of a_1 at first: slabs (a_0, a_2), of which half of its warpgroups, the senders, make (q_0, q_2) as in
kron_slab_kernel.py. They go to the other blocks' shared memory, so that a block then has eight values of q_0: slabs (a_1, q_2).
The other warpgroups, the receivers, contract these, while the senders are at the next row. One barrier of the cluster a row: the
blocks receive into two buffers in turn. The next row's slabs are on their way as soon as their place is free.

    shared: factors ─ eight slabs ─ eight slabs received ─ eight more; a slab that has been read is where a group turns its sums

Read first: `cube_kernel`.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,misc,valid-type,name-defined"

from __future__ import annotations

from typing import Any

from kronsched.schedules.kron_chain_half32 import STORES
from kronsched.schedules.kron_slab_kernel import COPIES, LINE, as_operand, chunk_byte, into_lines, product
from kronsched.schedules.kron_slab_plan import BLOCKS, WARP_BYTES, CubeLaunch

P = 64
SLAB = P * P * 2
"""Bytes of a slab or a factor."""
_STORE = "st.shared::cluster.v4.b32"


def cube_kernel(launch: CubeLaunch) -> Any:
    """The PrimFunc. Parameters x, f0, f1, f2, y as 16-bit words."""
    from tvm.script import tirx as T

    rows, clusters, groups, threads, dtype = launch.rows, launch.clusters, launch.groups, launch.threads, launch.dtype
    mine = BLOCKS // (groups // 2)  # slabs of a group
    size = rows * P**3
    copy, store = COPIES[launch.load], STORES[launch.store]
    step = 8 * LINE // 16  # in units of a descriptor
    data, received = 3 * SLAB, (3 + BLOCKS) * SLAB

    @T.prim_func
    def kernel(
        x: T.Buffer((size,), "uint16"),
        f0: T.Buffer((P * P,), "uint16"),
        f1: T.Buffer((P * P,), "uint16"),
        f2: T.Buffer((P * P,), "uint16"),
        y: T.Buffer((size,), "uint16"),
    ):
        T.device_entry()
        T.attr({"tirx.launch_bounds_min_blocks_per_sm": 1})
        cluster = T.cluster_id([clusters])
        rank = T.cta_id_in_cluster([BLOCKS])
        tx = T.thread_id([threads])
        group: T.let = tx // 128
        share: T.let = group % (groups // 2)  # of a row: its slabs are share * mine …
        warp: T.let = tx % 128 // 32
        lane: T.let = tx % 32
        sm = T.alloc_buffer((launch.shared_bytes,), "uint8", scope="shared.dyn", align=1024)
        c = T.alloc_local([P // 2], "float32")
        words = T.alloc_local([P // 4], "uint32")
        operand = T.alloc_local([5], "uint64")  # descriptors: factors, this group's slabs, its slabs received
        remote = T.alloc_local([2], "uint32")  # where two blocks receive

        @T.inline
        def factor(F, at):
            for v in T.serial(P * 8 // threads, unroll=True):
                i = T.meta_var(v * threads + tx)
                T.ptx[COPIES["cg"]](sm.ptr_to([at + chunk_byte(P, i // 8, i % 8)]), F.ptr_to([i * 8]), 16)

        @T.inline
        def fetch(row, slab):  # a warp copies the part of the slab that it turns its sums in
            if row < rows:
                for v in T.serial(4, unroll=True):
                    line = T.meta_var(warp * 16 + v * 4 + lane // 8)
                    T.ptx[copy](
                        sm.ptr_to([data + slab * SLAB + chunk_byte(P, line, lane % 8)]),
                        x.ptr_to([row * P**3 + line * P**2 + (rank * BLOCKS + slab) * P + lane % 8 * 8]),
                        16,
                    )
            T.ptx.cp.async_.commit_group()

        @T.inline
        def meet():
            T.ptx.bar.sync(T.cast(group + 1, "uint32"), T.uint32(128))

        @T.inline
        def meet_cluster():
            T.ptx["barrier.cluster.arrive.release.aligned"]()
            T.ptx["barrier.cluster.wait.acquire.aligned"]()

        @T.inline
        def describe(i, at):
            T.cuda.wgmma.encode_matrix_descriptor(T.address_of(operand[i]), sm.ptr_to([at]), step, step, 3)

        @T.inline
        def send(row, buffer):
            for s in T.serial(mine, unroll=True):
                slab = T.meta_var(share * mine + s)
                T.ptx.cp.async_.wait_group(mine - 1)
                T.ptx.fence.proxy.async_.shared__cta()
                meet()
                product(P, dtype, c, operand[0], operand[3] + T.uint64(s * (SLAB // 16)))
                product(P, dtype, c, as_operand(P, dtype, words, c), operand[2])
                meet()  # the slab has been read
                into_lines(dtype, sm, data + slab * SLAB + warp * WARP_BYTES, words, c, 0, lane)
                fetch(row + clusters, slab)
                for v in T.serial(4, unroll=True):  # q_0 = 16 warp + 4v + lane / 8, chunk lane % 8 of q_2
                    to = T.meta_var(buffer + (v % 2 * 4 + lane // 8) * SLAB + chunk_byte(P, rank * BLOCKS + slab, lane % 8))
                    T.ptx[_STORE](
                        remote[v // 2] + T.cast(to, "uint32"), words[v * 4], words[v * 4 + 1], words[v * 4 + 2], words[v * 4 + 3]
                    )

        @T.inline
        def receive(row, buffer):
            for s in T.serial(mine, unroll=True):
                slab = T.meta_var(share * mine + s)
                product(P, dtype, c, operand[1], operand[4] + T.cast((buffer + s * SLAB) // 16, "uint64"))
                meet()  # the slab has been read
                into_lines(dtype, sm, received + buffer + slab * SLAB + warp * WARP_BYTES, words, c, 0, lane)
                for v in T.serial(4, unroll=True):
                    at = T.meta_var((rank * BLOCKS + slab) * P**2 + (warp * 16 + v * 4 + lane // 8) * P + lane % 8 * 8)
                    T.ptx[store](y.ptr_to([row * P**3 + at]), words[v * 4], words[v * 4 + 1], words[v * 4 + 2], words[v * 4 + 3])

        T.ptx.griddepcontrol.wait()  # until here, this launch overlaps the one before it
        T.ptx.griddepcontrol.launch_dependents()
        factor(f0, 0)
        factor(f1, SLAB)
        factor(f2, 2 * SLAB)
        T.ptx.cp.async_.commit_group()
        if group < groups // 2:
            for s in T.serial(mine, unroll=True):
                fetch(cluster, share * mine + s)
            T.ptx.cp.async_.wait_group(mine)
        else:
            T.ptx.cp.async_.wait_group(0)
        for i in T.serial(3, unroll=True):
            describe(i, i * SLAB)
        describe(3, data + share * mine * SLAB)
        describe(4, received + share * mine * SLAB)
        for i in T.serial(2, unroll=True):
            here = T.meta_var(T.cuda.cvta_generic_to_shared(sm.ptr_to([received])))
            T.ptx.mapa.shared__cluster.u32(remote[i], here, T.cast(warp * 2 + i, "uint32"))
        T.ptx.fence.proxy.async_.shared__cta()
        meet_cluster()  # the factors are there, and so are the other blocks
        if group < groups // 2:
            for it in T.serial((rows - cluster + clusters - 1) // clusters):
                send(cluster + it * clusters, it % 2 * (BLOCKS * SLAB))
                T.ptx["fence.proxy.async"]()
                meet_cluster()
        else:
            for it in T.serial((rows - cluster + clusters - 1) // clusters):
                meet_cluster()  # the row is there; the senders go on to the next, whose place has been read
                T.ptx["fence.proxy.async"]()
                receive(cluster + it * clusters, it % 2 * (BLOCKS * SLAB))
        T.ptx.cp.async_.wait_group(0)

    return kernel
