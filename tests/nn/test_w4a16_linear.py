"""`W4A16Linear` against nn.Linear with the dequantised weight, `round_to_nearest`, and `quantize_` on a small Llama."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kronsched import Gemm, quant, registry
from kronsched.errors import ArgumentError, ArgumentTypeError
from kronsched.hardware import resolve_target
from kronsched.nn import W4A16Linear, w4a16_kernels
from kronsched.quant import quantize_, round_to_nearest
from kronsched.records import database
from tests.quant import checkpoint_cases as cases
from tests.records.record_factory import make_record

K, N = 96, 40
TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def linear(k: int = K, n: int = N, dtype: torch.dtype = torch.bfloat16, bias: bool = True) -> nn.Linear:
    torch.manual_seed(k + n)
    return nn.Linear(k, n, bias=bias).to(dtype)


def rows(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(3)).to(dtype)


def close(y: Tensor, x: Tensor, layer: W4A16Linear) -> None:
    want = x.double() @ layer.packed().unpack()
    if layer.bias is not None:
        want = want + layer.bias.double()
    assert y.dtype == x.dtype and y.shape == want.shape
    torch.testing.assert_close(y.double(), want, rtol=0, atol=TOLERANCE[x.dtype] * max(1.0, float(want.abs().max())))


@pytest.fixture(scope="module")
def layer() -> W4A16Linear:
    return W4A16Linear.from_linear(linear(), 32)


@pytest.mark.parametrize("m", [1, 3, 5, 67])
def test_any_number_of_rows(layer: W4A16Linear, m: int) -> None:
    x = rows(m, K)
    with torch.no_grad():
        close(layer(x), x, layer)


def test_any_leading_dimensions(layer: W4A16Linear) -> None:
    with torch.no_grad():
        for shape in ((K,), (1, 3, K), (0, K), (2, 0, K)):
            assert layer(rows(*shape)).shape == (*shape[:-1], N)
        x = rows(2, 2, K)
        close(layer(x), x, layer)
        close(layer(x.transpose(0, 1)), x.transpose(0, 1), layer)


def test_buckets() -> None:
    kernels = w4a16_kernels.W4A16Kernels(Gemm(1, N, K), "cpu")
    assert [kernels.plan(m) for m in (1, 2, 3, 5, 33, 64)] == [[(0, b)] for b in (1, 2, 4, 8, 64, 64)]
    assert kernels.plan(65) == [(0, 64), (64, 1)] and kernels.plan(100) == [(0, 64), (36, 64)] and kernels.plan(128) == [(0, 128)]


def test_tuned_rows_get_their_own_kernel_and_lend_their_config() -> None:
    workload, device = Gemm(12, N, K, "bfloat16", group_size=32), resolve_target("cpu")
    config = {**registry.schedule("gemm_w4a16_cpu").default_config(workload, device), "rows": 3, "columns": 8}
    space = {"name": "gemm_w4a16_cpu", "digest": "0123456789abcdef"}
    record = make_record(workload=workload, device=device, config=config, space=space)  # type: ignore[arg-type]
    log = database.default_log(workload)
    log.parent.mkdir(parents=True)
    log.write_text(record.to_json() + "\n")
    kernels = w4a16_kernels.W4A16Kernels(Gemm(1, N, K, "bfloat16", group_size=32), "cpu")
    assert kernels.plan(12) == [(0, 12)] and kernels.plan(11) == [(0, 16)]
    assert kernels.module(12).origin.startswith("log") and dict(kernels.module(12).config) == config
    assert kernels.module(9).origin == "config of m=12, not measured" and dict(kernels.module(9).config) == config
    assert kernels.module(16).origin == "default, not measured"  # tiles of 3 rows do not divide it
    assert kernels.module(6).origin == "default, not measured"  # one tile of 8 rows, the record is for two
    other = w4a16_kernels.W4A16Kernels(Gemm(1, N, K, "bfloat16", group_size=64), "cpu")
    assert other.plan(12) == [(0, 16)] and other.module(9).origin == "config of m=12, not measured"
    floats = w4a16_kernels.W4A16Kernels(Gemm(1, N, K, "bfloat16", group_size=32, zero_point="float"), "cpu")
    assert floats.module(9).origin == "default, not measured"


@pytest.mark.parametrize("zeros", ["asymmetric", "float"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_weights_with_zeros(zeros: str, dtype: torch.dtype) -> None:
    c = cases.layer(K, N, 32, zeros=zeros)
    layer = W4A16Linear(quant.pack(c["q"], c["scales"] / 16, c["zeros"], 32), dtype=dtype)
    x = rows(3, K, dtype=dtype)
    with torch.no_grad():
        close(layer(x), x, layer)
    assert layer.packed().zero_point == zeros == layer.zero_point
    torch.testing.assert_close(layer.packed().unpack(), cases.dense(c) / 16, rtol=1e-2, atol=0)


def test_casts_keep_words_and_float_zeros() -> None:
    c = cases.layer(K, N, 32, zeros="float")
    layer = W4A16Linear(quant.pack(c["q"], c["scales"] / 16, c["zeros"], 32), dtype=torch.float16)
    words, zeros = layer.words, layer.zeros
    model = nn.Sequential(layer).bfloat16().type(torch.float16)
    assert torch.equal(layer.words, words) and zeros is not None and torch.equal(layer.zeros, zeros)  # type: ignore[arg-type]
    assert layer.zeros.dtype == torch.float32 and layer.dtype == torch.float16  # type: ignore[union-attr]
    for x in (rows(3, K, dtype=torch.float32), rows(3, K, dtype=torch.float16)):
        with pytest.raises(ArgumentTypeError, match="this layer was cast to float32, float16 or bfloat16 is needed"):
            model.float()(x)


@pytest.mark.parametrize(("k", "where"), [(96, "before"), (80, "inside")])
def test_act_order(k: int, where: str) -> None:
    c = cases.layer(k, N, 32)
    g_idx = c["rows"].flip(0) if where == "before" else (c["rows"] + 1) % 3  # the short group comes first: padding between
    layer = W4A16Linear(quant.pack(c["q"], c["scales"] / 16, c["zeros"], 32, g_idx), dtype=torch.float16)
    assert layer.act_order == (where == "inside") and (layer.order is None) == layer.act_order
    x = rows(3, k, dtype=torch.float16)
    with torch.no_grad():
        close(layer(x), x, layer)
    want = (c["q"].double() - c["zeros"].double()[g_idx]) * c["scales"].double()[g_idx] / 16
    assert torch.equal(layer.packed().unpack(), want)
    assert "act_order=True" in repr(layer)


def test_state_dict_and_copies(layer: W4A16Linear) -> None:
    assert list(layer.state_dict()) == ["words", "scales", "bias"]
    x = rows(3, K)
    twin = W4A16Linear.from_linear(nn.Linear(K, N).bfloat16(), 32)
    with torch.no_grad():
        assert not torch.equal(twin(x), layer(x))
        twin.load_state_dict(layer.state_dict())
        for other in (twin, copy.deepcopy(layer)):
            assert torch.equal(other(x), layer(x))
        half = copy.deepcopy(layer).half()
        close(half(x.half()), x.half(), half)
    assert list(layer.parameters()) == []
    assert repr(layer) == (
        "W4A16Linear(in_features=96, out_features=40, bias=True, group_size=32, zero_point='symmetric', dtype=torch.bfloat16)"
    )
    layer.prepare(1, 3)


def test_compiles_to_one_graph_for_every_number_of_rows(layer: W4A16Linear) -> None:
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=backend)
    with torch.no_grad():
        for m in (3, 4, 67):
            x = rows(m, K)
            assert torch.equal(compiled(x), layer(x))
    assert len(graphs) == 1 and "kronsched.w4a16" in graphs[0].code


@pytest.mark.slow
def test_compiles_with_inductor(layer: W4A16Linear) -> None:
    x = rows(3, K)
    with torch.no_grad():
        assert torch.equal(torch.compile(layer, fullgraph=True)(x).relu(), layer(x).relu())


def test_operator_is_well_formed(layer: W4A16Linear) -> None:
    args = (rows(4, K).requires_grad_(), [layer.words, layer.scales], N, 32, "symmetric", False)
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(torch.ops.kronsched.w4a16.default, args, test_utils=tests)


def test_gradient_of_x(layer: W4A16Linear) -> None:
    x = rows(3, K).requires_grad_()
    layer(x).sum().backward()
    assert x.grad is not None
    want = layer.packed().unpack().sum(1).expand(3, K)
    torch.testing.assert_close(x.grad.double(), want, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("k", [96, 80])
def test_gradient_of_x_with_act_order(k: int) -> None:
    c = cases.layer(k, N, 32)
    layer = W4A16Linear(quant.pack(c["q"], c["scales"] / 16, None, 32, (c["rows"] + 1) % 3), dtype=torch.float16)
    x = rows(3, k, dtype=torch.float16).requires_grad_()
    weight = rows(3, N, dtype=torch.float16)
    (layer(x) * weight).sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad.double(), weight.double() @ layer.packed().unpack().T, rtol=2e-3, atol=2e-2)


def test_a_compiled_graph_with_its_gradient(layer: W4A16Linear) -> None:
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x, y = rows(3, K).requires_grad_(), rows(3, K).requires_grad_()
    compiled(x).sum().backward()
    layer(y).sum().backward()
    assert x.grad is not None and y.grad is not None and torch.equal(x.grad, y.grad)


def test_the_gradient_has_none_itself(layer: W4A16Linear) -> None:
    x = rows(3, K).requires_grad_()
    [dx] = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError):
        dx.sum().backward()


def test_autocast(layer: W4A16Linear) -> None:
    x = rows(3, K, dtype=torch.float32)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        close(layer(x), x.bfloat16(), layer)


@pytest.mark.parametrize("zero_point", ["symmetric", "asymmetric"])
@pytest.mark.parametrize(("k", "group"), [(256, 128), (100, 64), (96, -1), (96, 128), (320, 128)])
def test_round_to_nearest(zero_point: str, k: int, group: int) -> None:
    weight = torch.randn(24, k, generator=torch.Generator().manual_seed(0)) + 0.3
    weight[3] = 0
    pw = round_to_nearest(weight, group, zero_point)
    error = (pw.unpack().T - weight).abs()
    size = k if group == -1 else group
    for i in range(0, k, size):
        part = weight[:, i : i + size]
        low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
        span = 2 * part.abs().amax(1) if zero_point == "symmetric" else high - low
        assert bool((error[:, i : i + size] <= span[:, None] / 15 * 0.5001).all())
    assert not bool(pw.unpack()[:, 3].any()) and pw.zero_point == zero_point


class Attention(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(size, size, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (2, -1)).transpose(-2, -3) for p in (self.q_proj, self.k_proj, self.v_proj))
        return self.o_proj(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(-2, -3).flatten(-2))


class Block(nn.Module):
    def __init__(self, size: int, inner: int) -> None:
        super().__init__()
        self.self_attn = Attention(size)
        self.gate_proj, self.up_proj = nn.Linear(size, inner, bias=False), nn.Linear(size, inner, bias=False)
        self.down_proj = nn.Linear(inner, size, bias=False)
        self.norm1, self.norm2 = nn.RMSNorm(size), nn.RMSNorm(size)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.norm1(x))
        y = self.norm2(x)
        return x + self.down_proj(nn.functional.silu(self.gate_proj(y)) * self.up_proj(y))


class Llama(nn.Module):
    """The shape of a Llama: token embedding, blocks, norm, head tied to the embedding."""

    def __init__(self, size: int = 64, inner: int = 96, words: int = 50) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, size)
        self.layers = nn.ModuleList(Block(size, inner) for _ in range(2))
        self.norm, self.lm_head = nn.RMSNorm(size), nn.Linear(size, words, bias=False)
        self.lm_head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.layers:
            x = block(x)
        return self.lm_head(self.norm(x))


@pytest.fixture
def llama() -> Llama:
    torch.manual_seed(0)
    return Llama().bfloat16()


def test_quantize_a_llama(llama: Llama) -> None:
    tokens = torch.randint(0, 50, (2, 7), generator=torch.Generator().manual_seed(0))
    dense = copy.deepcopy(llama)
    assert quantize_(llama, group_size=32) is llama
    found = [name for name, module in llama.named_modules() if isinstance(module, W4A16Linear)]
    assert len(found) == 14 and "layers.0.self_attn.q_proj" in found
    assert type(llama.lm_head) is nn.Linear
    for name in found:  # the same model with the weights that the 4-bit layers stand for
        dense.get_submodule(name).weight.data.copy_(llama.get_submodule(name).dense_weight())
    with torch.no_grad():
        got, want = llama(tokens), dense(tokens)
    assert float((got - want).abs().max()) <= 0.02 * float(want.abs().max())
    llama(tokens).float().sum().backward()  # trained parameters before and after still get gradients
    assert llama.embed.weight.grad is not None


def test_quantize_with_the_weights_of_a_checkpoint(llama: Llama) -> None:
    name = "layers.1.up_proj"
    c = cases.layer(64, 96, 32)
    checkpoint = quant.load(cases.gptq(c, 2, prefix=name + "."))
    checkpoint.biases[name] = torch.ones(96)
    quantize_(llama, weights=checkpoint)
    made = [n for n, module in llama.named_modules() if isinstance(module, W4A16Linear)]
    assert made == [name]
    layer = llama.get_submodule(name)
    assert layer.bias is not None and layer.dtype == torch.bfloat16
    torch.testing.assert_close(layer.packed().unpack(), cases.dense(c), rtol=1e-2, atol=0)
    with pytest.raises(ArgumentError, match=r"weights has the layer 'nowhere': the model has no nn\.Linear of that name"):
        quantize_(llama, weights={"nowhere": checkpoint[name]})
    with pytest.raises(
        ArgumentError, match=r"layer 'layers\.0\.self_attn\.q_proj': weights has n=96, k=64: n=64, k=64 are needed"
    ):
        quantize_(llama, weights={"layers.0.self_attn.q_proj": checkpoint[name]})


def test_skip_and_shared_layers(llama: Llama) -> None:
    llama.layers[1].up_proj = llama.layers[0].up_proj
    quantize_(llama, group_size=32, skip=("layers.*.self_attn.*", "lm_head", "down_proj"))
    found = [name for name, module in llama.named_modules() if isinstance(module, W4A16Linear)]
    assert found == ["layers.0.gate_proj", "layers.0.up_proj", "layers.1.gate_proj"]
    assert llama.layers[1].up_proj is llama.layers[0].up_proj


def test_transformers_llama() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, vocab_size=50
    )
    model = transformers.LlamaForCausalLM(config).bfloat16().eval()
    quantize_(model, group_size=32)
    assert sum(isinstance(module, W4A16Linear) for module in model.modules()) == 7
    with torch.no_grad():
        assert bool(torch.isfinite(model(torch.arange(6)[None]).logits).all())


def test_errors(layer: W4A16Linear, llama: Llama) -> None:
    pw = layer.packed()
    calls: list[tuple[type[Exception], str, Any]] = [
        (ArgumentTypeError, "x has dtype float32, bfloat16 is needed", lambda: layer(rows(2, K, dtype=torch.float32))),
        (ArgumentError, "x has shape (2, 95), (…, 96) is needed", lambda: layer(rows(2, 95))),
        (ArgumentError, "x has shape (), (…, 96) is needed", lambda: layer(torch.tensor(1.0).bfloat16())),
        (ArgumentTypeError, "weight is of type Linear", lambda: W4A16Linear(linear())),
        (ArgumentError, "bias has shape (3,), (40,) is needed", lambda: W4A16Linear(pw, torch.ones(3))),
        (ArgumentError, "dtype=torch.float32 is not allowed", lambda: W4A16Linear(pw, dtype=torch.float32)),
        (ArgumentTypeError, "weight has dtype float32: pass dtype=", lambda: W4A16Linear.from_linear(nn.Linear(4, 4))),
        (ArgumentError, "rows=0 is not allowed", lambda: layer.prepare(0)),
        (ArgumentError, "group_size=48 is not allowed", lambda: round_to_nearest(torch.ones(4, 96), 48)),
        (ArgumentError, "zero_point='float' is not allowed", lambda: round_to_nearest(torch.ones(4, 96), 32, "float")),
        (ArgumentTypeError, "weight is of dtype int64", lambda: round_to_nearest(torch.ones(4, 96).long(), 32)),
        (ArgumentError, "weight holds NaN or infinity", lambda: round_to_nearest(torch.full((4, 96), torch.nan), 32)),
        (ArgumentTypeError, "layer 'layers.0.self_attn.q_proj': weight has dtype float32", lambda: quantize_(llama.float())),
        (ArgumentTypeError, "model is of type int", lambda: quantize_(3)),  # type: ignore[type-var]
        (ArgumentTypeError, "skip='lm_head' must be a sequence", lambda: quantize_(llama, skip="lm_head")),
        (ArgumentError, "model is a Linear without an nn.Linear inside", lambda: quantize_(linear())),
    ]
    for kind, text, call in calls:
        with pytest.raises(kind, match=re.escape(text)):
            call()
    assert not any(isinstance(module, W4A16Linear) for module in llama.modules())


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_on_a_gpu(dtype: torch.dtype) -> None:
    layer = W4A16Linear.from_linear(linear(512, 200, dtype), 128, "asymmetric").cuda()
    for m in (1, 5, 64, 300):
        x = rows(m, 512, dtype=dtype).cuda()
        with torch.no_grad():
            close(layer(x), x, layer)
