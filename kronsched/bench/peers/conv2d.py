"""Peers of Conv2d: cuDNN through torch, and torch's int8 product for kernels of 1x1.

    cudnn_fp16    conv2d in channels-last, cuDNN's fastest algorithm (benchmark mode); float16 for int8 and fp8 workloads too,
                  without their epilogue
    int_mm        torch._int_mm, int32 sums without the epilogue; int8, 1x1, no padding, one group

A peer in another dtype than the workload has no result to compare with ours. Its own result is checked here against float64,
on the inputs as it takes them, and the bench is told to look no further (infinite slack).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from kronsched.bench.peers.base import PeerUnavailable, less_exact
from kronsched.dtypes import DTYPES
from kronsched.measure.check import max_relative_error
from kronsched.workloads.conv2d import FOUR_BIT, Conv2d
from kronsched.workloads.int4 import unpack_int4

if TYPE_CHECKING:
    import torch

    from kronsched.bench.peers.base import Peer
    from kronsched.workloads.base import Workload

_ROWS = 16
"""torch._int_mm wants more rows than this."""


@less_exact(math.inf)
def cudnn_fp16(workload: Workload, inputs: Sequence[torch.Tensor]) -> Callable[[], torch.Tensor]:
    """`torch.nn.functional.conv2d`; int8 values are divided by 64 beforehand, so that sums stay in range."""
    import torch
    from torch.nn.functional import conv2d

    conv, (x, w) = _conv(workload), inputs[:2]
    if x.device.type != "cuda":
        raise PeerUnavailable("cuDNN needs a CUDA GPU")
    torch.backends.cudnn.benchmark = True
    if conv.in_dtype in FOUR_BIT:
        x, w = unpack_int4(x, signed=conv.in_dtype == "int4"), unpack_int4(w)
    dtype = x.dtype if conv.in_dtype in ("float16", "bfloat16") else torch.float16
    scale = 64.0 if conv.in_dtype == "int8" else 1.0
    image, weight = ((t.float() / scale).to(dtype) for t in (x, w))
    planes, filters = image.permute(0, 3, 1, 2), weight.permute(0, 3, 1, 2)  # NHWC in memory
    name = str(dtype).removeprefix("torch.")
    plain = replace(conv, in_dtype=name, out_dtype=name, has_scale=False, has_bias=False, has_residual=False, relu=False)

    def call() -> torch.Tensor:
        return conv2d(planes, filters, None, conv.stride, conv.padding, conv.dilation, conv.groups).permute(0, 2, 3, 1)

    error = max_relative_error(call(), plain.reference(image, weight))
    shown = conv.output.shape[-1]  # of 4 bits, two channels are one element of what the bench compares shapes with
    if not error <= DTYPES[name].tolerance:
        raise PeerUnavailable(f"cuDNN's result is off by {error:.2g}")
    return lambda: call()[..., :shown]


@less_exact(math.inf)
def int_mm(workload: Workload, inputs: Sequence[torch.Tensor]) -> Callable[[], torch.Tensor]:
    """`torch._int_mm` on x as (pixels, c_in), which a stride gathers beforehand."""
    import torch

    conv, (x, w) = _conv(workload), inputs[:2]
    if conv.in_dtype != "int8" or conv.kernel != (1, 1) or conv.groups > 1 or any(conv.padding):
        raise PeerUnavailable("torch._int_mm serves int8 and kernels of 1x1 without padding")
    rows = x[:, :: conv.stride[0], :: conv.stride[1]].reshape(conv.pixels, conv.c_in)
    if rows.shape[0] <= _ROWS or conv.c_in % 8 or conv.c_out % 8:
        raise PeerUnavailable("torch._int_mm wants more than 16 rows and channels in multiples of 8")
    columns = w.reshape(conv.c_out, conv.c_in).T

    def call() -> torch.Tensor:
        return torch._int_mm(rows, columns).reshape(conv.output.shape)

    exact = replace(conv, out_dtype="int32", has_scale=False, has_bias=False, has_residual=False, relu=False)
    if max_relative_error(call(), exact.reference(x, w)) != 0:
        raise PeerUnavailable("torch._int_mm's result is wrong")
    return call


def _conv(workload: Workload) -> Conv2d:
    assert isinstance(workload, Conv2d)
    if workload.layout != "NHWC":
        raise PeerUnavailable("it takes NHWC")
    return workload


PEERS: dict[str, Peer] = {"cudnn_fp16": cudnn_fp16, "int_mm": int_mm}
