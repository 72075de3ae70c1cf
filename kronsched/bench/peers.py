"""Who else computes a workload, one function a peer: (workload, inputs) -> a callable that returns the result.

Read first: `peers_of`, `register_peer`. A peer that is not installed, or cannot serve the workload here, raises `PeerUnavailable`
with one line. A peer gets its tensors in the layout it likes best, prepared before the clock starts.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from kronsched.errors import KronschedError

if TYPE_CHECKING:
    import torch

    from kronsched.workloads.base import Workload

    Peer = Callable[[Workload, Sequence[torch.Tensor]], Callable[[], Any]]

PROBE_TIMEOUT_S = 120


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
        raise PeerUnavailable(f"FastKron has no kernel for {workload.label} on {x.device.type}")
    if x.is_cuda and (reason := _fastkron_fault(str(x.device))):
        raise PeerUnavailable(f"FastKron's kernels do not run on this GPU: {reason}")

    def call() -> torch.Tensor:
        y: torch.Tensor = fastkrontorch.gemkm(x, factors)
        return y

    return call


def baseline(workload: Workload, inputs: Sequence[torch.Tensor]) -> Callable[[], Any]:
    """What the family itself names as the way without kronsched (`baseline` of the workload), for families without peers."""
    found = getattr(workload, "baseline", None)
    if found is None:
        raise PeerUnavailable(f"family {workload.family!r} names no baseline")
    call: Callable[[], Any] = found(*inputs)[1]
    return call


PEERS: dict[str, dict[str, Peer]] = {
    "kron": {"torch_shuffle": torch_shuffle, "gpytorch": gpytorch, "fastkron": fastkron},
}
"""Peers by family and name."""


def peers_of(family: str) -> Mapping[str, Peer]:
    """The peers of a family; where it has none of its own, its baseline."""
    return PEERS.get(family) or {"baseline": baseline}


def register_peer(family: str, name: str, peer: Peer) -> None:
    """Add a peer from outside: `peer(workload, inputs)` returns a callable without arguments that computes the result."""
    PEERS.setdefault(family, {})[name] = peer


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
