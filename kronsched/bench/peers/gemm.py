"""Peers for dense products of one dtype: what torch offers.

    cublas            torch's linear, for float16 and bfloat16 (on a CPU: the library torch has there)
    int_mm            `torch._int_mm`, and the scales in operations of their own where there are any; int4 unpacked beforehand
    scaled_mm         `torch._scaled_mm` with a scale a row and a column, sums kept in float32
    scaled_mm_fast    the same with `use_fast_accum`: sums in the tensor cores' fewer bits; shown, not counted

Read first: `scaled_mm`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from kronsched.bench.peers.base import PeerUnavailable, for_information, less_exact
from kronsched.dtypes import DTYPES
from kronsched.workloads.gemm import Gemm
from kronsched.workloads.int4 import unpack_int4

if TYPE_CHECKING:
    import torch

    from kronsched.bench.peers.base import Peer
    from kronsched.workloads.base import Workload


def _of(workload: Workload, dtypes: tuple[str, ...], name: str) -> Gemm:
    if not isinstance(workload, Gemm) or workload.a_dtype not in dtypes:
        raise PeerUnavailable(f"{name} multiplies {' and '.join(dtypes)} only")
    return workload


def cublas(workload: Workload, inputs: Sequence[torch.Tensor]) -> Callable[[], torch.Tensor]:
    """`torch.nn.functional.linear`."""
    import torch

    _of(workload, ("float16", "bfloat16"), "cublas")
    x, weight = inputs
    return lambda: torch.nn.functional.linear(x, weight)


def int_mm(workload: Workload, inputs: Sequence[torch.Tensor]) -> Callable[[], torch.Tensor]:
    """`torch._int_mm`; it takes more than 16 rows, and n and k in multiples of 8."""
    import torch

    w = _of(workload, ("int8", "int4"), "int_mm")
    if inputs[0].is_cuda and (w.m <= 16 or w.n % 8 or w.k % 8):
        raise PeerUnavailable("torch._int_mm takes more than 16 rows, and n and k in multiples of 8")
    x, weight = inputs[0], inputs[1].T
    if w.a_dtype == "int4":
        x, weight = unpack_int4(x), unpack_int4(inputs[1]).T
    if len(inputs) == 2:
        return lambda: torch._int_mm(x, weight)
    row, column, dtype = inputs[2][:, None], inputs[3][None, :], DTYPES[w.out_dtype].torch()
    return lambda: (torch._int_mm(x, weight) * row * column).to(dtype)


def scaled_mm(workload: Workload, inputs: Sequence[torch.Tensor]) -> Callable[[], torch.Tensor]:
    """`torch._scaled_mm` with scales by row and column."""
    return _scaled_mm(workload, inputs, fast=False)


@for_information
@less_exact(16.0)
def scaled_mm_fast(workload: Workload, inputs: Sequence[torch.Tensor]) -> Callable[[], torch.Tensor]:
    """`torch._scaled_mm` with `use_fast_accum`."""
    return _scaled_mm(workload, inputs, fast=True)


def _scaled_mm(workload: Workload, inputs: Sequence[torch.Tensor], fast: bool) -> Callable[[], torch.Tensor]:
    import torch

    w = _of(workload, ("float8_e4m3fn",), "scaled_mm")
    if w.out_dtype != "bfloat16" or w.n % 16 or w.k % 16 or not inputs[0].is_cuda:
        raise PeerUnavailable("torch._scaled_mm by rows gives bfloat16, for n and k in multiples of 16, on CUDA")
    x, weight = inputs[0], inputs[1].T
    row, column = inputs[2][:, None].contiguous(), inputs[3][None, :].contiguous()
    return lambda: torch._scaled_mm(x, weight, row, column, out_dtype=torch.bfloat16, use_fast_accum=fast)


PEERS: dict[str, Peer] = {
    "cublas": cublas,
    "int_mm": int_mm,
    "scaled_mm": scaled_mm,
    "scaled_mm_fast": scaled_mm_fast,
}
"""Peers by name."""
