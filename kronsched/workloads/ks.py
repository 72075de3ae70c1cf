"""Kronecker-sparse matmul: Y = X Kᵀ for a K whose nonzeros are those of I_a ⊗ 1_{b×c} ⊗ I_d, or for a chain of such factors.

X is viewed as (n, a, c, d) and Y as (n, a, b, d): Y[n, i, j, l] = Σk X[n, i, k, l] · W[i, j, k, l]. Butterfly and Monarch
matrices are chains. A bias, an activation and a residual may follow (ks_epilogue.py). Source of the patterns (a, b, c, d) and of
the layouts: ksmm, arXiv 2405.15013.

Read first: `KSMatmul`, `bmm_factor` (what a torch user runs).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

from kronsched.dtypes import DTYPES, dtype_of
from kronsched.errors import ArgumentError, ArgumentTypeError, UnsupportedError, choose
from kronsched.workloads.base import TensorSpec, Workload
from kronsched.workloads.ks_complex import complex_program
from kronsched.workloads.ks_epilogue import EPILOGUE, Epilogue, activated, check_epilogue, finished

if TYPE_CHECKING:
    import torch
    import tvm

Pattern = tuple[int, int, int, int]
"""(a, b, c, d): a diagonal blocks, each of b × c diagonal matrices of size d."""

DTYPE_NAMES = ("float32", "float64", "float16", "bfloat16", "complex64", "complex128")
LAYOUTS = ("batch_first", "batch_last")
MAX_FACTORS = 32
MAX_ELEMENTS = 2**31 - 1
_REFERENCE_ELEMENTS = 1 << 27


def parse_pattern(text: str) -> tuple[Pattern, ...]:
    """Parse "6,64,64,1" or, for a chain, "6,64,64,1/1,768,192,2"; `ArgumentError` names the piece that is wrong."""
    factors = []
    for piece in text.split("/"):
        match = re.fullmatch(r"\s*([0-9]+)\s*,\s*([0-9]+)\s*,\s*([0-9]+)\s*,\s*([0-9]+)\s*", piece)
        if match is None:
            raise ArgumentError(
                f"pattern={text!r}: {piece!r} is not allowed: write a,b,c,d, such as 6,64,64,1; a chain joins factors by /"
            )
        factors.append((int(match[1]), int(match[2]), int(match[3]), int(match[4])))
    return tuple(factors)


@dataclass(frozen=True)
class KSMatmul(Workload):
    """Kronecker-sparse matmul Y = X Kᵀ of one pattern (a, b, c, d) or of a chain of patterns, the first one applied first.

    batch: rows (batch_first) or columns (batch_last) of X, ≥ 1.  pattern: (a, b, c, d), each ≥ 1, or up to 32 of them, where
    a·b·d of one equals a·c·d of the next; kept as one flat tuple when there is one factor.  dtype: float32, float64, float16,
    bfloat16 (both accumulate in float32), complex64 or complex128.  layout: "batch_first", X (batch, a·c·d) and Y
    (batch, a·b·d), or "batch_last", X (a·c·d, batch) and Y (a·b·d, batch). Weights are (a, b, c, d).
    bias, activation ("relu", "gelu" or "silu"), residual: y = act(K x + bias) + residual, in the dtype of sums and rounded once;
    bias (a·b·d,) of the last factor, residual of y's shape, both in `dtype`. A call is `mod(x, w, bias=…, residual=…)`.
    Raises ArgumentError (a ValueError), ArgumentTypeError (a TypeError) or UnsupportedError (an activation of complex numbers)
    naming the field.
    """

    family: ClassVar[str] = "ks"

    batch: int = field(metadata={"help": "rows of X (batch_first) or columns (batch_last)"})
    pattern: Pattern | tuple[Pattern, ...] = field(
        metadata={"help": "a,b,c,d, such as 6,64,64,1; a chain is joined by /, first applied first", "parse": parse_pattern}
    )
    dtype: str = field(default="float32", metadata={"help": ", ".join(DTYPE_NAMES)})
    layout: str = field(default="batch_first", metadata={"help": "batch_first or batch_last"})
    bias: bool = field(default=False, metadata={"help": "add a bias to each output feature"})
    activation: str | None = field(default=None, metadata={"help": "relu, gelu or silu after the bias", "parse": str})
    residual: bool = field(default=False, metadata={"help": "add a tensor of y's shape at the end"})

    def __post_init__(self) -> None:
        """Validate and normalise to plain ints and tuples."""
        object.__setattr__(self, "batch", _positive("batch", self.batch))
        patterns = _patterns(self.pattern)
        object.__setattr__(self, "pattern", patterns if len(patterns) > 1 else patterns[0])
        dtype_of(self.dtype, allowed=DTYPE_NAMES)
        if not isinstance(self.layout, str) or self.layout not in LAYOUTS:
            raise choose("layout", self.layout, LAYOUTS)
        check_epilogue(self.bias, self.activation, self.residual, self.dtype)
        largest = max(self.batch * max(self.sizes), *(a * b * c * d for a, b, c, d in patterns))
        if largest > MAX_ELEMENTS:
            raise UnsupportedError(
                f"batch={self.batch} with this pattern needs a tensor of {largest} elements; "
                f"at most {MAX_ELEMENTS} are supported yet"
            )

    @property
    def gradient(self) -> str:
        """Where the derivative of a module's call is; see `TunedModule.gradient`."""
        if self.epilogue:
            return f"kronsched.nn.ks_fused:of_{self.layout}_{self.activation or 'identity'}"
        return f"kronsched.nn.ks_autograd:of_{self.layout}"

    def to_dict(self) -> dict[str, Any]:
        """As `Workload.to_dict`; an epilogue that is absent goes without saying: keys are those of logs that knew of none."""
        absent = {"bias": False, "activation": None, "residual": False}
        return {name: value for name, value in super().to_dict().items() if name not in absent or value != absent[name]}

    @property
    def epilogue(self) -> Epilogue:
        """What follows the product."""
        return Epilogue(self.bias, self.activation, self.residual)

    @property
    def plain(self) -> KSMatmul:
        """The same product without an epilogue."""
        return replace(self, bias=False, activation=None, residual=False) if self.epilogue else self

    # -- shape --------------------------------------------------------------------------------------

    @property
    def patterns(self) -> tuple[Pattern, ...]:
        """The patterns of all factors, first applied first."""
        chained = isinstance(self.pattern[0], tuple)
        return self.pattern if chained else (self.pattern,)  # type: ignore[return-value]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Features of X, of each intermediate, and of Y."""
        return (pattern_in(self.patterns[0]), *(pattern_out(p) for p in self.patterns))

    @property
    def batch_first(self) -> bool:
        """Whether a row of X is one sample."""
        return self.layout == "batch_first"

    @property
    def weight_names(self) -> tuple[str, ...]:
        """The name "w" of a single factor, or w0 … w(N-1)."""
        n = len(self.patterns)
        return tuple(f"w{i}" for i in range(n)) if n > 1 else ("w",)

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """The tensors x, then w (a, b, c, d), or w0 … w(N-1) of a chain, then those of bias and residual that there are."""
        named = zip(self.weight_names, self.patterns, strict=True)
        more = {"bias": TensorSpec("bias", (self.sizes[-1],), self.dtype), "residual": self._data("residual", self.sizes[-1])}
        weights = (TensorSpec(name, p, self.dtype) for name, p in named)
        return (self._data("x", self.sizes[0]), *weights, *(more[name] for name in self.epilogue.tensors))

    @property
    def output(self) -> TensorSpec:
        """The tensor y, in the layout of x."""
        return self._data("y", self.sizes[-1])

    def _data(self, name: str, size: int) -> TensorSpec:
        return TensorSpec(name, (self.batch, size) if self.batch_first else (size, self.batch), self.dtype)

    @property
    def compute_dtype(self) -> str:
        """The dtype of real numbers that the arithmetic is in."""
        return DTYPES[self.dtype].part

    @property
    def flops(self) -> int:
        """2 · batch · Σ a·b·c·d: one multiply-add a weight and sample (of complex numbers, four), factors in order."""
        each = 8 if DTYPES[self.dtype].is_complex else 2
        return sum(each * self.batch * a * b * c * d for a, b, c, d in self.patterns)

    @property
    def label(self) -> str:
        """Such as "ks batch=25088 (6,64,64,1) float16 batch_first"."""
        chain = " ".join("(" + ",".join(map(str, p)) + ")" for p in self.patterns)
        return " ".join(filter(None, (f"ks batch={self.batch} {chain} {self.dtype} {self.layout}", self.epilogue.label)))

    def flatten_args(self, args: Sequence[Any]) -> list[Any]:
        """`mod(x, w)`, `mod(x, [w1, w2, …])` or `mod(x, w1, w2, …)` as a flat list; bias and residual may follow."""
        if len(args) >= 2 and isinstance(args[1], list | tuple):
            return [args[0], *args[1], *args[2:]]
        return list(args)

    def flatten_named(self, args: Sequence[Any], named: Mapping[str, Any]) -> list[Any]:
        """As `flatten_args`, with bias and residual as keywords. ArgumentError for one this workload was not made for."""
        flat, wanted = self.flatten_args(args), self.epilogue.tensors
        for name, value in named.items():
            if name not in EPILOGUE:
                raise ArgumentTypeError(f"{name!r} was given: a module of {self.label} takes no such argument")
            if name not in wanted and value is not None:
                raise ArgumentError(f"{name} was given: make the workload with {name}=True")
        given = max(0, len(flat) - 1 - len(self.patterns))
        for name in wanted[:given]:
            if named.get(name) is not None:
                raise ArgumentError(f"{name} was given twice, by position and by name")
        for name in wanted[given:]:
            if named.get(name) is None:
                raise ArgumentError(f"{name} is missing: {self.label} needs {name}=…")
        return flat + [named[name] for name in wanted[given:]]

    def parts(self, flat: Sequence[Any]) -> tuple[Any, list[Any], Any, Any]:
        """(x, weights, bias, residual) of flat inputs, None for what there is not."""
        n = 1 + len(self.patterns)
        more = dict(zip(self.epilogue.tensors, flat[n:], strict=True))
        return flat[0], list(flat[1:n]), more.get("bias"), more.get("residual")

    # -- what it computes ---------------------------------------------------------------------------

    def reference(self, *inputs: torch.Tensor) -> torch.Tensor:
        """Y in float64 or complex128 from x and the weights, on their device; a part of the batch at a time."""
        import torch

        x, weights, bias, residual = self.parts(inputs)
        wide = torch.complex128 if x.is_complex() else torch.float64
        weights, bias = [w.to(wide) for w in weights], None if bias is None else bias.to(wide)
        y = torch.empty(self.output.shape, dtype=wide, device=x.device)
        dim = 0 if self.batch_first else 1
        step = max(1, _REFERENCE_ELEMENTS // max(self.sizes))
        for start in range(0, self.batch, step):
            n = min(step, self.batch - start)
            part = x.narrow(dim, start, n).to(wide)
            for pattern, w in zip(self.patterns, weights, strict=True):
                part = _factor(part, w, pattern, self.batch_first)
            rest = None if residual is None else residual.narrow(dim, start, n).to(wide)
            y.narrow(dim, start, n).copy_(finished(part, self.activation, bias, rest, self.batch_first))
        return y

    def baseline(self, *inputs: torch.Tensor) -> tuple[str, Callable[[], Any]]:
        """(name, callable) of what a torch user would run: bmm between permutes, or on strided views."""
        x, weights, bias, residual = self.parts(inputs)

        def call() -> torch.Tensor:
            y = x
            for pattern, w in zip(self.patterns, weights, strict=True):
                y = bmm_factor(y, w, pattern, self.batch_first)
            return finished(y, self.activation, bias, residual, self.batch_first)

        return ("torch bmm with permutes" if self.batch_first else "torch bmm on views"), call

    def program(self) -> tvm.IRModule:
        """TensorIR: one te.compute a factor on 2-D tensors, 16-bit types summed in float32; one for rounding and epilogue.

        Complex tensors have a last dimension of 2 more; see ks_complex.py.
        """
        import tvm
        from tvm import te

        if DTYPES[self.dtype].is_complex:
            return complex_program(self)
        acc = DTYPES[self.dtype].accumulate
        x = te.placeholder(self.inputs[0].shape, name="x", dtype=self.dtype)
        weights = [te.placeholder(p, name=n, dtype=self.dtype) for n, p in zip(self.weight_names, self.patterns, strict=True)]
        current = x
        for i, (pattern, w) in enumerate(zip(self.patterns, weights, strict=True)):
            last = i == len(weights) - 1 and acc == self.dtype and not self.epilogue
            current = contract_factor(current, w, pattern, self.batch_first, acc, "y" if last else f"t{i}")
        more = {t.name: te.placeholder(t.shape, name=t.name, dtype=t.dtype) for t in self.inputs[1 + len(weights) :]}
        if acc != self.dtype or self.epilogue:
            total = current

            def end(p: Any, q: Any) -> Any:
                value = total(p, q)
                if self.bias:
                    value = value + more["bias"][q if self.batch_first else p].astype(acc)
                value = activated(self.activation, value, acc)
                return (value + more["residual"][p, q].astype(acc) if self.residual else value).astype(self.dtype)

            current = te.compute(self.output.shape, end, name="y")
        func = te.create_prim_func([x, *weights, *more.values(), current]).with_attr("global_symbol", "main")
        return tvm.IRModule({"main": func})


def pattern_in(pattern: Pattern) -> int:
    """Input features a·c·d of a factor."""
    a, _, c, d = pattern
    return a * c * d


def pattern_out(pattern: Pattern) -> int:
    """Output features a·b·d of a factor."""
    a, b, _, d = pattern
    return a * b * d


def contract_factor(t: Any, w: Any, pattern: Pattern, batch_first: bool, acc: str, name: str) -> Any:
    """te.compute of one factor on a 2-D tensor `t`, summed in dtype `acc`."""
    from tvm import te

    _, b, c, d = pattern
    k = te.reduce_axis((0, c), name=f"k_{name}")

    def body(p: Any, q: Any) -> Any:
        n, f = (p, q) if batch_first else (q, p)
        i, j, inner = f // (b * d), f // d % b, f % d
        source = (i * c + k) * d + inner
        value = t[n, source] if batch_first else t[source, n]
        return te.sum(value.astype(acc) * w[i, j, k, inner].astype(acc), axis=k)

    shape = (t.shape[0], pattern_out(pattern)) if batch_first else (pattern_out(pattern), t.shape[1])
    return te.compute(shape, body, name=name)


def bmm_factor(x: torch.Tensor, w: torch.Tensor, pattern: Pattern, batch_first: bool) -> torch.Tensor:
    """One factor by torch.bmm, as a torch user would write it.

    batch_first: x (n, a·c·d) is permuted to (a·d, n, c), multiplied, and permuted back. batch_last: strided views of x (a·c·d, n)
    and of the output go to bmm as they are, in min(a, d) calls (one, unless both a and d exceed 1).
    """
    import torch

    a, b, c, d = pattern
    if batch_first:
        rows = x.view(-1, a, c, d).permute(1, 3, 0, 2).reshape(a * d, -1, c)
        y = torch.bmm(rows, w.permute(0, 3, 2, 1).reshape(a * d, c, b))
        return y.view(a, d, -1, b).permute(2, 0, 3, 1).reshape(-1, a * b * d)
    n = x.shape[1]
    out = torch.empty(a * b * d, n, dtype=x.dtype, device=x.device)
    # [i, l] is one product (b, c) @ (c, n).
    data, result, weights = x.view(a, c, d, n).transpose(1, 2), out.view(a, b, d, n).transpose(1, 2), w.permute(0, 3, 1, 2)
    if d <= a:
        for inner in range(d):
            torch.bmm(weights[:, inner], data[:, inner], out=result[:, inner])
    else:
        for i in range(a):
            torch.bmm(weights[i], data[i], out=result[i])
    return out


def _factor(x: torch.Tensor, w: torch.Tensor, pattern: Pattern, batch_first: bool) -> torch.Tensor:
    import torch

    a, b, c, d = pattern
    if batch_first:
        return torch.einsum("nikl,ijkl->nijl", x.reshape(-1, a, c, d), w).reshape(x.shape[0], a * b * d)
    return torch.einsum("ikln,ijkl->ijln", x.reshape(a, c, d, -1), w).reshape(a * b * d, x.shape[1])


def _patterns(value: Any) -> tuple[Pattern, ...]:
    """A pattern or a chain as a tuple of patterns, checked."""
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise ArgumentTypeError(f"pattern={value!r} must be (a, b, c, d) or a sequence of such patterns")
    chained = len(value) > 0 and isinstance(value[0], Sequence) and not isinstance(value[0], str)
    given = list(value) if chained else [value]
    if len(given) > MAX_FACTORS:
        raise ArgumentError(f"pattern: {len(given)} factors given, 1 to {MAX_FACTORS} are allowed")
    found: list[Pattern] = []
    for n, one in enumerate(given):
        name = f"pattern[{n}]" if chained else "pattern"
        if isinstance(one, str) or not isinstance(one, Sequence) or len(one) != 4:
            raise ArgumentError(f"{name}={one!r} is not allowed: four numbers (a, b, c, d) are needed")
        a, b, c, d = (_positive(f"{name} {letter}", v) for letter, v in zip("abcd", one, strict=True))
        if found and pattern_out(found[-1]) != a * c * d:
            raise ArgumentError(
                f"{name}={(a, b, c, d)} is not allowed: it takes a·c·d = {a * c * d} features, "
                f"the factor before it gives a·b·d = {pattern_out(found[-1])}"
            )
        found.append((a, b, c, d))
    return tuple(found)


def _positive(field_name: str, value: Any) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise ArgumentTypeError(f"{field_name}={value!r} must be an int ≥ 1")
    number = int(value.__index__())
    if number < 1:
        raise ArgumentError(f"{field_name}={number} is not allowed: an int ≥ 1 is needed")
    return number
