"""Conv2d on the tensor cores of sm_80 and later (mma.sync) as a TIRx program.

    x, w ─(cp.async pieces, zeros outside, `ahead` chunks in flight)─ ring in shared memory ─(ldmatrix)─ fragments ─ mma
         accumulators ─ epilogue in registers ─ y

A block is block_row_warps × block_col_warps warps; a warp has warp_row_tiles × warp_col_tiles accumulator tiles of 16 × 8. An
instruction takes 32 bytes along the depth, so a chunk is four steps.

Read first: `mma_program`, `MmaKernel.emit`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kronsched.schedules.conv2d_epilogue import Epilogue
from kronsched.schedules.conv2d_gather import Gather, do, named
from kronsched.schedules.conv2d_tile import CHUNK, ConvTile
from kronsched.workloads.base import TensorSpec

MMA = {
    "int8": "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32",
    "float16": "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32",
    "bfloat16": "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32",
    "float8_e4m3fn": "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32",
    "float8_e5m2": "mma.sync.aligned.m16n8k32.row.col.f32.e5m2.e5m2.f32",
}
LDMATRIX = "ldmatrix.sync.aligned.m8n8.x{n}.shared.b16"


@dataclass(frozen=True)
class Warps:
    """Warps of a block along pixels and channels, accumulator tiles of a warp along each."""

    rows: int
    columns: int
    row_tiles: int
    column_tiles: int

    @property
    def block(self) -> tuple[int, int]:
        """Pixels × channels of a block."""
        return self.rows * self.row_tiles * 16, self.columns * self.column_tiles * 8

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 32 * self.rows * self.columns

    @property
    def sums(self) -> int:
        """Accumulators of a thread."""
        return 4 * self.row_tiles * self.column_tiles


def mma_program(tile: ConvTile, warps: Warps, name: str, specs: list[TensorSpec], kernel: type[MmaKernel] | None = None) -> Any:
    """The PrimFunc of a tile over `specs` (x and w, perhaps widened, the epilogue's, y), all flat.

    kernel: what emits the body, None for `MmaKernel`.
    """
    from tvm.script.ir_builder import IRBuilder
    from tvm.tirx.script.builder import ir as I

    with IRBuilder() as builder:
        with I.prim_func():
            I.func_name(name)
            tensors = {t.name: I.arg(t.name, I.buffer((t.size,), t.dtype)) for t in specs}
            I.device_entry()
            with I.attr({"tirx.launch_bounds_min_blocks_per_sm": tile.per_sm}):
                (kernel or MmaKernel)(tile, warps, tensors).emit()
        return builder.get()


class MmaKernel:
    """A kernel under construction. A subclass may multiply by another instruction, or end a tile in another way."""

    def __init__(self, tile: ConvTile, warps: Warps, tensors: dict[str, Any]) -> None:
        """Name the parts of the kernel and start the gather."""
        from tvm.script import tirx as T
        from tvm.script.ir_builder import IRBuilder
        from tvm.tirx.script.builder import ir as I

        self.tile, self.warps, self.tensors = tile, warps, tensors
        name = IRBuilder.name
        cta, tx = name("cta", I.cta_id([tile.grid])), name("tx", I.thread_id([tile.threads]))
        self.m0 = named("m0", cta // tile.tiles[1] * tile.block_m)
        self.n0 = named("n0", cta % tile.tiles[1] * tile.block_n)
        shared = name("sm", I.alloc_buffer((tile.shared_bytes // 4,), "uint32", scope="shared.dyn", align=1024))
        self.base = named("base", T.cuda.cvta_generic_to_shared(shared.ptr_to([0])))
        self.acc = name("acc", I.alloc_local([warps.sums], "uint32" if tile.conv.in_dtype == "int8" else "float32"))
        self.a = name("a", I.alloc_local([4 * warps.row_tiles], "uint32"))
        self.b = name("b", I.alloc_local([2 * warps.column_tiles], "uint32"))
        self.lane, warp = named("lane", tx & 31), named("warp", tx >> 5)
        self.row = named("warp_row", warp // warps.columns * (16 * warps.row_tiles))
        self.column = named("warp_column", warp % warps.columns * (8 * warps.column_tiles))
        x, w = list(tensors.values())[:2]
        self.gather = Gather(tile, x, w, self.base, tx)
        self.gather.start(self.m0, self.n0)
        self._places()

    def _places(self) -> None:
        """Where a lane's rows for ldmatrix begin, and the 16-byte place of its piece at each step."""
        lane, tile = self.lane, self.tile
        self.a_row = named("a_row", (self.row + (lane & 15)) * CHUNK)
        self.b_row = named("b_row", (self.column + ((lane >> 4) << 3) + (lane & 7)) * CHUNK + tile.a_bytes)
        self.a_place = [named(f"a_place{k}", ((2 * k + (lane >> 4)) ^ (lane & 7)) << 4) for k in range(tile.steps)]
        self.b_place = [named(f"b_place{k}", ((2 * k + ((lane >> 3) & 1)) ^ (lane & 7)) << 4) for k in range(tile.steps)]

    def emit(self) -> None:
        """The body."""
        from tvm.script import tirx as T
        from tvm.tirx.script.builder import ir as I

        tile, zero = self.tile, T.uint32(0) if self.tile.conv.in_dtype == "int8" else T.float32(0)
        for chunk in range(tile.ahead):
            if chunk < tile.chunks:
                self.gather.load(chunk, chunk)
            do(T.ptx.cp.async_.commit_group())
        for i in range(self.warps.sums):
            I.buffer_store(self.acc, zero, [i])
        with I.serial(0, tile.chunks) as chunk:
            do(T.ptx.cp.async_.wait_group(tile.ahead - 1))
            do(T.cuda.cta_sync())
            with I.If(chunk + tile.ahead < tile.chunks), I.Then():
                self.gather.load(chunk + tile.ahead, (chunk + tile.ahead) % tile.stages)
            do(T.ptx.cp.async_.commit_group())
            slot = named("stage", self.base + T.Cast("uint32", chunk % tile.stages * tile.stage_bytes))
            for step in range(tile.steps):
                self._fragments(slot, step)
                self._multiply()
        self._store()

    def _fragments(self, slot: Any, step: int) -> None:
        """Operands of one step by ldmatrix: 16 rows of A, or 8 or 16 of B, at a time."""
        from tvm.script import tirx as T

        at_a = named("at_a", slot + T.Cast("uint32", self.a_row + self.a_place[step]))
        for i in range(self.warps.row_tiles):
            into = [self.a[4 * i + r] for r in range(4)]
            do(T.ptx[LDMATRIX.format(n=4)](*into, at_a + T.uint32(i * 16 * CHUNK)))
        at_b = named("at_b", slot + T.Cast("uint32", self.b_row + self.b_place[step]))
        for j in range(0, self.warps.column_tiles, 2):
            n = min(2, self.warps.column_tiles - j)
            into = [self.b[2 * j + r] for r in range(2 * n)]
            do(T.ptx[LDMATRIX.format(n=2 * n)](*into, at_b + T.uint32(j * 8 * CHUNK)))

    def _multiply(self) -> None:
        from tvm.script import tirx as T

        mma = T.ptx[self.instruction()]
        for i in range(self.warps.row_tiles):
            for j in range(self.warps.column_tiles):
                first = 4 * (i * self.warps.column_tiles + j)
                sums = [self.acc[first + r] for r in range(4)]
                a, b = [self.a[4 * i + r] for r in range(4)], [self.b[2 * j + r] for r in range(2)]
                do(mma(*sums, *a, *b, *sums))

    def instruction(self) -> str:
        """The PTX instruction that multiplies two tiles."""
        return MMA[self.tile.conv.in_dtype]

    def epilogue(self, t: Any) -> Epilogue:
        """What turns accumulators into y. t: lane % 4."""
        return Epilogue(self.tile, self.acc, self.tensors, t)

    def _store(self) -> None:
        """The epilogue of all tiles."""
        tile, warps = self.tile, self.warps
        ends = self.epilogue(named("t", self.lane & 3))
        row = named("row", self.m0 + self.row + (self.lane >> 2))
        for group in range(warps.column_tiles // tile.group):
            places = [
                (row + i * 16 + half * 8, 4 * (i * warps.column_tiles + group * tile.group) + 2 * half)
                for i in range(warps.row_tiles)
                for half in range(2)
            ]
            ends.store(self.n0 + self.column, group, places)
