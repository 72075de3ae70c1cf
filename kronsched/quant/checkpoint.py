"""`load`: the 4-bit layers of a real checkpoint (GPTQ, AWQ, compressed-tensors, HQQ) as `PackedWeight`s.

Read first: `load`. Files are opened in checkpoint_files.py, configs read in checkpoint_config.py, layers in formats*.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kronsched.errors import ArgumentError, ArgumentTypeError, UserError, choose
from kronsched.quant.checkpoint_config import QuantConfig, read_config
from kronsched.quant.checkpoint_files import open_source
from kronsched.quant.formats import Layer, Unpacked, find_layers, method_of, read_awq, read_compressed
from kronsched.quant.formats_gptq import read_gptq, version_of
from kronsched.quant.formats_hqq import read_hqq
from kronsched.quant.packed_weight import PackedWeight, pack

if TYPE_CHECKING:
    import torch

_READERS: dict[str, Callable[[Layer, QuantConfig], Unpacked]] = {
    "awq": read_awq,
    "compressed-tensors": read_compressed,
    "hqq": read_hqq,
}


class Checkpoint(dict[str, PackedWeight]):
    """The packed weights by layer name, such as "model.layers.0.mlp.up_proj".

    biases: the biases of those layers that have one, by layer name.  formats: the format each layer was read in: "gptq_v1",
    "gptq_v2", "awq", "compressed-tensors" or "hqq".
    """

    def __init__(self) -> None:
        """Empty."""
        super().__init__()
        self.biases: dict[str, torch.Tensor] = {}
        self.formats: dict[str, str] = {}

    def __repr__(self) -> str:
        kinds = ", ".join(sorted(set(self.formats.values())))
        return f"<Checkpoint of {len(self)} layers: {kinds}>"


def load(
    source: str | Path | Mapping[str, Any],
    *,
    layers: str = "*",
    gptq_version: int | None = None,
    device: torch.device | str = "cpu",
) -> Checkpoint:
    """The 4-bit layers of a checkpoint, re-laid for kernels: {layer name: PackedWeight}, with `biases` beside them.

    source: a safetensors file, a folder (with its index and configs), or tensors by name.  layers: a pattern of layer names to
    read, such as "model.layers.0.*".  gptq_version: what stored zeros of GPTQ mean, 1 (zero less one) or 2; None looks at the
    values and, if these do not tell, at the config.  device: where the packed weights go.

    quantize_config.json, quant_config.json and quantization_config of config.json beside the tensors say the method and group
    size; without them shapes do. Raises ArgumentError (UnsupportedError for valid files that cannot be used) or
    ArgumentTypeError: one line that names file, tensor and value.
    """
    if gptq_version not in (None, 1, 2):
        raise choose("gptq_version", gptq_version, (None, 1, 2))
    if not isinstance(layers, str):
        raise ArgumentTypeError(f"layers={layers!r} must be a pattern of layer names")
    tensors = open_source(source)
    config = read_config(tensors.configs)
    found = find_layers(tensors)
    if not found:
        raise ArgumentError(f"{tensors.name}: holds no 4-bit layer: no tensor *.qweight, *.weight_packed or *.W_q")
    chosen = [layer for layer in found if fnmatchcase(layer.name, layers)]
    if not chosen:
        raise ArgumentError(f"layers={layers!r} matches none of {len(found)} layers in {tensors.name}, such as {found[0].name!r}")
    methods = [method_of(layer, config) for layer in chosen]
    version = gptq_version
    if version is None and "gptq" in methods:
        version = version_of([layer for layer, method in zip(chosen, methods, strict=True) if method == "gptq"], config)
    result = Checkpoint()
    for layer, method in zip(chosen, methods, strict=True):
        unpacked = _READERS[method](layer, config) if method != "gptq" else read_gptq(layer, config, version or 1)
        weight = _packed(layer, unpacked, device)
        result[layer.name] = weight
        result.formats[layer.name] = f"gptq_v{version}" if method == "gptq" else method
        if layer.has("bias"):
            bias = layer.get("bias", 1)
            layer.shaped("bias", bias, (weight.n,), f"n={weight.n}")
            result.biases[layer.name] = bias.to(device)
    return result


def _packed(layer: Layer, u: Unpacked, device: torch.device | str) -> PackedWeight:
    """`pack`, whose errors get the names of file and layer."""
    moved = [None if t is None else t.to(device) for t in (u.q, u.scales, u.zeros, u.g_idx)]
    q, scales, zeros, g_idx = moved
    assert q is not None and scales is not None
    try:
        return pack(q, scales, zeros, u.group_size, g_idx)
    except UserError as error:
        where = next(part for part in ("qweight", "weight_packed", "W_q") if layer.has(part))
        raise type(error)(f"{layer.tensors.where(layer.full(where))}: layer {layer.name!r}: {error}") from None
