"""The weight gradient of a Kronecker-sparse product, for any batch: by our kernels where they are faster, else by torch.bmm.

Batch first, a batch that was not tuned is a kernel call on the largest bucket of its rows, and one on what is left, with zeros
behind it; batch last, the columns are copied into the next bucket, as in the forward pass. Zeros add nothing to the sums.

Read first: `weight_gradient`, `WeightGradKernels`.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kronsched.errors import CompileError, InvalidConfig, UnsupportedError
from kronsched.hardware import resolve_target
from kronsched.nn import nearby
from kronsched.nn.autograd import is_recorded
from kronsched.nn.ks_dynamic import column_bucket
from kronsched.nn.ks_wgrad_select import bmm_us, expected_us, kernel_pays
from kronsched.runtime.cache import get_or_build
from kronsched.runtime.load import load
from kronsched.runtime.module import TunedModule
from kronsched.workloads.ks import Pattern
from kronsched.workloads.ks_wgrad import DTYPE_NAMES, KSWeightGrad, wgrad_by_bmm

if TYPE_CHECKING:
    from kronsched.records.schema import TuningRecord

_NAMES = {getattr(torch, name): name for name in DTYPE_NAMES}
_FIRST = "batch_first"
_FINE = 32


def weight_gradient(g: Tensor, x: Tensor, pattern: Pattern, layout: str) -> Tensor:
    """The weight gradient dW (a, b, c, d), from the gradient g of y and from x, which was multiplied. Differentiable.

    Where torch has to see each part (tangents, vmap, the batches of is_grads_batched=True), it is torch.bmm.
    """
    tensors = (g, x)
    if x.dtype not in _NAMES or _is_transformed(tensors):
        return by_torch(g, x, pattern, layout)
    if is_recorded(tensors):
        if x.device.type != "cuda":
            return by_torch(g, x, pattern, layout)
        from kronsched.nn import ks_ops

        return ks_ops.ks_wgrad(g, x, pattern, layout)
    if x.numel() == 0 or not _kernels(x, pattern, layout).serves(x.shape[0 if layout == _FIRST else 1]):
        return by_torch(g, x, pattern, layout)
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        result: Tensor = _WeightGrad.apply(pattern, layout, g, x)  # type: ignore[no-untyped-call]
        return result
    return run(g, x, pattern, layout)


def by_torch(g: Tensor, x: Tensor, pattern: Pattern, layout: str) -> Tensor:
    """`weight_gradient` by torch.bmm."""
    dtype = x.dtype
    if x.device.type == "cpu" and dtype in (torch.float16, torch.bfloat16):  # torch sums some of these in 16 bits there
        g, x = g.float(), x.float()
    return wgrad_by_bmm(g, x, pattern, layout == _FIRST).to(dtype)


def run(g: Tensor, x: Tensor, pattern: Pattern, layout: str) -> Tensor:
    """`weight_gradient` by whichever is faster, without autograd."""
    kernels = _kernels(x, pattern, layout)
    if x.numel() and kernels.serves(x.shape[0 if layout == _FIRST else 1]):
        return kernels(g.detach(), x.detach())
    return by_torch(g, x, pattern, layout)


def gradients(g: Tensor, x: Tensor, grad: Tensor, layout: str) -> tuple[Tensor, Tensor]:
    """The gradients of g and x from `grad`, that of dW, which takes the place of the weights."""
    from kronsched.nn.ks_autograd import product

    return product(x, [grad], layout), product(g, [grad.transpose(1, 2)], layout)


class _WeightGrad(torch.autograd.Function):
    """`weight_gradient` in eager mode."""

    @staticmethod
    def forward(ctx: Any, pattern: Pattern, layout: str, g: Tensor, x: Tensor) -> Tensor:
        ctx.layout = layout
        ctx.save_for_backward(g, x)
        return run(g, x, pattern, layout)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        g, x = ctx.saved_tensors
        return (None, None, *gradients(g, x, grads[0], ctx.layout))


def _is_transformed(tensors: tuple[Tensor, ...]) -> bool:
    functorch = torch._C._functorch
    if torch.autograd.forward_ad._current_level >= 0:
        return True
    return any(functorch.is_functorch_wrapped_tensor(t) or functorch.is_legacy_batchedtensor(t) for t in tensors)


class WeightGradKernels:
    """The kernels of one pattern, layout, dtype and device, built as they are needed. Thread-safe."""

    def __init__(self, pattern: Pattern, layout: str, dtype: str, device: str) -> None:
        """Nothing is built yet. `device`: "cpu" or "cuda:N"."""
        self.one = KSWeightGrad(1, pattern, dtype, layout)
        self.target, self.device = resolve_target(device), device
        self.modules: dict[int, TunedModule] = {}
        self._served: dict[int, bool] = {}
        self._expected: dict[int, float | None] = {}
        self._tuned: dict[int, TuningRecord] | None = None
        self._lock = threading.Lock()

    def workload(self, batch: int) -> KSWeightGrad:
        """The workload of a batch."""
        return KSWeightGrad(batch, self.one.pattern, self.one.dtype, self.one.layout)

    def plan(self, n: int) -> list[tuple[int, int, int]]:
        """(first sample, samples, batch of the kernel) of each call that n samples take: one, or in batch first at most two."""
        if n in self._known() or column_bucket(n) == n:
            return [(0, n, n)]
        if not self.one.batch_first:
            return [(0, n, column_bucket(n))]
        step = 1 << (n.bit_length() - 3 if n > _FINE else n.bit_length() - 1)
        most = n // step * step
        return [(0, most, most), (most, n - most, column_bucket(n - most))]

    def serves(self, n: int) -> bool:
        """Whether the kernels take n samples: where they were measured, or are expected, to be faster than torch.bmm."""
        found = self._served.get(n)
        if found is None:
            found = self._served[n] = self._decide(n)
        return found

    def _decide(self, n: int) -> bool:
        try:
            workload = self.workload(n)
            plan = self.plan(n)
            times = [self._expected_us(bucket) for _, _, bucket in plan]
        except UnsupportedError:
            return False
        record = self._known().get(n)
        if record is not None and record.median_us is not None and self.target.kind == "cuda":
            return record.median_us < bmm_us(workload, self.target)
        return kernel_pays(workload, times, self.target, any(count < bucket for _, count, bucket in plan))

    def _expected_us(self, bucket: int) -> float | None:
        if bucket not in self._expected:
            self._expected[bucket] = expected_us(self.workload(bucket), self.target)
        return self._expected[bucket]

    def module(self, batch: int) -> TunedModule:
        """The kernel for exactly this batch, built when there is none."""
        found = self.modules.get(batch)
        if found is None:
            with self._lock:
                found = self.modules.get(batch)
                if found is None:
                    found = self.modules[batch] = self._build(self.workload(batch))
        return found

    def __call__(self, g: Tensor, x: Tensor) -> Tensor:
        """The weight gradient of g and x, n ≥ 1 samples, without autograd."""
        dim = 0 if self.one.batch_first else 1
        total: Tensor | None = None
        for start, count, bucket in self.plan(x.shape[dim]):
            parts = [_padded(t.narrow(dim, start, count), dim, bucket) for t in (g, x)]
            found = self.module(bucket).call_torch(parts, None)
            total = found if total is None else torch.add(total, found)
        assert total is not None
        return total

    def _known(self) -> dict[int, TuningRecord]:
        if self._tuned is None:
            self._tuned = nearby.tuned_sizes(self.one, self.target, "batch")
        return self._tuned

    def _build(self, workload: KSWeightGrad) -> TunedModule:
        tuned = self._known()
        for record in nearby.usable(workload, self.target, tuned, "batch") if workload.batch not in tuned else ():
            try:
                artefact = get_or_build(workload, record.space["name"], record.config, self.target)
            except (CompileError, InvalidConfig):
                continue
            origin = f"config of batch={record.workload['batch']}, not measured"
            return TunedModule.from_artefact(artefact, device_index=self.target.index, origin=origin)
        return load(workload, device=self.device)


def _padded(t: Tensor, dim: int, bucket: int) -> Tensor:
    """The samples with zeros behind them; as they are where they fill the bucket."""
    count = t.shape[dim]
    if count == bucket:
        return t
    padded = t.new_zeros((bucket, t.shape[1]) if dim == 0 else (t.shape[0], bucket))
    padded.narrow(dim, 0, count).copy_(t)
    return padded


# -- kernels shared by every caller of this process ----------------------------------------------------

_shared: dict[tuple[Pattern, str, str, str], WeightGradKernels] = {}
_shared_lock = threading.Lock()


def _kernels(x: Tensor, pattern: Pattern, layout: str) -> WeightGradKernels:
    name = f"cuda:{x.device.index}" if x.device.type == "cuda" else x.device.type
    return kernels_for(pattern, layout, _NAMES[x.dtype], name)


def kernels_for(pattern: Pattern, layout: str, dtype: str, device: str) -> WeightGradKernels:
    """The process's kernels for a pattern, a layout, a dtype and a device ("cpu" or "cuda:N")."""
    key = (pattern, layout, dtype, device)
    found = _shared.get(key)
    if found is None:
        with _shared_lock:
            found = _shared.get(key) or _shared.setdefault(key, WeightGradKernels(*key))
    return found


def clear() -> None:
    """Forget the shared kernels; see `ks_dynamic.clear`."""
    with _shared_lock:
        _shared.clear()
