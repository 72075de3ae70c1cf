"""What a timing on a GPU is made of, with events that stand in for the GPU's."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kronsched.distributed import measure


def test_a_timing_on_a_gpu_is_of_several_calls_in_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            done.append("event")

        def elapsed_time(self, other: Any) -> float:
            return 6.0  # milliseconds

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(measure, "finish", lambda device: done.append("finish"))
    us = measure._once_us(lambda: done.append("call"), torch.device("cuda", 0))
    assert done == ["event", "call", "call", "call", "event", "finish"]
    assert us == pytest.approx(2000.0)
