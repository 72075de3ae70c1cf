"""`kron_matmul` over a mesh of ranks: each holds a block of X and gets the same block of X (F1 ⊗ … ⊗ FN).

Read first: grid.py (how blocks move), `kron_matmul`, then pipeline.py.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from kronsched.distributed import comm
from kronsched.distributed.comm import Shared
from kronsched.distributed.grid import Grid, Shapes, as_grid, nearest_grid, needed_phases, positive
from kronsched.distributed.pipeline import pipeline, stands
from kronsched.errors import ArgumentError, ArgumentTypeError
from kronsched.nn import checks
from kronsched.nn.functional import kron_matmul as local_product


def kron_matmul(
    x_shard: Tensor,
    factors: Sequence[Tensor],
    mesh: DeviceMesh | None = None,
    *,
    local: int | None = None,
    grid: Grid | tuple[int, int] | None = None,
    chunks: int = 1,
    in_place: bool | None = None,
    verify: bool | None = None,
) -> Tensor:
    """One rank's block (m, ΠQi / GK) of Y = X (F1 ⊗ … ⊗ FN), X being spread over a GM × GK grid of the mesh's ranks.

    x_shard: (m, ΠPi / GK), this rank's block as `kronsched.distributed.shard` cuts it. m is the same for the ranks of one row of
    the grid, and may differ between rows (uneven and empty blocks are right).
    factors: 1 to 64 matrices Fi (Pi, Qi), the same on every rank.
    mesh: of one dimension, or of two, (GM, GK). Ranks are taken in row-major order.
    x_shard may also be a DTensor (M, ΠPi) with the placements [Shard(0), Shard(1)], or [Shard(0)] or [Shard(1)] on a mesh of one
    dimension: mesh and grid are then its own, and the result is a DTensor placed in the same way.
    local: the most factors multiplied between two exchanges; None takes the phases that exchange the fewest elements.
    grid: (GM, GK); None is the shape of a two-dimensional mesh, else GK follows from the columns of x_shard.
    chunks: pieces of rows; the exchange of one overlaps with the multiplication of the next.
    in_place: multiply a last phase of one factor from the left, where its axis stands, so that exchanged blocks are copied in
    long runs and not transposed; False is the way of every other phase. None takes it where runs are long (see pipeline.py).
    verify: compare the ranks' arguments first, so that a rank that differs gives an error and not a hang. None: on the CPU only,
    since on a GPU it waits for the device.

    All ranks must call it, and go backward through it, in the same order. Differentiable, twice and more: the gradient of x_shard
    is this rank's block, those of the factors are summed over the ranks (the loss being the sum of the ranks' losses). float32,
    float64, float16 and bfloat16; blocks are exchanged in that dtype. Backends: NCCL, gloo.

    Raises ArgumentError or ArgumentTypeError naming the argument, with the nearest grid that works where a dimension does not
    divide, and CommunicationError when a rank ends or does not answer within the timeout of `init_process_group`.
    """
    if isinstance(x_shard, DTensor):
        from kronsched.distributed.dtensor import kron_matmul_dtensor

        options = {"local": local, "chunks": chunks, "in_place": in_place, "verify": verify}
        return kron_matmul_dtensor(x_shard, factors, mesh, grid, options)
    mesh, factors = _check_mesh(mesh), _check(x_shard, factors)
    _check_place(x_shard, mesh)
    shapes = tuple((int(f.shape[0]), int(f.shape[1])) for f in factors)
    chosen = _grid(x_shard, shapes, mesh, grid)
    steps = needed_phases(shapes, chosen, local)
    positive("chunks", chunks)
    _check_columns(x_shard, shapes, chosen)
    left = stands(steps, chosen, in_place)
    if verify or (verify is None and x_shard.device.type == "cpu"):
        _compare(x_shard, factors, mesh, chosen, (steps, chunks, left))
    learned = torch.is_grad_enabled() and any(f.requires_grad for f in factors)
    alone = chosen.columns == 1 and len(steps) == 1
    if alone and not learned:  # nothing is exchanged, forward or backward
        return local_product(x_shard, factors)
    groups = comm.grid_groups(mesh, chosen, x_shard.device)
    shared: Sequence[Tensor] = factors
    if learned:
        shared = Shared.apply(groups, *factors)  # type: ignore[no-untyped-call]
    if alone:
        return local_product(x_shard, shared)
    return pipeline(x_shard, shared, steps, groups, min(chunks, max(1, x_shard.shape[0])), left)


# -- checks ---------------------------------------------------------------------------------------------


def _check(x_shard: Any, factors: Any) -> list[Tensor]:
    checks.check_x(x_shard)
    if x_shard.dim() != 2:
        raise ArgumentError(f"x_shard has shape {tuple(x_shard.shape)}: (rows, columns) is needed")
    listed = checks.check_factors(factors)
    for i, f in enumerate(listed):
        checks.check_same(f"factors[{i}]", f, x_shard)
        if f.dim() != 2:
            raise ArgumentError(f"factors[{i}] has shape {tuple(f.shape)}: (P, Q) is needed, batches are not spread over ranks")
    return listed


def _check_mesh(mesh: Any) -> DeviceMesh:
    if not isinstance(mesh, DeviceMesh):
        raise ArgumentTypeError(f"mesh is of type {type(mesh).__name__}: a torch.distributed.device_mesh.DeviceMesh is needed")
    if mesh.ndim > 2:
        raise ArgumentError(f"mesh has {mesh.ndim} dimensions: 1, or 2 for (GM, GK), are needed")
    return mesh


def _check_place(x_shard: Tensor, mesh: DeviceMesh) -> None:
    if mesh.device_type != x_shard.device.type:
        raise ArgumentTypeError(f"x_shard is on {x_shard.device}, the mesh is of {mesh.device_type}")
    if mesh.get_coordinate() is None:
        raise ArgumentError(f"mesh: rank {dist.get_rank()} is not one of its ranks {mesh.mesh.flatten().tolist()}")


def _grid(x_shard: Tensor, shapes: Shapes, mesh: DeviceMesh, grid: Any) -> Grid:
    """The grid that is asked for, that of the mesh, or that of the block."""
    ranks, k = mesh.size(), prod(p for p, _ in shapes)
    if grid is not None:
        asked = as_grid(grid)
        if asked.ranks != ranks:
            near = nearest_grid(ranks, shapes, asked.columns)
            raise ArgumentError(f"grid={asked} has {asked.ranks} ranks, the mesh {ranks}; the nearest grid that works is {near}")
        if mesh.ndim == 2 and tuple(mesh.mesh.shape) != (asked.rows, asked.columns):
            raise ArgumentError(f"grid={asked} is not the shape {tuple(mesh.mesh.shape)} of the mesh: leave it out")
        return asked
    if mesh.ndim == 2:
        return Grid(*(int(size) for size in mesh.mesh.shape))
    columns = x_shard.shape[1]
    if columns and k % columns == 0 and ranks % (k // columns) == 0:
        return Grid(ranks * columns // k, k // columns)
    near = nearest_grid(ranks, shapes, max(1, round(k / max(1, columns))))
    raise ArgumentError(
        f"x_shard has {columns} columns, which no grid of {ranks} ranks gives for K={k}; the nearest grid that works is "
        f"{near}, with {k // near.columns} columns"
    )


def _check_columns(x_shard: Tensor, shapes: Shapes, grid: Grid) -> None:
    k = prod(p for p, _ in shapes)
    if x_shard.shape[1] * grid.columns != k:
        raise ArgumentError(
            f"x_shard has {x_shard.shape[1]} columns, {k // grid.columns} are needed: K={k}, the product of the factors' "
            f"rows, over GK={grid.columns} of grid={grid}"
        )


def _compare(x_shard: Tensor, factors: Sequence[Tensor], mesh: DeviceMesh, grid: Grid, rest: tuple[Any, ...]) -> None:
    """An error on every rank when their calls differ."""
    tracked = torch.is_grad_enabled()
    grads = [tracked and f.requires_grad for f in factors]
    gradient_of_x = tracked and x_shard.requires_grad and grid.columns > 1
    same = zlib.crc32(repr((grid, rest, x_shard.dtype, [tuple(f.shape) for f in factors], grads)).encode())
    found = comm.gather_ints((same, x_shard.shape[0], gradient_of_x), mesh, x_shard.device, grid)
    for rank, (other, rows, tracks) in enumerate(found):
        first = rank - rank % grid.columns
        if other != found[0][0]:
            raise ArgumentError(
                f"rank {rank} and rank 0 of the mesh differ in the grid, local, chunks, in_place, the dtype, or the factors' "
                "shapes or requires_grad: these must be equal on all ranks"
            )
        if rows != found[first][1]:
            raise ArgumentError(
                f"x_shard has {rows} rows on rank {rank} of the mesh and {found[first][1]} on rank {first}: equal rows are "
                f"needed in one row of grid={grid}"
            )
        if tracks != found[first][2]:
            raise ArgumentError(
                f"x_shard.requires_grad differs between the ranks {first} and {rank} of the mesh: it must be equal"
            )
