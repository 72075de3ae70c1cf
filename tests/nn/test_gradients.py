"""Derivatives of `kron_matmul` in every argument: first and second order, forwards, batched, and under torch.func."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from kronsched import KronMatmul, kron_matmul, load
from tests.nn.nn_cases import dense, factors, rows


def leaves(*tensors: Tensor) -> list[Tensor]:
    return [t.clone().requires_grad_() for t in tensors]


def scalar(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


def everything(x: Tensor, y: Tensor, alpha: Tensor, beta: Tensor, *fs: Tensor) -> Tensor:
    return kron_matmul(x, fs, alpha=alpha, beta=beta, y=y)


def on_the_left(x: Tensor, *fs: Tensor) -> Tensor:
    return kron_matmul(x, fs, form="kmm", op_x="t", alpha=2.0)


CASES: dict[str, tuple[Callable[..., Tensor], list[Tensor]]] = {
    "all arguments": (everything, [rows(3, 12), rows(6), scalar(1.5), scalar(-0.5), *factors()]),
    "one factor": (everything, [rows(2, 3), rows(2, 4), scalar(1.5), scalar(0.5), rows(3, 4)]),
    "kmm, transposed": (on_the_left, [rows(3, 6), *factors()]),
    "batches": (everything, [rows(2, 1, 2, 3), rows(1, 4), scalar(1.5), scalar(0.5), rows(3, 3, 2), rows(2, 1, 1, 2)]),
    "vector": (everything, [rows(6), rows(2), scalar(1.0), scalar(1.0), rows(3, 1), rows(2, 2)]),
    "no rows": (everything, [rows(0, 6), rows(2), scalar(1.0), scalar(1.0), rows(3, 1), rows(2, 2)]),
}


@pytest.mark.parametrize("case", CASES)
def test_gradcheck_to_second_order(case: str) -> None:
    function, inputs = CASES[case]
    args = tuple(leaves(*inputs))
    assert gradcheck(function, args, check_forward_ad=True, check_batched_grad=True, fast_mode=True)
    assert gradgradcheck(function, args, fast_mode=True)


def test_gradcheck_in_full_for_all_arguments() -> None:
    function, inputs = CASES["all arguments"]
    assert gradcheck(function, tuple(leaves(*inputs)))


@pytest.mark.parametrize("wanted", [0, 1, 2, 3])
def test_only_what_is_asked_for(wanted: int) -> None:
    inputs = [rows(3, 12), *factors()]
    inputs[wanted].requires_grad_()
    x, *fs = inputs
    kron_matmul(x, fs, alpha=3.0).sum().backward()
    got = inputs[wanted].grad
    (want,) = torch.autograd.grad(3 * (x @ dense(fs)).sum(), inputs[wanted])
    torch.testing.assert_close(got, want)
    assert all(t.grad is None for i, t in enumerate(inputs) if i != wanted)


def test_a_gradient_through_python_numbers_alpha_and_beta() -> None:
    x, y, *fs = leaves(rows(3, 12), rows(3, 6), *factors())
    got = torch.autograd.grad(kron_matmul(x, fs, alpha=2.0, beta=-3.0, y=y).sum(), [x, y, *fs])
    want = torch.autograd.grad((2 * x @ dense(fs) - 3 * y).sum(), [x, y, *fs])
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


def test_a_y_that_is_not_read_has_a_gradient_of_zeros() -> None:
    (y,) = leaves(torch.full((6,), torch.nan, dtype=torch.float64))
    z = kron_matmul(rows(3, 12), factors(), y=y)
    torch.testing.assert_close(z, rows(3, 12) @ dense(factors()))
    z.sum().backward()
    assert torch.equal(y.grad, torch.zeros_like(y))


def test_expanded_leaves_get_a_gradient_each() -> None:
    x = rows(3, 2, 12)
    fs = [f.expand(3, *f.shape).detach().requires_grad_() for f in factors()]
    got = torch.autograd.grad(kron_matmul(x, fs).square().sum(), fs)
    want = torch.autograd.grad((x @ dense(fs)).square().sum(), fs)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


def test_half_precision_gradients() -> None:
    x, *fs = leaves(rows(5, 12, dtype=torch.bfloat16), *factors(dtype=torch.bfloat16))
    got = torch.autograd.grad(kron_matmul(x, fs).float().sum(), [x, *fs])
    exact = leaves(*(t.double() for t in (x.detach(), *(f.detach() for f in fs))))
    want = torch.autograd.grad((exact[0] @ dense(exact[1:])).sum(), exact)
    for a, b in zip(got, want, strict=True):
        assert a.dtype == torch.bfloat16
        torch.testing.assert_close(a.double(), b, rtol=5e-2, atol=2e-1)


IN_DIMS: list[tuple[Any, ...]] = [(0, None, None, None), (1, None, None, None), (None, 0, None, None), (0, 0, 2, 1)]


@pytest.mark.parametrize("in_dims", IN_DIMS, ids=str)
def test_vmap(in_dims: tuple[int | None, ...]) -> None:
    shapes = [(5, 12), (2, 3), (3, 1), (2, 2)]
    stacked = [
        rows(*shape, seed=i) if dim is None else rows(4, *shape, seed=i).movedim(0, dim)
        for i, (shape, dim) in enumerate(zip(shapes, in_dims, strict=True))
    ]

    def each(x: Tensor, *fs: Tensor) -> Tensor:
        return kron_matmul(x, fs, alpha=2.0)

    got = torch.func.vmap(each, in_dims=in_dims)(*stacked)
    want = torch.stack(
        [each(*(t if dim is None else t.select(dim, n) for t, dim in zip(stacked, in_dims, strict=True))) for n in range(4)]
    )
    torch.testing.assert_close(got, want)


def test_per_sample_gradients_and_jacobians() -> None:
    fs, x = factors(), rows(4, 12)

    def loss(fs: tuple[Tensor, ...], x: Tensor) -> Tensor:
        return kron_matmul(x, fs).square().sum()

    got = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(tuple(fs), x)
    for n in range(4):
        for a, b in zip(got, torch.func.grad(loss)(tuple(fs), x[n]), strict=True):
            torch.testing.assert_close(a[n], b)
    by_rows = torch.func.jacrev(lambda f: kron_matmul(x, [f, *fs[1:]]))(fs[0])
    torch.testing.assert_close(torch.func.jacfwd(lambda f: kron_matmul(x, [f, *fs[1:]]))(fs[0]), by_rows)


def test_a_tuned_module_differentiates_to_second_order() -> None:
    module = load(KronMatmul(m=3, factors=[(3, 1), (2, 2)], dtype="float64"), device="cpu")
    args = tuple(leaves(rows(3, 6), rows(3, 1), rows(2, 2)))
    assert gradcheck(module, args, fast_mode=True)
    assert gradgradcheck(module, args, fast_mode=True)
    compiled = torch.compile(lambda *a: module(*a).square().sum(), fullgraph=True, backend="aot_eager")
    for a, b in zip(
        torch.autograd.grad(compiled(*args), args), torch.autograd.grad(module(*args).square().sum(), args), strict=True
    ):
        torch.testing.assert_close(a, b)
