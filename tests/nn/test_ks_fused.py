"""Bias, activation and residual behind a Kronecker-sparse product: numbers, derivatives, who serves, what is refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from kronsched import KSMatmul, hardware, load
from kronsched.errors import ArgumentError, ArgumentTypeError
from kronsched.nn import KSLinear, MonarchLinear, ks_dynamic, ks_fused_kernels, ks_matmul
from kronsched.nn.ks_fused_kernels import FusedKernels, passes_us
from kronsched.records import Journal, TuningRecord, default_log
from kronsched.runtime.load import WITHOUT_EPILOGUE
from kronsched.workloads.ks_epilogue import Epilogue
from tests.nn.ks_cases import CHAIN, LAYOUTS, ONE, data, first, weights, whole

close = torch.testing.assert_close
SLOW = pytest.mark.slow
ACTS: dict[str | None, Any] = {None: lambda z: z, "relu": F.relu, "gelu": F.gelu, "silu": F.silu}


def parts(layout: str, dtype: torch.dtype = torch.float64, n: int = 3, patterns: Any = ONE) -> tuple[Tensor, ...]:
    """x, bias, residual, weights of a case."""
    a, b, _, d = patterns[-1]
    bias = data(1, a * b * d, "batch_first", 5, dtype)[0]
    return data(n, 4, layout, 0, dtype), bias, data(n, a * b * d, layout, 6, dtype), *weights(patterns, dtype)


def by_torch(x: Tensor, ws: list[Tensor], layout: str, bias: Tensor | None, act: str | None, residual: Tensor | None) -> Tensor:
    """The definition, with the samples first."""
    z = first(x, layout).double() @ whole([w.double() for w in ws]).T
    y = ACTS[act](z if bias is None else z + bias.double())
    return y if residual is None else y + first(residual, layout).double()


CASES = [
    (torch.float32, "batch_first", True, "gelu", True), (torch.float16, "batch_last", True, "gelu", True),
    (torch.bfloat16, "batch_first", True, "silu", False), (torch.float64, "batch_last", False, "silu", True),
    (torch.float16, "batch_first", False, "relu", True), (torch.float32, "batch_last", True, None, False),
    pytest.param(torch.bfloat16, "batch_last", True, "relu", False, marks=SLOW),
    pytest.param(torch.float64, "batch_first", False, "gelu", False, marks=SLOW),
]  # fmt: skip


@pytest.mark.parametrize(("dtype", "layout", "has_bias", "act", "has_residual"), CASES)
def test_is_what_torch_computes(dtype: torch.dtype, layout: str, has_bias: bool, act: str | None, has_residual: bool) -> None:
    x, b, r, *ws = parts(layout, dtype)
    bias, residual = b if has_bias else None, r if has_residual else None
    y = ks_matmul(x, ws, None, layout, bias, act, residual)
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]
    assert y.dtype == dtype
    close(first(y, layout).double(), by_torch(x, ws, layout, bias, act, residual), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("act", ["gelu", "silu"])
def test_far_and_special_values(act: str) -> None:
    """Without weights to speak of: 1 × 1 blocks of one."""
    z = torch.tensor([0.0, -0.0, 1e-30, 5.9, -5.9, 6.1, -6.1, 13.0, -13.0, 88.0, -88.0, 130.0, -130.0, 1e30, -1e30])
    z = torch.cat([z, torch.tensor([float("inf"), float("-inf"), float("nan")])])[None]
    got, want = ks_matmul(z, torch.ones(1, 1, 1, 18), activation=act), ACTS[act](z.double()).float()
    close(got, want, rtol=2e-5, atol=1e-7, equal_nan=True)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_batch_gets_its_own_part_of_the_residual(layout: str) -> None:
    for n in (0, 1, 7):
        x, b, r, *ws = parts(layout, torch.float64, n)
        close(first(ks_matmul(x, ws, None, layout, b, "relu", r), layout), by_torch(x, ws, layout, b, "relu", r))


def test_batches_of_any_dimensions() -> None:
    x, b, r, *ws = parts("batch_first", n=6)
    y = ks_matmul(x.reshape(2, 3, 4), ws, None, "batch_first", b, None, r.reshape(2, 3, 12))
    close(y.reshape(6, 12), by_torch(x, ws, "batch_first", b, None, r))
    with pytest.raises(ArgumentError, match=re.escape("residual has shape (3, 2, 12), (2, 3, 12) is needed")):
        ks_matmul(x.reshape(2, 3, 4), ws, None, "batch_first", b, None, r.reshape(3, 2, 12))


# -- derivatives ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "act"),
    [("batch_first", "gelu"), pytest.param("batch_last", "silu", marks=SLOW), pytest.param("batch_first", "relu", marks=SLOW)],
)
def test_gradcheck_to_second_order(layout: str, act: str) -> None:
    tensors = [t.clone().requires_grad_() for t in parts(layout, n=2)]

    def call(x: Tensor, b: Tensor, r: Tensor, w: Tensor) -> Tensor:
        return ks_matmul(x, w, None, layout, b, act, r)

    assert gradcheck(call, tensors) and gradgradcheck(call, tensors)


def test_relu_at_the_end_needs_no_second_product(monkeypatch: pytest.MonkeyPatch) -> None:
    x, b, _, w = (t.clone().requires_grad_() for t in parts("batch_first"))
    y = ks_matmul(x, w, None, "batch_first", b, "relu")
    want = torch.autograd.grad(F.relu(x @ whole([w]).T + b).square().sum(), (x, w, b))
    from kronsched.nn import ks_fused

    monkeypatch.setattr(ks_fused, "product_with", None)
    for got, expected in zip(torch.autograd.grad(y.square().sum(), (x, w, b)), want, strict=True):
        close(got, expected)


def test_a_trained_chain_has_its_epilogue_once() -> None:
    x, b, r, *ws = (t.clone().requires_grad_() for t in parts("batch_first", patterns=CHAIN))
    y = ks_matmul(x, ws, None, "batch_first", b, "silu", r)
    want = by_torch(x, ws, "batch_first", b, "silu", r)
    close(y, want)
    leaves = (x, b, r, *ws)
    for got, expected in zip(
        torch.autograd.grad(y.square().sum(), leaves), torch.autograd.grad(want.square().sum(), leaves), strict=True
    ):
        close(got, expected)


def test_torch_func_and_forward_mode() -> None:
    x, b, r, w = parts("batch_first")
    xs, bs = torch.stack([x, x + 1]), torch.stack([b, -b])

    def call(x: Tensor, b: Tensor) -> Tensor:
        return ks_matmul(x, w, None, "batch_first", b, "gelu", r)

    close(torch.func.vmap(call)(xs, bs), torch.stack([call(*pair) for pair in zip(xs, bs, strict=True)]))
    _, tangent = torch.func.jvp(call, (x, b), (torch.ones_like(x), torch.ones_like(b)))
    close(tangent, (call(x + 1e-6, b + 1e-6) - call(x - 1e-6, b - 1e-6)) / 2e-6, rtol=1e-6, atol=1e-8)


def test_opcheck() -> None:
    from kronsched.nn import ks_ops  # noqa: F401  registers it

    x, b, r, w = (t.clone().requires_grad_() for t in parts("batch_first"))
    tests = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(torch.ops.kronsched.ks_fused, (x, [w], "batch_first", b, "gelu", r), test_utils=tests)


@pytest.mark.parametrize("act", [None, pytest.param("relu", marks=SLOW), "gelu"])
def test_the_gradient_of_a_loaded_module(act: str | None) -> None:
    x, b, r, w = (t.clone().requires_grad_() for t in parts("batch_first"))
    module = load(KSMatmul(3, ONE, "float64", bias=True, activation=act, residual=True), device="cpu")
    got = torch.autograd.grad(module(x, w, bias=b, residual=r).square().sum(), (x, w, b, r))
    want = torch.autograd.grad(by_torch(x, [w], "batch_first", b, act, r).square().sum(), (x, w, b, r))
    for one, other in zip(got, want, strict=True):
        close(one, other)


# -- layers -----------------------------------------------------------------------------------------------


def test_a_layer_takes_a_residual_and_an_activation() -> None:
    x, _, r, w = parts("batch_last")
    layer = KSLinear(ONE, layout="batch_last", dtype=torch.float64, activation="gelu")
    with torch.no_grad():
        layer.weights[0].copy_(w)
    assert layer.bias is not None and "activation='gelu'" in repr(layer)
    close(first(layer(x, r), "batch_last"), by_torch(x, [w], "batch_last", layer.bias, "gelu", r))
    wide = r.to(torch.complex128)
    assert layer(x, wide).dtype == torch.complex128  # as + does


def test_a_narrowed_monarch_layer_is_right() -> None:
    torch.manual_seed(0)
    layer = MonarchLinear(5, 7, 2, dtype=torch.float64, activation="relu")
    x, r = data(3, 5, "batch_first"), data(3, 7, "batch_first", 1)
    close(layer(x, r), F.relu(x @ layer.dense_weight().T + layer.bias) + r)


def test_autocast_rounds_once_and_keeps_a_float32_residual() -> None:
    x, _, r, w = parts("batch_first", torch.float32)
    layer = KSLinear(ONE, activation="gelu")
    with torch.no_grad():
        layer.weights[0].copy_(w)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16 and layer(x, r.bfloat16()).dtype == torch.bfloat16
        y = layer(x, r)
    assert y.dtype == torch.float32
    close(y, by_torch(x, [w], "batch_first", layer.bias, "gelu", r).float(), rtol=2e-2, atol=2e-2)


# -- who serves -------------------------------------------------------------------------------------------


def test_a_faster_plain_product_wins_only_by_more_than_the_passes_take(monkeypatch: pytest.MonkeyPatch) -> None:
    e = Epilogue(True, "gelu", True)
    kernels = FusedKernels(((1, 512, 512, 1),), "batch_first", "float16", "cpu", e)
    kernels.plain.on_cpu, kernels.plain.target = False, hardware.PRESETS["nvidia/h200"]

    monkeypatch.setattr(kernels, "_records", lambda n: (None, None))
    least = passes_us(kernels.fused.workload(4096), kernels.plain.target)
    cases: dict[int, tuple[float | None, bool]] = {4096: (None, False), 4095: (least * 0.8, False), 4094: (least * 1.2, True)}
    monkeypatch.setattr(kernels.plain.library, "saved_us", lambda n: cases[n][0])
    for n, (_, apart) in cases.items():
        assert kernels.apart(n) is apart


def test_records_of_the_plain_product_give_the_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    w = KSMatmul(3, ONE[0], "float64", bias=True)
    default = load(w, device="cpu")
    other = {**default.config, "tile": 1 if default.config["tile"] != 1 else 2}
    record = TuningRecord(
        workload=w.plain.to_dict(),
        target=hardware.resolve_target("cpu").to_dict(),
        space={"name": "ks_cpu", "digest": "0"},
        config=other,
        result={"status": "ok", "times_us": [1.0], "median_us": 1.0},
    )
    Journal(default_log(w.plain)).append(record)
    module = load(w, device="cpu")
    assert module.config == other != default.config and module.origin == WITHOUT_EPILOGUE and not module.measured
    kernels = FusedKernels((ONE[0],), "batch_first", "float64", "cpu", w.epilogue).fused
    assert kernels.module(3).config == other  # and so do the layers


def test_clearing_forgets_both() -> None:
    args = (tuple(ONE), "batch_first", "float64", "cpu")
    kernels = ks_fused_kernels.fused_for(*args, Epilogue(True))
    ks_dynamic.clear()
    assert ks_fused_kernels.fused_for(*args, Epilogue(True)) is not kernels


# -- refused ----------------------------------------------------------------------------------------------

X, W = torch.ones(5, 4), torch.ones(2, 3, 1, 2)
WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"activation": "tanh"}, ArgumentError, "activation='tanh' is not allowed: choose one of relu, gelu, silu"),
    ({"bias": torch.ones(11)}, ArgumentError, "bias has shape (11,), (12,) is needed"),
    ({"bias": 1.0}, ArgumentTypeError, "bias is of type float: a torch.Tensor is needed"),
    ({"residual": torch.ones(5, 12).half()}, ArgumentTypeError, "residual"),
    ({"residual": torch.ones(4, 12)}, ArgumentError, "residual has shape (4, 12), (5, 12) is needed, that of y"),
]


@pytest.mark.parametrize(("named", "kind", "message"), WRONG, ids=[str(n) for n in range(len(WRONG))])
def test_what_is_wrong_is_said(named: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises((kind, ArgumentError), match=re.escape(message)):
        ks_matmul(X, W, **named)


@pytest.mark.parametrize("layer", [KSLinear((2, 3, 1, 2)), MonarchLinear(4, 12)], ids=["ks", "cut"])
@pytest.mark.parametrize("shape", [(1, 12), (3, 5, 12), (5, 11)])
def test_no_residual_is_broadcast(layer: KSLinear, shape: tuple[int, ...]) -> None:
    for dtype in (torch.float32, torch.float64):
        with pytest.raises(ArgumentError, match="residual has shape"):
            layer(X, torch.ones(shape, dtype=dtype))
    with pytest.raises(ArgumentTypeError, match="residual is of type float"):
        layer(X, 1.0)
