"""The float32 chained Kron-Matmul kernel of P = 2, 4 and 8: FMA on radix-64 register groups, one launch.

A row is (A, K, B): A the first axes, 64 elements; B the last axes, 64 elements; K one axis of size P, or none.

    global ── a thread holds A at one (K, B) ── shared ── a thread holds B at one (A, K) ── shared ── K, four columns ── global
              contract the axes of A                      contract the axes of B            contract K

Each exchange is in place; a (A, K) line of 64 floats is padded by four, which keeps every access free of bank conflicts. Factors
are read from shared memory, 16 bytes for all lanes at once, for `group` sums at a time. The next rows come by cp.async into spare
shared memory; the planes of A that do not fit there come through registers during the last phase.

Read first: `chain_fma`.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,misc,valid-type,name-defined"
# ruff: noqa: SIM102 - in a tile program `and` would join a Python condition with one of the kernel

from __future__ import annotations

from typing import Any

from kronsched.schedules.kron_chain_l2 import bring
from kronsched.schedules.kron_chain_plan import PITCH, RADIX, ChainPlan

LOADS = {"nc": "ld.global.nc", "stream": "ld.global.nc.L1::no_allocate", "wide": "ld.global.nc.L2::256B"}
STORES = {"wb": "st.global", "cs": "st.global.cs"}
_COPY = "cp.async.cg.shared.global"


def chain_fma(plan: ChainPlan) -> Any:
    """The PrimFunc of P^N = 4096 or 4096 P. Parameters x, f0 … f12, y; surplus factors are unused."""
    from tvm.script import tirx as T

    p, n, m, rows, threads = plan.p, plan.n, plan.m, plan.rows, plan.threads
    blocks, grid = plan.blocks, plan.grid
    size = p**n
    lane_count = size // RADIX  # register groups of a row, one for each thread and part of the work
    repeat = plan.parts
    middle = size // RADIX**2  # P, or 1 when there is no middle axis
    axes, bits = plan.axes_a_group, p.bit_length() - 1
    line = rows * lane_count * PITCH  # floats of the exchange buffer
    staged = plan.staged_tiles  # planes of A that come through the stage
    ahead, held = plan.prefetch != "none", RADIX - staged
    group, c_group = min(plan.group, RADIX // p), min(plan.group, 4 * repeat)
    items = RADIX * 16 // lane_count  # of a thread in the last phase: 16 columns of four, 64 of A
    ragged, looped = m % rows != 0, grid < blocks
    table = line + rows * staged * lane_count
    load, store = LOADS[plan.load] + ".f32", STORES[plan.store] + ".v4.f32"

    def row_of(block: Any, row: Any) -> Any:
        return T.min(block * rows + row, m - 1) if ragged else block * rows + row

    @T.prim_func
    def kernel(
        x: T.Buffer((m * size,), "float32"),
        f0: T.Buffer((p * p,), "float32"),
        f1: T.Buffer((p * p,), "float32"),
        f2: T.Buffer((p * p,), "float32"),
        f3: T.Buffer((p * p,), "float32"),
        f4: T.Buffer((p * p,), "float32"),
        f5: T.Buffer((p * p,), "float32"),
        f6: T.Buffer((p * p,), "float32"),
        f7: T.Buffer((p * p,), "float32"),
        f8: T.Buffer((p * p,), "float32"),
        f9: T.Buffer((p * p,), "float32"),
        f10: T.Buffer((p * p,), "float32"),
        f11: T.Buffer((p * p,), "float32"),
        f12: T.Buffer((p * p,), "float32"),
        y: T.Buffer((m * size,), "float32"),
    ):
        T.device_entry()
        T.attr({"tirx.launch_bounds_min_blocks_per_sm": plan.per_sm})
        cta = T.cta_id([grid])
        tx = T.thread_id([threads])
        sm = T.alloc_buffer((plan.shared_bytes // 4,), "float32", scope="shared.dyn", align=128)
        R = T.alloc_local([RADIX * repeat], "float32")
        N = T.alloc_local([max(1, held) * repeat], "float32")
        V = T.alloc_local([4 * p * repeat], "float32")
        acc = T.alloc_local([max(group, c_group) * p], "float32")
        fv = T.alloc_local([p], "float32")
        zero = T.alloc_local([2], "uint32")

        @T.inline
        def factor(axis, F):
            for v in T.serial((p * p + threads - 1) // threads, unroll=True):
                if v * threads + tx < p * p:
                    sm[table + axis * p * p + v * threads + tx] = F[v * threads + tx]

        @T.inline
        def contract(S, at, count, stride, at_once, axis):  # S[at …]: `count` elements, the axis among them with this stride
            for h in T.serial(count // p // at_once, unroll=True):
                # Always 0, but not before the sums of the last step are there: keeps factor loads from being moved up, and their
                # registers.
                T.ptx["and.b32"](zero[1], zero[0], T.reinterpret("uint32", acc[p - 1]))
                for e in T.serial(at_once * p, unroll=True):
                    acc[e] = T.float32(0)
                for i in T.serial(p, unroll=True):
                    if p == 2:
                        T.ptx["ld.shared.v2.f32"](
                            fv[0], fv[1], sm.ptr_to([T.cast(zero[1], "int32") + table + (axis * p + i) * p])
                        )
                    else:
                        for c in T.unroll(p // 4):
                            T.ptx["ld.shared.v4.f32"](
                                fv[c * 4],
                                fv[c * 4 + 1],
                                fv[c * 4 + 2],
                                fv[c * 4 + 3],
                                sm.ptr_to([T.cast(zero[1], "int32") + table + (axis * p + i) * p + c * 4]),
                            )
                    for e in T.serial(at_once, unroll=True):
                        for q in T.serial(p, unroll=True):
                            o = T.meta_var(h * at_once + e)
                            acc[e * p + q] = acc[e * p + q] + S[at + o // stride * stride * p + o % stride + i * stride] * fv[q]
                for e in T.serial(at_once, unroll=True):
                    for q in T.serial(p, unroll=True):
                        o = T.meta_var(h * at_once + e)
                        S[at + o // stride * stride * p + o % stride + q * stride] = acc[e * p + q]

        @T.inline
        def fetch(block):  # the first planes of A, linearly, into the stage
            for part in T.serial(repeat, unroll=True):
                row = T.meta_var((part * threads + tx) // lane_count)
                me = T.meta_var((part * threads + tx) % lane_count)
                for e in T.serial(staged // 4, unroll=True):
                    at = T.meta_var((e * lane_count + me) * 4)
                    T.ptx[_COPY](
                        sm.ptr_to([line + row * (staged * lane_count) + at]),
                        x.ptr_to([row_of(block, row) * size + at]),
                        16,
                    )
            T.ptx.cp.async_.commit_group()

        @T.inline
        def fetch_rest(block):  # the others
            for part in T.serial(repeat, unroll=True):
                row = T.meta_var((part * threads + tx) // lane_count)
                me = T.meta_var((part * threads + tx) % lane_count)
                for e in T.serial(held, unroll=True):
                    T.ptx[load](
                        N[part * held + e],
                        x.ptr_to([row_of(block, row) * size + (staged + e) * lane_count + me]),
                    )

        @T.inline
        def take(part, row, me):  # a part's elements, from the stage and N
            for e in T.serial(staged, unroll=True):
                at = T.meta_var(line + row * (staged * lane_count) + e * lane_count + me)
                T.ptx["ld.shared.f32"](R[part * RADIX + e], sm.ptr_to([at]))
            for e in T.serial(held, unroll=True):
                R[part * RADIX + staged + e] = N[part * held + e]

        @T.inline
        def load_part(block, part, row, me):
            if ahead:
                take(part, row, me)
            else:
                for e in T.serial(RADIX, unroll=True):
                    at = T.meta_var(row_of(block, row) * size + e * lane_count + me)
                    T.ptx[load](R[part * RADIX + e], x.ptr_to([at]))

        @T.inline
        def phase_a(block):  # all parts are read before the first is contracted
            for part in T.unroll(repeat):
                load_part(block, part, (part * threads + tx) // lane_count, (part * threads + tx) % lane_count)
            for part in T.unroll(repeat):
                row = T.meta_var((part * threads + tx) // lane_count)
                me = T.meta_var((part * threads + tx) % lane_count)
                for axis in T.unroll(axes):
                    contract(R, part * RADIX, RADIX, 1 << (bits * (axes - 1 - axis)), group, axis)
                for e in T.serial(RADIX, unroll=True):
                    sm[((row * RADIX + e) * middle + me // RADIX) * PITCH + me % RADIX] = R[part * RADIX + e]

        @T.inline
        def phase_b():  # a line of 64 a part
            for part in T.unroll(repeat):
                for c in T.serial(16, unroll=True):
                    e = T.meta_var(part * RADIX + c * 4)
                    T.ptx["ld.shared.v4.f32"](
                        R[e], R[e + 1], R[e + 2], R[e + 3], sm.ptr_to([(part * threads + tx) * PITCH + c * 4])
                    )
            for part in T.unroll(repeat):
                for axis in T.unroll(axes):
                    contract(R, part * RADIX, RADIX, 1 << (bits * axis), group, n - 1 - axis)
                for c in T.serial(16, unroll=True):
                    e = T.meta_var(part * RADIX + c * 4)
                    T.ptx["st.shared.v4.f32"](
                        sm.ptr_to([(part * threads + tx) * PITCH + c * 4]), R[e], R[e + 1], R[e + 2], R[e + 3]
                    )

        @T.inline
        def write(at, V, o):
            T.ptx[store](y.ptr_to([at]), V[o], V[o + 1], V[o + 2], V[o + 3])

        @T.inline
        def put(row, at, V, o):
            if ragged:
                if row < m:
                    write(row * size + at, V, o)
            else:
                write(row * size + at, V, o)

        @T.inline
        def phase_c(block, v):  # four columns a part
            for part in T.serial(repeat, unroll=True):
                row = T.meta_var((part * threads + tx) // lane_count)
                item = T.meta_var(v * lane_count + (part * threads + tx) % lane_count)
                for k in T.serial(middle, unroll=True):
                    o = T.meta_var((part * middle + k) * 4)
                    T.ptx["ld.shared.v4.f32"](
                        V[o], V[o + 1], V[o + 2], V[o + 3],
                        sm.ptr_to([((row * RADIX + item // 16) * middle + k) * PITCH + item % 16 * 4]),
                    )  # fmt: skip
            if middle > 1:
                contract(V, 0, 4 * p * repeat, 4, c_group, axes)
            for part in T.serial(repeat, unroll=True):
                row = T.meta_var((part * threads + tx) // lane_count)
                item = T.meta_var(v * lane_count + (part * threads + tx) % lane_count)
                for k in T.serial(middle, unroll=True):
                    put(block * rows + row, (item // 16 * middle + k) * RADIX + item % 16 * 4, V, (part * middle + k) * 4)

        factor(0, f0)
        factor(1, f1)
        factor(2, f2)
        factor(3, f3)
        if n > 4:
            factor(4, f4)
        if n > 5:
            factor(5, f5)
        if n > 6:
            factor(6, f6)
        if n > 7:
            factor(7, f7)
            factor(8, f8)
            factor(9, f9)
            factor(10, f10)
            factor(11, f11)
        if n > 12:
            factor(12, f12)
        acc[p - 1] = T.float32(0)
        if ahead:
            fetch(cta)
            fetch_rest(cta)
        for it in T.serial((blocks - cta + grid - 1) // grid if looped else 1):
            block = T.meta_var(cta + it * grid)
            if plan.l2:
                if block + grid < blocks:
                    bring(plan, x, block + grid, tx)
            T.ptx["shr.u32"](zero[0], T.cast(it, "uint32"), T.uint32(24))
            if ahead:
                T.ptx.cp.async_.wait_group(0)
            T.cuda.cta_sync()
            phase_a(block)
            T.cuda.cta_sync()
            if ahead:
                if block + grid < blocks:
                    fetch(block + grid)
            phase_b()
            if ahead:
                if block + grid < blocks:
                    fetch_rest(block + grid)
            T.cuda.cta_sync()
            for v in T.serial(items, unroll=plan.unroll):
                phase_c(block, v)

    return kernel
