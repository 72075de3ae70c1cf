"""Dequantise packed 4-bit weights on a GPU: one block a tile of 64 columns by 128 rows of k, one 16-byte load a thread.

    thread = lane of (strip, half): words 2h + s hold columns g and g + 8, rows 32h + 8t … + 7 of its half
    four stores of 16 bytes: (column g, g + 8) × (h = 0, 1), eight neighbours along k each

Bound by memory: half a byte in and two bytes out a weight. No knobs.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator,misc,valid-type,name-defined,no-redef"

from typing import TYPE_CHECKING, Any, ClassVar

from kronsched.quant.layout import TILE_K, TILE_N
from kronsched.schedules.base import Launch, Schedule, Scheduled
from kronsched.space import Config, SearchSpace
from kronsched.workloads.base import Workload
from kronsched.workloads.dequantise import Dequantise

if TYPE_CHECKING:
    from kronsched.hardware import Device


class DequantiseCuda(Schedule):
    """The one kernel of `Dequantise`."""

    name: ClassVar[str] = "dequantise_cuda"
    family: ClassVar[str] = "dequantise"
    device_kind: ClassVar[str] = "cuda"

    def space(self, workload: Workload, device: "Device") -> SearchSpace:
        """No knobs."""
        return SearchSpace(self.name, [], lambda config: None)

    def default_config(self, workload: Workload, device: "Device") -> Config:
        """The only one."""
        return {}

    def apply(self, workload: Workload, config: Config, device: "Device") -> Scheduled:
        """One launch."""
        import tvm

        assert isinstance(workload, Dequantise)
        func = _kernel(workload).with_attr("global_symbol", self.name)
        return Scheduled(tvm.IRModule({self.name: func}), (Launch(self.name, tuple(str(p.name) for p in func.params)),))


def _kernel(w: Dequantise) -> Any:
    from tvm.script import tirx as T

    layout, dtype = w.layout, w.dtype
    n, k, groups, per_group = layout.n_packed, layout.k_packed, layout.groups, layout.rows_per_group
    tiles_k, words = k // TILE_K, TILE_N * TILE_K // 8
    symmetric = w.zero_point == "symmetric"
    columns = n * groups
    zero_dtype = "float32" if w.zero_point == "float" else dtype

    @T.inline
    def write(words_of, scale, zero, row, at, d):
        """Eight values of column c: of words 2h and 2h + 1, in order of k."""
        values = T.alloc_local([8], dtype)
        for c in T.unroll(2):
            for h in T.unroll(2):
                for j in T.unroll(8):
                    shift: T.let = T.uint32(4 * (2 * (j % 4 // 2) + c) + 16 * (j % 2))
                    q: T.let = (words_of[2 * h + j // 4] >> shift) & T.uint32(15)
                    values[j] = T.cast((T.cast(T.cast(q, "int32"), "float32") - zero[2 * h + c]) * scale[2 * h + c], dtype)
                for j in T.vectorized(8):
                    d[(row + 8 * c) * k + at + 32 * h + j] = values[j]

    @T.inline
    def body(wp, sp, zp, d):
        cta = T.cta_id([n // TILE_N * tiles_k])
        tx = T.thread_id([256])
        tile: T.let = cta // tiles_k
        first: T.let = cta % tiles_k * TILE_K + tx // 32 % 2 * 64
        strip: T.let = tx // 64
        g: T.let = tx % 32 // 4
        four = T.alloc_local([4], "uint32")
        scale = T.alloc_local([4], "float32")
        zero = T.alloc_local([4], "float32")
        for v in T.vectorized(4):
            four[v] = T.reinterpret("uint32", wp[cta * words + tx * 4 + v])
        for h in T.unroll(2):
            group: T.let = T.min((first + 32 * h) // per_group, groups - 1)
            for c in T.unroll(2):
                column: T.let = (tile * groups + group) * TILE_N + g * 8 + strip * 2 + c
                scale[2 * h + c] = T.cast(sp[column], "float32")
                if symmetric:
                    zero[2 * h + c] = T.float32(8)
                else:
                    zero[2 * h + c] = T.cast(zp[column], "float32")
        write(four, scale, zero, tile * TILE_N + strip * 16 + g, first + tx % 4 * 8, d)

    if symmetric:

        @T.prim_func
        def dequantise(w: T.Buffer((n * k // 8,), "int32"), s: T.Buffer((columns,), dtype), d: T.Buffer((n * k,), dtype)):
            T.device_entry()
            body(w, s, s, d)

    else:

        @T.prim_func
        def dequantise(
            w: T.Buffer((n * k // 8,), "int32"), s: T.Buffer((columns,), dtype),
            z: T.Buffer((columns,), zero_dtype), d: T.Buffer((n * k,), dtype),
        ):  # fmt: skip
            T.device_entry()
            body(w, s, z, d)

    return dequantise
