"""One Kron-Matmul over several processes: `torchrun --nproc-per-node 4 examples/kron_distributed.py`.

On GPUs it runs one process a GPU with NCCL, else on CPUs with gloo. Started by plain Python it makes two CPU processes itself.
"""

import os
import tempfile
from datetime import timedelta
from math import prod
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.distributed.device_mesh import init_device_mesh

import kronsched
from kronsched.distributed import Grid, finish, kron_matmul, plan, shard
from kronsched.distributed.comm import counting
from kronsched.distributed.grid import nearest_grid

SHAPES = ((8, 8),) * 4
ROWS = 64
TIMEOUT = timedelta(seconds=60)  # a rank that ends or hangs gives the others a CommunicationError after this time


def compare(device: torch.device) -> None:
    """Split rows and columns over all ranks, multiply, go backward, and compare with one process."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh(device.type, (ranks,))
    torch.manual_seed(0)  # every rank makes the same whole matrices, only to have something to compare with
    x = torch.randn(ROWS, prod(p for p, _ in SHAPES), device=device)
    factors = [(torch.randn(shape, device=device) / 8**0.5).requires_grad_() for shape in SHAPES]
    same = [f.detach().clone().requires_grad_() for f in factors]

    for grid in sorted({Grid(ranks, 1), nearest_grid(ranks, SHAPES, ranks)}):
        with counting() as sent:
            y = kron_matmul(shard(x, grid, rank), factors, mesh, grid=grid, chunks=2)
        finish(device)  # where a rank that ended or hangs shows on a GPU; on a CPU the call itself raises
        expected = shard(kronsched.kron_matmul(x, same), grid, rank)
        torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)
        y.square().sum().backward()
        kronsched.kron_matmul(x, same).square().sum().backward()
        for i, (f, g) in enumerate(zip(factors, same, strict=True)):
            torch.testing.assert_close(f.grad, g.grad, rtol=1e-3, atol=1e-1, msg=lambda m, i=i: f"gradient of factor {i}: {m}")
            f.grad = g.grad = None
        if rank == 0:
            paper = plan(ROWS, SHAPES, ranks, grid=grid, device="nvidia/h200", kernel_us=lambda _: 0.0)
            text = (
                f"grid {grid}: rank 0 sent {sent.bytes} bytes, {paper.exchange_bytes} at least for a rank with {paper.rows} rows"
            )
            print(f"{text}; phases of {[p.stop - p.start for p in paper.phases]} factors")
    if rank == 0:
        print("right: the product and the gradients are those of one process")


def worker(rank: int, ranks: int, meeting_point: str) -> None:
    """One rank of the processes that plain Python starts."""
    dist.init_process_group("gloo", init_method=meeting_point, rank=rank, world_size=ranks, timeout=TIMEOUT)
    torch.set_num_threads(1)
    compare(torch.device("cpu"))
    dist.destroy_process_group()


def main() -> None:
    """As a rank of torchrun, or as the one that starts two."""
    if "RANK" not in os.environ:
        with tempfile.TemporaryDirectory() as folder:
            point = (Path(folder) / "meeting_point").as_uri()
            torch.multiprocessing.spawn(worker, args=(2, point), nprocs=2)
        return
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=TIMEOUT)
    compare(device)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
