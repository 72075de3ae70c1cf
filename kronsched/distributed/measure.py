"""Measured figures for a mesh: its link, and the quickest number of local factors and of chunks. Every rank gets the same answer.

Read first: `measure_link`, `measured_choices`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from kronsched.distributed.choices import Pair, distinct_pairs
from kronsched.distributed.comm import everyone, finish
from kronsched.distributed.cost import CHUNKS, Link
from kronsched.distributed.grid import Grid, phases, positive
from kronsched.distributed.kron import kron_matmul
from kronsched.distributed.pipeline import ways
from kronsched.errors import ArgumentError

IN_A_ROW = 3
"""Calls of one timing on a GPU."""


def measure_link(mesh: DeviceMesh, small: int = 2**22, large: int = 2**28, repeats: int = 5) -> Link:
    """The `Link` of an all-to-all by all ranks of the mesh: a line through the times of two sizes of block (bytes a rank)."""
    ranks = mesh.size()
    if ranks < 2:
        raise ArgumentError("mesh has 1 rank: 2 or more are needed to measure a link")
    if not positive("small", small) < positive("large", large):
        raise ArgumentError(f"small={small} is not allowed: an int below large={large} is needed")
    device = _device(mesh)
    group = everyone(mesh, device)
    points = []
    for size in (small, large):
        send = torch.zeros(max(1, size // ranks) * ranks, dtype=torch.uint8, device=device)
        received = torch.empty_like(send)

        def exchange(received: Tensor = received, send: Tensor = send) -> Any:
            return dist.all_to_all_single(received, send, group=group)

        points.append((send.numel() // ranks * (ranks - 1), _time_us(exchange, repeats, group, device)))
    (b0, t0), (b1, t1) = points
    slope = max(t1 - t0, 1e-3) / (b1 - b0)
    return Link(1 / (slope * 1e3), max(0.0, t0 - b0 * slope), f"measured with {ranks} ranks on {device.type}")


@dataclass(frozen=True, order=True)
class Choice:
    """A measured call: the slowest rank's time in microseconds, and the options of `kron_matmul` that gave it."""

    us: float
    local: int
    chunks: int
    in_place: bool = False


def measured_choices(
    x_shard: Tensor,
    factors: Sequence[Tensor],
    mesh: DeviceMesh,
    *,
    grid: Grid | tuple[int, int] | None = None,
    chunks: Sequence[int] = CHUNKS,
    pairs: Sequence[Pair] | None = None,
    repeats: int = 5,
) -> list[Choice]:
    """The options of `kron_matmul` for these arguments, quickest first.

    Measured are every number of local factors that makes other phases, every number of chunks, and `in_place` where it can be.
    pairs: the (local, chunks) to measure instead, such as those of `promising`.
    grid: as in `kron_matmul`. Forward only; call it on every rank.
    """
    shapes = tuple((int(f.shape[0]), int(f.shape[-1])) for f in factors)
    columns = max(1, prod(p for p, _ in shapes) // max(1, x_shard.shape[-1]))
    asked = distinct_pairs(shapes, columns, chunks) if pairs is None else list(pairs)
    local, count = asked[0] if asked else (None, 1)
    with torch.no_grad():
        kron_matmul(x_shard, factors, mesh, grid=grid, local=local, chunks=count)  # checks the arguments
    group, found = everyone(mesh, x_shard.device), []
    for local, count in asked:
        for left in ways(phases(shapes, columns, local) or (), columns):
            options = {"grid": grid, "local": local, "chunks": count, "in_place": left, "verify": False}

            def call(options: Any = options) -> Tensor:
                return kron_matmul(x_shard, factors, mesh, **options)

            with torch.no_grad():
                found.append(Choice(_time_us(call, repeats, group, x_shard.device), local, count, left))
    return sorted(found)


def time_us(call: Callable[[], Any], repeats: int, mesh: DeviceMesh, device: torch.device) -> float:
    """Microseconds of a call that every rank makes: the median of the slowest rank's times."""
    return _time_us(call, repeats, everyone(mesh, device), device)


def _device(mesh: DeviceMesh) -> torch.device:
    if mesh.device_type == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device(mesh.device_type)


def _time_us(call: Callable[[], Any], repeats: int, group: Any, device: torch.device) -> float:
    """Median of the calls' times, each that of the slowest rank; the ranks start each call together."""
    call()  # kernels are built, connections made
    finish(device)
    times = []
    own = [device.index] if device.type == "cuda" and device.index is not None else None
    for _ in range(positive("repeats", repeats)):
        dist.barrier(group, device_ids=own)
        times.append(_once_us(call, device))
    slowest = torch.tensor(times, dtype=torch.float64, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX, group)
    return float(slowest.median())


def _once_us(call: Callable[[], Any], device: torch.device) -> float:
    """Microseconds of one call: by the stream's clock on a GPU, else by the wall's.

    On a GPU calls follow each other as in a loop over batches, so that the host's work for one is hidden behind the one before.
    """
    if device.type != "cuda":
        start = time.perf_counter()
        call()
        return (time.perf_counter() - start) * 1e6
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    first.record()
    for _ in range(IN_A_ROW):
        call()
    last.record()
    finish(device)
    return 1e3 * float(first.elapsed_time(last)) / IN_A_ROW
