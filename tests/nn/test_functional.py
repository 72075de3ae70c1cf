"""`kron_matmul` against the dense product: forms, transposes, batches, strides, scales, out, dtypes, and its errors."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

import kronsched
from kronsched import kron_matmul
from kronsched.errors import ArgumentError, ArgumentTypeError
from tests.nn.nn_cases import SHAPES, dense, factors, rows

close = torch.testing.assert_close


@pytest.mark.parametrize("op_x", ["n", "t"])
@pytest.mark.parametrize("op_f", ["n", "t"])
@pytest.mark.parametrize("m", [0, 1, 5])
def test_both_forms_and_all_transposes(op_x: str, op_f: str, m: int) -> None:
    fs = factors()
    matrix = dense(fs).T if op_f == "t" else dense(fs)
    x = rows(m, matrix.shape[0])
    close(kron_matmul(x.T.contiguous() if op_x == "t" else x, fs, op_x=op_x, op_f=op_f), x @ matrix)
    x = rows(matrix.shape[1], m)
    close(kron_matmul(x.T.contiguous() if op_x == "t" else x, fs, form="kmm", op_x=op_x, op_f=op_f), matrix @ x)


def test_vectors() -> None:
    fs = factors()
    batched = factors(batch=(3,))
    v, w = rows(12), rows(6)
    for op_x in ("n", "t"):
        close(kron_matmul(v, fs, op_x=op_x), v @ dense(fs))
        close(kron_matmul(w, fs, form="kmm", op_x=op_x), dense(fs) @ w)
    close(kron_matmul(v, batched), v @ dense(batched))
    close(kron_matmul(w, batched, form="kmm"), dense(batched) @ w)


@pytest.mark.parametrize("x_batch", [(), (3,), (1,), (4, 3), (4, 1), (2, 4, 3), (2, 1, 1), (0, 3)])
@pytest.mark.parametrize("f_batches", [[(), (), ()], [(3,), (), (1,)], [(4, 1), (3,), ()], [(1, 1), (), (1,)]])
def test_leading_dimensions_broadcast(x_batch: tuple[int, ...], f_batches: list[tuple[int, ...]]) -> None:
    fs = [factors(batch=batch)[i] for i, batch in enumerate(f_batches)]
    x = rows(*x_batch, 2, 12)
    try:
        want = x @ dense(fs)
    except RuntimeError:
        with pytest.raises(ArgumentError, match="x leading has the shape"):
            kron_matmul(x, fs)
        return
    got = kron_matmul(x, fs)
    assert got.shape == want.shape
    close(got, want)
    close(kron_matmul(x.mT.contiguous(), fs, form="kmm", op_f="t"), want.mT)


def test_batches_made_by_expand_are_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from kronsched.nn import dynamic

    calls: list[int] = []
    call = dynamic.Kernels.__call__
    monkeypatch.setattr(dynamic.Kernels, "__call__", lambda self, x, *rest: (calls.append(x.shape[0]), call(self, x, *rest))[1])
    fs = [f.expand(5, *f.shape) for f in factors()]
    x = rows(2, 12).expand(5, 2, 12)
    close(kron_matmul(x, fs), x @ dense(fs))
    assert calls == [2]


def test_any_strides() -> None:
    fs = factors()
    want = rows(5, 12) @ dense(fs)
    wide, tall = torch.zeros(5, 24, dtype=torch.float64), torch.zeros(10, 12, dtype=torch.float64)
    wide[:, ::2], tall[::2] = rows(5, 12), rows(5, 12)
    strided = [torch.stack([f] * 2, -1)[..., 1] for f in fs]
    assert not any(f.is_contiguous() for f in strided)
    for x in (wide[:, ::2], tall[::2], rows(5, 12).T.contiguous().T, torch._neg_view(-rows(5, 12))):
        close(kron_matmul(x, strided), want)
    close(kron_matmul(rows(5, 12), [f.T.contiguous().T for f in fs]), want)


def test_one_factor_and_sixty_four() -> None:
    f = rows(3, 4, seed=1)
    close(kron_matmul(rows(5, 3), [f]), rows(5, 3) @ f)
    many = [rows(1, 1, seed=i) + 1 for i in range(61)]
    many[5:5] = factors()
    assert len(many) == 64
    close(kron_matmul(rows(3, 12), many), rows(3, 12) @ dense(many))
    with pytest.raises(ArgumentError, match="factors: 65 given, 1 to 64 are allowed"):
        kron_matmul(rows(3, 12), [*many, f])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_other_dtypes(dtype: torch.dtype) -> None:
    fs, x = factors(dtype=dtype), rows(5, 12, dtype=dtype)
    got = kron_matmul(x, fs, alpha=0.5, beta=2.0, y=x[:, :6])
    assert got.dtype == dtype
    want = 0.5 * x.double() @ dense([f.double() for f in fs]) + 2 * x[:, :6].double()
    tolerance = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 1e-1}[dtype]
    close(got.double(), want, rtol=tolerance, atol=tolerance)


def test_a_small_alpha_does_not_underflow_in_float16() -> None:
    fs, x = [torch.full((2, 2), 1e-3, dtype=torch.float16)] * 2, torch.full((1, 4), 1e3, dtype=torch.float16)
    want = 1e-2 * (x.double() @ dense([f.double() for f in fs]))
    close(kron_matmul(x, fs, alpha=1e-2).double(), want, rtol=1e-2, atol=0)


@pytest.mark.parametrize("as_tensor", [False, True])
def test_alpha_beta_and_y(as_tensor: bool) -> None:
    fs, x = factors(), rows(5, 12)
    alpha, beta = (torch.tensor(1.5), torch.tensor(-0.5)) if as_tensor else (1.5, -0.5)
    for y in (rows(5, 6), rows(6), rows(1, 6), rows(2, 5, 6), rows(1)):
        close(kron_matmul(x, fs, alpha=alpha, beta=beta, y=y), 1.5 * x @ dense(fs) - 0.5 * y)
    y = rows(6, 1)
    close(kron_matmul(rows(12), fs, alpha=alpha, beta=beta, y=rows(6)), 1.5 * rows(12) @ dense(fs) - 0.5 * rows(6))
    close(kron_matmul(rows(6, 5), fs, form="kmm", beta=1, y=rows(12, 1)), dense(fs) @ rows(6, 5) + rows(12, 1))
    assert kron_matmul(x, fs, y=torch.full((2, 5, 6), torch.nan, dtype=torch.float64)).isfinite().all()  # beta = 0


def test_out_is_written_and_may_be_any_memory() -> None:
    fs, x = factors(), rows(5, 12)
    want = x @ dense(fs)
    memory = torch.zeros(200, dtype=torch.float64)
    for out in (
        torch.empty(5, 6, dtype=torch.float64),
        torch.empty(6, 5, dtype=torch.float64).T,
        memory[1:61].view(5, 12)[:, ::2],
    ):
        version = out._version
        assert kron_matmul(x, fs, out=out) is out
        assert out._version > version
        close(out, want)
    own = memory[:60].view(5, 12).copy_(x)  # over a part of x: computed apart
    close(kron_matmul(own, fs, out=memory[10:40].view(5, 6)), want)
    y = rows(5, 6, seed=3)
    close(kron_matmul(x, fs, y=y, beta=2.0, out=y), want + 2 * rows(5, 6, seed=3))
    w = rows(6, 5)
    out = torch.empty(5, 12, dtype=torch.float64).T
    close(kron_matmul(w, fs, form="kmm", out=out), dense(fs) @ w)
    batched = factors(batch=(3,))
    close(kron_matmul(x, batched, out=torch.empty(3, 5, 6, dtype=torch.float64)), x @ dense(batched))


def test_a_kmm_result_goes_into_the_next_product_without_a_copy() -> None:
    z = kron_matmul(rows(6, 5), factors(), form="kmm")
    assert z.mT.is_contiguous()


def test_make_fx_and_meta_tensors_keep_the_operator() -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    fs, x = factors(), rows(5, 12)
    graph = make_fx(lambda x, *fs: kron_matmul(x, fs))(x, *fs)
    assert "kronsched.kron" in graph.code
    close(graph(x, *fs), x @ dense(fs))
    assert kron_matmul(x.to("meta"), [f.to("meta") for f in fs]).shape == (5, 6)


def test_compiles_without_a_graph_break() -> None:
    @torch.compile(fullgraph=True, backend="aot_eager")
    def compiled(x: torch.Tensor, alpha: torch.Tensor, *fs: torch.Tensor) -> torch.Tensor:
        return kron_matmul(x, fs, form="kmm", op_f="t", alpha=alpha, beta=2, y=x[..., :6, :])

    x, alpha, fs = rows(2, 12, 5), torch.tensor(1.5), [factors(batch=(2,))[0], *factors()[1:]]
    close(compiled(x, alpha, *fs), 1.5 * dense(fs).mT @ x + 2 * x[:, :6])


X, F = rows(5, 12), factors()
WRONG: list[tuple[str, tuple[Any, Any], dict[str, Any], type[Exception], str]] = [
    ("form", (X, F), {"form": "mk"}, ArgumentError, "form='mk' is not allowed: choose one of mkm, kmm"),
    ("op_x", (X, F), {"op_x": "T"}, ArgumentError, "op_x='T' is not allowed: choose one of n, t"),
    ("op_f", (X, F), {"op_f": True}, ArgumentError, "op_f=True is not allowed: choose one of n, t"),
    ("x list", ([1.0], F), {}, ArgumentTypeError, "x is of type list: a torch.Tensor is needed"),
    ("x scalar", (X[0, 0], F), {}, ArgumentError, "x has shape ()"),
    ("x int", (X.int(), F), {}, ArgumentTypeError, "x has dtype int32: choose one of float32, float64, float16, bfloat16"),
    ("x columns", (X[:, :11], F), {}, ArgumentError, "x has shape (5, 11), with op_x='n' 11 columns of op(x): 12 are needed"),
    (
        "x rows",
        (X, F),
        {"form": "kmm"},
        ArgumentError,
        "5 rows of op(x): 6 are needed, the product of the factors' columns 3 · 1 · 2",
    ),
    ("no factor", (X, []), {}, ArgumentError, "factors: 0 given, 1 to 64 are allowed"),
    ("one tensor", (X, F[0]), {}, ArgumentTypeError, "factors is of type Tensor: a sequence of tensors is needed"),
    ("factor type", (X, [F[0], 1.0]), {}, ArgumentTypeError, "factors[1] is of type float: a torch.Tensor is needed"),
    ("factor vector", (X, [F[0][0], *F[1:]]), {}, ArgumentError, "factors[0] has shape (3,): (…, P, Q)"),
    (
        "factor dtype",
        (X, [F[0].float(), *F[1:]]),
        {},
        ArgumentTypeError,
        "factors[0] has dtype float32, float64 is needed, as x has",
    ),
    ("factor device", (X, [F[0].to("meta"), *F[1:]]), {}, ArgumentTypeError, "factors[0] is on meta, cpu is needed, as x is"),
    ("factor layout", (X, [F[0].to_sparse(), *F[1:]]), {}, ArgumentTypeError, "factors[0] has layout torch.sparse_coo"),
    ("alpha", (X, F), {"alpha": "2"}, ArgumentTypeError, "alpha='2' is not allowed: a real number"),
    ("alpha complex", (X, F), {"alpha": 1j}, ArgumentTypeError, "alpha=1j is not allowed"),
    ("beta vector", (X, F), {"beta": torch.ones(2), "y": X}, ArgumentError, "beta has shape (2,)"),
    ("no y", (X, F), {"beta": 1.0}, ArgumentError, "y=None is not allowed with beta=1.0"),
    ("y shape", (X, F), {"beta": 1.0, "y": X}, ArgumentError, "y has the shape (5, 12), which does not broadcast with (5, 6)"),
    ("y dtype", (X, F), {"beta": 1.0, "y": X.float()}, ArgumentTypeError, "y has dtype float32, float64 is needed"),
    ("out shape", (X, F), {"out": X}, ArgumentError, "out has shape (5, 12), (5, 6) is needed"),
    ("out type", (X, F), {"out": [1]}, ArgumentTypeError, "out is of type list"),
    ("out dtype", (X, F), {"out": X[:, :6].float()}, ArgumentTypeError, "out has dtype float32, float64 is needed"),
    ("out strides", (X, F), {"out": X[0, :6].expand(5, 6)}, ArgumentError, "out has strides (0, 1)"),
    (
        "out grad",
        (X, [f.clone().requires_grad_() for f in F]),
        {"out": X[:, :6].clone()},
        ArgumentError,
        "out= is not allowed where",
    ),
]


@pytest.mark.parametrize(("args", "options", "error", "says"), [case[1:] for case in WRONG], ids=[case[0] for case in WRONG])
def test_wrong_arguments(args: tuple[Any, Any], options: dict[str, Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=re.escape(says)) as e:
        kron_matmul(*args, **options)
    assert type(e.value) is error and "\n" not in str(e.value)


def test_public_names() -> None:
    nn = kronsched.nn
    assert kronsched.kron_matmul is nn.kron_matmul is nn.functional.kron_matmul
    assert len(SHAPES) == len(F)
    with pytest.raises(AttributeError, match="has no attribute 'KronConv'"):
        nn.KronConv  # noqa: B018
