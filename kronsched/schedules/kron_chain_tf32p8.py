"""The float32 chained Kron-Matmul kernel of 8^5: tensor cores by TF32 products, one launch, two exchanges.

    global ── registers ─ a_2 ─ a_3 ── shared ── registers ─ a_1 ─ a_0 ── shared ── registers ─ a_4 ── global
                           next row on its way (registers, cp.async)

Longer stretches of the third phase without a branch issue fewer instructions and are slower on an H200. So is a loop of
the third phase and the next row's first one, unit by unit.

In the first two phases the factor is operand A of mma.m16n8k8, its high part in rows 0-7 and its low part in rows 8-15, and the
data operand B: two multiplications, by the high and the low part of the data, make all four products of 64 sums, which are added
up across the halves of the accumulator. The accumulator is the next operand B with rows and columns swapped, so that two axes are
contracted without leaving the registers. In the last phase the data is operand A and three products are enough.

A unit is 8 x 8 chunks of four a_4 for each half of a_4, 16 numbers a thread. The 8 columns of an operand are four values of one
axis and both halves: neighbouring lanes load whole 128-byte lines.

Read first: `chain8_tf32`; `read_chunk`, `written_chunk` and `place` for every index.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,misc,valid-type,name-defined"

from __future__ import annotations

from typing import Any

from kronsched.schedules.kron_chain_l2 import begin
from kronsched.schedules.kron_chain_names import COPY
from kronsched.schedules.kron_chain_tf32 import LOADS, MMA_TF32, PRODUCTS
from kronsched.schedules.kron_chain_tf32p8_plan import ROW_CHUNKS, SIZE, UNIT_WORDS, Chain8Plan, place, read_chunk, written_chunk
from kronsched.schedules.kron_mma_kernel import HALF_ULP, evaluate

STORES = {"wb": "st.global.v2.f32", "cs": "st.global.cs.v2.f32"}
_TF32_MASK = 0xFFFFE000


def split(value: Any, raw: Any, low: Any, i: int) -> None:
    """Emit raw[i], low[i] = the TF32 parts of a number; mma drops the bits of raw below TF32."""
    from tvm.script import tirx as T
    from tvm.tirx.script.builder import ir as I

    I.buffer_store(raw, T.reinterpret("uint32", value) + T.uint32(HALF_ULP), [i])
    rounded = T.reinterpret("float32", raw[i] & T.uint32(_TF32_MASK))
    I.buffer_store(low, T.reinterpret("uint32", value - rounded), [i])


def multiply(c: Any, o: int, f: Any, e: int, b: Any, at: int, fresh: bool) -> None:
    """Emit c[o …] (+)= the phase's factor e (high rows, low rows) times operand b[at], b[at + 1]."""
    from tvm.script import tirx as T

    sums = [c[o + i] for i in range(4)]
    start = [T.float32(0)] * 4 if fresh else sums
    evaluate(T.ptx[MMA_TF32](*sums, *[f[e * 4 + i] for i in range(4)], b[at], b[at + 1], *start))


def contract(f: Any, e: int, values: list[tuple[Any, Any]], c: Any, raw: Any, low: Any) -> list[tuple[Any, Any]]:
    """Emit the contraction of operands (two numbers each) with the phase's factor e; the sums' two columns, as expressions."""
    for i, pair in enumerate(values):
        for r in range(2):
            split(pair[r], raw, low, i * 2 + r)
    for fresh, b in (True, low), (False, raw):  # the largest last
        for i in range(len(values)):
            multiply(c, i * 4, f, e, b, i * 2, fresh)
    return [(c[i * 4] + c[i * 4 + 2], c[i * 4 + 1] + c[i * 4 + 3]) for i in range(len(values))]


def both(V: Any, o: int, f: Any, d: Any, c: Any, raw: Any, low: Any) -> None:
    """Emit the contraction of the phase's two axes on V[o … o + 15], a unit, in place: V[o + 4z + q] is number q of chunk z."""
    from tvm.tirx.script.builder import ir as I

    for q in range(0, 4, 2):  # two at a time: enough independent products, and registers are scarce
        for k in range(2):
            at = o + q + k
            sums = contract(f, 0, [(V[at + j * 8], V[at + j * 8 + 4]) for j in range(2)], c, raw, low)
            for j, pair in enumerate(sums):
                for e in range(2):
                    I.buffer_store(d, pair[e], [k * 4 + e * 2 + j])
        for k in range(2):
            at = o + q + k
            sums = contract(f, 1, [(d[k * 4 + e * 2], d[k * 4 + e * 2 + 1]) for e in range(2)], c, raw, low)
            for e, pair in enumerate(sums):
                for r in range(2):
                    I.buffer_store(V, pair[r], [at + e * 8 + r * 4])


