"""Grids and phases: places, blocks, the fewest elements exchanged, the nearest grid."""

from __future__ import annotations

from itertools import pairwise, product
from math import prod

import pytest
import torch

from kronsched.distributed import Grid, shard, unshard
from kronsched.distributed.grid import Shapes, as_grid, grids, nearest_grid, needed_phases, phases
from kronsched.errors import ArgumentError, ArgumentTypeError


def brute_force(factors: Shapes, columns: int, local: int) -> int | None:
    """The fewest elements of a row in all exchanges over every way to cut the factors into groups; None where none works."""
    n, best = len(factors), None
    for cuts in product([False, True], repeat=n - 1):
        ends = [n, *(i for i in range(n - 1, 0, -1) if cuts[i - 1]), 0]
        moved = 0
        for stop, start in pairwise(ends):
            others = prod(p for p, _ in factors[:start]) * prod(q for _, q in factors[stop:])
            group = prod(q for _, q in factors[start:stop])
            if stop - start > local or others % columns or group % columns:
                break
            moved += others * group
        else:
            best = moved if best is None else min(best, moved)
    return best


SHAPES: list[Shapes] = [
    ((8, 8),) * 4,
    ((4, 2), (2, 4), (3, 5), (4, 8)),
    ((2, 6), (6, 2), (4, 12), (12, 4), (3, 3)),
    ((5, 4),),
    ((16, 2), (2, 16)),
]


@pytest.mark.parametrize("factors", SHAPES)
@pytest.mark.parametrize("columns", [2, 3, 4, 6, 16, 64])
def test_phases_exchange_the_fewest_elements(factors: Shapes, columns: int) -> None:
    for local in range(1, len(factors) + 1):
        found = phases(factors, columns, local)
        least = brute_force(factors, columns, local)
        assert (found is None) == (least is None)
        if found is not None:
            assert sum(p.k_out for p in found) == least
            assert [i for p in reversed(found) for i in range(p.start, p.stop)] == list(range(len(factors)))
            assert max(p.stop - p.start for p in found) <= local


def test_as_many_factors_as_a_block_allows_come_first() -> None:
    found = phases(((8, 8),) * 4, 8)
    assert found is not None
    assert [(p.start, p.stop) for p in found] == [(1, 4), (0, 1)]
    one = phases(((8, 8),) * 4, 1)
    assert one is not None and len(one) == 1, "one column of ranks exchanges nothing"


def test_grids_that_work() -> None:
    assert [str(g) for g in grids(8, ((8, 8),) * 4)] == ["(8, 1)", "(4, 2)", "(2, 4)", "(1, 8)"]
    assert grids(6, ((5, 5), (7, 7))) == [Grid(6, 1)]
    assert nearest_grid(24, ((8, 8),) * 4, 12) == Grid(3, 8)


def test_a_grid_that_cuts_an_axis_names_the_nearest() -> None:
    with pytest.raises(ArgumentError, match=r"grid=\(1, 6\) cannot split .* with 6 ranks is \(3, 2\)"):
        needed_phases(((4, 4), (4, 4)), Grid(1, 6))
    with pytest.raises(ArgumentError, match=r"with local=1: .*nearest grid that works with 16 ranks is \(2, 8\)"):
        needed_phases(((8, 8),) * 3, Grid(1, 16), local=1)
    with pytest.raises(ArgumentTypeError, match="local='2' must be an int"):
        needed_phases(((8, 8),) * 3, Grid(1, 2), local="2")  # type: ignore[arg-type]


@pytest.mark.parametrize("bad", [(0, 1), (1, -2)])
def test_bad_grids(bad: tuple[int, int]) -> None:
    with pytest.raises(ArgumentError, match=r"grid (rows|columns)="):
        as_grid(bad)


@pytest.mark.parametrize("bad", ["2x2", 4, (1, 2, 3), (1.0, 2), (True, 2)])
def test_grids_of_a_wrong_type(bad: object) -> None:
    with pytest.raises(ArgumentTypeError, match="grid"):
        as_grid(bad)


@pytest.mark.parametrize("grid", [Grid(1, 1), Grid(3, 1), Grid(2, 4), Grid(7, 2)])
def test_blocks_make_the_matrix(grid: Grid) -> None:
    x = torch.arange(5 * 16.0).reshape(5, 16)
    blocks = [shard(x, grid, r) for r in range(grid.ranks)]
    assert torch.equal(unshard(blocks, grid), x)
    assert {b.shape[1] for b in blocks} == {16 // grid.columns}
    with pytest.raises(ArgumentError, match="blocks: 0 given"):
        unshard([], grid)


def test_blocks_that_do_not_divide() -> None:
    with pytest.raises(ArgumentError, match=r"grid=\(1, 6\) does not divide 16 columns; .* with 6 ranks is \(3, 2\)"):
        shard(torch.zeros(2, 16), (1, 6), 0)


def test_places() -> None:
    assert Grid(2, 3).place(4) == (1, 1)
    assert Grid(2, 3).row_of(4) == [3, 4, 5]
