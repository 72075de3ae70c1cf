"""What kronsched knows about each element type, written down once: size, accumulator, tolerance."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kronsched.errors import choose

if TYPE_CHECKING:
    import numpy as np
    import torch


_PARTS = {"complex64": "float32", "complex128": "float64"}


@dataclass(frozen=True)
class DType:
    """One element type.

    name: the public name, the same in torch, numpy (with ml_dtypes) and TVM. TVM has no complex dtypes: a program has `part`
        with a last dimension of 2 in their place.
    bits: storage bits of one element.
    accumulate: dtype in which sums are kept. Never below float32 for floating types.
    tolerance: largest accepted `max_relative_error` (see `kronsched.measure.check`), times `Workload.slack`, of a result in
        this dtype against a float64 reference computed from the same (already rounded) inputs. It
        leaves room for one rounding to storage per shared-memory exchange of a fused chain.
    """

    name: str
    bits: int
    accumulate: str
    tolerance: float

    @property
    def part(self) -> str:
        """The dtype of the real and the imaginary part of a complex dtype; the name itself of any other."""
        return _PARTS.get(self.name, self.name)

    @property
    def is_complex(self) -> bool:
        """Whether an element is a (real, imaginary) pair."""
        return self.name in _PARTS

    @property
    def itemsize(self) -> int:
        """Bytes of one element (1 for sub-byte types, which are handled packed)."""
        return max(1, self.bits // 8)

    def torch(self) -> torch.dtype:
        """The torch dtype. Imports torch."""
        import torch

        dtype: torch.dtype = getattr(torch, self.name)
        return dtype

    def numpy(self) -> np.dtype[Any]:
        """The numpy dtype; bfloat16 and float8 come from ml_dtypes."""
        import numpy as np

        if self.name in ("bfloat16", "float8_e4m3fn", "float8_e5m2"):
            import ml_dtypes

            extended: np.dtype[Any] = np.dtype(getattr(ml_dtypes, self.name))
            return extended
        return np.dtype(self.name)


DTYPES: dict[str, DType] = {
    d.name: d
    for d in (
        DType("float64", 64, "float64", 1e-11),
        DType("float32", 32, "float32", 3e-5),
        DType("complex128", 128, "complex128", 1e-11),
        DType("complex64", 64, "complex64", 3e-5),
        DType("float16", 16, "float32", 8e-3),
        DType("bfloat16", 16, "float32", 6e-2),
        DType("float8_e4m3fn", 8, "float32", 0.25),
        DType("float8_e5m2", 8, "float32", 0.5),
        DType("int8", 8, "int32", 0.0),
        DType("int4", 4, "int32", 0.0),
        DType("uint4", 4, "int32", 0.0),
        DType("int32", 32, "int32", 0.0),
    )
}


def dtype_of(name: object, field: str = "dtype", allowed: tuple[str, ...] | None = None) -> DType:
    """Look up a dtype by its public name; `ArgumentError` names `field` and what is allowed."""
    names = allowed if allowed is not None else tuple(DTYPES)
    if not isinstance(name, str) or name not in names:
        raise choose(field, name, names)
    return DTYPES[name]
