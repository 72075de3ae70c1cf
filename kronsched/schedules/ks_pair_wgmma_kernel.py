"""Two Kronecker-sparse factors in one kernel of TMA and wgmma (TIRx). See ks_cuda_pair_wgmma.py for the tiling and its letters.

    producers    a warp for each consumer warpgroup:  X, 64 samples × 64 k at a time            (ks_pair_wgmma_load.py)
                 one warp for all:                    weights, in the order of a tile
    consumers    for each block i:                    X · W1 ─ rounded ─ middle                 (ks_pair_wgmma_store.py)
                 for each i and run of outputs j:     middle · W2, all l ─ rounded ─ Y          (there, too)

Panels are rows of 128 bytes with the 128B swizzle. Consumer warpgroups have tiles of 64 samples of their own and share the
panels of weights, or they share a tile and its middle, and each has panels of its own.

Read first: `PairKernel.emit`.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

from kronsched.schedules.gemm_dense_wgmma_mainloop import Ring, evaluate
from kronsched.schedules.ks_pair_wgmma_gather import gather
from kronsched.schedules.ks_pair_wgmma_load import PairLoads
from kronsched.schedules.ks_pair_wgmma_plan import ITEM, PANEL, ROWS, STEPS, STORE_ROWS, WgmmaPairPlan
from kronsched.schedules.ks_pair_wgmma_store import PairStore

_KINDS = {"float16": "f32.f16.f16", "bfloat16": "f32.bf16.bf16"}
_STEP = 16
"""Inputs k of one wgmma."""


def pair_kernel(p: WgmmaPairPlan, name: str) -> Any:
    """The PrimFunc over flat x, w0, w1 (packed where `p.packs`) and y."""
    from tvm.script.ir_builder import IRBuilder
    from tvm.tirx.script.builder import ir as I

    (a1, b1, c1, _), (a2, b2, c2, d2) = p.first, p.second
    wide = a2 * b2 * d2
    swizzle = {64: 3, 32: 2, 48: 0}[p.store_columns]
    # Extents, strides, box (fastest axis first), swizzle, L2 fetch.
    views: dict[str, tuple[Any, ...]] = {
        "x": ((c1, p.batch, a1), (a1 * c1, c1), (STEPS, ROWS, 1), 3, 3),
        "w0": ((c1, b1, a1), (c1, b1 * c1), (STEPS, b1, 1), 3, 3),
        "w1": ((c2, b2, d2, a2), (d2 * c2, c2, b2 * d2 * c2), (STEPS, p.block_j, 1, 1), 3, 3),
        "y": ((b2 * d2, p.batch, a2), (wide, b2 * d2), (p.store_columns, STORE_ROWS, 1), swizzle, 0),
    }
    sizes = {
        "x": p.batch * a1 * c1,
        "w0": prod(p.first),
        "w1": prod(p.second),
        "y": p.batch * wide,
        "bias": wide,
        "residual": p.batch * wide,
    }
    with IRBuilder() as builder:
        with I.prim_func():
            I.func_name(name)
            tensors = {n: I.arg(n, I.buffer((sizes[n],), p.dtype)) for n in (*views, *p.epilogue.tensors)}
            maps = {
                n: _tensor_map(tensors[n], n, p.dtype, *views[n])
                for n in views
                if (n != "y" or p.copies) and (n != "w1" or not p.gathers)
            }
            I.device_entry()
            with I.attr({"tirx.launch_bounds_min_blocks_per_sm": p.min_blocks}):
                PairKernel(p, tensors, maps).emit()
        return builder.get()


def _tensor_map(tensor: Any, name: str, dtype: str, extents: Any, strides: Any, box: Any, swizzle: int, l2: int) -> Any:
    """A tensor map, encoded on the host side."""
    from tvm.script import tirx as T
    from tvm.script.ir_builder import IRBuilder
    from tvm.tirx.script.builder import ir as I

    from kronsched.runtime.tensor_map import ENCODE

    handle = IRBuilder.name(f"{name}_map", I.Bind(T.tvm_stack_alloca("tensormap", 1), var=T.handle("tensormap")))
    rank, steps = len(extents), [1] * len(extents)
    shape = (*extents, *(s * ITEM for s in strides), *box, *steps)
    I.evaluate(T.call_packed(ENCODE, handle, dtype, rank, tensor.data, *shape, 0, swizzle, l2, 0))
    return handle


class PairKernel(PairLoads):
    """A kernel under construction."""

    def __init__(self, p: WgmmaPairPlan, tensors: dict[str, Any], maps: dict[str, Any]) -> None:
        """Declare the grid and shared memory."""
        from tvm.script.ir_builder import IRBuilder
        from tvm.tirx.script.builder import ir as I

        self.p, self.tensors, self.maps, name = p, tensors, maps, IRBuilder.name
        self.cta = name("cta", I.cta_id([p.blocks]))
        self.tx = name("tx", I.thread_id([p.threads]))
        self.shared = name("sm", I.alloc_buffer((p.shared_bytes,), "uint8", scope="shared.dyn", align=1024))

    def emit(self) -> None:
        """The body."""
        from tvm.script import tirx as T
        from tvm.tirx.script.builder import ir as I

        p = self.p
        with I.If(self.tx == 0), I.Then():
            self.init_barriers()
        evaluate(T.ptx.fence.mbarrier_init.release.cluster())
        evaluate(T.cuda.cta_sync())
        if not p.packs:  # else the packing launch has waited for all earlier ones before it let this one start
            evaluate(T.ptx.griddepcontrol.wait())
        evaluate(T.ptx.griddepcontrol.launch_dependents())
        with I.If(self.tx < 128 * p.groups):
            with I.Then():
                if p.registers:
                    evaluate(T.ptx["setmaxnreg.inc.sync.aligned.u32"](p.registers[1]))
                self._consume()
            with I.Else():
                if p.registers:
                    evaluate(T.ptx["setmaxnreg.dec.sync.aligned.u32"](p.registers[0]))
                self.produce()

    # -- consumers ----------------------------------------------------------------------------------

    def _consume(self) -> None:
        from tvm.script import tirx as T
        from tvm.script.ir_builder import IRBuilder
        from tvm.tirx.script.builder import ir as I

        p, name = self.p, IRBuilder.name
        self.group = group = name("group", I.Bind(self.tx >> 7))
        self.sums = name("sums", I.alloc_local([p.sums], "float32"))
        self.operands = name("operands", I.alloc_local([4], "uint64"))
        middle = 0 if p.together else group * (p.middle_panels * PANEL)
        places = (p.x_at + group * (p.x_stages * PANEL), middle, *(slots.at for slots in p.rings))
        for i, at in enumerate(places):
            evaluate(T.cuda.wgmma.encode_matrix_descriptor(T.address_of(self.operands[i]), self.at(at), 1, 64, 3))
        ring = Ring(p.rings[0].count, 0)
        self.x, self.w = Ring(p.x_stages, 0), (ring, Ring(p.rings[1].count, 0) if p.apart else ring)
        self.previous = name("previous", I.alloc_local([2], "int32"))
        store = PairStore(p, self.tx, group, self.shared, middle, self.sums, self.tensors, self.maps.get("y"))
        if p.gathers:
            gather(p, self.tx, self.shared, self.tensors["w1"])
        with self.tiles() as turn:
            row = name("row", I.Bind(self.row(turn, group)))
            with I.If(row < p.batch):
                with I.Then():
                    self._first_factor(store)
                    self._second_factor(store, row)
                with I.Else():
                    self._pass_by()
        store.finish()

    def _first_factor(self, store: PairStore) -> None:
        from tvm.script import tirx as T
        from tvm.tirx.script.builder import ir as I

        p = self.p
        lag = p.x_stages > 1  # else the next panel needs the one stage that there is
        store.sync()  # all warps have multiplied the last tile's middle
        with self.parts(p.first[0], self.group) as n:
            i = self.part(n, self.group)
            with I.serial(0, p.first_chunks) as chunk:
                evaluate(T.cuda.mbarrier_wait(self.x_barrier(self.group, self.x.stage), self.x.phase))
                samples = self.operands[0] + T.Cast("uint64", self.x.stage * (PANEL // 16))
                self._multiply(0, p.first[1], 0, samples, STEPS, chunk > 0, i * p.first_chunks + chunk)
                if lag:
                    evaluate(T.ptx.wgmma.wait_group.sync.aligned(1))
                    with I.If(chunk > 0), I.Then():
                        self._release(0)
                self._remember(0)
                if not lag:
                    evaluate(T.ptx.wgmma.wait_group.sync.aligned(0))
                    self._release(0)
            if lag:
                evaluate(T.ptx.wgmma.wait_group.sync.aligned(0))
                self._release(0)
            with I.If(i == p.first[0] - 1), I.Then():
                self._say_done(0)
            store.middle(i)
        evaluate(T.ptx.fence.proxy.async_.shared__cta())
        store.sync()

    def _second_factor(self, store: PairStore, row: Any) -> None:
        from tvm.script import tirx as T

        p, (a2, _, c2, d2), chunks = self.p, self.p.second, self.p.second_chunks
        with self.parts(a2 * p.j_blocks, self.group) as n:
            part = self.part(n, self.group)
            i, run = part // p.j_blocks, part % p.j_blocks
            for l in range(d2):  # noqa: E741 (the axis has that name everywhere)
                for chunk in range(chunks):
                    samples = self.operands[1] + T.Cast("uint64", ((i * d2 + l) * chunks + chunk) * (PANEL // 16))
                    steps, panel = min(STEPS, c2 - chunk * STEPS), p.first_panels + (part * d2 + l) * chunks + chunk
                    self._multiply(1, p.block_j, l * (p.block_j // 2), samples, steps, T.bool(chunk > 0), panel)
                    if l or chunk:
                        evaluate(T.ptx.wgmma.wait_group.sync.aligned(1))
                        self._release(1)
                    self._remember(1)
            evaluate(T.ptx.wgmma.wait_group.sync.aligned(0))
            self._release(1)
            store.results(row, i, run)
        self._say_done(1)

    def _multiply(self, factor: int, n: int, first: int, samples: Any, steps: int, onto: Any, panel: Any) -> None:
        """Issue the products of a panel of samples and the weights' panel of that number into the sums from `first` on."""
        from tvm.script import tirx as T

        p = self.p
        kind = f"wgmma.mma_async.sync.aligned.m64n{n}k{_STEP}.{_KINDS[p.dtype]}"
        self._await_weights(factor, panel)
        evaluate(T.ptx.wgmma.fence.sync.aligned())
        slot = panel if p.resident else self._slot(factor, self.w[factor].stage)
        weights = self.operands[2 + factor] + T.Cast("uint64", slot * (p.rings[factor].size // 16))
        for step in range(steps // _STEP):
            there = T.uint64(step * (_STEP * ITEM // 16))
            sums = (self.sums[first + r] for r in range(n // 2))
            evaluate(T.ptx[kind](*sums, samples + there, weights + there, T.bool(True) if step else onto, 1, 1, 0, 0))
        evaluate(T.ptx.wgmma.commit_group.sync.aligned())

    # -- panels of weights --------------------------------------------------------------------------

    def _slot(self, factor: int, stage: Any) -> Any:
        """The number, among those of all rings, of a slot of the warpgroup's ring."""
        slots = self.p.rings[factor]
        return self.group * slots.count + stage if slots.rings > 1 else stage

    def _await_weights(self, factor: int, panel: Any = 0) -> None:
        """Wait for a factor's next panel. One that stays is full for ever: the parity stays that of the first time."""
        from tvm.script import tirx as T

        if factor and self.p.gathers:
            return
        slots, ring = self.p.rings[factor], self.w[factor]
        slot, phase = (panel, 0) if self.p.resident else (self._slot(factor, ring.stage), ring.phase)
        evaluate(T.cuda.mbarrier_wait(self.w_barrier(slots, slot), phase))

    def _remember(self, factor: int) -> None:
        """Note which panels the products in flight read, and go on to the next."""
        from tvm.tirx.script.builder import ir as I

        rings = {0: None if self.p.resident else self.w[factor], 1: None if factor else self.x}
        for i, ring in rings.items():
            if ring is not None:
                I.buffer_store(self.previous, ring.stage, [i])
                ring.advance()

    def _release(self, factor: int, x: bool = True) -> None:
        """Say that this warp is done with the panels last remembered."""
        barriers: list[Callable[[], Any]] = []
        if not self.p.resident:
            slots = self.p.rings[factor]
            barriers.append(lambda: self.w_barrier(slots, self._slot(factor, self.previous[0]), empty=True))
        if factor == 0 and x:
            barriers.append(lambda: self.x_barrier(self.group, self.previous[1], empty=True))
        self._arrive(barriers)

    def _say_done(self, factor: int) -> None:
        """Say that this warp is done with a factor's weights."""
        self._arrive([lambda: self.done(factor)] if self.p.apart else [])

    def _arrive(self, barriers: list[Callable[[], Any]]) -> None:
        from tvm.script import tirx as T
        from tvm.tirx.script.builder import ir as I

        if barriers:
            with I.If(self.tx % 32 == 0), I.Then():
                for barrier in barriers:
                    evaluate(T.ptx.mbarrier.arrive.shared.b64(barrier(), T.uint32(1)))

    def _pass_by(self) -> None:
        """Of a tile's end beyond the batch: let the weights go."""
        from tvm.tirx.script.builder import ir as I

        p = self.p
        if p.resident or p.together:  # then there is nothing to pass, or no such tile
            return
        for factor, panels in enumerate((p.first_panels, p.weight_panels - p.first_panels)):
            with I.serial(0, panels):
                self._await_weights(factor)
                I.buffer_store(self.previous, self.w[factor].stage, [0])
                self.w[factor].advance()
                self._release(factor, x=False)
            self._say_done(factor)
