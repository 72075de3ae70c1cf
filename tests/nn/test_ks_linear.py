"""`KSLinear`, `MonarchLinear` and `ButterflyLinear` against nn.Linear, projections, foreign weights, torch.compile, autocast."""

from __future__ import annotations

import copy
import math
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kronsched.errors import ArgumentError, ArgumentTypeError
from kronsched.nn import ButterflyLinear, KSLinear, MonarchLinear, nearest_ks
from tests.nn.ks_cases import CHAIN, LAYOUTS, ONE, data, dense, first, weights, whole

close = torch.testing.assert_close
FIT = [(2, 4, 2, 1), (1, 4, 4, 2)]  # 4 -> 8 -> 8, patterns that have a product without overlaps
ATTENTION = [(2, 6, 24, 1), (1, 24, 6, 2)]  # a ViT chain of ksmm's benchmark, an eighth of its size


def linear_of(layer: KSLinear) -> nn.Linear:
    linear = nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None, dtype=layer.weights[0].dtype)
    with torch.no_grad():
        linear.weight.copy_(layer.dense_weight())
        if layer.bias is not None:
            linear.bias.copy_(layer.bias)
    return linear


@pytest.fixture
def layer() -> KSLinear:
    torch.manual_seed(0)
    return KSLinear(CHAIN)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("bias", [True, False])
def test_is_the_linear_layer_it_stands_for(layout: str, bias: bool) -> None:
    layer = KSLinear(CHAIN, bias=bias, layout=layout, dtype=torch.float64)
    close(layer.dense_weight(), whole(list(layer.weights)))
    linear, x = linear_of(layer), data(3, 4, layout)
    close(first(layer(x), layout), linear(first(x, layout)))
    layer(x).square().sum().backward()
    linear(first(x, layout)).square().sum().backward()
    by_chain = torch.autograd.grad(layer.dense_weight(), list(layer.weights), linear.weight.grad)
    for w, g in zip(layer.weights, by_chain, strict=True):
        close(w.grad, g)
    if bias:
        close(layer.bias.grad, linear.bias.grad)


def test_starts_with_the_variance_of_nn_linear() -> None:
    torch.manual_seed(1)
    x = torch.randn(20, 48)
    for patterns in ((1, 48, 48, 1), ATTENTION):
        made = torch.stack([x @ KSLinear(patterns, bias=False).dense_weight().T for _ in range(60)])
        assert 0.8 / 3 < float(made.detach().square().mean()) < 1.2 / 3
    bias = KSLinear((2, 4096, 16, 1)).bias
    assert bias is not None and 0.24 < float(bias.detach().abs().max()) <= 0.25


def test_state_dict_and_copies(layer: KSLinear) -> None:
    assert list(layer.state_dict()) == ["bias", "weights.0", "weights.1"]
    twin = KSLinear(CHAIN)
    twin.load_state_dict(layer.state_dict())
    x = data(4, 4, "batch_first", dtype=torch.float32)
    close(twin(x), layer(x))
    close(copy.deepcopy(layer)(x), layer(x))
    assert "in_features=4, out_features=8, patterns=[(2, 3, 2, 1), (1, 4, 3, 2)], bias=True, layout='batch_first'" in repr(layer)
    assert KSLinear(CHAIN, device="meta")(x.to("meta")).shape == (4, 8)


@pytest.mark.parametrize("train", [False, True])
def test_compiles_to_one_graph_for_every_batch(layer: KSLinear, train: bool) -> None:
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        from torch._dynamo.backends.common import aot_autograd
        from torch._functorch.aot_autograd import make_boxed_func

        graphs.append(graph)
        return aot_autograd(fw_compiler=lambda g, _: make_boxed_func(g.forward))(graph, inputs)

    layer.requires_grad_(train)
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=backend)
    for n in (5, 7, 12):  # not 4: torch gives equal sizes one symbol, and that of the features is fixed
        x = data(n, 4, "batch_first", dtype=torch.float32)
        y = compiled(x)
        close(y, layer(x))
        if train:
            (got,) = torch.autograd.grad(y.square().sum(), layer.weights[0])
            (want,) = torch.autograd.grad(layer(x).square().sum(), layer.weights[0])
            close(got, want)
    assert len(graphs) == 1
    assert graphs[0].code.count("ops.kronsched.ks") == (2 if train else 1)
    assert graphs[0].code.count("ops.kronsched.ks_fused") == 1  # the bias is not added apart


