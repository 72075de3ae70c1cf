"""`ks_matmul` and the layers with complex weights: values, gradients (conjugated right), torch.compile, state_dict."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from kronsched.errors import ArgumentError, UnsupportedError
from kronsched.nn import ButterflyLinear, KSLinear, MonarchLinear, ks_matmul
from kronsched.runtime.load import load
from kronsched.workloads.ks import KSMatmul
from tests.nn.ks_cases import CHAIN, LAYOUTS, ONE, first

C64, C128 = torch.complex64, torch.complex128


def draw(*shape: int, dtype: torch.dtype = C64, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype).requires_grad_()


def of(layout: str, *shape: int) -> tuple[int, ...]:
    return shape if layout == "batch_first" else shape[::-1]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_values_and_gradients_are_those_of_the_dense_product(layout: str) -> None:
    x, bias, residual = draw(*of(layout, 5, 4)), draw(8, seed=1), draw(*of(layout, 5, 8), seed=2)
    ws = [draw(*p, seed=3 + i) for i, p in enumerate(CHAIN)]
    y = ks_matmul(x, ws, layout=layout, bias=bias, residual=residual)
    wanted = first(x, layout) @ _dense(ws).T + bias + first(residual, layout)
    torch.testing.assert_close(first(y, layout), wanted)
    seed = draw(*y.shape, seed=9).detach()
    leaves = (x, *ws, bias, residual)
    for got, want in zip(
        torch.autograd.grad(y, leaves, seed), torch.autograd.grad(wanted, leaves, first(seed, layout)), strict=True
    ):
        torch.testing.assert_close(got, want)


def _dense(ws: list[Tensor]) -> Tensor:
    """The matrix of a chain, differentiable."""
    k = torch.eye(ws[0].shape[0] * ws[0].shape[2] * ws[0].shape[3], dtype=ws[0].dtype)
    for w in ws:
        a, _, c, d = w.shape
        k = torch.einsum("iklm,ijkl->ijlm", k.reshape(a, c, d, -1), w).flatten(0, 2)
    return k


def test_gradients_of_complex128_check() -> None:
    x, w, bias = draw(2, 4, dtype=C128), draw(*ONE[0], dtype=C128, seed=1), draw(12, dtype=C128, seed=2)
    assert torch.autograd.gradcheck(lambda x, w, b: ks_matmul(x, w, bias=b), (x, w, bias), fast_mode=True)
    assert torch.autograd.gradcheck(lambda x, w: ks_matmul(x.conj(), w), (x, w), check_forward_ad=True, fast_mode=True)
    assert torch.autograd.gradgradcheck(ks_matmul, (x, w), fast_mode=True)


@pytest.mark.parametrize(
    "make",
    [
        lambda: KSLinear(CHAIN, dtype=C64, layout="batch_last"),
        lambda: MonarchLinear(7, 5, 2, dtype=C64),
        lambda: ButterflyLinear(4, dtype=C64),
    ],
    ids=["KSLinear", "MonarchLinear", "ButterflyLinear"],
)
def test_layers(make: Callable[[], Any]) -> None:
    layer, other = make(), make()
    x = draw(*of(layer.layout, 5, layer.in_features)).detach()
    y = first(layer(x), layer.layout)
    torch.testing.assert_close(y, first(x, layer.layout) @ layer.dense_weight().T + layer.bias)
    other.load_state_dict(layer.state_dict())
    assert torch.equal(first(other(x), layer.layout), y)


def test_from_dense_gives_a_complex_product_back() -> None:
    matrix = MonarchLinear(8, 8, 2, bias=False, dtype=C64).dense_weight().detach()
    torch.testing.assert_close(MonarchLinear.from_dense(matrix, 2).dense_weight().detach(), matrix)


def test_weights_start_with_the_variance_of_real_ones() -> None:
    for dtype in (C64, torch.float32):
        torch.manual_seed(0)
        w = KSLinear((4, 64, 64, 4), dtype=dtype).weights[0]
        assert float(w.detach().abs().square().mean()) == pytest.approx(1 / (3 * 64), rel=0.03)


def test_a_compiled_layer_is_one_graph_with_the_same_gradients() -> None:
    layer, x = KSLinear(ONE, dtype=C64), draw(5, 4)
    grads = []
    for call in (layer, torch.compile(layer, fullgraph=True, backend="aot_eager")):
        layer.zero_grad()
        call(x).abs().sum().backward()
        grads.append([p.grad.clone() for p in layer.parameters() if p.grad is not None])
    torch.testing.assert_close(grads[1], grads[0])


def test_a_conjugated_view_is_not_read_as_it_lies() -> None:
    w = KSMatmul(5, ONE[0], "complex64")
    module = load(w, device="cpu")
    x, weight = w.make_inputs(0)
    assert torch.equal(module(x.conj(), weight.conj()), module(x, weight).conj().resolve_conj())
    out = torch.empty_like(module(x, weight))
    with pytest.raises(ArgumentError, match="out"):
        module(x, weight, out=out.conj())
    assert (module(x.numpy(), weight.numpy()) == module(x, weight).numpy()).all()


def test_activations_are_refused_in_one_line() -> None:
    with pytest.raises(UnsupportedError, match="activation='relu' is not defined for complex64"):
        KSLinear(ONE, dtype=C64, activation="relu")
    with pytest.raises(UnsupportedError, match="activation='gelu' is not defined for complex128"):
        ks_matmul(draw(5, 4, dtype=C128), draw(*ONE[0], dtype=C128), activation="gelu")
