"""The main loop of a consumer warpgroup of the wgmma Gemm: stages of the ring ─ wgmma ─ sums.

    plain               all trips into the same sums
    promoted            `promote` trips into sums that start from zero, then added to others
    promoted in pairs   the same with two sets of sums

Read first: `Mainloop._plain`.
"""

from __future__ import annotations

from typing import Any

from kronsched.schedules.gemm_dense_wgmma_plan import ROW_BYTES, DensePlan

_KINDS = {
    "float16": "k16.f32.f16.f16",
    "bfloat16": "k16.f32.bf16.bf16",
    "int8": "k32.s32.s8.s8",
    "float8_e4m3fn": "k32.f32.e4m3.e4m3",
    "float8_e5m2": "k32.f32.e5m2.e5m2",
}
_STEPS = ROW_BYTES // 32
"""wgmma steps of a trip."""


def evaluate(expr: Any) -> None:
    """Emit an expression for its effect."""
    from tvm.tirx.script.builder import ir as I

    I.evaluate(expr)


class Ring:
    """Stage and phase of one side of the ring, in registers."""

    def __init__(self, stages: int, phase: int) -> None:
        """Start at the first stage, with a parity."""
        from tvm.script.ir_builder import IRBuilder
        from tvm.tirx.script.builder import ir as I

        self.stages = stages
        self._stage = IRBuilder.name("stage", I.alloc_local([1], "int32"))
        self._phase = IRBuilder.name("phase", I.alloc_local([1], "int32"))
        I.buffer_store(self._stage, 0, [0])
        I.buffer_store(self._phase, phase, [0])

    @property
    def stage(self) -> Any:
        """The stage it is at."""
        return self._stage[0]

    @property
    def phase(self) -> Any:
        """The parity to wait with."""
        return self._phase[0]

    def jump(self, trips: int) -> None:
        """Go on by some trips at once."""
        from tvm.tirx.script.builder import ir as I

        rounds, rest = divmod(trips, self.stages)
        if rounds % 2:
            I.buffer_store(self._phase, self._phase[0] ^ 1, [0])
        I.buffer_store(self._stage, self._stage[0] + rest, [0])
        with I.If(self._stage[0] >= self.stages), I.Then():
            I.buffer_store(self._stage, self._stage[0] - self.stages, [0])
            I.buffer_store(self._phase, self._phase[0] ^ 1, [0])

    def advance(self) -> None:
        """Go on by one trip."""
        from tvm.tirx.script.builder import ir as I

        I.buffer_store(self._stage, self._stage[0] + 1, [0])
        with I.If(self._stage[0] == self.stages), I.Then():
            I.buffer_store(self._stage, 0, [0])
            I.buffer_store(self._phase, self._phase[0] ^ 1, [0])


