"""How one layer is read in each format: the tensors of a checkpoint to the arguments of `kronsched.quant.pack`.

    format              weights                          zeros                           scales
    GPTQ                qweight int32 (k/8, n)           qzeros int32 (groups, n/8)      scales (groups, n)       g_idx (k)
    AWQ                 qweight int32 (k, n/8)           qzeros int32 (groups, n/8)      scales (groups, n)
    compressed-tensors  weight_packed int32 (n, k/8)     weight_zero_point (n/8, groups) weight_scale (n, groups) weight_g_idx (k)
    HQQ                 W_q uint8, rows n·groups in two  zero (n·groups, 1) floats       scale (n·groups, 1)

The first of eight values is in the low bits, but in AWQ a word holds columns 0 2 4 6 1 3 5 7. compressed-tensors counts from -8.
Sources: the packers of GPTQModel, AutoAWQ, compressed-tensors and hqq.

Read first: `Layer`, `read_awq` (the shortest). GPTQ is in formats_gptq.py, HQQ in formats_hqq.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kronsched.errors import ArgumentError, ArgumentTypeError, UnsupportedError
from kronsched.quant.checkpoint_config import QuantConfig
from kronsched.quant.checkpoint_files import Tensors
from kronsched.quant.layout import GROUP_STEP, NEUTRAL

if TYPE_CHECKING:
    import torch

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_SUFFIXES = ("qweight", "weight_packed", "W_q")


@dataclass(frozen=True)
class Unpacked:
    """The arguments of `pack`. q (k, n), scales and zeros (groups, n)."""

    q: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    group_size: int
    g_idx: torch.Tensor | None = None


@dataclass(frozen=True)
class Layer:
    """The tensors of one layer. name: its prefix in the checkpoint, "" when there is none."""

    name: str
    tensors: Tensors

    def full(self, part: str) -> str:
        """The name of one of its tensors in the checkpoint."""
        return f"{self.name}.{part}" if self.name else part

    def has(self, part: str) -> bool:
        """Whether a tensor is there; in a dict None stands for none."""
        return self.full(part) in self.tensors and self.tensors.raw(self.full(part)) is not None

    def get(self, part: str, dims: int | None = None) -> torch.Tensor:
        """One tensor of it; ArgumentError when it is missing or has another number of dimensions than `dims`."""
        if not self.has(part):
            raise self.wrong(part, "is missing")
        tensor = self.tensors.tensor(self.full(part))
        if dims is not None and (tensor.dim() != dims or 0 in tensor.shape):
            raise self.wrong(part, f"has shape {tuple(tensor.shape)}: {dims} dimensions, none empty, are needed")
        return tensor

    def words(self, part: str) -> torch.Tensor:
        """One tensor of packed int32 words."""
        import torch

        tensor = self.get(part, 2)
        if tensor.dtype != torch.int32:
            raise ArgumentTypeError(self._text(part, f"has dtype {str(tensor.dtype)[6:]}, int32 is needed"))
        return tensor

    def shaped(self, part: str, tensor: torch.Tensor, shape: Sequence[int], why: str) -> None:
        """ArgumentError unless the tensor has the shape."""
        if tuple(tensor.shape) != tuple(shape):
            raise self.wrong(part, f"has shape {tuple(tensor.shape)}: {tuple(shape)} is needed for {why}")

    def groups_within(self, part: str, g_idx: torch.Tensor, groups: int) -> None:
        """ArgumentError or ArgumentTypeError unless the tensor holds numbers of groups."""
        if g_idx.is_floating_point() or g_idx.is_complex():
            raise ArgumentTypeError(self._text(part, f"has dtype {str(g_idx.dtype)[6:]}, an integer dtype is needed"))
        low, high = int(g_idx.min()), int(g_idx.max())
        if low < 0 or high >= groups:
            raise self.wrong(part, f"holds the value {low if low < 0 else high}: groups 0 to {groups - 1} are needed")

    def wrong(self, part: str, text: str) -> ArgumentError:
        """An error that names the file and the tensor."""
        return ArgumentError(self._text(part, text))

    def unsupported(self, part: str, text: str) -> UnsupportedError:
        """The same for a valid file that is not supported."""
        return UnsupportedError(self._text(part, text))

    def _text(self, part: str, text: str) -> str:
        return f"{self.tensors.where(self.full(part))}: {self.full(part)} {text}"


def find_layers(tensors: Tensors) -> list[Layer]:
    """The layers with packed weights, in the order of their names in the checkpoint."""
    names = [name.rpartition(".") for name in tensors]
    return [Layer(prefix, tensors) for prefix, _, last in names if last in _SUFFIXES]


def method_of(layer: Layer, config: QuantConfig) -> str:
    """The format of a layer by its tensors' names and shapes; ArgumentError when the config says another."""
    if layer.has("W_q"):
        found, part = "hqq", "W_q"
    elif layer.has("weight_packed"):
        found, part = "compressed-tensors", "weight_packed"
    else:
        part = "qweight"
        words, scales = layer.words(part), layer.get("scales", 2)
        n = scales.shape[1]
        if words.shape[1] == n:
            found = "gptq"
        elif words.shape[1] * 8 == n:
            found = "awq"
        else:
            raise layer.wrong(
                part, f"has shape {tuple(words.shape)}, scales {tuple(scales.shape)}: for 4 bits (k/8, n) or (k, n/8) is needed"
            )
    if config.method not in (None, found):
        raise layer.wrong(part, f"is of format {found}, but {config.where} says quant_method={config.method!r}")
    return found


