"""Copies x and w of a dense Gemm to rows of whole 16 bytes, zero beyond k: TMA reads no others.

pad: x (m, k), w (n, k) -> x_padded (m, k'), w_padded (n, k')      one launch, a thread for each 16 bytes written
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kronsched.dtypes import DTYPES
from kronsched.workloads.base import TensorSpec
from kronsched.workloads.gemm import Gemm
from kronsched.workloads.gemm_dense import dense_inputs

PADDED = {"x": "x_padded", "w": "w_padded"}
"""Names of the copies."""
_THREADS = 256


def padded_inputs(w: Gemm) -> tuple[TensorSpec, ...]:
    """The copies, for the workload with the larger k."""
    return tuple(replace(t, name=PADDED[t.name]) for t in dense_inputs(w)[:2])


def pad_kernel(w: Gemm, k: int, name: str) -> Any:
    """The PrimFunc over x, w, x_padded and w_padded, all as unsigned integers; k: elements of a padded row."""
    from tvm.script import tirx as T
    from tvm.script.ir_builder import IRBuilder
    from tvm.tirx.script.builder import ir as I

    item = DTYPES[w.a_dtype].itemsize
    dtype, chunks = f"uint{8 * item}", k * item // 16
    with IRBuilder() as builder:
        with I.prim_func():
            I.func_name(name)
            sources = [I.arg(n, I.buffer((rows, w.k), dtype)) for n, rows in (("x", w.m), ("w", w.n))]
            copies = [I.arg(PADDED[n], I.buffer((rows, k), dtype)) for n, rows in (("x", w.m), ("w", w.n))]
            I.device_entry()
            cta = IRBuilder.name("cta", I.cta_id([-(-(w.m + w.n) * chunks // _THREADS)]))
            tx = IRBuilder.name("tx", I.thread_id([_THREADS]))
            I.evaluate(T.ptx.griddepcontrol.wait())
            I.evaluate(T.ptx.griddepcontrol.launch_dependents())
            at = IRBuilder.name("at", I.Bind(cta * _THREADS + tx))
            row, first = IRBuilder.name("row", I.Bind(at // chunks)), IRBuilder.name("first", I.Bind(at % chunks * (16 // item)))
            with I.If(row < w.m):
                with I.Then():
                    _copy(sources[0], copies[0], row, first, w.k, item)
                with I.Else(), I.If(row < w.m + w.n), I.Then():
                    _copy(sources[1], copies[1], row - w.m, first, w.k, item)
        return builder.get()


def _copy(source: Any, to: Any, row: Any, first: Any, k: int, item: int) -> None:
    """16 bytes of a row, from element `first` on."""
    from tvm.script import tirx as T
    from tvm.tirx.script.builder import ir as I

    def element(i: int) -> Any:
        value = T.if_then_else(first + i < k, source[row, T.min(first + i, k - 1)], T.Cast(str(source.dtype), 0))
        return T.Cast("uint32", value) << T.uint32(8 * item * (i % (4 // item)))

    words = []
    for word in range(4):
        parts = [element(word * (4 // item) + i) for i in range(4 // item)]
        value = parts[0]
        for part in parts[1:]:
            value = value | part
        words.append(value)
    I.evaluate(T.ptx["st.global.v4.b32"](to.ptr_to([row, first]), *words))
