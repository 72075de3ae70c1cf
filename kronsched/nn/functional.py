"""`kron_matmul`: X (F1 ⊗ … ⊗ FN) or (F1 ⊗ … ⊗ FN) X with all that FastKron offers, differentiable, for any number of rows.

Read first: `kron_matmul`, then `_batched` (how batches become rows or loops).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kronsched.nn import checks
from kronsched.nn.autograd import is_recorded, is_tracked, product, run
from kronsched.nn.checks import times


def kron_matmul(
    x: Tensor,
    factors: Sequence[Tensor],
    *,
    form: str = "mkm",
    op_x: str = "n",
    op_f: str = "n",
    alpha: float | Tensor = 1.0,
    beta: float | Tensor = 0.0,
    y: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Z = alpha · op(X) (op(F1) ⊗ … ⊗ op(FN)) + beta · Y, or with the Kronecker product on the left.

    form: "mkm" (X on the left) or "kmm": Z = alpha · (op(F1) ⊗ … ⊗ op(FN)) op(X) + beta · Y.
    op_x, op_f: "n" (as it is) or "t" (transposed in the last two dimensions).
    x: (…, M, K), K being the product of the rows ("kmm": columns) of the op(Fi), and (…, K, M) for "kmm", before op; or a
    vector (K,), which is its own transpose and gives a vector.
    factors: 1 to 64 tensors (…, Pi, Qi). Leading dimensions of x and of the factors broadcast as in torch.matmul; a batch of x
    alone costs no more than as many rows, a batch of factors is a loop.
    alpha, beta: numbers or scalar tensors. y: broadcasts with the product (and may add leading dimensions to it); with the number
    beta = 0 its values are not read.
    out: a tensor of the result's shape, dtype and device. It may share memory with any input: the result is then computed apart
    and copied. Not allowed where gradients are recorded.

    Any strides are right; contiguous x ("kmm": x whose transpose is contiguous, such as an earlier "kmm" result) is not copied.
    A "kmm" result is a transposed view. All tensors have one dtype (float32, float64, float16, bfloat16; 16-bit types accumulate
    in float32) and device; under torch.autocast they are cast as torch.matmul casts. Differentiable in x, factors, alpha, beta
    and y, backwards (twice and more), forwards and under torch.func. Kernels are those of `kronsched.nn.DynamicKron`: the first
    call of a bucket of rows builds one.

    Raises ArgumentError (a ValueError), ArgumentTypeError (a TypeError) or UnsupportedError, naming the argument.
    """
    checks.check_options(form, op_x, op_f)
    checks.check_x(x)
    factors = checks.check_factors(factors)
    x, factors, y = _autocast(x, factors, y)
    for i, f in enumerate(factors):
        checks.check_same(f"factors[{i}]", f, x)
    checks.check_scale("alpha", alpha, x)
    checks.check_scale("beta", beta, x)
    checks.check_y(y, beta, x)

    vector, kmm = x.dim() == 1, form == "kmm"
    # (F1 ⊗ …) X = (Xᵀ (F1ᵀ ⊗ …))ᵀ: transposed views, which cost a copy only where a kernel cannot read them as they are.
    rows = x.unsqueeze(0) if vector else x.mT if (op_x == "t") != kmm else x
    mats = [f.mT if (op_f == "t") != kmm else f for f in factors]
    checks.check_inner(rows, mats, x, kmm, op_x)
    mats, alpha = _fold(mats, alpha)
    if out is not None:
        given = [t for t in (x, *factors, y, alpha, beta) if isinstance(t, Tensor)]
        checks.check_untracked(out, not torch.compiler.is_compiling() and is_tracked(given))
        if y is None and isinstance(alpha, int | float) and alpha == 1 and _direct(out, rows, mats, vector, kmm):
            return out
    z = _batched(rows, mats)
    z = _epilogue(z.squeeze(-2) if vector else z.mT if kmm else z, alpha, beta, y)
    if out is None:
        return z
    checks.check_out(out, z.shape, x)
    return out.copy_(z)


def _autocast(x: Tensor, factors: list[Tensor], y: Tensor | None) -> tuple[Tensor, list[Tensor], Tensor | None]:
    """What torch.autocast does to the arguments of a matmul: floating types but float64 become the autocast dtype."""
    kind = x.device.type
    if kind not in ("cpu", "cuda") or not torch.is_autocast_enabled(kind):
        return x, factors, y
    dtype = torch.get_autocast_dtype(kind)

    def cast(t: Tensor) -> Tensor:
        return t if t.dtype == torch.float64 or not t.is_floating_point() else t.to(dtype)

    return cast(x), [cast(f) for f in factors], cast(y) if isinstance(y, Tensor) else y


def _fold(factors: list[Tensor], alpha: Any) -> tuple[list[Tensor], Any]:
    """Alpha times the smallest factor instead of the result, where that rounds and overflows no worse: not in 16 bits."""
    if isinstance(alpha, Tensor) or alpha == 1 or factors[0].dtype not in (torch.float32, torch.float64):
        return factors, alpha
    i = min(range(len(factors)), key=lambda n: factors[n].numel())
    return [*factors[:i], factors[i] * alpha, *factors[i + 1 :]], 1


