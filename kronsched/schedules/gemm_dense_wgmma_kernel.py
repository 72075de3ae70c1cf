"""The wgmma Gemm as a TIRx program: one producer thread, consumer warpgroups, a ring of stages between them.

    producer    for each unit, for each trip:  wait until the stage is empty;  TMA: rows of x, rows of w ─ 128B-swizzled stage
    consumers   for each unit, for each trip:  wait until the stage is full;   wgmma on four 32-byte steps of k
                                               the stage before this one is empty: its products are done
                at the end of a unit:          sums ─ scaled, rounded ─ Y      (gemm_dense_wgmma_store.py)

A stage has two mbarriers: `full` counts the bytes that arrive, `empty` the consumer warps that are done. The ring runs on from
unit to unit, so the producer fills stages for the next unit while the consumers store this one.

pingpong: the two consumer warpgroups take whole units in turn, so that one multiplies while the other stores; each skips the
other's stages. Two mbarriers, `turn`, keep one from waiting for stages before the other has seen all of its own: a wait knows
only whether the number of a stage's filling is odd.

float8: the tensor core keeps about 14 bits when it adds up (DeepSeek-V3 technical report, arXiv 2412.19437, section 3.3.2), so
every `promote` trips its sums are added to float32 sums in other registers and start again from zero.

Read first: `WgmmaKernel.emit`.
"""

from __future__ import annotations

from typing import Any

from kronsched.schedules.gemm_dense_fused_store import FusedStore
from kronsched.schedules.gemm_dense_pad import PADDED
from kronsched.schedules.gemm_dense_wgmma_mainloop import Mainloop, Ring, evaluate
from kronsched.schedules.gemm_dense_wgmma_plan import PANEL_BYTES, REGISTERS, ROW_BYTES, DensePlan
from kronsched.schedules.gemm_dense_wgmma_store import Store
from kronsched.workloads.gemm_dense import dense_inputs

LOAD = "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
LOAD_MULTICAST = f"{LOAD}.multicast::cluster"


