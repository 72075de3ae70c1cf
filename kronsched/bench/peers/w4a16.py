"""Peers for products with 4-bit weights: cuBLAS on dequantised weights, tinygemm, gemlite, humming, the SplitK paper.

    cublas              torch's linear on weights dequantised beforehand (on a CPU: the library torch has there)
    tinygemm            torch's own int4 kernels; on CUDA they take bfloat16 only, so x and scales are rounded to it beforehand
    gemlite             Triton kernels of the package gemlite, as it tunes them itself at the first call
    humming             kernels that humming-kernels compiles at the first call, with its own choice of config; symmetric only
    dataparallel_paper, splitk_paper: see w4a16_paper.py
    dequantise_cublas   what our layers do for many rows: weights dequantised in every call, then torch's linear

Read first: `tinygemm`. Sources: the packing functions of each package, and torch's `_convert_weight_to_int4pack`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING

from kronsched.bench.peers.base import PeerUnavailable, for_information, less_exact
from kronsched.bench.peers.w4a16_paper import dataparallel_paper, splitk_paper
from kronsched.bench.peers.w4a16_weights import gemm_of, plain
from kronsched.quant.layout import NEUTRAL

if TYPE_CHECKING:
    import torch

    from kronsched.bench.peers.base import Peer
    from kronsched.bench.peers.w4a16_weights import Plain
    from kronsched.workloads.base import Workload

_TINYGEMM_GROUPS = (32, 64, 128, 256)
_TINYGEMM_TILES = 8
"""innerKTiles of torch's packing: how many steps along k a word run holds; 8 is the largest."""
_BF16_SLACK = 16.0
"""tinygemm rounds a float16 workload's x, scales and result to bfloat16, whose step is 8 times float16's."""


def cublas(workload: Workload, inputs: Sequence[torch.Tensor]) -> Callable[[], torch.Tensor]:
    """`torch.nn.functional.linear` with the dequantised weight (n, k) in the dtype of x."""
    import torch

    w, x = gemm_of(workload), inputs[0]
    if w.act_order:  # the same product with the columns of x in the order of the rows
        _, call = w.baseline(*inputs)
        return call
    weight = plain(w, inputs).dense()

    def call_linear() -> torch.Tensor:
        return torch.nn.functional.linear(x, weight)

    return call_linear


@for_information
def dequantise_cublas(workload: Workload, inputs: Sequence[torch.Tensor]) -> Callable[[], torch.Tensor]:
    """Our own `LibraryProduct`, dequantising included."""
    from kronsched.hardware import resolve_target
    from kronsched.nn.w4a16_library import LibraryProduct

    x, *weights = inputs
    product = LibraryProduct(replace(gemm_of(workload), m=1), resolve_target(str(x.device)))

    def call() -> torch.Tensor:
        return product(x, weights)

    return call


@less_exact(_BF16_SLACK)
def tinygemm(workload: Workload, inputs: Sequence[torch.Tensor]) -> Callable[[], torch.Tensor]:
    """`_weight_int4pack_mm` of torch: (q - 8) · scale + zero with zero = (8 - z) · scale."""
    import torch

    w, x = gemm_of(workload), inputs[0]
    weights = plain(w, inputs)
    n, k = weights.q.shape
    if weights.group_size not in _TINYGEMM_GROUPS or k % weights.group_size != 0:
        raise PeerUnavailable(f"tinygemm has no kernel for groups of {weights.group_size} in k={k}")
    dtype = torch.bfloat16 if x.is_cuda else x.dtype
    scales = weights.scales.float()
    pairs = torch.stack([scales, (NEUTRAL - weights.zeros_or_neutral) * scales], dim=2).transpose(0, 1).contiguous().to(dtype)
    x = x.to(dtype)
    if x.is_cuda:
        tiles = next((t for t in (_TINYGEMM_TILES, 4, 2) if k % (16 * t) == 0), None)
        if tiles is None or n % 8 != 0:
            raise PeerUnavailable(f"tinygemm has no kernel for n={n}, k={k}: multiples of 8 and 32 are needed")
        halves = (weights.q[:, ::2] << 4 | weights.q[:, 1::2]).contiguous()
        packed = torch.ops.aten._convert_weight_to_int4pack(halves, tiles)
        product = torch.ops.aten._weight_int4pack_mm
    else:
        if n % 16 != 0 or k % 32 != 0:
            raise PeerUnavailable(f"tinygemm has no CPU kernel for n={n}, k={k}: multiples of 16 and 32 are needed")
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(weights.q.int(), 1)
        product = torch.ops.aten._weight_int4pack_mm_for_cpu

    def call() -> torch.Tensor:
        y: torch.Tensor = product(x, packed, weights.group_size, pairs)
        return y

    return call


