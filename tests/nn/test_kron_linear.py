"""`KronLinear` against nn.Linear, `nearest_kron`, and both under torch.compile, autocast, state dicts and copies."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kronsched.errors import ArgumentError, ArgumentTypeError
from kronsched.nn import KronLinear, nearest_kron
from tests.nn.nn_cases import dense, factors, rows

close = torch.testing.assert_close


def linear_of(layer: KronLinear) -> nn.Linear:
    linear = nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None, dtype=layer.factors[0].dtype)
    with torch.no_grad():
        linear.weight.copy_(layer.dense_weight())
        if layer.bias is not None:
            linear.bias.copy_(layer.bias)
    return linear


@pytest.fixture
def layer() -> KronLinear:
    torch.manual_seed(0)
    return KronLinear((2, 3), (3, 2), dtype=torch.float32)


@pytest.mark.parametrize("bias", [True, False])
def test_is_the_linear_layer_it_stands_for(bias: bool) -> None:
    layer = KronLinear([2, 3], [3, 2], bias=bias)
    linear, x = linear_of(layer), rows(2, 4, 6, dtype=torch.float32)
    close(layer(x), linear(x))
    close(layer(x[0, 0]), linear(x[0, 0]))
    layer(x).square().sum().backward()
    linear(x).square().sum().backward()
    (by_chain,) = torch.autograd.grad(layer.dense_weight(), layer.factors[0], linear.weight.grad)
    close(layer.factors[0].grad, by_chain)
    if bias:
        close(layer.bias.grad, linear.bias.grad)


@pytest.mark.parametrize("shapes", [((256,), (256,)), ((16, 16), (32, 32)), ((8, 8, 8), (8, 8, 8))])
def test_starts_with_the_variance_of_nn_linear(shapes: tuple[Any, Any]) -> None:
    torch.manual_seed(1)
    draws = [KronLinear(*shapes) for _ in range(60)]
    variance = torch.stack([layer.dense_weight().detach().square().mean() for layer in draws]).mean()
    close(float(variance), 1 / (3 * draws[0].in_features), rtol=0.15, atol=0)
    bound = draws[0].in_features ** -0.5
    assert draws[0].bias is not None and 0.8 * bound < draws[0].bias.abs().max() <= bound


def test_state_dict_and_copies(layer: KronLinear) -> None:
    assert list(layer.state_dict()) == ["bias", "factors.0", "factors.1"]
    twin = KronLinear((2, 3), (3, 2))
    twin.load_state_dict(layer.state_dict())
    x = rows(4, 6, dtype=torch.float32)
    close(twin(x), layer(x))
    close(copy.deepcopy(layer)(x), layer(x))
    assert repr(layer).startswith("KronLinear(\n  in_factors=(2, 3), out_factors=(3, 2), bias=True\n")
    assert KronLinear((2, 3), (3, 2), device="meta")(x.to("meta")).shape == (4, 6)
    assert KronLinear((2, 3), (3, 2)).double()(x.double()).dtype == torch.float64


@pytest.mark.parametrize("train", [False, True])
def test_compiles_to_one_graph_for_every_batch_size(layer: KronLinear, train: bool) -> None:
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        from torch._dynamo.backends.common import aot_autograd
        from torch._functorch.aot_autograd import make_boxed_func

        graphs.append(graph)
        return aot_autograd(fw_compiler=lambda g, _: make_boxed_func(g.forward))(graph, inputs)

    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=backend)
    for m in (4, 7, 12):
        x = rows(m, 6, dtype=torch.float32).requires_grad_(train)
        with torch.set_grad_enabled(train):
            y = compiled(x)
            close(y, layer(x))
        if train:
            (got,) = torch.autograd.grad(y.square().sum(), layer.factors[0])
            (want,) = torch.autograd.grad(layer(x).square().sum(), layer.factors[0])
            close(got, want)
    assert len([g for g in graphs if "kronsched.kron" in g.code]) == 1


def test_exports_with_any_batch_size(layer: KronLinear) -> None:
    program = torch.export.export(layer, (rows(4, 6, dtype=torch.float32),), dynamic_shapes=({0: torch.export.Dim("m")},))
    x = rows(9, 6, dtype=torch.float32)
    close(program.module()(x), layer(x))


@pytest.mark.slow
def test_compiles_with_inductor(layer: KronLinear) -> None:
    x = rows(4, 6, dtype=torch.float32)
    close(torch.compile(layer, fullgraph=True)(x).relu(), layer(x).relu())


def test_autocast_as_nn_linear(layer: KronLinear) -> None:
    linear, x = linear_of(layer), rows(4, 6, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        y, want = layer(x), linear(x)
        assert y.dtype == want.dtype == torch.bfloat16
        close(y, want, rtol=5e-2, atol=5e-2)
        y.float().square().sum().backward()
    assert layer.factors[0].grad is not None and layer.factors[0].grad.dtype == torch.float32
    layer(x).square().sum().backward()
    with torch.autocast("cpu", torch.bfloat16):
        double = copy.deepcopy(layer).double()
        assert double(x.double()).dtype == torch.float64


def test_opcheck() -> None:
    from kronsched.nn import ops  # noqa: F401  registers it

    x, fs = rows(2, 3, 6), factors([(2, 3), (3, 2)], batch=(2,))
    torch.library.opcheck(torch.ops.kronsched.kron, (x.requires_grad_(), [f.requires_grad_() for f in fs]))


@pytest.mark.parametrize("shapes", [[(3, 4)], [(2, 3), (4, 2)], [(2, 3), (3, 1), (2, 2)], [(2, 2)] * 4])
def test_an_exact_kronecker_product_is_found(shapes: list[tuple[int, int]]) -> None:
    matrix = dense(factors(shapes))
    found = nearest_kron(matrix, shapes)
    assert [tuple(f.shape) for f in found] == shapes
    close(dense(found), matrix)
    norms = torch.stack([f.norm() for f in found])
    close(norms, norms[:1].expand_as(norms))
    close(dense(nearest_kron(torch.zeros_like(matrix), shapes)), torch.zeros_like(matrix))


def distance(matrix: Tensor, fs: list[Tensor]) -> float:
    return float((dense(fs) - matrix).norm())


def test_the_nearest_one_is_nearer_than_its_neighbours() -> None:
    matrix = rows(8, 8, seed=5)
    for shapes in ([(2, 4), (4, 2)], [(2, 2)] * 3):
        found = nearest_kron(matrix, shapes)
        best = distance(matrix, found)
        for seed in range(20):
            moved = [f + 1e-3 * rows(*f.shape, seed=seed + i) for i, f in enumerate(found)]
            assert distance(matrix, moved) >= best - 1e-9
    split = matrix.reshape(2, 4, 4, 2).permute(0, 2, 1, 3).reshape(8, 8)  # what two factors can explain is a singular value
    want = float((torch.linalg.svdvals(split)[1:] ** 2).sum().sqrt())
    close(distance(matrix, nearest_kron(matrix, [(2, 4), (4, 2)])), want)


def test_from_dense() -> None:
    linear = nn.Linear(6, 6)
    exact = linear_of(KronLinear((2, 3), (3, 2)))
    x = rows(4, 6, dtype=torch.float32)
    layer = KronLinear.from_dense(exact.weight, (2, 3), (3, 2), bias=exact.bias)
    close(layer(x), exact(x))
    assert KronLinear.from_dense(linear.weight, (2, 3), (3, 2)).bias is None
    assert isinstance(layer.factors[0], nn.Parameter) and layer.factors[0].requires_grad


WRONG: list[tuple[Any, type[Exception], str]] = [
    (lambda: KronLinear((2, 3), (3,)), ArgumentError, "out_factors: 1 sizes given, 2 are needed, as many as in_factors"),
    (lambda: KronLinear((2, 0), (3, 2)), ArgumentError, "in_factors[1]=0 is not allowed: an int ≥ 1 is needed"),
    (lambda: KronLinear((2, 3), (3, 2.0)), ArgumentTypeError, "out_factors[1]=2.0 must be an int ≥ 1"),
    (lambda: KronLinear(6, (3, 2)), ArgumentTypeError, "in_factors=6 must be a sequence of ints ≥ 1"),
    (lambda: KronLinear((), ()), ArgumentError, "factors: 0 given, 1 to 64 are allowed"),
    (lambda: KronLinear((2, 3), (3, 2))(torch.ones(4, 5)), ArgumentError, "x has shape (4, 5)"),
    (lambda: KronLinear.from_dense(torch.ones(5, 6), (2, 3), (3, 2)), ArgumentError, "weight has shape (5, 6), (6, 6) is needed"),
    (lambda: KronLinear.from_dense([1], (2, 3), (3, 2)), ArgumentTypeError, "weight is of type list"),
    (
        lambda: KronLinear.from_dense(torch.ones(6, 6), (2, 3), (3, 2), bias=torch.ones(5)),
        ArgumentError,
        "bias has shape (5,), (6,) is needed",
    ),
    (lambda: nearest_kron(torch.ones(4, 4), [(2, 2)]), ArgumentError, "matrix has shape (4, 4), (2, 2) is needed"),
]


@pytest.mark.parametrize(("call", "error", "says"), WRONG, ids=[says for *_, says in WRONG])
def test_wrong_arguments(call: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=re.escape(says)) as e:
        call()
    assert type(e.value) is error
