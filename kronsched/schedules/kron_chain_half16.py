"""The 16-bit chained Kron-Matmul kernel for P = 16, as kron_chain_half.py: every mma.m16n8k16 is full, no diagonal is needed.

    global ── registers ─ t ─ g ── shared ── ldmatrix ─ last axes ── global

A tile of the first phase is 16 x 16 chunks for each half of a_{n-1}; a thread holds 16 of them. The 8 columns of an operand are 4
values of the g axis and both halves, so that neighbouring lanes load whole 32-byte sectors.

Read first: `chain16`; kron_chain_layout.py for every index.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,misc,valid-type,name-defined"
# ruff: noqa: SIM102 - in a tile program `and` would join a Python condition with one of the kernel

from __future__ import annotations

from typing import Any

from kronsched.schedules.kron_chain_half16_steps import Steps
from kronsched.schedules.kron_chain_l2 import begin, bring
from kronsched.schedules.kron_chain_layout import (
    chunk_index,
    chunk_position,
    last_axes,
    merged_axes,
    merged_position,
    merged_size,
    pairs,
    read_chunk,
    row_chunks,
    tile_digits,
    tiles_a_row,
    unit_digits,
    units_a_row,
    written_chunk,
)
from kronsched.schedules.kron_chain_names import COPY, LDMATRIX, LOADS, PACK, STORES
from kronsched.schedules.kron_chain_plan import ChainPlan


def product(dtype: str, factors: list[Any], p: int, row: Any, column: Any) -> Any:
    """An element of the 16 x 16 matrix I ⊗ F ⊗ … of factors of 16-bit words and an identity that fills it up, as float32."""
    from tvm.script import tirx as T

    size = p ** len(factors)
    value: Any = T.float32(1) if size == 16 else T.Select(row // size == column // size, T.float32(1), T.float32(0))
    for i, factor in enumerate(factors):
        below = p ** (len(factors) - 1 - i)
        bits = factor[row // below % p * p + column // below % p]
        if dtype == "bfloat16":
            value = value * T.reinterpret("float32", T.cast(bits, "uint32") << T.uint32(16))
        else:
            value = value * T.cast(T.reinterpret("float16", bits), "float32")
    return value


def chain16(plan: ChainPlan) -> Any:
    """The PrimFunc of P = 16, N = 3 or 4, or of P = 2 and 4 with factors merged to 16 x 16 (`kron_chain_layout.merged_axes`).

    Parameters x, f0 … f12, y as 32-bit and 16-bit words; surplus factors are unused.
    """
    from tvm.script import tirx as T

    p, m, rows, threads = plan.p, plan.m, plan.rows, plan.threads
    warps, blocks, grid = threads // 32, plan.blocks, plan.grid
    merged, size = p < 16, merged_size(p, plan.n) if p < 16 else 16
    n = plan.n if not merged else 3 if size == 1 else 4
    words = p**plan.n // 2  # of a row
    tiles, units = tiles_a_row(p, plan.n) // 2, units_a_row(p, plan.n)
    pitch = row_chunks(p, plan.n)
    stage = rows * pitch * 4
    table = stage + plan.staged_tiles * threads * 32  # factors in fragment order
    a_warp, rounds = rows * tiles // warps, rows * units // warps  # tiles and ldmatrix.x4 reads of a warp
    staged = plan.staged_tiles * 8 // a_warp  # of a thread's 16 chunks of a tile, what comes through the stage
    (pair,), last = pairs(16, n), last_axes(16, n)
    two_last = len(last) > 1
    ahead, held = plan.prefetch != "none", 16 - staged  # the others come through registers
    early = ahead or n == 3  # else registers are scarce
    ragged, looped, local_rows = m % rows != 0, grid < blocks, rows % warps == 0
    block_words = rows * words
    pack = PACK[plan.dtype]
    load, store = LOADS[plan.load], STORES[plan.store] + ".v2.b32"

    def members(given: tuple[Any, ...], s: int) -> list[Any]:
        return [given[i] for i in merged_axes(p, plan.n)[s if s < n - 1 else 3]]

    def source(block: Any, tile: Any, z: Any, t: Any, g: Any) -> Any:
        row = block * rows + (tile // tiles if rows > 1 else 0)
        *axes, half = read_chunk(z, t, g)
        if merged:
            b = tile % tiles if rows > 1 else tile
            inside = ((axes[1] * 16 + axes[0]) * size + b) * 2 + half
            return (T.min(row, m - 1) if ragged else row) * words + inside * 4
        digits, _ = tile_digits(16, n, pair, tile % tiles * 2 if rows > 1 else tile * 2, *axes)
        return (T.min(row, m - 1) if ragged else row) * words + chunk_index(16, digits, half) * 4

    def place(tile: Any, z: Any, t: Any, g: Any) -> Any:
        *axes, half = written_chunk(z, t, g)
        if merged:
            b = tile % tiles if rows > 1 else tile
            return ((tile // tiles if rows > 1 else 0) * pitch + merged_position(size, axes[1], axes[0], b, half)) * 4
        digits, _ = tile_digits(16, n, pair, tile % tiles * 2 if rows > 1 else tile * 2, *axes)
        return ((tile // tiles if rows > 1 else 0) * pitch + chunk_position(16, n, digits, half)) * 4

    def neighbour(unit: Any, low: Any, half: Any) -> Any:
        if merged:
            inside = unit % units if rows > 1 else unit
            a1 = low if size == 1 else inside % size * (16 // size) + low // size
            at = merged_position(size, inside // size, a1, low % size, half)
            return ((unit // units if rows > 1 else 0) * pitch + at) * 4
        digits = unit_digits(16, n, unit % units if rows > 1 else unit, low)
        return ((unit // units if rows > 1 else 0) * pitch + chunk_position(16, n, digits, half)) * 4

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
        R = T.alloc_local([a_warp * 64], "uint32")  # a warp's tiles, contracted in place
        b = T.alloc_local([16], "uint32")
        c = T.alloc_local([16], "float32")
        d = T.alloc_local([2], "uint32")
        f = T.alloc_local([8], "uint32")  # of the phase's two axes
        steps = T.meta_var(Steps(plan.dtype, b, c, d, f))

        @T.inline
        def factor(s, F, spread):
            # The words of operand A (rows q, columns p); words {h, 2 + h} are operand B (rows p, columns q) of half h of q.
            # spread: q in an order that makes a lane's two pairs of outputs neighbours. g axis: p as `turn` leaves it.
            for kh in T.unroll(2):
                for rh in T.unroll(2):
                    q = T.meta_var((g // 2 * 4 + rh * 2 + g % 2) if spread else (g + 8 * rh))
                    low = T.meta_var((t if s == pair[1] else 2 * t) + 8 * kh)
                    high = T.meta_var(low + (4 if s == pair[1] else 1))
                    sm[table + (s * 32 + lane) * 4 + kh * 2 + rh] = T.cast(F[low * 16 + q], "uint32") | (
                        T.cast(F[high * 16 + q], "uint32") << T.uint32(16)
                    )

        @T.inline
        def merge(s, factors, spread):  # the same of a product of factors, by the warp
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
        def renew(
            after,
        ):  # me again, but not before the word `after` is there: keeps loads from being moved up, and their registers
            T.ptx["and.b32"](b[0], zero[0], after)
            me[0] = tx + T.cast(b[0], "int32")

        @T.inline
        def meet():  # before other threads' chunks are read, or overwritten
            if local_rows:
                T.cuda.warp_sync()
            else:
                T.cuda.cta_sync()

        @T.inline
        def fetch(block):  # a block's tiles: the first chunks of each into the thread's own part of the stage, the others into R
            for u in T.unroll(a_warp):
                for z in T.unroll(staged):
                    T.ptx[COPY](
                        sm.ptr_to([stage + ((u * staged + z) * threads + tx) * 4]),
                        x.ptr_to([source(block, warp * a_warp + u, z, t, g)]),
                        16,
                    )
            if staged > 0:
                T.ptx.cp.async_.commit_group()
            for u in T.unroll(a_warp):
                for z in T.unroll(held):
                    e = T.meta_var(u * 64 + (staged + z) * 4)
                    T.ptx[load](
                        R[e], R[e + 1], R[e + 2], R[e + 3], x.ptr_to([source(block, warp * a_warp + u, staged + z, t, g)])
                    )

        @T.inline
        def take(u):  # the chunks of a tile that are in the stage
            for z in T.unroll(staged):
                e = T.meta_var(u * 64 + z * 4)
                T.ptx["ld.shared.v4.b32"](
                    R[e], R[e + 1], R[e + 2], R[e + 3], sm.ptr_to([stage + ((u * staged + z) * threads + tx) * 4])
                )

        @T.inline
        def both(u, tile):  # the two axes of the pair on a tile, and its way into shared memory
            steps.pair_axes(R, u * 64)
            for z in T.unroll(16):
                e = T.meta_var(u * 64 + z * 4)
                T.ptx["st.shared.v4.b32"](sm.ptr_to([place(tile, z, t, g)]), R[e], R[e + 1], R[e + 2], R[e + 3])

        begin(plan, x, cta, tx)
        if early:
            fetch(cta)  # on its way while the factors are put in order
        if merged:
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
        else:
            if warp == 0:
                factor(0, f0, False)
            if warp == 1 % warps:
                factor(1, f1, False)
            if warp == 2 % warps:
                factor(2, f2, n == 3)
            if n > 3:
                if warp == 3 % warps:
                    factor(3, f3, True)
        T.cuda.cta_sync()
        for it in T.serial((blocks - cta + grid - 1) // grid if looped else 1):
            block = T.meta_var(cta + it * grid)
            if plan.l2:
                if block + grid < blocks:
                    bring(plan, x, block + grid, tx)
            T.ptx["shr.u32"](zero[0], T.cast(it, "uint32"), T.uint32(24))
            me[0] = tx + T.cast(zero[0], "int32")
            if not early:
                fetch(block)
            elif looped and not ahead:
                if it > 0:
                    fetch(block)
            use(0, pair[0])
            use(1, pair[1])
            if staged > 0:
                T.ptx.cp.async_.wait_group(0)
            for u in T.unroll(a_warp):
                take(u)
                both(u, warp * a_warp + u)
            if ahead:
                renew(R[a_warp * 64 - 1])
                if block + grid < blocks:
                    fetch(block + grid)
            meet()
            use(0, last[0])
            if two_last:
                use(1, last[1])
            for v in T.serial(rounds, unroll=plan.unroll):
                unit = T.meta_var(warp * rounds + v)
                # matrices: half of a_{n-1} = lane // 8 % 2, half of a_{n-2} = lane // 16
                T.ptx[LDMATRIX](b[0], b[1], b[2], b[3], sm.ptr_to([neighbour(unit, lane % 8 + lane // 16 * 8, lane // 8 % 2)]))
                steps.last_axes_of(two_last)
                for a in T.unroll(2):
                    at = T.meta_var(block * block_words + (unit * 16 + g + 8 * a) * 8 + 2 * t)
                    if ragged:
                        if block * rows + unit // units < m:
                            T.ptx[store](y.ptr_to([at]), b[a * 2], b[a * 2 + 1])
                    else:
                        T.ptx[store](y.ptr_to([at]), b[a * 2], b[a * 2 + 1])
            if looped:
                meet()

    return kernel
