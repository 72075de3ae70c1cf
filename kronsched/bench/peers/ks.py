"""Peers of Kronecker-sparse matmul: torch's own formulations and lazylinop, the library of the authors of ksmm.

Of a product with an epilogue: torch's formulations and, for information, our own plain kernel, each followed by torch's passes.

float32 peers compute without TF32, as our kernels have float32-level errors. What is shown for information does not count as
the best peer: `strided_bmm_tf32` (less exact than float32 allows) and `block_dense` (a formulation that users do not write).
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from kronsched.bench.peers.base import PeerUnavailable
from kronsched.errors import UnsupportedError
from kronsched.hardware import Device, floor_us, measure_ceilings, resolve_target
from kronsched.nn import ks_select_library as library
from kronsched.workloads.ks import KSMatmul
from kronsched.workloads.ks_epilogue import finished

if TYPE_CHECKING:
    import torch

    from kronsched.bench.peers.base import Peer
    from kronsched.runtime.module import TunedModule
    from kronsched.workloads.base import Workload

HOPELESS = 12.0
"""A dense matrix whose arithmetic alone takes so many times the floor of the sparse product is not made."""
TF32_SLACK = 60.0
"""Times the tolerance of float32 that a product with 10-bit mantissas may be off."""


@dataclass(frozen=True)
class ShownPeer:
    """A peer that is timed for information only. slack: times the dtype's tolerance is allowed."""

    make: Peer
    slack: float
    information: bool = True

    def __call__(self, workload: Workload, inputs: Sequence[torch.Tensor]) -> Callable[[], Any]:
        """As any peer."""
        return self.make(workload, inputs)


def by_library(name: str, workload: Workload, inputs: Sequence[torch.Tensor]) -> Callable[[], torch.Tensor]:
    """One of `ks_select_library.FORMULATIONS`, for each factor of a chain in turn ("dense": the one matrix of the chain)."""
    assert isinstance(workload, KSMatmul)
    x, *weights = inputs
    if name in ("dense", "block_dense"):
        _check_hope(name, workload, x)
    try:
        call = library.prepared(name, weights, workload.layout)
    except UnsupportedError as e:
        raise PeerUnavailable(str(e)) from None
    return lambda: call(x)


def einsum(workload: Workload, inputs: Sequence[torch.Tensor]) -> Callable[[], torch.Tensor]:
    """torch.einsum on the four-dimensional views, for each factor in turn."""
    import torch

    assert isinstance(workload, KSMatmul)
    first = workload.batch_first
    x, *weights = inputs

    def call() -> torch.Tensor:
        y = x
        with library.full_precision(x):
            for w in weights:
                a, b, c, d = w.shape
                if first:
                    y = torch.einsum("nikl,ijkl->nijl", y.reshape(-1, a, c, d), w).reshape(-1, a * b * d)
                else:
                    y = torch.einsum("ikln,ijkl->ijln", y.reshape(a, c, d, -1), w).reshape(a * b * d, -1)
        return y

    return call


def strided_bmm_tf32(workload: Workload, inputs: Sequence[torch.Tensor]) -> Callable[[], torch.Tensor]:
    """torch.bmm on views with TF32 allowed: errors of 3e-4 and more; for information."""
    import torch

    assert isinstance(workload, KSMatmul)
    x, *weights = inputs
    if x.dtype is not torch.float32 or not x.is_cuda:
        raise PeerUnavailable("only float32 on CUDA has a TF32 mode")
    try:
        calls = [library.strided_bmm(w, workload.batch_first) for w in weights]
    except UnsupportedError as e:
        raise PeerUnavailable(str(e)) from None

    def call() -> torch.Tensor:
        before = torch.backends.cuda.matmul.allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = True
        try:
            y = x
            for one in calls:
                y = one(y)
        finally:
            torch.backends.cuda.matmul.allow_tf32 = before
        return y

    return call


