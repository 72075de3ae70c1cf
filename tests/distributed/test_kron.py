"""The distributed product on gloo ranks: values, gradients, bytes, dtypes, meshes, errors; ranks that die or hang."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from kronsched.distributed import (
    CommunicationError,
    Grid,
    kron,
    kron_matmul,
    measure_link,
    measured_choices,
    pipeline,
    plan,
    shard,
)
from kronsched.distributed.comm import counting
from kronsched.distributed.grid import grids
from kronsched.errors import ArgumentError, UserError
from tests.distributed.ranks import by_torch, make, run

SQUARE = ((4, 4),) * 4
RECTANGULAR = ((4, 2), (2, 4), (3, 5), (4, 8))
SHRINKING = ((8, 4), (8, 2), (8, 8))


def message(call: Callable[[], Any]) -> str:
    """The text of the user error that the call raises."""
    try:
        call()
    except UserError as error:
        return str(error)
    raise AssertionError("no error")


def one_us(workload: object) -> float:
    """A kernel time for plans of which only the bytes matter."""
    return 1.0


# -- what each rank does --------------------------------------------------------------------------------


def products(rank: int, ranks: int) -> list[str]:
    """Values and bytes sent for all grids, phases and chunks; returns the grids."""
    without_builds()
    mesh = init_device_mesh("cpu", (ranks,))
    seen = []
    for shapes in (SQUARE, RECTANGULAR, SHRINKING):
        x, factors = make(5, shapes)
        whole = by_torch(x, factors)
        for grid in grids(ranks, shapes):
            seen.append(f"{grid}")
            for chunks, local in ((1, None), (2, None), (7, None), (2, 2)):
                if grid not in grids(ranks, shapes, local):
                    continue
                with counting() as sent:
                    y = kron_matmul(shard(x, grid, rank), factors, mesh, grid=grid, chunks=chunks, local=local)
                torch.testing.assert_close(y, shard(whole, grid, rank))
                paper = plan(5, shapes, ranks, "float64", grid=grid, local=local, chunks=chunks, device="cpu", kernel_us=one_us)
                assert sent.bytes * paper.rows == paper.exchange_bytes * y.shape[0], (grid, chunks, local)
                assert sent.exchanges == (0 if grid.columns == 1 else len(paper.phases) * max(1, min(chunks, y.shape[0])))
    return seen


def gradients(rank: int, ranks: int) -> None:
    """Gradients, and gradients of gradients, against one process, with uneven and empty blocks of rows."""
    without_builds()
    mesh = init_device_mesh("cpu", (ranks,))
    for m, shapes, grid in [(m, s, g) for m in (1, 5) for s in (SQUARE, RECTANGULAR) for g in grids(ranks, s)]:
        x, factors = make(m, shapes)
        spread = partial(kron_matmul, mesh=mesh, grid=grid, chunks=2)
        found = _two_gradients(shard(x, grid, rank), factors, spread)
        expected = _two_gradients(x, factors, by_torch)
        for got, want in zip(found, expected, strict=True):
            torch.testing.assert_close(got[0], shard(want[0], grid, rank))
            torch.testing.assert_close(got[1:], want[1:])


def _two_gradients(x: Any, factors: Any, call: Any) -> list[list[Any]]:
    """The gradients of Σ y³, and of the sum of their squares: those of all blocks, and of one rank's copy of the factors."""
    inputs = [t.detach().clone().requires_grad_() for t in (x, *factors)]
    first = torch.autograd.grad(call(inputs[0], inputs[1:]).pow(3).sum(), inputs, create_graph=True)
    owner = 1.0 if call is by_torch or dist.get_rank() == 0 else 0.0
    total = first[0].square().sum() + owner * sum(g.square().sum() for g in first[1:])
    return [list(first), list(torch.autograd.grad(total, inputs))]


