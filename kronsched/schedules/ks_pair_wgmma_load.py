"""Shared memory of ks_pair_wgmma_kernel.py, its mbarriers, and the warps that fill it by TMA.

Read first: `PairLoads.produce`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kronsched.schedules.gemm_dense_wgmma_mainloop import Ring, evaluate
from kronsched.schedules.ks_pair_wgmma_plan import ITEM, PANEL, ROWS, STEPS, Slots, WgmmaPairPlan

_LOAD = "cp.async.bulk.tensor.{}d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"


class PairLoads:
    """What producers and consumers of a kernel share, and the producers."""

    p: WgmmaPairPlan
    cta: Any
    tx: Any
    shared: Any
    maps: dict[str, Any]

    def tiles(self) -> Any:
        """A loop over this block's tiles."""
        from tvm.tirx.script.builder import ir as I

        p = self.p
        return I.serial(0, (p.tiles - self.cta + p.blocks - 1) // p.blocks)

    def row(self, turn: Any, group: Any) -> Any:
        """First sample of a warpgroup's part of the block's n-th tile."""
        return (self.cta + turn * self.p.blocks) * self.p.rows + (0 if self.p.together else group * ROWS)

    def parts(self, count: int, group: Any) -> Any:
        """A loop over those of `count` blocks i or runs of j that are a warpgroup's; see `part`."""
        from tvm.tirx.script.builder import ir as I

        return I.serial(0, (count - group + self.p.groups - 1) // self.p.groups if self.p.together else count)

    def part(self, n: Any, group: Any) -> Any:
        """The n-th of them."""
        return n * self.p.groups + group if self.p.together else n

    # -- shared memory ------------------------------------------------------------------------------

    def at(self, offset: Any) -> Any:
        """The address of a byte."""
        return self.shared.ptr_to([offset])

    def x_barrier(self, group: Any, stage: Any, empty: bool = False) -> Any:
        """The mbarrier of a panel of X that says that it is full, or empty."""
        return self.at(self.p.barriers_at + (group * self.p.x_stages + stage) * 16 + 8 * empty)

    def w_barrier(self, slots: Slots, slot: Any, empty: bool = False) -> Any:
        """The same of a panel of weights."""
        return self.at(slots.barriers_at + slot * 16 + 8 * empty)

    def done(self, factor: int) -> Any:
        """The mbarrier that says that all warps are done with a factor's weights (weights=apart)."""
        return self.at(self.p.turns_at + factor * 8)

    def init_barriers(self) -> None:
        """Set up all mbarriers (one thread)."""
        from tvm.script import tirx as T
        from tvm.tirx.script.builder import ir as I

        p = self.p

        def init(barrier: Any, arrivals: int) -> None:
            evaluate(T.ptx.mbarrier.init.shared.b64(barrier, T.uint32(arrivals)))

        with I.serial(0, p.groups * p.x_stages) as stage:
            init(self.x_barrier(0, stage), 1)
            init(self.x_barrier(0, stage, empty=True), 4)
        for slots in dict.fromkeys(p.rings):
            with I.serial(0, slots.count * slots.rings) as slot:
                init(self.w_barrier(slots, slot), 1)
                init(self.w_barrier(slots, slot, empty=True), 4 * p.groups // slots.rings)
        for factor in range(2):
            init(self.done(factor), 4 * p.groups)

    # -- producers ----------------------------------------------------------------------------------

    def produce(self) -> None:
        """One thread of a warp for each consumer warpgroup loads its samples, one of another warp all weights."""
        from tvm.script.ir_builder import IRBuilder
        from tvm.tirx.script.builder import ir as I

        p = self.p
        warp = IRBuilder.name("producer", I.Bind((self.tx >> 5) - 4 * p.groups))
        with I.If(self.tx % 32 == 0), I.Then():
            with I.If(warp < p.groups), I.Then():
                self._load_samples(warp)
            with I.If(warp == p.groups), I.Then():
                first, second = p.rings
                rings = [Ring(first.count, 1) for _ in range(first.rings)]
                both = (rings, [Ring(second.count, 1)] if p.apart else rings)
                if p.resident:
                    self._load_weights(both, 0)
                else:
                    with self.tiles() as turn:
                        self._load_weights(both, turn)

    def _load_samples(self, group: Any) -> None:
        """Load a warpgroup's samples, block by block of the first factor."""
        from tvm.script import tirx as T
        from tvm.tirx.script.builder import ir as I

        p = self.p
        ring = Ring(p.x_stages, 1)  # the first wait for an empty stage returns at once
        with self.tiles() as turn:
            row = self.row(turn, group)
            self._await_done(1, turn)
            with I.If(row < p.batch), I.Then(), self.parts(p.first[0], group) as n, I.serial(0, p.first_chunks) as chunk:
                evaluate(T.cuda.mbarrier_wait(self.x_barrier(group, ring.stage, empty=True), ring.phase))
                to = self.at(p.x_at + (group * p.x_stages + ring.stage) * PANEL)
                self._load("x", to, self.x_barrier(group, ring.stage), ROWS, (chunk * STEPS, row, self.part(n, group)))
                ring.advance()

    def _load_weights(self, rings: tuple[list[Ring], list[Ring]], turn: Any) -> None:
        """Load the weights of a tile; rings: by factor."""
        from tvm.script import tirx as T

        p, (a2, _, _, d2) = self.p, self.p.second

        def second(run: Any, panel: Any) -> tuple[Any, ...]:
            k, l = panel % p.second_chunks, panel // p.second_chunks  # noqa: E741 (the axis has that name everywhere)
            return k * STEPS, run % p.j_blocks * p.block_j, l, run // p.j_blocks

        self._await_done(1, turn)
        self._load_parts(0, rings[0], p.first[0], p.first_chunks, lambda i, chunk: (chunk * STEPS, 0, i))
        if p.packs:
            evaluate(T.ptx.griddepcontrol.wait())
        self._await_done(0, turn)
        if not p.gathers:
            self._load_parts(1, rings[1], a2 * p.j_blocks, d2 * p.second_chunks, second)

    def _load_parts(
        self, factor: int, rings: list[Ring], parts: int, panels: int, place: Callable[[Any, Any], tuple[Any, ...]]
    ) -> None:
        """Load the panels of all parts (blocks i or runs of j); several rings have parts in turn, and take panels in turn."""
        from tvm.tirx.script.builder import ir as I

        count = len(rings)
        with I.serial(0, -(-parts // count)) as n, I.serial(0, panels) as panel:
            for which, ring in enumerate(rings):
                part = n * count + which
                if parts % count == 0:
                    self._load_panel(factor, which, ring, place(part, panel))
                else:
                    with I.If(part < parts), I.Then():
                        self._load_panel(factor, which, ring, place(part, panel))

    def _load_panel(self, factor: int, which: int, ring: Ring, place: tuple[Any, ...]) -> None:
        """Load the next panel of a ring, number `which`."""
        from tvm.script import tirx as T

        slots = self.p.rings[factor]
        slot = which * slots.count + ring.stage
        if not self.p.resident:
            evaluate(T.cuda.mbarrier_wait(self.w_barrier(slots, slot, empty=True), ring.phase))
        rows = (self.p.first[1], self.p.block_j)[factor]
        self._load(f"w{factor}", self.at(slots.at + slot * slots.size), self.w_barrier(slots, slot), rows, place)
        ring.advance()

    def _load(self, name: str, to: Any, full: Any, rows: int, place: tuple[Any, ...]) -> None:
        """Have a panel copied."""
        from tvm.script import tirx as T

        evaluate(T.ptx.mbarrier.arrive.expect_tx.shared.b64(full, T.uint32(rows * STEPS * ITEM)))
        evaluate(T.ptx[_LOAD.format(len(place))](to, T.address_of(self.maps[name]), *place, full))

    def _await_done(self, factor: int, turn: Any) -> None:
        """Wait until all warps are done with a factor: the first of this turn, or the second of the turn before it."""
        from tvm.script import tirx as T

        if self.p.apart:
            evaluate(T.cuda.mbarrier_wait(self.done(factor), (turn + factor) % 2))
