"""The launch that puts Kronecker-sparse weights (a, b, c, d) into the order in which tensor-core kernels read them (TIRx).

One element a thread, or 16 neighbouring ones of the order, where neighbouring threads take neighbouring l. On sm_90 it lets the
kernel behind it start at once: that one loads its first samples meanwhile, and waits (`griddepcontrol.wait`) before it touches a
weight.

Read first: `pack_kernel`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from math import ceil, prod
from typing import Any

from kronsched.dtypes import DTYPES
from kronsched.workloads.ks import Pattern

_THREADS = 256
_RUN = 16
"""16-bit elements of a thread: a whole sector of 32 bytes."""
_MANY = 1 << 18
"""Elements from which on runs are faster on an H200: fewer leave it to too few threads."""
_HALF_TF32 = 0x1000  # half a unit in the last place of TF32, in the bits of a float32


@dataclass(frozen=True)
class Packing:
    """The order of packed weights.

    at: flat index of the packed weights -> (i, j, k, l).  reach: extents of j, k and l; beyond the pattern's the copy is zero.
    low: None, or flat index -> whether the element is the low TF32 part of the weight, not the high one.
    slice: elements of each (i, l), one l after another, in an order in which 16 aligned elements always lie alike; 0 where this
    does not hold.
    """

    at: Callable[[Any], tuple[Any, Any, Any, Any]]
    reach: tuple[int, int, int]
    low: Callable[[Any], Any] | None = None
    slice: int = 0

    def in_runs(self, item: int, d: int, elements: int) -> bool:
        """Whether threads pack runs of the order: many 16-bit elements that lie apart, where the order allows it."""
        return item == 2 and d > 1 and elements >= _MANY and self.slice > 0 and self.slice % _RUN == 0 and self.low is None


def of_slices(packing: Packing, d: int) -> Packing:
    """The order for weights (a, b, c, d), from one for those of their slices, (a·d, b, c, 1)."""

    def at(index: Any) -> tuple[Any, Any, Any, Any]:
        i, j, k, _ = packing.at(index)
        return i // d, j, k, i % d

    return Packing(at, (*packing.reach[:2], d), packing.low)


def pack_kernel(pattern: Pattern, dtype: str, elements: int, packing: Packing, early: bool, follows: bool) -> Any:
    """The PrimFunc over the weights and their `elements` packed ones.

    early: let the next kernel start at once (sm_90); the first packing waits for all earlier kernels before it does.
    follows: not the first: it runs beside the packing before it, and ends after that one.
    """
    from tvm.script import tirx as T
    from tvm.script.ir_builder import IRBuilder
    from tvm.tirx.script.builder import ir as I

    runs = packing.in_runs(DTYPES[dtype].itemsize, pattern[3], elements)
    count = elements // _RUN if runs else elements
    with IRBuilder() as builder:
        with I.prim_func():
            I.func_name("pack")
            w = I.arg("w", I.buffer((prod(pattern),), dtype))
            packed = I.arg("packed", I.buffer((elements,), dtype))
            I.device_entry()
            cta = IRBuilder.name("cta", I.cta_id([ceil(count / _THREADS)]))
            tx = IRBuilder.name("tx", I.thread_id([_THREADS]))
            words = IRBuilder.name("words", I.alloc_local([_RUN // 2], "uint32")) if runs else None
            if early and not follows:
                I.evaluate(T.ptx.griddepcontrol.wait())
            if early:
                I.evaluate(T.ptx.griddepcontrol.launch_dependents())
            index = IRBuilder.name("index", I.Bind(cta * _THREADS + tx))
            with I.If(index < count), I.Then():
                if runs:
                    _pack_run(w, packed, words, pattern, packing, index)
                else:
                    I.buffer_store(packed, T.reinterpret(dtype, packed_bits(w, pattern, packing, index)), [index])
            if early and follows:
                I.evaluate(T.ptx.griddepcontrol.wait())
        return builder.get()


def _pack_run(w: Any, packed: Any, words: Any, pattern: Pattern, packing: Packing, index: Any) -> None:
    """The run number `index`, in an order in which l is the fastest: the same run of all l of an i, then the next run."""
    from tvm.script import tirx as T
    from tvm.script.ir_builder import IRBuilder
    from tvm.tirx.script.builder import ir as I

    _, b, c, d = pattern
    runs, named = packing.slice // _RUN, IRBuilder.name
    m, run = named("m", I.Bind(index % d)), named("run", I.Bind(index // d % runs))
    i = named("i", I.Bind(index // (d * runs)))
    _, j, k, _ = packing.at(run * _RUN)
    j, k = named("j", I.Bind(j)), named("k", I.Bind(k))
    for word in range(_RUN // 2):
        halves = []
        for element in (2 * word, 2 * word + 1):
            _, more_j, more_k, _ = packing.at(element)
            limits = (j + more_j, b, packing.reach[0]), (k + more_k, c, packing.reach[1])
            fine = [place < extent for place, extent, reach in limits if reach > extent]
            source = ((i * b + j + more_j) * c + k + more_k) * d + m
            inside = functools.reduce(T.And, fine) if fine else None
            value = named("value", I.Bind(w[source if inside is None else T.Select(inside, source, 0)]))
            bits = T.Cast("uint32", T.reinterpret("uint16", value))
            halves.append(bits if inside is None else T.Select(inside, bits, T.uint32(0)))
        I.buffer_store(words, halves[0] | (halves[1] << T.uint32(16)), [word])
    first = (i * d + m) * packing.slice + run * _RUN
    for piece in range(0, _RUN // 2, 4):
        I.evaluate(T.ptx["st.global.v4.b32"](packed.ptr_to([first + 2 * piece]), *(words[piece + z] for z in range(4))))


def packed_bits(w: Any, pattern: Pattern, packing: Packing, index: Any) -> Any:
    """The packed element at an index, as bits (w is flat). Nothing beyond the weights is read, whatever the compiler moves."""
    from tvm.script import tirx as T
    from tvm.script.ir_builder import IRBuilder
    from tvm.tirx.script.builder import ir as I

    _, b, c, d = pattern
    bits_of = {"float16": "uint16", "bfloat16": "uint16", "float32": "uint32"}[str(w.dtype)]
    i, j, k, m = packing.at(index)
    source, fine = ((i * b + j) * c + k) * d + m, None
    for position, extent, reach in zip((j, k, m), (b, c, d), packing.reach, strict=True):
        if reach > extent:
            fine = position < extent if fine is None else T.And(fine, position < extent)
    value = IRBuilder.name("value", I.Bind(w[source if fine is None else T.Select(fine, source, 0)]))
    bits = T.reinterpret(bits_of, value)
    if packing.low is not None:
        high = (bits + T.uint32(_HALF_TF32)) & T.uint32(0xFFFFE000)
        rest = T.reinterpret("uint32", value - T.reinterpret("float32", high)) + T.uint32(_HALF_TF32)
        bits = T.Select(packing.low(index), rest, high)
    return bits if fine is None else T.Select(fine, bits, T.Cast(bits_of, 0))
