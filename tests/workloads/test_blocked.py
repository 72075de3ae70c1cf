"""The layout NHWCnc: where elements go, and what is refused."""

from __future__ import annotations

import pytest
import torch

from kronsched import Conv2d
from kronsched.errors import ArgumentError
from kronsched.workloads.blocked import from_blocks, to_blocks


@pytest.mark.parametrize("dtype", [torch.int8, torch.float16])
def test_blocks_hold_eight_images_of_32_bytes(dtype: torch.dtype) -> None:
    image = torch.arange(16 * 2 * 3 * 64).remainder(120).reshape(16, 2, 3, 64).to(dtype)
    blocks = to_blocks(image)
    width = 32 // image.element_size()
    assert blocks.shape == (2, 2, 3, 64 // width, 8, width)
    assert blocks[1, 0, 2, 1, 5, 3] == image[13, 0, 2, width + 3]
    assert torch.equal(from_blocks(blocks), image)


def test_images_that_are_no_whole_blocks_are_refused() -> None:
    with pytest.raises(ArgumentError, match="n=4, c=32"):
        to_blocks(torch.zeros(4, 1, 1, 32, dtype=torch.int8))


def test_the_usual_layout_leaves_keys_as_they_were() -> None:
    assert "layout" not in Conv2d(8, 5, 5, 32, 32, 3).to_dict()
    assert Conv2d.from_fields(Conv2d(8, 5, 5, 32, 32, 3, layout="NHWCnc").to_dict()).layout == "NHWCnc"  # type: ignore[attr-defined]
