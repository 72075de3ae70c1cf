"""Peers for Kron-Matmul: the shuffle algorithm in torch, GPyTorch, FastKron."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING

from kronsched.bench.peers.base import PeerUnavailable

if TYPE_CHECKING:
    import torch

    from kronsched.bench.peers.base import Peer
    from kronsched.workloads.base import Workload

PROBE_TIMEOUT_S = 120


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
        raise PeerUnavailable(f"FastKron has no kernel for {workload.label} on {x.device.type}")
    if x.is_cuda and (reason := _fastkron_fault(str(x.device))):
        raise PeerUnavailable(f"FastKron's kernels do not run on this GPU: {reason}")

    def call() -> torch.Tensor:
        y: torch.Tensor = fastkrontorch.gemkm(x, factors)
        return y

    return call


PEERS: dict[str, Peer] = {"torch_shuffle": torch_shuffle, "gpytorch": gpytorch, "fastkron": fastkron}


_FASTKRON_PROBE = """
import sys, torch
from pyfastkron import fastkrontorch
x, f = torch.ones(4, 64, device=sys.argv[1]), torch.ones(8, 8, device=sys.argv[1])
y = fastkrontorch.gemkm(x, [f, f])
torch.cuda.synchronize()
assert bool((y == 64).all()), "the result is wrong (the pyfastkron wheel has no kernels for every GPU, such as sm_90)"
"""


@cache
def _fastkron_fault(device: str) -> str:
    """Why FastKron does not work on a GPU, "" when it does.

    Tried in a process of its own, once: where its wheel has no code for the GPU, a launch may end the process or leave the CUDA
    context unusable.
    """
    command = [sys.executable, "-c", _FASTKRON_PROBE, device]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=PROBE_TIMEOUT_S,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        return f"a 4x64 product took over {PROBE_TIMEOUT_S} s"
    if done.returncode == 0:
        return ""
    lines = [line.strip() for line in (done.stderr or done.stdout).splitlines() if line.strip()]
    return (lines[-1] if lines else f"exit code {done.returncode}")[:300]