def with_kernels(rank: int, ranks: int) -> None:
    """The package's own kernels, every dtype, two dimensions of mesh, backward."""
    mesh = init_device_mesh("cpu", (1, ranks))
    grid = Grid(1, ranks)
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-5), (torch.float16, 1e-2), (torch.bfloat16, 5e-2)):
        x, factors = make(2, SQUARE, dtype)
        for f in factors:
            f.requires_grad_()
        y = kron_matmul(shard(x, grid, rank), factors, mesh)
        assert y.dtype == dtype
        same = [f.detach().double().requires_grad_() for f in factors]
        whole = by_torch(x.double(), same)
        assert (y.double() - shard(whole, grid, rank)).abs().max() <= tolerance * whole.abs().max()
        if dtype in (torch.float64, torch.bfloat16):
            y.sum().backward()
            whole.sum().backward()
            for f, g in zip(factors, same, strict=True):
                assert f.grad is not None and g.grad is not None and f.grad.dtype == dtype
                assert (f.grad.double() - g.grad).abs().max() <= 2 * tolerance * g.grad.abs().max()


def errors(rank: int, ranks: int) -> list[str]:
    """Messages of calls that are wrong in the same way on every rank, or that differ between ranks."""
    without_builds()
    mesh = init_device_mesh("cpu", (ranks,))
    x, factors = make(4, SQUARE)
    rows = Grid(ranks, 1)
    calls: list[Callable[[], Any]] = [
        lambda: kron_matmul(x, factors, mesh, grid=(1, ranks + 1)),
        lambda: kron_matmul(x[:, :100], factors, mesh),
        lambda: kron_matmul(x[:, :100], factors, mesh, grid=rows),
        lambda: kron_matmul(x, factors, mesh, grid=rows, local=0),
        lambda: kron_matmul(x, factors, mesh, grid=rows, chunks=1 + rank),
        lambda: kron_matmul(x, factors, "mesh"),  # type: ignore[arg-type]
        lambda: kron_matmul(x, [*factors[:3], factors[3].float()], mesh),
        lambda: kron_matmul(x, factors, mesh, grid="2x1"),  # type: ignore[arg-type]
    ]
    found = [message(call) for call in calls]
    if ranks == 2:
        block = shard(x, (1, 2), rank)
        found.append(message(lambda: kron_matmul(block[: 3 + rank], factors, mesh)))
        found.append(message(lambda: kron_matmul(block.clone().requires_grad_(rank == 1), factors, mesh)))
    if ranks == 3:
        found.append(message(lambda: kron_matmul(x[:, :96], factors, mesh, grid=(1, 3))))
    return found


def part_of_the_world(rank: int, ranks: int) -> None:
    """A mesh of some ranks in an order of its own, beside others; two grids of one mesh."""
    without_builds()
    meshes = [DeviceMesh("cpu", ids) for ids in ([3, 1], [0, 2])]
    x, factors = make(3, SQUARE)
    mesh = meshes[0] if rank in (1, 3) else meshes[1]
    index = mesh.mesh.tolist().index(rank)
    for grid in (Grid(1, 2), Grid(2, 1)):
        leaves = [f.clone().requires_grad_() for f in factors]
        y = kron_matmul(shard(x, grid, index), leaves, mesh, grid=grid)
        torch.testing.assert_close(y, shard(by_torch(x, factors), grid, index))
        y.sum().backward()
        same = [f.clone().requires_grad_() for f in factors]
        by_torch(x, same).sum().backward()
        torch.testing.assert_close([f.grad for f in leaves], [f.grad for f in same])
    uneven = shard(x, (1, 2), index)[: 2 + index]
    assert message(lambda: kron_matmul(uneven, factors, mesh)).startswith(
        "x_shard has 3 rows on rank 1 of the mesh and 2 on rank 0"
    )
    assert "is not one of its ranks" in message(lambda: kron_matmul(x, factors, meshes[0 if rank in (0, 2) else 1]))


def dtensors(rank: int, ranks: int) -> list[str]:
    """DTensors in and out, with gradients, uneven rows among them; returns messages."""
    without_builds()
    x, factors = make(5, RECTANGULAR)
    flat, square = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))
    for mesh, placements in ((flat, [Shard(0)]), (flat, [Shard(1)]), (square, [Shard(0), Shard(1)])):
        copies = [[f.clone().requires_grad_() for f in [x, *factors]] for _ in range(2)]
        spread = distribute_tensor(copies[0][0], mesh, placements)
        leaves = [distribute_tensor(copies[0][1], mesh, [Replicate()] * mesh.ndim), *copies[0][2:]]
        y = kron_matmul(spread, leaves)
        whole = by_torch(copies[1][0], copies[1][1:])
        assert isinstance(y, DTensor) and y.placements == spread.placements
        torch.testing.assert_close(y.full_tensor(), whole)
        y.to_local().square().sum().backward()
        whole.square().sum().backward()
        for got, want in zip([spread, *leaves], copies[1], strict=True):
            grad = got.grad
            torch.testing.assert_close(grad.full_tensor() if isinstance(grad, DTensor) else grad, want.grad)
    bad = distribute_tensor(x, square, [Shard(0), Replicate()])
    return [
        message(lambda: kron_matmul(bad, factors)),
        message(lambda: kron_matmul(spread, factors, flat)),
        message(lambda: kron_matmul(spread, factors, grid=(4, 1))),
        message(lambda: kron_matmul(spread, [distribute_tensor(factors[0], square, [Shard(0), Shard(1)]), *factors[1:]])),
    ]


