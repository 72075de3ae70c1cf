"""The weights of a 4-bit workload as other libraries take them: plain nibbles, scales and zeros, rows of outputs.

Read first: `Plain`, `plain`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kronsched.bench.peers.base import PeerUnavailable
from kronsched.quant.layout import NEUTRAL, unpack_columns, unpack_words

if TYPE_CHECKING:
    import torch

    from kronsched.workloads.base import Workload
    from kronsched.workloads.gemm import Gemm


@dataclass(frozen=True)
class Plain:
    """Weights (q - zero) · scale, one group a `group_size` columns of k.

    q: (n, k) uint8.  scales, zeros: (n, groups), scales in the dtype of x, zeros float32; zeros is None when all are 8.
    """

    q: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    group_size: int

    @property
    def zeros_or_neutral(self) -> torch.Tensor:
        """The zeros, 8 where there are none."""
        import torch

        return torch.full_like(self.scales, NEUTRAL, dtype=torch.float32) if self.zeros is None else self.zeros

    def words(self) -> torch.Tensor:
        """The nibbles (n, k / 8) int32, the first of eight along k in the low bits."""
        import torch

        n, k = self.q.shape
        shifts = 4 * torch.arange(8, dtype=torch.int32, device=self.q.device)
        return (self.q.view(n, k // 8, 8).int() << shifts).sum(-1, dtype=torch.int32)

    def dense(self) -> torch.Tensor:
        """The weights (n, k) in the dtype of the scales, each rounded once from float32."""
        import torch

        n, k = self.q.shape
        if k % self.group_size == 0:
            q = self.q.view(n, -1, self.group_size).float()
            return q.sub_(self.zeros_or_neutral[..., None]).mul_(self.scales.float()[..., None]).to(self.scales.dtype).view(n, k)
        groups = torch.arange(k, device=self.q.device) // self.group_size
        q = self.q.float().sub_(self.zeros_or_neutral[:, groups])
        return q.mul_(self.scales.float()[:, groups]).to(self.scales.dtype)


def plain(workload: Workload, inputs: Sequence[torch.Tensor]) -> Plain:
    """The weights of the packed inputs of a `Gemm` with 4-bit weights. PeerUnavailable with act-order, which no peer here has."""
    w = gemm_of(workload)
    if w.act_order:
        raise PeerUnavailable("has no kernel for weights whose rows are sorted by group (act-order)")
    layout = w.layout
    q = unpack_words(inputs[1], layout)[: w.k, : w.n].T.contiguous()
    scales = unpack_columns(inputs[2])[:, : w.n].T.contiguous()
    zeros = None if w.zero_point == "symmetric" else unpack_columns(inputs[3])[:, : w.n].T.float().contiguous()
    return Plain(q, scales, zeros, w.k if layout.groups == 1 else w.group_size)


def gemm_of(workload: Workload) -> Gemm:
    """The workload as the `Gemm` that it is."""
    from kronsched.workloads.gemm import Gemm

    assert isinstance(workload, Gemm)
    return workload
