"""How the chained Kron-Matmul kernels bring rows of X into L2 before they load them, and overlap with the launch before.

Read first: `bring`, `begin`.
"""

from __future__ import annotations

from math import ceil
from typing import Any

from kronsched.schedules.kron_chain_plan import ChainPlan
from kronsched.schedules.kron_chain_tf32p8_plan import Chain8Plan
from kronsched.schedules.kron_mma_kernel import evaluate

AHEAD_BYTES = 1 << 16
"""What a block asks for before the launch before this one has ended, unless a row is more."""
LINE = 128 // 4
"""32-bit words of a line of L2."""


def bring(plan: ChainPlan | Chain8Plan, x: Any, block: Any, tx: Any) -> None:
    """Emit the prefetch of a block's rows of x (words of 32 bits): one instruction a line, by all threads of the thread block."""
    from tvm.script import tirx as T
    from tvm.tirx.script.builder import ir as I

    words = plan.rows * plan.row_bytes // 4
    total = plan.m * plan.row_bytes // 4
    for v in range(ceil(words / (LINE * plan.threads))):
        line = v * plan.threads + tx
        at = block * words + line * LINE
        inside = None
        if words % (LINE * plan.threads):
            inside = line * LINE < words
        if plan.m % plan.rows:
            inside = at < total if inside is None else T.And(inside, at < total)
        if inside is None:
            evaluate(T.ptx["prefetch.global.L2"](x.ptr_to([at])))
            continue
        with I.If(inside), I.Then():
            evaluate(T.ptx["prefetch.global.L2"](x.ptr_to([at])))


def begin(plan: ChainPlan | Chain8Plan, x: Any, cta: Any, tx: Any) -> None:
    """Emit what a launch that overlaps the one before it does until that has ended: a block's first rows are brought into L2.

    These are all rows that its ring holds, or one; no more than `AHEAD_BYTES`, or one. Nothing is read from x that the launch
    before this one may still write: a line in L2 is written there.
    """
    from tvm.script import tirx as T
    from tvm.tirx.script.builder import ir as I

    if plan.first:
        bring(plan, x, cta, tx)
        for i in range(1, min(plan.rows_at_once, AHEAD_BYTES // plan.row_bytes)):
            with I.If(cta + i * plan.grid < plan.m), I.Then():
                bring(plan, x, cta + i * plan.grid, tx)
    if plan.overlap:
        if plan.sooner:
            evaluate(T.ptx.griddepcontrol.launch_dependents())
        evaluate(T.ptx.griddepcontrol.wait())
        if not plan.sooner:
            evaluate(T.ptx.griddepcontrol.launch_dependents())
