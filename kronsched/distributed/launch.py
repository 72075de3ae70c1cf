"""Starts the ranks of one host and ends them all when one fails; a rank of torchrun is found as it is.

    parent ── spawn ──► rank 0 … rank n−1 ── results through a pipe of rank 0 ──► parent
             a rank ends with an error, or dies: the others get `GRACE_S` for an error of their own and are then killed
             the parent ends, or is killed: so are the ranks

Read first: `run_ranks`.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from kronsched.distributed.comm import CommunicationError
from kronsched.errors import ArgumentError, KronschedError
from kronsched.measure.pools import describe_exit, die_with

GRACE_S = 5.0
"""What the other ranks get to report errors of their own, after one has failed."""
Say = Callable[[Any], None]
"""Hands an object to the caller of `run_ranks`; does nothing on ranks other than 0."""


def under_torchrun() -> bool:
    """Whether this process is a rank that torchrun started."""
    return all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"))


def usable_ranks(kind: str) -> int:
    """How many ranks of "cuda" (one a GPU) or "cpu" this host can run."""
    if kind == "cpu":
        return max(1, os.cpu_count() or 1)
    import torch

    return torch.cuda.device_count()


def check_ranks(ranks: int, kind: str) -> None:
    """ArgumentError for more ranks than this host has GPUs."""
    if kind == "cuda" and ranks > usable_ranks(kind):
        raise ArgumentError(f"ranks={ranks} is not allowed: this host has {usable_ranks(kind)} GPUs, one for each rank")


def run_ranks(
    work: Callable[..., None], ranks: int, kind: str, arguments: Sequence[Any], *, timeout_s: float = 60.0
) -> Iterator[Any]:
    """What rank 0 of `work(say, device, *arguments)` hands to `say`, as it comes; every rank is a process of this host.

    work: a top-level function; in it torch.distributed is initialised, with NCCL for "cuda" and gloo for "cpu".
    timeout_s: of a collective: a rank that ends or hangs ends the others after that time at the latest.
    Raises CommunicationError with the first rank's error when one failed; no rank outlives the iterator.
    """
    check_ranks(ranks, kind)
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="kronsched-ranks-") as folder:
        mine, theirs = context.Pipe(duplex=False)
        todo = (work, ranks, kind, tuple(arguments), timeout_s, folder, os.getpid())
        started = [context.Process(target=_rank, args=(r, theirs if r == 0 else None, *todo), daemon=True) for r in range(ranks)]
        try:
            for process in started:
                process.start()
            theirs.close()
            yield from _watch(started, mine, Path(folder))
        finally:
            for process in started:
                if process.pid is not None:
                    process.kill()
                    process.join()
            mine.close()


def _watch(started: Sequence[Any], results: Connection, folder: Path) -> Iterator[Any]:
    """Results until all ranks have ended; CommunicationError once one has failed and the others had time to follow."""
    failed_at: float | None = None
    more = True
    while True:
        alive = any(p.is_alive() for p in started)  # before the last look at the pipe
        while more and results.poll(0.05):
            try:
                yield results.recv()
            except EOFError:
                more = False
        if failed_at is None and any(p.exitcode for p in started):
            failed_at = time.monotonic()
        if not alive or (failed_at is not None and time.monotonic() - failed_at > GRACE_S):
            break
        if not more:
            time.sleep(0.05)
    if failed_at is not None or any(p.exitcode for p in started):
        raise CommunicationError(_why(started, folder))


def _why(started: Sequence[Any], folder: Path) -> str:
    """The first error that a rank left, else how the first rank ended that gave none."""
    left = sorted(folder.glob("*.error"), key=lambda p: p.stat().st_mtime_ns)
    died = [f"rank {r} {describe_exit(p.exitcode)}" for r, p in enumerate(started) if p.exitcode not in (None, 0, 1)]
    said = [path.read_text(encoding="utf-8").strip() for path in left]
    return "; ".join([*died, *said][:2]) or "a rank ended with an error and left no message"


def _rank(
    rank: int,
    pipe: Connection | None,
    work: Callable[..., None],
    ranks: int,
    kind: str,
    arguments: tuple[Any, ...],
    timeout_s: float,
    folder: str,
    parent: int,
) -> None:
    """One rank. It ends without closing the process group when something failed: that could wait for the others."""
    die_with(parent)  # else a launcher that is killed leaves ranks behind, which hold its GPUs and its terminal
    try:
        with joined(kind, timeout_s, rank, ranks, (Path(folder) / "meeting_point").as_uri()) as device:
            work(pipe.send if pipe is not None else lambda _: None, device, *arguments)
    except BaseException as error:
        text = str(error) if isinstance(error, KronschedError) else traceback.format_exc()
        text = text if text.startswith(f"rank {rank}") else f"rank {rank}: {text}"
        (Path(folder) / f"{rank}.error").write_text(text, encoding="utf-8")
        os._exit(1)


@contextmanager
def joined(
    kind: str, timeout_s: float, rank: int | None = None, ranks: int | None = None, meeting_point: str | None = None
) -> Iterator[Any]:
    """The torch device of this rank, while its process group is there; with no rank given, that of torchrun."""
    import torch
    import torch.distributed as dist

    local = int(os.environ.get("LOCAL_RANK", "0")) if rank is None else rank
    device = torch.device("cuda", local) if kind == "cuda" else torch.device("cpu")
    place = {} if rank is None or ranks is None else {"init_method": meeting_point, "rank": rank, "world_size": ranks}
    if kind == "cuda":
        torch.cuda.set_device(device)
    elif rank is not None:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // (ranks or 1)))
    dist.init_process_group("nccl" if kind == "cuda" else "gloo", timeout=timedelta(seconds=timeout_s), **place)  # type: ignore[arg-type]
    yield device
    dist.destroy_process_group()
