"""Dense Gemm with bias, residual, relu and requantised results: fields, calls, arithmetic on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kronsched
from kronsched import Gemm, registry
from kronsched.dtypes import DTYPES
from kronsched.errors import ArgumentError, ArgumentTypeError, UnsupportedError
from kronsched.measure.check import max_relative_error
from kronsched.workloads.int4 import unpack_int4

ALL: dict[str, Any] = {"has_bias": True, "has_residual": True, "relu": True}


def dense(m: int, n: int, k: int, dtype: str, out_dtype: str = "", **parts: bool) -> Gemm:
    return Gemm(m, n, k, dtype, dtype, out_dtype=out_dtype, **parts)


def requantised(w: Gemm, inputs: list[torch.Tensor]) -> torch.Tensor:
    """The documented arithmetic, written out once more."""
    named = dict(zip((t.name for t in w.inputs), inputs, strict=True))
    four = w.out_dtype != "int8"
    x, weight = (unpack_int4(named["x"], w.a_dtype == "int4"), unpack_int4(named["w"])) if four else (named["x"], named["w"])
    acc = x.long() @ weight.long().T + named["bias"]
    y = (acc.float() * named["scale"]).round()
    if not four:
        y = y + (named["residual"].float() * named["residual_scale"]).round()
    least, most = {"int8": (-128, 127), "int4": (-8, 7), "uint4": (0, 15)}[w.out_dtype]
    return y.clamp(max(0, least) if w.relu else least, most)


@pytest.mark.parametrize(
    "w",
    [
        dense(5, 71, 33, "int8", "int8", has_bias=True, has_residual=True),
        dense(3, 70, 34, "int4", "int4", has_bias=True, relu=True),
        Gemm(3, 70, 34, "uint4", out_dtype="uint4", has_bias=True),
    ],
    ids=lambda w: w.label,
)
def test_requantised_results_are_exact(w: Gemm) -> None:
    inputs = w.make_inputs(1)
    wanted = requantised(w, inputs)
    assert len(set(wanted.flatten().tolist())) > 5 and (wanted == wanted.max()).sum() > 1  # some saturate
    y = kronsched.load(w, device="cpu")(*inputs)
    assert torch.equal(y.double(), w.reference(*inputs))
    values = y if w.out_dtype == "int8" else unpack_int4(y, w.out_dtype == "int4")
    assert torch.equal(values.float(), wanted)


@pytest.mark.parametrize("w", [dense(4, 9, 20, "bfloat16", **ALL), dense(4, 9, 20, "int8", **ALL)], ids=lambda w: w.label)
def test_floating_results_are_rounded_once(w: Gemm) -> None:
    x, weight, *scales, bias, rest = w.make_inputs(1)
    sums = x.double() @ weight.double().T
    for scale, shape in zip(scales, ((-1, 1), (1, -1)), strict=False):
        sums = sums * scale.double().view(shape)
    wanted = (sums + bias.double() + rest.double()).clamp(min=0)
    torch.testing.assert_close(w.reference(x, weight, *scales, bias, rest), wanted)
    y = kronsched.load(w, device="cpu")(x, weight, *scales, bias=bias, residual=rest)
    assert max_relative_error(y, wanted) < DTYPES[w.out_dtype].tolerance / 8


def test_what_follows_is_given_by_name() -> None:
    w = dense(5, 71, 33, "int8", "int8", **ALL)
    mod, (x, weight, scale, bias, rest, factor) = kronsched.load(w, device="cpu"), w.make_inputs(1)
    y = mod(x, weight, residual=rest, bias=bias, residual_scale=factor, scale=scale)
    assert torch.equal(y, mod(x, weight, scale, bias, rest, factor))
    one = torch.ones(1)
    assert torch.equal(mod(x, weight, bias=bias, residual=rest), mod(x, weight, torch.ones(71), bias, rest, one))
    for given, says in (
        ({"bias": bias}, "residual is missing"),
        ({"bias": bias, "residual": rest, "x": x}, "x was given twice"),
        ({"bias": bias, "residual": rest, "shift": x}, "takes no such argument"),
    ):
        with pytest.raises(ArgumentError, match=says):
            mod(x, weight, **given)
    for value in (10**400, 1e39, float("inf")):
        with pytest.raises(ArgumentError, match="scale is not allowed: a finite number within"):
            mod(x, weight, scale=value, bias=bias, residual=rest)
    with pytest.raises(ArgumentTypeError, match="scale=True must be an int or float"):
        mod(x, weight, scale=True, bias=bias, residual=rest)
    with pytest.raises(ArgumentError, match="bias was given: make the workload with has_bias=True"):
        dense(5, 7, 33, "float16").flatten_named([x, weight], {"bias": bias})


def test_identity() -> None:
    """Keys of what has no epilogue are those of logs that knew none."""
    assert dense(8, 8, 8, "int8", "int32").key == "gemm-2154afff7bafe7e8"
    w = dense(4, 6, 8, "int8", "int8", **ALL)
    assert registry.workload_from_dict(w.to_dict()) == w
    assert w.plain == dense(4, 6, 8, "int8", "int32") == w.plain.plain
    assert w.label == "gemm m=4 n=6 k=8 int8 bias residual relu"
    assert [(t.name, t.shape, t.dtype) for t in w.inputs[2:]] == [
        ("scale", (6,), "float32"), ("bias", (6,), "int32"), ("residual", (4, 6), "int8"), ("residual_scale", (1,), "float32")
    ]  # fmt: skip
    assert w.min_bytes == 4 * 8 + 6 * 8 + 2 * 4 * 6 + 8 * 6 + 4


@pytest.mark.parametrize(
    ("fields", "error", "says"),
    [
        ({"a_dtype": "float16", "relu": True}, UnsupportedError, "relu=True is not supported with packed 4-bit weights"),
        ({"a_dtype": "int8", "b_dtype": "int8", "relu": 1}, ArgumentTypeError, "relu=1 must be True or False"),
        ({"a_dtype": "uint4", "b_dtype": "uint4"}, ArgumentError, "choose one of int4"),
        ({"a_dtype": "uint4", "out_dtype": "int4", "has_residual": True}, UnsupportedError, "has_residual=True is not supp"),
        ({"a_dtype": "int4", "out_dtype": "int4", "n": 7}, ArgumentError, "n=7 is not allowed"),
        ({"a_dtype": "int8", "b_dtype": "int8", "k": 2**17}, UnsupportedError, "k=131072 is not supported: int8 products"),
    ],
)
def test_mistakes_name_the_field(fields: dict[str, Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        Gemm(**{"m": 4, "n": 8, "k": 8, **fields})
