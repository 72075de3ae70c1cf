"""Runs a function on several gloo ranks, each a process of this machine, and says what each left behind."""

from __future__ import annotations

import json
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_PRELOAD = [
    "torch",
    "torch.distributed",
    "torch.distributed.device_mesh",
    "kronsched.distributed.kron",
    "kronsched.distributed.cost",
]


def run(ranks: int, work: Callable[..., Any], folder: Path, *, timeout: float = 20, killed: tuple[int, ...] = ()) -> list[Any]:
    """What `work(rank, ranks)` returned on each rank, as JSON; fails with the traceback of a rank that raised. A rank in `killed`
    is to end by a signal, and gives None."""
    context = multiprocessing.get_context("forkserver")  # imports once for all ranks
    context.set_forkserver_preload(_PRELOAD)
    processes = [context.Process(target=_rank, args=(r, ranks, work, str(folder), timeout)) for r in range(ranks)]
    for process in processes:
        process.start()
    deadline, failed = time.monotonic() + 2 * 60, False
    while any(p.is_alive() for p in processes) and time.monotonic() < deadline:
        time.sleep(0.05)
        if not failed and any(folder.glob("*.error")):  # the others may wait for that rank: a moment for their own errors
            deadline, failed = time.monotonic() + 5, True
    alive = [r for r, process in enumerate(processes) if process.is_alive()]
    for process in processes:
        process.kill()
        process.join()
    errors = "\n".join(path.read_text() for path in sorted(folder.glob("*.error")))
    assert not errors, errors
    assert not alive, f"ranks {alive} did not end"
    assert [r for r, p in enumerate(processes) if p.exitcode] == list(killed), [p.exitcode for p in processes]
    return [None if r in killed else json.loads((folder / f"{r}.json").read_text()) for r in range(ranks)]


def _rank(rank: int, ranks: int, work: Callable[..., Any], folder: str, timeout: float) -> None:
    torch.set_num_threads(1)
    try:
        point = (Path(folder) / "meeting_point").as_uri()
        dist.init_process_group("gloo", init_method=point, rank=rank, world_size=ranks, timeout=timedelta(seconds=timeout))
        (Path(folder) / f"{rank}.json").write_text(json.dumps(work(rank, ranks)))
    except BaseException:
        (Path(folder) / f"{rank}.error").write_text(f"rank {rank}: {traceback.format_exc()}")
    os._exit(0)  # the group of a failed test cannot be closed


def by_torch(x: Tensor, factors: Any) -> Tensor:
    """The product by torch.kron: nothing is built, so that many shapes cost little."""
    whole = factors[0]
    for f in list(factors)[1:]:
        whole = torch.kron(whole, f)
    return x @ whole


def make(m: int, shapes: Any, dtype: torch.dtype = torch.float64) -> tuple[Tensor, list[Tensor]]:
    """X (m, ΠPi) and factors, the same on every rank."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(m, prod(p for p, _ in shapes), generator=generator, dtype=torch.float64)
    return x.to(dtype), [torch.randn(pair, generator=generator, dtype=torch.float64).to(dtype) for pair in shapes]
