"""The copies of a chained Kron-Matmul whose rows land in a ring in shared memory, announced to an mbarrier a row.

They are bulk copies of whole pieces, or 16 bytes at a time by cp.async. Which is faster depends on the size of the pieces:
bulk copies for 512 bytes (16^4), cp.async for 128 (8^4), on an H200.

Read first: `Feed`; kron_chain_ring_plan.py for where things are.
"""

from __future__ import annotations

from math import ceil
from typing import Any

from kronsched.schedules.kron_chain_names import COPY
from kronsched.schedules.kron_chain_plan import ChainPlan
from kronsched.schedules.kron_mma_kernel import evaluate

ARRIVE = "cp.async.mbarrier.arrive.noinc.shared.b64"
BULK = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"


class Feed:
    """Emits the copies. x, sm: 32-bit words; `barriers`: word of the mbarriers; tx: the thread."""

    def __init__(self, plan: ChainPlan, x: Any, sm: Any, barriers: int) -> None:
        self.ring, self.threads, self.bulk = plan.ring, plan.threads, plan.prefetch == "bulk"
        ring = self.ring
        self.x, self.sm, self.barriers = x, sm, barriers
        self.row_words = ring.a * ring.pieces * ring.piece_chunks * 4

    def barrier(self, it: Any) -> Any:
        """The mbarrier of the block's row number `it`."""
        return self.sm.ptr_to([self.barriers + it % self.ring.rows * 2])

    def start(self, tx: Any) -> None:
        """Initialise the mbarriers; the block must meet before they are used."""
        from tvm.script import tirx as T
        from tvm.tirx.script.builder import ir as I

        arrivals = 1 if self.bulk else self.threads * (2 if self.ring.wraps else 1)
        with I.If(tx == 0), I.Then():
            for i in range(self.ring.rows):
                evaluate(T.ptx.mbarrier.init.shared.b64(self.sm.ptr_to([self.barriers + i * 2]), T.uint32(arrivals)))
            evaluate(T.ptx.fence.mbarrier_init.release.cluster())

    def wait(self, it: Any) -> None:
        """Until row number `it` has landed."""
        from tvm.script import tirx as T

        evaluate(T.cuda.mbarrier_wait(self.barrier(it), it // self.ring.rows % 2))

    def fetch_all(self, tx: Any, row: Any) -> None:
        """Copy row `row` of x, the block's first."""
        self.fetch(tx, row, 0, 0, self.ring.early)
        if self.ring.wraps:
            self.fetch(tx, row, 0, self.ring.early, self.ring.a - self.ring.early)

    def fetch(self, tx: Any, row: Any, it: Any, first: int, count: int) -> None:
        """Copy `count` planes of row `row` of x from `first` on, row number `it` of the block; plane 0 announces the row."""
        from tvm.script import tirx as T
        from tvm.tirx.script.builder import ir as I

        ring = self.ring
        if first == 0 and self.bulk:
            with I.If(tx == 0), I.Then():
                evaluate(T.ptx.mbarrier.arrive.expect_tx.shared.b64(self.barrier(it), T.uint32(self.row_words * 4)))
        total = count * ring.pieces * (1 if self.bulk else ring.piece_chunks)
        for v in range(ceil(total / self.threads)):
            part = v * self.threads + tx
            if total - v * self.threads >= self.threads:
                self._copy(row, it, first, part)
                continue
            with I.If(part < total), I.Then():
                self._copy(row, it, first, part)
        if not self.bulk:
            evaluate(T.ptx[ARRIVE](self.barrier(it)))

    def _copy(self, row: Any, it: Any, first: int, part: Any) -> None:
        from tvm.script import tirx as T

        ring, base = self.ring, it * self.ring.a % self.ring.planes
        piece, inside = (part, 0) if self.bulk else (part // ring.piece_chunks, part % ring.piece_chunks)
        to = ring.plane(base, first + piece // ring.pieces) + ring.piece(piece % ring.pieces) + inside
        chunks = ring.piece_chunks if self.bulk else 1
        source = self.x.ptr_to([row * self.row_words + first * (ring.pieces * ring.piece_chunks * 4) + part * (chunks * 4)])
        target = self.sm.ptr_to([to * 4])
        if self.bulk:
            evaluate(T.ptx[BULK](target, source, T.uint32(chunks * 16), self.barrier(it)))
        else:
            evaluate(T.ptx[COPY](target, source, 16))

    def free(self) -> None:
        """What this thread did in the ring is done before copies that follow the block's next meeting."""
        from tvm.script import tirx as T

        if self.bulk:
            evaluate(T.ptx.fence.proxy.async_.shared__cta())
