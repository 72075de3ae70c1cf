"""What counts as free memory."""

from __future__ import annotations

import pytest
import torch

from kronsched.hardware import PRESETS, resolve_target
from kronsched.measure.memory import free_bytes, free_host_bytes, release


def test_what_torch_keeps_for_reuse_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (10 << 30, 141 << 30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda index: 120 << 30)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda index: 26 << 30)
    assert free_bytes(PRESETS["nvidia/h200"]) == 104 << 30
    assert 0 < free_bytes(resolve_target("cpu")) <= 2 * free_host_bytes()


def test_a_broken_context_does_not_stop_a_release(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "empty_cache", broken)
    release(PRESETS["nvidia/h200"])
