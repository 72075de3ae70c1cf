"""The 16-bit chained Kron-Matmul kernel of 16 x 16 factors fed by bulk copies: kron_chain_half16.py whose rows land in a ring.

    global ══ ring ── registers ─ t ─ g ── the same place ── ldmatrix ─ last axes ── global

No thread loads from global memory and no register waits for it: one row or more is on its way all the time.

Read first: `ring16`; kron_chain_ring_plan.py for the ring, kron_chain_half16_steps.py for the products.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,misc,valid-type,name-defined"
# ruff: noqa: SIM102 - in a tile program `and` would join a Python condition with one of the kernel

from __future__ import annotations

from typing import Any

from kronsched.schedules.kron_chain_half16 import product
from kronsched.schedules.kron_chain_half16_steps import Steps
from kronsched.schedules.kron_chain_l2 import begin
from kronsched.schedules.kron_chain_layout import (
    chunk_strides,
    last_axes,
    merged_axes,
    merged_position,
    merged_size,
    pairs,
    read_chunk,
    written_chunk,
)
from kronsched.schedules.kron_chain_names import LDMATRIX, PACK, STORES
from kronsched.schedules.kron_chain_plan import ChainPlan
from kronsched.schedules.kron_chain_ring import Feed


def ring16(plan: ChainPlan) -> Any:
    """The PrimFunc of P = 16, N = 3 or 4, or of P = 2 and 4 with factors merged to 16 x 16 (`kron_chain_layout.merged_axes`).

    Parameters x, f0 … f12, y as 32-bit and 16-bit words; surplus factors are unused.
    """
    from tvm.script import tirx as T

    p, m, threads, grid = plan.p, plan.m, plan.threads, plan.grid
    warps, ring = threads // 32, plan.ring
    merged, size = p < 16, merged_size(p, plan.n) if p < 16 else 16
    n = plan.n if not merged else 3 if size == 1 else 4
    words = p**plan.n // 2  # of a row
    table = ring.bytes // 4  # factors in fragment order
    barriers = table + 4 * 32 * 4
    (pair,), last = pairs(16, n), last_axes(16, n)
    two_last = len(last) > 1
    # A warp that lands its tile's chunks where it puts them afterwards needs no other warp.
    own = merged and merged_position(size, 0, 0, 1, 1) == 3
    late = ring.a - ring.early  # planes of the next row that land while this row's last phase is under way
    pack, store = PACK[plan.dtype], STORES[plan.store] + ".v2.b32"

    def members(given: tuple[Any, ...], s: int) -> list[Any]:
        return [given[i] for i in merged_axes(p, plan.n)[s if s < n - 1 else 3]] if merged else [given[s]]

    def landed(base: Any, tile: Any, z: Any, t: Any, g: Any) -> Any:
        a1, a0, half = read_chunk(z, t, g)
        inside = a1 * ring.piece_pitch + tile * 2 if n > 3 else a1 * 2
        return (ring.plane(base, a0) + inside + half) * 4

    def at_a0(a1: Any, inner: Any, half: Any) -> Any:  # chunk of a plane; inner: a_2, or b of merged factors
        if merged:
            return merged_position(size, 0, a1, inner, half)
        strides, half_stride, _ = chunk_strides(16, n)
        return half * half_stride + a1 * strides[1] + (inner * strides[2] if n > 3 else 0)

    def place(base: Any, tile: Any, z: Any, t: Any, g: Any) -> Any:
        a1, a0, half = written_chunk(z, t, g)
        return (ring.plane(base, a0) + at_a0(a1, tile, half)) * 4

    def neighbour(base: Any, a0: Any, inside: Any, low: Any, half: Any) -> Any:  # inside: number of the unit at its a_0
        if merged:
            a1 = low if size == 1 else inside * (16 // size) + low // size
            return (ring.plane(base, a0) + at_a0(a1, low % size, half)) * 4
        return (ring.plane(base, a0) + (at_a0(inside, low, half) if n > 3 else at_a0(low, 0, half))) * 4

    @T.prim_func
    def kernel(
        x: T.Buffer((m * words,), "uint32"),
        f0: T.Buffer((p * p,), "uint16"),
        f1: T.Buffer((p * p,), "uint16"),
        f2: T.Buffer((p * p,), "uint16"),
        f3: T.Buffer((p * p,), "uint16"),
        f4: T.Buffer((p * p,), "uint16"),
        f5: T.Buffer((p * p,), "uint16"),
        f6: T.Buffer((p * p,), "uint16"),
        f7: T.Buffer((p * p,), "uint16"),
        f8: T.Buffer((p * p,), "uint16"),
        f9: T.Buffer((p * p,), "uint16"),
        f10: T.Buffer((p * p,), "uint16"),
        f11: T.Buffer((p * p,), "uint16"),
        f12: T.Buffer((p * p,), "uint16"),
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
        R = T.alloc_local([64], "uint32")  # the warp's tile
        b = T.alloc_local([16], "uint32")
        c = T.alloc_local([16], "float32")
        d = T.alloc_local([2], "uint32")
        f = T.alloc_local([8], "uint32")  # of the phase's two axes
        base = T.alloc_local([1], "int32")  # the row's first plane
        feed = T.meta_var(Feed(plan, x, sm, barriers))
        steps = T.meta_var(Steps(plan.dtype, b, c, d, f))
        rows = T.meta_var((m - cta + grid - 1) // grid)

        @T.inline
        def merge(s, factors, spread):
            # The words of operand A (rows q, columns p); words {h, 2 + h} are operand B (rows p, columns q) of half h of q.
            # spread: q in an order that makes a lane's two pairs of outputs neighbours. g axis: p as `turn` leaves it.
            for kh in T.unroll(2):
                for rh in T.unroll(2):
                    q = T.meta_var((g // 2 * 4 + rh * 2 + g % 2) if spread else (g + 8 * rh))
                    low = T.meta_var((t if s == pair[1] else 2 * t) + 8 * kh)
                    high = T.meta_var(low + (4 if s == pair[1] else 1))
                    T.ptx[pack](d[0], product(plan.dtype, factors, p, high, q), product(plan.dtype, factors, p, low, q))
                    sm[table + (s * 32 + lane) * 4 + kh * 2 + rh] = d[0]

        @T.inline
        def use(e, axis):  # the factor of an axis, as the phase's factor e
            T.ptx["ld.shared.v4.b32"](
                f[e * 4], f[e * 4 + 1], f[e * 4 + 2], f[e * 4 + 3], sm.ptr_to([table + (axis * 32 + lane) * 4])
            )

        @T.inline
        def last_phase(row, first, count):  # a unit for each a_0: there are as many units at an a_0 as tiles, one a warp
            for v in T.serial(count, unroll=plan.unroll):
                a0 = T.meta_var(v + first)
                # matrices: half of a_{n-1} = lane // 8 % 2, half of a_{n-2} = lane // 16
                at = T.meta_var(neighbour(base[0], a0, warp, lane % 8 + lane // 16 * 8, lane // 8 % 2))
                T.ptx[LDMATRIX](b[0], b[1], b[2], b[3], sm.ptr_to([at]))
                steps.last_axes_of(two_last)
                for a in T.unroll(2):
                    to = T.meta_var(row * words + ((a0 * warps + warp) * 16 + g + 8 * a) * 8 + 2 * t)
                    T.ptx[store](y.ptr_to([to]), b[a * 2], b[a * 2 + 1])

        feed.start(tx)
        T.cuda.cta_sync()
        begin(plan, x, cta, tx)
        feed.fetch_all(tx, cta)
        for i in T.unroll(1, ring.rows):
            if i < rows:
                feed.fetch(tx, cta + i * grid, i, 0, ring.early)
        given = T.meta_var((f0, f1, f2, f3, f4, f5, f6, f7, f8, f9, f10, f11, f12))
        if warp == 0:
            merge(0, members(given, 0), False)
        if warp == 1 % warps:
            merge(1, members(given, 1), False)
        if warp == 2 % warps:
            merge(2, members(given, 2), n == 3)
        if n > 3:
            if warp == 3 % warps:
                merge(3, members(given, 3), True)
        T.cuda.cta_sync()
        for it in T.serial(rows):
            row = T.meta_var(cta + it * grid)
            T.ptx["shr.u32"](zero[0], T.cast(it, "uint32"), T.uint32(24))
            me[0] = tx + T.cast(zero[0], "int32")
            base[0] = it * ring.a % ring.planes
            use(0, pair[0])
            use(1, pair[1])
            feed.wait(it)
            for z in T.unroll(16):
                T.ptx["ld.shared.v4.b32"](
                    R[z * 4], R[z * 4 + 1], R[z * 4 + 2], R[z * 4 + 3], sm.ptr_to([landed(base[0], warp, z, t, g)])
                )
            if own:
                T.cuda.warp_sync()
            else:
                T.cuda.cta_sync()
            steps.pair_axes(R, 0)
            for z in T.unroll(16):
                T.ptx["st.shared.v4.b32"](
                    sm.ptr_to([place(base[0], warp, z, t, g)]), R[z * 4], R[z * 4 + 1], R[z * 4 + 2], R[z * 4 + 3]
                )
            feed.free()
            T.cuda.cta_sync()
            use(0, last[0])
            if two_last:
                use(1, last[1])
            if ring.wraps:
                last_phase(row, 0, late)
                T.cuda.cta_sync()
                if it + 1 < rows:
                    feed.fetch(tx, row + grid, it + 1, ring.early, late)
            elif it > 0:  # everybody is done with the row before this one
                if it - 1 + ring.rows < rows:
                    feed.fetch(tx, row + (ring.rows - 1) * grid, it - 1 + ring.rows, 0, ring.a)
            last_phase(row, late, ring.a - late)
            if ring.wraps:
                T.cuda.cta_sync()
                if it + 2 < rows:
                    feed.fetch(tx, row + 2 * grid, it + 2, 0, ring.early)

    return kernel
