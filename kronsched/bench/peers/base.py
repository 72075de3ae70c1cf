"""What a peer is: `Peer`, the error of one that cannot take part, and how exact it has to be."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from kronsched.errors import KronschedError

if TYPE_CHECKING:
    import torch

    from kronsched.workloads.base import Workload

    Peer = Callable[[Workload, Sequence[torch.Tensor]], Callable[[], Any]]

SLACK = 4.0
"""A peer may be so many times less exact than we allow ourselves: one that rounds to 16 bits after every factor is not wrong."""


class PeerUnavailable(KronschedError):
    """The peer is not installed or cannot serve this workload."""


def less_exact(slack: float) -> Callable[[Peer], Peer]:
    """Marks a peer that computes in a narrower type than the workload's: its result may be `slack` times less exact than ours."""

    def mark(peer: Peer) -> Peer:
        peer.slack = slack  # type: ignore[attr-defined]
        return peer

    return mark


def for_information(peer: Peer) -> Peer:
    """Marks a peer that is shown and never counts as the best."""
    peer.information = True  # type: ignore[attr-defined]
    return peer


def kernel_of(peer: Peer, workload: Workload) -> Workload | None:
    """The workload whose kernel of ours the peer runs, which its attribute `kernel_of` tells; None for other peers."""
    found: Callable[[Workload], Workload] | None = getattr(peer, "kernel_of", None)
    return found(workload) if found is not None else None


def slack_of(peer: Peer) -> float:
    """How many times the dtype's tolerance a peer's result may be off."""
    return float(getattr(peer, "slack", SLACK))
