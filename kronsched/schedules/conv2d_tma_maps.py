"""Tensor maps of Conv2d by TMA: what a copy brings of x and w, and takes to y.

Read first: `x_map`; runtime/tensor_map.py for what maps are.
"""

from __future__ import annotations

from typing import Any

from kronsched.schedules.conv2d_gather import do
from kronsched.schedules.conv2d_tma_plan import PANEL_ROWS, TmaPlan

SWIZZLE = {32: 1, 64: 2, 128: 3}
"""Tensor maps' numbers of swizzles, by bytes."""


def x_map(plan: TmaPlan, x: Any) -> Any:
    """A box: what a tap of the kernel sees of a chunk's channels, for all pixels of a tile."""
    from kronsched.runtime.tensor_map import ENCODE, ENCODE_IM2COL

    conv, item, elements, pixels = plan.conv, plan.item, plan.width // plan.item, plan.block_m
    if plan.pointwise:
        return tensor_map(ENCODE, "x", conv.in_dtype, x, 2, conv.c_in, conv.pixels, conv.c_in * item, elements, pixels, 1, 1,
                    0, SWIZZLE[plan.width], 2, 0)  # fmt: skip
    (ph, pw), (kh, kw), (dh, dw), (sh, sw) = conv.padding, conv.kernel, conv.dilation, conv.stride
    extents, row = (conv.c_in, conv.w, conv.h, conv.n), conv.c_in * item
    strides = (row, row * conv.w, row * conv.w * conv.h)
    if plan.fold and not plan.pairs:
        strides = plan.fold.strides
    window = (-pw, -ph, pw - (kw - 1) * dw, ph - (kh - 1) * dh)
    return tensor_map(ENCODE_IM2COL, "x", conv.in_dtype, x, 4, *extents, *strides, *window, elements, pixels, 1, sw, sh, 1,
                0, SWIZZLE[plan.width], 2, 0)  # fmt: skip


def w_map(plan: TmaPlan, w: Any) -> Any:
    """A box: a chunk of block_n rows of B, in the order of channels that `conv2d_tma_store` wants.

    Row 16·i + 8·t + 2·q + e is channel 16·i + 4·q + 2·t + e where a thread holds 4 channels side by side (group = 2).
    """
    from kronsched.runtime.tensor_map import ENCODE

    conv, elements, group = plan.conv, plan.width // plan.item, plan.group
    depth = conv.depth * plan.item
    extents = (conv.depth, 2, 4, group, conv.c_out // (8 * group))
    strides = (depth, 2 * group * depth, 2 * depth, 8 * group * depth)
    box = (elements, 2, 4, group, plan.block_n // (8 * group))
    return tensor_map(ENCODE, "w", conv.in_dtype, w, 5, *extents, *strides, *box, 1, 1, 1, 1, 1, 0, SWIZZLE[plan.width], 2, 0)


def y_map(plan: TmaPlan, y: Any) -> Any:
    """A box: a staging panel."""
    from kronsched.runtime.tensor_map import ENCODE

    conv, columns = plan.conv, plan.panel_columns
    swizzle = SWIZZLE[columns * plan.out_item]
    return tensor_map(ENCODE, "y", conv.out_dtype, y, 2, conv.c_out, conv.pixels, conv.c_out * plan.out_item, columns, PANEL_ROWS,
                1, 1, 0, swizzle, 0, 0)  # fmt: skip


def tensor_map(call: str, name: str, dtype: str, tensor: Any, rank: int, *numbers: int) -> Any:
    """A tensor map, encoded on the host side; see runtime/tensor_map.py."""
    from tvm.script import tirx as T
    from tvm.script.ir_builder import IRBuilder
    from tvm.tirx.script.builder import ir as I

    handle = IRBuilder.name(f"{name}_map", I.Bind(T.tvm_stack_alloca("tensormap", 1), var=T.handle("tensormap")))
    do(T.call_packed(call, handle, dtype, rank, tensor.data, *numbers))
    return handle
