"""The 16-bit chained Kron-Matmul kernel of 8^4 and 8^5 fed by bulk copies: kron_chain_half.py whose rows land in a ring.

    global ══ ring ── registers ─ a_2 ─ a_3 ── registers ─ a_1 ─ a_0 ── ldmatrix ─ a_4 ── global       8^5
                   ── registers ─ a_0 ─ a_1 ────────────────────────── ldmatrix ─ a_2 ─ a_3 ── global  8^4
                      └────────────────── all in the same place ──────────────────┘

No thread loads from global memory and no register waits for it. The block meets between the phases of a row only; the first
phase of the next row happens in another part of the ring and waits for nobody.

Read first: `ring8`; kron_chain_ring_plan.py for the ring, kron_chain_half8_steps.py for the products.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,misc,valid-type,name-defined"
# ruff: noqa: SIM102 - in a tile program `and` would join a Python condition with one of the kernel

from __future__ import annotations

from typing import Any

from kronsched.schedules.kron_chain_half8_steps import Steps
from kronsched.schedules.kron_chain_l2 import begin
from kronsched.schedules.kron_chain_layout import (
    chunk_position,
    last_axes,
    pairs,
    tile_digits,
    tiles_a_row,
    unit_digits,
    units_a_row,
)
from kronsched.schedules.kron_chain_names import LDMATRIX, LDMATRIX_TRANS, STORES
from kronsched.schedules.kron_chain_plan import ChainPlan
from kronsched.schedules.kron_chain_ring import Feed


def ring8(plan: ChainPlan) -> Any:
    """The PrimFunc of 8^4 or 8^5. Parameters x, f0 … f4, y as 32-bit and 16-bit words; a surplus factor is unused."""
    from tvm.script import tirx as T

    n, m, threads, grid, ring = plan.n, plan.m, plan.threads, plan.grid, plan.ring
    warps, words = threads // 32, 8**n // 2
    table = ring.bytes // 4  # factors in fragment order
    barriers = table + n * 32
    a_warp, rounds = tiles_a_row(8, n) // warps, units_a_row(8, n) // 4 // warps
    phases, last = pairs(8, n), last_axes(8, n)
    middle_phase, two_last = len(phases) > 1, len(last) > 1
    store = STORES[plan.store] + ".b32"

    def place(pair: tuple[int, int], tile: Any, t: Any, g: Any) -> Any:
        return chunk_position(8, n, tile_digits(8, n, pair, tile, t, g)[0], 0) * 4

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
        V = T.alloc_local([8], "uint32")  # one tile
        b = T.alloc_local([8], "uint32")
        c = T.alloc_local([16], "float32")
        f = T.alloc_local([2], "uint32")  # of the phase's two axes
        base = T.alloc_local([1], "int32")  # where the row is, in words
        feed = T.meta_var(Feed(plan, x, sm, barriers))
        steps = T.meta_var(Steps(plan.dtype, b, c, f))
        rows = T.meta_var((m - cta + grid - 1) // grid)

        @T.inline
        def factor(s, F):
            sm[table + s * 32 + lane] = T.cast(F[2 * t * 8 + g], "uint32") | (
                T.cast(F[(2 * t + 1) * 8 + g], "uint32") << T.uint32(16)
            )

        @T.inline
        def use(e, axis):  # the factor of an axis, as the phase's factor e
            f[e] = sm[table + axis * 32 + lane]

        @T.inline
        def pair_phase(pair):  # the warp's tiles, each in place
            use(0, pair[0])
            use(1, pair[1])
            for u in T.serial(a_warp, unroll=plan.unroll):
                for r in T.unroll(2):
                    at = T.meta_var(base[0] + place(pair, warp * a_warp + u, 2 * t + r, g))
                    T.ptx["ld.shared.v4.b32"](V[r * 4], V[r * 4 + 1], V[r * 4 + 2], V[r * 4 + 3], sm.ptr_to([at]))
                steps.both(V, 0)
                T.cuda.warp_sync()
                for r in T.unroll(2):
                    at = T.meta_var(base[0] + place(pair, warp * a_warp + u, g, 2 * t + r))
                    T.ptx["st.shared.v4.b32"](sm.ptr_to([at]), V[r * 4], V[r * 4 + 1], V[r * 4 + 2], V[r * 4 + 3])

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
        if warp == 3 % warps:
            factor(3, f3)
        if n > 4:
            if warp == 4 % warps:
                factor(4, f4)
        T.cuda.cta_sync()
        for it in T.serial(rows):
            row = T.meta_var(cta + it * grid)
            T.ptx["shr.u32"](zero[0], T.cast(it, "uint32"), T.uint32(24))
            me[0] = tx + T.cast(zero[0], "int32")
            base[0] = it % ring.rows * (ring.a * ring.plane_chunks * 4)
            feed.wait(it)
            pair_phase(phases[0])
            feed.free()
            T.cuda.cta_sync()
            if T.And(it > 0, it - 1 + ring.rows < rows):  # everybody is done with the row before this one
                feed.fetch(tx, row + (ring.rows - 1) * grid, it - 1 + ring.rows, 0, ring.a)
            if middle_phase:
                pair_phase(phases[-1])
                feed.free()
                T.cuda.cta_sync()
            use(0, last[0])
            if two_last:
                use(1, last[1])
            for v in T.serial(rounds, unroll=plan.unroll):
                unit = T.meta_var((warp * rounds + v) * 4)
                lines = T.meta_var(chunk_position(8, n, unit_digits(8, n, unit + lane // 8, lane % 8), 0) * 4)
                T.ptx[LDMATRIX_TRANS if two_last else LDMATRIX](b[0], b[1], b[2], b[3], sm.ptr_to([base[0] + lines]))
                steps.last(two_last)
                for h in T.unroll(4):
                    T.ptx[store](y.ptr_to([row * words + ((unit + h) * 8 + g) * 4 + t]), b[h])

    return kernel
