"""Who else computes a workload, one function a peer: (workload, inputs) -> a callable that returns the result.

Read first: `peers_for`, `register_peer`; one module a kind of workload holds its peers. A peer that is not installed, or cannot
serve the workload here, raises `PeerUnavailable` with one line. A peer gets its tensors in the layout it likes best, prepared
before the clock starts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kronsched.bench.peers import conv2d, gemm, kron, ks, w4a16
from kronsched.bench.peers.base import PeerUnavailable

if TYPE_CHECKING:
    import torch

    from kronsched.bench.peers.base import Peer as Peer
    from kronsched.workloads.base import Workload

__all__ = ["PEERS", "PeerUnavailable", "baseline", "peers_for", "peers_of", "register_peer"]


def baseline(workload: Workload, inputs: Sequence[torch.Tensor]) -> Callable[[], Any]:
    """What the family itself names as the way without kronsched (`baseline` of the workload), for families without peers."""
    found = getattr(workload, "baseline", None)
    if found is None:
        raise PeerUnavailable(f"family {workload.family!r} names no baseline")
    call: Callable[[], Any] = found(*inputs)[1]
    return call


PEERS: dict[str, dict[str, Peer]] = {
    "conv2d": conv2d.PEERS,
    "gemm": gemm.PEERS,
    "kron": kron.PEERS,
    "ks": ks.PEERS,
    "ks_fused": ks.FUSED_PEERS,
    "w4a16": w4a16.PEERS,
}
"""Peers by group (see `group_of`) and name."""


def group_of(workload: Workload) -> str:
    """The group whose peers serve a workload: its family, "w4a16" (16-bit floats by 4-bit weights), or "ks_fused" (epilogues)."""
    if workload.family == "ks" and getattr(workload, "epilogue", False):
        return "ks_fused"
    if workload.family == "gemm" and getattr(workload, "b_dtype", "") == "int4" and getattr(workload, "a_dtype", "") != "int4":
        return "w4a16"
    return workload.family


def peers_for(workload: Workload) -> Mapping[str, Peer]:
    """The peers of a workload by name."""
    return peers_of(group_of(workload))


def peers_of(group: str) -> Mapping[str, Peer]:
    """The peers of a group; where it has none of its own, the baseline of its family."""
    return PEERS.get(group) or {"baseline": baseline}


def register_peer(group: str, name: str, peer: Peer) -> None:
    """Add a peer from outside: `peer(workload, inputs)` returns a callable without arguments that computes the result."""
    PEERS.setdefault(group, {})[name] = peer
