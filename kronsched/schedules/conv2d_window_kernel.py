"""Conv2d by windows of x as a TIRx program: one thread starts copies, warpgroups multiply weights by windows, a ring between.

    copier      w of the block's channels; then, once the kernel before this one has ended,
                for each tile:  wait until a stage is empty;  TMA (im2col): a window of x ─ swizzled stage
    consumers   scale and bias; for each tile:  wait until the stage is full (and it is the warpgroup's turn)
                for each tap:   wgmma of its weights and the window from the tap's row on ─ sums
                the stage is empty; sums ─ scaled, rounded, transposed ─ y      (conv2d_window_store.py)

A row of a swizzled window is where its address says, so an operand may begin at any row of it.

Read first: `window_program`, `_Kernel.emit`.
"""

from __future__ import annotations

from typing import Any

from kronsched.schedules.conv2d_gather import do, named
from kronsched.schedules.conv2d_tma_maps import SWIZZLE, tensor_map
from kronsched.schedules.conv2d_wgmma_kernel import KIND, STEP_BYTES
from kronsched.schedules.conv2d_window_plan import CHANNELS, WindowPlan
from kronsched.schedules.conv2d_window_store import WindowStore
from kronsched.schedules.gemm_dense_wgmma_mainloop import Ring

_LOAD = "cp.async.bulk.tensor.4d.shared::cluster.global.{}.mbarrier::complete_tx::bytes"


def window_program(plan: WindowPlan, name: str) -> Any:
    """The PrimFunc over the workload's inputs and y, all flat."""
    from tvm.script.ir_builder import IRBuilder
    from tvm.tirx.script.builder import ir as I

    conv = plan.conv
    with IRBuilder() as builder:
        with I.prim_func():
            I.func_name(name)
            folded = {t.name.removesuffix("_fold"): t for t in plan.fold.scratch} if plan.fold else {}
            specs = {t.name: folded.get(t.name, t) for t in (*conv.inputs, conv.output)}
            tensors = {name: I.arg(t.name, I.buffer((t.size,), t.dtype)) for name, t in specs.items()}
            maps = {"x": x_map(plan, tensors["x"]), "w": w_map(plan, tensors["w"])}
            I.device_entry()
            with I.attr({"tirx.launch_bounds_min_blocks_per_sm": plan.per_sm}):
                _Kernel(plan, tensors, maps).emit()
        return builder.get()


def x_map(plan: WindowPlan, x: Any) -> Any:
    """A box: `piece` bytes of channels of a window's pixels; lines and images end with the padding before the next."""
    from kronsched.runtime.tensor_map import ENCODE_IM2COL

    conv, (ph, pw), row = plan.conv, plan.conv.padding, plan.pixel_bytes
    extents, strides, step = (conv.c_in, conv.w, conv.h, conv.n), (row, row * conv.w, row * conv.w * conv.h), conv.stride[0]
    below = (plan.lines - 1) * step - ph - (conv.h - 1)
    return tensor_map(ENCODE_IM2COL, "x", conv.in_dtype, x, 4, *extents, *strides, -pw, -ph, 0, below, plan.piece // plan.item,
                      plan.rows, 1, 1, step, 1, 0, SWIZZLE.get(plan.piece, 0), 2, 0)  # fmt: skip


