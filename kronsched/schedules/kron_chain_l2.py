"""The chained Kron-Matmul kernels' way of bringing a block's rows of X into L2 before they are loaded.

Read first: `bring`.
"""

from __future__ import annotations

from math import ceil
from typing import Any

from kronsched.schedules.kron_chain_plan import ChainPlan
from kronsched.schedules.kron_mma_kernel import evaluate

LINE = 128 // 4
"""32-bit words of a line of L2."""


def bring(plan: ChainPlan, x: Any, block: Any, tx: Any) -> None:
    """Emit the prefetch of a block's rows of x (32-bit words): one instruction a line, by all threads of the thread block."""
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
