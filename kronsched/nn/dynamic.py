"""Kernels for any number of rows from few builds: `DynamicKron`.

    m rows    ├──────────── bucket b ────────────┤
                           ├── bucket r ──────────────────┤      b, r powers of two, b ≤ m, r ≥ m − b

A batch of m rows is at most two calls on row views: the largest bucket b ≤ m on the first rows, and the smallest bucket r ≥ m − b
on the last ones. Rows in both are computed twice, which does no harm. A number of rows that was tuned gets its own kernel.

Read first: `row_plan`, `DynamicKron`.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING

from kronsched.errors import ArgumentError, ArgumentTypeError, CompileError, InvalidConfig, UnsupportedError
from kronsched.hardware import Device, resolve_target
from kronsched.nn import nearby
from kronsched.runtime.cache import get_or_build
from kronsched.runtime.load import load
from kronsched.runtime.module import TunedModule
from kronsched.workloads.kron import KronMatmul

if TYPE_CHECKING:
    import torch

    from kronsched.records.schema import TuningRecord

Shapes = tuple[tuple[int, int], ...]
_LARGEST_POWER = 30


def row_plan(m: int, cap: int = 1 << _LARGEST_POWER) -> list[tuple[int, int]]:
    """(first row, bucket) of the calls that cover m rows: at most two, unless m is more than twice `cap`, the largest bucket."""
    spans, start = [], 0
    while start < m:
        rest = m - start
        if rest >= cap or start == 0:
            bucket = min(cap, 1 << (rest.bit_length() - 1))
        else:
            bucket = 1 << (rest - 1).bit_length()
            start = m - bucket
        spans.append((start, bucket))
        start += bucket
    return spans


class Kernels:
    """The kernels of one list of factors, dtype and device, built as they are needed; see `DynamicKron`. Thread-safe."""

    def __init__(self, factors: Sequence[tuple[int, int]], dtype: str, device: str) -> None:
        """Nothing is built yet."""
        one = KronMatmul(m=1, factors=tuple(factors), dtype=dtype)
        self.factors: Shapes = one.factors
        self.dtype, self.k_out = dtype, one.k_out
        self._device = _present(device)
        self.device = f"cuda:{self._device.index}" if self._device.kind == "cuda" else "cpu"
        self._cap = next(1 << e for e in range(_LARGEST_POWER, -1, -1) if self._fits(1 << e))
        self._lock = threading.Lock()
        self.modules: dict[int, TunedModule] = {}
        self._tuned: dict[int, TuningRecord] | None = None

    def plan(self, m: int) -> list[tuple[int, int]]:
        """(first row, number of rows) of each kernel call that m rows take."""
        return [(0, m)] if m in self._known() else row_plan(m, self._cap)

    def module(self, m: int) -> TunedModule:
        """The kernel for exactly m rows, built when there is none."""
        found = self.modules.get(m)
        if found is None:
            with self._lock:
                found = self.modules.get(m)
                if found is None:
                    found = self.modules[m] = self._build(self._workload(m))
        return found

    def __call__(self, x: torch.Tensor, factors: Sequence[torch.Tensor], out: torch.Tensor | None = None) -> torch.Tensor:
        """The product of x (m, ΠPi), without autograd; `out` (m, ΠQi) is contiguous and apart from the inputs."""
        m = x.shape[0]
        spans = self.plan(m)
        if len(spans) == 1:
            module = self.module(m)
            result: torch.Tensor = module(x, *factors) if out is None else module.call_torch([x, *factors], out)
            return result
        x, factors = x.contiguous(), [f.contiguous() for f in factors]
        if out is None:
            out = x.new_empty((m, self.k_out))
        for start, rows in spans:
            self.module(rows).call_torch([x[start : start + rows], *factors], out[start : start + rows])
        return out

    def _fits(self, m: int) -> bool:
        try:
            self._workload(m)
        except UnsupportedError:
            return False
        return True

    def _workload(self, m: int) -> KronMatmul:
        return KronMatmul(m=m, factors=self.factors, dtype=self.dtype)

    def _known(self) -> dict[int, TuningRecord]:
        if self._tuned is None:
            self._tuned = nearby.tuned_sizes(self._workload(1), self._device, "m")
        return self._tuned

    def _build(self, workload: KronMatmul) -> TunedModule:
        tuned = self._known()
        for record in nearby.usable(workload, self._device, tuned, "m") if workload.m not in tuned else ():
            try:
                artefact = get_or_build(workload, record.space["name"], record.config, self._device)
            except (CompileError, InvalidConfig):
                continue
            origin = f"config of m={record.workload['m']}, not measured"
            return TunedModule.from_artefact(artefact, device_index=self._device.index, origin=origin)
        return load(workload, device=self.device)


class DynamicKron:
    """Y = X (F1 ⊗ … ⊗ FN) for X of any number of rows, one list of factor shapes, one dtype and one device.

    A kernel is built when its bucket is first needed (`prepare` builds ahead), kept, and shared with `kronsched.kron_matmul` and
    all of this process. Its config: the log's when that number of rows was tuned; else that of the nearest tuned number of rows
    with the same factors, dtype and device where it is valid; else what `kronsched.load` takes. Thread-safe. Logs are read once,
    at the first use; `kronsched.nn.dynamic.clear` forgets all kernels, so that new logs count.

    factors: N pairs (Pi, Qi).  dtype: as in `KronMatmul`.  device: "auto", "cpu", "cuda" or "cuda:N".
    Raises what `KronMatmul` raises, and UnsupportedError for a device that is not there.
    """

    def __init__(self, factors: Sequence[tuple[int, int]], dtype: str = "float32", device: str = "auto") -> None:
        """Nothing is built yet; see the class."""
        kernels = Kernels(factors, dtype, str(device))
        self.factors, self.dtype, self.device = kernels.factors, kernels.dtype, kernels.device

    @property
    def modules(self) -> Mapping[int, TunedModule]:
        """The kernels built so far by their number of rows."""
        return dict(self._kernels.modules)

    def plan(self, m: int) -> list[tuple[int, int]]:
        """(first row, number of rows) of each kernel call that a batch of m rows takes."""
        if not isinstance(m, int) or isinstance(m, bool):
            raise ArgumentTypeError(f"m={m!r} must be an int ≥ 0")
        if m < 0:
            raise ArgumentError(f"m={m} is not allowed: an int ≥ 0 is needed")
        return self._kernels.plan(m)

    def prepare(self, *rows: int) -> None:
        """Build and load what batches of these numbers of rows need, such as before a CUDA graph is captured."""
        for m in rows:
            for _, bucket in self.plan(m):
                self._kernels.module(bucket)

    def __call__(self, x: torch.Tensor, *factors: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Y (m, ΠQi) of x (m, ΠPi) and Fi (Pi, Qi), torch tensors of this dtype on this device: `kronsched.kron_matmul`."""
        from kronsched.nn.functional import kron_matmul

        shapes = tuple(tuple(getattr(f, "shape", ())) for f in factors)
        if shapes != self.factors:
            raise ArgumentError(f"factors have the shapes {list(shapes)}, {list(self.factors)} are needed")
        shape = tuple(getattr(x, "shape", ()))
        if len(shape) != 2:
            raise ArgumentError(f"x has shape {shape}, (m, {prod(p for p, _ in self.factors)}) is needed")
        if (str(x.dtype), str(x.device)) != (f"torch.{self.dtype}", self.device):
            raise ArgumentTypeError(f"x is {x.dtype} on {x.device}, torch.{self.dtype} on {self.device} is needed")
        return kron_matmul(x, factors, out=out)

    def __repr__(self) -> str:
        label = KronMatmul(m=1, factors=self.factors, dtype=self.dtype).label.replace("m=1 ", "")
        return f"<DynamicKron {label} on {self.device}, built for m in {sorted(self.modules)}>"

    @property
    def _kernels(self) -> Kernels:
        return kernels_for(self.factors, self.dtype, self.device)


# -- kernels shared by every caller of this process ----------------------------------------------------

_shared: dict[tuple[Shapes, str, str], Kernels] = {}
_shared_lock = threading.Lock()


def kernels_for(factors: Shapes, dtype: str, device: str) -> Kernels:
    """The process's kernels for a list of factor shapes, a dtype and a device ("cpu" or "cuda:N")."""
    key = (factors, dtype, device)
    found = _shared.get(key)
    if found is None:
        with _shared_lock:
            found = _shared.get(key) or _shared.setdefault(key, Kernels(factors, dtype, device))
    return found


def clear() -> None:
    """Forget the shared kernels, so that the next call looks into the logs again, such as after tuning."""
    with _shared_lock:
        _shared.clear()


def _present(target: str) -> Device:
    device = resolve_target(target)
    if not device.present:
        raise UnsupportedError(f"device={target!r} is not on this machine")
    return device
