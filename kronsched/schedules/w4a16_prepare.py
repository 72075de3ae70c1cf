"""The kernel that lays x out for the warpgroup product: gathered, padded, in nibble order, swizzled, with sums for float zeros.

    xs[block of rows][chunk of 128 rows of k][what shared memory holds of it: half of the chunk, row, 64 values]

A value stands where the nibble of its row of k stands in a word: row 8 t + 4 s + 2 e + f of 32 goes to place
16 s + 8 e + 2 t + f.
The 16-byte pieces of a line of 64 values are swizzled by the row, as wgmma reads them without bank conflicts.

Read first: `prepare_kernel`.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator,misc,valid-type,name-defined,no-redef"

from typing import Any

from tvm.script import tirx as T

from kronsched.schedules.w4a16_around import wait
from kronsched.schedules.w4a16_fragments import half_to_float
from kronsched.schedules.w4a16_wgmma_plan import WgmmaPlan

THREADS = 64


def prepare_kernel(p: WgmmaPlan) -> Any:
    """The PrimFunc over x, [perm], xs (`WgmmaPlan.image`) and [x_sums]. A thread lays out 32 values of a row: 4 × 4 words."""
    w = p.workload
    m, k, dtype, ROWS = w.m, w.k, w.a_dtype, p.rows
    SEGMENTS = w.layout.k_packed // 32
    SPAN = p.span // 32
    waits, floats, whole_words = p.start != "serial", w.zero_point == "float", not w.act_order and k % 8 == 0
    count, to_float = m * SEGMENTS, half_to_float(dtype)

    @T.inline
    def kernel(x, perm, xs, x_sums):
        T.device_entry()
        cta = T.cta_id([T.ceildiv(count, THREADS)])
        tx = T.thread_id([THREADS])
        at: T.let = cta * THREADS + tx
        row: T.let = at // SEGMENTS
        segment: T.let = at % SEGMENTS
        words = T.alloc_local([16], "uint32")
        source = T.alloc_local([1 if whole_words else 32], "int32")
        halves = T.alloc_local([2], "uint16")
        total = T.alloc_local([1], "float32")
        other = T.alloc_local([1], "float32")

        @T.inline
        def read_words():
            for t in T.unroll(4):
                for j in T.unroll(4):
                    words[t * 4 + j] = T.uint32(0)
                if segment * 32 + t * 8 < k:
                    T.ptx["ld.global.v4.b32"](*[words[t * 4 + j] for j in range(4)], x.ptr_to([row, segment * 32 + t * 8]))

        @T.inline
        def find_sources():
            """The columns of x that the values come from; perm is constant, so it is read before the wait."""
            for j in T.unroll(8):
                if w.act_order:
                    T.ptx["ld.global.v4.b32"](*[source[j * 4 + q] for q in range(4)], perm.ptr_to([segment * 32 + j * 4]))
                else:
                    for q in T.unroll(4):
                        source[j * 4 + q] = segment * 32 + j * 4 + q

        @T.inline
        def read_values():
            for j in T.unroll(16):
                for f in T.unroll(2):
                    at_k = T.meta_var(source[j * 2 + f])
                    halves[f] = T.uint16(0)
                    if at_k >= 0 and at_k < k:
                        T.ptx["ld.global.b16"](halves[f], x.ptr_to([row, at_k]))
                words[j] = T.Cast("uint32", halves[0]) | (T.Cast("uint32", halves[1]) << T.uint32(16))

        if not whole_words:
            find_sources()
        if waits:
            wait()
        if at < count:
            if whole_words:
                read_words()
            else:
                read_values()
            for j in T.unroll(4):
                line = T.meta_var(segment % 4 // 2 * (ROWS * 64) + row % ROWS * 64)
                piece = T.meta_var((segment % 2 * 4 + j) ^ (row % 8))
                T.ptx["st.global.v4.b32"](
                    xs.ptr_to([row // ROWS, segment // 4, line + piece * 8]), *[words[t * 4 + j] for t in range(4)]
                )
        if floats:
            total[0] = T.float32(0)
            if at < count:
                for q in T.unroll(16):
                    total[0] = total[0] + to_float(words[q], 0) + to_float(words[q], 1)
            for step in T.unroll(SPAN.bit_length() - 1):
                T.ptx["shfl_sync.bfly.b32"](
                    other[0], total[0], T.uint32(1) << T.Cast("uint32", step), T.uint32(31), T.uint32(0xFFFFFFFF)
                )
                total[0] = total[0] + other[0]
            if at < count and segment % SPAN == 0:
                x_sums[segment // SPAN, row] = total[0]

    if w.act_order and floats:

        @T.prim_func
        def w4a16_prepare(
            x: T.Buffer((m, k), dtype),
            perm: T.Buffer((w.layout.k_packed,), "int32"),
            xs: T.Buffer(p.image, dtype),
            x_sums: T.Buffer(p.x_sums, "float32"),
        ):
            kernel(x, perm, xs, x_sums)

    elif w.act_order:

        @T.prim_func
        def w4a16_prepare(
            x: T.Buffer((m, k), dtype), perm: T.Buffer((w.layout.k_packed,), "int32"), xs: T.Buffer(p.image, dtype)
        ):
            kernel(x, perm, xs, xs)

    elif floats:

        @T.prim_func
        def w4a16_prepare(x: T.Buffer((m, k), dtype), xs: T.Buffer(p.image, dtype), x_sums: T.Buffer(p.x_sums, "float32")):
            kernel(x, x, xs, x_sums)

    else:

        @T.prim_func
        def w4a16_prepare(x: T.Buffer((m, k), dtype), xs: T.Buffer(p.image, dtype)):
            kernel(x, x, xs, xs)

    return w4a16_prepare
