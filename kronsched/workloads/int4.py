"""Tensors of 4-bit integers, as kronsched's convolutions and products take them: two values a byte of an int8 tensor.

Values 2i and 2i + 1 of the last axis are the lower and the upper half of byte i, in two's complement where they are signed.

Read first: `pack_int4`, `unpack_int4`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kronsched.errors import ArgumentError

if TYPE_CHECKING:
    import torch


def pack_int4(values: torch.Tensor) -> torch.Tensor:
    """Integers in [-8, 15], such as of an int8 or float tensor, with an even last extent -> int8, half as many.

    The same bits for int4 (-8..7) and uint4 (0..15); values outside lose their upper bits. ArgumentError for an odd extent.
    """
    import torch

    if values.shape[-1] % 2:
        raise ArgumentError(f"values has a last extent of {values.shape[-1]}: an even number is needed")
    halves = values.to(torch.int32).bitwise_and(15)
    return (halves[..., 0::2] | halves[..., 1::2] << 4).to(torch.uint8).view(torch.int8)


def unpack_int4(packed: torch.Tensor, signed: bool = True) -> torch.Tensor:
    """The inverse of `pack_int4`, as int8. signed: values -8..7, else 0..15."""
    import torch

    byte = packed.view(torch.uint8).to(torch.int32)
    halves = torch.stack([byte & 15, byte >> 4], dim=-1).flatten(-2)
    return ((halves ^ 8) - 8 if signed else halves).to(torch.int8)
