"""Adds up the partial sums of a dense Gemm with split_k > 1, in order: y = round(Σ_s p[s] · x_scale · w_scale), or more."""

from __future__ import annotations

from typing import Any

from kronsched.dtypes import DTYPES
from kronsched.workloads.gemm import Gemm
from kronsched.workloads.gemm_dense import dense_inputs, rounded

_THREADS = 256


def sum_kernel(w: Gemm, parts: int, name: str) -> Any:
    """The PrimFunc over p (parts, m, n) in float32 or int32, the inputs after x and w, and y: one thread an element."""
    from tvm.script import tirx as T
    from tvm.script.ir_builder import IRBuilder
    from tvm.tirx.script.builder import ir as I

    wide = DTYPES[w.a_dtype].accumulate
    with IRBuilder() as builder:
        with I.prim_func():
            I.func_name(name)
            p = I.arg("p", I.buffer((parts, w.m, w.n), wide))
            tensors = {t.name: I.arg(t.name, I.buffer(t.shape, t.dtype)) for t in dense_inputs(w)[2:]}
            y = I.arg("y", I.buffer((w.m, w.n), w.out_dtype))
            I.device_entry()
            cta = IRBuilder.name("cta", I.cta_id([-(-w.m * w.n // _THREADS)]))
            tx = IRBuilder.name("tx", I.thread_id([_THREADS]))
            I.evaluate(T.ptx.griddepcontrol.wait())  # the launch overlaps the one that computes p
            at = IRBuilder.name("at", I.Bind(cta * _THREADS + tx))
            with I.If(at < w.m * w.n), I.Then():
                i, j = IRBuilder.name("i", I.Bind(at // w.n)), IRBuilder.name("j", I.Bind(at % w.n))
                value = p[0, i, j]
                for s in range(1, parts):
                    value = value + p[s, i, j]
                I.buffer_store(y, rounded(w, value, tensors, i, j), [i, j])
        return builder.get()
