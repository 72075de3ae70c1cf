"""QuantConv2d on the CPU: against the float layer it was made of, and bit for bit against its own arithmetic."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter

from kronsched.errors import ArgumentError, ArgumentTypeError, UnsupportedError
from kronsched.nn import QuantConv2d, quant_conv2d_kernels
from kronsched.nn.quant_conv2d import quantise


def layer(**attrs: object) -> nn.Conv2d:
    torch.manual_seed(0)
    return nn.Conv2d(16, 24, 3, padding=1, **attrs)  # type: ignore[arg-type]


def image(n: int = 1, size: int = 4) -> torch.Tensor:
    return torch.randint(-128, 128, (n, size, size, 16), dtype=torch.int8)


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
    known = len(quant_conv2d_kernels._modules)
    copy.deepcopy(quant)(x)
    quant(torch.zeros(2, 4, 4, 16, dtype=torch.int8))
    assert len(quant_conv2d_kernels._modules) == known + 1


def test_channels_of_tiny_weights_keep_their_bias() -> None:
    conv, x = layer(), torch.randn(1, 16, 4, 4)
    with torch.no_grad():
        assert conv.bias is not None
        conv.weight[2], conv.bias[2] = 0, 1.5  # pruned, or of a batch norm with gamma 0
        conv.weight[3] *= 1e-9
        conv.bias[3] = -1.5
        conv.weight[4], conv.bias[4] = 1e-42, 2.0
        conv.bias[5], conv.bias[6] = 1e12, -1e12
        conv.weight[7], conv.bias[7] = 0, 0
        conv.weight[8], conv.bias[8] = 0, 1e-6
        wanted = conv(x).permute(0, 2, 3, 1)
    in_scale, out_scale = float(x.abs().max()) / 127, 3 / 127
    quant = QuantConv2d.from_float(conv, in_scale, out_scale)
    y = quant(quantise(x, in_scale)) * out_scale
    assert float((y - wanted.clamp(-3, 3)).abs().max()) < 1.5 * out_scale
    assert quant.bias is not None and quant.scale is not None
    kept = quant.bias.double() * quant.scale.double() * out_scale
    units = quant.scale.double() * out_scale / 2 + wanted[0, 0, 0].double().abs() * 2**-23  # half a step; scale is float32
    assert bool(((kept - conv.bias.double()).abs() <= units)[[2, 3, 4, 5, 6, 7, 8]].all())
    sums = 128 * quant.weight.double().abs().sum(dim=(1, 2, 3)) + quant.bias.double().abs()
    assert float(sums.max()) < 2**31


def test_a_batch_norm_with_gamma_zero() -> None:
    conv, norm = layer(bias=False).eval(), nn.BatchNorm2d(24).eval()
    with torch.no_grad():
        norm.weight[5], norm.bias[5] = 0, -0.75
    fused = nn.utils.fusion.fuse_conv_bn_eval(conv, norm)
    y = QuantConv2d.from_float(fused, 0.02, 0.01)(image())
    assert y[..., 5].unique().tolist() == [-75]


def test_casts_leave_the_layer_as_it_is() -> None:
    quant, x = QuantConv2d.from_float(layer(), 0.02, 0.01), image()
    y = quant(x)
    model = nn.Sequential(copy.deepcopy(quant), nn.Identity())
    for cast in (model.half, model.bfloat16, model.double, lambda: model.to(torch.float16), lambda: model.type(torch.float16)):
        cast()
        assert torch.equal(model(x), y) and y.dtype == torch.int8
        for name, tensor in quant.state_dict().items():
            assert torch.equal(model[0].state_dict()[name], tensor) and model[0].state_dict()[name].dtype == tensor.dtype
    assert {t.device.type for t in model.half().to("meta").buffers()} == {"meta"}


def test_state_dict() -> None:
    quant, other = QuantConv2d.from_float(layer(), 0.02, 0.01), QuantConv2d.from_float(layer(), 1.0, 1.0)
    assert list(quant.state_dict()) == ["weight", "scale", "bias"]
    other.half().load_state_dict(quant.state_dict())
    x = image()
    assert torch.equal(other(x), quant(x))


def test_compiles_to_one_operator_for_every_shape() -> None:
    quant, counter = QuantConv2d.from_float(layer(), 0.02, 0.01, relu=True), CompileCounter()
    compiled = torch.compile(quant, fullgraph=True, dynamic=True, backend=counter)
    for n, size in ((2, 4), (3, 4), (5, 6)):
        x, rest = image(n, size), torch.randint(-127, 128, (n, size, size, 24), dtype=torch.int8)
        assert torch.equal(compiled(x, rest, 0.75), quant(x, rest, 0.75))
    assert counter.frame_count == 1
    assert quant(image(0)).shape == (0, 4, 4, 24) == compiled(image(0), rest[:0, :4, :4]).shape
    rest_scale = torch.tensor(0.75, dtype=torch.float16)
    assert torch.equal(quant(x, rest, rest_scale), quant(x, rest, 0.75))


@pytest.mark.parametrize("out_dtype", ["int8", "int32"])
def test_operator_is_well_formed(out_dtype: str) -> None:
    weight = torch.randint(-127, 128, (8, 3, 1, 16), dtype=torch.int8)
    scale = torch.rand(8) * 1e-3 if out_dtype == "int8" else None
    args = (image(), weight, scale, None, None, None, [2, 1], [1, 0], [1, 1], 1, False, out_dtype)
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(torch.ops.kronsched.quant_conv2d.default, args, test_utils=tests)


def test_quantise_is_nearest_in_any_dtype() -> None:
    x = torch.tensor([100.4, -101.3, 0.5, 1.5, 300.0, float("-inf")]).view(1, 6, 1, 1)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        given = x.to(dtype)
        wanted = (given.double() / 0.9).round().clamp(-127, 127).to(torch.int8).view(1, 1, 1, 6)
        assert torch.equal(quantise(given, 0.9), wanted)


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
    with pytest.raises(ArgumentError, match="out_dtype='int4' is not allowed: choose one of int8, int32"):
        QuantConv2d(weight, scale, out_dtype="int4")
    with pytest.raises(ArgumentError, match="stride"):
        QuantConv2d(weight, scale, stride=(1, 0))
    with pytest.raises(ArgumentTypeError, match="residual_scale='x' must be an int or float"):
        quant = QuantConv2d(weight, scale)
        quant(torch.zeros(1, 3, 3, 8, dtype=torch.int8), torch.zeros(1, 1, 1, 4, dtype=torch.int8), "x")  # type: ignore[arg-type]
    for value in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ArgumentError, match=f"output_scale={value} is not allowed: a finite number > 0 is needed"):
            QuantConv2d.from_float(layer(), 0.1, value)
        with pytest.raises(ArgumentError, match=f"input_scale={value} is not allowed: a finite number > 0 is needed"):
            QuantConv2d.from_float(layer(), torch.tensor(value), 0.1)  # type: ignore[arg-type]
    for odd in ("1", True, None, torch.ones(2)):
        with pytest.raises(ArgumentTypeError, match=r"input_scale=.* must be one finite number > 0"):
            QuantConv2d.from_float(layer(), odd, 0.1)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"input_scale=1e\+30, output_scale=1e-30: .* beyond float32"):
        QuantConv2d.from_float(layer(), 1e30, 1e-30)
    broken = layer()
    with torch.no_grad():
        broken.weight[0, 0, 0, 0] = float("nan")
    with pytest.raises(ArgumentError, match="weight holds NaN or infinity"):
        QuantConv2d.from_float(broken, 0.1, 0.1)
    with pytest.raises(ArgumentTypeError, match="conv is of type Linear"):
        QuantConv2d.from_float(nn.Linear(4, 4), 0.1, 0.1)  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match="weight has 132096 elements a channel"):
        QuantConv2d.from_float(nn.Conv2d(2**9 * 3, 2, (86, 1)), 0.1, 0.1)
    with pytest.raises(ArgumentTypeError, match=r"x is torch\.float32 of 3 axes"):
        quantise(torch.zeros(1, 2, 3), 0.1)
    with pytest.raises(ArgumentError, match="padding_mode='reflect' is not allowed"):
        QuantConv2d.from_float(layer(padding_mode="reflect"), 0.1, 0.1)
    with pytest.raises(ArgumentError, match="padding='same' is not allowed with kernel_size=\\(3, 2\\)"):
        QuantConv2d.from_float(nn.Conv2d(4, 4, (3, 2), padding="same"), 0.1, 0.1)
    for padding, wanted in (("same", (2, 0)), ("valid", (0, 0))):
        conv = nn.Conv2d(4, 4, (3, 1), padding=padding, dilation=(2, 1))
        assert QuantConv2d.from_float(conv, 0.1, 0.1).padding == wanted
    with pytest.raises(ArgumentError, match=r"x is torch.int8 \(1, 4, 4, 9\)"):
        QuantConv2d(weight, scale)(torch.zeros(1, 4, 4, 9, dtype=torch.int8))


def test_wrong_types_are_named() -> None:
    weight, scale = torch.zeros(4, 3, 3, 8, dtype=torch.int8), torch.ones(4)
    for tensors, name in ((([1], scale), "weight"), ((weight, [1.0]), "scale"), ((weight, scale, [1]), "bias")):
        with pytest.raises(ArgumentTypeError, match=f"{name} is of type list: a torch.Tensor is needed"):
            QuantConv2d(*tensors)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="groups=0 is not allowed"):
        QuantConv2d(weight, scale, groups=0)
    with pytest.raises(ArgumentTypeError, match="groups='2' must be an int"):
        QuantConv2d(weight, scale, groups="2")  # type: ignore[arg-type]
    quant, x = QuantConv2d(weight, scale, padding=1), torch.zeros(1, 3, 3, 8, dtype=torch.int8)
    with pytest.raises(ArgumentTypeError, match="x is of type ndarray"):
        quant(x.numpy())
    with pytest.raises(ArgumentTypeError, match="residual is of type list"):
        quant(x, [1])  # type: ignore[arg-type]
    for value in (10**400, 1e39, float("nan")):
        with pytest.raises(ArgumentError, match="residual_scale is not allowed: a finite number within"):
            quant(x, x[..., :4], value)
    with pytest.raises(ArgumentError, match="input_scale=inf is not allowed"):
        QuantConv2d.from_float(layer(), 10**400, 0.1)
    for conv in (nn.Conv2d(5, 6, 3, device="meta"), nn.Conv2d(5, 6, 3, dtype=torch.complex64)):
        with pytest.raises(ArgumentTypeError, match=r"weight is torch\..*: floating-point values are needed"):
            QuantConv2d.from_float(conv, 0.1, 0.1)
    with pytest.raises(ArgumentTypeError, match="x is of type list"):
        quantise([1.0], 0.1)  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match=r"torch\.func"):
        torch.vmap(quant)(x.unsqueeze(0))


def test_images_that_reach_no_kernel_are_checked() -> None:
    quant = QuantConv2d(torch.zeros(4, 3, 3, 8, dtype=torch.int8), torch.ones(4))
    x = torch.zeros(0, 4, 4, 8, dtype=torch.int8)
    assert quant(x, x[:, :2, :2, :4]).shape == (0, 2, 2, 4)
    for residual in (torch.zeros(7), x[:, :2, :2, :4].int(), x[..., :4]):
        with pytest.raises(ArgumentError, match=r"residual is .*, as y, is needed"):
            quant(x, residual)
    with pytest.raises(ArgumentTypeError, match="x is on meta, another tensor on cpu"):
        quant(x.to("meta"))
    with pytest.raises(ArgumentError, match=r"x is \(0, 1, 4, 8\): kernel=\(3, 3\) does not fit"):
        quant(x[:, :1])
    with pytest.raises(ArgumentError, match=r"kernel=\(3, 3\) does not fit"):
        quant.to("meta")(x.to("meta")[:, :1])
