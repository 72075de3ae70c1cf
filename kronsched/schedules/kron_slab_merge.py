"""The kernel that makes explicit Kronecker products of adjacent small factors, P x P each: 8x8 ⊗ 8x8 is a factor of 64x64.

Products are float32 and are rounded to storage.

Read first: `merge_kernel`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kronsched.schedules.kron_mma_kernel import evaluate

_THREADS = 256


def merge_kernel(groups: Sequence[Sequence[tuple[int, int]]], p: int, dtype: str, name: str) -> Any:
    """The PrimFunc. groups: (axis, size) of the factors of each product. Parameters f<axis> …, g0, g1, … Blocks make 16 rows."""
    from tvm.script import tirx as T
    from tvm.script.ir_builder import IRBuilder
    from tvm.tirx.script.builder import ir as I

    blocks = p // 16
    with IRBuilder() as builder:
        with I.prim_func():
            I.func_name(name)
            factors = {axis: I.arg(f"f{axis}", I.buffer((size * size,), dtype)) for group in groups for axis, size in group}
            products = [I.arg(f"g{i}", I.buffer((p * p,), dtype)) for i in range(len(groups))]
            I.device_entry()
            cta = IRBuilder.name("cta", I.cta_id([len(groups) * blocks]))
            tx = IRBuilder.name("tx", I.thread_id([_THREADS]))
            evaluate(T.ptx.griddepcontrol.wait())  # until here, this launch overlaps the one before it
            evaluate(T.ptx.griddepcontrol.launch_dependents())
            for i, group in enumerate(groups):
                with I.If(cta // blocks == i), I.Then(), I.serial(0, 16 * p // _THREADS) as v:
                    at = IRBuilder.name("at", I.Bind(cta % blocks * (16 * p) + v * _THREADS + tx))
                    I.buffer_store(products[i], T.cast(_element(group, factors, at // p, at % p), dtype), [at])
        return builder.get()


def _element(group: Sequence[tuple[int, int]], factors: dict[int, Any], row: Any, column: Any) -> Any:
    """The product of one element of each factor, in float32."""
    from tvm.script import tirx as T

    product: Any = None
    for axis, size in reversed(group):
        value = T.cast(factors[axis][row % size * size + column % size], "float32")
        product = value if product is None else product * value
        row, column = row // size, column // size
    return product
