"""The float32 chained Kron-Matmul kernel of 16^4: tensor cores by three TF32 products, one launch, 256 KB rows.

    global ── registers ─ a_1 ─ a_0 ── shared (three quarters of the row) ── registers ─ a_3 ─ a_2 ── global
                                   └── registers (one quarter) ── shared ──┘

A row (a_0, a_1, a_2, a_3) is larger than shared memory. The first phase contracts a_1 and a_0; the quarter of its results with
a_0 ≥ 8 and a_1 ≥ 8 stays in registers until the second phase has worked off another quarter, whose place it takes.

The factor is operand A of mma.m16n8k8, the data operand B; an accumulator is the next operand B with rows and columns swapped:
two axes are contracted without leaving the registers. The order of rows and columns of a factor is free: it is chosen so that
every access moves 16 bytes. In the first phase the columns of an operand are 4 values of a_0 and 2 chunks of a_3, so that
neighbouring lanes read whole 32-byte sectors.

Read first: `chain16_tf32`; `ROWS`, `COLUMNS` and `place` for every index.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,misc,valid-type,name-defined"
# ruff: noqa: SIM102 - in a tile program `and` would join a Python condition with one of the kernel

from __future__ import annotations

from typing import Any

from kronsched.schedules.kron_chain_l2 import bring
from kronsched.schedules.kron_chain_plan import TF32_BLOCK, TF32_LINE, TF32_ROW, ChainPlan
from kronsched.schedules.kron_mma_kernel import evaluate, tf32_parts

LOADS = {
    "nc": "ld.global.nc.v4.f32",
    "stream": "ld.global.nc.L1::no_allocate.v4.f32",
    "wide": "ld.global.nc.L2::256B.v4.f32",
}
STORES = {"wb": "st.global.v4.f32", "cs": "st.global.cs.v4.f32"}
MMA_TF32 = "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32"
PRODUCTS = ((1, 0), (0, 1), (0, 0))  # (part of the factor, part of the data): 0 high, 1 low; the largest last
SIZE = 16**4
UNITS = 32
"""Units of a row in the first phase: one a_2, eight values of a_3, all of a_0 and a_1."""


def columns(axis: int, s: Any, r: Any, t: Any) -> Any:
    """The input along an axis that is column t + 4r of k step s of its factor as operand A (of the data: row)."""
    if axis < 2:
        return 8 * s + 4 * r + t
    return 8 * s + 2 * t + r if axis == 2 else 4 * t + 2 * s + r


def rows(axis: int, h: Any, g: Any) -> Any:
    """The output along an axis that is row g + 8h of its factor as operand A."""
    if axis == 1:
        return 8 * h + 4 * (g % 2) + g // 2
    return 4 * (g // 2) + 2 * h + g % 2 if axis == 3 else 8 * h + g


def place(quarter: Any, a0: Any, a1: Any) -> Any:
    """Where the line (a_2, a_3) of 64 chunks lies in shared memory, in chunks of 16 bytes; a0, a1: modulo 8."""
    return quarter * TF32_BLOCK + a0 * TF32_ROW + a1 * TF32_LINE


def multiply(d: Any, at: int, f: Any, b: Any, e: int, s: int, tiles: int) -> None:
    """Emit d[at + 4 tile …] += phase's factor e times operand b[2 tile …], along k step s; from zero at the first one."""
    from tvm.script import tirx as T

    for fp, xp in PRODUCTS:
        for i in range(tiles):
            factor = [f[e * 16 + s * 8 + fp * 4 + w] for w in range(4)]
            sums = [d[at + i * 4 + w] for w in range(4)]
            data = b[xp * 8 + i * 2], b[xp * 8 + i * 2 + 1]
            first = s == 0 and (fp, xp) == PRODUCTS[0]
            evaluate(T.ptx[MMA_TF32](*sums, *factor, *data, *([T.float32(0)] * 4 if first else sums)))