def broken(rank: int, ranks: int) -> dict[str, Any]:
    """Rank 1 is killed and rank 3 hangs after a first call: what the other two see, and after how long."""
    without_builds()
    mesh, grid = init_device_mesh("cpu", (4,)), Grid(2, 2)
    x, factors = make(4, SQUARE)
    block = shard(x, grid, rank)
    kron_matmul(block, factors, mesh)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 3:
        time.sleep(6)
        return {}
    seen = {}
    for name, verify in (("exchange", False), ("verify", True)):
        start = time.monotonic()
        try:
            kron_matmul(block, factors, mesh, verify=verify)
        except CommunicationError as error:
            seen[name] = [str(error), time.monotonic() - start]
    return seen


def without_builds() -> None:
    """In this process products are made by torch: many shapes cost little."""
    kron.local_product = pipeline.local_product = by_torch
    pipeline.ks_matmul = lambda x, w, layout: (w[..., 0] @ x.reshape(*w.shape[:1], w.shape[2], -1)).reshape(-1, x.shape[1])


def measured(rank: int, ranks: int) -> None:
    """A link and choices: the same on every rank, and choices that work."""
    without_builds()
    mesh = init_device_mesh("cpu", (ranks,))
    link = measure_link(mesh, small=2**12, large=2**20, repeats=3)
    assert link.gbs > 0 and link.latency_us >= 0
    x, factors = make(4, SQUARE)
    block = shard(x, (1, ranks), rank)
    found = measured_choices(block, factors, mesh, chunks=(1, 2), repeats=1)
    ways = [(1, False), (2, False), (3, False), (3, True)]
    assert sorted((c.local, c.in_place, c.chunks) for c in found) == [(*way, count) for way in ways for count in (1, 2)]
    assert found == sorted(found)
    few = measured_choices(block, factors, mesh, pairs=[(3, 2)], repeats=1)
    assert sorted((c.local, c.in_place, c.chunks) for c in few) == [(3, False, 2), (3, True, 2)]
    assert "rows" in message(lambda: measured_choices(block[0], factors, mesh))
    both: list[Any] = [None] * ranks
    dist.all_gather_object(both, (link, found))
    assert both[0] == both[1]
    kron_matmul(block, factors, mesh, local=found[0].local, chunks=found[0].chunks)
    assert "small=8 is not allowed" in message(lambda: measure_link(mesh, small=8, large=8))


def wide(rank: int, ranks: int) -> list[str]:
    """Eight ranks."""
    seen = products(rank, ranks)
    gradients(rank, ranks)
    return seen


def small(rank: int, ranks: int) -> list[str]:
    """Two or three ranks."""
    products(rank, ranks)
    gradients(rank, ranks)
    found = errors(rank, ranks)
    if ranks == 2:
        with_kernels(rank, ranks)
        measured(rank, ranks)
    return found


def middle(rank: int, ranks: int) -> list[str]:
    """Four ranks."""
    gradients(rank, ranks)
    part_of_the_world(rank, ranks)
    return [*dtensors(rank, ranks), *products(rank, ranks)]


