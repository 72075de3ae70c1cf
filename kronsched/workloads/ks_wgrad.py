"""The weight gradient of a Kronecker-sparse product: dW[i, j, k, l] = Σn G[n, i, j, l] · X[n, i, k, l].

G is the gradient of Y, viewed as (n, a, b, d), and X, viewed as (n, a, c, d), what was multiplied; ks.py has the product.

Read first: `KSWeightGrad`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from kronsched.dtypes import DTYPES, dtype_of
from kronsched.errors import ArgumentError, UnsupportedError, choose
from kronsched.workloads.base import TensorSpec, Workload
from kronsched.workloads.ks import LAYOUTS, MAX_ELEMENTS, KSMatmul, Pattern, parse_pattern, pattern_in, pattern_out

if TYPE_CHECKING:
    import torch
    import tvm

DTYPE_NAMES = ("float32", "float64", "float16", "bfloat16")
_REFERENCE_ELEMENTS = 1 << 25


def parse_one(text: str) -> Pattern:
    """Parse "6,64,64,1"; `ArgumentError` for a chain."""
    found = parse_pattern(text)
    if len(found) > 1:
        raise ArgumentError(f"pattern={text!r} is not allowed: the weight gradient is of one factor")
    return found[0]


@dataclass(frozen=True)
class KSWeightGrad(Workload):
    """Weight gradient (a, b, c, d) of a Kronecker-sparse matmul of one pattern, from the gradient of Y and from X.

    batch: rows (batch_first) or columns (batch_last) of both, ≥ 1.  pattern: (a, b, c, d), each ≥ 1.  dtype: float32, float64,
    float16 or bfloat16 (both sum in float32); the result has it too.  layout: "batch_first", g (batch, a·b·d) and x
    (batch, a·c·d), or "batch_last", g (a·b·d, batch) and x (a·c·d, batch).
    Raises ArgumentError (a ValueError), ArgumentTypeError (a TypeError) or UnsupportedError naming the field.
    """

    family: ClassVar[str] = "ks_wgrad"

    batch: int = field(metadata={"help": "rows of g and x (batch_first) or columns (batch_last)"})
    pattern: Pattern = field(metadata={"help": "a,b,c,d of the weights, such as 6,64,64,1", "parse": parse_one})
    dtype: str = field(default="float32", metadata={"help": ", ".join(DTYPE_NAMES)})
    layout: str = field(default="batch_first", metadata={"help": "batch_first or batch_last"})

    def __post_init__(self) -> None:
        """Validate and normalise to plain ints and tuples."""
        dtype_of(self.dtype, allowed=DTYPE_NAMES)
        if not isinstance(self.layout, str) or self.layout not in LAYOUTS:
            raise choose("layout", self.layout, LAYOUTS)
        product = KSMatmul(self.batch, self.pattern, self.dtype, self.layout)
        if len(product.patterns) > 1:
            raise ArgumentError(f"pattern={self.pattern!r} is not allowed: the weight gradient is of one factor")
        object.__setattr__(self, "batch", product.batch)
        object.__setattr__(self, "pattern", product.patterns[0])
        if self.output.size > MAX_ELEMENTS:
            raise UnsupportedError(f"pattern={self.pattern} has more than {MAX_ELEMENTS} weights")

    @property
    def batch_first(self) -> bool:
        """Whether a row of x is one sample."""
        return self.layout == "batch_first"

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """The tensors g, the gradient of y, and x."""
        sizes = (("g", pattern_out(self.pattern)), ("x", pattern_in(self.pattern)))
        return tuple(
            TensorSpec(name, (self.batch, size) if self.batch_first else (size, self.batch), self.dtype) for name, size in sizes
        )

    @property
    def output(self) -> TensorSpec:
        """The tensor dw, of the weights' shape."""
        return TensorSpec("dw", self.pattern, self.dtype)

    @property
    def flops(self) -> int:
        """2 · batch · a·b·c·d: one multiply-add a weight and sample."""
        return 2 * self.batch * self.output.size

    @property
    def label(self) -> str:
        """Such as "ks_wgrad batch=25088 (6,64,64,1) float16 batch_first"."""
        return f"ks_wgrad batch={self.batch} ({','.join(map(str, self.pattern))}) {self.dtype} {self.layout}"

    def reference(self, *inputs: torch.Tensor) -> torch.Tensor:
        """The gradient in float64 from g and x, on their device; a part of the batch at a time."""
        import torch

        g, x = inputs
        total = torch.zeros(self.pattern, dtype=torch.float64, device=x.device)
        step = max(1, _REFERENCE_ELEMENTS // max(pattern_in(self.pattern), pattern_out(self.pattern)))
        dim = 0 if self.batch_first else 1
        for start in range(0, self.batch, step):
            n = min(step, self.batch - start)
            part_g, part_x = (t.narrow(dim, start, n).double() for t in (g, x))
            total += wgrad_by_bmm(part_g, part_x, self.pattern, self.batch_first)
        return total

    def baseline(self, *inputs: torch.Tensor) -> tuple[str, Callable[[], Any]]:
        """(name, callable) of what a torch user would run: bmm between permutes."""
        g, x = inputs
        return "torch bmm with permutes", lambda: wgrad_by_bmm(g, x, self.pattern, self.batch_first).contiguous()

    def program(self) -> tvm.IRModule:
        """TensorIR: one te.compute over 2-D tensors, 16-bit types summed in float32, and one for rounding."""
        import tvm
        from tvm import te

        acc, first, (_, b, c, d) = DTYPES[self.dtype].accumulate, self.batch_first, self.pattern
        g, x = (te.placeholder(t.shape, name=t.name, dtype=t.dtype) for t in self.inputs)
        n = te.reduce_axis((0, self.batch), name="n")

        def at(tensor: Any, feature: Any) -> Any:
            return (tensor[n, feature] if first else tensor[feature, n]).astype(acc)

        def body(i: Any, j: Any, k: Any, m: Any) -> Any:
            return te.sum(at(g, (i * b + j) * d + m) * at(x, (i * c + k) * d + m), axis=n)

        same = acc == self.dtype
        total = te.compute(self.pattern, body, name="dw" if same else "total")
        out = total if same else te.compute(self.pattern, lambda *p: total(*p).astype(self.dtype), name="dw")
        return tvm.IRModule({"main": te.create_prim_func([g, x, out]).with_attr("global_symbol", "main")})


def wgrad_by_bmm(g: torch.Tensor, x: torch.Tensor, pattern: Pattern, batch_first: bool) -> torch.Tensor:
    """The gradient by torch.bmm between permutes, as a view (a, b, c, d)."""
    import torch

    a, b, c, d = pattern
    found = torch.bmm(blocks(g, (a, b, d), batch_first).mT, blocks(x, (a, c, d), batch_first))
    return found.reshape(a, d, b, c).permute(0, 2, 3, 1)


def blocks(t: torch.Tensor, extents: tuple[int, int, int], batch_first: bool) -> torch.Tensor:
    """A tensor of a·f·d features as (a·d, n, f)."""
    a, f, d = extents
    if batch_first:
        return t.reshape(-1, a, f, d).permute(1, 3, 0, 2).reshape(a * d, -1, f)
    return t.reshape(a, f, d, -1).permute(0, 2, 3, 1).reshape(a * d, -1, f)
