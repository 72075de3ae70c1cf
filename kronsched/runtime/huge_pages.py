"""Huge pages for large new CPU tensors: one page fault for 2 MiB instead of one for every 4 KiB, as numpy does for its arrays."""

from __future__ import annotations

import ctypes
import mmap
import sys
from functools import cache
from typing import Any

LEAST_BYTES = 4 << 20
"""Smaller tensors mostly come from memory that the allocator has kept and that has its pages."""
_ADVICE = getattr(mmap, "MADV_HUGEPAGE", None)


def advise(address: int, nbytes: int) -> None:
    """Ask Linux to back the whole pages inside a fresh allocation by huge ones. Only a hint."""
    madvise = _madvise()
    if madvise is None or nbytes < LEAST_BYTES:
        return
    first = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    madvise(first, (address + nbytes - first) // mmap.PAGESIZE * mmap.PAGESIZE, _ADVICE)


@cache
def _madvise() -> Any:
    if sys.platform != "linux" or _ADVICE is None:
        return None
    function = ctypes.CDLL(None).madvise
    function.argtypes, function.restype = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int), ctypes.c_int
    return function
