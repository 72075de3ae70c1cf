"""The products of a batch-last Kronecker-sparse factor by TMA and wgmma, samples as the rows of a tile.

wgmma reads X transposed ("M-major") from shared memory, and a tile can be as wide as a block has outputs, in steps of 16.
`stmatrix.trans` turns the sums on their way to panels in which samples are the fast axis.

Read first: `SampleKernel`; ks_tile_kernel.py for the rest of the program.
"""

from __future__ import annotations

from typing import Any

from kronsched.schedules.gemm_dense_wgmma_mainloop import Ring, evaluate
from kronsched.schedules.gemm_dense_wgmma_plan import PANEL_BYTES, ROW_BYTES
from kronsched.schedules.ks_last_tile_plan import STEP, SamplePlan
from kronsched.schedules.ks_tile_kernel import KSTileKernel, TileStore, tile_kernel

_KINDS = {"float16": "f32.f16.f16", "bfloat16": "f32.bf16.bf16"}
_CHUNK = 16


def samples_kernel(plan: SamplePlan, name: str) -> Any:
    """The PrimFunc over flat x, w, y."""
    weights = plan.block_n if plan.shares_samples else plan.block_n // plan.cluster
    boxes = {"x": (64, plan.block_k), "w": (64, weights), "y": (64, plan.block_n)}
    return tile_kernel(SampleKernel, plan, name, boxes)


class _Store(TileStore):
    """Stores tiles of samples × outputs."""

    plan: SamplePlan

    def __init__(self, plan: SamplePlan, tx: Any, group: Any, shared: Any, panels: int, *parts: Any) -> None:
        """Take the kernel's parts."""
        super().__init__(plan, tx, group, shared, panels, *parts)
        self.panels = panels + group * (plan.span * plan.panel_bytes)

    def emit(self, row: Any, column: Any, part: Any) -> None:
        """See the base class: `span` panels of 64 samples at a time."""
        from tvm.script import tirx as T
        from tvm.tirx.script.builder import ir as I

        self.part, plan = part, self.plan
        for batch in range(0, plan.rows, plan.span):
            with I.If(self.thread == 0), I.Then():  # the panels' last content has left
                I.evaluate(T.ptx.cp.async_.bulk.wait_group.read(0))
            self._sync()
            for p in range(plan.span):
                self._fill(p, (batch + p) * (plan.block_n // 2), column)
            I.evaluate(T.ptx.fence.proxy.async_.shared__cta())
            self._sync()
            with I.If(self.thread == 0), I.Then():
                for p in range(plan.span):
                    sample = row + (batch + p) * 64
                    with I.If(sample < self.w.m), I.Then():
                        self._send(self.shared.ptr_to([self.panels + p * plan.panel_bytes]), column, sample, part)
                I.evaluate(T.ptx.cp.async_.bulk.commit_group())

    def _fill(self, panel: int, first: int, column: Any) -> None:
        """Turn 64 samples × block_n outputs: sums 8 outputs apart are 4 registers apart, 8 samples apart are 2."""
        from tvm.script import tirx as T
        from tvm.tirx.script.builder import ir as I

        lane = self.lane
        output, chunk = (lane & 7) + (lane >> 4) * 8, self.warp * 2 + ((lane >> 3) & 1)
        at = self.panels + panel * self.plan.panel_bytes + output * ROW_BYTES + ((chunk ^ (lane & 7)) * _CHUNK)
        for j in range(self.plan.block_n // 16):  # four 8 × 8 matrices
            for q in range(4):
                self.pack(q, first + j * 8 + 2 * q, q // 2 * 2)
            to = self.shared.ptr_to([at + j * 16 * ROW_BYTES])
            I.evaluate(T.ptx["stmatrix.sync.aligned.m8n8.x4.trans.shared.b16"](to, *(self.packed[q] for q in range(4))))


class SampleKernel(KSTileKernel):
    """A kernel under construction."""

    plan: SamplePlan
    store = _Store

    def __init__(self, plan: SamplePlan, tensors: dict[str, Any], y: Any, maps: dict[str, Any]) -> None:
        """Take the kernel's parts."""
        super().__init__(plan, tensors, y, maps)
        self.k_major = True  # of the second operand, the weights
        self.barriers = self.panels + plan.warpgroups * plan.span * plan.panel_bytes

    def _tile(self, unit: Any) -> tuple[Any, Any, Any]:
        return self.plan.place(unit, self.rank)

    def _load_samples(self, at: Any, full: Any, place: tuple[Any, Any, Any], k: Any) -> None:
        plan, (row, _, part) = self.plan, place
        together = plan.cluster > 1 and plan.shares_samples
        mine = plan.block_m // 64 // (plan.cluster if together else 1)
        for i in range(mine):
            slab = self.rank * mine + i if together else i
            self._load("x", at + slab * plan.slab_bytes, full, (row + slab * 64, k), part, together)

    def _load_weights(self, at: Any, full: Any, place: tuple[Any, Any, Any], k: Any) -> None:
        plan, (_, column, part) = self.plan, place
        together = plan.cluster > 1 and not plan.shares_samples
        first = self.rank * (plan.block_n // plan.cluster) if together else 0
        to = at + plan.block_m // 64 * plan.slab_bytes + first * ROW_BYTES
        self._load("w", to, full, (k, column + first), part, together)

    def _multiply(self, ring: Ring, operands: Any, sums: Any, onto: Any, base: int = 0) -> None:
        """See the base class."""
        from tvm.script import tirx as T

        plan = self.plan
        kind = f"wgmma.mma_async.sync.aligned.m64n{plan.block_n}k{STEP}.{_KINDS[plan.workload.a_dtype]}"
        registers = plan.block_n // 2
        evaluate(T.cuda.mbarrier_wait(self._full(ring.stage), ring.phase))
        evaluate(T.ptx.wgmma.fence.sync.aligned())
        stage = T.Cast("uint64", ring.stage * (plan.stage_bytes // 16))
        # The base class has put both descriptors where they belong if slabs are as large as a panel of 64 steps of k.
        less = (PANEL_BYTES - plan.slab_bytes) // 16
        before = T.uint64(0) if plan.pingpong else T.Cast("uint64", ((self.tx >> 7) - 1) * (plan.rows * less))
        for step in range(plan.block_k // STEP):
            add = T.bool(True) if step else onto
            for m in range(plan.rows):
                first = base + m * registers
                a = operands[0] + stage - before + T.uint64(step * (STEP * ROW_BYTES // 16) + m * (plan.slab_bytes // 16))
                b = operands[1] + stage + T.uint64(step * (STEP * plan.item // 16)) - T.uint64(plan.block_m // 64 * less)
                evaluate(T.ptx[kind](*(sums[first + i] for i in range(registers)), a, b, add, 1, 1, 1, 0))
        evaluate(T.ptx.wgmma.commit_group.sync.aligned())
