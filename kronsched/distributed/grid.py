"""A grid of GM × GK ranks: who holds what of X, and how many factors are multiplied between two exchanges.

Rank r stands in row r // GK and column r % GK of the grid. X (M, K) is cut into GM blocks of rows, each into GK of columns:

    grid 2 × 3      X:  ┌ 0 │ 1 │ 2 ┐        Y = X (F1 ⊗ … ⊗ FN) is cut in the same way. Rows never mix: only the GK ranks
                        └ 3 │ 4 │ 5 ┘        of one row of the grid exchange anything.

The columns of X are the axes (P1, …, PN) in row-major order, so a block of K / GK columns holds whole trailing axes. One phase
multiplies a group of these, (…, P_i … P_j) -> (…, Q_i … Q_j), with no communication, and then an all-to-all moves the new axes
to the front: (lead, Q) is split over lead before, and (Q, lead) over Q after. The next phase finds other axes at the end, and
after the last one every axis has gone round once: the order is the old one. This is FastKron's scheme (arXiv 2401.10187).

In each exchange a rank keeps 1 / GK of its block and sends every other element once, to the rank that needs it.

Read first: `Grid`, `phases`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import log, prod
from typing import TYPE_CHECKING, Any

from kronsched.errors import ArgumentError, ArgumentTypeError

if TYPE_CHECKING:
    from torch import Tensor

Shapes = tuple[tuple[int, int], ...]


@dataclass(frozen=True, order=True)
class Grid:
    """GM × GK ranks: `rows` blocks of rows, `columns` blocks of columns, both ≥ 1."""

    rows: int
    columns: int

    def __post_init__(self) -> None:
        """Both are ints ≥ 1."""
        for name, value in (("rows", self.rows), ("columns", self.columns)):
            positive(f"grid {name}", value)

    @property
    def ranks(self) -> int:
        """GM · GK."""
        return self.rows * self.columns

    def place(self, rank: int) -> tuple[int, int]:
        """(row, column) of a rank."""
        return divmod(rank, self.columns)

    def row_of(self, rank: int) -> list[int]:
        """The ranks that a rank exchanges with, itself among them, in the order of their columns."""
        first = rank - rank % self.columns
        return list(range(first, first + self.columns))

    def __str__(self) -> str:
        return f"({self.rows}, {self.columns})"


@dataclass(frozen=True)
class Phase:
    """Multiply the factors [start, stop), then exchange. Sizes are columns of the whole matrix, not of a rank's block."""

    start: int
    stop: int
    k_in: int
    """Columns before."""
    group_in: int
    """ΠPi of the group."""
    group_out: int
    """ΠQi of the group."""

    @property
    def k_out(self) -> int:
        """Columns after: those that are exchanged."""
        return self.k_in // self.group_in * self.group_out


def as_grid(value: Any) -> Grid:
    """A Grid from a Grid or a pair (GM, GK)."""
    if isinstance(value, Grid):
        return value
    if isinstance(value, str) or not isinstance(value, Sequence) or len(value) != 2:
        raise ArgumentTypeError(f"grid={value!r} is not allowed: a pair (GM, GK) of ints is needed")
    return Grid(value[0], value[1])