def main_kernel(plan: DensePlan, name: str) -> Any:
    """The PrimFunc over the workload's inputs and y, or x, w and p."""
    from tvm.script.ir_builder import IRBuilder
    from tvm.tirx.script.builder import ir as I

    w = plan.workload
    with IRBuilder() as builder:
        with I.prim_func():
            I.func_name(name)
            inputs = {t.name: t for t in dense_inputs(w)}
            wanted = list(inputs) if plan.split_k == 1 else ["x", "w"]
            names = PADDED if plan.padded else {}
            tensors = {n: I.arg(names.get(n, n), I.buffer(inputs[n].shape, inputs[n].dtype)) for n in wanted}
            shape = (w.m, w.n) if plan.split_k == 1 else (plan.split_k, w.m, w.n)
            y = I.arg("y" if plan.split_k == 1 else "p", I.buffer(shape, plan.out_dtype))
            maps = {n: _tensor_map(tensors[n], n, w.a_dtype, (w.k, extent), (plan.block_k, rows))
                    for n, extent, rows in (("x", w.m, plan.block_m), ("w", w.n, plan.block_n // plan.cluster))}  # fmt: skip
            if plan.span:
                maps["y"] = _tensor_map(y, "y", plan.out_dtype, (w.n, w.m), (plan.panel_columns, 64), l2=0)
            I.device_entry()
            with I.attr({"tirx.launch_bounds_min_blocks_per_sm": 1}):
                kernel = WgmmaKernel(plan, tensors, y, maps)
                kernel.store = FusedStore if plan.fused else Store
                kernel.emit()
        return builder.get()


def _tensor_map(tensor: Any, name: str, dtype: str, extents: tuple[int, int], box: tuple[int, int], l2: int = 2) -> Any:
    """A tensor map over a row-major matrix in 128B-swizzled boxes, encoded on the host side."""
    from tvm.script import tirx as T
    from tvm.script.ir_builder import IRBuilder
    from tvm.tirx.script.builder import ir as I

    from kronsched.dtypes import DTYPES
    from kronsched.runtime.tensor_map import ENCODE

    handle = IRBuilder.name(f"{name}_map", I.Bind(T.tvm_stack_alloca("tensormap", 1), var=T.handle("tensormap")))
    stride = extents[0] * DTYPES[dtype].itemsize
    I.evaluate(T.call_packed(ENCODE, handle, dtype, 2, tensor.data, *extents, stride, *box, 1, 1, 0, 3, l2, 0))
    return handle


class WgmmaKernel(Mainloop):
    """A kernel under construction.

    Another kind of product inherits it and says where a unit lies (`place`), what a stage holds (`fetch`) and where sums
    go (`store`).
    """

    store: type[Store] = Store

    def __init__(self, plan: DensePlan, tensors: dict[str, Any], y: Any, maps: dict[str, Any]) -> None:
        from tvm.script.ir_builder import IRBuilder
        from tvm.tirx.script.builder import ir as I

        self.plan, self.tensors, self.y, self.maps = plan, tensors, y, maps
        name = IRBuilder.name
        if plan.cluster > 1:
            self.worker = name("worker", I.cluster_id([plan.workers]))
            self.rank = name("rank", I.cta_id_in_cluster([plan.cluster]))
        else:
            self.worker, self.rank = name("worker", I.cta_id([plan.blocks])), 0
        self.tx = name("tx", I.thread_id([plan.threads]))
        # x, w of every stage; staging panels; mbarriers.
        self.shared = name("sm", I.alloc_buffer((plan.shared_bytes,), "uint8", scope="shared.dyn", align=1024))
        self.panels = plan.stages * plan.stage_bytes
        self.barriers = self.panels + plan.warpgroups * plan.span * PANEL_BYTES

    def emit(self) -> None:
        """The body."""
        from tvm.script import tirx as T
        from tvm.tirx.script.builder import ir as I

        plan = self.plan
        with I.If(self.tx == 0), I.Then():
            for s in range(plan.stages):
                evaluate(T.ptx.mbarrier.init.shared.b64(self._full(s), T.uint32(1)))
                evaluate(T.ptx.mbarrier.init.shared.b64(self._empty(s), T.uint32(4 * plan.sharers * plan.cluster)))
            for g in range(2 if plan.pingpong else 0):
                evaluate(T.ptx.mbarrier.init.shared.b64(self._turn(g), T.uint32(4)))
        evaluate(T.ptx.fence.mbarrier_init.release.cluster())
        self._sync()
        evaluate(T.ptx.griddepcontrol.wait())  # until here, this launch overlaps the one before it
        evaluate(T.ptx.griddepcontrol.launch_dependents())
        registers = REGISTERS[plan.warpgroups]
        with I.If(self.tx < 128):
            with I.Then():
                if registers:
                    evaluate(T.ptx["setmaxnreg.dec.sync.aligned.u32"](registers[0]))
                with I.If(self.tx == 0), I.Then():
                    self._produce()
            with I.Else():
                if registers:
                    evaluate(T.ptx["setmaxnreg.inc.sync.aligned.u32"](registers[1]))
                self._consume()
        if plan.cluster > 1:  # the other block may still send to this one
            self._sync()

    def _sync(self) -> None:
        """A barrier of the block, and of its cluster."""
        from tvm.script import tirx as T

        evaluate(T.cuda.cta_sync())
        if self.plan.cluster > 1:
            evaluate(T.cuda.cluster_sync())

    # -- units of work ------------------------------------------------------------------------------

    def _units(self, group: Any = None) -> Any:
        """A loop over this block's units; group: every other one only, from the first or second on."""
        from tvm.tirx.script.builder import ir as I

        plan = self.plan
        count = (plan.units - self.worker + plan.workers - 1) // plan.workers
        return I.serial(0, count if group is None else (count - group + 1) // 2)

    def place(self, n: Any) -> tuple[Any, Any, Any, Any, Any]:
        """(first row, first column, range of k, first trip, trips) of this block's n-th unit."""
        from tvm.script import tirx as T
        from tvm.script.ir_builder import IRBuilder
        from tvm.tirx.script.builder import ir as I

        plan = self.plan
        unit = IRBuilder.name("unit", I.Bind(self.worker + n * plan.workers))
        tile = unit if plan.split_k == 1 else unit % plan.tiles
        band = plan.group * plan.n_tiles
        first = tile // band * plan.group
        rows = plan.group if plan.rows_of_tiles % plan.group == 0 else T.min(plan.rows_of_tiles - first, plan.group)
        row = IRBuilder.name("row", I.Bind(((first + tile % band % rows) * plan.cluster + self.rank) * plan.block_m))
        column = IRBuilder.name("column", I.Bind(tile % band // rows * plan.block_n))
        if plan.split_k == 1:
            return row, column, 0, 0, plan.trips
        part = IRBuilder.name("part", I.Bind(unit // plan.tiles))
        start = part * plan.unit_trips
        return row, column, part, start, T.min(plan.trips - start, plan.unit_trips)

    # -- shared memory ------------------------------------------------------------------------------

    def _at(self, offset: Any) -> Any:
        return self.shared.ptr_to([offset])

    def _full(self, stage: Any) -> Any:
        return self._at(self.barriers + stage * 8)

    def _empty(self, stage: Any) -> Any:
        return self._at(self.barriers + self.plan.stages * 8 + stage * 8)

    def _turn(self, group: Any) -> Any:
        return self._at(self.barriers + self.plan.stages * 16 + group * 8)

    # -- producer -----------------------------------------------------------------------------------

    def _produce(self) -> None:
        from tvm.script import tirx as T
        from tvm.tirx.script.builder import ir as I

        plan = self.plan
        ring = Ring(plan.stages, 1)  # the first wait for an empty stage returns at once
        with self._units() as n:
            row, column, part, start, trips = self.place(n)
            with I.serial(0, trips) as trip:
                evaluate(T.cuda.mbarrier_wait(self._empty(ring.stage), ring.phase))
                full, at = self._full(ring.stage), ring.stage * plan.stage_bytes
                evaluate(T.ptx.mbarrier.arrive.expect_tx.shared.b64(full, T.uint32(plan.stage_bytes)))
                self.fetch(at, full, row, column, part, (start + trip) * plan.block_k)
                ring.advance()

    def fetch(self, at: Any, full: Any, row: Any, column: Any, part: Any, k: Any) -> None:
        """Copy what a stage holds, its rows of x and of w at k, to byte `at`; `full` counts the bytes."""
        from tvm.script import tirx as T

        plan = self.plan
        columns = at + plan.block_m * ROW_BYTES
        evaluate(T.ptx[LOAD](self._at(at), T.address_of(self.maps["x"]), k, row, full))
        if plan.cluster > 1:
            share = self.rank * (plan.block_n // plan.cluster)
            to, every = self._at(columns + share * ROW_BYTES), T.uint16(2**plan.cluster - 1)
            evaluate(T.ptx[LOAD_MULTICAST](to, T.address_of(self.maps["w"]), k, column + share, full, every))
        else:
            evaluate(T.ptx[LOAD](self._at(columns), T.address_of(self.maps["w"]), k, column, full))

    # -- consumers ----------------------------------------------------------------------------------

    def _consume(self) -> None:
        from tvm.script import tirx as T
        from tvm.script.ir_builder import IRBuilder
        from tvm.tirx.script.builder import ir as I

        plan = self.plan
        name = IRBuilder.name
        group = name("group", I.Bind((self.tx >> 7) - 1))
        if plan.cluster > 1:
            self.remote = name("remote", I.alloc_local([1], "uint32"))
        kind = "uint32" if plan.workload.a_dtype == "int8" else "float32"
        sums = name("sums", I.alloc_local([plan.sums * (2 if plan.pair else 1)], kind))
        total = name("total", I.alloc_local([plan.sums], kind)) if plan.promote else sums
        operands = name("operands", I.alloc_local([2], "uint64"))
        own = 0 if plan.pingpong else group * (plan.rows * 64)  # first row of the tile that is this warpgroup's
        rows = self._at(own * ROW_BYTES)
        evaluate(T.cuda.wgmma.encode_matrix_descriptor(T.address_of(operands[0]), rows, 1, 64, 3))
        columns = self._at(plan.block_m * ROW_BYTES)
        leading = 1 if self.k_major else plan.block_k * ROW_BYTES // 16  # from 64 columns to the next 64
        evaluate(T.cuda.wgmma.encode_matrix_descriptor(T.address_of(operands[1]), columns, leading, 64, 3))
        ring = Ring(plan.stages, 0)
        store = self.store(plan, self.tx, group, self.shared, self.panels, total, self.tensors, self.y, self.maps.get("y"))
        if plan.pingpong:
            self.group = group
            self.parity = name("parity", I.alloc_local([1], "int32"))
            I.buffer_store(self.parity, 1 - group, [0])  # the first warpgroup's first turn is at once
            with I.If(group == 1), I.Then():
                ring.jump(plan.trips)
        with self._units(group if plan.pingpong else None) as n:
            row, column, part, _, trips = self.place(2 * n + group if plan.pingpong else n)
            self._await_turn()
            if plan.promote:
                for i in range(plan.sums):
                    I.buffer_store(total, T.float32(0), [i])
                (self._promoted_in_pairs if plan.pair else self._promoted)(ring, operands, sums, total, trips)
                self._pass_turn()
            else:
                self._plain(ring, operands, sums, trips)
            store.emit(row + own, column, part)
            if plan.pingpong:
                ring.jump(plan.trips)
        store.finish()
