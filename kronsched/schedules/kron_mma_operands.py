"""How one step of a tensor-core Kron-Matmul uses registers and lanes: what its program and the layout of its factor agree on."""

from __future__ import annotations

from kronsched.schedules.kron_mma_layout import LANES, spread
from kronsched.schedules.kron_mma_plan import LaunchPlan, Step

_RESIDENT = 32
"""Registers at most in which a unit's factor stays over the units of a warp."""
_PROMOTE = 4
"""k tiles that float32 sums in the tensor core; more are added outside it."""
_IDENTITY = (0, 1, 2)


class StepOperands:
    """Facts about a step that follow from its plan.

    wide: float32.  split: in high and low TF32 parts (`parts` = 2).  per8: chunks of 8 elements.  rounds: units of a warp.
    resident: the factor stays in registers over the rounds.
    promote: each k tile is summed on its own, then added to the accumulators by ordinary additions.
    vec: n8 tiles whose columns are interleaved so that a lane's are neighbours (kron_mma_stores.py).
    k_bits, row_bits, q_bits: bits of an index that t and the half (along p), g (rows of the m16 result) and g (along q, in the
    factor's fragments) stand for, chosen with `kron_mma_layout.spread` so that the lanes of an access hit different banks.
    """

    def __init__(self, plan: LaunchPlan, step: Step) -> None:
        """`step` is one of `plan`."""
        self.s = step
        self.wide = plan.item == 4
        self.split = self.wide and plan.products == 3
        self.parts = 2 if self.split else 1
        self.per8 = 8 * plan.item // 16
        self.rounds = -(-step.units // (plan.threads // LANES))
        self.resident = step.q_parts == 1 and self.rounds > 1 and self._factor_registers() <= _RESIDENT
        self.promote = self.split and step.k_tiles > _PROMOTE
        self.vec = self._vec()
        low, middle, high = spread(step.stride_out)  # bits that the swizzle sends to bank bits 1, 2 and 0
        if not self.wide:
            self.k_bits = self.row_bits = self.q_bits = _IDENTITY
        elif step.by_rows:
            self.k_bits, self.row_bits, self.q_bits = _IDENTITY, (low, middle, high), _IDENTITY
        else:
            self.k_bits = (high, low, middle) if self.vec == 4 else (low, middle, high)
            self.row_bits = {4: (middle, high, low), 2: (middle, low, high), 1: (low, middle, high)}[self.vec]
            # Turned, g is a column 2t + e of the result; there t and e are spread as t and the half along p.
            self.q_bits = (self.k_bits[2], self.k_bits[0], self.k_bits[1]) if step.turned else self.row_bits

    def _vec(self) -> int:
        """n8 tiles whose float32 columns are interleaved: as many as are neighbours wherever a unit lies."""
        s = self.s
        if not self.wide or s.by_rows:
            return 1
        return next(v for v in (4, 2, 1) if s.width % v == 0 and s.stride % (2 * v) == 0 and s.tiles % v == 0)

    def _factor_registers(self) -> int:
        return self.s.k_tiles * self.s.q_tiles * 4 * self.parts

    @property
    def data_registers(self) -> int:
        """Registers of one part of the data of a k tile."""
        return (4 if self.s.by_rows else 2) * self.s.width

    @property
    def partial_registers(self) -> int:
        """Accumulator registers of one q tile."""
        return self.s.accumulators // self.s.q_tiles

    def registers(self) -> dict[str, int]:
        """Sizes of the register arrays: accumulators, data (high and low parts), factor, sums of a k tile."""
        factor = self._factor_registers() if self.resident else 4 * self.parts
        return {
            "acc": self.s.accumulators,
            "x": self.data_registers * self.parts,
            "f": factor,
            "d": self.partial_registers if self.promote else 0,
        }