def lazylinop(workload: Workload, inputs: Sequence[torch.Tensor]) -> Callable[[], torch.Tensor]:
    """lazylinop.butterfly.ksm with its default backend for torch; batch-last only."""
    assert isinstance(workload, KSMatmul)
    if workload.batch_first:
        raise PeerUnavailable("lazylinop multiplies columns: batch-last only")
    try:
        ksm = importlib.import_module("lazylinop.butterfly").ksm
    except ImportError as e:
        raise PeerUnavailable(f"not installed (pip install lazylinop): {e}") from None
    except (AttributeError, NameError) as e:  # as of 1.24: without pandas its modules fail so
        raise PeerUnavailable(f"lazylinop cannot be imported (it needs pandas): {e}") from None
    x, *weights = inputs
    operator = ksm(weights[::-1] if len(weights) > 1 else weights[0])  # a product's left-most factor comes first

    def call() -> torch.Tensor:
        with library.full_precision(x):
            y: torch.Tensor = operator @ x
        return y

    return call


PEERS: dict[str, Peer] = {
    "strided_bmm": partial(by_library, "strided_bmm"),
    "bmm": partial(by_library, "bmm"),
    "einsum": einsum,
    "dense": partial(by_library, "dense"),
    "lazylinop": lazylinop,
    "block_dense": ShownPeer(partial(by_library, "block_dense"), slack=4.0),
    "strided_bmm_tf32": ShownPeer(strided_bmm_tf32, slack=TF32_SLACK),
}


@dataclass(frozen=True)
class ThenPasses:
    """A peer of the plain product, then torch's operations for bias, activation and residual.

    kernel_of: the workload whose kernel of ours it runs, if it does.  information: whether it is timed for information only.
    """

    make: Peer
    kernel_of: Callable[[Workload], Workload] | None = None
    information: bool = False

    def __call__(self, workload: Workload, inputs: Sequence[torch.Tensor]) -> Callable[[], torch.Tensor]:
        """As any peer."""
        assert isinstance(workload, KSMatmul)
        x, weights, bias, residual = workload.parts(inputs)
        call = self.make(workload.plain, [x, *weights])
        return lambda: finished(call(), workload.activation, bias, residual, workload.batch_first)


def our_kernel(workload: Workload, inputs: Sequence[torch.Tensor]) -> Callable[[], torch.Tensor]:
    """Our kernel of the plain product."""
    module = _loaded(workload, str(inputs[0].device))
    return lambda: module(*inputs)


@functools.lru_cache(maxsize=1)
def _loaded(workload: Workload, device: str) -> TunedModule:
    """One module for all copies of a shape's inputs."""
    from kronsched.runtime.load import load

    return load(workload, device=device)


def plain_of(workload: Workload) -> Workload:
    """The product without its epilogue."""
    assert isinstance(workload, KSMatmul)
    return workload.plain


FUSED_PEERS: dict[str, Peer] = {
    "unfused": ThenPasses(our_kernel, plain_of, information=True),
    **{name: ThenPasses(partial(by_library, name)) for name in ("strided_bmm", "bmm", "dense")},
}
"""Peers of products with an epilogue."""


def _check_hope(name: str, workload: KSMatmul, x: torch.Tensor) -> None:
    """PeerUnavailable where the zeros make it hopeless: making and multiplying such a matrix takes seconds and gigabytes."""
    device = _device(str(x.device))
    peak = device.peak_gflops.get(workload.dtype) or device.peak_gflops.get("float32", 0.0)
    if not peak:
        return
    if name == "dense":
        flops = 2.0 * workload.batch * workload.sizes[0] * workload.sizes[-1]
    else:
        flops = sum(2.0 * workload.batch * a * b * c * d * d for a, b, c, d in workload.patterns)
    least_us = flops / (peak * 1e3)
    if least_us > HOPELESS * floor_us(workload, device):
        raise PeerUnavailable(f"its arithmetic alone takes over {HOPELESS:g} times the floor")


@functools.lru_cache(maxsize=8)
def _device(name: str) -> Device:
    return measure_ceilings(resolve_target(name if name != "cuda" else "cuda:0"))
