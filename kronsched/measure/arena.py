"""Input and output buffers with canary bands around each, in as many copies as timing rotates over.

    one set:   |band|  x  |band|band|  f0  |band| … |band|  y  |band|        band ≥ 4 KiB, tensors 256-byte aligned
    arena:     set 0 (checked), set 1 … set n−1 (timing only), in one allocation of shape (n, stride) bytes

Bands of inputs hold 0xFF, which is NaN in every floating dtype, so that a read beyond an input shows in the result.
Bands of the output hold 0xA5, so that what was read beyond an input and written beyond the output shows too.
Unwritten outputs show because the output is filled with 0xFF (NaN, −1) before one run and with 0x5B before the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

BAND = 4096
ALIGN = 256
INPUT_BAND = 0xFF
OUTPUT_BAND = 0xA5
POISONS = (0xFF, 0x5B)
"""Fill bytes of the output before the first and the second checked run."""
COMPARE_BYTES = 1 << 28
"""Compared at a time: what a comparison of more needs beside both would be gigabytes."""


class Arena:
    """Guarded sets of (inputs, output) for tensors like the given ones. Reused from candidate to candidate.

    inputs, output: tensors on the device that give shapes and dtypes; their values are not kept.  sets: copies, ≥ 1.
    """

    def __init__(self, inputs: Sequence[torch.Tensor], output: torch.Tensor, sets: int) -> None:
        """Allocate; `load` fills it."""
        import torch

        self._spans, stride = [], 0
        for tensor in (*inputs, output):
            first = _round_up(stride + BAND)
            self._spans.append((first, tensor.nbytes))
            stride = first + tensor.nbytes + BAND
        stride = _round_up(stride)
        raw = torch.empty(sets * stride + ALIGN, dtype=torch.uint8, device=output.device)
        shift = -raw.data_ptr() % ALIGN
        self._slab = raw[shift : shift + sets * stride].view(sets, stride)
        like = (*inputs, output)
        self.sets: list[tuple[list[torch.Tensor], torch.Tensor]] = []
        for row in self._slab:
            views = [
                row[first : first + size].view(tensor.dtype).view(tensor.shape)
                for (first, size), tensor in zip(self._spans, like, strict=True)
            ]
            self.sets.append((views[:-1], views[-1]))
        self.stale = True
        """Whether sets 1… may hold anything but valid inputs (never filled, or a candidate misbehaved)."""

    def load(self, inputs: Sequence[torch.Tensor]) -> None:
        """Set 0 gets these inputs, whole bands and a poisoned output; the other sets get a copy of it when stale."""
        row = self._slab[0]
        row.fill_(INPUT_BAND)
        row[self._spans[-1][0] - BAND :].fill_(OUTPUT_BAND)
        for view, value in zip(self.sets[0][0], inputs, strict=True):
            view.copy_(value)
        self.poison(0)
        if self.stale and len(self.sets) > 1:
            self._slab[1:] = row
        self.stale = False

    def poison(self, which: int) -> None:
        """Fill set 0's output with byte `POISONS[which]`."""
        first, size = self._spans[-1]
        self._slab[0, first : first + size].fill_(POISONS[which])

    def output_bytes(self) -> torch.Tensor:
        """Set 0's output as a flat uint8 view."""
        first, size = self._spans[-1]
        return self._slab[0, first : first + size]

    def unwritten(self, first: torch.Tensor) -> int:
        """Elements of set 0's output that kept both poisons: `first` is `output_bytes` after the run on the first one."""
        width = self.sets[0][1].element_size()
        before, after = first.view(-1, width), self.output_bytes().view(-1, width)
        step, count = COMPARE_BYTES // width, 0
        for i in range(0, len(before), step):
            kept = (before[i : i + step] == POISONS[0]) & (after[i : i + step] == POISONS[1])
            count += int(kept.all(dim=1).sum())
        return count

    def damage(self, names: Sequence[str], inputs: Sequence[torch.Tensor]) -> str | None:
        """None when set 0's bands are whole and its inputs unchanged, else one line naming the tensor.

        names: of the inputs, then of the output.  inputs: what `load` was given.
        """
        for name, (first, size) in zip(names, self._spans, strict=True):
            row, band = self._slab[0], OUTPUT_BAND if (first, size) == self._spans[-1] else INPUT_BAND
            for side, part in (("before", row[first - BAND : first]), ("after", row[first + size : first + size + BAND])):
                changed = int((part != band).sum())
                if changed:
                    return f"wrote out of bounds: {changed} bytes changed just {side} tensor {name!r}"
        for name, view, value in zip(names, self.sets[0][0], inputs, strict=False):
            if not same_bytes(view, value):
                return f"changed its input {name!r}"
        return None


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two contiguous tensors of equal size hold the same bytes (NaN equals NaN, −0 differs from 0)."""
    import torch

    x, y = a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8)
    words = x.numel() - x.numel() % 8
    # A GPU compares words of 8 bytes several times as fast as bytes.
    if words and not any(n % 8 for t in (x, y) for n in (t.data_ptr(), t.storage_offset())):
        return _equal(x[:words].view(torch.int64), y[:words].view(torch.int64)) and _equal(x[words:], y[words:])
    return _equal(x, y)


def _equal(x: torch.Tensor, y: torch.Tensor) -> bool:
    import torch

    step = COMPARE_BYTES // x.element_size()
    return all(torch.equal(x[i : i + step], y[i : i + step]) for i in range(0, x.numel(), step))


def _round_up(n: int) -> int:
    return (n + ALIGN - 1) // ALIGN * ALIGN
