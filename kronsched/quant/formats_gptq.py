"""GPTQ layers, and which of two meanings their stored zeros have.

Version 1 of the format stores the zero point less one, version 2 the zero point. Files are labelled wrongly or not at all, so
values decide: symmetric weights store 7 everywhere in version 1 and 8 in version 2. For others, weights of a layer have a mean
near 0, so the mean of q - stored is near 1 in version 1 and near 0 in version 2. Only where that is not clear the label counts.

A stored 15 of version 1 means 16 to readers that add one to each nibble. But GPTQModel makes version 1 of version 2 by one
subtraction a word of eight: a zero point of 0 then becomes 15 and borrows 1 from its neighbour, and one addition a word restores
both. Again values tell: after a borrow q of the neighbour has a mean near 1 above what its nibble says (see `_borrowed`).

Read first: `version_of`, `read_gptq`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kronsched.errors import ArgumentError
from kronsched.quant.checkpoint_config import QuantConfig
from kronsched.quant.formats import Layer, Unpacked, group_size, nibbles, none_if_neutral

if TYPE_CHECKING:
    import torch

_SAMPLED = 16
_NEAR = 0.25
_SURE = 0.1  # against a label
_SIGMAS = 4.0
_FEWEST = 8  # stored zeros that must all be 7, or 8, to count as a sign
_SYMMETRIC = {7: 1, 8: 2}
_ONE_EACH = 0x11111111  # 1 in each nibble of a word; int32 sums wrap as the packer's did
_PLAUSIBLE = 4.0  # a neighbour whose q is further from its zero tells nothing, such as that of a second zero point of 0


def version_of(layers: Sequence[Layer], config: QuantConfig) -> int:
    """1 or 2 for all GPTQ layers of a checkpoint; ArgumentError when neither values nor the label tell, or layers disagree."""
    step = -(-len(layers) // _SAMPLED)
    signs: dict[int, Layer] = {}
    shifts, noise = 0.0, 0.0
    sampled = 0
    for layer in layers[::step]:
        q, stored, g_idx = _values(layer)
        first = int(stored[0, 0])
        if first in _SYMMETRIC and stored.numel() >= _FEWEST and bool((stored == first).all()):
            signs.setdefault(_SYMMETRIC[first], layer)
            continue
        shift, error = _shift(q, stored, g_idx)
        shifts, noise, sampled = shifts + shift, noise + error**2, sampled + 1
    if len(signs) == 2:
        raise ArgumentError(
            f"{signs[1].tensors.name}: {signs[1].full('qzeros')} is all 7 as in GPTQ version 1, {signs[2].full('qzeros')} all 8 "
            "as in version 2: pass gptq_version"
        )
    if signs:
        return next(iter(signs))
    mean, spread = shifts / sampled, _SIGMAS * noise**0.5 / sampled
    for version, expected in ((1, 1.0), (2, 0.0)):
        near = _NEAR if config.gptq_version in (None, version) else _SURE
        if abs(mean - expected) < near and abs(mean - expected) + spread < 2 * _NEAR:
            return version
    if config.gptq_version is None:
        raise ArgumentError(
            f"{layers[0].tensors.name}: values do not tell GPTQ version 1 from 2 (mean of q - stored zero {mean:.2f} ± "
            f"{spread:.2f}) and no config says it: pass gptq_version"
        )
    return config.gptq_version


def read_gptq(layer: Layer, config: QuantConfig, version: int) -> Unpacked:
    """A layer of AutoGPTQ or GPTQModel, with or without act-order."""
    q, stored, g_idx = _values(layer)
    scales = layer.get("scales", 2)
    size = group_size(layer, "scales", q.shape[0], scales.shape[0], config, g_idx)
    zeros = stored
    if version == 1:
        borrowed = _borrowed(q, stored, size, g_idx)
        zeros = nibbles(layer.words("qzeros") + _ONE_EACH, 1)[:, : q.shape[1]] if borrowed else stored + 1
    return Unpacked(q, scales, none_if_neutral(zeros), size, g_idx)


def _values(layer: Layer) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """The nibbles (k, n), stored zeros (groups, n) and g_idx, with all shapes and the range of g_idx checked."""
    words, scales = layer.words("qweight"), layer.get("scales", 2)
    k, n = words.shape[0] * 8, words.shape[1]
    groups = scales.shape[0]
    layer.shaped("scales", scales, (groups, n), f"qweight of {tuple(words.shape)}")
    zeros = layer.words("qzeros")
    layer.shaped("qzeros", zeros, (groups, -(-n // 8)), f"4 bits and scales of {tuple(scales.shape)}")
    g_idx = layer.get("g_idx", 1) if layer.has("g_idx") else None
    if g_idx is not None:
        if g_idx.shape[0] % 8 != 0:
            raise layer.wrong("g_idx", f"has {g_idx.shape[0]} values: k must be a multiple of 8")
        layer.shaped("g_idx", g_idx, (k,), f"qweight of {tuple(words.shape)}, 8 values a word")
        layer.groups_within("g_idx", g_idx, groups)
    return nibbles(words, 0), nibbles(zeros, 1)[:, :n], g_idx


def _borrowed(q: torch.Tensor, stored: torch.Tensor, size: int, g_idx: torch.Tensor | None) -> bool:
    """Whether stored zeros of version 1 were made by one subtraction a word, judged by the columns after a stored 15."""
    import torch

    columns = torch.arange(stored.shape[1] - 1, device=stored.device)
    found = ((stored[:, :-1] == 15) & (columns % 8 != 7)).nonzero()  # the last of a word borrows from nobody
    if len(found) == 0:
        return False
    k = q.shape[0]
    groups = torch.arange(k, device=q.device) // (k if size == -1 else size) if g_idx is None else g_idx.long()
    counts = torch.bincount(groups, minlength=stored.shape[0]).clamp(min=1)
    sums = torch.zeros(stored.shape, device=q.device).index_add_(0, groups, q.float())
    shifts = (sums / counts[:, None] - (stored.float() + 1))[found[:, 0], found[:, 1] + 1]
    shifts = shifts[shifts.abs() < _PLAUSIBLE]
    return len(shifts) > 0 and float(shifts.mean()) > 0.5


def _shift(q: torch.Tensor, stored: torch.Tensor, g_idx: torch.Tensor | None) -> tuple[float, float]:
    """The mean of q - stored zero over a layer, and the standard error of it."""
    import torch

    k, groups = q.shape[0], stored.shape[0]
    counts = torch.full((groups,), -(-k // groups)) if g_idx is None else torch.bincount(g_idx.long(), minlength=groups)
    weights = (counts.double() / counts.sum()).to(stored.device)
    shift = float(q.double().mean() - (weights[:, None] * stored.double()).sum(0).mean())
    return shift, float(q.double().std()) / q.numel() ** 0.5
