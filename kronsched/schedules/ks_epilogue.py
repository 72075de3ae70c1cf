"""The epilogue of Kronecker-sparse tensor-core kernels: y = act(sum + bias) + residual in float32, then packed words (TIRx).

gelu(x) = max(x, 0) − |x|·Φ(−|x|), and log2 Φ(−u) is so smooth that a polynomial of u ≤ 6 gives Φ by one ex2. Against
x·Φ(x) in float64 that is off by at most 6e-7 (degree 6, for 16-bit results) or 3e-7 (degree 8, float32).

The residual of a tile is asked for when the first samples of the tile are: it comes to L2 while the products are made.

Read first: `word_maker`, `prefetch`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import ceil
from typing import Any

from tvm.script import tirx as T

from kronsched.schedules.ks_mma_parts import PACK
from kronsched.workloads.ks_epilogue import Epilogue

FARTHEST = 6.0
LOG2_TAIL = {
    2: (-1.0000286102294922, -1.150932788848877, -0.4594050943851471, -0.05277564376592636, 0.007785486988723278,
        -0.0007088534766808152, 2.8920016120537184e-05),
    4: (-0.9999927878379822, -1.1512037515640259, -0.4587722718715668, -0.053385812789201736, 0.008026492781937122,
        -0.0007221978157758713, 1.3450409824145027e-05, 3.799070100285462e-06, -2.6201601599495916e-07),
}  # fmt: skip
"""Coefficients of log2 Φ(−u) on 0 ≤ u ≤ FARTHEST, by bytes of the result, lowest power first."""
LOG2E = 1.4426950408889634
SECTOR = 32
"""Bytes that a prefetch brings."""
HELD = 32
"""Words of the residual that a thread of a batch-last kernel loads at a time, about."""
SCRATCH = 4
"""float32 registers that `word_maker`'s function works in."""


def half_of(word: Any, half: Any, dtype: str) -> Any:
    """A half (0 or 1) of a 32-bit word of two 16-bit floats, or the one float32 that the word is, as float32."""
    if dtype == "float32":
        return T.reinterpret("float32", word)
    if dtype == "bfloat16":
        return T.reinterpret("float32", (word >> T.uint32(16 * half)) << T.uint32(16))
    return T.Cast("float32", T.reinterpret(dtype, T.Cast("uint16", word >> T.uint32(16 * half))))


def log2_tail(u: Any, item: int) -> Any:
    """The polynomial of `LOG2_TAIL`."""
    *rest, value = (T.float32(c) for c in LOG2_TAIL[item])
    for coefficient in reversed(rest):
        value = value * u + coefficient
    return value


def word_maker(epilogue: Epilogue, dtype: str) -> Any:
    """What emits the code of a word of y: a function of its place (out, at), `SCRATCH` floats f, sums, bias and residual.

    Of 16-bit results a word holds two; of float32 the first of each pair counts. Parts the epilogue has not are not looked at.
    """
    from tvm.tirx.script.builder import ir as I

    count, item = (1, 4) if dtype == "float32" else (2, 2)

    def activate(f: Any, e: int) -> None:
        value = f[e]
        if epilogue.activation == "relu":
            I.buffer_store(f, T.Select(value < T.float32(0), T.float32(0), value), [e])  # not max, which drops NaN
        elif epilogue.activation == "gelu":
            u = T.min(T.abs(value), T.float32(FARTHEST))
            I.evaluate(T.ptx["ex2.approx.ftz.f32"](f[2 + e], log2_tail(u, item)))
            I.buffer_store(f, T.float32(0.5) * (value + T.abs(value)) - u * f[2 + e], [e])
        elif epilogue.activation == "silu":
            I.evaluate(T.ptx["ex2.approx.ftz.f32"](f[2 + e], value * T.float32(-LOG2E)))
            I.evaluate(T.ptx["rcp.approx.ftz.f32"](f[2 + e], f[2 + e] + T.float32(1)))
            I.buffer_store(f, value * f[2 + e], [e])

    def make(out: Any, at: Any, f: Any, sums: Sequence[Any], bias: Sequence[Any], residual: Any) -> None:
        for e in range(count):
            I.buffer_store(f, sums[e] + bias[e] if epilogue.bias else sums[e], [e])
            activate(f, e)
            if epilogue.residual:
                I.buffer_store(f, f[e] + half_of(residual, e, dtype), [e])
        if dtype == "float32":
            I.buffer_store(out, T.reinterpret("uint32", f[0]), [at])
        else:
            I.evaluate(T.ptx[PACK[dtype]](out[at], f[1], f[0]))

    return make


def prefetch(
    residual: Any, threads: int, me: Any, runs: int, run: int, item: int, place: Callable[[Any, Any], tuple[Any, Any]]
) -> None:
    """Emit the prefetches of `runs` runs of `run` elements by so many threads. place(run, element) is (index, whether inside)."""
    from tvm.script.ir_builder import IRBuilder
    from tvm.tirx.script.builder import ir as I

    pieces = ceil(run * item / SECTOR)
    with I.unroll(0, ceil(runs * pieces / threads)) as e:
        piece = IRBuilder.name("piece", I.Bind(e * threads + me))
        index, fine = place(piece // pieces, piece % pieces * (SECTOR // item))
        with I.If(T.And(piece < runs * pieces, fine)), I.Then():
            I.evaluate(T.ptx["prefetch.global.L2"](residual.ptr_to([index])))
