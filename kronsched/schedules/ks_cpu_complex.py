"""Kronecker-sparse matmul of complex numbers on a CPU: the tiles and primitives of ks_cpu.py.

    along     sums                                                         weights
    "j"       re += x_re · w_re − x_im · w_im, im += x_im · w_re + x_re · w_im    taken apart in a first pass
    "l", "n"  r += (x_re, x_im) · w_re, s += (x_re, x_im) · w_im           "l": each part twice, in a first pass; "n": as they are
              and at the end re = r_re − s_im, im = r_im + s_re

Vectors hold neighbouring j, or the pairs of neighbouring l or samples as they lie in x: the inner loops read no pair apart.

Read first: `_program`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from kronsched.dtypes import DTYPES
from kronsched.schedules.ks_cpu import FactorPlan, KSCpu
from kronsched.schedules.ks_parts import without_unused
from kronsched.workloads.base import TensorSpec, Workload
from kronsched.workloads.ks import KSMatmul
from kronsched.workloads.ks_complex import product_terms
from kronsched.workloads.ks_epilogue import Epilogue

if TYPE_CHECKING:
    import tvm

    from kronsched.hardware import Device


class KSCpuComplex(KSCpu):
    """Vectorised CPU schedule for KSMatmul of complex64 and complex128, both layouts."""

    name: ClassVar[str] = "ks_cpu_complex"

    def supports(self, workload: Workload, device: Device) -> str | None:
        """Complex dtypes."""
        assert isinstance(workload, KSMatmul)
        return None if DTYPES[workload.dtype].is_complex else f"{workload.dtype} is not served: complex dtypes are"

    def _program(
        self, plan: FactorPlan, source: TensorSpec, weight: TensorSpec, target: TensorSpec, acc: str, epilogue: Epilogue
    ) -> tvm.tirx.PrimFunc:
        """See `KSCpu`."""
        return _program(plan, DTYPES[acc].part, epilogue)


def _program(p: FactorPlan, dtype: str, epilogue: Epilogue) -> Any:
    """The TensorIR of one factor and what follows it. g: weights as they are read; s: sums of a tile; y: the output.

    q: of s, the part of the sum ("j") or of the weight; of y, the part of the output.
    """
    from tvm.script import tirx as T

    a, b, c, d = p.pattern
    n, first, along = p.batch, p.batch_first, p.along
    tiles_n, tiles_j, tiles_l = p.tiles
    x_shape = {"j": (n, a, c, d, 2), "l": (n, a, c, 2 * d), "n": (a, c, d, 2 * n)}[along]
    y_shape = (n, a, b, d, 2) if first else (a, b, d, n, 2)
    g_shape = {"j": (a, d, c, 2, b), "l": (a, b, c, 2, 2 * d), "n": (1, 1, 1, 1, 1)}[along]
    pairs_n, pairs_l = 2 if along == "n" else 1, 2 if along == "l" else 1

    def begin(tile: Any, size: int, extent: int) -> Any:
        return T.min(tile * size, extent - size) if extent % size else tile * size

    def inner(wn: Any, wj: Any, wl: Any, q: Any) -> tuple[Any, ...]:
        """A place in a tile of sums, the vectorised dimension last but for ones: only so do they stay in registers."""
        return (wj, q, wn, wl) if along == "n" else (wn, q, wj, wl)

    s_shape = (tiles_n, a, tiles_l, tiles_j, *inner(pairs_n * p.tile_n, p.tile_j, pairs_l * p.tile_l, 2))

    def plus(total: Any, x: Any, g: Any, w: Any, sample: Any, i: Any, j: Any, k: Any, m: Any, q: Any) -> Any:
        """A sum with a product added. sample, m: of pairs' parts where a vector holds them."""
        if along == "l":
            return total + x[sample, i, k, m] * g[i, j, k, q, m]
        if along == "n":
            return total + x[i, k, m, sample] * w[i, j, k, m, q]
        one, other = product_terms(lambda part: x[sample, i, k, m, part], lambda part: g[i, m, k, part, j], q)
        return total + one + other  # as two fused multiply-adds

    def result(s: Any, tile: Any, wn: Any, wj: Any, wl: Any, q: Any) -> Any:
        """A part of a product from the sums."""
        if along == "j":
            return s[(*tile, *inner(wn, wj, wl, q))]

        def at(part: Any, of_weight: int) -> Any:
            places = (2 * wn + part, wj, wl) if along == "n" else (wn, wj, 2 * wl + part)
            return s[(*tile, *inner(*places, of_weight))]

        return at(q, 0) + T.Select(q == 0, -at(1, 1), at(0, 1))

    def end(value: Any, bias: Any, residual: Any, sample: Any, i: Any, j: Any, m: Any, q: Any) -> Any:
        """A product on its way to y."""
        value = value + bias[i, j, m, q] if epilogue.bias else value
        if not epilogue.residual:
            return value
        return value + (residual[sample, i, j, m, q] if first else residual[i, j, m, sample, q])

    @T.prim_func(s_tir=True)  # type: ignore[untyped-decorator]
    def main(
        x: T.Buffer(x_shape, dtype),  # type: ignore[valid-type]
        w: T.Buffer((a, b, c, d, 2), dtype),  # type: ignore[valid-type]
        y: T.Buffer(y_shape, dtype),  # type: ignore[valid-type]
        bias: T.Buffer((a, b, d, 2), dtype),  # type: ignore[valid-type]
        residual: T.Buffer(y_shape, dtype),  # type: ignore[valid-type]
    ) -> None:
        s = T.sblock_alloc_buffer(s_shape, dtype)
        g = T.sblock_alloc_buffer(g_shape, dtype)
        if along == "j":
            for i, m, k, q, j in T.grid(*g_shape):
                with T.sblock("g"):
                    vi, vm, vk, vq, vj = T.axis.remap("SSSSS", [i, m, k, q, j])
                    g[vi, vm, vk, vq, vj] = w[vi, vj, vk, vm, vq]
        if along == "l":
            for i, j, k, q, m in T.grid(*g_shape):
                with T.sblock("g"):
                    vi, vj, vk, vq, vm = T.axis.remap("SSSSS", [i, j, k, q, m])
                    g[vi, vj, vk, vq, vm] = w[vi, vj, vk, vm // 2, vq]
        for tn, i, tl, tj, un, uj, ul, q, k in T.grid(
            tiles_n, a, tiles_l, tiles_j, pairs_n * p.tile_n, p.tile_j, pairs_l * p.tile_l, 2, c
        ):
            with T.sblock("s"):
                vn, vi, vl, vj, wn, wj, wl, vq, vk = T.axis.remap("SSSSSSSSR", [tn, i, tl, tj, un, uj, ul, q, k])
                sample = T.meta_var(pairs_n * begin(vn, p.tile_n, n) + wn)
                j = T.meta_var(begin(vj, p.tile_j, b) + wj)
                m = T.meta_var(pairs_l * begin(vl, p.tile_l, d) + wl)
                with T.init():
                    s[(vn, vi, vl, vj, *inner(wn, wj, wl, vq))] = T.Cast(dtype, 0)
                s[(vn, vi, vl, vj, *inner(wn, wj, wl, vq))] = plus(
                    s[(vn, vi, vl, vj, *inner(wn, wj, wl, vq))], x, g, w, sample, vi, j, vk, m, vq
                )
        for tn, i, tl, tj, un, uj, ul, q in T.grid(tiles_n, a, tiles_l, tiles_j, p.tile_n, p.tile_j, p.tile_l, 2):
            with T.sblock("y"):
                vn, vi, vl, vj, wn, wj, wl, vq = T.axis.remap("SSSSSSSS", [tn, i, tl, tj, un, uj, ul, q])
                value = T.meta_var(result(s, (vn, vi, vl, vj), wn, wj, wl, vq))
                sample = T.meta_var(begin(vn, p.tile_n, n) + wn)
                j = T.meta_var(begin(vj, p.tile_j, b) + wj)
                m = T.meta_var(begin(vl, p.tile_l, d) + wl)
                if first:
                    y[sample, vi, j, m, vq] = end(value, bias, residual, sample, vi, j, m, vq)
                else:
                    y[vi, j, m, sample, vq] = end(value, bias, residual, sample, vi, j, m, vq)

    return without_unused(main, epilogue)