def test_exports_with_any_batch(layer: KSLinear) -> None:
    x = data(4, 4, "batch_first", dtype=torch.float32)
    program = torch.export.export(layer, (x,), dynamic_shapes=({0: torch.export.Dim("n")},))
    x = data(7, 4, "batch_first", dtype=torch.float32)
    close(program.module()(x), layer(x))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_autocast_as_nn_linear(layout: str) -> None:
    layer = KSLinear(ONE, layout=layout)
    linear, x = linear_of(layer), data(4, 4, layout, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        y, want = first(layer(x), layout), linear(first(x, layout))
        assert y.dtype == want.dtype == torch.bfloat16
        close(y, want, rtol=5e-2, atol=5e-2)
        y.float().square().sum().backward()
    assert layer.weights[0].grad is not None and layer.weights[0].grad.dtype == torch.float32


# -- projections ------------------------------------------------------------------------------------------

EXACT: list[list[tuple[int, int, int, int]]] = [
    ONE,
    FIT,
    ATTENTION,
    [(6, 4, 4, 1), (1, 16, 12, 2)],
    [(4, 2, 3, 1), (2, 3, 2, 2), (1, 5, 2, 6)],
    [(2, 8, 3, 3), (1, 2, 4, 12)],
]


@pytest.mark.parametrize("patterns", EXACT, ids=str)
def test_an_exact_product_is_found(patterns: list[tuple[int, int, int, int]]) -> None:
    matrix = whole(weights(patterns))
    found = nearest_ks(matrix, patterns)
    assert [tuple(w.shape) for w in found] == patterns
    close(whole(found), matrix)
    assert not any(w.any() for w in nearest_ks(torch.zeros_like(matrix), patterns))


@pytest.mark.parametrize("patterns", [ONE, FIT, [(2, 2, 4, 1), (1, 6, 2, 2)]], ids=str)
def test_two_factors_are_nearer_than_what_descent_finds(patterns: list[tuple[int, int, int, int]]) -> None:
    shape = whole(weights(patterns)).shape
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    best = nearest_ks(matrix, patterns)

    def loss(ws: list[Tensor]) -> Tensor:
        return (whole(ws) - matrix).square().sum()

    ready = [w.requires_grad_() for w in best]
    for g in torch.autograd.grad(loss(ready), ready):  # stationary
        close(g, torch.zeros_like(g), atol=1e-9, rtol=0)
    start = [w.requires_grad_() for w in weights(patterns, seed=11)]
    optimizer = torch.optim.Adam(start, lr=0.05)
    for _ in range(200):
        optimizer.zero_grad()
        loss(start).backward()
        optimizer.step()
    assert float(loss(ready)) <= float(loss(start)) + 1e-9


@pytest.mark.parametrize("layout", LAYOUTS)
def test_from_dense(layout: str) -> None:
    exact = KSLinear(FIT, layout=layout)
    twin = KSLinear.from_dense(exact.dense_weight(), FIT, exact.bias, layout)
    x = data(3, 4, layout, dtype=torch.float32)
    close(twin(x), exact(x))
    assert KSLinear.from_dense(exact.dense_weight(), FIT).bias is None
    assert twin.weights[0].requires_grad


# -- Monarch and butterfly --------------------------------------------------------------------------------


def fly_multiply(x: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    """What fly's blockdiag_butterfly_multiply computes: blocks of x, a transpose, blocks, their outputs interleaved."""
    n, (k, _, p), (blocks, _, r) = x.shape[0], w1.shape, w2.shape
    middle = torch.einsum("nkp,kqp->nkq", x.reshape(n, k, p), w1).reshape(n, r, blocks)
    return torch.einsum("nrl,lsr->nsl", middle, w2).reshape(n, -1)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_monarch_weights_of_fly(layout: str) -> None:
    generator = torch.Generator().manual_seed(0)
    w1, w2 = (torch.randn(s, generator=generator, dtype=torch.float64) for s in ((3, 4, 2), (2, 5, 6)))
    x, bias = data(3, 6, layout), torch.arange(10, dtype=torch.float64)
    layer = MonarchLinear.from_fly(w1, w2, bias, layout=layout)
    close(first(layer(x), layout), fly_multiply(first(x, layout), w1, w2) + bias)
    cut = MonarchLinear.from_fly(w1, w2, in_features=5, out_features=9, layout=layout)
    rows = first(x, layout)
    short = rows[:, :5] if layout == "batch_first" else rows[:, :5].T
    padded = torch.cat([rows[:, :5], torch.zeros(3, 1, dtype=torch.float64)], 1)
    close(first(cut(short), layout), fly_multiply(padded, w1, w2)[:, :9])
    close(first(cut(short), layout), rows[:, :5] @ cut.dense_weight().T)


def test_monarch_of_sizes_that_blocks_do_not_divide() -> None:
    torch.manual_seed(0)
    layer = MonarchLinear(7, 5, blocks=2, width=4, dtype=torch.float64)
    assert [tuple(w.shape) for w in layer.weights] == [(2, 4, 4, 1), (1, 3, 4, 2)] and layer.bias.shape == (5,)
    x = data(3, 7, "batch_first")
    close(layer(x), linear_of(layer)(x))
    twin = MonarchLinear.from_dense(layer.dense_weight(), 2, 4, layer.bias)
    close(twin(x), layer(x))
    assert [tuple(w.shape) for w in MonarchLinear(384, 1536, device="meta").weights] == [(4, 96, 96, 1), (1, 384, 96, 4)]


def test_butterfly() -> None:
    layer = ButterflyLinear(8, dtype=torch.float64)
    assert layer.patterns == ((4, 2, 2, 1), (2, 2, 2, 2), (1, 2, 2, 4))
    assert bool(layer.dense_weight().ne(0).all())
    twin = ButterflyLinear.from_dense(layer.dense_weight(), None, layer.bias)
    close(twin.dense_weight(), layer.dense_weight())
    assert ButterflyLinear(12).radices == (2, 2, 3) and ButterflyLinear(1).radices == (1,)
    assert ButterflyLinear(12, [4, 3]).patterns == ((3, 4, 4, 1), (1, 3, 3, 4))


def test_a_hadamard_transform_is_a_butterfly() -> None:
    h = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)
    matrix = torch.kron(torch.kron(h, h), h)
    close(ButterflyLinear.from_dense(matrix).dense_weight(), matrix)


# -- ksmm -------------------------------------------------------------------------------------------------


def as_ksmm(w: Tensor, algo: str) -> Tensor:
    """A weight (a, b, c, d) as ksmm stores it."""
    a, b, c, d = w.shape
    return {
        "kernel": w.permute(0, 3, 2, 1).reshape(a * d * c, b),
        "bmm": w.permute(0, 3, 1, 2).reshape(a * d, b, c),
        "einsum": w,
        "dense": dense(w),
    }[algo]


@pytest.mark.parametrize("algo", ["kernel", "bmm", "einsum", "dense"])
def test_weights_of_ksmm(algo: str) -> None:
    ws, bias = weights(), torch.arange(8, dtype=torch.float64)
    layer = KSLinear.from_ksmm([as_ksmm(w, algo) for w in ws], CHAIN, algo, bias)
    for got, want in zip(layer.weights, ws, strict=True):
        close(got.detach(), want)
    last = KSLinear.from_ksmm([as_ksmm(w, algo) for w in ws], CHAIN, algo, bias.unsqueeze(1), "batch_last")
    assert last.bias is not None and torch.equal(last.bias, bias)


@pytest.mark.parametrize(
    ("kind", "chain"),
    [
        (MonarchLinear, [(2, 3, 4, 1), (1, 2, 2, 3)]),
        (ButterflyLinear, [(6, 2, 2, 1), (2, 3, 3, 2), (1, 2, 2, 6)]),
        (ButterflyLinear, [(1, 5, 5, 1)]),
    ],
)
def test_layers_of_ksmm_that_are_monarch_or_butterfly(kind: type[KSLinear], chain: list[tuple[int, int, int, int]]) -> None:
    plain = KSLinear(chain, dtype=torch.complex64)
    layer = kind.from_ksmm([as_ksmm(w.detach(), "bmm") for w in plain.weights], chain, "bmm", plain.bias)
    assert type(layer) is kind and layer.patterns == tuple(chain)
    close(layer.dense_weight(), plain.dense_weight())
    assert layer.bias is not None and torch.equal(layer.bias, plain.bias)
    copy.deepcopy(layer).load_state_dict(plain.state_dict())


# -- refused ----------------------------------------------------------------------------------------------


def _odd(rows: int, columns: int, value: float = math.nan) -> Tensor:
    matrix = torch.ones(rows, columns)
    matrix[7, 1] = value
    return matrix


WRONG: list[tuple[Any, type[Exception], str]] = [
    (lambda: KSLinear((2, 3, 0, 1)), ArgumentError, "pattern c=0 is not allowed: an int ≥ 1 is needed"),
    (lambda: KSLinear([(2, 3, 2, 1), (1, 4, 4, 2)]), ArgumentError, "it takes a·c·d = 8 features, the factor before it gives"),
    (lambda: KSLinear(ONE, layout="rows"), ArgumentError, "layout='rows' is not allowed: choose one of batch_first, batch_last"),
    (lambda: KSLinear(ONE)(torch.ones(2, 5)), ArgumentError, "x has shape (2, 5): 4 are needed in the last dimension"),
    (lambda: KSLinear.from_dense(torch.ones(4, 4), CHAIN), ArgumentError, "weight has shape (4, 4), (8, 4) is needed"),
    (lambda: KSLinear.from_dense(torch.ones(8, 4), FIT, torch.ones(4)), ArgumentError, "bias has shape (4,), (8,) is needed"),
    (lambda: KSLinear.from_dense([1.0], CHAIN), ArgumentTypeError, "weight is of type list: a torch.Tensor"),  # type: ignore
    (lambda: nearest_ks(torch.ones(4, 4), [(1, 2, 2, 2), (2, 2, 2, 1)]), ArgumentError, "a = 1 must be a multiple of 2"),
    (
        lambda: KSLinear.from_ksmm([torch.ones(2)], ONE, "triton"),
        ArgumentError,
        "algo='triton' is not allowed: choose one of kernel",
    ),
    (lambda: KSLinear.from_ksmm([torch.ones(2)], ONE, "bmm"), ArgumentError, "factors[0] has shape (2,), (4, 3, 1) is needed"),
    (lambda: KSLinear.from_ksmm([], ONE, "bmm"), ArgumentError, "factors: 0 given, 1 are needed, as many as patterns"),
    (lambda: KSLinear.from_ksmm(torch.ones(4, 3, 1), ONE, "bmm"), ArgumentTypeError, "factors is of type Tensor: a list"),  # type: ignore
    (lambda: KSLinear.from_ksmm([torch.ones(4, 3, 1)], ONE, "bmm", [0.0] * 12), ArgumentTypeError, "bias is of type list"),  # type: ignore
    (
        lambda: KSLinear.from_ksmm([torch.ones(4, 3, 1).int()], ONE, "bmm"),
        ArgumentTypeError,
        "factors[0] has dtype int32: choose",
    ),
    (
        lambda: KSLinear.from_ksmm([torch.ones(p) for p in FIT[:-1]] + [torch.ones(FIT[-1]).double()], FIT, "einsum"),
        ArgumentTypeError,
        "factors[1] has dtype float64, float32 is needed, as factors[0] has",
    ),
    (
        lambda: KSLinear.from_dense(torch.ones(8, 4), FIT, torch.ones(8) * 1j),
        ArgumentTypeError,
        "bias has dtype complex64: a real one is needed",
    ),
    (
        lambda: KSLinear.from_dense(torch.ones(8, 4).int(), FIT),
        ArgumentTypeError,
        "weight has dtype int32: choose one of float32",
    ),
    (lambda: KSLinear.from_dense(_odd(8, 4), FIT), ArgumentError, "weight[7, 1]=nan is not allowed: finite numbers are needed"),
    (lambda: MonarchLinear.from_dense(_odd(8, 8), 2), ArgumentError, "weight[7, 1]=nan is not allowed"),
    (lambda: ButterflyLinear.from_dense(_odd(8, 8, math.inf)), ArgumentError, "weight[7, 1]=inf is not allowed"),
    (lambda: nearest_ks(_odd(8, 4), FIT), ArgumentError, "matrix[7, 1]=nan is not allowed"),
    (lambda: KSLinear(ONE, dtype=torch.int8), ArgumentError, "dtype=torch.int8 is not allowed: choose one of torch.float32"),
    (lambda: MonarchLinear(8, 8, dtype="float32"), ArgumentError, "dtype='float32' is not allowed"),  # type: ignore[arg-type]
    (
        lambda: MonarchLinear.from_ksmm([torch.ones(2, 3, 2, 2), torch.ones(2, 2, 3, 2)], [(2, 3, 2, 2), (2, 2, 3, 2)], "einsum"),
        ArgumentError,
        "patterns=[(2, 3, 2, 2), (2, 2, 3, 2)] are not allowed here: (k, q, p, 1)",
    ),
    (
        lambda: ButterflyLinear.from_ksmm(
            [torch.ones(1, 2, 2, 2), torch.ones(2, 2, 2, 1)], [(1, 2, 2, 2), (2, 2, 2, 1)], "einsum"
        ),
        ArgumentError,
        "patterns=[(1, 2, 2, 2), (2, 2, 2, 1)] are not allowed here: blocks b = c",
    ),
    (lambda: MonarchLinear(8, 8, blocks=0), ArgumentError, "blocks=0 is not allowed: an int ≥ 1 is needed"),
    (lambda: MonarchLinear(8.0, 8), ArgumentTypeError, "in_features=8.0 must be an int ≥ 1"),  # type: ignore[arg-type]
    (lambda: MonarchLinear(4, 4, 2)(torch.ones(2, 3)), ArgumentError, "x has shape (2, 3): 4 are needed"),
    (lambda: MonarchLinear(5, 5, 2)(torch.ones(2, 6)), ArgumentError, "x has shape (2, 6): in_features = 5"),
    (
        lambda: MonarchLinear.from_dense(torch.ones(8, 8), 4, 6),
        ArgumentError,
        "width=6 is not allowed here: a multiple of blocks=4",
    ),
    (lambda: MonarchLinear.from_fly(torch.ones(2, 3, 2), torch.ones(2, 2, 2)), ArgumentError, "it takes 4 features, blkdiag1"),
    (
        lambda: MonarchLinear.from_fly(torch.ones(2, 2, 2), torch.ones(2, 2, 2), in_features=5),
        ArgumentError,
        "in_features=5 is not allowed: at most 4 with these weights",
    ),
    (lambda: ButterflyLinear(8, [2, 2]), ArgumentError, "radices=[2, 2] is not allowed: their product must be n = 8"),
    (lambda: ButterflyLinear(8, 2), ArgumentTypeError, "radices=2 must be a sequence of ints"),  # type: ignore[arg-type]
    (lambda: ButterflyLinear.from_dense(torch.ones(4, 8)), ArgumentError, "weight has shape (4, 8), a square matrix is needed"),
]


@pytest.mark.parametrize(("call", "error", "says"), WRONG, ids=[says for _, _, says in WRONG])
def test_says_what_is_wrong(call: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=re.escape(says)):
        call()