def positive(name: str, value: Any) -> int:
    """The value, when it is an int ≥ 1."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ArgumentTypeError(f"{name}={value!r} must be an int ≥ 1")
    if value < 1:
        raise ArgumentError(f"{name}={value} is not allowed: an int ≥ 1 is needed")
    return value


def phases(factors: Shapes, columns: int, local: int | None = None) -> tuple[Phase, ...] | None:
    """The phases that exchange the fewest elements with GK = `columns`, or None where no phases work.

    local: the most factors of a phase; None is as many as a block allows. GK = 1 needs one phase and no exchange. Of equals, the
    fewest phases are taken, and of these the one with most factors first.
    """
    if columns == 1 and local is None:
        return (Phase(0, len(factors), prod(p for p, _ in factors), prod(p for p, _ in factors), prod(q for _, q in factors)),)
    found = _fewest(factors, columns, len(factors) if local is None else local, len(factors))
    return None if found is None else found[1]


@lru_cache(maxsize=4096)
def _fewest(factors: Shapes, columns: int, local: int, left: int) -> tuple[int, tuple[Phase, ...]] | None:
    """(elements exchanged of one row of X, phases) for the first `left` factors, the others being done."""
    if left == 0:
        return 0, ()
    k_in = prod(p for p, _ in factors[:left]) * prod(q for _, q in factors[left:])
    best: tuple[int, tuple[Phase, ...]] | None = None
    for count in range(min(local, left), 0, -1):
        group = factors[left - count : left]
        phase = Phase(left - count, left, k_in, prod(p for p, _ in group), prod(q for _, q in group))
        if k_in // phase.group_in % columns or phase.group_out % columns:
            continue  # a block would cut an axis of the group
        rest = _fewest(factors, columns, local, left - count)
        if rest is None:
            continue
        moved = rest[0] + (phase.k_out if columns > 1 else 0)
        if best is None or (moved, 1 + len(rest[1])) < (best[0], len(best[1])):
            best = moved, (phase, *rest[1])
    return best


def grids(ranks: int, factors: Shapes, local: int | None = None) -> list[Grid]:
    """Every grid of so many ranks that can multiply these factors, by rising GK; GM = ranks, GK = 1 is always there."""
    fitting = [c for c in range(1, ranks + 1) if ranks % c == 0]
    return [Grid(ranks // c, c) for c in fitting if phases(factors, c, local) is not None]


def nearest_grid(ranks: int, factors: Shapes, columns: int, local: int | None = None) -> Grid:
    """The grid that works whose GK is nearest, as a ratio, to the one asked for."""
    return min(grids(ranks, factors, local), key=lambda g: abs(log(g.columns / columns)))


def needed_phases(factors: Shapes, grid: Grid, local: int | None = None) -> tuple[Phase, ...]:
    """The phases of a grid; ArgumentError names the nearest grid that works where this one does not."""
    if local is not None:
        positive("local", local)
    found = phases(factors, grid.columns, local)
    if found is not None:
        return found
    text = ", ".join(f"{p}x{q}" for p, q in factors)
    limit = "" if local is None else f" with local={local}"
    near = nearest_grid(grid.ranks, factors, grid.columns, local)
    raise ArgumentError(
        f"grid={grid} cannot split the factors {text}{limit}: {grid.columns} blocks of columns cut an axis of every group of "
        f"factors; the nearest grid that works with {grid.ranks} ranks is {near}"
    )


def shard(matrix: Tensor, grid: Grid | tuple[int, int], rank: int) -> Tensor:
    """The block (m, K / GK) of a whole matrix (M, K) that a rank holds; rows are cut as by torch.tensor_split, even or not."""
    grid = as_grid(grid)
    row, column = grid.place(rank)
    k = matrix.shape[1]
    if k % grid.columns:
        fits = max(c for c in range(1, grid.columns + 1) if k % c == 0 and grid.ranks % c == 0)
        raise ArgumentError(
            f"grid={grid} does not divide {k} columns; the nearest grid that does with {grid.ranks} ranks is "
            f"{Grid(grid.ranks // fits, fits)}"
        )
    width = k // grid.columns
    return matrix.tensor_split(grid.rows)[row][:, column * width : (column + 1) * width].contiguous()


def unshard(blocks: Sequence[Tensor], grid: Grid | tuple[int, int]) -> Tensor:
    """The whole matrix from every rank's block, in the order of the ranks: the inverse of `shard`."""
    import torch

    grid = as_grid(grid)
    if len(blocks) != grid.ranks:
        raise ArgumentError(f"blocks: {len(blocks)} given, grid={grid} has {grid.ranks}")
    return torch.cat([torch.cat(list(blocks[r : r + grid.columns]), 1) for r in range(0, grid.ranks, grid.columns)])
