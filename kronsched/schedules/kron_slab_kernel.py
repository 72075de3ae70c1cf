"""One kernel of the 16-bit Kron-Matmul of large factors: warpgroup tensor cores (sm_90a), no exchange between the two products.

    global ─(cp.async or TMA, swizzled, `stages` slabs ahead)─ shared ─ wgmma ─ sums ─ wgmma ─ sums ─(a warp's lines)─ global
                       F_0 is operand A, the slab operand B ──────┘        └── the rounded sums are operand A, F_1 operand B

A slab is (a_0, a_1) in row-major order: as operand B its columns are contiguous (MN-major), and so are the columns of a factor,
as operand A or B. So everything is copied to shared memory as it lies in global memory, in panels of 64 columns with the 128-byte
swizzle. The sums of the first product are (q_0, a_1): rounded, they are operand A of the second.

    shared: factors ─ slabs of each group ─ 2 KB a warp, where it turns its sums into lines of 128 bytes ─ mbarriers (TMA)

When there is a place for every slab (`once`), all are copied at the start, and a slab's own place is where its sums are turned.
The second factor is waited for after the first product. With `ahead` the next slab's first product is in flight while the sums of
this one are stored. With `prefetch` a block asks L2 for its first slabs while it still waits for the launch before it.

A launch of one axis leaves the second product out and may work in place: a group has read a slab before it writes it, and nobody
else touches it.

Read first: `slab_kernel`.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,misc,valid-type,name-defined"

from __future__ import annotations

from typing import Any

from kronsched.schedules.kron_chain_half32 import STORES
from kronsched.schedules.kron_chain_names import PACK
from kronsched.schedules.kron_mma_kernel import evaluate
from kronsched.schedules.kron_slab_plan import ATOM, WARP_BYTES, SlabLaunch

KINDS = {"float16": "f16", "bfloat16": "bf16"}
LOAD = "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
COPIES = {"cg": "cp.async.cg.shared.global", "wide": "cp.async.cg.shared.global.L2::256B"}
STMATRIX = "stmatrix.sync.aligned.m8n8.x4.shared.b16"
LINE = 2 * ATOM
"""Bytes of a row of a panel."""


def chunk_byte(p: int, row: Any, chunk: Any) -> Any:
    """The byte of a chunk of 16 bytes of a slab or factor of p rows in shared memory, from its start."""
    return chunk // 8 * (p * LINE) + row * LINE + ((chunk % 8 ^ row % 8) << 4)


def line_byte(row: Any, chunk: Any) -> Any:
    """The same in a warp's 16 rows of 64 columns."""
    return row * LINE + ((chunk ^ row % 8) << 4)


