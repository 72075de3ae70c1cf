"""`ks_matmul`: numbers in both layouts for any batch, buckets, derivatives of all kinds, and what is refused."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from kronsched import KSMatmul, load
from kronsched.errors import ArgumentError, ArgumentTypeError
from kronsched.nn import ks_dynamic, ks_matmul
from tests.nn.ks_cases import CHAIN, LAYOUTS, ONE, data, first, weights, whole

close = torch.testing.assert_close


@pytest.fixture
def fresh() -> Iterator[None]:
    ks_dynamic.clear()
    yield
    ks_dynamic.clear()


def leaves(*tensors: Tensor) -> list[Tensor]:
    return [t.clone().requires_grad_() for t in tensors]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_batch_from_few_kernels(layout: str, fresh: None) -> None:
    ws = weights()
    for n in (0, 1, 2, 3, 5, 7, 33):
        x = data(n, 4, layout)
        y = ks_matmul(x, ws, CHAIN, layout)
        assert y.is_contiguous()
        close(first(y, layout), first(x, layout) @ whole(ws).T)
    kernels = ks_dynamic.kernels_for(tuple(CHAIN), layout, "float64", "cpu")
    wanted = {1, 2, 4, 32} if layout == "batch_first" else {1, 2, 4, 8, 40}
    assert set(kernels.modules) <= wanted


@pytest.mark.parametrize("layout", LAYOUTS)
def test_batches_of_any_dimensions_and_strides(layout: str) -> None:
    ws, matrix = weights(ONE), whole(weights(ONE))
    x = data(8, 4, "batch_first").reshape(2, 2, 2, 4)
    want = x @ matrix.T
    if layout == "batch_last":  # views, not contiguous
        x, want = x.movedim(-1, 0), want.movedim(-1, 0)
    close(ks_matmul(x, ws[0], layout=layout), want)
    vector = data(1, 4, "batch_first")[0]
    close(ks_matmul(vector, ws, ONE[0], layout), matrix @ vector)
    assert ks_matmul(data(0, 4, layout).reshape((0, 3, 4) if layout == "batch_first" else (4, 0, 3)), ws, None, layout).shape == (
        (0, 3, 12) if layout == "batch_first" else (12, 0, 3)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_other_dtypes(dtype: torch.dtype) -> None:
    ws = weights(ONE, dtype)
    x = data(2, 4, "batch_first", dtype=dtype)
    y = ks_matmul(x, ws)
    assert y.dtype == dtype
    close(y.double(), x.double() @ whole([w.double() for w in ws]).T, rtol=1e-2, atol=5e-2)


def test_column_plans_cover_every_column_with_few_buckets() -> None:
    buckets = {ks_dynamic.column_bucket(n) for n in range(1, 4097)}
    assert len(buckets) == 6 + 4 * 7
    for n in (1, 31, 32, 33, 100, 1000, 4096):
        bucket = ks_dynamic.column_bucket(n)
        assert n <= bucket < 2 * n if n <= 32 else n <= bucket <= 1.25 * n
    assert ks_dynamic.column_plan(40, 16) == [(0, 16, 16), (16, 16, 16), (32, 8, 8)]
    assert ks_dynamic.column_plan(0) == []


def test_a_batch_cut_into_several_calls(monkeypatch: pytest.MonkeyPatch, fresh: None) -> None:
    kernels = ks_dynamic.kernels_for(tuple(ONE), "batch_last", "float64", "cpu")
    monkeypatch.setattr(kernels, "_cap", 4)
    x, ws = data(11, 4, "batch_last"), weights(ONE)
    close(kernels(x, ws), whole(ws) @ x)
    assert set(kernels.modules) == {4}


# -- derivatives ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradcheck_to_second_order(layout: str) -> None:
    x, *ws = leaves(data(3, 4, layout), *weights())

    def all_of(x: Tensor, *ws: Tensor) -> Tensor:
        return ks_matmul(x, ws, CHAIN, layout)

    assert gradcheck(all_of, (x, *ws), check_forward_ad=True, check_batched_grad=True, fast_mode=True)
    assert gradgradcheck(all_of, (x, *ws), fast_mode=True)
    frozen = [w.detach() for w in ws]  # then a chain is one call, and its gradient too

    def of_x(x: Tensor) -> Tensor:
        return ks_matmul(x, frozen, CHAIN, layout)

    assert gradcheck(of_x, (x,), check_forward_ad=True, check_batched_grad=True)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("wanted", [0, 1, 2])
def test_only_what_is_asked_for(layout: str, wanted: int) -> None:
    """The chain's own rule, as under torch.func, against autograd through the dense product."""
    from kronsched.nn.ks_autograd import gradient

    inputs = [data(3, 4, layout), *weights()]
    grad = data(3, 8, layout, seed=3)
    got = gradient(inputs[0], inputs[1:], grad, [i == wanted for i in range(3)], layout)
    ready = leaves(*inputs)
    y = first(ready[0], layout) @ whole(ready[1:]).T
    want = torch.autograd.grad(y, ready, first(grad, layout))
    assert [g is not None for g in got] == [i == wanted for i in range(3)]
    close(got[wanted], want[wanted])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("in_dims", [(1, None, None), (None, 0, None), (0, 2, 0)], ids=str)
