"""The correctness gate: how far a result is from its reference, and whether that is accepted.

Read first: `max_relative_error` (the number in every tuning record) and `gate` (the verdict).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kronsched.dtypes import DTYPES

if TYPE_CHECKING:
    import torch

CHUNK = {"cpu": 1 << 18, "cuda": 1 << 24}
"""Elements compared at a time: about three float64 temporaries of this many elements are alive at once."""
NEAR_OVERFLOW = 0.99
"""A finite reference beyond this share of the dtype's largest value may round to infinity in the result."""


def rms(ref: torch.Tensor) -> float:
    """Root mean square of the finite elements (of complex numbers, of their parts) of `ref`; 0.0 when there are none."""
    import torch

    flat = as_real(ref).reshape(-1)
    if flat.numel() == 0:
        return 0.0
    wide = flat if flat.dtype in (torch.float32, torch.float64) else flat.double()
    norm = float(torch.linalg.vector_norm(wide, dtype=torch.float64))
    if math.isfinite(norm):
        return norm / math.sqrt(flat.numel())
    finite = flat[torch.isfinite(flat)].double()  # rare: special values, or squares that overflow
    if finite.numel() == 0:
        return 0.0
    scale = float(finite.abs().max()) or 1.0
    return scale * float((finite / scale).square().mean().sqrt())


def max_relative_error(y: torch.Tensor, ref: torch.Tensor, ref_rms: float | None = None) -> float:
    """The largest |y − ref| / (|ref| + rms(ref)) over all elements, in float64 on the tensors' device.

    The rms keeps elements that cancel to nearly 0 from counting as wrong. So does, for results near the smallest number of `y`'s
    dtype, `floor(y)` added to it: a chain of float16 products may underflow to 0. NaN and ±Inf must stand in the same places
    in both, else the error is inf; an infinite `y` is accepted where the reference is within 1% of the largest value of
    `y`'s dtype or beyond it, since it may round to infinity there. Integers are exact: 0.0 only when all elements are equal.

    The real and the imaginary part of complex numbers are elements of their own.

    y, ref: same shape, same device; `ref` is usually float64 or complex128.  ref_rms: `rms(ref)` when already known.
    """
    y, ref = as_real(y), as_real(ref)
    return _worst(y, ref, (rms(ref) if ref_rms is None else ref_rms) + floor(y))[0]


def as_real(tensor: torch.Tensor) -> torch.Tensor:
    """A complex tensor with its (real, imaginary) parts as one more dimension; any other as it is."""
    import torch

    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def floor(y: torch.Tensor) -> float:
    """The smallest positive number of y's dtype over the dtype's tolerance; 0.0 for integers."""
    import torch

    dtype = DTYPES.get(str(y.dtype).removeprefix("torch."))
    if dtype is None or not y.dtype.is_floating_point or not dtype.tolerance:
        return 0.0
    return float(torch.finfo(y.dtype).smallest_normal * torch.finfo(y.dtype).eps) / dtype.tolerance


@dataclass(frozen=True)
class Verdict:
    """error: the `max_relative_error`.  message: None when accepted, else one line saying what is wrong and where."""

    error: float
    message: str | None


def gate(y: torch.Tensor, ref: torch.Tensor, dtype: str, ref_rms: float | None = None, slack: float = 1.0) -> Verdict:
    """Accept or reject a result against `DTYPES[dtype].tolerance` times the workload's `slack`. Shapes must be equal."""
    tolerance, y, ref = slack * DTYPES[dtype].tolerance, as_real(y), as_real(ref)
    error, at = _worst(y, ref, (rms(ref) if ref_rms is None else ref_rms) + floor(y))
    if error <= tolerance:
        return Verdict(error, None)
    index = _unravel(at, tuple(y.shape))
    got, want = float(y.reshape(-1)[at]), float(ref.reshape(-1)[at])
    return Verdict(error, f"max relative error {error:.3g} > {tolerance:g} at {index}: got {got:.8g}, expected {want:.8g}")


def _worst(y: torch.Tensor, ref: torch.Tensor, ref_rms: float) -> tuple[float, int]:
    """(largest error, flat index of it). One device synchronisation unless there are special values."""
    import torch

    if y.shape != ref.shape:
        raise ValueError(f"y has shape {tuple(y.shape)}, ref has shape {tuple(ref.shape)}")
    flat_y, flat_ref, step = y.reshape(-1), ref.reshape(-1), CHUNK.get(y.device.type, CHUNK["cpu"])
    if flat_y.numel() == 0:
        return 0.0, 0
    starts, errors, places = range(0, flat_y.numel(), step), [], []
    for start in starts:
        want = flat_ref[start : start + step].double()
        error = flat_y[start : start + step].to(torch.float64, copy=True).sub_(want).abs_()
        worst, place = error.div_(want.abs().add_(ref_rms)).max(dim=0)
        errors.append(worst)
        places.append(place)
    found = list(zip(torch.stack(errors).tolist(), torch.stack(places).tolist(), strict=True))
    for i, start in enumerate(starts):
        if not math.isfinite(found[i][0]):  # NaN, Inf or 0/0 in this chunk: look closely
            found[i] = _worst_special(flat_y[start : start + step], flat_ref[start : start + step], ref_rms)
    chunk = max(range(len(found)), key=lambda i: found[i][0])
    return found[chunk][0], found[chunk][1] + starts[chunk]


def _worst_special(y: torch.Tensor, ref: torch.Tensor, ref_rms: float) -> tuple[float, int]:
    """As `_worst`, of flat tensors, with the rules for special values."""
    import torch

    a, b = y.double(), ref.double()
    same = (a == b) | (torch.isnan(a) & torch.isnan(b))
    if y.dtype.is_floating_point:
        limit = NEAR_OVERFLOW * torch.finfo(y.dtype).max
        same |= torch.isinf(a) & (b.abs() >= limit) & (torch.signbit(a) == torch.signbit(b))
    special = ~(torch.isfinite(a) & torch.isfinite(b))
    error = torch.where(special, torch.inf, (a - b).abs() / (b.abs() + ref_rms))
    worst, place = torch.where(same, 0.0, error).max(dim=0)
    return float(worst), int(place)


def _unravel(flat: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    index = []
    for extent in reversed(shape):
        flat, digit = divmod(flat, extent)
        index.append(digit)
    return tuple(reversed(index))
