"""Which kernels serve a Kronecker-sparse product with an epilogue: one that has it built in, or a plain one and torch's passes.

The record of the plain product says how fast each schedule is. Where the fastest one, or a formulation of torch's, has no
epilogue, it still wins if it saves more time than torch's element-wise passes over y take.

Read first: `FusedKernels`.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kronsched import registry
from kronsched.errors import ArgumentError
from kronsched.nn.ks_dynamic import KSKernels, kernels_for
from kronsched.records import database
from kronsched.workloads.ks import KSMatmul, Pattern
from kronsched.workloads.ks_epilogue import Epilogue, finished

if TYPE_CHECKING:
    import torch

    from kronsched.hardware import Device
    from kronsched.records.schema import TuningRecord

LAUNCH_US = 1.5
"""Microseconds of an element-wise pass whose tensors are tiny."""


class FusedKernels:
    """The kernels of one chain of patterns, layout, dtype, device and epilogue. Thread-safe."""

    def __init__(self, patterns: tuple[Pattern, ...], layout: str, dtype: str, device: str, epilogue: Epilogue) -> None:
        """Nothing is built yet."""
        self.epilogue, self.layout = epilogue, layout
        self.plain = kernels_for(patterns, layout, dtype, device)
        self.fused = KSKernels(patterns, layout, dtype, device, epilogue)
        self._apart: dict[int, bool] = {}

    def __call__(
        self,
        x: torch.Tensor,
        weights: Sequence[torch.Tensor],
        bias: torch.Tensor | None,
        residual: torch.Tensor | None,
        keep: bool = False,
    ) -> torch.Tensor:
        """Y of x, (n, features) or (features, n) by the layout, n ≥ 1, without autograd. keep: see `KSKernels.__call__`."""
        n = x.shape[0] if self.layout == "batch_first" else x.shape[1]
        if self.apart(n):
            y = self.plain(x, weights, keep=keep)
            return finished(y, self.epilogue.activation, bias, residual, self.layout == "batch_first")
        return self.fused(x, weights, bias, residual, keep)

    def apart(self, n: int) -> bool:
        """Whether n samples are served by a plain product and torch's passes."""
        if self.plain.on_cpu:
            return False
        if n not in self._apart:
            self._apart[n] = self._decide(n)
        return self._apart[n]

    def _decide(self, n: int) -> bool:
        fused = self.fused.workload(n)
        saved = passes_us(fused, self.plain.target)
        record, served = self._records(n)
        library = self.plain.library.saved_us(n)
        if library is not None:
            return library > saved
        if record is None or served is record:
            return False
        return served is None or (served.median_us or 0.0) - (record.median_us or 0.0) > saved

    def _records(self, n: int) -> tuple[TuningRecord | None, TuningRecord | None]:
        """The fastest record of the plain product at the nearest size that was tuned, and the fastest that has the epilogue."""
        size = self.plain.nearest(n)
        if size is None:
            return None, None
        ranked = database.ranked(self.plain.workload(size), self.plain.target)
        fused = self.fused.workload(size)
        served = (r for r in ranked if _serves(r, fused, self.plain.target))
        return next(iter(ranked), None), next(served, None)


def _serves(record: TuningRecord, workload: KSMatmul, device: Device) -> bool:
    try:
        return registry.schedule(record.space["name"]).supports(workload, device) is None
    except ArgumentError:  # a space this process does not know
        return False


def passes_us(workload: KSMatmul, device: Device) -> float:
    """Estimated time of torch's passes: bias and activation read and write y, the residual's reads one tensor more."""
    epilogue = workload.epilogue
    passes = epilogue.bias + (epilogue.activation is not None) + epilogue.residual
    moved = (2 * passes + epilogue.residual) * workload.output.nbytes
    return passes * LAUNCH_US + moved / device.bandwidth_gbs / 1e3


# -- kernels shared by every caller of this process ----------------------------------------------------

_shared: dict[tuple[tuple[Pattern, ...], str, str, str, Epilogue], FusedKernels] = {}
_shared_lock = threading.Lock()


def fused_for(patterns: tuple[Pattern, ...], layout: str, dtype: str, device: str, epilogue: Epilogue) -> FusedKernels:
    """The process's kernels for a chain of patterns, a layout, a dtype, a device ("cpu" or "cuda:N") and an epilogue."""
    key = (patterns, layout, dtype, device, epilogue)
    found = _shared.get(key)
    if found is None:
        with _shared_lock:
            found = _shared.get(key) or _shared.setdefault(key, FusedKernels(*key))
    return found


def clear() -> None:
    """Forget the shared kernels; see `ks_dynamic.clear`."""
    with _shared_lock:
        _shared.clear()
