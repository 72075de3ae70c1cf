"""Adds up the partial sums of a weight gradient over the slices of the samples, always in the same order, and rounds (TIRx).

    partial sums (splits, elements) ── 8 groups of 32 threads, each a run of the slices ── shared memory ── dw (a, b, c, d)

Read first: `sum_kernel`.
"""

from __future__ import annotations

from collections.abc import Callable
from math import ceil, prod
from typing import Any

from kronsched.workloads.ks import Pattern

LANES, GROUPS, EACH = 32, 8, 4


def sum_kernel(
    pattern: Pattern, dtype: str, acc: str, splits: int, elements: int, place: Callable[[Any], tuple[Any, ...]], overlap: bool
) -> Any:
    """The PrimFunc over the flat partial sums p, in dtype `acc`, and dw.

    place: number of an element of a slice -> (i, j, k, l), beyond the pattern for padding.
    overlap: wait for p by griddepcontrol.
    """
    from tvm.script import tirx as T
    from tvm.script.ir_builder import IRBuilder
    from tvm.tirx.script.builder import ir as I

    named, bind = IRBuilder.name, I.Bind
    groups, run = min(GROUPS, splits), LANES * EACH
    a, b, c, d = pattern
    with IRBuilder() as builder:
        with I.prim_func():
            I.func_name("ks_wgrad_sum")
            p = I.arg("p", I.buffer((splits * elements,), acc))
            dw = I.arg("dw", I.buffer((prod(pattern),), dtype))
            I.device_entry()
            cta = named("cta", I.cta_id([ceil(elements / run)]))
            tx = named("tx", I.thread_id([LANES * groups]))
            sums = named("sums", I.alloc_local([EACH], acc))
            shared = named("shared", I.alloc_buffer((groups * run,), acc, scope="shared.dyn", align=128))
            if overlap:
                I.evaluate(T.ptx.griddepcontrol.wait())
            group, lane = named("group", bind(tx // LANES)), named("lane", bind(tx % LANES))
            begin = named("begin", bind(group * splits // groups))
            count = named("count", bind((group + 1) * splits // groups - begin))
            for z in range(EACH):
                I.buffer_store(sums, T.Cast(acc, 0), [z])
            with I.serial(0, count) as s:
                for z in range(EACH):
                    e = cta * run + z * LANES + lane
                    if elements % run:
                        e = T.min(e, elements - 1)
                    I.buffer_store(sums, sums[z] + p[(begin + s) * elements + e], [z])
            for z in range(EACH):
                I.buffer_store(shared, sums[z], [group * run + z * LANES + lane])
            I.evaluate(T.cuda.cta_sync())
            with I.serial(0, ceil(run / (LANES * groups))) as turn:
                near = named("near", bind(turn * (LANES * groups) + tx))
                e = named("e", bind(cta * run + near))
                i, j, k, m = (named(n, bind(v)) for n, v in zip("ijkl", place(e), strict=True))
                fine = T.And(T.And(T.And(i < a, j < b), T.And(k < c, m < d)), T.And(near < run, e < elements))
                with I.If(fine), I.Then():
                    total = shared[near]
                    for other in range(1, groups):
                        total = total + shared[other * run + near]
                    I.buffer_store(dw, T.Cast(dtype, total), [((i * b + j) * c + k) * d + m])
        return builder.get()
