"""The 16-bit chained Kron-Matmul kernel of 32^3: tensor cores, two phases, one exchange through shared memory.

    global ── registers ─ a_0 ── shared ── registers ─ a_2 ─ a_1 ── global

As kron_chain_half.py: the factor is operand A, the data operand B, an accumulator the next operand B. A tile of the first
phase is eight neighbouring chunks of 16 bytes at all 32 values of a_0; a line of the second is all of (a_1, a_2) at one a_0.
Every access to memory moves 16 bytes a lane, and whole 128-byte lines where a warp meets global memory.

Read first: `chain32`; `columns`, `rows` and `place` for every index.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,misc,valid-type,name-defined"
# ruff: noqa: SIM102 - in a tile program `and` would join a Python condition with one of the kernel

from __future__ import annotations

from typing import Any

from kronsched.schedules.kron_chain_half32_steps import Steps
from kronsched.schedules.kron_chain_l2 import begin, bring
from kronsched.schedules.kron_chain_names import COPY, LOADS
from kronsched.schedules.kron_chain_plan import ChainPlan

STORES = {"wb": "st.global.v4.b32", "cs": "st.global.cs.v4.b32"}
LINE = 128
"""Chunks of a line (a_1, a_2)."""
PITCH = LINE + 1
"""Chunks from line to line in shared memory: 1 modulo 8 keeps accesses in different banks."""
WORDS = 32**3 // 2
"""32-bit words of a row."""


def columns(axis: int, s: Any, r: Any, t: Any, e: Any) -> Any:
    """The input along an axis that is column 2t + e + 8r of k step s of its factor as operand A (of the data: row)."""
    return 8 * t + 4 * s + 2 * r + e if axis == 2 else 16 * s + 8 * r + 2 * t + e


def rows_of(axis: int, tile: Any, h: Any, g: Any) -> Any:
    """The output along an axis that is row g + 8h of tile `tile` of its factor as operand A."""
    return 8 * (g // 2) + 4 * tile + 2 * h + g % 2 if axis == 2 else 16 * tile + 8 * h + g


def place(line: Any, chunk: Any) -> Any:
    """Where a chunk of a line is in shared memory, in chunks from the start of its row."""
    return line * PITCH + chunk


def chain32(plan: ChainPlan) -> Any:
    """The PrimFunc of 32^3. Parameters x, f0, f1, f2, y as 32-bit and 16-bit words."""
    from tvm.script import tirx as T

    m, rows, threads = plan.m, plan.rows, plan.threads
    warps, blocks, grid = threads // 32, plan.blocks, plan.grid
    pitch = 32 * PITCH  # chunks from row to row in shared memory
    stage = rows * pitch * 4
    table = stage + plan.staged_tiles * threads * 32  # factors in fragment order
    a_warp, lines = rows * 16 // warps, rows * 32 // warps  # tiles and lines of a warp
    ahead, staged = plan.prefetch != "none", plan.staged_tiles  # tiles of a warp that come through the stage
    held = a_warp - staged  # the others come through registers
    ragged, looped = m % rows != 0, grid < blocks
    steps = Steps(plan.dtype)
    load, store = LOADS[plan.load], STORES[plan.store]

    def row_of(block: Any, row: Any) -> Any:
        return T.min(block * rows + row, m - 1) if ragged else block * rows + row

    def source(block: Any, tile: Any, z: Any, t: Any, g: Any) -> Any:
        row = tile // 16 if rows > 1 else 0
        return row_of(block, row) * WORDS + (columns(0, z // 4, z // 2 % 2, t, z % 2) * LINE + tile % 16 * 8 + g) * 4

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
        R = T.alloc_local([max(1, held) * 32], "uint32")
        V = T.alloc_local([32], "uint32")  # one tile or line
        b = T.alloc_local([16], "uint32")
        c = T.alloc_local([16], "float32")
        f = T.alloc_local([16], "uint32")  # a factor: (tile, k step, word)

        @T.inline
        def renew(after):  # me again, but not before the word `after` is there
            T.ptx["and.b32"](b[0], zero[0], after)
            me[0] = tx + T.cast(b[0], "int32")

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
        def fetch(block):  # a block's tiles: the first of a warp into R, the others into the thread's own part of the stage
            for u in T.unroll(staged):
                for z in T.unroll(8):
                    T.ptx[COPY](
                        sm.ptr_to([stage + ((u * 8 + z) * threads + tx) * 4]),
                        x.ptr_to([source(block, warp * a_warp + held + u, z, t, g)]),
                        16,
                    )
            if staged > 0:
                T.ptx.cp.async_.commit_group()
            for u in T.unroll(held):
                for z in T.unroll(8):
                    e = T.meta_var(u * 32 + z * 4)
                    T.ptx[load](R[e], R[e + 1], R[e + 2], R[e + 3], x.ptr_to([source(block, warp * a_warp + u, z, t, g)]))

        @T.inline
        def first(S, o, tile):  # a_0 on a tile S[o …], and its way into shared memory
            for e in T.serial(32, unroll=True):
                V[e] = S[o + e]
            steps.head(V, b, c, f)
            for z in T.serial(8, unroll=True):
                at = T.meta_var(place(rows_of(0, z // 4, z // 2 % 2, g), tile % 16 * 8 + 2 * t + z % 2))
                T.ptx["st.shared.v4.b32"](
                    sm.ptr_to([((tile // 16 if rows > 1 else 0) * pitch + at) * 4]),
                    V[z * 4], V[z * 4 + 1], V[z * 4 + 2], V[z * 4 + 3],
                )  # fmt: skip

        @T.inline
        def put(row, line, i):
            T.ptx[store](
                y.ptr_to([row * WORDS + (line % 32 * LINE + i * 32 + lane) * 4]),
                V[i * 4],
                V[i * 4 + 1],
                V[i * 4 + 2],
                V[i * 4 + 3],
            )

        @T.inline
        def last(block, line):  # a_2, then a_1, on a line, from shared to global memory
            row = T.meta_var(line // 32 if rows > 1 else 0)
            for i in T.serial(4, unroll=True):
                T.ptx["ld.shared.v4.b32"](
                    V[i * 4], V[i * 4 + 1], V[i * 4 + 2], V[i * 4 + 3],
                    sm.ptr_to([(row * pitch + place(line % 32, i * 32 + lane)) * 4]),
                )  # fmt: skip
            use(2)
            steps.tail_first(V, b, c, f)
            use(1)
            steps.tail_second(V, b, c, f)
            for i in T.serial(4, unroll=True):
                if ragged:
                    if block * rows + row < m:
                        put(block * rows + row, line, i)
                else:
                    put(block * rows + row, line, i)

        begin(plan, x, cta, tx)
        if ahead:
            fetch(cta)
        if warp == 0:
            factor(0, f0)
        if warp == 1 % warps:
            factor(1, f1)
        if warp == 2 % warps:
            factor(2, f2)
        T.cuda.cta_sync()
        for it in T.serial((blocks - cta + grid - 1) // grid if looped else 1):
            block = T.meta_var(cta + it * grid)
            if plan.l2:
                if block + grid < blocks:
                    bring(plan, x, block + grid, tx)
            T.ptx["shr.u32"](zero[0], T.cast(it, "uint32"), T.uint32(24))
            me[0] = tx + T.cast(zero[0], "int32")
            if not ahead:
                fetch(block)
            use(0)
            for u in T.unroll(held):
                first(R, u * 32, warp * a_warp + u)
            if staged > 0:
                T.ptx.cp.async_.wait_group(0)
                for u in T.unroll(staged):
                    for z in T.serial(8, unroll=True):
                        T.ptx["ld.shared.v4.b32"](
                            V[z * 4], V[z * 4 + 1], V[z * 4 + 2], V[z * 4 + 3],
                            sm.ptr_to([stage + ((u * 8 + z) * threads + tx) * 4]),
                        )  # fmt: skip
                    first(V, 0, warp * a_warp + held + u)
            T.cuda.cta_sync()
            renew(V[31])
            if ahead:
                if block + grid < blocks:
                    fetch(block + grid)
            for v in T.serial(lines, unroll=plan.unroll):
                last(block, warp * lines + v)
            if looped:
                T.cuda.cta_sync()

    return kernel
