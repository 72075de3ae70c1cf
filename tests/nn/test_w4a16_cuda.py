"""4-bit weights on a GPU through the public path: every adversarial case, repeatability, the library's range, a Llama block."""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import kronsched
from kronsched import Gemm
from kronsched.bench.suites import Case, load_cases
from kronsched.bench.tuning import Logs, prebuild
from kronsched.dtypes import DTYPES
from kronsched.hardware import resolve_target
from kronsched.measure.baseline import time_callable
from kronsched.measure.check import max_relative_error
from kronsched.measure.crew import Crew
from kronsched.nn import DynamicW4A16, W4A16Linear
from kronsched.quant import pack, quantize_

pytestmark = pytest.mark.cuda
ALLOWED = {"float16": 6e-4, "bfloat16": 4e-3}


def build_all(cases: Sequence[Case]) -> None:
    """Fill the artefact cache by all cores: one by one the builds take a minute."""
    device = resolve_target("cuda")
    with Crew(device) as crew:
        prebuild(cases, device, Logs(), crew)


def poisoned(workload: Gemm) -> Tensor:
    return torch.full(workload.output.shape, float("nan"), dtype=DTYPES[workload.a_dtype].torch(), device="cuda")


@pytest.mark.parametrize("suite", ["adversarial", "ragged"])
def test_every_case_is_right_and_writes_all_of_its_output(suite: str) -> None:
    wrong = {}
    cases = load_cases("w4a16", suite)
    build_all(cases)
    for workload in (case.workload for case in cases):
        assert isinstance(workload, Gemm)
        inputs = workload.make_inputs(7, "cuda")
        out = poisoned(workload)
        kronsched.load(workload, device="cuda").call_torch(inputs, out)
        error = max_relative_error(out, workload.reference(*inputs))
        if not error <= ALLOWED[workload.a_dtype]:
            wrong[workload.label] = error
    assert not wrong


@pytest.mark.parametrize(
    "workload",
    [
        Gemm(16, 512, 8192),
        Gemm(1, 4096, 4096, zero_point="asymmetric"),
        Gemm(64, 1000, 4104, "bfloat16", group_size=32, zero_point="float"),
        Gemm(5, 512, 1024, act_order=True),
    ],
    ids=lambda w: w.label,
)
def test_200_runs_are_bitwise_equal(workload: Gemm) -> None:
    inputs = workload.make_inputs(3, "cuda")
    module = kronsched.load(workload, device="cuda")
    first = poisoned(workload)
    module.call_torch(inputs, first)
    assert bool(torch.isfinite(first).all())
    outs = [poisoned(workload) for _ in range(8)]
    for turn in range(200):
        out = outs[turn % 8]
        out.fill_(float("nan"))
        module.call_torch(inputs, out)
        assert torch.equal(out, first), f"run {turn} differs"


def test_bfloat16_beyond_the_range_of_float16() -> None:
    q = torch.full((4096, 256), 15, dtype=torch.uint8)
    pw = pack(q, torch.full((32, 256), 4.0)).to("cuda")
    y = DynamicW4A16.of(pw, "bfloat16")(torch.full((3, 4096), 2.0, dtype=torch.bfloat16, device="cuda"), pw)
    assert bool((y == 7 * 4.0 * 2.0 * 4096).all())  # 229,376


@pytest.mark.parametrize("kind", ["symmetric", "asymmetric", "float", "act_order"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_library_is_as_right_as_the_kernels(kind: str, dtype: str) -> None:
    zero_point, act_order = ("symmetric", True) if kind == "act_order" else (kind, False)
    workload = Gemm(130, 1000, 1096, dtype, group_size=64, zero_point=zero_point, act_order=act_order)
    x, *weights = workload.make_inputs(0, "cuda")
    module = DynamicW4A16(1000, 1096, dtype, group_size=64, zero_point=zero_point, act_order=act_order, device="cuda")
    y = module._kernels.library(x, weights)
    # The weights are rounded to 16 bits before the product here: one rounding more than the kernels have.
    assert max_relative_error(y, workload.reference(x, *weights)) <= 2 * ALLOWED[dtype]


def test_a_layer_in_a_cuda_graph_on_both_sides_of_the_crossover() -> None:
    layer = W4A16Linear.from_linear(torch.nn.Linear(512, 384, device="cuda", dtype=torch.float16))
    kernels = DynamicW4A16.of(layer.packed())._kernels
    kernels.threshold = 128
    layer.prepare(16, 200)
    with torch.no_grad():
        for m in (16, 200):
            x = torch.randn(m, 512, device="cuda", dtype=torch.float16)
            layer(x)  # sets up cuBLAS, which a capture cannot
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                y = layer(x)
            x.copy_(torch.randn_like(x))
            graph.replay()
            want = x.double() @ layer.dense_weight().double().T + layer.bias.double()  # type: ignore[union-attr]
            assert max_relative_error(y, want) <= 2e-3
    del kernels.threshold  # shared with other layers of this shape


def llama_block() -> Any:
    """A causal model with one layer of the shape of an 8B Llama, random weights, in float16 on the GPU."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=1, num_attention_heads=32, num_key_value_heads=8,
        vocab_size=1000, attn_implementation="sdpa",
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device("cuda"):
        return transformers.LlamaForCausalLM(config).half().eval()


def test_a_block_of_an_8b_llama(capsys: pytest.CaptureFixture[str]) -> None:
    shapes = [(4096, 4096), (1024, 4096), (14336, 4096), (4096, 14336)]
    build_all([Case(Gemm(m, n, k)) for n, k in shapes for m in (1, 16, 64, 256)])
    model = llama_block()
    dense = copy.deepcopy(model)
    quantize_(model)
    names = [name for name, module in model.named_modules() if isinstance(module, W4A16Linear)]
    assert len(names) == 7
    for name in names:  # the same model with the weights that the 4-bit layers stand for
        dense.get_submodule(name).weight.data.copy_(model.get_submodule(name).dense_weight())
    with torch.no_grad():
        for shape in ((1, 1), (1, 16), (4, 64)):
            tokens = torch.randint(0, 1000, shape, device="cuda")
            got, want = model(tokens, use_cache=False).logits, dense(tokens, use_cache=False).logits
            assert float((got - want).abs().max()) <= 0.02 * float(want.abs().max())
        lines = [_compared(name, model, dense, m) for name in ("mlp", "self_attn.o_proj") for m in (1, 16, 64)]
    with capsys.disabled():
        print("\n" + "\n".join(lines))


def _compared(name: str, model: Any, dense: Any, m: int) -> str:
    """Times of one part in a CUDA graph; the 4-bit one has to be faster for few rows, where reading weights is what costs."""
    parts = [m.model.layers[0].get_submodule(name) for m in (model, dense)]
    x = torch.randn(1, m, 4096, device="cuda", dtype=torch.float16)
    ours, theirs = (_median(lambda part=part: part(x)) for part in parts)  # type: ignore[misc]
    assert m > 16 or ours < theirs
    return f"8B block, {name}, {m} rows: {ours:.1f} µs with 4-bit weights, {theirs:.1f} µs in float16 ({theirs / ours:.2f}×)"


def _median(call: Callable[[], Any]) -> float:
    call()
    return statistics.median(time_callable(call, resolve_target("cuda")) for _ in range(3))
