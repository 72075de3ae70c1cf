"""`DynamicW4A16`: one module for products with 4-bit weights and any number of rows.

Read first: `DynamicW4A16`. The kernels behind it, which layers share, are in w4a16_kernels.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kronsched.errors import ArgumentError, ArgumentTypeError, UnsupportedError
from kronsched.hardware import resolve_target
from kronsched.nn import w4a16_kernels, w4a16_library
from kronsched.quant.packed_weight import PackedWeight
from kronsched.workloads.gemm import Gemm

if TYPE_CHECKING:
    from torch import Tensor

    from kronsched.nn.w4a16_kernels import W4A16Kernels
    from kronsched.nn.w4a16_library import Crossover
    from kronsched.runtime.module import TunedModule


class DynamicW4A16:
    """Y = X W for X of any number of rows, packed 4-bit weights of one shape and kind, one dtype and one device.

    n, k, a_dtype, group_size, zero_point, act_order: as in `kronsched.Gemm`.  device: "auto", "cpu", "cuda" or "cuda:N".

    A number of rows that was tuned gets its kernel; others that of the next power of two (see `plan`), with the config of the
    nearest tuned number of rows that fills as many tiles of 8. From `threshold` rows on, weights are dequantised and multiplied
    with torch's library: where a record says that this is faster (`compare_with_library` makes one). Kernels are built when they
    are first needed (`prepare` builds ahead), and shared with `W4A16Linear` and all of this process. Thread-safe. Not
    differentiable: see `W4A16Linear`.
    Raises what `Gemm` raises, and UnsupportedError for a device that is not there.
    """

    def __init__(
        self,
        n: int,
        k: int,
        a_dtype: str = "float16",
        *,
        group_size: int = 128,
        zero_point: str = "symmetric",
        act_order: bool = False,
        device: str = "auto",
    ) -> None:
        """Nothing is built yet; see the class."""
        self._one = Gemm(1, n, k, a_dtype, group_size=group_size, zero_point=zero_point, act_order=act_order)
        found = resolve_target(str(device))
        if not found.present:
            raise UnsupportedError(f"device={device!r} is not on this machine")
        self.device = f"cuda:{found.index}" if found.kind == "cuda" else "cpu"
        _ = self._kernels

    @classmethod
    def of(cls, pw: PackedWeight, a_dtype: str = "float16") -> DynamicW4A16:
        """The module for weights like these, on their device."""
        if not isinstance(pw, PackedWeight):
            raise ArgumentTypeError(f"pw is of type {type(pw).__name__}: a kronsched.quant.PackedWeight is needed")
        try:
            act_order = pw.order is None and pw.act_order
        except ArgumentError:  # a short group between others: the kernel gathers x
            act_order = True
        size, zeros = pw.group_size, pw.zero_point
        return cls(pw.n, pw.k, a_dtype, group_size=size, zero_point=zeros, act_order=act_order, device=str(pw.device))

    @property
    def modules(self) -> Mapping[int, TunedModule]:
        """The kernels built so far by their number of rows."""
        return dict(self._kernels.modules)

    @property
    def threshold(self) -> int | None:
        """From so many rows on the library multiplies; None for never."""
        return self._kernels.threshold

    def plan(self, m: int) -> list[tuple[int, int]]:
        """(first row, rows of the kernel) of each kernel call that m rows take; empty where the library multiplies."""
        return [] if self._kernels.uses_library(_rows(m)) else self._kernels.plan(m)

    def prepare(self, *rows: int) -> None:
        """Build and load what these numbers of rows need, such as before a CUDA graph is captured."""
        for m in rows:
            self._kernels.prepare(_rows(m))

    def compare_with_library(self, *rows: int, save: bool = True) -> Crossover:
        """Time kernels and library at these numbers of rows (`w4a16_library.ROWS` when none are given); use what is faster.

        save: store the record in the user's log folder, for this process and later ones. Takes seconds.
        """
        kernels = self._kernels
        tried = [_rows(m) for m in rows] or w4a16_library.ROWS
        found = w4a16_library.measure(self._one, resolve_target(self.device), kernels.by_kernels, kernels.library, tried)
        if save:
            w4a16_library.save(found)
        kernels.threshold = found.rows
        return found

    def __call__(self, x: Tensor, pw: PackedWeight) -> Tensor:
        """Y (m, n) of x (m, k), a torch tensor of `a_dtype` on this device, and weights of this kind."""
        import torch

        if not isinstance(pw, PackedWeight):
            raise ArgumentTypeError(f"pw is of type {type(pw).__name__}: a kronsched.quant.PackedWeight is needed")
        if not isinstance(x, torch.Tensor):
            raise ArgumentTypeError(f"x is of type {type(x).__name__}: a torch.Tensor is needed")
        if x.dim() != 2 or x.shape[1] != self._one.k:
            raise ArgumentError(f"x has shape {tuple(x.shape)}, (m, {self._one.k}) is needed")
        wanted = (f"torch.{self._one.a_dtype}", self.device)
        for name, given in (("x", (str(x.dtype), str(x.device))), ("pw", (wanted[0], str(pw.device)))):
            if given != wanted:
                raise ArgumentTypeError(f"{name} is {given[0]} on {given[1]}, {wanted[0]} on {wanted[1]} is needed")
        x, *weights = self._one.flatten_args((x, pw))
        if x.shape[0] == 0:
            return x.new_empty((0, self._one.n))
        return self._kernels(x, weights)

    def __repr__(self) -> str:
        label = self._one.label.replace("m=1 ", "")
        return f"<DynamicW4A16 {label} on {self.device}, built for m in {sorted(self.modules)}>"

    @property
    def _kernels(self) -> W4A16Kernels:
        return w4a16_kernels.kernels_for(self._one, self.device)


def _rows(m: Any) -> int:
    if isinstance(m, bool) or not isinstance(m, int):
        raise ArgumentTypeError(f"m={m!r} must be an int ≥ 1")
    if m < 1:
        raise ArgumentError(f"m={m} is not allowed: an int ≥ 1 is needed")
    return m
