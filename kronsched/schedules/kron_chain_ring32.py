"""The 16-bit chained Kron-Matmul kernel of 32^3 fed by bulk copies: kron_chain_half32.py with rows that land in a ring.

    global ══ ring ── registers ─ a_0 ── the same place ── registers ─ a_2 ─ a_1 ── global

No thread loads from global memory and no register waits for it: two rows are on their way all the time. The block meets once a
row, between the phases: what follows happens in another part of the ring.

Read first: `ring32`; kron_chain_ring_plan.py for the ring, kron_chain_half32_steps.py for the products.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,misc,valid-type,name-defined"

from __future__ import annotations

from typing import Any

from kronsched.schedules.kron_chain_half32 import LINE, STORES, WORDS, columns, place, rows_of
from kronsched.schedules.kron_chain_half32_steps import Steps
from kronsched.schedules.kron_chain_l2 import begin
from kronsched.schedules.kron_chain_plan import ChainPlan
from kronsched.schedules.kron_chain_ring import Feed


def ring32(plan: ChainPlan) -> Any:
    """The PrimFunc of 32^3. Parameters x, f0, f1, f2, y as 32-bit and 16-bit words."""
    from tvm.script import tirx as T

    m, threads, grid, ring = plan.m, plan.threads, plan.grid, plan.ring
    warps = threads // 32
    table = ring.bytes // 4  # factors in fragment order
    barriers = table + 3 * 4 * 32 * 4
    a_warp, lines = 16 // warps, 32 // warps  # tiles and lines of a warp
    steps, store = Steps(plan.dtype), STORES[plan.store]

    @T.prim_func
    def kernel(
        x: T.Buffer((m * WORDS,), "uint32"),
        f0: T.Buffer((1024,), "uint16"),
        f1: T.Buffer((1024,), "uint16"),
        f2: T.Buffer((1024,), "uint16"),
        y: T.Buffer((m * WORDS,), "uint32"),
    ):
        T.device_entry()
        T.attr({"tirx.launch_bounds_min_blocks_per_sm": plan.per_sm})
        cta = T.cta_id([grid])
        tx = T.thread_id([threads])
        me = T.alloc_local([1], "int32")  # tx, hidden from loop-invariant code motion: addresses are cheap, registers are not
        zero = T.alloc_local([1], "uint32")
        me[0] = tx
        warp = T.meta_var(me[0] // 32)
        lane = T.meta_var(me[0] % 32)
        g = T.meta_var(me[0] % 32 // 4)
        t = T.meta_var(me[0] % 4)
        sm = T.alloc_buffer((plan.shared_bytes // 4,), "uint32", scope="shared.dyn", align=128)
        V = T.alloc_local([32], "uint32")  # one tile or line
        b = T.alloc_local([16], "uint32")
        c = T.alloc_local([16], "float32")
        f = T.alloc_local([16], "uint32")  # a factor: (tile, k step, word)
        base = T.alloc_local([1], "int32")  # the row's first line in the ring
        feed = T.meta_var(Feed(plan, x, sm, barriers))
        rows = T.meta_var((m - cta + grid - 1) // grid)

        @T.inline
        def factor(axis, F):
            for v in T.serial(4, unroll=True):  # 2 tile + k step
                for w in T.serial(4, unroll=True):
                    q = T.meta_var(rows_of(axis, v // 2, w % 2, g))
                    sm[table + ((axis * 4 + v) * 32 + lane) * 4 + w] = T.cast(
                        F[columns(axis, v % 2, w // 2, t, 0) * 32 + q], "uint32"
                    ) | (T.cast(F[columns(axis, v % 2, w // 2, t, 1) * 32 + q], "uint32") << T.uint32(16))

        @T.inline
        def use(axis):
            for v in T.serial(4, unroll=True):
                T.ptx["ld.shared.v4.b32"](
                    f[v * 4], f[v * 4 + 1], f[v * 4 + 2], f[v * 4 + 3], sm.ptr_to([table + ((axis * 4 + v) * 32 + lane) * 4])
                )

        @T.inline
        def first(tile):  # a_0 on a tile, in place: nobody else touches it
            for z in T.serial(8, unroll=True):
                at = T.meta_var(place(base[0] + columns(0, z // 4, z // 2 % 2, t, z % 2), tile * 8 + g))
                T.ptx["ld.shared.v4.b32"](V[z * 4], V[z * 4 + 1], V[z * 4 + 2], V[z * 4 + 3], sm.ptr_to([at * 4]))
            steps.head(V, b, c, f)
            T.cuda.warp_sync()
            for z in T.serial(8, unroll=True):
                at = T.meta_var(place(base[0] + rows_of(0, z // 4, z // 2 % 2, g), tile * 8 + 2 * t + z % 2))
                T.ptx["st.shared.v4.b32"](sm.ptr_to([at * 4]), V[z * 4], V[z * 4 + 1], V[z * 4 + 2], V[z * 4 + 3])

        @T.inline
        def last(row, line):  # a_2, then a_1, on a line, from shared to global memory
            for i in T.serial(4, unroll=True):
                at = T.meta_var(place(base[0] + line, i * 32 + lane) * 4)
                T.ptx["ld.shared.v4.b32"](V[i * 4], V[i * 4 + 1], V[i * 4 + 2], V[i * 4 + 3], sm.ptr_to([at]))
            use(2)
            steps.tail_first(V, b, c, f)
            use(1)
            steps.tail_second(V, b, c, f)
            for i in T.serial(4, unroll=True):
                to = T.meta_var(y.ptr_to([row * WORDS + (line * LINE + i * 32 + lane) * 4]))
                T.ptx[store](to, V[i * 4], V[i * 4 + 1], V[i * 4 + 2], V[i * 4 + 3])

        feed.start(tx)
        T.cuda.cta_sync()
        begin(plan, x, cta, tx)
        feed.fetch_all(tx, cta)
        for i in T.unroll(1, ring.rows):
            if i < rows:
                feed.fetch(tx, cta + i * grid, i, 0, ring.a)
        if warp == 0:
            factor(0, f0)
        if warp == 1 % warps:
            factor(1, f1)
        if warp == 2 % warps:
            factor(2, f2)
        T.cuda.cta_sync()
        for it in T.serial(rows):
            row = T.meta_var(cta + it * grid)
            T.ptx["shr.u32"](zero[0], T.cast(it, "uint32"), T.uint32(24))
            me[0] = tx + T.cast(zero[0], "int32")
            base[0] = it % ring.rows * ring.a
            use(0)
            feed.wait(it)
            for u in T.unroll(a_warp):
                first(warp * a_warp + u)
            feed.free()
            T.cuda.cta_sync()
            if T.And(it > 0, it - 1 + ring.rows < rows):  # everybody is done with the row before this one
                feed.fetch(tx, row + (ring.rows - 1) * grid, it - 1 + ring.rows, 0, ring.a)
            for v in T.serial(lines, unroll=plan.unroll):
                last(row, warp * lines + v)

    return kernel
