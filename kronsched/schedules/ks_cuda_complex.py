"""Kronecker-sparse matmul of complex numbers on CUDA cores: the tiles and primitives of ks_cuda_simt.py, both parts in one pass.

    thread (n, j, l):   rn × rj sums, each a real and an imaginary part, += x · w        4 multiply-adds a product

Buffers are of the real dtype with a last dimension of 2; see workloads/ks_complex.py. Neighbouring lanes read and write
neighbouring pairs.

Read first: `_program`.
"""

from __future__ import annotations

from math import ceil
from typing import TYPE_CHECKING, Any, ClassVar

from kronsched.dtypes import DTYPES
from kronsched.schedules.ks_cuda_simt import KSCudaSimt, TilePlan
from kronsched.schedules.ks_parts import without_unused
from kronsched.workloads.base import TensorSpec, Workload
from kronsched.workloads.ks import KSMatmul
from kronsched.workloads.ks_complex import product_terms
from kronsched.workloads.ks_epilogue import Epilogue

if TYPE_CHECKING:
    import tvm

    from kronsched.hardware import Device


class KSCudaComplex(KSCudaSimt):
    """SIMT schedule for KSMatmul of complex64 and complex128, both layouts."""

    name: ClassVar[str] = "ks_cuda_complex"

    def supports(self, workload: Workload, device: Device) -> str | None:
        """Complex dtypes."""
        assert isinstance(workload, KSMatmul)
        return None if DTYPES[workload.dtype].is_complex else f"{workload.dtype} is not served: complex dtypes are"

    def _program(
        self, plan: TilePlan, source: TensorSpec, weight: TensorSpec, target: TensorSpec, epilogue: Epilogue
    ) -> tvm.tirx.PrimFunc:
        """See `KSCudaSimt`."""
        return _program(plan, DTYPES[target.dtype].part, epilogue)


