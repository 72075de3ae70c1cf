"""Conv2d by TMA and wgmma as a TIRx program: one thread starts copies, warpgroups multiply, a ring of stages is between them.

    copier      w's part of the first stages; then, once the kernel before this one has ended,
                for each tile, for each trip:  wait until the stage is empty;  TMA: A (im2col) and B ─ swizzled stage
    consumers   for each tile, for each trip:  wait until the stage is full;   wgmma
                                               the stage before this one is empty: its products are done
                at the end of a tile:          split > 1: sums ─ shared memory of the cluster ─ a share of them, added up
                                               sums ─ scaled, rounded ─ y      (conv2d_tma_store.py)

The launch overlaps the one before it: weights, scale and bias are constant and may be read before that has ended; x may not.

Read first: `tma_program`, `_Kernel.emit`.
"""

from __future__ import annotations

from typing import Any

from kronsched.schedules.conv2d_gather import do, named
from kronsched.schedules.conv2d_tma_consumer import Consumer
from kronsched.schedules.conv2d_tma_maps import w_map, x_map, y_map
from kronsched.schedules.conv2d_tma_plan import REGISTERS, TmaPlan
from kronsched.schedules.gemm_dense_wgmma_mainloop import Ring

_LOAD = "cp.async.bulk.tensor.{}d.shared::cluster.global.{}.mbarrier::complete_tx::bytes"


def tma_program(plan: TmaPlan, name: str) -> Any:
    """The PrimFunc over the workload's inputs (folded ones where there are any) and y, all flat."""
    from tvm.script.ir_builder import IRBuilder
    from tvm.tirx.script.builder import ir as I

    conv = plan.conv
    with IRBuilder() as builder:
        with I.prim_func():
            I.func_name(name)
            folded = {t.name.removesuffix("_fold"): t for t in plan.fold.scratch} if plan.fold else {}
            specs = {t.name: folded.get(t.name, t) for t in (*conv.inputs, conv.output)}
            tensors = {name: I.arg(t.name, I.buffer((t.size,), t.dtype)) for name, t in specs.items()}
            maps = {"x": x_map(plan, tensors["x"]), "w": w_map(plan, tensors["w"]), "y": y_map(plan, tensors["y"])}
            I.device_entry()
            with I.attr({"tirx.launch_bounds_min_blocks_per_sm": plan.per_sm}):
                _Kernel(plan, tensors, maps).emit()
        return builder.get()


