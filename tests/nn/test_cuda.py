"""`kronsched.nn` on a GPU: numbers, gradients, misaligned rows, CUDA graphs, streams, autocast, torch.compile."""

from __future__ import annotations

import pytest
import torch

from kronsched import kron_matmul
from kronsched.nn import DynamicKron, KronLinear
from tests.nn.nn_cases import dense, factors, rows

pytestmark = pytest.mark.cuda
close = torch.testing.assert_close
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shapes", [[(8, 8)] * 3, [(5, 3), (2, 7)]], ids=["square", "odd"])
def test_numbers_for_any_number_of_rows(dtype: torch.dtype, shapes: list[tuple[int, int]]) -> None:
    fs = [f.cuda() for f in factors(shapes, dtype)]
    exact = dense([f.double() for f in fs])
    for m in (0, 1, 7, 100):
        x = rows(m, exact.shape[0], dtype=dtype).cuda()
        want = x.double() @ exact
        scale = float(want.abs().max()) if m else 1.0
        got = kron_matmul(x, fs)
        assert got.dtype == dtype and got.is_cuda
        close(got.double(), want, rtol=0, atol=TOLERANCE[dtype] * scale)
        left = kron_matmul(x.T.contiguous(), fs, form="kmm", op_f="t")
        close(left.double(), want.T, rtol=0, atol=TOLERANCE[dtype] * scale)


def test_gradients_of_batches() -> None:
    leaves = [t.cuda().requires_grad_() for t in (rows(2, 3, 5, 12), *factors(batch=(3,)))]
    x, *fs = leaves
    assert torch.autograd.gradcheck(lambda x, *fs: kron_matmul(x, fs, alpha=2.0), leaves, fast_mode=True)
    assert torch.autograd.gradgradcheck(lambda x, *fs: kron_matmul(x, fs, alpha=2.0), leaves, fast_mode=True)
    close(kron_matmul(x, fs), x @ dense(fs))


def test_capture_in_a_cuda_graph() -> None:
    fs = [f.cuda() for f in factors([(8, 8)] * 3, torch.float32)]
    x, out = rows(100, 512, dtype=torch.float32).cuda(), torch.empty(100, 512, device="cuda")
    DynamicKron([(8, 8)] * 3, "float32", "cuda:0").prepare(100)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fresh = kron_matmul(x, fs, alpha=2.0)
        kron_matmul(x, fs, out=out)
    x.copy_(rows(100, 512, seed=1, dtype=torch.float32))
    graph.replay()
    want = x @ dense(fs)
    close(out, want, rtol=1e-4, atol=1e-2)
    close(fresh, 2 * want, rtol=1e-4, atol=2e-2)


def test_a_training_step_in_a_cuda_graph() -> None:
    layer, x = KronLinear((8, 8), (8, 8), device="cuda"), rows(64, 64, dtype=torch.float32).cuda()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # warm-up, as torch asks for
        for _ in range(2):
            layer(x).square().sum().backward()
    torch.cuda.current_stream().wait_stream(stream)
    layer.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layer(x).square().sum().backward()
    graph.replay()
    got = [p.grad.clone() for p in layer.parameters() if p.grad is not None]
    layer.zero_grad(set_to_none=True)
    layer(x).square().sum().backward()
    for a, p in zip(got, layer.parameters(), strict=True):
        close(a, p.grad)


def test_autocast_as_nn_linear() -> None:
    layer, x = KronLinear((8, 8), (8, 8), device="cuda"), rows(64, 64, dtype=torch.float32).cuda()
    for dtype in (torch.float16, torch.bfloat16):
        with torch.autocast("cuda", dtype):
            y = layer(x)
            want = torch.nn.functional.linear(x, layer.dense_weight(), layer.bias)
        assert y.dtype == want.dtype == dtype
        close(y, want, rtol=5e-2, atol=5e-2)
        layer.zero_grad()
        y.float().sum().backward()
        assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in layer.parameters())


@pytest.mark.slow
def test_compiles_with_cuda_graphs() -> None:
    layer = KronLinear((8, 8), (8, 8), device="cuda")
    compiled = torch.compile(layer, fullgraph=True, mode="reduce-overhead")
    with torch.no_grad():
        for seed in range(4):
            x = rows(64, 64, seed=seed, dtype=torch.float32).cuda()
            close(compiled(x), layer(x))
