"""The layout NHWCnc of images: (n / 8, h, w, c / b, 8, b) with 32 bytes of b channels, as blocks that lie together in memory.

Read first: `to_blocks`, `from_blocks`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kronsched.errors import ArgumentError
from kronsched.workloads.conv2d import CHANNEL_BYTES, IMAGES

if TYPE_CHECKING:
    import torch


def to_blocks(image: torch.Tensor, block: int | None = None) -> torch.Tensor:
    """(n, h, w, c) -> (n / 8, h, w, c / b, 8, b), contiguous. block: b, None for 32 bytes.

    Raises ArgumentError for n or c that are not whole blocks.
    """
    n, h, w, c = image.shape
    block = block or CHANNEL_BYTES // image.element_size()
    if n % IMAGES or c % block:
        raise ArgumentError(f"image has n={n}, c={c}: multiples of {IMAGES} and {block} are needed")
    parts = image.reshape(n // IMAGES, IMAGES, h, w, c // block, block)
    return parts.permute(0, 2, 3, 4, 1, 5).contiguous()


def from_blocks(blocks: torch.Tensor) -> torch.Tensor:
    """The inverse of `to_blocks`."""
    n, h, w, c, images, block = blocks.shape
    return blocks.permute(0, 4, 1, 2, 3, 5).reshape(n * images, h, w, c * block)