def test_vmap(layout: str, in_dims: tuple[int | None, ...]) -> None:
    plain = [data(3, 4, layout), *weights()]
    stacked = [t if dim is None else torch.stack([t, 2 * t, t - 1], dim) for t, dim in zip(plain, in_dims, strict=True)]

    def call(x: Tensor, *ws: Tensor) -> Tensor:
        return ks_matmul(x, ws, None, layout)

    got = torch.func.vmap(call, in_dims=in_dims)(*stacked)
    for n in range(3):
        x, *ws = (t if dim is None else t.select(dim, n) for t, dim in zip(stacked, in_dims, strict=True))
        close(first(got[n], layout), first(x, layout) @ whole(ws).T)


def test_per_sample_gradients() -> None:
    ws, x = weights(), data(3, 4, "batch_first")

    def loss(ws: tuple[Tensor, ...], x: Tensor) -> Tensor:
        return ks_matmul(x, ws).square().sum()

    got = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(tuple(ws), x)
    ready = leaves(*ws)
    want = torch.autograd.grad((x[1] @ whole(ready).T).square().sum(), ready)
    for a, b in zip(got, want, strict=True):
        close(a[1], b)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_tuned_module_differentiates(layout: str) -> None:
    module = load(KSMatmul(batch=3, pattern=CHAIN, dtype="float64", layout=layout), device="cpu")
    args = tuple(leaves(data(3, 4, layout), *weights()))
    assert gradcheck(module, args, fast_mode=True)
    assert gradgradcheck(module, args, fast_mode=True)


def test_half_precision_gradients() -> None:
    x, w = leaves(data(5, 4, "batch_first", dtype=torch.bfloat16), *weights(ONE, torch.bfloat16))
    got = torch.autograd.grad(ks_matmul(x, w).float().sum(), [x, w])
    exact = leaves(x.detach().double(), w.detach().double())
    want = torch.autograd.grad((exact[0] @ whole(exact[1:]).T).sum(), exact)
    for a, b in zip(got, want, strict=True):
        assert a.dtype == torch.bfloat16
        close(a.double(), b, rtol=2e-2, atol=5e-2)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_opcheck(layout: str) -> None:
    from kronsched.nn import ks_ops  # noqa: F401  registers it

    x, *ws = leaves(data(3, 4, layout), *weights())
    torch.library.opcheck(torch.ops.kronsched.ks, (x, ws, layout))


# -- refused ----------------------------------------------------------------------------------------------

W: Any = torch.ones(2, 3, 1, 2)
WRONG: list[tuple[Any, type[Exception], str]] = [
    (lambda: ks_matmul(torch.ones(5, 3), W), ArgumentError, "x has shape (5, 3): 4 are needed in the last dimension"),
    (lambda: ks_matmul(torch.ones(5, 4), W, None, "batch_last"), ArgumentError, "4 are needed in the first dimension"),
    (lambda: ks_matmul(torch.ones(5, 4), W, layout="last"), ArgumentError, "layout='last' is not allowed: choose one of batch_"),
    (lambda: ks_matmul(torch.ones(5, 4), W[0]), ArgumentError, "weights[0] has shape (3, 1, 2): (a, b, c, d), each ≥ 1"),
    (
        lambda: ks_matmul(torch.ones(5, 4), [W, W]),
        ArgumentError,
        "it takes a·c·d = 4 features, the one before it gives a·b·d = 12",
    ),
    (lambda: ks_matmul(torch.ones(5, 4), []), ArgumentError, "weights: 0 given, 1 to 32 are allowed"),
    (lambda: ks_matmul(torch.ones(5, 4), "w"), ArgumentTypeError, "weights is of type str"),
    (lambda: ks_matmul(torch.ones(5, 4), [3]), ArgumentTypeError, "weights[0] is of type int: a torch.Tensor is needed"),
    (
        lambda: ks_matmul(torch.ones(5, 4), W, (2, 3, 1, 1)),
        ArgumentError,
        "patterns=(2, 3, 1, 1) is not allowed: the weights have",
    ),
    (lambda: ks_matmul(torch.ones(5, 4), W, 3), ArgumentTypeError, "patterns=3 must be (a, b, c, d)"),  # type: ignore[arg-type]
    (lambda: ks_matmul(torch.ones(5, 4), W.double()), ArgumentTypeError, "weights[0] has dtype float64, float32 is needed"),
    (lambda: ks_matmul(torch.ones(5, 4, dtype=torch.int8), W), ArgumentTypeError, "x has dtype int8: choose one of"),
    (lambda: ks_matmul([1.0], W), ArgumentTypeError, "x is of type list: a torch.Tensor is needed"),  # type: ignore[arg-type]
]


@pytest.mark.parametrize(("call", "error", "says"), WRONG, ids=[says for _, _, says in WRONG])
def test_says_what_is_wrong(call: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=re.escape(says)):
        call()