def w_map(plan: WindowPlan, w: Any) -> Any:
    """A box: `width` bytes of the weights, in the order of channels that `WindowStore.channel` says."""
    from kronsched.runtime.tensor_map import ENCODE

    conv, depth, group = plan.conv, plan.conv.depth * plan.item, plan.group
    extents = (conv.depth, 8, 2, conv.c_out // 16)
    strides = (group * depth, (1 if group == 2 else 8) * depth, 16 * depth)
    box = (plan.width // plan.item, 8, 2, CHANNELS // 16)
    return tensor_map(ENCODE, "w", conv.in_dtype, w, 4, *extents, *strides, *box, 1, 1, 1, 1, 0, SWIZZLE[plan.width], 2, 0)


class _Kernel:
    """A kernel under construction."""

    def __init__(self, plan: WindowPlan, tensors: dict[str, Any], maps: dict[str, Any]) -> None:
        from tvm.script.ir_builder import IRBuilder
        from tvm.tirx.script.builder import ir as I

        self.plan, self.tensors, self.maps = plan, tensors, maps
        name = IRBuilder.name
        self.cta, self.tx = name("cta", I.cta_id([plan.blocks])), name("tx", I.thread_id([plan.threads]))
        self.shared = name("sm", I.alloc_buffer((plan.shared_bytes,), "uint8", scope="shared.dyn", align=1024))
        self.n0 = named("n0", self.cta % plan.tiles[1] * CHANNELS)
        self.worker = named("worker", self.cta // plan.tiles[1])

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
            for group in range(plan.groups if plan.in_turn else 0):
                do(T.ptx.mbarrier.init.shared.b64(self._turn(group), T.uint32(4)))
            do(T.ptx.mbarrier.init.shared.b64(self._ready(), T.uint32(1)))
            do(T.ptx.fence.mbarrier_init.release.cluster())
            for tensor in self.maps:
                do(T.ptx["prefetch.tensormap"](T.address_of(self.maps[tensor])))
        do(T.cuda.cta_sync())
        with I.If(self.tx < plan.consumers):
            with I.Then():
                self._consume()
            with I.Else(), I.If(self.tx == plan.consumers):
                with I.Then():
                    self._copy()
                with I.Else():
                    do(T.ptx.griddepcontrol.wait())

    def _tiles(self) -> Any:
        """A loop over this block's tiles."""
        from tvm.tirx.script.builder import ir as I

        plan = self.plan
        return I.serial(0, (plan.tiles[0] - self.worker + plan.workers - 1) // plan.workers if plan.turns > 1 else 1)

    def _position(self, turn: Any) -> Any:
        """First position of the block's tile number `turn`."""
        return named("position", (self.worker + turn * self.plan.workers) * self.plan.tile)

    # -- shared memory ------------------------------------------------------------------------------

    def _at(self, offset: Any) -> Any:
        return self.shared.ptr_to([offset])

    def _full(self, stage: Any) -> Any:
        return self._at(self.plan.barriers + stage * 8)

    def _empty(self, stage: Any) -> Any:
        return self._at(self.plan.barriers + self.plan.stages * 8 + stage * 8)

    def _ready(self) -> Any:
        return self._at(self.plan.barriers + self.plan.stages * 16)

    def _turn(self, group: Any) -> Any:
        return self._at(self.plan.barriers + self.plan.stages * 16 + 8 + group * 8)

    # -- copies -------------------------------------------------------------------------------------

    def _copy(self) -> None:
        """All copies of the block, by one thread."""
        from tvm.script import tirx as T

        plan = self.plan
        if plan.fold:  # the launch before this one makes the weights
            do(T.ptx.griddepcontrol.wait())
        self._fetch_w()
        if not plan.fold:
            do(T.ptx.griddepcontrol.wait())  # until here, this launch overlaps the one before it
        ring = Ring(plan.stages, 1)  # the first wait for an empty stage returns at once
        with self._tiles() as turn:
            do(T.cuda.mbarrier_wait(self._empty(ring.stage), ring.phase))
            do(T.ptx.mbarrier.arrive.expect_tx.shared.b64(self._full(ring.stage), T.uint32(plan.copied)))
            self._fetch_x(ring.stage, self._position(turn))
            ring.advance()

    def _fetch_w(self) -> None:
        """Start the copies of the block's weights."""
        from tvm.script import tirx as T

        plan = self.plan
        load, where = T.ptx[_LOAD.format("tile")], T.address_of(self.maps["w"])
        do(T.ptx.mbarrier.arrive.expect_tx.shared.b64(self._ready(), T.uint32(plan.weights_bytes)))
        for i in range(plan.depth_bytes // plan.width):
            to, k = self._at(i * CHANNELS * plan.width), i * (plan.width // plan.item)
            do(load(to, where, k, 0, 0, self.n0 // 16, self._ready()))

    def _fetch_x(self, stage: Any, position: Any) -> None:
        """Start the copies of a window."""
        from tvm.script import tirx as T

        plan, (ph, pw) = self.plan, self.plan.conv.padding
        column = named("column", position % plan.pitch - pw)
        line = named("line", position // plan.pitch % plan.lines * plan.conv.stride[0] - ph)
        image = named("image", position // (plan.pitch * plan.lines))
        load, where = T.ptx[_LOAD.format("im2col")], T.address_of(self.maps["x"])
        for i, phase in enumerate(plan.phases):
            for plane in range(plan.planes):
                to = self._at(plan.ring + stage * plan.stage_bytes + (i * plan.planes + plane) * plan.plane_bytes)
                c = plane * (plan.piece // plan.item)
                do(load(to, where, c, column, line, image, self._full(stage), T.uint16(0), T.uint16(phase)))

    # -- products -----------------------------------------------------------------------------------

    def _consume(self) -> None:
        """All tiles of the block, by a warpgroup."""
        from tvm.script import tirx as T
        from tvm.script.ir_builder import IRBuilder
        from tvm.tirx.script.builder import ir as I

        plan, name = self.plan, IRBuilder.name
        integers = plan.conv.in_dtype == "int8"
        kind, depth, wide = KIND[plan.conv.in_dtype], STEP_BYTES // plan.item, "s32" if integers else "f32"
        self.mma = f"wgmma.mma_async.sync.aligned.m64n{plan.columns}k{depth}.{wide}.{kind}.{kind}"
        self.tail = () if integers else (1, 1, 0, 0) if plan.item == 2 else (1, 1)
        self.sums = name("sums", I.alloc_local([plan.sums], "uint32" if integers else "float32"))
        group = named("group", self.tx >> 7)
        self._describe(group)
        store = WindowStore(plan, self.sums, self.tensors, self.shared, plan.panels + group * plan.panel_bytes, self.tx)
        if plan.fold:  # the launch before this one makes scale and bias
            do(T.ptx.griddepcontrol.wait())
        store.read_channels(self.n0)
        if not plan.fold:
            do(T.ptx.griddepcontrol.wait())
        do(T.cuda.mbarrier_wait(self._ready(), 0))
        ring = Ring(plan.stages, 0)
        with self._tiles() as turn:
            do(T.cuda.mbarrier_wait(self._full(ring.stage), ring.phase))
            if plan.in_turn:  # the first group's first turn comes at once
                do(T.cuda.mbarrier_wait(self._turn(group), (turn + T.Select(group == 0, T.int32(1), T.int32(0))) % 2))
            self._multiply(ring.stage)
            if plan.in_turn:
                self._arrive(self._turn((group + 1) % plan.groups))
            do(T.ptx.wgmma.wait_group.sync.aligned(0))
            self._arrive(self._empty(ring.stage))
            ring.advance()
            store.emit(self._position(turn) + group * plan.pixels, self.n0, T.Cast("uint32", group) + T.uint32(1))

    def _arrive(self, barrier: Any) -> None:
        """A warp's arrival."""
        from tvm.script import tirx as T
        from tvm.tirx.script.builder import ir as I

        with I.If(self.tx % 32 == 0), I.Then():
            do(T.ptx.mbarrier.arrive.shared.b64(barrier, T.uint32(1)))

    def _describe(self, group: Any) -> None:
        """Operand descriptors: the weights, and this warpgroup's positions in the window of stage 0."""
        from tvm.script import tirx as T
        from tvm.script.ir_builder import IRBuilder
        from tvm.tirx.script.builder import ir as I

        plan = self.plan
        self.operands = IRBuilder.name("operands", I.alloc_local([2], "uint64"))
        encode, weights, window = T.cuda.wgmma.encode_matrix_descriptor, self.operands[0], self.operands[1]
        do(encode(T.address_of(weights), self._at(0), 1, plan.width // 2, SWIZZLE[plan.width]))
        at = self._at(plan.ring + group * (plan.pixels * plan.piece))
        # Without a swizzle, the next 16 bytes of terms are those of the next pixel: 1 unit away.
        do(encode(T.address_of(window), at, 1, plan.piece // 2, SWIZZLE.get(plan.piece, 0)))

    def _multiply(self, stage: Any) -> None:
        """Start the products of all taps with a window."""
        from tvm.script import tirx as T

        plan, half = self.plan, self.plan.columns // 2
        at = named("window", self.operands[1] + T.Cast("uint64", stage * (plan.stage_bytes // 16)))
        do(T.ptx.wgmma.fence.sync.aligned())
        for i, (weights, window) in enumerate(plan.steps(STEP_BYTES)):
            for part in range(plan.pixels // plan.columns):
                sums = [self.sums[part * half + e] for e in range(half)]
                a = self.operands[0] + T.uint64(weights // 16)
                b = at + T.uint64((window + part * plan.columns * plan.piece) // 16)
                do(T.ptx[self.mma](*sums, a, b, T.bool(i > 0), *self.tail))
        do(T.ptx.wgmma.commit_group.sync.aligned())
