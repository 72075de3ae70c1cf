"""Huge pages for large CPU outputs."""

from __future__ import annotations

import mmap
import sys
from pathlib import Path

import pytest
import torch

from kronsched.runtime import huge_pages

THP = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def test_advice_covers_whole_pages_inside_the_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, int, int]] = []
    monkeypatch.setattr(huge_pages, "_madvise", lambda: lambda *args: seen.append(args))
    page = mmap.PAGESIZE
    huge_pages.advise(10 * page + 8, 8 << 20)
    huge_pages.advise(10 * page, huge_pages.LEAST_BYTES - 1)  # small: nothing
    [(first, size, _)] = seen
    assert first == 11 * page and size % page == 0
    assert first + size <= 10 * page + 8 + (8 << 20) < first + size + page


@pytest.mark.skipif(sys.platform != "linux" or not THP.is_file() or "[never]" in THP.read_text(), reason="no huge pages here")
def test_a_fresh_tensor_gets_huge_pages() -> None:
    tensor = torch.empty(64 << 20, dtype=torch.uint8)
    huge_pages.advise(tensor.data_ptr(), tensor.nbytes)
    tensor.fill_(1)
    assert _huge_kb(tensor.data_ptr()) > 0


def _huge_kb(address: int) -> int:
    """AnonHugePages of the mapping that holds an address, from /proc/self/smaps."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = line.split()[0]
        if "-" in head and not head.endswith(":"):
            low, high = (int(n, 16) for n in head.split("-"))
            inside = low <= address + (32 << 20) < high
        elif inside and head == "AnonHugePages:":
            return int(line.split()[1])
    return 0
