"""The launch that puts Kronecker-sparse weights (a, b, c, d) into the order in which tensor-core kernels read them (TIRx).

One element a thread. On sm_90 it lets the kernel behind it start at once: that one loads its first samples meanwhile, and waits
(`griddepcontrol.wait`) before it touches a weight.

Read first: `pack_kernel`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil, prod
from typing import Any

from kronsched.workloads.ks import Pattern

_THREADS = 256
_HALF_TF32 = 0x1000  # half a unit in the last place of TF32, in the bits of a float32


@dataclass(frozen=True)
class Packing:
    """The order of packed weights.

    at: flat index of the packed weights -> (i, j, k, l).  reach: extents of j, k and l; beyond the pattern's the copy is zero.
    low: None, or flat index -> whether the element is the low TF32 part of the weight, not the high one.
    """

    at: Callable[[Any], tuple[Any, Any, Any, Any]]
    reach: tuple[int, int, int]
    low: Callable[[Any], Any] | None = None


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

    with IRBuilder() as builder:
        with I.prim_func():
            I.func_name("pack")
            w = I.arg("w", I.buffer((prod(pattern),), dtype))
            packed = I.arg("packed", I.buffer((elements,), dtype))
            I.device_entry()
            cta = IRBuilder.name("cta", I.cta_id([ceil(elements / _THREADS)]))
            tx = IRBuilder.name("tx", I.thread_id([_THREADS]))
            if early and not follows:
                I.evaluate(T.ptx.griddepcontrol.wait())
            if early:
                I.evaluate(T.ptx.griddepcontrol.launch_dependents())
            index = IRBuilder.name("index", I.Bind(cta * _THREADS + tx))
            with I.If(index < elements), I.Then():
                I.buffer_store(packed, T.reinterpret(dtype, packed_bits(w, pattern, packing, index)), [index])
            if early and follows:
                I.evaluate(T.ptx.griddepcontrol.wait())
        return builder.get()


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
