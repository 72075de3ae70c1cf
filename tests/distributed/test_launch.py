"""Ranks of one host: what they hand back, and that none of them waits for ever for one that ended or hangs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from kronsched.distributed import CommunicationError, comm, finish
from kronsched.distributed.launch import run_ranks
from kronsched.errors import ArgumentError


def add_up(say: Any, device: torch.device, start: int) -> None:
    total = torch.tensor(float(start + dist.get_rank()), device=device)
    say("first")
    dist.all_reduce(total)
    say((dist.get_world_size(), float(total)))


def fail(say: Any, device: torch.device, how: str) -> None:
    say("started")
    if dist.get_rank() == 1:
        if how == "raises":
            raise ValueError("of its own")
        if how == "is killed":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(600)
    one = torch.zeros(1)
    dist.all_reduce(one)
    dist.all_reduce(one)


def test_results_come_in_order() -> None:
    assert list(run_ranks(add_up, 3, "cpu", (10,))) == ["first", (3, 33.0)]


@pytest.mark.parametrize(
    ("how", "message"),
    [
        pytest.param("raises", "of its own", marks=pytest.mark.slow),
        ("is killed", "rank 1 ended by SIGKILL"),
        ("hangs", "rank 0: "),
    ],
)
def test_no_rank_waits_for_ever(how: str, message: str) -> None:
    found: list[Any] = []
    start = 0.0
    with pytest.raises(CommunicationError, match=message):
        for result in run_ranks(fail, 2, "cpu", (how,), timeout_s=2.0):
            found.append(result)
            start = time.monotonic()
    assert found == ["started"]
    assert time.monotonic() - start < 15


def sleep(say: Any, device: torch.device) -> None:
    say(os.getpid())
    time.sleep(600)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="a process is told of its parent's end on Linux only")
def test_ranks_of_a_killed_launcher_end_too() -> None:
    code = f"""
import sys; sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from kronsched.distributed.launch import run_ranks
from tests.distributed.test_launch import sleep
if __name__ == "__main__":
    found = run_ranks(sleep, 1, "cpu", ())
    print(next(found), flush=True)
    import time; time.sleep(600)
"""
    launcher = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert launcher.stdout is not None
    rank = int(launcher.stdout.readline())
    launcher.kill()
    launcher.wait()
    end = time.monotonic() + 5
    while Path(f"/proc/{rank}").exists() and time.monotonic() < end:
        time.sleep(0.05)
    gone = not Path(f"/proc/{rank}").exists() or "Z" in Path(f"/proc/{rank}/stat").read_text().split(")")[-1]
    assert gone, f"rank {rank} outlived its launcher"


def test_more_ranks_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ArgumentError, match="ranks=2 is not allowed: this host has 1 GPUs"):
        next(iter(run_ranks(add_up, 2, "cuda", ())))


# -- waiting for a GPU ----------------------------------------------------------------------------------


def test_on_a_cpu_there_is_nothing_to_wait_for() -> None:
    finish("cpu")


def test_waiting_ends_when_it_is_ready_or_too_late() -> None:
    answers = iter([False, False, True])
    assert comm.wait_until(lambda: next(answers), 60.0)
    start = time.monotonic()
    assert not comm.wait_until(lambda: False, 0.1)
    assert 0.1 <= time.monotonic() - start < 2


@pytest.mark.parametrize(
    ("ready", "error"), [(True, None), (False, "was not done within 0.05 s"), ("broken", "cuda:0 failed: sad")]
)
def test_a_stream_that_never_ends_is_an_error_and_communication_is_aborted(
    ready: Any, error: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def query() -> bool:
        if ready == "broken":
            raise RuntimeError("sad\nmore")
        return bool(ready)

    aborted: list[int] = []
    monkeypatch.setattr(torch.cuda, "Event", lambda: SimpleNamespace(record=lambda stream: None, query=query))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(comm.dist, "get_rank", lambda: 3)
    monkeypatch.setattr(comm.dist.distributed_c10d, "_abort_process_group", lambda: aborted.append(1))
    if error is None:
        finish("cuda:0", 0.05)
    else:
        with pytest.raises(CommunicationError, match=f"rank 3: .*{error}"):
            finish("cuda:0", 0.05)
    assert aborted == [1] * (ready is False)
