"""Which calls of `kron_matmul` are worth measuring: the numbers of local factors and of pieces, ranked on paper.

    every (local, chunks) that makes other phases or pieces ──► `plan` with kernels at the roofline ──► the first few

The order is that of one machine and one shape, so every rank and the process that builds kernels ahead find the same calls.

Read first: `promising`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import TYPE_CHECKING

from kronsched.distributed.cost import CHUNKS, plan
from kronsched.distributed.grid import Grid, Shapes, phases, positive

if TYPE_CHECKING:
    from kronsched.hardware import Device

Pair = tuple[int, int]
"""(local, chunks), options of `kron_matmul`."""


def distinct_pairs(factors: Shapes, columns: int, chunks: Sequence[int] = CHUNKS) -> list[Pair]:
    """Every number of pieces with every number of local factors that makes other phases, most local factors first."""
    if columns == 1:  # without an exchange nothing is gained by several phases or pieces
        return [(len(factors), 1)]
    locals_of = {phases(factors, columns, local): local for local in range(len(factors), 0, -1)}
    return list(product([local for steps, local in locals_of.items() if steps is not None], dict.fromkeys(chunks)))


def promising(
    m: int,
    factors: Shapes,
    grid: Grid,
    dtype: str,
    device: Device,
    *,
    chunks: Sequence[int] = CHUNKS,
    tries: int | None = None,
) -> list[Pair]:
    """The `tries` pairs with the least time on paper, quickest first; None is all. Pieces of no rows are left out.

    m: rows of all ranks together.  Kernels are taken at the roofline, also those that a log knows, so that pieces of sizes
    nobody tuned do not look better than measured ones.
    """
    from kronsched.hardware import floor_us

    rows = max(1, m // grid.rows)
    pairs = list(dict.fromkeys((local, min(count, rows)) for local, count in distinct_pairs(factors, grid.columns, chunks)))
    if tries is None or len(pairs) <= positive("tries", tries):
        return pairs

    def on_paper(pair: Pair) -> float:
        local, count = pair
        found = plan(
            m,
            factors,
            grid.ranks,
            dtype,
            grid=grid,
            local=local,
            chunks=count,
            device=device,
            kernel_us=lambda workload: floor_us(workload, device),
        )
        return found.us

    return sorted(pairs, key=on_paper)[:tries]
