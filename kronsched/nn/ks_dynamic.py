"""Kernels of one Kronecker-sparse chain for any batch from few builds: `KSKernels`.

Batch first, a batch is at most two calls on views of rows (`kronsched.nn.dynamic.row_plan`). Batch last, some columns are not a
contiguous tensor: the columns are copied into the next bucket (`column_plan`), whose spare columns are zeros, and the result is
copied out of it; both copies are saved where the batch is a bucket or was tuned. What is the same for both: a batch that was
tuned gets its own kernel, and other buckets the config of the nearest tuned one.

Where torch's own matmuls were measured to be faster, they serve the call (ks_select.py). Kernels with an epilogue take the
configs of the plain product's records; ks_fused_kernels.py says when they serve.

Read first: `column_plan`, `KSKernels`.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from math import log2
from typing import TYPE_CHECKING

from kronsched import registry
from kronsched.errors import CompileError, InvalidConfig, UnsupportedError
from kronsched.hardware import resolve_target
from kronsched.nn import ks_bound, nearby
from kronsched.nn.dynamic import row_plan
from kronsched.nn.ks_select import LibraryCalls
from kronsched.runtime.bound import BoundModule
from kronsched.runtime.cache import get_or_build
from kronsched.runtime.load import load
from kronsched.runtime.module import TunedModule
from kronsched.workloads.ks import KSMatmul, Pattern
from kronsched.workloads.ks_epilogue import NONE, Epilogue

if TYPE_CHECKING:
    import torch

    from kronsched.records.schema import TuningRecord

_LARGEST_POWER = 30
_FINE = 32
"""Batches above it have four buckets an octave."""


def column_bucket(n: int) -> int:
    """The bucket of n columns: the next power of two, from 32 on the next number whose three leading bits alone are set."""
    step = 1 << (n.bit_length() - 3) if n > _FINE else 1 << (n - 1).bit_length()
    return -(-n // step) * step


def column_plan(n: int, cap: int = 1 << _LARGEST_POWER) -> list[tuple[int, int, int]]:
    """(first column, columns, bucket) of the calls that cover n columns; one call, unless n is more than `cap`, a bucket."""
    spans = []
    for start in range(0, n, cap):
        count = min(cap, n - start)
        spans.append((start, count, column_bucket(count)))
    return spans


class KSKernels:
    """The kernels of one chain of patterns, layout, dtype, device and epilogue, built as they are needed. Thread-safe."""

    def __init__(self, patterns: Sequence[Pattern], layout: str, dtype: str, device: str, epilogue: Epilogue = NONE) -> None:
        """Nothing is built yet. `device`: "auto", "cpu", "cuda" or "cuda:N"."""
        one = KSMatmul(batch=1, pattern=tuple(patterns), dtype=dtype, layout=layout)
        self.patterns, self.layout, self.dtype = one.patterns, layout, dtype
        self.features_out, self.epilogue = one.sizes[-1], epilogue
        self.target = resolve_target(device)
        if not self.target.present:
            raise UnsupportedError(f"device={device!r} is not on this machine")
        self.on_cpu = self.target.kind == "cpu"
        self.device = "cpu" if self.on_cpu else f"cuda:{self.target.index}"
        self._cap = next(1 << e for e in range(_LARGEST_POWER, -1, -1) if self._fits(1 << e))
        self.library = LibraryCalls(self.patterns, layout, dtype, self.target, self._tuned_us)
        self._lock = threading.Lock()
        self.modules: dict[int, TunedModule] = {}
        self._tuned: dict[int, TuningRecord] | None = None

    def plan(self, n: int) -> list[tuple[int, int, int]]:
        """(first sample, samples, batch of the kernel) of each kernel call that n samples take."""
        if n in self._known():
            return [(0, n, n)]
        if self.layout == "batch_last":
            return column_plan(n, self._cap)
        return [(start, rows, rows) for start, rows in row_plan(n, self._cap)]

    def prepare(self, *batches: int) -> None:
        """Build and load what these batches need, such as before a CUDA graph is captured."""
        for n in batches:
            for _, _, bucket in self.plan(n):
                self.module(bucket)

    def workload(self, batch: int) -> KSMatmul:
        """The workload of a batch."""
        e = self.epilogue
        return KSMatmul(batch, self.patterns, self.dtype, self.layout, e.bias, e.activation, e.residual)

    def nearest(self, batch: int) -> int | None:
        """The batch nearest to this one, by ratio, for which there is a record."""
        return min(self._known(), key=lambda n: abs(log2(n / batch)), default=None)

    def module(self, batch: int) -> TunedModule:
        """The kernel for exactly this batch, built when there is none."""
        found = self.modules.get(batch)
        if found is None:
            with self._lock:
                found = self.modules.get(batch)
                if found is None:
                    found = self.modules[batch] = self._build(self.workload(batch))
        return found

    def __call__(
        self,
        x: torch.Tensor,
        weights: Sequence[torch.Tensor],
        bias: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
        keep: bool = False,
    ) -> torch.Tensor:
        """Y of x, (n, features) or (features, n) by the layout, n ≥ 1, and of the weights (a, b, c, d), without autograd.

        keep: whether weights that are parameters may be kept in the order that the kernel reads (ks_bound.py).
        """
        if not keep:
            ks_bound.forget(weights)
        n = x.shape[0] if self.layout == "batch_first" else x.shape[1]
        library = None if self.epilogue else self.library.name(n)
        if library is not None:
            return self.library.run(library, x, weights)
        spans = self.plan(n)
        if len(spans) == 1 and spans[0][2] == n:
            more = [t for t in (bias, residual) if t is not None]
            return self._one(n, x, weights, more, None, keep)
        along = self._by_rows if self.layout == "batch_first" else self._by_columns
        fixed = [] if bias is None else [bias.contiguous()]
        return along(x, [w.contiguous() for w in weights], fixed, residual, spans, keep)

    def _one(
        self,
        batch: int,
        x: torch.Tensor,
        weights: Sequence[torch.Tensor],
        more: Sequence[torch.Tensor],
        out: torch.Tensor | None,
        keep: bool,
    ) -> torch.Tensor:
        """One kernel call. more: bias and residual, where the epilogue has them."""
        module = self.module(batch)
        serving = ks_bound.serving(module, weights) if keep else module
        if isinstance(serving, BoundModule):
            result: torch.Tensor = serving(x, *more, out=out)
        elif out is None:
            result = module(x, *weights, *more)
        else:
            result = module.call_torch([x, *weights, *more], out)
        return result

    def _by_rows(
        self,
        x: torch.Tensor,
        weights: Sequence[torch.Tensor],
        fixed: Sequence[torch.Tensor],
        residual: torch.Tensor | None,
        spans: Sequence[tuple[int, int, int]],
        keep: bool,
    ) -> torch.Tensor:
        whole = [x.contiguous()] if residual is None else [x.contiguous(), residual.contiguous()]
        out = x.new_empty((x.shape[0], self.features_out))
        for start, rows, bucket in spans:
            part, *more = (t[start : start + rows] for t in whole)
            self._one(bucket, part, weights, [*fixed, *more], out[start : start + rows], keep)
        return out

    def _by_columns(
        self,
        x: torch.Tensor,
        weights: Sequence[torch.Tensor],
        fixed: Sequence[torch.Tensor],
        residual: torch.Tensor | None,
        spans: Sequence[tuple[int, int, int]],
        keep: bool,
    ) -> torch.Tensor:
        whole = [x] if residual is None else [x, residual]
        out = x.new_empty((self.features_out, x.shape[1]))
        for start, columns, bucket in spans:
            padded, *more = (_padded(t[:, start : start + columns], bucket) for t in whole)
            y = self._one(bucket, padded, weights, [*fixed, *more], None, keep)
            out[:, start : start + columns] = y[:, :columns]
        return out

    def _fits(self, batch: int) -> bool:
        try:
            self.workload(batch)
        except UnsupportedError:
            return False
        return True

    def _known(self) -> dict[int, TuningRecord]:
        if self._tuned is None:
            plain = self.workload(1).plain
            self._tuned = nearby.tuned_sizes(plain, self.target, "batch")
            if self.epilogue:
                self._tuned |= nearby.tuned_sizes(self.workload(1), self.target, "batch")
        return self._tuned

    def _tuned_us(self, batch: int) -> float | None:
        record = self._known().get(batch)
        return None if record is None else record.median_us

    def _build(self, workload: KSMatmul) -> TunedModule:
        tuned = self._known()
        own = workload.batch in tuned and registry.workload_from_dict(tuned[workload.batch].workload) == workload
        for record in nearby.usable(workload, self.target, tuned, "batch") if not own else ():
            try:
                artefact = get_or_build(workload, record.space["name"], record.config, self.target)
            except (CompileError, InvalidConfig):
                continue
            same = " without an epilogue" if self.epilogue and "bias" not in record.workload else ""
            origin = f"config of batch={record.workload['batch']}{same}, not measured"
            return TunedModule.from_artefact(artefact, device_index=self.target.index, origin=origin)
        return load(workload, device=self.device)


def _padded(columns: torch.Tensor, bucket: int) -> torch.Tensor:
    """Columns, with zeros behind them."""
    padded = columns.new_empty((columns.shape[0], bucket))
    padded[:, : columns.shape[1]] = columns
    padded[:, columns.shape[1] :] = 0
    return padded


# -- kernels shared by every caller of this process ----------------------------------------------------

_shared: dict[tuple[tuple[Pattern, ...], str, str, str], KSKernels] = {}
_shared_lock = threading.Lock()


def kernels_for(patterns: tuple[Pattern, ...], layout: str, dtype: str, device: str) -> KSKernels:
    """The process's kernels for a chain of patterns, a layout, a dtype and a device ("cpu" or "cuda:N")."""
    key = (patterns, layout, dtype, device)
    found = _shared.get(key)
    if found is None:
        with _shared_lock:
            found = _shared.get(key) or _shared.setdefault(key, KSKernels(patterns, layout, dtype, device))
    return found


def clear() -> None:
    """Forget the shared kernels, so that the next call looks into the logs again, such as after tuning."""
    from kronsched.nn import ks_fused_kernels, ks_wgrad

    with _shared_lock:
        _shared.clear()
    ks_wgrad.clear()
    ks_bound.clear()
    ks_fused_kernels.clear()