class Mainloop:
    """What a consumer warpgroup emits between two units; the kernel that inherits it sets the attributes and places the barriers.

    tx: thread of the block.  group: consumer warpgroup.  parity: of the next turn (pingpong).  remote: a register for addresses
    in other blocks (clusters).  k_major: whether k is the fast axis of the second operand in shared memory; else its columns are,
    64 of them at a time (16-bit elements only).
    """

    k_major = True

    plan: DensePlan
    tx: Any
    group: Any
    parity: Any
    remote: Any

    def _full(self, stage: Any) -> Any:
        raise NotImplementedError

    def _empty(self, stage: Any) -> Any:
        raise NotImplementedError

    def _turn(self, group: Any) -> Any:
        raise NotImplementedError

    def _plain(self, ring: Ring, operands: Any, sums: Any, trips: Any) -> None:
        """All trips into the same sums; one trip's products stay in flight while the next is waited for."""
        from tvm.script import tirx as T
        from tvm.script.ir_builder import IRBuilder
        from tvm.tirx.script.builder import ir as I

        previous = IRBuilder.name("previous", I.alloc_local([1], "int32"))
        I.buffer_store(previous, -1, [0])
        with I.serial(0, trips) as trip:
            self._multiply(ring, operands, sums, trip > 0)
            evaluate(T.ptx.wgmma.wait_group.sync.aligned(1))
            with I.If(previous[0] >= 0), I.Then():
                self._release(previous[0])
            I.buffer_store(previous, ring.stage, [0])
            ring.advance()
        self._pass_turn()
        evaluate(T.ptx.wgmma.wait_group.sync.aligned(0))
        self._release(previous[0])

    def _promoted(self, ring: Ring, operands: Any, sums: Any, total: Any, trips: Any) -> None:
        """Sums of `promote` trips at a time, added to the total."""
        from tvm.script import tirx as T
        from tvm.tirx.script.builder import ir as I

        promote = self.plan.promote

        def one(first: bool) -> None:
            self._multiply(ring, operands, sums, T.bool(not first))
            evaluate(T.ptx.wgmma.wait_group.sync.aligned(0))
            self._release(ring.stage)
            ring.advance()

        def add() -> None:
            for i in range(self.plan.sums):
                I.buffer_store(total, total[i] + sums[i], [i])

        with I.serial(0, trips // promote):
            for i in range(promote):
                one(i == 0)
            add()
        if promote > 1:
            with I.serial(0, trips % promote):
                one(True)
                add()

    def _promoted_in_pairs(self, ring: Ring, operands: Any, sums: Any, total: Any, trips: Any) -> None:
        """As `_promoted`, with two sets of sums: the first is added to the total while the products into the second run."""
        from tvm.script import tirx as T
        from tvm.script.ir_builder import IRBuilder
        from tvm.tirx.script.builder import ir as I

        promote, count = self.plan.promote, self.plan.sums
        previous = IRBuilder.name("previous", I.alloc_local([1], "int32"))

        def add(base: int) -> None:
            for i in range(count):
                I.buffer_store(total, total[i] + sums[base + i], [i])

        with I.serial(0, trips // (2 * promote)):
            for i in range(2 * promote):
                self._multiply(ring, operands, sums, T.bool(i % promote > 0), i // promote * count)
                if i:
                    evaluate(T.ptx.wgmma.wait_group.sync.aligned(1))
                    self._release(previous[0])
                I.buffer_store(previous, ring.stage, [0])
                ring.advance()
            add(0)
            evaluate(T.ptx.wgmma.wait_group.sync.aligned(0))
            self._release(previous[0])
            add(count)
        with I.serial(0, trips % (2 * promote)):
            self._multiply(ring, operands, sums, T.bool(False))
            evaluate(T.ptx.wgmma.wait_group.sync.aligned(0))
            self._release(ring.stage)
            ring.advance()
            add(0)

    def _multiply(self, ring: Ring, operands: Any, sums: Any, onto: Any, base: int = 0) -> None:
        """Issue the products of the ring's stage once it is full, into the sums from `base` on.

        onto: whether they are added to what the sums hold.
        """
        from tvm.script import tirx as T

        plan = self.plan
        kind = f"wgmma.mma_async.sync.aligned.m64n{plan.mma_n}{_KINDS[plan.workload.a_dtype]}"
        signs = () if plan.workload.a_dtype == "int8" else (1, 1)
        tail = (*signs, 0, int(not self.k_major)) if plan.item == 2 else signs  # only 16-bit operands can be transposed
        b_step = 32 if self.k_major else 16 * ROW_BYTES
        registers = plan.mma_n // 2
        evaluate(T.cuda.mbarrier_wait(self._full(ring.stage), ring.phase))
        evaluate(T.ptx.wgmma.fence.sync.aligned())
        stage = T.Cast("uint64", ring.stage * (plan.stage_bytes // 16))
        for step in range(_STEPS):
            add = T.bool(True) if step else onto
            for m in range(plan.rows):
                for n in range(plan.block_n // plan.mma_n):
                    first = base + m * (plan.block_n // 2) + n * registers
                    a = operands[0] + stage + T.uint64(step * 2 + m * (64 * ROW_BYTES // 16))
                    b = operands[1] + stage + T.uint64(step * (b_step // 16) + n * (plan.mma_n * ROW_BYTES // 16))
                    evaluate(T.ptx[kind](*(sums[first + i] for i in range(registers)), a, b, add, *tail))
        evaluate(T.ptx.wgmma.commit_group.sync.aligned())

    def _await_turn(self) -> None:
        """Wait until the other warpgroup has seen all its stages."""
        from tvm.script import tirx as T
        from tvm.tirx.script.builder import ir as I

        if self.plan.pingpong:
            evaluate(T.cuda.mbarrier_wait(self._turn(self.group), self.parity[0]))
            I.buffer_store(self.parity, self.parity[0] ^ 1, [0])

    def _pass_turn(self) -> None:
        """Say that this warp has seen all its stages."""
        from tvm.script import tirx as T
        from tvm.tirx.script.builder import ir as I

        if self.plan.pingpong:
            with I.If(self.tx % 32 == 0), I.Then():
                evaluate(T.ptx.mbarrier.arrive.shared.b64(self._turn(1 - self.group), T.uint32(1)))

    def _release(self, stage: Any) -> None:
        """Say that this warp has read a stage, to every block of the cluster: all of them send parts of w to each."""
        from tvm.script import tirx as T
        from tvm.tirx.script.builder import ir as I

        if self.plan.cluster == 1:
            with I.If(self.tx % 32 == 0), I.Then():
                evaluate(T.ptx.mbarrier.arrive.shared.b64(self._empty(stage), T.uint32(1)))
            return
        with I.If(self.tx % 32 < self.plan.cluster), I.Then():
            mine = T.cuda.cvta_generic_to_shared(self._empty(stage))
            evaluate(T.ptx.mapa.shared__cluster.u32(self.remote[0], mine, T.Cast("uint32", self.tx % 32)))
            evaluate(T.ptx.mbarrier.arrive.shared__cluster.b64(self.remote[0]))
