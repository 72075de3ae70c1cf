"""A real layer, of the speaker encoder that the PyPI package resemblyzer ships, rounded to nearest (where it is installed)."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kronsched import quant
from kronsched.nn import W4A16Linear
from kronsched.quant import round_to_nearest
from kronsched.quant.layout import unpack_columns, unpack_words
from tests.quant import checkpoint_cases as cases

GROUP = 64


@pytest.fixture(scope="module", params=["linear.weight", "lstm.weight_hh_l1"])
def weight(request: pytest.FixtureRequest) -> Tensor:
    """(n, k) = (256, 256) and (1024, 256) in float16."""
    spec = importlib.util.find_spec("resemblyzer")  # the package itself needs audio libraries
    if spec is None or spec.origin is None:
        pytest.skip("resemblyzer is not installed")
    state = torch.load(Path(spec.origin).parent / "pretrained.pt", map_location="cpu", weights_only=True)["model_state"]
    tensor: Tensor = state[request.param]
    return tensor.half()


@pytest.mark.parametrize("zero_point", ["symmetric", "asymmetric"])
def test_rounded_to_nearest(weight: Tensor, zero_point: str) -> None:
    layer = W4A16Linear(round_to_nearest(weight, GROUP, zero_point))
    exact = layer.packed().unpack().T
    lost = float((exact - weight.double()).norm() / weight.double().norm())
    assert 0.05 < lost < 0.15  # of normal values, about 0.1
    x = torch.randn(9, weight.shape[1], generator=torch.Generator().manual_seed(0)).half()
    with torch.no_grad():
        torch.testing.assert_close(layer(x).double(), x.double() @ exact.T, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("version", [1, 2])
def test_as_a_checkpoint_and_back(weight: Tensor, version: int) -> None:
    packed = round_to_nearest(weight, GROUP, "asymmetric")
    assert packed.zeros is not None
    n, k = weight.shape
    case = {
        "q": unpack_words(packed.words, packed.layout)[:k, :n],
        "scales": unpack_columns(packed.scales)[:, :n],
        "zeros": unpack_columns(packed.zeros)[:, :n],
        "rows": torch.arange(k) // GROUP,
    }
    assert int(case["zeros"].min()) >= 1  # version 1 has no 0
    found = quant.load(cases.gptq(case, version))
    assert found.formats == {"a.q_proj": f"gptq_v{version}"}
    assert torch.equal(found["a.q_proj"].unpack(), packed.unpack())
