"""What warpgroups do in Conv2d by TMA: stages of the ring ─ wgmma ─ sums; with split > 1, sums ─ cluster ─ a share of them.

Read first: `Consumer.consume`.
"""

from __future__ import annotations

from typing import Any

from kronsched.schedules.conv2d_gather import do, named
from kronsched.schedules.conv2d_tma_maps import SWIZZLE
from kronsched.schedules.conv2d_tma_plan import TmaPlan
from kronsched.schedules.conv2d_tma_store import TmaStore
from kronsched.schedules.conv2d_wgmma_kernel import KIND, STEP_BYTES
from kronsched.schedules.gemm_dense_wgmma_mainloop import Ring


class Consumer:
    """The part of a kernel that multiplies; the kernel that inherits it sets the attributes and places tiles and barriers.

    tx: thread of the block.  rank: of the block in its cluster.  shared: buffer of shared memory, bytes.
    """

    plan: TmaPlan
    tensors: dict[str, Any]
    maps: dict[str, Any]
    tx: Any
    rank: Any
    shared: Any

    def _at(self, offset: Any) -> Any:
        return self.shared.ptr_to([offset])

    def _full(self, stage: Any) -> Any:
        raise NotImplementedError

    def _empty(self, stage: Any) -> Any:
        raise NotImplementedError

    def _tiles(self) -> Any:
        raise NotImplementedError

    def _place(self, turn: Any) -> tuple[Any, Any]:
        raise NotImplementedError

    def _trips(self) -> tuple[Any, Any, int]:
        raise NotImplementedError

    # -- products -----------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Registers and descriptors of a consumer; scale and bias of its first tile on their way."""
        from tvm.script.ir_builder import IRBuilder
        from tvm.tirx.script.builder import ir as I

        plan, name = self.plan, IRBuilder.name
        integers = plan.conv.in_dtype == "int8"
        kind, depth, wide = KIND[plan.conv.in_dtype], STEP_BYTES // plan.item, "s32" if integers else "f32"
        self.mma = f"wgmma.mma_async.sync.aligned.m64n{plan.mma_n}k{depth}.{wide}.{kind}.{kind}"
        self.tail = () if integers else (1, 1, 0, 0) if plan.item == 2 else (1, 1)
        self.sums = name("sums", I.alloc_local([plan.sums], "uint32" if integers else "float32"))
        self.row_group = named("row_group", (self.tx >> 7) // plan.col_groups)
        self.col_group = named("col_group", (self.tx >> 7) % plan.col_groups)
        self._describe()
        self.store = TmaStore(plan, self.sums, self.tensors, self.maps["y"], self.shared, plan.ring_bytes, self.tx)
        if plan.early:
            self.store.read_columns(self._corner(*self._place(0))[1])
        else:
            self._prefetch()

    def consume(self) -> None:
        """All tiles of the block."""
        plan, store, ring = self.plan, self.store, Ring(self.plan.stages, 0)
        _, trips, _ = self._trips()
        with self._tiles() as turn:
            corner = self._corner(*self._place(turn))
            self._multiply_all(ring, trips)
            if plan.split > 1:
                self._share()
            store.emit(*corner)
        store.finish()
        if plan.split > 1:  # others may still read this block's sums
            self.meet("wait")

    def _prefetch(self) -> None:
        """Bring scale and bias of the first tile into L2 while it is computed: they are read after it."""
        from tvm.script import tirx as T
        from tvm.tirx.script.builder import ir as I

        line, last = 32, self.plan.conv.c_out - 1
        for name in ("scale", "bias"):
            if name in self.tensors:
                with I.If(self.tx < -(-self.plan.block_n // line)), I.Then():
                    at = T.min(self._place(0)[1] + self.tx * line, last)
                    do(T.ptx["prefetch.global.L2"](self.tensors[name].ptr_to([at])))

    def _corner(self, m0: Any, n0: Any) -> tuple[Any, Any]:
        """First pixel and channel that this warpgroup stores of a tile."""
        plan = self.plan
        row = named("row", m0 + self.row_group * (64 * plan.slabs))
        return row, named("column", n0 + self.col_group * plan.wide + self.rank * plan.stored)

    def _describe(self) -> None:
        """Operand descriptors of stage 0: this warpgroup's rows of A and of B."""
        from tvm.script import tirx as T
        from tvm.script.ir_builder import IRBuilder
        from tvm.tirx.script.builder import ir as I

        plan = self.plan
        self.operands = IRBuilder.name("operands", I.alloc_local([2], "uint64"))
        a = self.row_group * (plan.slabs * 64 * plan.width)
        b = plan.a_bytes + self.col_group * (plan.wide * plan.width)
        for i, offset in enumerate((a, b)):
            encode, to = T.cuda.wgmma.encode_matrix_descriptor, T.address_of(self.operands[i])
            do(encode(to, self._at(offset), 1, plan.width // 2, SWIZZLE[plan.width]))

    def _multiply_all(self, ring: Ring, trips: Any) -> None:
        """The products of a tile; one trip's stay in flight while the next is waited for."""
        from tvm.script import tirx as T
        from tvm.script.ir_builder import IRBuilder
        from tvm.tirx.script.builder import ir as I

        previous = IRBuilder.name("previous", I.alloc_local([1], "int32"))
        I.buffer_store(previous, -1, [0])
        with I.serial(0, trips) as trip:
            do(T.cuda.mbarrier_wait(self._full(ring.stage), ring.phase))
            do(T.ptx.wgmma.fence.sync.aligned())
            self._multiply(ring.stage, trip > 0)
            do(T.ptx.wgmma.commit_group.sync.aligned())
            do(T.ptx.wgmma.wait_group.sync.aligned(1))
            with I.If(previous[0] >= 0), I.Then():
                self._release(previous[0])
            I.buffer_store(previous, ring.stage, [0])
            ring.advance()
        do(T.ptx.wgmma.wait_group.sync.aligned(0))
        self._release(previous[0])

    def _multiply(self, stage: Any, onto: Any) -> None:
        """Start the products of a stage."""
        from tvm.script import tirx as T

        plan, half = self.plan, self.plan.mma_n // 2
        parts, at = plan.wide // plan.mma_n, T.Cast("uint64", stage * (plan.stage_bytes // 16))
        for chunk in range(plan.depth):
            for step in range(plan.width // STEP_BYTES):
                offset = (chunk * plan.chunk_bytes + step * STEP_BYTES) // 16
                for slab in range(plan.slabs):
                    for part in range(parts):
                        first = (slab * parts + part) * half
                        a = self.operands[0] + at + T.uint64(offset + slab * (64 * plan.width // 16))
                        b = self.operands[1] + at + T.uint64(offset + part * (plan.mma_n * plan.width // 16))
                        sums = [self.sums[first + i] for i in range(half)]
                        do(T.ptx[self.mma](*sums, a, b, T.bool(True) if chunk or step else onto, *self.tail))

    def _release(self, stage: Any) -> None:
        """Say that this warp has read a stage."""
        from tvm.script import tirx as T
        from tvm.tirx.script.builder import ir as I

        with I.If(self.tx % 32 == 0), I.Then():
            do(T.ptx.mbarrier.arrive.shared.b64(self._empty(stage), T.uint32(1)))

    # -- split sums ---------------------------------------------------------------------------------

    def meet(self, *actions: str) -> None:
        """A barrier of the cluster, or one half of it."""
        from tvm.script import tirx as T

        for action in actions or ("arrive", "wait"):
            do(T.ptx[f"barrier.cluster.{action}"]())

    def _share(self) -> None:
        """Add up what all blocks of the cluster have in the columns that this one stores: into the first sums of each slab."""
        from tvm.script import tirx as T
        from tvm.script.ir_builder import IRBuilder
        from tvm.tirx.script.builder import ir as I

        plan, name = self.plan, IRBuilder.name
        line = plan.consumers * 16  # bytes of 4 sums of all threads
        do(T.ptx.bar.sync(T.uint32(1), T.uint32(plan.consumers)))  # all products have read their stages
        for i in range(0, plan.sums, 4):
            words = [T.reinterpret("uint32", self.sums[i + e]) for e in range(4)]
            do(T.ptx["st.shared.v4.b32"](self._at(i // 4 * line + self.tx * 16), *words))
        self.meet()
        per_slab, share = plan.wide // 8, plan.stored // 8  # quads of sums
        mine = named("mine", T.cuda.cvta_generic_to_shared(self._at(self.tx * 16)) + T.Cast("uint32", self.rank * share * line))
        remote, read = name("remote", I.alloc_local([plan.split], "uint32")), name("read", I.alloc_local([4], "uint32"))
        for block in range(plan.split):
            do(T.ptx.mapa.shared__cluster.u32(remote[block], mine, T.uint32(block)))
        kind = str(self.sums.dtype)
        for slab in range(plan.slabs):
            for quad in range(share):
                for block in range(plan.split):
                    at = remote[block] + T.uint32((slab * per_slab + quad) * line)
                    do(T.ptx["ld.shared::cluster.v4.b32"](*(read[e] for e in range(4)), at))
                    for e in range(4):
                        to, value = (slab * share + quad) * 4 + e, T.reinterpret(kind, read[e])
                        I.buffer_store(self.sums, self.sums[to] + value if block else value, [to])
        self.meet("arrive")
