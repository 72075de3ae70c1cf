"""The 16-bit chained Kron-Matmul kernel for P = 8: tensor cores with factors as operand A, data as operand B, one launch.

    global ── registers ─ t ─ g ── shared ── registers ─ t ─ g ── shared ── ldmatrix ─ last axes ── global
              └── pair phase ───┘            └── pair phase ───┘ (8^5 only)  └──── last phase ────┘

An accumulator of mma.m16n8k16 holds (row = lane / 4, columns 2 (lane % 4) + {0, 1}). Packed to 16 bits, that is the B operand of
the next mma with rows and columns swapped: two axes are contracted without leaving the registers. Sums are float32; values are
rounded to storage between any two axes. For P = 8 one mma.m16n8k16 contracts two 8 × 8 tiles with the factor twice on its
diagonal; the second axis of a pair takes mma.m16n8k8 with the data as operand A, which swaps nothing.

Read first: `chain8`; kron_chain_layout.py for every index; kron_chain_half16.py for P = 16.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,misc,valid-type,name-defined"
# ruff: noqa: SIM102 - in a tile program `and` would join a Python condition with one of the kernel

from __future__ import annotations

from typing import Any

from kronsched.schedules.kron_chain_half8_steps import Steps
from kronsched.schedules.kron_chain_l2 import begin, bring
from kronsched.schedules.kron_chain_layout import (
    chunk_index,
    chunk_position,
    chunk_strides,
    last_axes,
    pairs,
    tile_digits,
    tiles_a_row,
    unit_digits,
    units_a_row,
)
from kronsched.schedules.kron_chain_names import COPY, LDMATRIX, LDMATRIX_TRANS, LOADS, STORES
from kronsched.schedules.kron_chain_plan import ChainPlan


def chain8(plan: ChainPlan) -> Any:
    """The PrimFunc of P = 8, N = 3, 4 or 5. Parameters x, f0 … f4, y as 32-bit and 16-bit words; surplus factors are unused."""
    from tvm.script import tirx as T

    n, m, rows, threads = plan.n, plan.m, plan.rows, plan.threads
    warps, blocks, grid = threads // 32, plan.blocks, plan.grid
    words = 8**n // 2  # of a row
    tiles, units = tiles_a_row(8, n), units_a_row(8, n)
    pitch = chunk_strides(8, n)[2]  # chunks from row to row in shared memory
    stage = rows * pitch * 4
    table = stage + plan.staged_tiles * threads * 8  # factors in fragment order
    a_warp = rows * tiles // warps  # tiles of a warp
    rounds = rows * units // 4 // warps  # ldmatrix.x4 reads of a warp
    phases, last = pairs(8, n), last_axes(8, n)
    first, middle = phases[0], phases[1] if len(phases) > 1 else phases[0]
    middle_phase, two_last = len(phases) > 1, len(last) > 1
    ahead, staged = plan.prefetch != "none", plan.staged_tiles  # tiles of a warp that come through the stage
    held = a_warp - staged  # the others come through registers
    ragged, looped, local_rows = m % rows != 0, grid < blocks, rows % warps == 0
    block_words = rows * words
    load, store = LOADS[plan.load], STORES[plan.store] + ".b32"

    def source(block: Any, tile: Any, t: Any, g: Any) -> Any:
        row = block * rows + (tile // tiles if rows > 1 else 0)
        digits, half = tile_digits(8, n, first, tile % tiles if rows > 1 else tile, t, g)
        return (T.min(row, m - 1) if ragged else row) * words + chunk_index(8, digits, half) * 4

    def place(pair: tuple[int, int], tile: Any, t: Any, g: Any) -> Any:
        digits, half = tile_digits(8, n, pair, tile % tiles if rows > 1 else tile, t, g)
        return ((tile // tiles if rows > 1 else 0) * pitch + chunk_position(8, n, digits, half)) * 4

    def neighbour(unit: Any, low: Any) -> Any:
        digits = unit_digits(8, n, unit % units if rows > 1 else unit, low)
        return ((unit // units if rows > 1 else 0) * pitch + chunk_position(8, n, digits, 0)) * 4

    @T.prim_func
    def kernel(
        x: T.Buffer((m * words,), "uint32"),
        f0: T.Buffer((64,), "uint16"),
        f1: T.Buffer((64,), "uint16"),
        f2: T.Buffer((64,), "uint16"),
        f3: T.Buffer((64,), "uint16"),
        f4: T.Buffer((64,), "uint16"),
        y: T.Buffer((m * words,), "uint32"),
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
        R = T.alloc_local([max(1, held) * 8], "uint32")
        V = T.alloc_local([8], "uint32")  # one tile
        b = T.alloc_local([8], "uint32")
        c = T.alloc_local([16], "float32")
        f = T.alloc_local([2], "uint32")  # of the phase's two axes
        steps = T.meta_var(Steps(plan.dtype, b, c, f))

        @T.inline
        def factor(s, F):
            sm[table + s * 32 + lane] = T.cast(F[2 * t * 8 + g], "uint32") | (
                T.cast(F[(2 * t + 1) * 8 + g], "uint32") << T.uint32(16)
            )

        @T.inline
        def use(e, axis):  # the factor of an axis, as the phase's factor e
            f[e] = sm[table + axis * 32 + lane]

        @T.inline
        def renew(
            after,
        ):  # me again, but not before the word `after` is there: keeps loads from being moved up, and their registers
            T.ptx["and.b32"](b[0], zero[0], after)
            me[0] = tx + T.cast(b[0], "int32")

        @T.inline
        def fetch(block):  # a block's tiles: the first of a warp into R, the others into the thread's own part of the stage
            for u in T.unroll(staged):
                for r in T.unroll(2):
                    T.ptx[COPY](
                        sm.ptr_to([stage + ((u * 2 + r) * threads + tx) * 4]),
                        x.ptr_to([source(block, warp * a_warp + held + u, 2 * t + r, g)]),
                        16,
                    )
            if staged > 0:
                T.ptx.cp.async_.commit_group()
            for u in T.unroll(held):
                for r in T.unroll(2):
                    e = T.meta_var(u * 8 + r * 4)
                    T.ptx[load](R[e], R[e + 1], R[e + 2], R[e + 3], x.ptr_to([source(block, warp * a_warp + u, 2 * t + r, g)]))

        @T.inline
        def put(S, o, pair, tile):
            for r in T.unroll(2):
                T.ptx["st.shared.v4.b32"](
                    sm.ptr_to([place(pair, tile, g, 2 * t + r)]),
                    S[o + r * 4],
                    S[o + r * 4 + 1],
                    S[o + r * 4 + 2],
                    S[o + r * 4 + 3],
                )

        @T.inline
        def meet():  # before other threads' chunks are read, or overwritten
            if local_rows:
                T.cuda.warp_sync()
            else:
                T.cuda.cta_sync()

        begin(plan, x, cta, tx)
        fetch(cta)  # on its way while the factors are put in order
        if warp == 0:
            factor(0, f0)
        if warp == 1 % warps:
            factor(1, f1)
        if warp == 2 % warps:
            factor(2, f2)
        if n > 3:
            if warp == 3 % warps:
                factor(3, f3)
        if n > 4:
            if warp == 4 % warps:
                factor(4, f4)
        T.cuda.cta_sync()
        for it in T.serial((blocks - cta + grid - 1) // grid if looped else 1):
            block = T.meta_var(cta + it * grid)
            if plan.l2:
                if block + grid < blocks:
                    bring(plan, x, block + grid, tx)
            T.ptx["shr.u32"](zero[0], T.cast(it, "uint32"), T.uint32(24))
            me[0] = tx + T.cast(zero[0], "int32")
            if looped and not ahead:
                if it > 0:
                    fetch(block)
            use(0, first[0])
            use(1, first[1])
            for u in T.unroll(held):
                steps.both(R, u * 8)
                put(R, u * 8, first, warp * a_warp + u)
            if staged > 0:
                T.ptx.cp.async_.wait_group(0)
                for u in T.unroll(staged):
                    for r in T.unroll(2):
                        T.ptx["ld.shared.v4.b32"](
                            V[r * 4],
                            V[r * 4 + 1],
                            V[r * 4 + 2],
                            V[r * 4 + 3],
                            sm.ptr_to([stage + ((u * 2 + r) * threads + tx) * 4]),
                        )
                    steps.both(V, 0)
                    put(V, 0, first, warp * a_warp + held + u)
            if ahead:
                if staged > 0:
                    renew(V[7])
                else:
                    renew(R[held * 8 - 1])
                if block + grid < blocks:
                    fetch(block + grid)
            meet()
            if middle_phase:
                use(0, middle[0])
                use(1, middle[1])
                for u in T.serial(a_warp, unroll=plan.unroll):
                    for r in T.unroll(2):
                        T.ptx["ld.shared.v4.b32"](
                            V[r * 4], V[r * 4 + 1], V[r * 4 + 2], V[r * 4 + 3],
                            sm.ptr_to([place(middle, warp * a_warp + u, 2 * t + r, g)]),
                        )  # fmt: skip
                    steps.both(V, 0)
                    put(V, 0, middle, warp * a_warp + u)
                meet()
            use(0, last[0])
            if two_last:
                use(1, last[1])
            for v in T.serial(rounds, unroll=plan.unroll):
                unit = T.meta_var((warp * rounds + v) * 4)
                T.ptx[LDMATRIX_TRANS if two_last else LDMATRIX](
                    b[0], b[1], b[2], b[3], sm.ptr_to([neighbour(unit + lane // 8, lane % 8)])
                )
                steps.last(two_last)
                for h in T.unroll(4):
                    if ragged:
                        if block * rows + (unit + h) // units < m:
                            T.ptx[store](y.ptr_to([block * block_words + ((unit + h) * 8 + g) * 4 + t]), b[h])
                    else:
                        T.ptx[store](y.ptr_to([block * block_words + ((unit + h) * 8 + g) * 4 + t]), b[h])
            if looped:
                if middle_phase:  # what a warp reads last is what it fills first
                    T.cuda.warp_sync()
                else:
                    meet()

    return kernel
