"""Checks of the arguments of `kron_matmul`. Every error is one line that names the argument, its value and what is allowed.

Everything here can be traced by torch.compile.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from kronsched.errors import ArgumentError, ArgumentTypeError, choose
from kronsched.workloads.kron import DTYPE_NAMES, MAX_FACTORS

_DTYPES = tuple(getattr(torch, name) for name in DTYPE_NAMES)


def times(sizes: Iterable[int]) -> int:
    """The product of sizes. math.prod does the same, but torch.compile cannot trace it with symbolic sizes."""
    result = 1
    for size in sizes:
        result = result * size
    return result


def check_options(form: Any, op_x: Any, op_f: Any) -> None:
    """The three closed choices."""
    if form not in ("mkm", "kmm"):
        raise choose("form", form, ("mkm", "kmm"))
    if op_x not in ("n", "t"):
        raise choose("op_x", op_x, ("n", "t"))
    if op_f not in ("n", "t"):
        raise choose("op_f", op_f, ("n", "t"))


def check_factors(factors: Any) -> list[Tensor]:
    """The factors as a list: 1 to 64 tensors of at least two dimensions."""
    if not isinstance(factors, list | tuple | torch.nn.ParameterList) and (
        isinstance(factors, Tensor) or not isinstance(factors, Sequence)
    ):
        raise ArgumentTypeError(f"factors is of type {type(factors).__name__}: a sequence of tensors is needed")
    listed = list(factors)
    if not 1 <= len(listed) <= MAX_FACTORS:
        raise ArgumentError(f"factors: {len(listed)} given, 1 to {MAX_FACTORS} are allowed")
    for i, f in enumerate(listed):
        check_tensor(f"factors[{i}]", f)
        if f.dim() < 2 or 0 in f.shape[-2:]:
            raise ArgumentError(f"factors[{i}] has shape {tuple(f.shape)}: (…, P, Q) with P and Q ≥ 1 is needed")
    return listed


def check_tensor(name: str, value: Any) -> None:
    """It is a tensor, of any kind."""
    if not isinstance(value, Tensor):
        raise ArgumentTypeError(f"{name} is of type {type(value).__name__}: a torch.Tensor is needed")


def check_x(x: Any, dtypes: Sequence[torch.dtype] = _DTYPES) -> None:
    """A tensor of at least one dimension, of a dtype that has kernels."""
    check_tensor("x", x)
    if x.dim() == 0:
        raise ArgumentError("x has shape (): a vector, a matrix or a batch of matrices is needed")
    if x.device.type not in ("cpu", "cuda", "meta"):
        raise ArgumentTypeError(f"x is on {x.device}: the CPU or a CUDA device is needed")
    if x.dtype not in dtypes:
        names = ", ".join(str(one).removeprefix("torch.") for one in dtypes)
        raise ArgumentTypeError(f"x has dtype {name_of(x)}: choose one of {names}")


def check_same(name: str, tensor: Tensor, x: Tensor) -> None:
    """One dtype, device and a strided layout for all."""
    if tensor.dtype != x.dtype:
        raise ArgumentTypeError(f"{name} has dtype {name_of(tensor)}, {name_of(x)} is needed, as x has")
    if tensor.device != x.device:
        raise ArgumentTypeError(f"{name} is on {tensor.device}, {x.device} is needed, as x is")
    if tensor.layout != torch.strided:
        raise ArgumentTypeError(f"{name} has layout {tensor.layout}, torch.strided is needed")


def check_inner(rows: Tensor, factors: Sequence[Tensor], x: Tensor, kmm: bool, op_x: str) -> None:
    """The length that is summed over: `rows` and `factors` are those of the form x (F1 ⊗ …)."""
    k = times(f.shape[-2] for f in factors)
    if rows.shape[-1] != k:
        side = "" if x.dim() == 1 else "rows of op(x)" if kmm else "columns of op(x)"
        what = f"{rows.shape[-1]} {side}".strip()
        raise ArgumentError(
            f"x has shape {tuple(x.shape)}, with op_x={op_x!r} {what}: {k} are needed, the product of the factors' "
            f"{'columns' if kmm else 'rows'} {' · '.join(str(int(f.shape[-2])) for f in factors)}"
        )


def check_scale(name: str, value: Any, x: Tensor) -> None:
    """Alpha or beta is a real number, or a tensor of one element without dimensions."""
    if isinstance(value, Tensor):
        if value.dim() != 0 or value.is_complex():
            raise ArgumentError(f"{name} has shape {tuple(value.shape)} and dtype {name_of(value)}: a real scalar is needed")
        if value.device != x.device and value.device.type != "cpu":
            raise ArgumentTypeError(f"{name} is on {value.device}: the CPU or {x.device}, as x, is needed")
    elif isinstance(value, bool) or not isinstance(value, int | float | torch.SymInt | torch.SymFloat):
        raise ArgumentTypeError(f"{name}={value!r} is not allowed: a real number or a scalar tensor is needed")


def check_y(y: Any, beta: Any, x: Tensor) -> None:
    """Y is there when beta needs it."""
    if y is None:
        if isinstance(beta, Tensor) or beta != 0:
            raise ArgumentError(f"y=None is not allowed with beta={beta}: a tensor is needed")
    else:
        check_tensor("y", y)
        check_same("y", y, x)


def broadcast(name: str, shape: Sequence[int], other: str, other_shape: Sequence[int]) -> tuple[int, ...]:
    """The common shape of two, as torch broadcasts."""
    a, b = tuple(shape), tuple(other_shape)
    n = max(len(a), len(b))
    common = []
    for i, k in zip((1,) * (n - len(a)) + a, (1,) * (n - len(b)) + b, strict=True):
        if i == 1:  # first, and k not looked at: a comparison is a guard where the size is symbolic
            common.append(k)
        elif k == 1 or i == k:
            common.append(i)
        else:
            raise ArgumentError(f"{name} has the shape {a}, which does not broadcast with {b} of {other}")
    return tuple(common)


def check_untracked(out: Any, tracked: bool) -> None:
    """`out` is a tensor, and nothing would be recorded in it."""
    check_tensor("out", out)
    if tracked or (out.requires_grad and torch.is_grad_enabled()):
        raise ArgumentError("out= is not allowed where gradients are recorded: leave it out or use torch.no_grad()")


def check_out(out: Tensor, shape: Sequence[int], x: Tensor) -> None:
    """`out` has the result's shape, dtype and device, and its elements are all apart."""
    if tuple(out.shape) != tuple(shape):
        raise ArgumentError(f"out has shape {tuple(out.shape)}, {tuple(shape)} is needed")
    check_same("out", out, x)
    if any(size > 1 and stride == 0 for size, stride in zip(out.shape, out.stride(), strict=True)):
        raise ArgumentError(f"out has strides {tuple(out.stride())}: elements that share memory cannot be written")


def name_of(tensor: Tensor) -> str:
    """The dtype's name."""
    return str(tensor.dtype).removeprefix("torch.")