def last_axis(V: Any, f: Any, c: Any, raw: Any, low: Any) -> None:
    """Emit the contraction of a_4 on V[0 … 3], two rows of two numbers, as operand A; the sums are in c[0 … 3]."""
    from tvm.script import tirx as T

    for r in range(2):  # operand A: row g, row g + 8 at k = t, then at k = t + 4
        for h in range(2):
            split(V[h * 2 + r], raw, low, r * 2 + h)
    for i, (fp, xp) in enumerate(PRODUCTS):
        sums = [c[k] for k in range(4)]
        data = [(low if xp else raw)[k] for k in range(4)]
        start = [T.float32(0)] * 4 if i == 0 else sums
        evaluate(T.ptx[MMA_TF32](*sums, *data, f[fp], f[2 + fp], *start))


def chain8_tf32(plan: Chain8Plan) -> Any:
    """The PrimFunc of 8^5 in float32. Parameters x, f0 … f4, y."""
    from tvm.script import tirx as T

    m, threads, grid, blocks = plan.m, plan.threads, plan.grid, plan.blocks
    warps = threads // 32
    a_warp, staged = plan.units_a_warp, plan.staged  # units of a warp, those that come through the stage
    held = a_warp - staged  # the others come through registers
    stage = ROW_CHUNKS * 4
    table = stage + staged * threads * UNIT_WORDS  # factors in fragment order: high, low, high, low
    rounds = 256 // warps  # reads of 16 lines of a_4 of a warp
    ahead, looped = plan.prefetch != "none", grid < blocks
    load, store = LOADS[plan.load], STORES[plan.store]

    def source(block: Any, unit: Any, z: Any, t: Any, g: Any) -> Any:
        a2, a3, half = read_chunk(z, t, g)
        return block * SIZE + ((unit * 8 + a2) * 8 + a3) * 8 + half * 4

    def first_place(unit: Any, z: Any, t: Any, g: Any) -> Any:
        a2, a3, half = written_chunk(z, t, g)
        return place(unit // 8, unit % 8, a2, a3, half) * 4

    def second_place(unit: Any, chunk: tuple[Any, Any, Any]) -> Any:
        a1, a0, half = chunk
        return place(a0, a1, unit // 8, unit % 8, half) * 4

    @T.prim_func
    def kernel(
        x: T.Buffer((m * SIZE,), "float32"),
        f0: T.Buffer((64,), "float32"),
        f1: T.Buffer((64,), "float32"),
        f2: T.Buffer((64,), "float32"),
        f3: T.Buffer((64,), "float32"),
        f4: T.Buffer((64,), "float32"),
        y: T.Buffer((m * SIZE,), "float32"),
    ):
        T.device_entry()
        T.attr({"tirx.launch_bounds_min_blocks_per_sm": 1})
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
        R = T.alloc_local([max(1, held) * UNIT_WORDS], "float32")  # the next row's units
        V = T.alloc_local([UNIT_WORDS], "float32")
        c = T.alloc_local([8], "float32")
        d = T.alloc_local([8], "float32")
        raw = T.alloc_local([4], "uint32")
        low = T.alloc_local([4], "uint32")
        f = T.alloc_local([8], "uint32")  # of the phase's two axes

        @T.inline
        def factor(axis, F):  # words: high, low at column t; high, low at column t + 4. The last axis: columns 2t, 2t + 1
            for r in T.unroll(2):
                p = T.meta_var((2 * t + r) if axis == 4 else (t + 4 * r))
                at = T.meta_var(table + (axis * 32 + lane) * 4 + r * 2)
                c[0] = F[p * 8 + g]
                raw[0] = (T.reinterpret("uint32", c[0]) + T.uint32(HALF_ULP)) & T.uint32(_TF32_MASK)
                sm[at] = raw[0]
                sm[at + 1] = T.reinterpret("uint32", c[0] - T.reinterpret("float32", raw[0])) + T.uint32(HALF_ULP)

        @T.inline
        def use(e, axis):  # the factor of an axis, as the phase's factor e
            T.ptx["ld.shared.v4.b32"](
                f[e * 4], f[e * 4 + 1], f[e * 4 + 2], f[e * 4 + 3], sm.ptr_to([table + (axis * 32 + lane) * 4])
            )

        @T.inline
        def renew(after):  # me again, but not before `after` is there: keeps loads from being moved up, and their registers
            T.ptx["and.b32"](raw[0], zero[0], T.reinterpret("uint32", after))
            me[0] = tx + T.cast(raw[0], "int32")

        @T.inline
        def fetch_staged(block, u):  # a unit into the thread's own part of the stage
            for z in T.unroll(4):
                T.ptx[COPY](
                    sm.ptr_to([stage + ((u * 4 + z) * threads + me[0]) * 4]),
                    x.ptr_to([source(block, warp * a_warp + u, z, t, g)]),
                    16,
                )

        @T.inline
        def fetch_held(block, u):  # a unit into R
            for z in T.unroll(4):
                e = T.meta_var(u * UNIT_WORDS + z * 4)
                T.ptx[load](R[e], R[e + 1], R[e + 2], R[e + 3], x.ptr_to([source(block, warp * a_warp + staged + u, z, t, g)]))

        @T.inline
        def fetch(block):
            for u in T.unroll(staged):
                fetch_staged(block, u)
            if staged > 0:
                T.ptx.cp.async_.commit_group()
            for u in T.unroll(held):
                fetch_held(block, u)

        @T.inline
        def put(S, o, unit, second):
            for z in T.unroll(4):
                at = T.meta_var(second_place(unit, written_chunk(z, t, g)) if second else first_place(unit, z, t, g))
                T.ptx["st.shared.v4.f32"](sm.ptr_to([at]), S[o + z * 4], S[o + z * 4 + 1], S[o + z * 4 + 2], S[o + z * 4 + 3])

        @T.inline
        def get(z, at):  # chunk z of V
            T.ptx["ld.shared.v4.f32"](V[z * 4], V[z * 4 + 1], V[z * 4 + 2], V[z * 4 + 3], sm.ptr_to([at]))

        begin(plan, x, cta, tx)
        if ahead:
            fetch(cta)
        if warp == 0:
            factor(0, f0)
        if warp == 1:
            factor(1, f1)
        if warp == 2:
            factor(2, f2)
        if warp == 3:
            factor(3, f3)
        if warp == 4:
            factor(4, f4)
        T.cuda.cta_sync()
        for it in T.serial((blocks - cta + grid - 1) // grid if looped else 1):
            block = T.meta_var(cta + it * grid)
            T.ptx["shr.u32"](zero[0], T.cast(it, "uint32"), T.uint32(24))
            me[0] = tx + T.cast(zero[0], "int32")
            if not ahead:
                fetch(block)
            use(0, 2)
            use(1, 3)
            # The next row's unit is asked for as soon as this one's has been worked off.
            for u in T.unroll(held):
                both(R, u * UNIT_WORDS, f, d, c, raw, low)
                put(R, u * UNIT_WORDS, warp * a_warp + staged + u, False)
                if ahead:
                    renew(R[u * UNIT_WORDS + 15])
                    if block + grid < blocks:
                        fetch_held(block + grid, u)
            if staged > 0:
                T.ptx.cp.async_.wait_group(0)
                for u in T.serial(staged, unroll=plan.unroll):
                    for z in T.unroll(4):
                        get(z, stage + ((u * 4 + z) * threads + me[0]) * 4)
                    renew(V[15])
                    if block + grid < blocks:
                        fetch_staged(block + grid, u)
                    both(V, 0, f, d, c, raw, low)
                    put(V, 0, warp * a_warp + u, False)
                T.ptx.cp.async_.commit_group()
            T.cuda.cta_sync()
            use(0, 1)
            use(1, 0)
            for u in T.serial(a_warp, unroll=plan.unroll):
                for z in T.unroll(4):
                    get(z, second_place(warp * a_warp + u, read_chunk(z, t, g)))
                both(V, 0, f, d, c, raw, low)
                put(V, 0, warp * a_warp + u, True)
            T.cuda.cta_sync()
            use(0, 4)
            for v in T.serial(rounds, unroll=plan.unroll):
                line = T.meta_var((warp * rounds + v) * 2)  # two of 512 groups of eight lines: (a_0, a_1, a_2)
                for h in T.unroll(2):
                    at = T.meta_var(place((line + h) // 64, (line + h) // 8 % 8, (line + h) % 8, g, t // 2) * 4 + t % 2 * 2)
                    T.ptx["ld.shared.v2.f32"](V[h * 2], V[h * 2 + 1], sm.ptr_to([at]))
                last_axis(V, f, c, raw, low)
                for h in T.unroll(2):
                    T.ptx[store](y.ptr_to([block * SIZE + (line + h) * 64 + g * 8 + t * 2]), c[h * 2], c[h * 2 + 1])
            if looped:
                T.cuda.cta_sync()

    return kernel