def product(p: int, dtype: str, c: Any, left: Any, right: Any, wait: bool = True, pitch: int = 8 * LINE) -> None:
    """Emit c = the product along P. left: a descriptor of operand A, or its words in registers; right: a descriptor.

    wait: until it is done; else it is one more in flight.  pitch: bytes in `right` from eight lines to the next eight along P.
    """
    from tvm.script import tirx as T

    kind = KINDS[dtype]
    mma = f"wgmma.mma_async.sync.aligned.m64n{p}k16.f32.{kind}.{kind}"
    step = 16 * LINE // 16  # from one k step to the next, in units of a descriptor's address
    evaluate(T.ptx.wgmma.fence.sync.aligned())
    for s in range(p // 16):
        if isinstance(left, list):
            a, turned = left[4 * s : 4 * s + 4], [1]
        else:
            a, turned = [left + T.uint64(s * step)], [1, 1]
        evaluate(
            T.ptx[mma](*[c[i] for i in range(p // 2)], *a, right + T.uint64(s * 2 * pitch // 16), T.bool(s > 0), 1, 1, *turned)
        )
    evaluate(T.ptx.wgmma.commit_group.sync.aligned())
    if wait:
        evaluate(T.ptx.wgmma.wait_group.sync.aligned(0))


def as_operand(p: int, dtype: str, words: Any, c: Any) -> list[Any]:
    """Emit the rounding of sums to operand A; its words."""
    from tvm.script import tirx as T

    for i in range(p // 4):
        evaluate(T.ptx[PACK[dtype]](words[i], c[2 * i + 1], c[2 * i]))
    return [words[i] for i in range(p // 4)]


def into_lines(dtype: str, sm: Any, at: Any, words: Any, c: Any, o: Any, lane: Any) -> None:
    """Emit the rounding of a warp's 16 rows of 64 sums and their way through its 2 KB at byte `at` of shared memory.

    Before: c[o + 4j + 2h + e] is row 8h + lane / 4, column 8j + 2 (lane % 4) + e. After: words[4v …] are chunk lane % 8 of row
    4v + lane / 8.
    """
    from tvm.script import tirx as T

    row, chunk = lane // 8 % 2 * 8 + lane % 8, lane // 16
    for v in range(4):
        for i in range(4):
            evaluate(T.ptx[PACK[dtype]](words[i], c[o + v * 8 + i * 2 + 1], c[o + v * 8 + i * 2]))
        evaluate(T.ptx[STMATRIX](sm.ptr_to([at + line_byte(row, v * 2 + chunk)]), *[words[i] for i in range(4)]))
    evaluate(T.cuda.warp_sync())
    for v in range(4):
        line = sm.ptr_to([at + line_byte(v * 4 + lane // 8, lane % 8)])
        evaluate(T.ptx["ld.shared.v4.b32"](*[words[v * 4 + i] for i in range(4)], line))
    evaluate(T.cuda.warp_sync())


def slab_kernel(launch: SlabLaunch, in_place: bool) -> Any:
    """The PrimFunc. Parameters x (not used when in place), f0, f1 (not used for one axis), y, as 16-bit words."""
    from tvm.script import tirx as T

    from kronsched.runtime.tensor_map import ENCODE

    p, slabs, stages, groups = launch.p, launch.slabs, launch.stages, launch.groups
    inner, pair, grid = launch.inner, launch.pair, launch.grid
    team, threads, warps = launch.group_threads, launch.threads, launch.group_threads // 32
    across = inner // p  # slabs side by side
    size = slabs * p * p
    panel, step = p * LINE // 16, 8 * LINE // 16  # in units of a descriptor
    tma, once, prefetch = launch.load == "tma", launch.once, launch.prefetch
    copy, store = COPIES["cg" if tma else launch.load], STORES[launch.store]
    encode = (launch.dtype, 3)
    # columns, the axis, what is before it
    layout = (inner, p, size // (p * inner), 2 * inner, 2 * p * inner, ATOM, p, 1, 1, 1, 1, 0, 3, 2, 0)
    chunks = p // 8  # of a row
    lines = p * p // ATOM  # of 128 bytes of a slab
    workers, dtype = grid * groups, launch.dtype

    def origin(slab: Any) -> Any:
        """Its first element in global memory."""
        return slab * (p * p) if across == 1 else slab // across * (p * inner) + slab % across * p

    def turning(group: Any, slot: Any) -> Any:
        """Where a group turns sums: in a slab that has been read and is the last of its place, else in lines of its own."""
        return (
            launch.data + (group * stages + slot) * launch.slab_bytes
            if launch.once
            else launch.turns + group * warps * WARP_BYTES
        )

    def data_of(x: Any, y: Any) -> Any:
        return (y if in_place else x).data

    def barrier(sm: Any, group: Any, slot: Any) -> Any:
        return sm.ptr_to([launch.barriers + (group * stages + slot) * 8])

    def source(x: Any, y: Any, at: Any) -> Any:
        return (y if in_place else x).ptr_to([at])

    @T.prim_func
    def kernel(
        x: T.Buffer((size,), "uint16"),
        f0: T.Buffer((p * p,), "uint16"),
        f1: T.Buffer((p * p,), "uint16"),
        y: T.Buffer((size,), "uint16"),
    ):
        if tma:
            x_map: T.let[T.handle("tensormap")] = T.tvm_stack_alloca("tensormap", 1)
            T.call_packed(ENCODE, x_map, *encode, data_of(x, y), *layout)
        T.device_entry()
        T.attr({"tirx.launch_bounds_min_blocks_per_sm": launch.per_sm})
        cta = T.cta_id([grid])
        tx = T.thread_id([threads])
        group: T.let = tx // team
        me: T.let = tx % team
        warp: T.let = me // 32
        lane: T.let = tx % 32
        sm = T.alloc_buffer((launch.shared_bytes,), "uint8", scope="shared.dyn", align=1024)
        c = T.alloc_local([p // 2], "float32")
        d = T.alloc_local([p // 2 if launch.ahead else 1], "float32")  # sums of the second product, where there are two in flight
        words = T.alloc_local([p // 4], "uint32")
        operand = T.alloc_local([3], "uint64")  # descriptors: this warpgroup's rows of F_0, the slabs, F_1
        worker: T.let = cta * groups + group

        @T.inline
        def factor(F, at):
            for v in T.serial(p * chunks // threads, unroll=True):
                i = T.meta_var(v * threads + tx)
                T.ptx[COPIES["cg"]](sm.ptr_to([at + chunk_byte(p, i // chunks, i % chunks)]), F.ptr_to([i * 8]), 16)

        @T.inline
        def copy_in(slab, slot):
            if slab < slabs:
                for v in T.serial(p * chunks // team, unroll=True):
                    row = T.meta_var(v * (team // chunks) + me // chunks)
                    T.ptx[copy](
                        sm.ptr_to([launch.data + (group * stages + slot) * launch.slab_bytes + chunk_byte(p, row, me % chunks)]),
                        source(x, y, origin(slab) + row * inner + me % chunks * 8),
                        16,
                    )

        @T.inline
        def fetch(slab, slot):
            if tma:
                if me == 0 and slab < slabs:
                    bring(slab, slot)
            else:
                copy_in(slab, slot)
                T.ptx.cp.async_.commit_group()

        @T.inline
        def bring(slab, slot):
            T.ptx.mbarrier.arrive.expect_tx.shared.b64(barrier(sm, group, slot), T.uint32(launch.slab_bytes))
            for v in T.serial(p // ATOM, unroll=True):
                T.ptx[LOAD](
                    sm.ptr_to([launch.data + (group * stages + slot) * launch.slab_bytes + v * (p * LINE)]),
                    T.address_of(x_map), slab % across * p + v * ATOM, 0, slab // across,
                    barrier(sm, group, slot),
                )  # fmt: skip

        @T.inline
        def meet_all():
            T.ptx.fence.proxy.async_.shared__cta()
            T.cuda.cta_sync()

        @T.inline
        def second_factor(it):  # it has arrived, for all groups of the block
            if it == 0:
                T.ptx.cp.async_.wait_group(0 if tma else stages)
                meet_all()

        @T.inline
        def meet():
            T.ptx.bar.sync(T.cast(group + 1, "uint32"), T.uint32(team))

        @T.inline
        def arrive(it):
            if tma:
                T.cuda.mbarrier_wait(barrier(sm, group, it % stages), it // stages % 2)
            else:
                T.ptx.cp.async_.wait_group(stages - 1)
                T.ptx.fence.proxy.async_.shared__cta()
                meet()

        @T.inline
        def put(slab, slot, sums):
            lines = T.meta_var(turning(group, slot) + warp * WARP_BYTES)
            for half in T.unroll(p // ATOM):
                into_lines(dtype, sm, lines, words, sums, half * 32, lane)
                for v in T.serial(4, unroll=True):
                    T.ptx[store](
                        y.ptr_to([origin(slab) + (warp * 16 + v * 4 + lane // 8) * inner + half * ATOM + lane % 8 * 8]),
                        words[v * 4], words[v * 4 + 1], words[v * 4 + 2], words[v * 4 + 3],
                    )  # fmt: skip

        if tma:
            if tx == 0:
                T.ptx["prefetch.tensormap"](T.address_of(x_map))
                for s in T.serial(groups * stages, unroll=True):
                    T.ptx.mbarrier.init.shared.b64(barrier(sm, 0, s), T.uint32(1))
                T.ptx.fence.mbarrier_init.release.cluster()
            T.cuda.cta_sync()
        if prefetch:
            for v in T.serial((stages * lines + team - 1) // team, unroll=True):
                i = T.meta_var(v * team + me)
                wanted = T.meta_var(worker + i // lines * workers)
                if i < stages * lines and wanted < slabs:
                    T.ptx["prefetch.global.L2"](source(x, y, wanted * (p * p) + i % lines * ATOM))
        T.ptx.griddepcontrol.wait()  # until here, this launch overlaps the one before it
        T.ptx.griddepcontrol.launch_dependents()
        if tma:
            for s in T.serial(stages, unroll=True):
                fetch(worker + s * workers, s)
        else:
            copy_in(worker, 0)
        factor(f0, 0)
        T.ptx.cp.async_.commit_group()
        if pair:
            factor(f1, launch.slab_bytes)
            T.ptx.cp.async_.commit_group()
        if once and not tma:
            for s in T.serial(stages - 1, unroll=True):
                fetch(worker + (s + 1) * workers, s + 1)
        T.cuda.wgmma.encode_matrix_descriptor(T.address_of(operand[0]), sm.ptr_to([warp // 4 * (p * LINE)]), panel, step, 3)
        T.cuda.wgmma.encode_matrix_descriptor(
            T.address_of(operand[1]), sm.ptr_to([launch.data + group * stages * launch.slab_bytes]), panel, step, 3
        )
        T.cuda.wgmma.encode_matrix_descriptor(T.address_of(operand[2]), sm.ptr_to([launch.slab_bytes]), panel, step, 3)
        T.ptx.cp.async_.wait_group(pair + (stages - 1 if once and not tma else 0))
        if not once and not tma:
            for s in T.serial(stages - 1, unroll=True):  # not before: the first slab would come later
                fetch(worker + (s + 1) * workers, s + 1)
        meet_all()
        trips: T.let = slabs // workers if slabs % workers == 0 else (slabs - worker + workers - 1) // workers
        if pair and trips == 0:  # the others of the block wait for its share of the second factor
            T.ptx.cp.async_.wait_group(0)
            meet_all()
        if launch.ahead:
            if tma and trips > 0:
                arrive(0)
            product(p, dtype, c, operand[0], operand[1], False)
        for it in T.serial(trips):
            slab = T.meta_var(worker + it * workers)
            slot = T.meta_var(it % stages)
            if launch.ahead:
                T.ptx.wgmma.wait_group.sync.aligned(0)
                meet()  # the slab has been read
                fetch(slab + stages * workers, slot)
                second_factor(it)
                product(p, dtype, d, as_operand(p, dtype, words, c), operand[2], False)
                if tma:
                    if it + 1 < trips:
                        arrive(it + 1)
                else:
                    arrive(it)
                # Of the next slab, or of what is there when there is none.
                following = T.meta_var(T.cast((it + 1) % stages * (launch.slab_bytes // 16), "uint64"))
                product(p, dtype, c, operand[0], operand[1] + following, False)
                T.ptx.wgmma.wait_group.sync.aligned(1)
                put(slab, slot, d)
            else:
                if tma or it > 0:
                    arrive(it)
                product(p, dtype, c, operand[0], operand[1] + T.cast(slot * (launch.slab_bytes // 16), "uint64"))
                meet()  # the slab has been read
                fetch(slab + stages * workers, slot)
                if pair:
                    second_factor(it)
                    product(p, dtype, c, as_operand(p, dtype, words, c), operand[2])
                put(slab, slot, c)
        T.ptx.wgmma.wait_group.sync.aligned(0)
        T.ptx.cp.async_.wait_group(0)

    return kernel
