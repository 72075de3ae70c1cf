"""What may follow a dense Gemm in the same kernel: bias, residual, relu, and results requantised to 8 or 4 bits.

    floating output      y = relu(acc · x_scale[i] · w_scale[j] + bias[j] + residual[i, j])    in float32, rounded once
    int32                y = relu(acc + bias[j] + residual[i, j])
    int8, int4, uint4    y = saturate(relu(rint((acc + bias[j]) · scale[j]) + rint(residual[i, j] · residual_scale)))

rint rounds halves to even; 4 bits take no residual. Integers are those of the convolution with as many pixels as rows to the
last bit, and so is the code that computes them (`as_conv2d`).

Read first: `as_conv2d`, `epilogue_inputs`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kronsched.errors import ArgumentError, ArgumentTypeError, UnsupportedError
from kronsched.workloads.base import TensorSpec
from kronsched.workloads.conv2d import EPILOGUE, FOUR_BIT, LIMITS, Conv2d, filled

if TYPE_CHECKING:
    import torch

    from kronsched.workloads.gemm import Gemm

PARTS = ("has_bias", "has_residual", "relu")
"""The fields that add something; a requantised output is one more."""
_MEANT = {"bias": "has_bias=True", "residual": "has_residual=True", "scale": "out_dtype='int8'"}


def has_epilogue(w: Gemm) -> bool:
    """Whether anything but the scales of 8-bit inputs follows the product."""
    return w.has_bias or w.has_residual or w.relu or requantised(w)


def requantised(w: Gemm) -> bool:
    """Whether y is rounded to an integer of 8 or 4 bits."""
    return w.out_dtype in LIMITS


def check_parts(w: Gemm) -> None:
    """Raise ArgumentTypeError, ArgumentError or UnsupportedError naming the field that is wrong; out_dtype is known."""
    for name in PARTS:
        if not isinstance(getattr(w, name), bool):
            raise ArgumentTypeError(f"{name}={getattr(w, name)!r} must be True or False")
        if getattr(w, name) and not w.is_dense:
            raise UnsupportedError(f"{name}=True is not supported with packed 4-bit weights: it is for dense ones")
    if w.is_dense and w.out_dtype in FOUR_BIT:
        if w.n % 2:
            raise ArgumentError(f"n={w.n} is not allowed with out_dtype={w.out_dtype!r}: an even number is needed")
        if w.has_residual:
            raise UnsupportedError(f"has_residual=True is not supported with out_dtype={w.out_dtype!r}")


def as_conv2d(w: Gemm) -> Conv2d:
    """The same product and epilogue as a convolution: rows of X are pixels.

    Where x_scale and w_scale come first, whatever is left: the product of floats whose sums are scaled already.
    """
    scaled = w.a_dtype not in FOUR_BIT and w.a_dtype != w.out_dtype and w.out_dtype in ("float16", "bfloat16")
    in_dtype = w.out_dtype if scaled else w.a_dtype
    parts = {name: getattr(w, name) for name in PARTS}
    return Conv2d(1, 1, w.m, w.k, w.n, (1, 1), in_dtype=in_dtype, out_dtype=w.out_dtype, **parts)


def epilogue_inputs(w: Gemm) -> tuple[TensorSpec, ...]:
    """Scale, bias, residual and residual_scale, those that there are; residual (m, n)."""
    if not has_epilogue(w):
        return ()
    found = (t for t in as_conv2d(w).inputs if t.name in EPILOGUE)
    return tuple(TensorSpec(t.name, (w.m, w.n), t.dtype) if t.name == "residual" else t for t in found)


def integer_inputs(w: Gemm, seed: int, device: str) -> list[torch.Tensor]:
    """Inputs of a product of integers with an epilogue: of 8-bit results, some are saturated."""
    made = as_conv2d(w).make_inputs(seed, device)
    return [t.reshape(spec.shape) for t, spec in zip(made, w.inputs, strict=True)]


def finished(w: Gemm, acc: torch.Tensor, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
    """Y in float64 from the (scaled) sums (m, n) in float64."""
    from kronsched.workloads.conv2d_reference import finished as after_sums

    return after_sums(as_conv2d(w), acc, dict(zip((t.name for t in w.inputs), inputs, strict=True)))


def flattened(w: Gemm, args: Sequence[Any], named: Mapping[str, Any]) -> list[Any]:
    """The flat list of inputs from those given by position and, after them, by keyword.

    scale and residual_scale may be numbers, and are 1 when left out. Raises ArgumentError for a keyword that w does not take.
    """
    flat, named = list(args), dict(named)
    optional = {t.name for t in epilogue_inputs(w)}
    missing = w.inputs[len(flat) :] if named or optional else ()
    for spec in missing:
        value = named.pop(spec.name, None)
        may_be_one = spec.name in optional and spec.name.endswith("scale")
        if value is None and not may_be_one:
            raise ArgumentError(f"{spec.name} is missing: {w.label} needs {spec.name}=…")
        if may_be_one and (value is None or isinstance(value, int | float)):
            value = filled(spec, 1.0 if value is None else value, flat[0])
        flat.append(value)
    for name in named:
        if name in {t.name for t in w.inputs}:
            raise ArgumentError(f"{name} was given twice: by position and by name")
        meant = f"make the workload with {_MEANT[name]}" if name in _MEANT else f"{w.label} takes no such argument"
        raise ArgumentError(f"{name} was given: {meant}")
    return flat
