"""Who else computes a workload, one function a peer: (workload, inputs) -> a callable that returns the result.

A peer that is not installed, or cannot serve the workload, raises `PeerUnavailable` with one line. A peer gets its tensors in the
layout it likes best, prepared before the clock starts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from kronsched.errors import KronschedError

if TYPE_CHECKING:
    import torch

    from kronsched.workloads.base import Workload

    Peer = Callable[[Workload, Sequence[torch.Tensor]], Callable[[], torch.Tensor]]


class PeerUnavailable(KronschedError):
    """The peer is not installed or cannot serve this workload."""


def torch_shuffle(workload: Workload, inputs: Sequence[torch.Tensor]) -> Callable[[], torch.Tensor]:
    """The shuffle algorithm in torch: a GEMM and a transpose for each factor."""
    from kronsched.workloads.kron import shuffle

    x, *factors = inputs

    def call() -> torch.Tensor:
        y: torch.Tensor = shuffle(x, factors)
        return y

    return call


def gpytorch(workload: Workload, inputs: Sequence[torch.Tensor]) -> Callable[[], torch.Tensor]:
    """linear_operator's KroneckerProductLinearOperator, which GPyTorch uses: (⊗ Fᵀ) Xᵀ, with Xᵀ stored contiguously."""
    try:
        from linear_operator.operators import DenseLinearOperator, KroneckerProductLinearOperator
    except ImportError:
        raise PeerUnavailable("not installed (pip install linear_operator)") from None
    x, *factors = inputs
    operator = KroneckerProductLinearOperator(*(DenseLinearOperator(f.T.contiguous()) for f in factors))
    columns = x.T.contiguous()

    def call() -> torch.Tensor:
        y: torch.Tensor = operator.matmul(columns)
        return y.T

    return call


def fastkron(workload: Workload, inputs: Sequence[torch.Tensor]) -> Callable[[], torch.Tensor]:
    """FastKron's own kernels; types it has none for (it would fall back to the shuffle algorithm) count as not served."""
    try:
        from pyfastkron import fastkrontorch
    except (ImportError, OSError) as e:
        raise PeerUnavailable(f"not installed (pip install pyfastkron): {e}") from None
    x, *factors = inputs
    if not fastkrontorch.fastkrontorch.isSupported(x, factors):
        raise PeerUnavailable(f"FastKron has no kernel for {workload.label}")

    def call() -> torch.Tensor:
        y: torch.Tensor = fastkrontorch.gemkm(x, factors)
        return y

    return call


PEERS: Mapping[str, Mapping[str, Peer]] = {
    "kron": {"torch_shuffle": torch_shuffle, "gpytorch": gpytorch, "fastkron": fastkron},
}
"""Peers by family and name."""
