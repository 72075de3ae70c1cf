"""The 16-bit chained Kron-Matmul kernel of 128^2: warpgroup tensor cores (sm_90a), one launch, one exchange.

    global ── registers ─ a_1 (data is operand A, F_1 operand B) ── shared ─ a_0 (F_0 is operand A, data operand B) ── global

Two warpgroups contract a row, 64 of its 128 lines each, then 64 of its 128 outputs along a_0. The sums of the first product
are rounded and put, transposed by stmatrix, where they are operand B of the second. The order of F_1's rows and columns is
free: it is chosen so that every access to global memory moves 16 bytes a lane.

    shared: F_1, F_0, data; each as core matrices of 8 x 8, in order (k step, eight rows or columns, half of the k step)

Read first: `chain128`; `inputs`, `outputs` and `word` for every index.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,misc,valid-type,name-defined"
# ruff: noqa: SIM102 - in a tile program `and` would join a Python condition with one of the kernel

from __future__ import annotations

from typing import Any

from kronsched.schedules.kron_chain_half import LOADS, PACK
from kronsched.schedules.kron_chain_half32 import STORES
from kronsched.schedules.kron_chain_l2 import bring
from kronsched.schedules.kron_chain_plan import ChainPlan
from kronsched.schedules.kron_mma_kernel import evaluate
from kronsched.schedules.kron_wgmma_layout import LEADING, STRIDE

WORDS = 128**2 // 2
"""32-bit words of a row, of a factor, and of either in shared memory."""
_KINDS = {"float16": "f16", "bfloat16": "bf16"}
_STMATRIX = "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16"


def inputs(s: Any, r: Any, t: Any, e: Any) -> Any:
    """The a_1 that k = 8r + 2t + e of k step s stands for."""
    return 8 * (s // 2 * 4 + t) + s % 2 * 4 + 2 * r + e


def outputs(j: Any, t: Any, e: Any) -> Any:
    """The output along a_1 that column 8j + 2t + e of the products stands for."""
    return 8 * (j // 4 * 4 + t) + j % 4 * 2 + e


def word(s: Any, k: Any, n: Any) -> Any:
    """The 16-bit word of an operand in shared memory at (k step, k in it, row or column n)."""
    return s * 2048 + n // 8 * 128 + k // 8 * 64 + n % 8 * 8 + k % 8


def chain128(plan: ChainPlan) -> Any:
    """The PrimFunc of 128^2. Parameters x, f0, f1, y as 32-bit and 16-bit words."""
    from tvm.script import tirx as T

    m, threads, blocks, grid = plan.m, plan.threads, plan.blocks, plan.grid
    ahead, looped = plan.prefetch != "none", grid < blocks
    pack, load, store = PACK[plan.dtype], LOADS[plan.load], STORES[plan.store]
    mma = f"wgmma.mma_async.sync.aligned.m64n128k16.f32.{_KINDS[plan.dtype]}.{_KINDS[plan.dtype]}"

    def product(c: Any, a: Any, b: Any) -> None:
        """Emit c = the product along eight k steps; a(s): the words, or the descriptor, of operand A."""
        evaluate(T.ptx.wgmma.fence.sync.aligned())
        for s in range(8):
            left = a(s)
            tail = [1, 1, 0] if len(left) == 4 else [1, 1, 0, 0]
            evaluate(T.ptx[mma](*[c[i] for i in range(64)], *left, b + T.uint64(s * 256), T.bool(s > 0), *tail))
        evaluate(T.ptx.wgmma.commit_group.sync.aligned())
        evaluate(T.ptx.wgmma.wait_group.sync.aligned(0))

    def lines(c: Any, R: Any, b: Any) -> None:
        def words(s: int) -> list[Any]:
            return [R[s // 2 * 8 + h * 4 + s % 2 * 2 + r] for r in range(2) for h in range(2)]

        product(c, words, b)

    def across(c: Any, a: Any, b: Any) -> None:
        product(c, lambda s: [a + T.uint64(s * 256)], b)

    @T.prim_func
    def kernel(
        x: T.Buffer((m * WORDS,), "uint32"),
        f0: T.Buffer((128 * 128,), "uint16"),
        f1: T.Buffer((128 * 128,), "uint16"),
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
        sm = T.alloc_buffer((plan.shared_bytes // 2,), "uint16", scope="shared.dyn", align=1024)
        R = T.alloc_local([32], "uint32")  # operand A: 8 (pair of k steps) + 4 (row g or g + 8) + word
        b = T.alloc_local([4], "uint32")
        c = T.alloc_local([64], "float32")
        operand = T.alloc_local([3], "uint64")  # descriptors of F_1, of this warpgroup's half of F_0, of the data

        @T.inline
        def factors():
            for v in T.serial(128 * 64 // threads, unroll=4):
                p = T.meta_var((v * threads // 128 + tx // 128) * 2)  # and p + 1, which lies next to it
                q = T.meta_var(tx % 128)  # 128 threads read a line
                b[0] = T.cast(f0[p * 128 + q], "uint32") | (T.cast(f0[p * 128 + 128 + q], "uint32") << T.uint32(16))
                b[1] = T.cast(f1[p * 128 + q], "uint32") | (T.cast(f1[p * 128 + 128 + q], "uint32") << T.uint32(16))
                T.ptx["st.shared.b32"](sm.ptr_to([word(p // 16, p % 16, q) + 2 * WORDS]), b[0])
                # inputs and outputs are undone: where (p, q) of F_1 has its place
                s = T.meta_var(p // 32 * 2 + p // 4 % 2)
                k = T.meta_var(p // 2 % 2 * 8 + p // 8 % 4 * 2 + p % 2)
                n = T.meta_var(q // 32 * 32 + q // 2 % 4 * 8 + q // 8 % 4 * 2 + q % 2)
                T.ptx["st.shared.b32"](sm.ptr_to([word(s, k, n)]), b[1])

        @T.inline
        def fetch(row):
            for i in T.serial(4, unroll=True):
                for h in T.serial(2, unroll=True):
                    e = T.meta_var(i * 8 + h * 4)
                    T.ptx[load](
                        R[e],
                        R[e + 1],
                        R[e + 2],
                        R[e + 3],
                        x.ptr_to([row * WORDS + (warp * 16 + h * 8 + g) * 64 + (i * 4 + t) * 4]),
                    )

        @T.inline
        def exchange():  # c[4j + 2h + e]: line 16 warp + 8h + g, column 8j + 2t + e
            for v in T.serial(8, unroll=True):
                for i in T.serial(4, unroll=True):
                    T.ptx[pack](b[i], c[v * 8 + i * 2 + 1], c[v * 8 + i * 2])
                T.ptx[_STMATRIX](sm.ptr_to([4 * WORDS + warp * 2048 + v * 256 + lane * 8]), b[0], b[1], b[2], b[3])

        @T.inline
        def put(row):  # c[4j + 2h + e]: a_0 = 16 warp + 8h + g, column 8j + 2t + e
            for i in T.serial(4, unroll=True):
                for h in T.serial(2, unroll=True):
                    for v in T.serial(4, unroll=True):
                        T.ptx[pack](b[v], c[i * 16 + v * 4 + h * 2 + 1], c[i * 16 + v * 4 + h * 2])
                    T.ptx[store](y.ptr_to([row * WORDS + (warp * 16 + h * 8 + g) * 64 + (i * 4 + t) * 4]), b[0], b[1], b[2], b[3])

        fetch(cta)
        factors()
        T.cuda.wgmma.encode_matrix_descriptor(T.address_of(operand[0]), sm.ptr_to([0]), LEADING, STRIDE, 0)
        T.cuda.wgmma.encode_matrix_descriptor(
            T.address_of(operand[1]), sm.ptr_to([2 * WORDS + warp // 4 * 1024]), LEADING, STRIDE, 0
        )
        T.cuda.wgmma.encode_matrix_descriptor(T.address_of(operand[2]), sm.ptr_to([4 * WORDS]), LEADING, STRIDE, 0)
        T.ptx.fence.proxy.async_.shared__cta()
        T.cuda.cta_sync()
        for it in T.serial((blocks - cta + grid - 1) // grid if looped else 1):
            row = T.meta_var(cta + it * grid)
            if plan.l2:
                if row + grid < blocks:
                    bring(plan, x, row + grid, tx)
            if not ahead:
                if it > 0:
                    fetch(row)
            lines(c, R, operand[0])
            if ahead:
                if row + grid < blocks:
                    fetch(row + grid)
            exchange()
            T.ptx.fence.proxy.async_.shared__cta()
            T.cuda.cta_sync()
            across(c, operand[1], operand[2])
            if looped:
                T.cuda.cta_sync()  # the data has been read
            put(row)

    return kernel
