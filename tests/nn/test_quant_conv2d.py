"""QuantConv2d on the CPU: against the float layer it was made of, and bit for bit against its own arithmetic."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from kronsched.errors import ArgumentError, ArgumentTypeError
from kronsched.nn import QuantConv2d
from kronsched.nn.quant_conv2d import quantise


def layer(**attrs: object) -> nn.Conv2d:
    torch.manual_seed(0)
    return nn.Conv2d(16, 24, 3, padding=1, **attrs)  # type: ignore[arg-type]


def test_is_close_to_the_float_layer() -> None:
    conv, x = layer(stride=2), torch.randn(2, 16, 9, 9)
    with torch.no_grad():
        wanted = conv(x).relu()
    in_scale, out_scale = float(x.abs().max()) / 127, float(wanted.max()) / 127
    y = QuantConv2d.from_float(conv, in_scale, out_scale, relu=True)(quantise(x, in_scale))
    assert y.dtype == torch.int8
    assert y.shape == (2, 5, 5, 24)
    got = y.permute(0, 3, 1, 2) * out_scale
    assert float((got - wanted).abs().max()) < 2.5 * out_scale
    assert float((got - wanted).pow(2).mean().sqrt()) < 0.6 * out_scale


def test_residual_is_rescaled_and_added_before_relu() -> None:
    quant = QuantConv2d.from_float(layer(), 0.02, 0.01, relu=True)
    x = torch.randint(-127, 128, (1, 6, 6, 16), dtype=torch.int8)
    rest = torch.randint(-127, 128, (1, 6, 6, 24), dtype=torch.int8)
    y = quant(x, rest, 0.75)
    sums = torch.nn.functional.conv2d(x.double().permute(0, 3, 1, 2), quant.weight.double().permute(0, 3, 1, 2), padding=1)
    assert quant.bias is not None
    sums = sums.permute(0, 2, 3, 1) + quant.bias
    wanted = (sums.float() * quant.scale).round() + (rest.float() * 0.75).round()
    assert torch.equal(y, wanted.clamp(0, 127).to(torch.int8))


def test_a_kernel_is_loaded_once_a_shape() -> None:
    quant = QuantConv2d.from_float(layer(bias=False), 0.02, 0.01)
    x = torch.zeros(1, 4, 4, 16, dtype=torch.int8)
    assert not quant(x).any()
    quant(x)
    quant(torch.zeros(2, 4, 4, 16, dtype=torch.int8))
    assert len(quant._modules_by_shape) == 2


def test_mistakes_are_named() -> None:
    weight, scale = torch.zeros(4, 3, 3, 8, dtype=torch.int8), torch.ones(4)
    with pytest.raises(ArgumentTypeError, match=r"weight is torch.float32"):
        QuantConv2d(weight.float(), scale)
    with pytest.raises(ArgumentError, match=r"scale is torch.float32 \(1,\)"):
        QuantConv2d(weight, torch.ones(1))
    with pytest.raises(ArgumentError, match=r"bias is torch\.float32"):
        QuantConv2d(weight, scale, torch.zeros(4))
    with pytest.raises(ArgumentError, match="takes none"):
        QuantConv2d(weight, scale, out_dtype="int32")
    with pytest.raises(ArgumentError, match="output_scale=0"):
        QuantConv2d.from_float(layer(), 0.1, 0.0)
    with pytest.raises(ArgumentError, match="'reflect'"):
        QuantConv2d.from_float(layer(padding_mode="reflect"), 0.1, 0.1)
    with pytest.raises(ArgumentError, match=r"x is torch.int8 \(1, 4, 4, 9\)"):
        QuantConv2d(weight, scale)(torch.zeros(1, 4, 4, 9, dtype=torch.int8))