def gemlite(workload: Workload, inputs: Sequence[torch.Tensor]) -> Callable[[], torch.Tensor]:
    """GemLiteLinear of gemlite; an integer zero of 8 where the weights are symmetric, as its kernels have a path for that."""
    x = _on_gpu("gemlite", inputs)
    try:
        core = import_module("gemlite.core")
    except ImportError as e:
        raise PeerUnavailable(f"not installed (pip install gemlite): {e}") from None
    weights = plain(workload, inputs)
    n, k = weights.q.shape
    if k % weights.group_size != 0 or k % 32 != 0:
        raise PeerUnavailable(f"gemlite has no kernel for groups of {weights.group_size} in k={k}")
    kind = core.DType.FP16 if gemm_of(workload).a_dtype == "float16" else core.DType.BF16
    layer = core.GemLiteLinear(4, weights.group_size, k, n, input_dtype=kind, output_dtype=kind)
    layer.pack(weights.q, weights.scales, NEUTRAL if weights.zeros is None else weights.zeros.to(x.dtype), None)

    def call() -> torch.Tensor:
        y: torch.Tensor = layer(x)
        return y

    return call


def humming(workload: Workload, inputs: Sequence[torch.Tensor]) -> Callable[[], torch.Tensor]:
    """HummingLayer of humming-kernels, its weights and scales given as it stores int4 itself."""
    x = _on_gpu("humming", inputs)
    try:
        layers = import_module("humming.layer")
    except (ImportError, OSError) as e:
        raise PeerUnavailable(f"not installed (pip install humming-kernels): {e}") from None
    weights = plain(workload, inputs)
    _check_humming(weights)
    n, k = weights.q.shape
    config = {"dtype": "int4", "group_size": 0 if weights.group_size == k else weights.group_size}
    layer = layers.HummingLayer(n, k, config, torch_dtype=x.dtype).to(x.device)
    layer.load_from_tensors({"weight": weights.words(), "weight_scale": weights.scales})
    layer.transform()

    def call() -> torch.Tensor:
        y: torch.Tensor = layer(x)
        return y

    return call


def _check_humming(weights: Plain) -> None:
    if weights.zeros is not None:
        raise PeerUnavailable("humming is timed with symmetric weights only: its zero points have 4 bits, ours go to 16")
    if weights.q.shape[1] % weights.group_size != 0 or weights.q.shape[1] % 8 != 0:
        raise PeerUnavailable(f"humming has no kernel for groups of {weights.group_size} in k={weights.q.shape[1]}")


def _on_gpu(name: str, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
    """x; PeerUnavailable unless it is on a GPU."""
    x = inputs[0]
    if not x.is_cuda:
        raise PeerUnavailable(f"{name} has no kernels for a CPU")
    return x


PEERS: dict[str, Peer] = {
    "cublas": cublas,
    "tinygemm": tinygemm,
    "humming": humming,
    "gemlite": gemlite,
    "dequantise_cublas": dequantise_cublas,
    "splitk_paper": splitk_paper,
    "dataparallel_paper": dataparallel_paper,
}