def chain16_tf32(plan: ChainPlan) -> Any:
    """The PrimFunc of 16^4 in float32. Parameters x, f0 … f3, y."""
    from tvm.script import tirx as T

    m, threads, grid, blocks = plan.m, plan.threads, plan.grid, plan.blocks
    warps = threads // 32
    a_warp = UNITS // warps  # units of a warp
    table = 3 * TF32_BLOCK * 4  # factors in fragment order, high and low parts
    ahead, looped = plan.prefetch != "none", grid < blocks
    load, store = LOADS[plan.load], STORES[plan.store]
    lines = 64 // warps // 2  # pairs of lines of a quarter that a warp contracts in the second phase

    @T.prim_func
    def kernel(
        x: T.Buffer((m * SIZE,), "float32"),
        f0: T.Buffer((256,), "float32"),
        f1: T.Buffer((256,), "float32"),
        f2: T.Buffer((256,), "float32"),
        f3: T.Buffer((256,), "float32"),
        y: T.Buffer((m * SIZE,), "float32"),
    ):
        T.device_entry()
        T.attr({"tirx.launch_bounds_min_blocks_per_sm": plan.per_sm})
        cta = T.cta_id([grid])
        tx = T.thread_id([threads])
        warp: T.let = tx // 32
        lane: T.let = tx % 32
        g: T.let = lane // 4
        t: T.let = lane % 4
        sm = T.alloc_buffer((plan.shared_bytes // 4,), "uint32", scope="shared.dyn", align=128)
        R = T.alloc_local([64], "float32")  # a unit on its way: the two k steps along a_1 one after the other
        C = T.alloc_local([64], "float32")  # the unit at work
        V = T.alloc_local([16], "float32")  # two lines
        H = T.alloc_local([a_warp * 16], "float32")  # what is held back
        f = T.alloc_local([32], "uint32")  # the phase's two factors: (axis, k step, part, word)
        b = T.alloc_local([16], "uint32")  # operands: (part, tile, word)
        c = T.alloc_local([16], "float32")
        d = T.alloc_local([16], "float32")

        @T.inline
        def factor(axis, F):  # into the table
            for s in T.serial(2, unroll=True):
                for w in T.serial(4, unroll=True):
                    value = T.meta_var(F[columns(axis, s, w // 2, t) * 16 + rows(axis, w % 2, g)])
                    at = T.meta_var(table + ((axis * 2 + s) * 64 + lane) * 4 + w)
                    sm[at] = tf32_parts(value)[0]
                    sm[at + 128] = tf32_parts(value)[1]

        @T.inline
        def use(e, axis):  # the factor of an axis, as the phase's factor e
            for v in T.serial(4, unroll=True):
                T.ptx["ld.shared.v4.b32"](
                    f[e * 16 + v * 4], f[e * 16 + v * 4 + 1], f[e * 16 + v * 4 + 2], f[e * 16 + v * 4 + 3],
                    sm.ptr_to([table + ((axis * 4 + v) * 32 + lane) * 4]),
                )  # fmt: skip

        @T.inline
        def operand(i, value):
            b[8 + i] = tf32_parts(value)[1]
            b[i] = tf32_parts(value)[0]

        @T.inline
        def fetch(block, u, s):  # R[32 s + 8 tile + 4 r + q]: a_0 = 4 tile + g // 2, chunk of a_3: g % 2, q in it
            for i in T.serial(8, unroll=True):
                e = T.meta_var(s * 32 + i * 4)
                T.ptx[load](
                    R[e], R[e + 1], R[e + 2], R[e + 3],
                    x.ptr_to([
                        block * SIZE + (u * warps + warp) * 8 + (g // 2 * 16 + t) * 256 + g % 2 * 4
                        + i // 2 * (4 * 16 * 256) + (s * 2 + i % 2) * (4 * 256)
                    ]),
                )  # fmt: skip

        @T.inline
        def fetch_next(block, u, s):  # as soon as R has been read: the next unit, perhaps of the next row
            if ahead:
                if u + 1 < a_warp or block + grid < blocks:
                    fetch(T.Select(u + 1 < a_warp, block, block + grid), T.Select(u + 1 < a_warp, u + 1, 0), s)
            else:
                if u + 1 < a_warp:
                    fetch(block, u + 1, s)

        @T.inline
        def first_step(block, u, s):  # a_1, its k step s
            for q in T.unroll(4):
                for i in T.unroll(8):
                    operand(i, R[s * 32 + i * 4 + q])
                multiply(C, q * 16, f, b, 0, s, 4)
            fetch_next(block, u, s)

        @T.inline
        def second_step(q, s):
            for i in T.unroll(4):
                for r in T.unroll(2):
                    operand(i * 2 + r, C[q * 16 + (s * 2 + r) * 4 + i % 2 * 2 + i // 2])
            multiply(d, 0, f, b, 0, s, 4)

        @T.inline
        def first(block, u):  # a_1, then a_0
            use(0, 1)
            first_step(block, u, 0)
            first_step(block, u, 1)
            # C[16 q + 4 tile + 2h + chunk]: a_1 row g of half h, a_0 = 4 tile + t. Tiles of the next operand: 2 chunk + h.
            use(0, 0)
            for q in T.unroll(4):
                second_step(q, 0)
                second_step(q, 1)
                # d[4 tile + 2 (half of a_0) + bit 2 of a_1]: as C[16 q + 4 quarter + 2 (bit 2) + chunk].
                for i in T.unroll(4):
                    for w in T.unroll(4):
                        C[q * 16 + (w // 2 * 2 + i % 2) * 4 + w % 2 * 2 + i // 2] = d[i * 4 + w]

        @T.inline
        def put(S, at, step, stride, quarter, u):  # 16 floats of a unit, S[at + step i + stride q], into a quarter's place
            for i in T.serial(4, unroll=True):
                e = T.meta_var(at + i * step)
                T.ptx["st.shared.v4.f32"](
                    sm.ptr_to([(place(quarter, g, t + i // 2 * 4) + (u * warps + warp) * 2 + i % 2) * 4]),
                    S[e], S[e + stride], S[e + 2 * stride], S[e + 3 * stride],
                )  # fmt: skip

        @T.inline
        def hold():  # the last quarter of C behind those of the units before
            for i in T.serial(16 * (a_warp - 1), unroll=True):
                H[i] = H[i + 16]
            for i in T.serial(16, unroll=True):
                H[(a_warp - 1) * 16 + i] = C[i % 4 * 16 + 12 + i // 4]

        @T.inline
        def third_step(s):
            for i in T.unroll(4):
                for r in T.unroll(2):
                    operand(i * 2 + r, V[i * 4 + s * 2 + r])
            multiply(c, 0, f, b, 0, s, 4)

        @T.inline
        def fourth_step(s):
            for i in T.unroll(4):
                for r in T.unroll(2):
                    operand(i * 2 + r, c[i // 2 * 8 + s * 4 + i % 2 * 2 + r])
            multiply(d, 0, f, b, 1, s, 4)

        @T.inline
        def last(
            block, quarter, where, n
        ):  # a_3, then a_2, on lines n and n + warps of a quarter, from its place to global memory
            for i in T.unroll(4):
                line = T.meta_var(n + i // 2 * warps)
                T.ptx["ld.shared.v4.f32"](
                    V[i * 4], V[i * 4 + 1], V[i * 4 + 2], V[i * 4 + 3],
                    sm.ptr_to([(place(where, line // 8, line % 8) + i % 2 * 32 + lane) * 4]),
                )  # fmt: skip
            third_step(0)
            third_step(1)
            fourth_step(0)
            fourth_step(1)
            for i in T.unroll(4):
                line = T.meta_var(n + i // 2 * warps)
                e = T.meta_var(i // 2 * 8 + i % 2 * 2)
                T.ptx[store](
                    y.ptr_to([
                        block * SIZE + (quarter // 2 * 128 + line // 8 * 16 + quarter % 2 * 8 + line % 8) * 256
                        + i % 2 * 128 + lane * 4
                    ]),
                    d[e], d[e + 1], d[e + 4], d[e + 5],
                )  # fmt: skip

        if warp == 0:
            factor(0, f0)
            factor(1, f1)
            factor(2, f2)
            factor(3, f3)
        if ahead:
            fetch(cta, 0, 0)
            fetch(cta, 0, 1)
        T.cuda.cta_sync()
        for it in T.serial((blocks - cta + grid - 1) // grid if looped else 1):
            block = T.meta_var(cta + it * grid)
            if plan.l2:
                if block + grid < blocks:
                    bring(plan, x, block + grid, tx)
            if not ahead:
                fetch(block, 0, 0)
                fetch(block, 0, 1)
            for u in T.serial(a_warp, unroll=1):
                first(block, u)
                for k in T.unroll(3):
                    put(C, k * 4, 1, 16, k, u)
                hold()
            T.cuda.cta_sync()
            use(0, 3)
            use(1, 2)
            for v in T.serial(lines, unroll=plan.unroll):
                last(block, 0, 0, v * 2 * warps + warp)
            T.cuda.cta_sync()
            for u in T.serial(a_warp, unroll=True):
                put(H, u * 16, 4, 1, 0, u)
            for k in T.unroll(2):
                for v in T.serial(lines, unroll=plan.unroll):
                    last(block, k + 1, k + 1, v * 2 * warps + warp)
            T.cuda.cta_sync()
            for v in T.serial(lines, unroll=plan.unroll):
                last(block, 3, 0, v * 2 * warps + warp)
            if looped:
                T.cuda.cta_sync()

    return kernel
