"""The launches of a tensor-core Conv2d: the kernel, and before it a copy of x and w with more channels where it needs them.

Read first: `conv2d_launches`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kronsched.schedules.base import Launch, Scheduled
from kronsched.schedules.conv2d_tile import ConvTile
from kronsched.workloads.base import TensorSpec

THREADS = 256


def conv2d_launches(tile: ConvTile, kernel: Callable[[str, list[TensorSpec]], Any], overlap: bool = False) -> Scheduled:
    """One launch, or two where channels are padded first. kernel: makes the PrimFunc of a name over given tensors.

    overlap: the kernel waits for the launch before it by itself.
    """
    import tvm

    specs = [*tile.conv.inputs, tile.conv.output]
    funcs: dict[str, Any] = {}
    launches = []
    scratch = pad_scratch(tile) if tile.padded else ()
    if scratch:
        funcs["conv2d_pad"] = pad_program(tile, "conv2d_pad")
        launches.append(Launch("conv2d_pad", ("x", "w", *(t.name for t in scratch))))
        specs[:2] = scratch
    funcs["conv2d"] = kernel("conv2d", specs)
    launches.append(Launch("conv2d", tuple(t.name for t in specs), overlap))
    return Scheduled(tvm.IRModule(funcs), tuple(launches), tuple(scratch))


def pad_scratch(tile: ConvTile) -> tuple[TensorSpec, TensorSpec]:
    """The wider x and w."""
    conv = tile.conv
    return (
        TensorSpec("x_wide", (conv.n, conv.h, conv.w, tile.channels), conv.in_dtype),
        TensorSpec("w_wide", (conv.c_out, *conv.kernel, tile.channels), conv.in_dtype),
    )


def pad_program(tile: ConvTile, name: str) -> Any:
    """The PrimFunc over x, w, x_wide, w_wide; a thread writes one pixel's channels, or one tap's of w."""
    from tvm.script import tirx as T
    from tvm.script.ir_builder import IRBuilder
    from tvm.tirx.script.builder import ir as I

    conv, c, wide = tile.conv, tile.conv.c_in, tile.channels
    pixels, taps = conv.n * conv.h * conv.w, conv.c_out * conv.kernel[0] * conv.kernel[1]
    with IRBuilder() as builder:
        with I.prim_func():
            I.func_name(name)
            x, w = (I.arg(t.name, I.buffer((t.size,), t.dtype)) for t in conv.inputs[:2])
            x_wide, w_wide = (I.arg(t.name, I.buffer((t.size,), t.dtype)) for t in pad_scratch(tile))
            I.device_entry()
            block = IRBuilder.name("block", I.cta_id([-(-(pixels + taps) // THREADS)]))
            thread = IRBuilder.name("thread", I.thread_id([THREADS]))
            at = IRBuilder.name("at", I.Bind(block * THREADS + thread))
            with I.If(at < pixels), I.Then():
                _copy(x, x_wide, at, c, wide)
            tap = IRBuilder.name("tap", I.Bind(at - pixels))
            with I.If(T.And(tap >= 0, tap < taps)), I.Then():
                _copy(w, w_wide, tap, c, wide)
        return builder.get()


def _copy(source: Any, target: Any, row: Any, c: int, wide: int) -> None:
    from tvm import tirx
    from tvm.tirx.script.builder import ir as I

    with I.serial(0, c) as i:
        I.buffer_store(target, source[row * c + i], [row * wide + i])
    with I.serial(0, wide - c) as i:
        I.buffer_store(target, tirx.const(0, target.dtype), [row * wide + c + i])
