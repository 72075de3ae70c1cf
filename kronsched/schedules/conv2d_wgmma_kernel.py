"""Conv2d on Hopper's warpgroup tensor cores as a TIRx program.

    x, w ─(cp.async pieces, zeros outside, `ahead` chunks in flight)─ ring in shared memory ─ wgmma, A and B from shared memory
         accumulators ─ epilogue in registers ─ y

All threads copy and multiply. wgmma works on its own while the next chunk's addresses
are computed and its copies started: at chunk k, after the barrier, every warpgroup has finished chunk k − 1 − overlap, whose
slot the copies go to.

Read first: `wgmma_program`, `_Kernel.emit`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kronsched.schedules.conv2d_epilogue import Epilogue
from kronsched.schedules.conv2d_gather import Gather, do, named
from kronsched.schedules.conv2d_tile import CHUNK, ConvTile
from kronsched.workloads.base import TensorSpec

KIND = {"int8": "s8", "float16": "f16", "bfloat16": "bf16", "float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2"}
STEP_BYTES = 32
"""Bytes along a chunk that an instruction takes."""


@dataclass(frozen=True)
class Groups:
    """Warpgroups of a block along pixels and channels, and how they work.

    overlap: chunks whose products may be unfinished.  waits: whether the kernel itself waits for the launch before it.
    """

    rows: int
    columns: int
    overlap: int
    waits: bool

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 128 * self.rows * self.columns


def instruction_columns(in_dtype: str, columns: int) -> int:
    """Columns of an instruction for so many of a warpgroup: integer products go up to 224."""
    return columns // 2 if in_dtype == "int8" and columns > 224 else columns


def wgmma_program(
    tile: ConvTile, name: str, specs: list[TensorSpec], groups: Groups, epilogue: Callable[..., Epilogue] = Epilogue
) -> Any:
    """The PrimFunc of a tile over `specs` (x and w, perhaps widened, the epilogue's, y), all flat."""
    from tvm.script.ir_builder import IRBuilder
    from tvm.tirx.script.builder import ir as I

    with IRBuilder() as builder:
        with I.prim_func():
            I.func_name(name)
            tensors = {t.name: I.arg(t.name, I.buffer((t.size,), t.dtype)) for t in specs}
            I.device_entry()
            with I.attr({"tirx.launch_bounds_min_blocks_per_sm": tile.per_sm}):
                _Kernel(tile, tensors, groups, epilogue).emit()
        return builder.get()


class _Kernel:
    """A kernel under construction."""

    def __init__(self, tile: ConvTile, tensors: dict[str, Any], groups: Groups, epilogue: Callable[..., Epilogue]) -> None:
        from tvm.script import tirx as T
        from tvm.script.ir_builder import IRBuilder
        from tvm.tirx.script.builder import ir as I

        self.tile, self.tensors, self.groups = tile, tensors, groups
        self.slabs, self.wide = tile.block_m // (64 * groups.rows), tile.block_n // groups.columns
        self.columns = instruction_columns(tile.conv.in_dtype, self.wide)
        name = IRBuilder.name
        self.cta, self.tx = name("cta", I.cta_id([tile.launched])), name("tx", I.thread_id([tile.threads]))
        self.shared = name("sm", I.alloc_buffer((tile.shared_bytes // 4,), "uint32", scope="shared.dyn", align=1024))
        base = named("base", T.cuda.cvta_generic_to_shared(self.shared.ptr_to([0])))
        integers = tile.conv.in_dtype == "int8"
        self.acc = name("acc", I.alloc_local([self.slabs * self.wide // 2], "uint32" if integers else "float32"))
        self.operand = name("operand", I.alloc_local([2], "uint64"))
        x, w = list(tensors.values())[:2]
        self.gather = Gather(tile, x, w, base, self.tx)
        self.ends = epilogue(tile, self.acc, tensors, named("t", self.tx & 3))
        kind = KIND[tile.conv.in_dtype]
        depth, wide = STEP_BYTES // tile.item, "s32" if integers else "f32"
        self.mma = f"wgmma.mma_async.sync.aligned.m64n{self.columns}k{depth}.{wide}.{kind}.{kind}"
        self.tail = () if integers else (1, 1, 0, 0) if tile.item == 2 else (1, 1)

    def emit(self) -> None:
        """The body."""
        from tvm.script import tirx as T
        from tvm.tirx.script.builder import ir as I

        tile = self.tile
        turns = (tile.grid - self.cta + tile.launched - 1) // tile.launched if tile.persistent else 1
        total = named("total", turns * tile.chunks) if tile.persistent else tile.chunks
        self.gather.start(*self._origin(0))
        self._descriptors()
        if self.groups.waits:  # until here, this launch overlaps the one before it
            do(T.ptx.griddepcontrol.wait())
            do(T.ptx.griddepcontrol.launch_dependents())
        self._prefetch()
        for i in range(tile.ahead):
            self._advance(i, total)
        with I.serial(0, total) as i:
            do(T.ptx.cp.async_.wait_group(tile.ahead - 1))
            do(T.ptx.fence.proxy.async_.shared__cta())
            do(T.cuda.cta_sync())
            chunk = named("chunk", i % tile.chunks) if tile.persistent else i
            self._multiply(chunk, i % tile.stages)
            self._advance(i + tile.ahead, total)
            do(T.ptx.wgmma.wait_group.sync.aligned(self.groups.overlap))
            if tile.persistent:
                with I.If(chunk == tile.chunks - 1), I.Then():
                    self._finish(i // tile.chunks)
        if not tile.persistent:
            self._finish(0)

    def _advance(self, i: Any, total: Any) -> None:
        """Start the copies of the i-th chunk of all of the block's tiles, if there is one; one group of copies in any case.

        They run on into the next tile while this one's results are stored.
        """
        from tvm.script import tirx as T
        from tvm.tirx.script.builder import ir as I

        tile = self.tile
        chunk = i % tile.chunks if tile.persistent else i

        def start_tile() -> None:
            self.gather.start(*self._origin(i // tile.chunks))

        def copy() -> None:
            if isinstance(i, int) and chunk == 0 and i > 0:
                start_tile()
            elif tile.persistent and not isinstance(i, int):
                with I.If(chunk == 0), I.Then():
                    start_tile()
            self.gather.load(chunk, i % tile.stages)

        if not isinstance(i, int) or tile.persistent:
            with I.If(i < total), I.Then():
                copy()
        elif i < total:
            copy()
        do(T.ptx.cp.async_.commit_group())

    def _prefetch(self) -> None:
        """Bring scale and bias of the first tile into L2 while it is computed: they are read after it."""
        from tvm.script import tirx as T
        from tvm.tirx.script.builder import ir as I

        line, last = 32, self.tile.conv.c_out - 1
        for name in ("scale", "bias"):
            if name in self.tensors:
                with I.If(self.tx < -(-self.tile.block_n // line)), I.Then():
                    at = T.min(self._origin(0)[1] + self.tx * line, last)
                    do(T.ptx["prefetch.global.L2"](self.tensors[name].ptr_to([at])))

    def _origin(self, turn: Any) -> tuple[Any, Any]:
        """First pixel and channel of the block's tile number `turn`."""
        tile, index = self.tile, self.cta + turn * self.tile.launched
        return named("m0", index // tile.tiles[1] * tile.block_m), named("n0", index % tile.tiles[1] * tile.block_n)

    def _finish(self, turn: Any) -> None:
        from tvm.script import tirx as T

        if self.groups.overlap:
            do(T.ptx.wgmma.wait_group.sync.aligned(0))
        self._store(turn)

    def _descriptors(self) -> None:
        """Operand descriptors of slot 0: this warpgroup's rows of A and of B."""
        from tvm.script import tirx as T

        tile = self.tile
        encode = T.cuda.wgmma.encode_matrix_descriptor
        a = (self.tx >> 7) // self.groups.columns * (self.slabs * 64 * CHUNK // 4)
        b = tile.a_bytes // 4 + (self.tx >> 7) % self.groups.columns * (self.wide * CHUNK // 4)
        do(encode(T.address_of(self.operand[0]), self.shared.ptr_to([a]), 1, 64, 3))
        do(encode(T.address_of(self.operand[1]), self.shared.ptr_to([b]), 1, 64, 3))

    def _multiply(self, chunk: Any, slot: Any) -> None:
        """Start the products of a chunk of a tile, which is in a slot of the ring."""
        from tvm.script import tirx as T

        tile, half = self.tile, self.columns // 2
        at = T.Cast("uint64", slot * (tile.stage_bytes // 16))
        a, b = named("a", self.operand[0] + at), named("b", self.operand[1] + at)
        do(T.ptx.wgmma.fence.sync.aligned())
        for k in range(tile.steps):
            for slab in range(self.slabs):
                for part in range(self.wide // self.columns):
                    first = (slab * (self.wide // self.columns) + part) * half
                    sums = [self.acc[first + i] for i in range(half)]
                    at_a = a + T.uint64(k * 2 + slab * (64 * CHUNK // 16))
                    at_b = b + T.uint64(k * 2 + part * (self.columns * CHUNK // 16))
                    do(T.ptx[self.mma](*sums, at_a, at_b, T.bool(True) if k else chunk > 0, *self.tail))
        do(T.ptx.wgmma.commit_group.sync.aligned())

    def _store(self, turn: Any) -> None:
        """The epilogue of all slabs."""
        tile, lane = self.tile, self.tx & 31
        m0, n0 = self._origin(turn)
        row = named(
            "row",
            m0 + (self.tx >> 7) // self.groups.columns * (64 * self.slabs) + ((self.tx >> 5) & 3) * 16 + (lane >> 2),
        )
        first = named("first", n0 + (self.tx >> 7) % self.groups.columns * self.wide)
        for group in range(self.wide // (8 * tile.group)):
            places = []
            for slab in range(self.slabs):
                for half in range(2):
                    acc = slab * self.wide // 2 + group * tile.group * 4 + 2 * half
                    places.append((row + slab * 64 + half * 8, acc))
            self.ends.store(first, group, places)
