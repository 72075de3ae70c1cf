"""The 16-bit chained Kron-Matmul kernel of 64^2: a warp contracts a row, tensor cores, one exchange within the warp.

    global ── registers ─ a_0 ── shared ── registers ─ a_1 ── global

As kron_chain_half32.py. A warp holds a whole row of 64 x 64 in registers, reads and writes whole 128-byte lines, and never waits
for another warp once the factors are there.

Read first: `chain64`; `columns`, `rows_of` and `place` for every index.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,misc,valid-type,name-defined"
# ruff: noqa: SIM102 - in a tile program `and` would join a Python condition with one of the kernel

from __future__ import annotations

from typing import Any

from kronsched.schedules.kron_chain_half32 import STORES
from kronsched.schedules.kron_chain_l2 import bring
from kronsched.schedules.kron_chain_layout import PITCH64
from kronsched.schedules.kron_chain_names import LOADS, MMA, PACK
from kronsched.schedules.kron_chain_plan import ChainPlan
from kronsched.schedules.kron_mma_kernel import evaluate

WORDS = 64**2 // 2
"""32-bit words of a row."""


def columns(axis: int, s: Any, r: Any, t: Any, e: Any) -> Any:
    """The input along an axis that is column 2t + e + 8r of k step s of its factor as operand A (of the data: row)."""
    return 16 * s + 8 * r + 2 * t + e if axis == 0 else 16 * t + 4 * s + 2 * r + e


def rows_of(axis: int, tile: Any, h: Any, g: Any) -> Any:
    """The output along an axis that is row g + 8h of tile `tile` of its factor as operand A."""
    return 16 * tile + 8 * h + g if axis == 0 else 8 * g + 2 * tile + h


def place(a0: Any, chunk: Any) -> Any:
    """Where a chunk of eight a_1 is in shared memory, in chunks of 16 bytes from the start of its row."""
    return a0 * PITCH64 + chunk


def multiply(dtype: str, d: Any, o: int, f: Any, b: Any, at: int = 0, tiles: tuple[int, ...] = (0, 1, 2, 3)) -> None:
    """Emit d[o + 4 tile …] = tiles of the factor in f times operand b[at …], two words for each of four k steps."""
    from tvm.script import tirx as T

    for s in range(4):
        for tile in tiles:
            sums = [d[o + tile * 4 + i] for i in range(4)]
            factor = [f[(tile * 4 + s) * 4 + i] for i in range(4)]
            start = sums if s else [T.float32(0)] * 4
            evaluate(T.ptx[MMA[dtype]](*sums, *factor, b[at + 2 * s], b[at + 2 * s + 1], *start))


def contract_first(dtype: str, V: Any, b: Any, c: Any, f: Any) -> None:
    """Emit the contraction of an axis on the 16 chunks in V, in place.

    Before: V[4z …] is the chunk at columns(0, z // 4, z // 2 % 2, t, z % 2) along the axis, column g of the operand. After: at
    rows_of(0, z // 4, z // 2 % 2, g) along the axis, column 2t + z % 2.
    """
    from tvm.script import tirx as T

    for w in range(4):
        for odd in range(2):
            for i in range(8):
                words = V[i * 8 + w], V[i * 8 + 4 + w]
                evaluate(T.ptx["prmt.b32"](b[odd * 8 + i], *words, T.uint32(0x7632 if odd else 0x5410)))
        for tiles in (0, 1), (2, 3):  # two at a time: registers are scarce
            for odd in range(2):
                multiply(dtype, c, odd * 16, f, b, odd * 8, tiles)
            for z in range(tiles[0] * 4, tiles[1] * 4 + 4):
                evaluate(T.ptx[PACK[dtype]](V[z * 4 + w], c[16 + z], c[z]))


def chain64(plan: ChainPlan) -> Any:
    """The PrimFunc of 64^2. Parameters x, f0, f1, y as 32-bit and 16-bit words."""
    from tvm.script import tirx as T

    m, rows, threads = plan.m, plan.rows, plan.threads
    blocks, grid = plan.blocks, plan.grid
    row_words = 64 * PITCH64 * 4  # of a row in shared memory
    table = rows * row_words  # factors in fragment order: (axis, tile, k step, lane, word)
    ahead, ragged, looped = plan.prefetch != "none", m % rows != 0, grid < blocks
    dtype, pack = plan.dtype, PACK[plan.dtype]
    load, store = LOADS[plan.load], STORES[plan.store]

    def row_of(block: Any, row: Any) -> Any:
        return T.min(block * rows + row, m - 1) if ragged else block * rows + row

    def tail(b: Any, c: Any, f: Any) -> None:
        """Emit the contraction of a_1 at eight a_0 on b[0 … 7], into b[4e + tile]: a_0 = 2t + e, a_1 = 8g + 2 tile."""
        multiply(dtype, c, 0, f, b)
        for e in range(2):
            for tile in range(4):
                evaluate(T.ptx[pack](b[e * 4 + tile], c[tile * 4 + 2 + e], c[tile * 4 + e]))

    @T.prim_func
    def kernel(
        x: T.Buffer((m * WORDS,), "uint32"),
        f0: T.Buffer((4096,), "uint16"),
        f1: T.Buffer((4096,), "uint16"),
        y: T.Buffer((m * WORDS,), "uint32"),
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
        R = T.alloc_local([64], "uint32")  # a row
        b = T.alloc_local([16], "uint32")
        c = T.alloc_local([32], "float32")
        f = T.alloc_local([64], "uint32")  # a factor: (tile, k step, word)

        @T.inline
        def factor(axis, F):  # a warp makes every rows-th fragment
            for v in T.serial((16 + rows - 1) // rows, unroll=True):
                i = T.meta_var(v * rows + warp)  # 4 tile + k step
                if i < 16:
                    for w in T.serial(4, unroll=True):
                        q = T.meta_var(rows_of(axis, i // 4, w % 2, g))
                        sm[table + ((axis * 16 + i) * 32 + lane) * 4 + w] = T.cast(
                            F[columns(axis, i % 4, w // 2, t, 0) * 64 + q], "uint32"
                        ) | (T.cast(F[columns(axis, i % 4, w // 2, t, 1) * 64 + q], "uint32") << T.uint32(16))

        @T.inline
        def use(axis):
            for v in T.serial(16, unroll=True):
                T.ptx["ld.shared.v4.b32"](
                    f[v * 4], f[v * 4 + 1], f[v * 4 + 2], f[v * 4 + 3], sm.ptr_to([table + ((axis * 16 + v) * 32 + lane) * 4])
                )

        @T.inline
        def fetch(block):  # R[4z …]: a_0 = columns(0, …), chunk g
            for z in T.serial(16, unroll=True):
                T.ptx[load](
                    R[z * 4], R[z * 4 + 1], R[z * 4 + 2], R[z * 4 + 3],
                    x.ptr_to([row_of(block, warp) * WORDS + (columns(0, z // 4, z // 2 % 2, t, z % 2) * 8 + g) * 4]),
                )  # fmt: skip

        @T.inline
        def put(row, i):  # a_0 = 8i + 2t + e, chunk g
            for e in T.serial(2, unroll=True):
                T.ptx[store](
                    y.ptr_to([row * WORDS + ((i * 8 + 2 * t + e) * 8 + g) * 4]),
                    b[e * 4],
                    b[e * 4 + 1],
                    b[e * 4 + 2],
                    b[e * 4 + 3],
                )

        fetch(cta)
        factor(0, f0)
        factor(1, f1)
        T.cuda.cta_sync()
        for it in T.serial((blocks - cta + grid - 1) // grid if looped else 1):
            block = T.meta_var(cta + it * grid)
            if plan.l2:
                if block + grid < blocks:
                    bring(plan, x, block + grid, tx)
            if not ahead:
                if it > 0:
                    fetch(block)
            use(0)
            contract_first(dtype, R, b, c, f)
            for z in T.serial(16, unroll=True):
                at = T.meta_var(place(rows_of(0, z // 4, z // 2 % 2, g), 2 * t + z % 2))
                T.ptx["st.shared.v4.b32"](
                    sm.ptr_to([warp * row_words + at * 4]), R[z * 4], R[z * 4 + 1], R[z * 4 + 2], R[z * 4 + 3]
                )
            if ahead:
                if block + grid < blocks:
                    fetch(block + grid)
            T.cuda.warp_sync()
            use(1)
            for i in T.serial(8, unroll=plan.unroll):
                for z in T.serial(2, unroll=True):
                    T.ptx["ld.shared.v4.b32"](
                        b[z * 4], b[z * 4 + 1], b[z * 4 + 2], b[z * 4 + 3],
                        sm.ptr_to([warp * row_words + place(i * 8 + g, 2 * t + z) * 4]),
                    )  # fmt: skip
                tail(b, c, f)
                if ragged:
                    if block * rows + warp < m:
                        put(block * rows + warp, i)
                else:
                    put(block * rows + warp, i)
            if looped:
                T.cuda.warp_sync()

    return kernel
