"""DTensor in and out of `kron_matmul`: the placements say the grid, and the result has those of x.

    mesh (GM, GK): [Shard(0), Shard(1)]      mesh (n,): [Shard(0)] is the grid (n, 1), [Shard(1)] is (1, n)

Read first: `kron_matmul_dtensor`.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from kronsched.distributed.grid import Grid, as_grid, needed_phases
from kronsched.errors import ArgumentError
from kronsched.nn import checks


def kron_matmul_dtensor(
    x: DTensor, factors: Sequence[Tensor], mesh: DeviceMesh | None, grid: Any, options: dict[str, Any]
) -> DTensor:
    """`kron_matmul` of a DTensor (M, ΠPi); factors are tensors, or DTensors that are replicated on the same mesh."""
    from kronsched.distributed.kron import kron_matmul

    if mesh is not None and mesh != x.device_mesh:
        raise ArgumentError("mesh is not that of the DTensor x_shard: leave it out")
    mesh = x.device_mesh
    if x.dim() != 2:
        raise ArgumentError(f"x_shard has shape {tuple(x.shape)}: (rows, columns) is needed")
    found = _grid(x, mesh)
    if grid is not None and as_grid(grid) != found:
        raise ArgumentError(f"grid={as_grid(grid)} is not {found}, which the placements {list(x.placements)} of x_shard give")
    local = [_replicated(i, f, mesh) for i, f in enumerate(checks.check_factors(factors))]
    needed_phases(tuple((int(f.shape[-2]), int(f.shape[-1])) for f in local), found, options["local"])
    y = kron_matmul(x.to_local(), local, mesh, grid=found, **options)
    shape = (int(x.shape[0]), prod(int(f.shape[-1]) for f in local))
    return DTensor.from_local(y, mesh, x.placements, run_check=False, shape=torch.Size(shape), stride=(shape[1], 1))


def _grid(x: DTensor, mesh: DeviceMesh) -> Grid:
    sizes, placed = tuple(int(size) for size in mesh.mesh.shape), tuple(x.placements)
    if placed == (Shard(0), Shard(1)):
        return Grid(*sizes)
    if placed == (Shard(0),):
        return Grid(sizes[0], 1)
    if placed == (Shard(1),):
        return Grid(1, sizes[0])
    raise ArgumentError(
        f"x_shard has the placements {list(placed)}: [Shard(0), Shard(1)] on a mesh (GM, GK), or [Shard(0)] or [Shard(1)] on "
        "a mesh of one dimension, are needed"
    )


def _replicated(index: int, factor: Tensor, mesh: DeviceMesh) -> Tensor:
    if not isinstance(factor, DTensor):
        return factor
    if factor.device_mesh != mesh or any(p != Replicate() for p in factor.placements):
        raise ArgumentError(
            f"factors[{index}] has the placements {list(factor.placements)}: a tensor, or a DTensor replicated on the "
            "mesh of x_shard, is needed"
        )
    # the gradient that comes back is summed over the ranks already
    local: Tensor = factor.to_local(grad_placements=[Replicate()] * mesh.ndim)
    return local
