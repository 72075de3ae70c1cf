"""KSMatmul beyond the family contract: chains, layouts, costs, parsing, baseline, call forms."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from kronsched.errors import ArgumentError, ArgumentTypeError, UnsupportedError
from kronsched.measure.check import max_relative_error
from kronsched.workloads.ks import KSMatmul, bmm_factor, parse_pattern

CHAIN = ((6, 4, 8, 1), (1, 12, 12, 2))


def test_the_formula_element_by_element() -> None:
    a, b, c, d = 2, 3, 4, 5
    w = KSMatmul(3, (a, b, c, d), "float64")
    x, weight = w.make_inputs(0)
    y = w.reference(x, weight).view(3, a, b, d)
    rows = x.view(3, a, c, d)
    for n, i, j, m in ((0, 0, 0, 0), (2, 1, 2, 4), (1, 0, 2, 3)):
        assert y[n, i, j, m] == pytest.approx(float(sum(rows[n, i, k, m] * weight[i, j, k, m] for k in range(c))))


def test_layouts_are_transposes_of_each_other() -> None:
    first, last = KSMatmul(7, CHAIN), KSMatmul(7, CHAIN, layout="batch_last")
    x, *weights = first.make_inputs(1)
    assert torch.allclose(first.reference(x, *weights).T, last.reference(x.T.contiguous(), *weights), rtol=1e-12, atol=1e-12)
    assert last.inputs[0].shape == (48, 7) and last.output.shape == (24, 7)
    assert first.inputs[0].shape == (7, 48) and first.output.shape == (7, 24)


def test_a_chain_applies_its_first_factor_first() -> None:
    chain = KSMatmul(5, CHAIN, "float64")
    x, w0, w1 = chain.make_inputs(2)
    middle = KSMatmul(5, CHAIN[0], "float64").reference(x, w0)
    assert torch.allclose(chain.reference(x, w0, w1), KSMatmul(5, CHAIN[1], "float64").reference(middle, w1), rtol=1e-13)
    assert chain.weight_names == ("w0", "w1") and chain.sizes == (48, 24, 24)


def test_the_reference_of_a_large_batch_is_made_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    w = KSMatmul(11, (2, 3, 4, 5), layout="batch_last")
    inputs = w.make_inputs(3)
    whole = w.reference(*inputs)
    monkeypatch.setattr("kronsched.workloads.ks._REFERENCE_ELEMENTS", 100)
    assert torch.allclose(w.reference(*inputs), whole, rtol=1e-13, atol=1e-13)


def test_costs_of_a_known_shape() -> None:
    w = KSMatmul(10, (2, 3, 4, 5))
    assert w.flops == 2 * 10 * 2 * 3 * 4 * 5
    assert w.min_bytes == 4 * (10 * 40 + 10 * 30 + 120)
    assert KSMatmul(10, CHAIN).flops == 2 * 10 * (6 * 4 * 8 + 12 * 12 * 2)
    assert KSMatmul(25088, (6, 64, 64, 1), "float16").label == "ks batch=25088 (6,64,64,1) float16 batch_first"
    assert KSMatmul(5, CHAIN, layout="batch_last").label == "ks batch=5 (6,4,8,1) (1,12,12,2) float32 batch_last"


def test_one_pattern_is_the_same_alone_and_as_a_chain_of_one() -> None:
    alone = KSMatmul(np.int64(4), [np.int32(2), 3, 4, 5])  # type: ignore[arg-type]
    assert alone == KSMatmul(4, ((2, 3, 4, 5),)) == KSMatmul(4, [[2, 3, 4, 5]])  # type: ignore[arg-type]
    assert alone.pattern == (2, 3, 4, 5) and alone.patterns == ((2, 3, 4, 5),) and type(alone.batch) is int


def test_calls_take_weights_as_a_list_or_one_by_one() -> None:
    chain = KSMatmul(5, CHAIN)
    x, w0, w1 = chain.make_inputs(4)
    assert chain.flatten_args((x, [w0, w1])) == chain.flatten_args((x, w0, w1)) == [x, w0, w1]
    assert KSMatmul(5, CHAIN[0]).flatten_args((x, w0)) == [x, w0]


def test_parse_pattern() -> None:
    assert parse_pattern("6,64,64,1") == ((6, 64, 64, 1),)
    assert parse_pattern(" 6, 4,8,1 / 1,12,12,2") == CHAIN
    for text, piece in (("6,64,64", "'6,64,64'"), ("6,4,8,1/", "''"), ("6x4x8x1", "'6x4x8x1'"), ("6,4,8,-1", "'6,4,8,-1'")):
        with pytest.raises(ArgumentError, match=piece):
            parse_pattern(text)


@pytest.mark.parametrize(
    ("fields", "error", "text"),
    [
        ({"pattern": [(2, 3, 4, 5), (1, 2, 31, 1)]}, ArgumentError,
          "takes a·c·d = 31 features, the factor before it gives a·b·d = 30"),
        ({"dtype": "complex64", "activation": "relu"}, UnsupportedError, "activation='relu' is not defined for complex64"),
        ({"batch": 2**28}, UnsupportedError, "batch=268435456"),
        ({"pattern": "6,4,8,1"}, ArgumentTypeError, "pattern='6,4,8,1'"),
        ({"layout": "batch"}, ArgumentError, "batch_first, batch_last"),
    ],
)  # fmt: skip
def test_mistakes_are_named(fields: dict[str, Any], error: type[Exception], text: str) -> None:
    good: dict[str, Any] = {"batch": 4, "pattern": (2, 3, 4, 5), "dtype": "float32", "layout": "batch_first"}
    with pytest.raises(error) as caught:
        KSMatmul(**{**good, **fields})
    assert text in str(caught.value)


@pytest.mark.parametrize("pattern", [(2, 3, 4, 5), (5, 3, 4, 2), (1, 3, 4, 5), (4, 3, 5, 1), CHAIN])
@pytest.mark.parametrize("layout", ["batch_first", "batch_last"])
def test_the_baseline_is_right(pattern: Any, layout: str) -> None:
    w = KSMatmul(6, pattern, layout=layout)
    inputs = w.make_inputs(5)
    name, call = w.baseline(*inputs)
    assert "bmm" in name
    assert max_relative_error(call(), w.reference(*inputs)) < 1e-6


def test_batch_last_bmm_makes_no_copy_of_x(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[torch.Tensor] = []
    plain = torch.bmm
    monkeypatch.setattr(torch, "bmm", lambda a, b, out: seen.append(b) or plain(a, b, out=out))
    w = KSMatmul(6, (1, 3, 4, 5), layout="batch_last")
    x, weight = w.make_inputs(6)
    bmm_factor(x, weight, (1, 3, 4, 5), False)
    assert [b.data_ptr() for b in seen] == [x.data_ptr()]


# -- epilogue ---------------------------------------------------------------------------------------------


def test_an_absent_epilogue_leaves_label_and_key_as_they_were() -> None:
    w = KSMatmul(25088, (6, 64, 64, 1), "float16")
    assert set(w.to_dict()) == {"family", "batch", "pattern", "dtype", "layout"} and w.plain is w
    fused = KSMatmul(25088, (6, 64, 64, 1), "float16", bias=True, activation="gelu", residual=True)
    assert fused.label == w.label + " bias gelu residual" and fused.key != w.key and fused.plain == w
    assert KSMatmul.from_fields(fused.to_dict()) == fused
    assert fused.min_bytes == w.min_bytes + 2 * (384 + 25088 * 384)


@pytest.mark.parametrize("layout", ["batch_first", "batch_last"])
def test_the_epilogue_by_definition(layout: str) -> None:
    w = KSMatmul(3, CHAIN, "float64", layout, bias=True, activation="relu", residual=True)
    flat = w.make_inputs(0)
    x, ws, bias, residual = w.parts(flat)
    assert bias.shape == (24,) and residual.shape == w.output.shape
    z = w.plain.reference(x, *ws) + (bias if layout == "batch_first" else bias[:, None])
    want = z.clamp(min=0) + residual
    assert torch.allclose(w.reference(*flat), want, rtol=1e-13)
    assert torch.allclose(w.baseline(*flat)[1](), want, rtol=1e-12)


def test_call_forms_with_an_epilogue() -> None:
    w = KSMatmul(3, CHAIN, bias=True, residual=True)
    assert w.flatten_named(("x", ["u", "v"]), {"bias": "b", "residual": "r"}) == ["x", "u", "v", "b", "r"]
    assert w.flatten_args(("x", ["u", "v"], "b", "r")) == ["x", "u", "v", "b", "r"]
    assert w.flatten_named(("x", "u", "v", "b"), {"residual": "r"}) == ["x", "u", "v", "b", "r"]
    for named, message in (
        ({"bias": "b"}, "residual is missing"), ({"scale": 1}, "'scale' was given"),
    ):  # fmt: skip
        with pytest.raises((ArgumentError, ArgumentTypeError), match=message):
            w.flatten_named(("x", "u", "v"), named)
    with pytest.raises(ArgumentError, match="bias was given: make the workload with bias=True"):
        KSMatmul(3, CHAIN).flatten_named(("x", "u", "v"), {"bias": "b"})


@pytest.mark.parametrize(("named", "message"), [({"activation": "tanh"}, "activation='tanh'"), ({"bias": 1}, "bias=1 must be")])
def test_a_wrong_epilogue_is_named(named: dict[str, Any], message: str) -> None:
    with pytest.raises((ArgumentError, ArgumentTypeError), match=message):
        KSMatmul(3, CHAIN, **named)