class _Kernel(Consumer):
    """A kernel under construction."""

    def __init__(self, plan: TmaPlan, tensors: dict[str, Any], maps: dict[str, Any]) -> None:
        from tvm.script.ir_builder import IRBuilder
        from tvm.tirx.script.builder import ir as I

        self.plan, self.tensors, self.maps = plan, tensors, maps
        name = IRBuilder.name
        if plan.split > 1:
            self.worker = name("worker", I.cluster_id([plan.workers]))
            self.rank = name("rank", I.cta_id_in_cluster([plan.split]))
        else:
            self.worker, self.rank = name("worker", I.cta_id([plan.blocks])), 0
        self.tx = name("tx", I.thread_id([plan.threads]))
        self.shared = name("sm", I.alloc_buffer((plan.shared_bytes,), "uint8", scope="shared.dyn", align=1024))
        self.barriers = plan.ring_bytes + plan.panels_bytes

    def emit(self) -> None:
        """The body."""
        from tvm.script import tirx as T
        from tvm.tirx.script.builder import ir as I

        plan = self.plan
        do(T.ptx.griddepcontrol.launch_dependents())  # the next launch waits for the end of this one by itself
        with I.If(self.tx == plan.consumers), I.Then():
            for stage in range(plan.stages):
                do(T.ptx.mbarrier.init.shared.b64(self._full(stage), T.uint32(1)))
                do(T.ptx.mbarrier.init.shared.b64(self._empty(stage), T.uint32(plan.consumers // 32)))
            do(T.ptx.fence.mbarrier_init.release.cluster())
            for tensor in self.maps:
                do(T.ptx["prefetch.tensormap"](T.address_of(self.maps[tensor])))
        do(T.cuda.cta_sync())
        with I.If(self.tx < plan.consumers):
            with I.Then():
                if plan.uneven:
                    do(T.ptx["setmaxnreg.inc.sync.aligned.u32"](REGISTERS[1]))
                if plan.fold:  # the launch before this one makes scale and bias
                    do(T.ptx.griddepcontrol.wait())
                self.prepare()
                if not plan.fold:
                    do(T.ptx.griddepcontrol.wait())
                self.consume()
            with I.Else():
                if plan.uneven:
                    do(T.ptx["setmaxnreg.dec.sync.aligned.u32"](REGISTERS[0]))
                with I.If(self.tx == plan.consumers):
                    with I.Then():
                        self._copy()
                    with I.Else():
                        do(T.ptx.griddepcontrol.wait())
                if plan.split > 1:
                    do(T.cuda.warp_sync())
                    self.meet()
                    self.meet()

    # -- tiles --------------------------------------------------------------------------------------

    def _tiles(self) -> Any:
        """A loop over this block's tiles."""
        from tvm.tirx.script.builder import ir as I

        plan = self.plan
        return I.serial(0, (plan.grid - self.worker + plan.workers - 1) // plan.workers if plan.persistent else 1)

    def _place(self, turn: Any) -> tuple[Any, Any]:
        """First pixel and channel of the block's tile number `turn`."""
        plan, index = self.plan, self.worker + turn * self.plan.workers
        return named("m0", index // plan.tiles[1] * plan.block_m), named("n0", index % plan.tiles[1] * plan.block_n)

    def _trips(self) -> tuple[Any, Any, int]:
        """(first trip, trips) of a tile that are this block's, and how many it has at least."""
        plan = self.plan
        if plan.trips % plan.split == 0:
            own = plan.trips // plan.split
            return self.rank * own, own, own
        first = named("first_trip", self.rank * plan.trips // plan.split)
        return first, (self.rank + 1) * plan.trips // plan.split - first, plan.trips // plan.split

    # -- shared memory ------------------------------------------------------------------------------

    def _full(self, stage: Any) -> Any:
        return self._at(self.barriers + stage * 8)

    def _empty(self, stage: Any) -> Any:
        return self._at(self.barriers + self.plan.stages * 8 + stage * 8)

    # -- copies -------------------------------------------------------------------------------------

    def _copy(self) -> None:
        """All copies of the block, by one thread."""
        from tvm.script import tirx as T
        from tvm.tirx.script.builder import ir as I

        plan = self.plan
        first, trips, least = self._trips()
        early = min(plan.stages, least)
        m0, n0 = self._place(0)
        if plan.fold:  # the launch before this one makes the weights
            do(T.ptx.griddepcontrol.wait())
        for i in range(early):
            self._expect(i)
            self._fetch_w(i, first + i, n0)
        if not plan.fold:
            do(T.ptx.griddepcontrol.wait())  # until here, this launch overlaps the one before it
        pixel = self._pixel(m0)
        for i in range(early):
            self._fetch_x(i, first + i, m0, pixel)
        ring = Ring(plan.stages, 1)  # the first wait for an empty stage returns at once
        ring.jump(early)
        with self._tiles() as turn:
            m0, n0 = self._place(turn)
            pixel = self._pixel(m0)
            done = T.Select(turn == 0, T.int32(early), T.int32(0)) if plan.persistent else early
            with I.serial(0, trips - done) as i:
                do(T.cuda.mbarrier_wait(self._empty(ring.stage), ring.phase))
                self._expect(ring.stage)
                trip = named("trip", first + done + i)
                self._fetch_w(ring.stage, trip, n0)
                self._fetch_x(ring.stage, trip, m0, pixel)
                ring.advance()

    def _expect(self, stage: Any) -> None:
        """The bytes of a stage are on their way."""
        from tvm.script import tirx as T

        do(T.ptx.mbarrier.arrive.expect_tx.shared.b64(self._full(stage), T.uint32(self.plan.stage_bytes)))

    def _fetch_w(self, stage: Any, trip: Any, n0: Any) -> None:
        from tvm.script import tirx as T

        plan = self.plan
        load, where = T.ptx[_LOAD.format(5, "tile")], T.address_of(self.maps["w"])
        for i in range(plan.depth):
            to = self._at(stage * plan.stage_bytes + i * plan.chunk_bytes + plan.a_bytes)
            k = (trip * plan.depth + i) * (plan.width // plan.item)
            do(load(to, where, k, 0, 0, 0, n0 // (8 * plan.group), self._full(stage)))

    def _pixel(self, m0: Any) -> tuple[Any, Any, Any]:
        """Where the first pixel of a tile looks in x: column, line, image."""
        plan, conv = self.plan, self.plan.conv
        if plan.pointwise:
            return 0, 0, 0
        (oh, ow), (sh, sw), (ph, pw) = conv.out_hw, conv.stride, conv.padding
        column, line = m0 % ow * sw - pw, m0 % (oh * ow) // ow * sh - ph
        return named("column", column), named("line", line), named("image", m0 // (oh * ow))

    def _fetch_x(self, stage: Any, trip: Any, m0: Any, pixel: tuple[Any, Any, Any]) -> None:
        from tvm.script import tirx as T

        plan, conv = self.plan, self.plan.conv
        where, elements = T.address_of(self.maps["x"]), plan.width // plan.item
        for i in range(plan.depth):
            to, chunk = self._at(stage * plan.stage_bytes + i * plan.chunk_bytes), trip * plan.depth + i
            if plan.pointwise:
                do(T.ptx[_LOAD.format(2, "tile")](to, where, chunk * elements, m0, self._full(stage)))
                continue
            tap, c = named("tap", chunk // plan.chunks_per_tap), chunk % plan.chunks_per_tap * elements
            right = T.Cast("uint16", tap % conv.kernel[1] * conv.dilation[1])
            below = T.Cast("uint16", tap // conv.kernel[1] * conv.dilation[0])
            do(T.ptx[_LOAD.format(4, "im2col")](to, where, c, *pixel, self._full(stage), right, below))