# -- tests ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [2, 3])
def test_few_ranks(ranks: int, tmp_path: Path) -> None:
    told = run(ranks, small, tmp_path)
    assert all(t == told[0] for t in told[1:]), "every rank tells the same"
    expected = [
        f"grid=(1, {ranks + 1}) has {ranks + 1} ranks, the mesh {ranks}; the nearest grid that works is ",
        "x_shard has 100 columns, which no grid of",
        f"x_shard has 100 columns, 256 are needed: K=256, the product of the factors' rows, over GK=1 of grid=({ranks}, 1)",
        "local=0 is not allowed",
        "rank 1 and rank 0 of the mesh differ in the grid, local, chunks",
        "mesh is of type str",
        "factors[3] has dtype float32, float64 is needed",
        "grid='2x1' is not allowed",
    ]
    if ranks == 2:
        expected += ["x_shard has 4 rows on rank 1 of the mesh and 3 on rank 0", "x_shard.requires_grad differs"]
    else:
        expected += ["grid=(1, 3) cannot split the factors 4x4, 4x4, 4x4, 4x4: 3 blocks of columns"]
        assert told[0][-1].endswith("the nearest grid that works with 3 ranks is (3, 1)")
    for text, start in zip(told[0], expected, strict=True):
        assert text.startswith(start)
        assert "\n" not in text


def test_four_ranks(tmp_path: Path) -> None:
    told = run(4, middle, tmp_path)[0]
    assert {"(4, 1)", "(2, 2)", "(1, 4)"} <= set(told[4:])
    assert told[0].startswith("x_shard has the placements [Shard(dim=0), Replicate()]: ")
    assert told[1].startswith("mesh is not that of the DTensor")
    assert told[2].startswith("grid=(4, 1) is not (2, 2), which the placements")
    assert told[3].startswith("factors[0] has the placements [Shard(dim=0), Shard(dim=1)]: ")


def test_eight_ranks(tmp_path: Path) -> None:
    assert {"(8, 1)", "(4, 2)", "(2, 4)", "(1, 8)"} <= set(run(8, wide, tmp_path)[0])


def test_a_rank_that_dies_or_hangs_ends_the_others_in_time(tmp_path: Path) -> None:
    told = run(4, broken, tmp_path, timeout=2, killed=(1,))
    for rank in (0, 2):
        for what in ("exchange", "verify"):
            text, seconds = told[rank][what]
            assert text.startswith(f"rank {rank} of grid (2, 2): ")
            assert "another rank ended, did not answer within 2 s or called something else" in text
            assert seconds < 6
    assert "exchange 1 of 2 failed" in told[0]["exchange"][0]


# -- a last factor that stays where it is ---------------------------------------------------------------


def _in_place(rank: int, ranks: int) -> dict[str, Any]:
    mesh, sent = init_device_mesh("cpu", (ranks,)), []
    for shapes, m in ((((4, 4),) * 3, 5), (((4, 6), (2, 2), (3, 4)), 3), (((4, 2), (4, 4)), 1), (((2, 2), (4, 4)), 0)):
        x, factors = make(m, shapes)
        grid = Grid(1, ranks)
        expected = by_torch(x, factors)
        for chunks in (1, 2, 9):
            with counting() as counter:
                y = kron_matmul(shard(x, grid, rank), factors, mesh, grid=grid, in_place=True, chunks=chunks)
            torch.testing.assert_close(y, shard(expected, grid, rank))
            least = plan(max(m, 1), shapes, ranks, "float64", grid=grid, device="nvidia/h200", kernel_us=lambda w: 1.0)
            sent.append((counter.bytes, least.exchange_bytes if m else 0))
            block = shard(x, grid, rank).requires_grad_()
            tracked = [f.clone().requires_grad_() for f in factors]
            kron_matmul(block, tracked, mesh, grid=grid, in_place=True, chunks=chunks).square().sum().backward()
            whole, same = x.clone().requires_grad_(), [f.clone().requires_grad_() for f in factors]
            by_torch(whole, same).square().sum().backward()
            torch.testing.assert_close([f.grad for f in tracked], [f.grad for f in same])
            torch.testing.assert_close(block.grad, shard(whole.grad, grid, rank))
    with pytest.raises(ArgumentError, match=r"in_place=True is not allowed.*here are 1\+2"):
        kron_matmul(torch.zeros(1, 12), [torch.zeros(4, 6), torch.zeros(2, 3), torch.zeros(3, 4)], mesh, in_place=True)
    return {"sent": sent}


def test_in_place_gives_the_same_and_sends_as_little(tmp_path: Path) -> None:
    for found in run(2, _in_place, tmp_path):
        assert all(sent == least for sent, least in found["sent"])
