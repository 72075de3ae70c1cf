"""Rounding to nearest: `round_to_nearest` for a weight matrix, `quantize_` for every linear layer of a model.

Read first: `quantize_`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, TypeVar

from kronsched.errors import ArgumentError, ArgumentTypeError, UserError, choose
from kronsched.quant.layout import NEUTRAL
from kronsched.quant.packed_weight import PackedWeight, check_group_size, pack

if TYPE_CHECKING:
    import torch

    M = TypeVar("M", bound=torch.nn.Module)

_LEVELS = 15


def round_to_nearest(weight: torch.Tensor, group_size: int = 128, zero_point: str = "symmetric") -> PackedWeight:
    """A weight (out_features, in_features), as in nn.Linear, rounded to 4 bits with a scale a group of inputs.

    group_size: inputs that share a scale, a multiple of 32 or -1 for all; the last group may be short.  zero_point: "symmetric"
    spreads the 15 steps over -max|w| to max|w| of a group (the largest positive value loses half a step), "asymmetric" over min
    to max, both with 0 between, with an integer zero point, so that 0 stays 0. Scales have the dtype of the weight: float16 or
    bfloat16, float32 otherwise. Raises ArgumentError or ArgumentTypeError naming the argument.
    """
    import torch

    size = check_group_size(group_size)
    if zero_point not in ("symmetric", "asymmetric"):
        raise choose("zero_point", zero_point, ("symmetric", "asymmetric"))
    if not isinstance(weight, torch.Tensor) or not weight.is_floating_point():
        kind = f"dtype {str(weight.dtype)[6:]}" if isinstance(weight, torch.Tensor) else f"type {type(weight).__name__}"
        raise ArgumentTypeError(f"weight is of {kind}: a floating-point torch.Tensor is needed")
    if weight.dim() != 2 or 0 in weight.shape:
        raise ArgumentError(f"weight has shape {tuple(weight.shape)}, (out_features, in_features) is needed")
    n, k = weight.shape
    size = k if size == -1 else min(size, k)
    w = weight.detach().T.float()
    if not bool(torch.isfinite(w).all()):
        raise ArgumentError("weight holds NaN or infinity: finite values are needed")
    groups = -(-k // size)
    padded = torch.nn.functional.pad(w, (0, 0, 0, groups * size - k)).view(groups, size, n)
    if zero_point == "symmetric":
        low = -padded.abs().amax(1)
        high = -low
    else:
        low, high = padded.amin(1).clamp(max=0), padded.amax(1).clamp(min=0)
    kept = weight.dtype if weight.dtype in (torch.float16, torch.bfloat16) else torch.float32
    scales = ((high - low) / _LEVELS).to(kept)
    step = torch.where(scales == 0, torch.ones_like(scales), scales).float()
    zeros = None if zero_point == "symmetric" else (-low / step).round().clamp(0, _LEVELS)
    offset = float(NEUTRAL) if zeros is None else zeros[:, None]
    q = ((padded / step[:, None]).round() + offset).clamp(0, _LEVELS).to(torch.uint8)
    return pack(
        q.view(groups * size, n)[:k], scales, None if zeros is None else zeros.to(torch.uint8), -1 if groups == 1 else size
    )


def quantize_(
    model: M,
    group_size: int = 128,
    skip: Sequence[str] = ("lm_head",),
    *,
    zero_point: str = "symmetric",
    dtype: torch.dtype | None = None,
    weights: Mapping[str, PackedWeight] | None = None,
) -> M:
    """Replace every nn.Linear of a model by a `kronsched.nn.W4A16Linear`, in place; returns the model.

    group_size, zero_point: see `round_to_nearest`.  skip: layers to leave, by a pattern of their whole name or by its last part,
    such as "lm_head" or "model.layers.0.*".  dtype: float16 or bfloat16, of the layers' inputs; that of each weight by default.
    weights: packed weights by layer name, such as from `kronsched.quant.load` (with its biases): then only these layers are
    replaced, and nothing is rounded. Subclasses of nn.Linear are left as they are. Nothing is replaced when an error is raised.
    Raises ArgumentError or ArgumentTypeError naming the argument, or the layer.
    """
    import torch

    from kronsched.nn.w4a16_linear import W4A16Linear

    if not isinstance(model, torch.nn.Module):
        raise ArgumentTypeError(f"model is of type {type(model).__name__}: a torch.nn.Module is needed")
    if isinstance(skip, str) or not all(isinstance(pattern, str) for pattern in skip):
        raise ArgumentTypeError(f"skip={skip!r} must be a sequence of names")
    linear = dict(_linear_layers(model, skip))
    if weights is not None:
        _check_names(weights, model)
        linear = {name: layer for name, layer in linear.items() if name in weights}
    if not linear:
        raise ArgumentError(f"model is a {type(model).__name__} without an nn.Linear inside to replace")
    made: dict[int, W4A16Linear] = {}  # a layer used twice stays one layer
    for name, layer in linear.items():
        if id(layer) in made:
            continue
        try:
            if weights is None:
                made[id(layer)] = W4A16Linear.from_linear(layer, group_size, zero_point=zero_point, dtype=dtype)
            else:
                made[id(layer)] = _of_checkpoint(name, layer, weights, dtype)
        except UserError as error:
            raise type(error)(f"layer {name!r}: {error}") from None
    for name, layer in linear.items():
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, made[id(layer)])
    return model


def _linear_layers(model: torch.nn.Module, skip: Sequence[str]) -> Iterator[tuple[str, torch.nn.Linear]]:
    import torch

    for name, module in model.named_modules(remove_duplicate=False):
        # Exactly nn.Linear: a subclass does something else, or its weight is read by its parent.
        if type(module) is torch.nn.Linear and name:
            last = name.rpartition(".")[2]
            if not any(fnmatchcase(name, pattern) or fnmatchcase(last, pattern) for pattern in skip):
                yield name, module


def _check_names(weights: Mapping[str, PackedWeight], model: torch.nn.Module) -> None:
    import torch

    there = {name for name, module in model.named_modules(remove_duplicate=False) if type(module) is torch.nn.Linear}
    for name in weights:
        if name not in there:
            raise ArgumentError(f"weights has the layer {name!r}: the model has no nn.Linear of that name")


def _of_checkpoint(name: str, layer: torch.nn.Linear, weights: Mapping[str, PackedWeight], dtype: Any) -> Any:
    from kronsched.nn.w4a16_linear import W4A16Linear

    weight = weights[name]
    if (weight.n, weight.k) != (layer.out_features, layer.in_features):
        raise ArgumentError(
            f"weights has n={weight.n}, k={weight.k}: n={layer.out_features}, k={layer.in_features} are needed, as nn.Linear has"
        )
    bias = getattr(weights, "biases", {}).get(name, layer.bias)
    return W4A16Linear(weight.to(layer.weight.device), bias, dtype=dtype or W4A16Linear.dtype_for(layer.weight))
