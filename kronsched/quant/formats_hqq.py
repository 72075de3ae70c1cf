"""HQQ layers: rows of one group each, zeros that are floats, two rows a byte.

The weight (n, k) is viewed as rows of `group_size` values; byte (r, c) holds row r in its high and row r + half in its low bits.
Settings travel as tensors beside the weight (as plain values in a dict from `HQQLinear.state_dict()`).

Read first: `read_hqq`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kronsched.quant.checkpoint_config import QuantConfig
from kronsched.quant.formats import Layer, Unpacked, none_if_neutral, scalar

if TYPE_CHECKING:
    import torch


def read_hqq(layer: Layer, config: QuantConfig) -> Unpacked:
    """A layer of hqq with 4 bits, axis=1 and zeros and scales that are not quantised themselves."""
    import torch

    n, k = _shape(layer)
    for part, wanted in (("nbits", 4), ("axis", 1), ("quant_scale", 0), ("quant_zero", 0)):
        value = _setting(layer, part, wanted)
        if value != wanted:
            raise layer.unsupported(part, f"is {value}: only {wanted} is supported")
    packing = _setting(layer, "packing", "4bit_u8")
    if packing != "4bit_u8":
        raise layer.unsupported("packing", f"is {packing!r}: only '4bit_u8' is supported")
    stored = layer.get("W_q", 2)
    if stored.dtype != torch.uint8:
        stored = stored.contiguous().view(torch.uint8)  # view_as_float: the same bytes
    scales, zeros = layer.get("scale"), layer.get("zero")
    rows = 2 * stored.shape[0]
    if rows * stored.shape[1] != n * k or rows % n != 0 or scales.numel() != rows or zeros.numel() != rows:
        shapes = f"{tuple(stored.shape)}, scale {tuple(scales.shape)} and zero {tuple(zeros.shape)}"
        raise layer.wrong("W_q", f"has shape {shapes}: they do not make up shape={n}, {k}, with whole groups in each row")
    groups = rows // n
    q = torch.cat([stored >> 4, stored & 15]).view(n, k).T
    zero = zeros.reshape(n, groups).T.float()
    return Unpacked(q, scales.reshape(n, groups).T, none_if_neutral(zero), -1 if groups == 1 else k // groups)


def _shape(layer: Layer) -> tuple[int, int]:
    if not layer.has("shape"):
        raise layer.wrong("shape", "is missing")
    values: Any = layer.tensors.raw(layer.full("shape"))
    sizes = [int(v) for v in values]
    if len(sizes) != 2 or min(sizes) < 1:
        raise layer.wrong("shape", f"is {sizes}: n and k are needed")
    return sizes[0], sizes[1]


def _setting(layer: Layer, part: str, default: Any) -> Any:
    """A number, or a text that was stored as its characters; the default when it is not there."""
    if not layer.has(part):
        return default
    value: torch.Tensor | Any = layer.tensors.raw(layer.full(part))
    if isinstance(default, str) and not isinstance(value, str):
        return "".join(chr(int(c)) for c in value)
    return scalar(value)