def _batched(x: Tensor, factors: Sequence[Tensor]) -> Tensor:
    """The product of x (…, M, K) and factors (…, P, Q), leading dimensions broadcast."""
    if all(f.dim() == 2 for f in factors):
        return _rows(x, factors, x.shape[:-2])
    batch = _leading(x, factors)
    if not is_recorded((x, *factors)) and not is_tracked((x, *factors)):
        x, *factors = (_distinct(t) for t in (x, *factors))  # a batch made by expand is computed once
    if all(times(f.shape[:-2]) == 1 for f in factors):
        z = _rows(x, [f.reshape(f.shape[-2:]) for f in factors], _leading(x, factors))
    else:
        z = _loops(x, factors)
    return z if tuple(z.shape[:-2]) == batch else z.expand(*batch, *z.shape[-2:]).contiguous()


def _leading(x: Tensor, factors: Sequence[Tensor]) -> tuple[int, ...]:
    """The common leading dimensions of x and the factors."""
    common: tuple[int, ...] = ()
    for i, f in enumerate(factors):
        common = checks.broadcast(f"factors[{i}] leading", f.shape[:-2], "the factors before", common)
    return checks.broadcast("x leading", x.shape[:-2], "the factors", common)


def _distinct(t: Tensor) -> Tensor:
    """The tensor with each leading dimension of stride 0 cut to one."""
    for d in range(t.dim() - 2):
        if t.shape[d] > 1 and t.stride(d) == 0:
            t = t.narrow(d, 0, 1)
    return t


def _rows(x: Tensor, factors: Sequence[Tensor], batch: Sequence[int]) -> Tensor:
    """One Kronecker product, of matrices: every batch of x is more rows."""
    y = product(x if x.dim() == 2 else x.reshape(times(x.shape[:-1]), x.shape[-1]), factors)
    return y if x.dim() == 2 and not batch else y.reshape(*batch, x.shape[-2], y.shape[-1])


def _loops(x: Tensor, factors: Sequence[Tensor]) -> Tensor:
    """A product for each batch of factors; the dimensions that only x has are more rows of each."""
    batch = _leading(x, factors)
    n, loops = len(batch), _leading(factors[0], factors)
    padded = (*[1] * (n - len(loops)), *loops)
    over, fold = [d for d in range(n) if padded[d] != 1], [d for d in range(n) if padded[d] == 1]
    x = x.reshape(*[1] * (n + 2 - x.dim()), *x.shape)
    x = x.expand(*(batch[d] if d in over else x.shape[d] for d in range(n)), *x.shape[-2:])
    order = [*over, *fold]
    stacked = x.permute(*order, n, n + 1)
    count, rows = times(batch[d] for d in over), times(batch[d] for d in fold) * x.shape[-2]
    mats = [f.expand(*loops, *f.shape[-2:]).reshape(count, *f.shape[-2:]) for f in factors]
    y = product(stacked.reshape(count, rows, x.shape[-1]), mats)
    y = y.reshape(*stacked.shape[:-1], y.shape[-1])
    back = sorted(range(n), key=lambda d: order[d])
    return y.permute(*back, n, n + 1)


def _epilogue(z: Tensor, alpha: Any, beta: Any, y: Tensor | None) -> Tensor:
    """Alpha · z + beta · y in the dtype of z."""
    if isinstance(alpha, Tensor) or alpha != 1:
        z = z * alpha  # a scalar tensor changes neither dtype nor device
    if y is None:
        return z
    shape = checks.broadcast("y", y.shape, "the product", z.shape)
    if isinstance(beta, Tensor):
        scaled: Tensor = z + beta * y
        return scaled
    if beta == 0 and y.requires_grad:  # a gradient of zeros, as torch.addmm has, and not none; y may hold NaN
        return torch.where(torch.zeros((), dtype=torch.bool, device=z.device), y, z)
    if beta == 0:
        return z if tuple(z.shape) == shape else z.expand(shape).clone()
    return torch.add(z, y, alpha=beta)


def _direct(out: Tensor, rows: Tensor, factors: list[Tensor], vector: bool, kmm: bool) -> bool:
    """Let the kernel write to `out` when its layout allows; says whether it did."""
    if is_recorded((rows, *factors, out)) or any(f.dim() > 2 for f in factors):
        return False
    target = out.unsqueeze(0) if vector else out.mT if kmm else out
    columns = times(f.shape[-1] for f in factors)
    fits = tuple(target.shape) == (*rows.shape[:-1], columns) and (out.dtype, out.device) == (rows.dtype, rows.device)
    if not fits or not target.is_contiguous() or out.is_neg() or any(_overlap(out, t) for t in (rows, *factors)):
        return False
    run(rows.reshape(times(rows.shape[:-1]), rows.shape[-1]), factors, target.view(-1, columns))
    return True


def _overlap(a: Tensor, b: Tensor) -> bool:
    """Whether the two may share memory: whether the spans from their first to their last elements meet."""
    (a0, a1), (b0, b1) = _span(a), _span(b)
    return a0 < b1 and b0 < a1


def _span(t: Tensor) -> tuple[int, int]:
    if t.numel() == 0:
        return 0, 0
    last = sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True))
    return t.data_ptr(), t.data_ptr() + (last + 1) * t.element_size()
