"""What a consumer warpgroup of the W4A16 kernels does with a chunk in shared memory, and the functions around such kernels.

    a stage   x (`rows` lines of 128 values of k, swizzled), words of the tiles side by side, their scales, their zeros

The products of a group are sums of exact integers times x; they are scaled in float32 when the group is done.

Read first: `product`, its `multiply`.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator,misc,valid-type,name-defined,no-redef"

from typing import Any

from tvm.script import tirx as T

from kronsched.quant.layout import TILE_K
from kronsched.schedules.w4a16_around import renamed
from kronsched.schedules.w4a16_fragments import dequantiser, half_to_float, zero_offsets
from kronsched.schedules.w4a16_wgmma_plan import COLUMN_WORDS, W_TILE, WgmmaPlan

COPY_4 = "cp.async.ca.shared.global"
LINE = 32
"""Words of a line of x in shared memory."""
DESCRIPTOR_LOW = 1 << 16
DESCRIPTOR_HIGH = (1 << 62 | 1024 // 16 << 32) >> 32
"""Of operand B, less its address: swizzle of 128 bytes, 8 lines are 1024 bytes apart; the field at bit 16 is not used then."""


def product(p: WgmmaPlan) -> Any:
    """An inline (sums, smem, x_sums, stage, slot, bm, tg, it, release, first, last) that adds the products of one chunk.

    sums: registers (sums, products of the group at work, what `carried_words` counts).  stage: word where the stage
    begins.  slot: the chunk of k.  tg: the thread among those that share x.  release: an inline (it), for when the stage of trip
    `it` has been read; None: nobody waits for that.

    With `p.pipelined`, two tiles take turns: while one's products run, the other's sums are scaled and its next operands made:
    64 µs after 69.5 with 64 rows and 16384² weights on an H200.
    first, last: of the chunks that follow one another so; between them nothing is waited for. (Over the end of a loop that does
    not do: ptxas then waits for every product.)
    """
    w = p.workload
    TILES, ROWS = p.tiles, p.rows
    PARTS, STEPS = TILE_K // p.span, p.span // 16
    BATCH, COLUMNS = p.batch, TILES * PARTS
    BATCHES = STEPS // BATCH  # of a tile and group
    SUMS = ROWS // 2  # of a tile, a thread
    zeros, floats = w.zero_point == "asymmetric", w.zero_point == "float"
    dequantise, offsets_of, to_float = dequantiser(w.a_dtype, zeros), zero_offsets(w.a_dtype), half_to_float(w.a_dtype)
    kind = "f16" if w.a_dtype == "float16" else "bf16"
    mma = f"wgmma.mma_async.sync.aligned.m64n{ROWS}k16.f32.{kind}.{kind}"
    W_AT, S_AT, Z_AT = p.w_at, p.s_at, p.z_at
    releases = p.producers > 0

    @T.inline
    def scale_unit(acc, part, i, word, z, row_sums):
        """Add scale · part of a tile to acc, or scale · (part - (zero - 8) · Σ x). word, z: scales and zeros of its columns."""
        for q in T.unroll(SUMS):
            at = T.meta_var(i * SUMS + q)
            scale = T.meta_var(to_float(word, q % 4 // 2))
            if floats:
                zero = T.meta_var(T.Select(q % 4 // 2 == 0, z[0], z[1]) - T.float32(8))
                acc[at] = acc[at] + (part[at] - zero * row_sums[q // 4 * 2 + q % 2]) * scale
            else:
                acc[at] = acc[at] + part[at] * scale

    @T.inline
    def multiply(sums, smem, x_sums, stage, slot, bm, tg, it, release, first=True, last=True):
        wn: T.let = tg // 128
        warp: T.let = tg % 128 // 32
        lane: T.let = tg % 32
        base: T.let = T.cuda.cvta_generic_to_shared(smem.ptr_to([stage])) // T.uint32(16) + T.uint32(DESCRIPTOR_LOW)
        acc, part, carry = T.meta_var(sums[0]), T.meta_var(sums[1]), T.meta_var(sums[2])
        scales = T.alloc_local([COLUMNS], "uint32")
        zr = T.alloc_local([COLUMNS if zeros else 1], "uint32")
        zf = T.alloc_local([2 * COLUMNS if floats else 1], "float32")
        row_sums = T.alloc_local([SUMS // 2 if floats else 1], "float32")
        offsets = T.alloc_local([2], "uint32")
        words = T.alloc_local([8 * TILES], "uint32")
        a = T.alloc_local([2 * 4 * BATCH], "uint32")
        shifted = T.alloc_local([1], "uint32")

        @T.inline
        def read_words():
            for i in T.unroll(TILES):
                for half in T.unroll(2):
                    T.ptx["ld.shared.v4.b32"](
                        *[words[i * 8 + half * 4 + q] for q in range(4)],
                        smem.ptr_to([stage + W_AT + (wn * TILES + i) * (W_TILE // 4) + warp * 256 + half * 128 + lane * 4]),
                    )

        @T.inline
        def read_columns():
            """Scales and zeros of columns g and g + 8 of the warp's strip, for each group and tile."""
            for group in T.unroll(PARTS):
                for i in T.unroll(TILES):
                    column = T.meta_var(group * TILES + i)
                    at: T.let = ((wn * TILES + i) * PARTS + group) * COLUMN_WORDS + lane // 4 * 4 + warp
                    T.ptx["ld.shared.b32"](scales[column], smem.ptr_to([stage + S_AT + at]))
                    if zeros:
                        T.ptx["ld.shared.b32"](zr[column], smem.ptr_to([stage + Z_AT + at]))
                    if floats:
                        T.ptx["ld.shared.v2.f32"](zf[2 * column], zf[2 * column + 1], smem.ptr_to([stage + Z_AT + at * 2]))

        @T.inline
        def multiply_steps(i, group, batch):
            """Dequantise the A operands of the steps of a batch, then issue their products into part; two batches take turns."""
            turn = T.meta_var(((group * TILES + i) * BATCHES + batch) % 2 if p.pipelined else (i * BATCHES + batch) % 2)
            if not p.pipelined and i * BATCHES + batch >= 2:
                T.ptx.wgmma.wait_group.sync.aligned(1)
            if zeros:
                offsets_of(offsets, 0, zr[group * TILES + i])
            for step in T.unroll(BATCH):
                nth = T.meta_var(group * STEPS + batch * BATCH + step)
                dequantise(a, (turn * BATCH + step) * 4, words[i * 8 + nth], shifted, offsets, 0)
            T.ptx.wgmma.fence.sync.aligned()
            for step in T.unroll(BATCH):
                nth = T.meta_var(group * STEPS + batch * BATCH + step)
                low = T.meta_var(base + T.Cast("uint32", nth // 4 * (ROWS * LINE // 4) + nth % 4 * 2))
                T.ptx[mma](
                    *[part[i * SUMS + q] for q in range(SUMS)],
                    *[a[(turn * BATCH + step) * 4 + q] for q in range(4)],
                    T.Cast("uint64", low) | T.uint64(DESCRIPTOR_HIGH << 32), T.bool(batch * BATCH + step > 0), 1, 1, 0,
                )  # fmt: skip
            T.ptx.wgmma.commit_group.sync.aligned()

        @T.inline
        def load_sums(group):
            """Σ x over a group's rows in the chunk, for the rows of y that this thread holds: 8 j + 2 t and the next one."""
            for j in T.unroll(ROWS // 8):
                source = T.meta_var([slot * PARTS + group, bm * ROWS + j * 8 + lane % 4 * 2])
                T.ptx["ld.global.v2.f32"](row_sums[2 * j], row_sums[2 * j + 1], x_sums.ptr_to(source))

        @T.inline
        def scale_nth(unit):
            """Add the products of a unit, a tile and group, to acc."""
            z = T.meta_var([zf[2 * unit + c] if floats else 0 for c in range(2)])
            scale_unit(acc, part, unit % TILES, scales[unit], z, row_sums)

        @T.inline
        def scale_carried():
            """Add the products of the last unit of the chunk before."""
            if floats:
                for j in T.unroll(SUMS // 2):
                    row_sums[j] = T.reinterpret("float32", carry[3 + j])
            z = T.meta_var([T.reinterpret("float32", carry[1 + c]) if floats else 0 for c in range(2)])
            scale_unit(acc, part, TILES - 1, carry[0], z, row_sums)

        @T.inline
        def all_at_once():
            for group in T.unroll(PARTS):
                if floats:
                    load_sums(group)
                for i in T.unroll(TILES):
                    for batch in T.unroll(BATCHES):
                        multiply_steps(i, group, batch)
                T.ptx.wgmma.wait_group.sync.aligned(0)
                if releases and group == PARTS - 1:
                    release(it)
                for i in T.unroll(TILES):
                    scale_nth(group * TILES + i)

        @T.inline
        def in_turns():
            for group in T.unroll(PARTS):
                for i in T.unroll(TILES):
                    for batch in T.unroll(BATCHES):
                        unit = T.meta_var(group * TILES + i)
                        multiply_steps(i, group, batch)
                        if not (first and unit + batch == 0):
                            T.ptx.wgmma.wait_group.sync.aligned(1)
                        if batch == 0 and unit > 0:
                            scale_nth(unit - 1)
                        if batch + unit == 0 and not first:
                            scale_carried()
                            release(it - 1)
                        if floats and batch == 0 and i == 0:
                            load_sums(group)
            if last:
                T.ptx.wgmma.wait_group.sync.aligned(0)
                release(it)
                scale_nth(COLUMNS - 1)
            else:
                carry[0] = scales[COLUMNS - 1]
                if floats:
                    for c in T.unroll(2):
                        carry[1 + c] = T.reinterpret("uint32", zf[2 * COLUMNS - 2 + c])
                    for j in T.unroll(SUMS // 2):
                        carry[3 + j] = T.reinterpret("uint32", row_sums[j])

        read_words()
        read_columns()
        if p.pipelined:
            in_turns()
        else:
            all_at_once()

    return multiply


def carried_words(p: WgmmaPlan) -> int:
    """Registers for what the last unit of a chunk needs in the next one: scales; with float zeros also these and sums of x."""
    return 3 + p.rows // 4 if p.workload.zero_point == "float" else 1


def x_copier(p: WgmmaPlan) -> Any:
    """An inline (to, x, row, k, whole) that copies two values of x, from column k on, to shared memory.

    Beyond the end of k come zeros, unless the chunk is `whole`. Rows of y that are not written may come from anything, so rows
    of x beyond m are not copied.
    """
    m, K = p.workload.m, p.workload.k

    @T.inline
    def copy(to, x, row, k, whole):
        if whole:
            T.ptx[COPY_4](to, x.ptr_to([row, k]), 4)
        else:
            T.ptx[COPY_4](to, x.ptr_to([row, T.Select(k < K, k, 0)]), 4, T.Select(k < K, T.uint32(4), T.uint32(0)))

    @T.inline
    def copy_inside(to, x, row, k, whole):
        if m % p.rows == 0:
            copy(to, x, row, k, whole)
        else:
            if row < m:
                copy(to, x, row, k, whole)

    return copy_inside


def where_whole(p: WgmmaPlan) -> Any:
    """An inline (slot, run) that runs an inline (whole): only a chunk of k that is not whole pays for the end of k."""
    K = p.workload.k

    @T.inline
    def choose(slot, run):
        if K % TILE_K == 0:
            run(True)
        else:
            if (slot + 1) * TILE_K <= K:
                run(True)
            else:
                run(False)

    return choose


def ring_of(p: WgmmaPlan, tx: Any) -> Any:
    """The ring that a thread works on, known to be the same in all lanes of a warp."""
    if p.groups_k == 1:
        return 0
    mine = tx // p.sharers
    if p.producers:
        mine = T.Select(tx < p.consumers, mine, (tx - p.consumers) // (p.producers // p.groups_k))
    return T.cuda.__shfl_sync(T.uint32(0xFFFFFFFF), mine, 0, 32)


def main_function(p: WgmmaPlan, kernel: Any) -> Any:
    """The PrimFunc of a kernel, an inline (x, w, s, z, x_sums, y), with the parameters that the kind of zero points needs."""
    w, layout, dtype = p.workload, p.workload.layout, p.workload.a_dtype
    x_shape = p.image if p.prepared else (w.m, w.k)
    y_shape, y_dtype = (p.split_k * w.m, w.n), ("float32" if p.split_k > 1 else dtype)

    if w.zero_point == "float":

        @T.prim_func
        def w4a16_wgmma(
            x: T.Buffer(x_shape, dtype),
            w: T.Buffer(layout.words, "int32"),
            s: T.Buffer(layout.columns, dtype),
            z: T.Buffer(layout.columns, "float32"),
            x_sums: T.Buffer(p.x_sums, "float32"),
            y: T.Buffer(y_shape, y_dtype),
        ):
            kernel(x, w, s, z, x_sums, y)

    elif w.zero_point == "asymmetric":

        @T.prim_func
        def w4a16_wgmma(
            x: T.Buffer(x_shape, dtype),
            w: T.Buffer(layout.words, "int32"),
            s: T.Buffer(layout.columns, dtype),
            z: T.Buffer(layout.columns, dtype),
            y: T.Buffer(y_shape, y_dtype),
        ):
            kernel(x, w, s, z, s, y)

    else:

        @T.prim_func
        def w4a16_wgmma(
            x: T.Buffer(x_shape, dtype),
            w: T.Buffer(layout.words, "int32"),
            s: T.Buffer(layout.columns, dtype),
            y: T.Buffer(y_shape, y_dtype),
        ):
            kernel(x, w, s, s, s, y)

    return renamed(w4a16_wgmma, {"x": "xs"} if p.prepared else {}, {"y": "p"} if p.split_k > 1 else {})
