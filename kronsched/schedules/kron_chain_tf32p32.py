"""The float32 chained Kron-Matmul kernel of 32^3: tensor cores by three TF32 products, one launch, one exchange.

    global ── registers ─ a_0 ── shared ── registers ─ a_2 ─ a_1 ── global

The form of kron_chain_half32.py with the operands of kron_chain_tf32.py. A tile of the first phase is all of (a_0, a_2) at one
a_1, a line of the second all of (a_1, a_2) at one a_0: 32 numbers a thread. Each axis is one `step`: the numbers are split into
high and low parts, and every fragment of the factor is read once for four operands.

Read first: `chain32_tf32`; `columns`, `rows_of` and `place` for every index.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,misc,valid-type,name-defined"
# ruff: noqa: SIM102 - in a tile program `and` would join a Python condition with one of the kernel

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kronsched.schedules.kron_chain_l2 import bring
from kronsched.schedules.kron_chain_plan import TF32_PITCH, ChainPlan
from kronsched.schedules.kron_chain_tf32 import LOADS, MMA_TF32, PRODUCTS, STORES
from kronsched.schedules.kron_mma_kernel import evaluate, tf32_parts

SIZE = 32**3


def columns(axis: int, s: Any, r: Any, t: Any) -> Any:
    """The input along an axis that is column t + 4r of k step s of its factor as operand A (of the data: row)."""
    if axis == 0:
        return 8 * s + 4 * r + t
    return 8 * s + 2 * t + r if axis == 1 else s // 2 * 16 + 4 * t + s % 2 * 2 + r


def rows_of(axis: int, tile: Any, h: Any, g: Any) -> Any:
    """The output along an axis that is row g + 8h of tile `tile` of its factor as operand A."""
    return 16 * tile + 4 * (g // 2) + 2 * h + g % 2 if axis == 2 else 16 * tile + 8 * h + g


def place(a0: Any, a1: Any, chunk: Any) -> Any:
    """Where a chunk of four a_2 is in shared memory, in chunks: neighbouring a_1 lie four chunks apart modulo 8."""
    return a0 * TF32_PITCH + a1 * 8 + (chunk ^ (a1 % 2 * 4))


# Where operand n has word r of k step s among a thread's 32 numbers.
_INPUTS: dict[int, Callable[[int, int, int], int]] = {
    0: lambda n, s, r: (s * 2 + r) * 4 + n,
    2: lambda n, s, r: n * 8 + s * 2 + r,
    1: lambda n, s, r: n // 2 * 16 + s * 4 + n % 2 * 2 + r,
}


def chain32_tf32(plan: ChainPlan) -> Any:
    """The PrimFunc of 32^3 in float32. Parameters x, f0, f1, f2, y."""
    from tvm.script import tirx as T

    m, threads, grid, blocks = plan.m, plan.threads, plan.grid, plan.blocks
    warps = threads // 32
    a_warp = 32 // warps  # tiles, and lines, of a warp
    table = 32 * TF32_PITCH * 4  # factors in fragment order: (axis, tile, k step, part, lane, word)
    ahead, looped = plan.prefetch != "none", grid < blocks
    load, store = LOADS[plan.load], STORES[plan.store]

    def step(axis: int, D: Any, high: Any, low: Any, f: Any, sm: Any, lane: Any) -> None:
        """Emit D[16 tile + 4n …] = tile of the factor times operand n of the four in high and low."""
        where = _INPUTS[axis]
        for tile in range(2):
            for s in range(4):
                for part in range(2):
                    words = [f[part * 4 + i] for i in range(4)]
                    at = table + ((axis * 16 + (tile * 4 + s) * 2 + part) * 32 + lane) * 4
                    evaluate(T.ptx["ld.shared.v4.b32"](*words, sm.ptr_to([at])))
                for i, (fp, xp) in enumerate(PRODUCTS):
                    for n in range(4):
                        sums = [D[tile * 16 + n * 4 + k] for k in range(4)]
                        data = [(low if xp else high)[where(n, s, r)] for r in range(2)]
                        start = [T.float32(0)] * 4 if s == 0 and i == 0 else sums
                        evaluate(T.ptx[MMA_TF32](*sums, *[f[fp * 4 + k] for k in range(4)], *data, *start))

    @T.prim_func
    def kernel(
        x: T.Buffer((m * SIZE,), "float32"),
        f0: T.Buffer((1024,), "float32"),
        f1: T.Buffer((1024,), "float32"),
        f2: T.Buffer((1024,), "float32"),
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
        R = T.alloc_local([32], "float32")  # a tile on its way
        V = T.alloc_local([32], "float32")
        D = T.alloc_local([32], "float32")
        high = T.alloc_local([32], "uint32")
        low = T.alloc_local([32], "uint32")
        f = T.alloc_local([8], "uint32")

        @T.inline
        def factor(axis, F):
            for v in T.serial(8, unroll=True):  # 4 tile + k step
                for w in T.serial(4, unroll=True):
                    value = T.meta_var(F[columns(axis, v % 4, w // 2, t) * 32 + rows_of(axis, v // 4, w % 2, g)])
                    at = T.meta_var(table + ((axis * 16 + v * 2) * 32 + lane) * 4 + w)
                    sm[at] = tf32_parts(value)[0]
                    sm[at + 128] = tf32_parts(value)[1]

        @T.inline
        def parts(S):
            for i in T.serial(32, unroll=True):
                low[i] = tf32_parts(S[i])[1]
                high[i] = tf32_parts(S[i])[0]

        @T.inline
        def fetch(block, u):  # R[4 (2 s + r) + q]: a_0 = columns(0, s, r, t), q in chunk g of a_1 = u warps + warp
            for z in T.serial(8, unroll=True):
                T.ptx[load](
                    R[z * 4], R[z * 4 + 1], R[z * 4 + 2], R[z * 4 + 3],
                    x.ptr_to([block * SIZE + (columns(0, z // 2, z % 2, t) * 32 + u * warps + warp) * 32 + g * 4]),
                )  # fmt: skip

        @T.inline
        def put(a1):  # D[16 tile + 4q + 2h + e]: a_0 row g of half h of the tile, chunk 2t + e
            for z in T.serial(8, unroll=True):
                e = T.meta_var(z // 4 * 16 + z % 4)
                T.ptx["st.shared.v4.f32"](
                    sm.ptr_to([place(rows_of(0, z // 4, z // 2 % 2, g), a1, 2 * t + z % 2) * 4]),
                    D[e],
                    D[e + 4],
                    D[e + 8],
                    D[e + 12],
                )

        @T.inline
        def last(block, a0):  # a_2, then a_1, on a line
            for z in T.serial(8, unroll=True):  # a_1 = 8 (z // 2) + g, chunk t + 4 (z % 2)
                T.ptx["ld.shared.v4.f32"](
                    V[z * 4], V[z * 4 + 1], V[z * 4 + 2], V[z * 4 + 3], sm.ptr_to([place(a0, z // 2 * 8 + g, z % 2 * 4 + t) * 4])
                )
            parts(V)
            step(2, D, high, low, f, sm, lane)
            # D[16 tile + 4i + 2h + e]: a_2 row g of half h of the tile, a_1 = 8i + 2t + e; the operands are (tile, h)
            parts(D)
            step(1, D, high, low, f, sm, lane)
            # D[16 tile + 4n + 2h + e]: a_1 row g of half h of the tile, a_2 = 16 (n // 2) + 4t + 2 (n % 2) + e
            for z in T.serial(8, unroll=True):
                e = T.meta_var(z // 4 * 16 + z % 2 * 8 + z // 2 % 2 * 2)
                T.ptx[store](
                    y.ptr_to([block * SIZE + (a0 * 32 + rows_of(1, z // 4, z // 2 % 2, g)) * 32 + z % 2 * 16 + t * 4]),
                    D[e], D[e + 1], D[e + 4], D[e + 5],
                )  # fmt: skip

        if warp == 0:
            factor(0, f0)
            factor(1, f1)
            factor(2, f2)
        if ahead:
            fetch(cta, 0)
        T.cuda.cta_sync()
        for it in T.serial((blocks - cta + grid - 1) // grid if looped else 1):
            block = T.meta_var(cta + it * grid)
            if plan.l2:
                if block + grid < blocks:
                    bring(plan, x, block + grid, tx)
            if not ahead:
                fetch(block, 0)
            for u in T.serial(a_warp, unroll=1):
                parts(R)
                if u + 1 < a_warp:
                    fetch(block, u + 1)
                step(0, D, high, low, f, sm, lane)
                put(u * warps + warp)
            T.cuda.cta_sync()
            if ahead:
                if block + grid < blocks:
                    fetch(block + grid, 0)
            for v in T.serial(a_warp, unroll=plan.unroll):
                last(block, v * warps + warp)
            if looped:
                T.cuda.cta_sync()

    return kernel
