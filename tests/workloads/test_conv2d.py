"""Conv2d: shapes, the arguments of a call, rounding as documented, values of fp8 on a CPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import kronsched
from kronsched import registry
from kronsched.errors import ArgumentError, ArgumentTypeError, UnsupportedError
from kronsched.hardware import resolve_target
from kronsched.records import database
from kronsched.workloads.conv2d import Conv2d, parse_pair
from kronsched.workloads.gemm import Gemm
from tests.contract.workload_battery import run_functions

INT8 = Conv2d(1, 4, 4, 8, 8, 3)


def test_defaults_follow_the_input_dtype() -> None:
    outs = {d: Conv2d(1, 4, 4, 8, 8, 3, in_dtype=d).out_dtype for d in ("int8", "bfloat16", "float8_e5m2")}
    assert outs == {"int8": "int8", "bfloat16": "bfloat16", "float8_e5m2": "float16"}
    assert INT8.has_scale
    assert not Conv2d(1, 4, 4, 8, 8, 3, out_dtype="int32").has_scale
    assert (INT8.kernel, INT8.stride, INT8.padding) == ((3, 3), (1, 1), (0, 0))


def test_output_size_of_strides_padding_and_dilation() -> None:
    conv = Conv2d(2, 11, 8, 4, 4, (3, 5), stride=(2, 1), padding=(1, 2), dilation=(2, 1))
    y = torch.nn.functional.conv2d(torch.zeros(2, 4, 11, 8), torch.zeros(4, 4, 3, 5), None, (2, 1), (1, 2), (2, 1))
    assert conv.output.shape == (2, *y.shape[2:], 4)
    assert conv.flops == 2 * 2 * y.shape[2] * y.shape[3] * 4 * 15 * 4


def test_sums_fit_into_int32() -> None:
    with pytest.raises(UnsupportedError, match=r"c_in=14564, kernel=3x3 is not .* sums of 131076 products \(more than 131071\)"):
        Conv2d(1, 3, 3, 14564, 8, 3)
    assert Conv2d(1, 3, 3, 14563, 8, 3).depth == 131067
    assert Conv2d(1, 3, 3, 14564, 8, 3, in_dtype="float16").sums_dtype == "float32"


def test_a_product_with_an_epilogue_is_a_convolution() -> None:
    conv = Conv2d(1, 6, 1, 20, 8, kernel=1, in_dtype="int8", has_bias=True, has_residual=True, relu=True)  # type: ignore[arg-type]
    x, w, scale, bias, rest, factor = conv.make_inputs(0)
    sums = Gemm(6, 8, 20, "int8", "int8", out_dtype="int32").reference(x.view(6, 20), w.view(8, 20)).float() + bias
    wanted = (sums * scale).round() + (rest.view(6, 8).float() * factor).round()
    y = kronsched.load(conv, device="cpu")(x, w, scale, bias, rest, factor)
    assert torch.equal(y.view(6, 8), wanted.clamp(0, 127).to(torch.int8))
    gemm = Gemm(6, 8, 20, "int8", "int8", out_dtype="int8", has_bias=True, has_residual=True, relu=True)
    assert torch.equal(gemm.reference(x.view(6, 20), w.view(8, 20), scale, bias, rest.view(6, 8), factor), y.view(6, 8).double())


def test_the_shipped_configs_serve_layers_with_an_epilogue() -> None:
    layer = Conv2d(32, 14, 14, 256, 1024, 1, has_bias=True, has_residual=True, relu=True)  # type: ignore[arg-type]
    assert layer.plain == Conv2d(32, 14, 14, 256, 1024, 1)  # type: ignore[arg-type]
    half = Conv2d(8, 14, 14, 256, 256, 3, has_scale=True, relu=True, in_dtype="float16")  # type: ignore[arg-type]
    assert half.plain == Conv2d(8, 14, 14, 256, 256, 3, in_dtype="float16")  # type: ignore[arg-type]
    device = resolve_target("nvidia/h200")
    record = database.ranked(layer.plain, device)[0]
    schedule = registry.schedule(record.space["name"])
    assert schedule.supports(layer, device) is None and schedule.space(layer, device).invalid(record.config) is None


def test_pairs_on_the_command_line() -> None:
    assert parse_pair("3") == (3, 3)
    assert parse_pair("3x5") == (3, 5)
    with pytest.raises(ArgumentError, match="'3x' is not allowed"):
        parse_pair("3x")


def test_a_call_takes_keywords() -> None:
    conv = Conv2d(1, 4, 4, 8, 8, 3, has_bias=True, has_residual=True)
    x, w, scale, bias, rest, _ = conv.make_inputs(0)
    flat = conv.flatten_named((x, w), {"residual": rest, "bias": bias, "scale": 0.5})
    assert [t.dtype for t in flat] == [torch.int8, torch.int8, torch.float32, torch.int32, torch.int8, torch.float32]
    assert flat[2].tolist() == [0.5] * 8
    assert flat[5].tolist() == [1.0]
    assert conv.flatten_args([x, w, scale, bias, rest, flat[5]])[2] is scale
    assert isinstance(INT8.flatten_args([x.numpy(), w.numpy()])[2], np.ndarray)


def test_arguments_a_module_was_not_made_for_are_named() -> None:
    x, w, scale = INT8.make_inputs(0)
    with pytest.raises(ArgumentError, match="bias was given: make the workload with has_bias=True"):
        INT8.flatten_named((x, w), {"scale": scale, "bias": scale})
    with pytest.raises(ArgumentError, match="colour was given"):
        INT8.flatten_named((x, w, scale), {"colour": 1})
    with pytest.raises(ArgumentError, match="bias is missing"):
        Conv2d(1, 4, 4, 8, 8, 3, has_bias=True).flatten_args([x, w])
    with pytest.raises(ArgumentTypeError, match="'bias' was given: a module of gemm"):
        Gemm(1, 8, 32).flatten_named((x, w), {"bias": scale})


def test_int8_rounds_halves_to_even_and_saturates() -> None:
    conv = Conv2d(1, 1, 6, 1, 1, 1, has_residual=True)
    x = torch.tensor([1, 3, 5, -1, 127, -128], dtype=torch.int8).reshape(1, 1, 6, 1)
    rest = torch.tensor([0, 1, 3, 0, 127, -127], dtype=torch.int8).reshape(1, 1, 6, 1)
    half = torch.tensor([0.5])
    y = conv.reference(x, torch.ones(1, 1, 1, 1, dtype=torch.int8), half, rest, half)
    assert y.flatten().tolist() == [0, 2 + 0, 2 + 2, 0, 64 + 64 - 1, -64 - 64]


def test_relu_keeps_nan() -> None:
    import kronsched

    conv = kronsched.Conv2d(1, 1, 1, 1, 1, 1, in_dtype="float16", relu=True)
    mod = kronsched.load(conv, device="cpu")
    values = [mod(torch.full((1, 1, 1, 1), v).half(), torch.ones(1, 1, 1, 1).half()).item() for v in (float("nan"), -1.0, 2.0)]
    assert values[0] != values[0] and values[1:] == [0.0, 2.0]


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_every_fp8_value_is_read_right(dtype: str) -> None:
    conv = Conv2d(1, 1, 256, 1, 1, 1, in_dtype=dtype, out_dtype="bfloat16")
    x = torch.arange(256, dtype=torch.uint8).view(getattr(torch, dtype)).reshape(1, 1, 256, 1)
    w, y = torch.ones(1, 1, 1, 1).to(x.dtype), torch.zeros(conv.output.shape, dtype=torch.bfloat16)
    run_functions(conv.program(), [("main", ("x", "w", "y"))], {"x": x, "w": w, "y": y})
    assert torch.equal(y.nan_to_num(nan=7e4), x.to(torch.bfloat16).nan_to_num(nan=7e4))