def group_size(layer: Layer, part: str, k: int, groups: int, config: QuantConfig, g_idx: torch.Tensor | None = None) -> int:
    """The group size of a layer with `groups` rows of scales in `part`: the config's that fits, else what divides k."""
    if config.group_sizes:
        for size in config.group_sizes:
            if groups == (1 if size == -1 else -(-k // size)):
                return -1 if groups == 1 else size
        sizes = " or ".join(map(str, config.group_sizes))
        raise layer.wrong(part, f"has {groups} groups for k={k}, which group_size={sizes} of {config.where} does not give")
    if groups == 1:
        return -1
    if g_idx is not None:
        fullest = int(g_idx.long().bincount().max())
        if fullest % GROUP_STEP == 0 and groups == -(-k // fullest):
            return fullest
    if k % groups != 0:
        raise layer.wrong(part, f"has {groups} groups, which do not divide k={k}: a config with group_size is needed")
    return k // groups


def read_awq(layer: Layer, config: QuantConfig) -> Unpacked:
    """A layer of AutoAWQ in its "gemm" layout."""
    words, scales = layer.words("qweight"), layer.get("scales", 2)
    k, n = words.shape[0], words.shape[1] * 8
    zeros = layer.words("qzeros")
    layer.shaped("scales", scales, (scales.shape[0], n), f"qweight of {tuple(words.shape)}")
    layer.shaped("qzeros", zeros, (scales.shape[0], n // 8), f"scales of {tuple(scales.shape)}")
    size = group_size(layer, "scales", k, scales.shape[0], config)
    return Unpacked(nibbles(words, 1, AWQ_ORDER), scales, none_if_neutral(nibbles(zeros, 1, AWQ_ORDER)), size)


def read_compressed(layer: Layer, config: QuantConfig) -> Unpacked:
    """A layer of compressed-tensors in its format "pack-quantized"."""
    words = layer.get("weight_packed")
    if words.dim() == 3:
        raise layer.unsupported("weight_packed", "has 3 dimensions (experts in one tensor): not supported yet")
    words = layer.words("weight_packed")
    shape = layer.get("weight_shape")
    if shape.numel() != 2:
        raise layer.wrong("weight_shape", f"holds {shape.numel()} values: n and k are needed")
    n, k = (int(v) for v in shape.flatten())
    layer.shaped("weight_packed", words, (n, -(-k // 8)), f"4 bits and weight_shape={n}, {k}")
    scales = layer.get("weight_scale", 2)
    groups = scales.shape[1]
    layer.shaped("weight_scale", scales, (n, groups), f"weight_shape={n}, {k}")
    zeros = _compressed_zeros(layer, n, groups) if layer.has("weight_zero_point") else None
    g_idx = layer.get("weight_g_idx", 1) if layer.has("weight_g_idx") else None
    if g_idx is not None and bool((g_idx == -1).all()):  # written so when it is not used
        g_idx = None
    if g_idx is not None:
        layer.shaped("weight_g_idx", g_idx, (k,), f"weight_shape={n}, {k}")
        layer.groups_within("weight_g_idx", g_idx, groups)
    size = group_size(layer, "weight_scale", k, groups, config)
    return Unpacked(nibbles(words, 1)[:, :k].T, scales.T, zeros, size, g_idx)


def _compressed_zeros(layer: Layer, n: int, groups: int) -> torch.Tensor | None:
    import torch

    zeros = layer.get("weight_zero_point", 2)
    if zeros.dtype == torch.int8:
        layer.shaped("weight_zero_point", zeros, (n, groups), "weight_scale of that shape")
        return none_if_neutral(zeros.T.to(torch.int16) + NEUTRAL)
    words = layer.words("weight_zero_point")
    layer.shaped("weight_zero_point", words, (-(-n // 8), groups), f"weight_scale of ({n}, {groups})")
    return none_if_neutral(nibbles(words, 0)[:n].T)


def nibbles(words: torch.Tensor, dim: int, order: Sequence[int] = range(8)) -> torch.Tensor:
    """The eight 4-bit values of each int32 word side by side along `dim` (0 or 1), uint8; value i of a word goes to order[i]."""
    import torch

    rows, columns = words.shape
    shape = (rows, 8, columns) if dim == 0 else (rows, columns, 8)
    out = torch.empty(shape, dtype=torch.uint8, device=words.device)
    for i, place in enumerate(order):
        out.select(dim + 1, place).copy_((words >> (4 * i)) & 15)
    return out.view(rows * 8, columns) if dim == 0 else out.view(rows, columns * 8)


def none_if_neutral(zeros: torch.Tensor) -> torch.Tensor | None:
    """None for zeros that are all 8: the weights are symmetric, whatever the file calls them, and kernels need no zeros."""
    return None if bool((zeros == NEUTRAL).all()) else zeros


def scalar(value: Any) -> Any:
    """A number that may be held as a tensor of one element."""
    return value.item() if hasattr(value, "item") and getattr(value, "numel", lambda: 1)() == 1 else value