def _program(p: TilePlan, dtype: str, epilogue: Epilogue) -> Any:
    """The TensorIR of a launch. xs and ws: block-padded copies with zeros beyond the edges; s: sums by tile, register, thread."""
    from tvm.script import tirx as T

    a, b, c, d = p.pattern
    n, first = p.batch, p.batch_first
    tile_n, tile_j, tile_l = p.tile
    tiles_n, tiles_j, tiles_l, steps = ceil(n / tile_n), ceil(b / tile_j), ceil(d / tile_l), ceil(c / p.bk)
    size_n, size_j, size_l, size_k = tiles_n * tile_n, tiles_j * tile_j, tiles_l * tile_l, steps * p.bk
    x_shape, y_shape = ((n, a, c, d, 2), (n, a, b, d, 2)) if first else ((a, c, d, n, 2), (a, b, d, n, 2))
    xs_shape = (size_n, a, size_k, size_l, 2) if first else (a, size_k, size_l, size_n, 2)
    s_shape = (tiles_n, a, tiles_j, tiles_l, p.tn, p.tj, tile_l, p.rn, p.rj, 2)

    def at(tensor: Any, sample: Any, i: Any, j: Any, m: Any, part: Any) -> Any:
        return tensor[sample, i, j, m, part] if first else tensor[i, j, m, sample, part]

    def inside(*edges: tuple[Any, int, int]) -> Any:
        """Whether each index is below its extent, tested only where the padded size exceeds it."""
        test = T.bool(True)
        for index, extent, size in edges:
            test = T.And(test, index < extent) if size > extent else test
        return test

    def plus(total: Any, xs: Any, ws: Any, sample: Any, i: Any, k: Any, j: Any, m: Any, part: Any) -> Any:
        """A sum with a product added: term by term, as two fused multiply-adds."""
        one, other = product_terms(lambda q: at(xs, sample, i, k, m, q), lambda q: ws[i, k, j, m, q], part)
        return total + one + other

    def end(value: Any, bias: Any, residual: Any, *place: Any) -> Any:
        """A sum on its way to y: place (sample, i, j, l, part)."""
        value = value + bias[place[1:]] if epilogue.bias else value
        return value + at(residual, *place) if epilogue.residual else value

    @T.prim_func(s_tir=True)  # type: ignore[untyped-decorator]
    def main(
        x: T.Buffer(x_shape, dtype),  # type: ignore[valid-type]
        w: T.Buffer((a, b, c, d, 2), dtype),  # type: ignore[valid-type]
        y: T.Buffer(y_shape, dtype),  # type: ignore[valid-type]
        bias: T.Buffer((a, b, d, 2), dtype),  # type: ignore[valid-type]
        residual: T.Buffer(y_shape, dtype),  # type: ignore[valid-type]
    ) -> None:
        xs = T.sblock_alloc_buffer(xs_shape, dtype)
        ws = T.sblock_alloc_buffer((a, size_k, size_j, size_l, 2), dtype)
        s = T.sblock_alloc_buffer(s_shape, dtype)
        if first:
            for h, i, k, m, q in T.grid(*xs_shape):
                with T.sblock("xs"):
                    vn, vi, vk, vl, vq = T.axis.remap("SSSSS", [h, i, k, m, q])
                    xs[vn, vi, vk, vl, vq] = T.if_then_else(
                        inside((vn, n, size_n), (vk, c, size_k), (vl, d, size_l)), x[vn, vi, vk, vl, vq], T.Cast(dtype, 0)
                    )
        else:
            for i, k, m, h, q in T.grid(*xs_shape):
                with T.sblock("xs"):
                    vi, vk, vl, vn, vq = T.axis.remap("SSSSS", [i, k, m, h, q])
                    xs[vi, vk, vl, vn, vq] = T.if_then_else(
                        inside((vn, n, size_n), (vk, c, size_k), (vl, d, size_l)), x[vi, vk, vl, vn, vq], T.Cast(dtype, 0)
                    )
        for i, k, j, m, q in T.grid(a, size_k, size_j, size_l, 2):
            with T.sblock("ws"):
                vi, vk, vj, vl, vq = T.axis.remap("SSSSS", [i, k, j, m, q])
                ws[vi, vk, vj, vl, vq] = T.if_then_else(
                    inside((vj, b, size_j), (vk, c, size_k), (vl, d, size_l)), w[vi, vj, vk, vl, vq], T.Cast(dtype, 0)
                )
        for bn, i, bj, bl, tn, tj, tl, rn, rj, q, k in T.grid(*s_shape, size_k):
            with T.sblock("s"):
                vbn, vi, vbj, vbl, vtn, vtj, vtl, vrn, vrj, vq, vk = T.axis.remap(
                    "SSSSSSSSSSR", [bn, i, bj, bl, tn, tj, tl, rn, rj, q, k]
                )
                vn = T.meta_var(vbn * tile_n + vrn * p.tn + vtn)
                vj = T.meta_var(vbj * tile_j + vrj * p.tj + vtj)
                with T.init():
                    s[vbn, vi, vbj, vbl, vtn, vtj, vtl, vrn, vrj, vq] = T.Cast(dtype, 0)
                s[vbn, vi, vbj, vbl, vtn, vtj, vtl, vrn, vrj, vq] = plus(
                    s[vbn, vi, vbj, vbl, vtn, vtj, vtl, vrn, vrj, vq], xs, ws, vn, vi, vk, vj, vbl * tile_l + vtl, vq
                )
        for bn, i, bj, bl, tn, tj, tl, rn, rj, q in T.grid(*s_shape):
            with T.sblock("y"):
                vbn, vi, vbj, vbl, vtn, vtj, vtl, vrn, vrj, vq = T.axis.remap(
                    "SSSSSSSSSS", [bn, i, bj, bl, tn, tj, tl, rn, rj, q]
                )
                vn = T.meta_var(vbn * tile_n + vrn * p.tn + vtn)
                vj = T.meta_var(vbj * tile_j + vrj * p.tj + vtj)
                vl = T.meta_var(vbl * tile_l + vtl)
                value = T.meta_var(s[vbn, vi, vbj, vbl, vtn, vtj, vtl, vrn, vrj, vq])
                if inside((vn, n, size_n), (vj, b, size_j), (vl, d, size_l)):
                    if first:
                        y[vn, vi, vj, vl, vq] = end(value, bias, residual, vn, vi, vj, vl, vq)
                    else:
                        y[vi, vj, vl, vn, vq] = end(value, bias, residual, vn, vi, vj, vl, vq)

    return without_unused(main, epilogue)
