"""Weights of a second factor that a block of ks_pair_wgmma_kernel.py puts in order itself, in panels that stay in shared memory.

A thread takes 8 neighbouring k of all l of an output j, d times 16 bytes of (i, j, k, l), and writes them as 16 bytes for each l.

Read first: `gather`.
"""

from __future__ import annotations

from typing import Any

from kronsched.schedules.gemm_dense_wgmma_mainloop import evaluate
from kronsched.schedules.ks_pair_wgmma_plan import ITEM, STEPS, WgmmaPairPlan

_EIGHT = 8
_BARRIER = 8
"""A named barrier that nothing else uses."""


def gather(p: WgmmaPairPlan, tx: Any, shared: Any, w: Any) -> None:
    """Emit the copy, by the consumers' threads; w is flat."""
    from tvm.script import tirx as T
    from tvm.script.ir_builder import IRBuilder
    from tvm.tirx.script.builder import ir as I

    (a, b, c, d), threads, name = p.second, 128 * p.groups, IRBuilder.name
    pieces = a * b * (c // _EIGHT)
    raw = name("raw", I.alloc_local([4 * d], "uint32"))
    words = name("ordered", I.alloc_local([4], "uint32"))
    with I.serial(0, -(-pieces // threads)) as e:
        piece = name("piece", I.Bind(e * threads + tx))
        with I.If(piece < pieces), I.Then():
            for n in range(d):
                source = w.ptr_to([piece * (_EIGHT * d) + n * _EIGHT])
                evaluate(T.ptx["ld.global.nc.v4.b32"](*(raw[4 * n + q] for q in range(4)), source))
            row, k = piece // (c // _EIGHT), piece % (c // _EIGHT)
            for l in range(d):  # noqa: E741 (the axis has that name everywhere)
                for q in range(4):
                    low, high = (_half(raw, (2 * q + h) * d + l) for h in range(2))
                    I.buffer_store(words, low | (high << T.uint32(16)), [q])
                to = shared.ptr_to([_place(p, row // b, row % b, k, l)])
                evaluate(T.ptx["st.shared.v4.b32"](to, *(words[q] for q in range(4))))
    evaluate(T.ptx.fence.proxy.async_.shared__cta())
    evaluate(T.ptx.bar.sync(T.uint32(_BARRIER), T.uint32(threads)))


def _half(raw: Any, element: int) -> Any:
    """A 16-bit element of some words, as a word."""
    from tvm.script import tirx as T

    word = raw[element // 2]
    return word >> T.uint32(16) if element % 2 else word & T.uint32(0xFFFF)


def _place(p: WgmmaPairPlan, i: Any, j: Any, eight: Any, l: int) -> Any:  # noqa: E741
    """The byte of 8 inputs k, number `eight`, of an output j."""
    slots, d = p.rings[1], p.second[3]
    panel = p.first_panels + ((i * p.j_blocks + j // p.block_j) * d + l) * p.second_chunks + eight // (STEPS // _EIGHT)
    row = j % p.block_j
    return slots.at + panel * slots.size + row * (STEPS * ITEM) + ((eight % (STEPS // _EIGHT) ^ row % 8) << 4)
