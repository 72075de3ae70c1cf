"""Kronecker-sparse products of complex numbers in TensorIR, which has no complex dtype: a tensor gets a last dimension of 2.

    y[…, 0] = Σ x[…, 0] · w[…, 0] − x[…, 1] · w[…, 1]        y[…, 1] = Σ x[…, 1] · w[…, 0] + x[…, 0] · w[…, 1]

That is how torch and numpy store complex numbers, so nothing is copied: a kernel gets the address of the tensor.

Read first: `product_terms`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kronsched.dtypes import DTYPES

if TYPE_CHECKING:
    import tvm

    from kronsched.workloads.ks import KSMatmul, Pattern

Part = Callable[[Any], Any]
"""Of a complex number, the real (0) or the imaginary (1) part as a TVM expression."""


def product_terms(x: Part, w: Part, part: Any) -> tuple[Any, Any]:
    """The two products of real numbers whose sum is a part of x · w."""
    from tvm.script import tirx as T

    return x(part) * w(0), x(1 - part) * T.Select(part == 0, -w(1), w(1))


def complex_program(workload: KSMatmul) -> tvm.IRModule:
    """As `KSMatmul.program`, of a complex dtype."""
    import tvm
    from tvm import te

    dtype, first = DTYPES[workload.dtype].part, workload.batch_first
    tensors = [te.placeholder((*spec.shape, 2), name=spec.name, dtype=dtype) for spec in workload.inputs]
    current, weights, bias, residual = workload.parts(tensors)
    for i, (pattern, w) in enumerate(zip(workload.patterns, weights, strict=True)):
        last = i == len(weights) - 1 and not workload.epilogue
        current = _factor(current, w, pattern, first, "y" if last else f"t{i}")
    if workload.epilogue:
        total = current

        def end(p: Any, q: Any, part: Any) -> Any:
            value = total[p, q, part]
            if bias is not None:
                value = value + bias[q if first else p, part]
            return value if residual is None else value + residual[p, q, part]

        current = te.compute((*workload.output.shape, 2), end, name="y")
    func = te.create_prim_func([*tensors, current]).with_attr("global_symbol", "main")
    return tvm.IRModule({"main": func})


def _factor(t: Any, w: Any, pattern: Pattern, batch_first: bool, name: str) -> Any:
    """te.compute of one factor on a tensor (…, …, 2)."""
    from tvm import te

    a, b, c, d = pattern
    k = te.reduce_axis((0, c), name=f"k_{name}")

    def body(p: Any, q: Any, part: Any) -> Any:
        n, f = (p, q) if batch_first else (q, p)
        i, j, inner = f // (b * d), f // d % b, f % d
        source = (i * c + k) * d + inner

        def x(which: Any) -> Any:
            return t[n, source, which] if batch_first else t[source, n, which]

        one, other = product_terms(x, lambda which: w[i, j, k, inner, which], part)
        return te.sum(one + other, axis=k)

    shape = (t.shape[0], a * b * d, 2) if batch_first else (a * b * d, t.shape[1], 2)
    return te.compute(shape, body, name=name)
