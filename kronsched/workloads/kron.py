"""Kron-Matmul: Y = X (F1 ⊗ F2 ⊗ … ⊗ FN), without ever forming the Kronecker product.

X (M, ΠPi) is viewed as (M, P1, …, PN) and axis i is contracted with Fi (Pi, Qi) where it stands, so no transpose
is ever needed. Source of the shapes and of the shuffle baseline: FastKron, arXiv 2401.10187.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar

from kronsched.dtypes import DTYPES, dtype_of
from kronsched.errors import ArgumentError, ArgumentTypeError, UnsupportedError
from kronsched.workloads.base import TensorSpec, Workload

if TYPE_CHECKING:
    import torch
    import tvm

DTYPE_NAMES = ("float32", "float64", "float16", "bfloat16")
MAX_FACTORS = 64
MAX_ELEMENTS = 2**31 - 1


def parse_factors(text: str) -> tuple[tuple[int, int], ...]:
    """Parse "8x8,4x3" into ((8, 8), (4, 3)); `ArgumentError` names the piece that is wrong."""
    factors = []
    for piece in text.split(","):
        match = re.fullmatch(r"\s*([0-9]+)x([0-9]+)\s*", piece)
        if match is None:
            raise ArgumentError(f"factors={text!r}: {piece!r} is not allowed: write each factor as PxQ, such as 8x8,8x8")
        factors.append((int(match[1]), int(match[2])))
    return tuple(factors)


@dataclass(frozen=True)
class KronMatmul(Workload):
    """Y = X (F1 ⊗ … ⊗ FN): X (M, ΠPi), Fi (Pi, Qi), Y (M, ΠQi), all of one dtype.

    m: rows of X, ≥ 1.  factors: N pairs (Pi, Qi), 1 ≤ N ≤ 64, each ≥ 1.  dtype: float32, float64, float16 or bfloat16; the
    16-bit types accumulate in float32 and are rounded to storage at most once an axis (and once where factors are merged).
    Raises ArgumentError (a ValueError) or ArgumentTypeError (a TypeError) naming the field.
    """

    family: ClassVar[str] = "kron"
    gradient: ClassVar[str] = "kronsched.nn.autograd:of_module"
    """Where the derivative of a module's call is; see `TunedModule.gradient`."""

    m: int = field(metadata={"help": "rows of X"})
    factors: tuple[tuple[int, int], ...] = field(metadata={"help": "factor shapes, such as 8x8,8x8", "parse": parse_factors})
    dtype: str = field(default="float32", metadata={"help": "float32, float64, float16 or bfloat16"})

    def __post_init__(self) -> None:
        """Validate and normalise to plain ints and tuples."""
        object.__setattr__(self, "m", _positive("m", self.m))
        if isinstance(self.factors, str) or not isinstance(self.factors, Sequence):
            raise ArgumentTypeError(f"factors={self.factors!r} must be a sequence of (P, Q) pairs")
        pairs = []
        for i, pair in enumerate(self.factors):
            if isinstance(pair, str) or not isinstance(pair, Sequence) or len(pair) != 2:
                raise ArgumentError(f"factors[{i}]={pair!r} is not allowed: a pair (P, Q) is needed")
            pairs.append((_positive(f"factors[{i}] P", pair[0]), _positive(f"factors[{i}] Q", pair[1])))
        if not 1 <= len(pairs) <= MAX_FACTORS:
            raise ArgumentError(f"factors: {len(pairs)} given, 1 to {MAX_FACTORS} are allowed")
        object.__setattr__(self, "factors", tuple(pairs))
        dtype_of(self.dtype, allowed=DTYPE_NAMES)
        largest = max(self.m * size for size in self._row_sizes())
        if largest > MAX_ELEMENTS:
            raise UnsupportedError(
                f"m={self.m} with these factors needs a tensor of {largest} elements; at most {MAX_ELEMENTS} are supported yet"
            )

    # -- shape --------------------------------------------------------------------------------------

    @property
    def k_in(self) -> int:
        """ΠPi, columns of X."""
        return prod(p for p, _ in self.factors)

    @property
    def k_out(self) -> int:
        """ΠQi, columns of Y."""
        return prod(q for _, q in self.factors)

    @property
    def order(self) -> tuple[int, ...]:
        """The cheapest order of contraction: by 1/Q − 1/P descending (an exchange argument), then last axis first."""
        return tuple(sorted(range(len(self.factors)), key=lambda i: (1 / self.factors[i][0] - 1 / self.factors[i][1], -i)))

    def _row_sizes(self) -> list[int]:
        sizes = [self.k_in]
        for i in self.order:
            p, q = self.factors[i]
            sizes.append(sizes[-1] // p * q)
        return sizes

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """The tensors x (M, ΠPi), then f0 … f(N-1), each (Pi, Qi)."""
        x = TensorSpec("x", (self.m, self.k_in), self.dtype)
        return (x, *(TensorSpec(f"f{i}", pair, self.dtype) for i, pair in enumerate(self.factors)))

    @property
    def output(self) -> TensorSpec:
        """The tensor y (M, ΠQi)."""
        return TensorSpec("y", (self.m, self.k_out), self.dtype)

    @property
    def flops(self) -> int:
        """2 M Σ (row size before contracting axis i) · Qi, in the cheapest order."""
        sizes = self._row_sizes()
        return sum(2 * self.m * size * self.factors[i][1] for size, i in zip(sizes, self.order, strict=False))

    @property
    def slack(self) -> float:
        """1 up to three factors; with more, 16-bit chains are rounded more often than the dtype's tolerance leaves room for.

        At most 3, that of nine factors; factors of one element do not count.

        Errors of roundings add up at worst: `kronsched bench kron --dtype float16,bfloat16` shows torch's own products, rounded
        after every factor, beyond the plain tolerance from six factors on (`peer_errors` of its JSON).
        """
        factors = sum(p * q > 1 for p, q in self.factors)
        return min(3.0, max(1.0, factors / 3)) if DTYPES[self.dtype].bits == 16 else 1.0

    @property
    def label(self) -> str:
        """Such as "kron m=1024 8x8^5 float32"."""
        runs: list[list[Any]] = []
        for pair in self.factors:
            if runs and runs[-1][0] == pair:
                runs[-1][1] += 1
            else:
                runs.append([pair, 1])
        text = ",".join(f"{p}x{q}" + (f"^{n}" if n > 1 else "") for (p, q), n in runs)
        return f"kron m={self.m} {text} {self.dtype}"

    # -- what it computes ---------------------------------------------------------------------------

    def reference(self, *inputs: torch.Tensor) -> torch.Tensor:
        """Y (M, ΠQi) in float64 from x (M, ΠPi) and the factors, on their device."""
        x, factors = inputs[0].double(), [f.double() for f in inputs[1:]]
        return _contract(x, factors, self.order).reshape(self.m, self.k_out)

    def baseline(self, *inputs: torch.Tensor) -> tuple[str, Callable[[], Any]]:
        """(name, callable) of what a user would run without kronsched: the shuffle algorithm, numpy on CPU, torch on CUDA."""
        if inputs[0].device.type == "cpu" and self.dtype in ("float32", "float64"):
            x, *factors = (t.numpy() for t in inputs)
            return "numpy shuffle", lambda: shuffle(x, factors)
        return "torch shuffle", lambda: shuffle(inputs[0], inputs[1:])

    def program(self) -> tvm.IRModule:
        """TensorIR: one te.compute an axis over (M, P1, …, PN), 16-bit types accumulated in float32."""
        import tvm
        from tvm import te

        n, acc = len(self.factors), DTYPES[self.dtype].accumulate
        shape = [self.m, *(p for p, _ in self.factors)]
        x = te.placeholder(shape, name="x", dtype=self.dtype)
        factors = [te.placeholder(pair, name=f"f{i}", dtype=self.dtype) for i, pair in enumerate(self.factors)]
        current = x
        for step, axis in enumerate(self.order):
            shape[axis + 1] = self.factors[axis][1]
            name = "y" if step == n - 1 and acc == self.dtype else f"t{axis}"
            current = contract_axis(current, factors[axis], axis + 1, tuple(shape), acc, name)
        if acc != self.dtype:
            last = current
            current = te.compute(tuple(shape), lambda *i: last(*i).astype(self.dtype), name="y")
        func = te.create_prim_func([x, *factors, current]).with_attr("global_symbol", "main")
        return tvm.IRModule({"main": func})


def contract_axis(t: Any, factor: Any, axis: int, shape: tuple[int, ...], acc: str, name: str) -> Any:
    """te.compute of out[…, q, …] = Σp t[…, p, …] · factor[p, q] over dimension `axis` of `t`, summed in dtype `acc`."""
    from tvm import te

    p = te.reduce_axis((0, factor.shape[0]), name=f"p_{name}")

    def body(*i: Any) -> Any:
        source = (*i[:axis], p, *i[axis + 1 :])
        return te.sum(t(*source).astype(acc) * factor[p, i[axis]].astype(acc), axis=p)

    return te.compute(shape, body, name=name)


def shuffle(x: Any, factors: Sequence[Any]) -> Any:
    """The shuffle algorithm (as in GPyTorch), for numpy arrays or torch tensors: a GEMM and a transpose for each factor."""
    m = x.shape[0]
    y = x
    for f in reversed(factors):
        p, q = f.shape
        t = y.reshape(-1, p) @ f
        y = t.reshape(m, -1, q).swapaxes(1, 2).reshape(m, -1)
    return y


def _contract(x: torch.Tensor, factors: Sequence[torch.Tensor], order: Sequence[int]) -> torch.Tensor:
    m, sizes = x.shape[0], [f.shape[0] for f in factors]
    for i in order:
        f = factors[i]
        x = (f.T @ x.reshape(m * prod(sizes[:i]), f.shape[0], prod(sizes[i + 1 :]))).contiguous()
        sizes[i] = f.shape[1]
    return x


def _positive(field_name: str, value: Any) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise ArgumentTypeError(f"{field_name}={value!r} must be an int ≥ 1")
    number = int(value.__index__())
    if number < 1:
        raise ArgumentError(f"{field_name}={number} is not allowed: an int ≥ 1 is needed")
    return number
