"""Dequantise: packed 4-bit weights to a dense matrix, the first half of "dequantise, then multiply with the library".

No family of its own: nobody tunes it. `kronsched.nn.w4a16_library` builds its one kernel for layers with many rows of x.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from kronsched.quant.layout import NEUTRAL, Layout, row_groups, unpack_columns, unpack_words
from kronsched.workloads.base import TensorSpec, Workload

if TYPE_CHECKING:
    import torch
    import tvm

    from kronsched.workloads.gemm import Gemm


@dataclass(frozen=True)
class Dequantise(Workload):
    """D[n, k] = (q - zero) · scale in `dtype`, rounded once from float32; rows and columns in packed order, padding included.

    The fields mean what they mean in `Gemm`; make one with `of`.
    """

    family: ClassVar[str] = "dequantise"

    n: int
    k: int
    dtype: str
    group_size: int
    zero_point: str
    act_order: bool

    @classmethod
    def of(cls, w: Gemm) -> Dequantise:
        """That of the weights of a 4-bit `Gemm`."""
        return cls(w.n, w.k, w.a_dtype, w.group_size, w.zero_point, w.act_order)

    @property
    def layout(self) -> Layout:
        """Shapes of the packed weights."""
        return Layout(self.n, self.k, self.group_size, self.act_order)

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """The tensors w (packed words), s (scales), and z (zeros) unless symmetric, as `Gemm` takes them."""
        layout = self.layout
        specs = [TensorSpec("w", layout.words, "int32"), TensorSpec("s", layout.columns, self.dtype)]
        if self.zero_point != "symmetric":
            specs.append(TensorSpec("z", layout.columns, "float32" if self.zero_point == "float" else self.dtype))
        return tuple(specs)

    @property
    def output(self) -> TensorSpec:
        """The tensor d (n_packed, k_packed)."""
        return TensorSpec("d", (self.layout.n_packed, self.layout.k_packed), self.dtype)

    @property
    def flops(self) -> int:
        """A subtraction and a product a weight."""
        return 2 * self.output.size

    @property
    def label(self) -> str:
        """Such as "dequantise n=4096 k=4096 float16 g128 symmetric"."""
        return f"dequantise n={self.n} k={self.k} {self.dtype} g{self.group_size} {self.zero_point}"

    def make_inputs(self, seed: int, device: str = "cpu") -> list[torch.Tensor]:
        """Those of the product with one row, without its x and order."""
        from kronsched.workloads.gemm import Gemm

        one = Gemm(
            1, self.n, self.k, self.dtype, group_size=self.group_size, zero_point=self.zero_point, act_order=self.act_order
        )
        return one.make_inputs(seed, device)[1 : 1 + len(self.inputs)]

    def reference(self, *inputs: torch.Tensor) -> torch.Tensor:
        """The weights in float64."""
        return self.values(*inputs, wide="float64")

    def values(self, *inputs: torch.Tensor, wide: str = "float32") -> torch.Tensor:
        """The weights (n_packed, k_packed), computed in the dtype `wide` by torch; rounded to no narrower one."""
        import torch

        layout, dtype = self.layout, getattr(torch, wide)
        groups = row_groups(layout, inputs[0].device)
        q = unpack_words(inputs[0], layout).to(dtype)
        q -= NEUTRAL if self.zero_point == "symmetric" else unpack_columns(inputs[2]).to(dtype)[groups]
        return q.mul_(unpack_columns(inputs[1]).to(dtype)[groups]).T

    def program(self) -> tvm.IRModule:
        """TensorIR of the same."""
        import tvm
        from tvm import te, tirx

        from kronsched.workloads.gemm import column_index, nibble

        layout = self.layout
        tensors = {t.name: te.placeholder(t.shape, name=t.name, dtype=t.dtype) for t in self.inputs}

        def value(n: tirx.Var, k: tirx.Var) -> tirx.PrimExpr:
            column = (n // 64, tirx.min(k // layout.rows_per_group, layout.groups - 1), column_index(n % 64))
            neutral = tirx.const(NEUTRAL, "float32")
            zero = neutral if self.zero_point == "symmetric" else tensors["z"][column].astype("float32")
            wide = (nibble(tensors["w"], n, k).astype("float32") - zero) * tensors["s"][column].astype("float32")
            return wide.astype(self.dtype)

        d = te.compute(self.output.shape, value, name="d")
        func = te.create_prim_func([*tensors.values(), d]).with_attr("global_symbol", "main")
        return tvm.IRModule({"main": func})
