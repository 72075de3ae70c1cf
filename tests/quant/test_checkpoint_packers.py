"""`kronsched.quant.load` on tensors that the formats' own packages pack (where installed), dequantised by these packages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kronsched import quant

NAME = "mlp.up_proj"
K, N = 256, 64


def weight() -> Tensor:
    return torch.randn(N, K, generator=torch.Generator().manual_seed(0)).half()


def check(found: quant.Checkpoint, want: Tensor) -> None:
    """Weights (n, k) that a package computed in 16 or 32 bits."""
    torch.testing.assert_close(found[NAME].unpack().T, want.double(), rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("group", [64, None])
def test_hqq(tmp_path: Path, group: int | None) -> None:
    pytest.importorskip("hqq")
    save_file = pytest.importorskip("safetensors.torch").save_file
    from hqq.core.quantize import BaseQuantizeConfig, HQQLinear

    linear = nn.Linear(K, N, bias=True).half()
    linear.weight.data.copy_(weight())
    bias = linear.bias.detach().clone()
    config = BaseQuantizeConfig(nbits=4, group_size=group, axis=1)
    layer = HQQLinear(linear, config, compute_dtype=torch.float16, device="cpu")
    state = {f"{NAME}.{name}": value for name, value in layer.state_dict().items()}
    save_file({name: value.contiguous() for name, value in state.items()}, tmp_path / "model.safetensors")
    for source in (state, tmp_path):
        found = quant.load(source)
        check(found, layer.dequantize())
        assert torch.equal(found.biases[NAME], bias) and found[NAME].zero_point == "float"
    layer.encoded_state_dict = False
    check(quant.load({f"{NAME}.{name}": value for name, value in layer.state_dict().items()}), layer.dequantize())


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group", [64, -1])
def test_compressed_tensors(symmetric: bool, group: int) -> None:
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    grouped: dict[str, Any] = {"strategy": "group", "group_size": group} if group > 0 else {"strategy": "channel"}
    args = QuantizationArgs(num_bits=4, type="int", symmetric=symmetric, **grouped)
    w = weight().view(N, -1, group if group > 0 else K).float()
    low, high = w.amin(2), w.amax(2)
    scale = (2 * w.abs().amax(2) if symmetric else high - low) / 15
    zero = torch.zeros_like(scale) if symmetric else (-8 - low / scale).round().clamp(-8, 7)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    state = {"weight": weight().float(), "weight_scale": scale, "weight_zero_point": zero.to(torch.int8)}
    packed = PackedQuantizationCompressor.compress(state, scheme)
    found = quant.load({f"{NAME}.{name}": value for name, value in packed.items()})
    check(found, PackedQuantizationCompressor.decompress(packed, scheme)["weight"])
    assert found[NAME].zero_point == ("symmetric" if symmetric else "asymmetric")


@pytest.mark.parametrize("symmetric", [True, False])
def test_gptqmodel(symmetric: bool) -> None:
    pytest.importorskip("gptqmodel")
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear

    linear = nn.Linear(K, N, bias=False).half()
    w = weight().view(N, -1, 64).float()
    low, high = w.amin(2), w.amax(2)
    scale = (2 * w.abs().amax(2) if symmetric else high - low) / 15
    zero = torch.full_like(scale, 8) if symmetric else (-low / scale).round().clamp(0, 15)
    q = ((w / scale[..., None]).round() + zero[..., None]).clamp(0, 15)
    linear.weight.data.copy_(((q - zero[..., None]) * scale[..., None]).view(N, K))
    layer = TorchLinear(bits=4, group_size=64, sym=symmetric, desc_act=False, in_features=K, out_features=N, bias=False)
    layer.pack(linear, scale, zero, torch.arange(K) // 64)
    found = quant.load({f"{NAME}.{name}": value for name, value in layer.state_dict().items() if value is not None})
    check(found, linear.weight.detach())
    assert found.formats[NAME] == "gptq_v2"


def test_awq_of_gptqmodel() -> None:
    pytest.importorskip("gptqmodel")
    from gptqmodel.quantization.awq.utils.packing_utils import dequantize_gemm, pack_awq

    gen = torch.Generator().manual_seed(0)
    q, zeros = (torch.randint(0, 16, (rows, N), generator=gen, dtype=torch.int32) for rows in (K, K // 64))
    scales = torch.rand(K // 64, N, generator=gen).half()
    words, zero_words = pack_awq(q, zeros, 4)
    found = quant.load({f"{NAME}.qweight": words, f"{NAME}.qzeros": zero_words, f"{NAME}.scales": scales})
    check(found, dequantize_gemm(words, zero_words, scales, 4, 64).T)
