"""Weight gradients by the kernels: on a CPU they serve where neighbouring l fill a vector."""

from __future__ import annotations

import pytest
import torch

from kronsched.hardware import PRESETS
from kronsched.nn import ks_dynamic, ks_matmul, ks_wgrad
from kronsched.nn.ks_wgrad_select import expected_us, kernel_pays
from kronsched.workloads.ks_wgrad import KSWeightGrad

PATTERN = (1, 2, 3, 16)


def draw(n: int, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(n)
    a, b, c, d = PATTERN
    g, x = (torch.randn(n, a * f * d, generator=generator, dtype=torch.float64).to(dtype) for f in (b, c))
    return g.requires_grad_(), x.requires_grad_()


@pytest.mark.parametrize("n", [pytest.param(1, marks=pytest.mark.slow), 7, 70])
def test_a_batch_that_is_no_bucket_takes_two_calls_and_is_right(n: int) -> None:
    g, x = draw(n)
    w = torch.randn(PATTERN, dtype=torch.float64, requires_grad=True)
    (found,) = torch.autograd.grad(ks_matmul(x, w), w, g, create_graph=True)
    assert "WeightGrad" in type(found.grad_fn).__name__, "torch.bmm served"
    expected = torch.einsum("njl,nkl->jkl", g.reshape(n, 2, 16), x.reshape(n, 3, 16))[None]
    torch.testing.assert_close(found, expected)
    seed = torch.randn_like(expected)
    for ours, theirs in zip(torch.autograd.grad(found, (g, x), seed), torch.autograd.grad(expected, (g, x), seed), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("layout", ["batch_first", "batch_last"])
def test_the_calls_cover_every_sample_once_and_need_few_kernels(layout: str) -> None:
    kernels = ks_wgrad.WeightGradKernels((2, 5, 4, 3), layout, "float32", "cpu")
    buckets = set()
    for n in range(1, 600):
        plan = kernels.plan(n)
        assert [start for start, _, _ in plan] == [sum(c for _, c, _ in plan[:i]) for i in range(len(plan))]
        assert sum(count for _, count, _ in plan) == n
        assert all(count <= bucket < 2 * max(count, 2) for _, count, bucket in plan)
        assert len(plan) <= (2 if layout == "batch_first" else 1)
        buckets |= {bucket for _, _, bucket in plan}
    assert len(buckets) <= 24


def test_gradients_of_the_weight_gradient() -> None:
    inputs = draw(3)
    for check in (torch.autograd.gradcheck, torch.autograd.gradgradcheck):
        assert check(lambda g, x: ks_wgrad.weight_gradient(g, x, PATTERN, "batch_first"), inputs, fast_mode=True)


def test_what_torch_must_see_is_torch() -> None:
    g, x = draw(4)
    by_vmap = torch.func.vmap(lambda g, x: ks_wgrad.weight_gradient(g, x, PATTERN, "batch_first"))(g[None], x[None])
    torch.testing.assert_close(by_vmap[0], ks_wgrad.weight_gradient(g, x, PATTERN, "batch_first"))


def test_no_samples_are_zeros_and_clear_forgets() -> None:
    assert torch.count_nonzero(ks_wgrad.weight_gradient(*draw(0), PATTERN, "batch_first")) == 0
    kernels = ks_wgrad.kernels_for(PATTERN, "batch_first", "float64", "cpu")
    assert ks_wgrad.kernels_for(PATTERN, "batch_first", "float64", "cpu") is kernels
    ks_dynamic.clear()
    assert ks_wgrad.kernels_for(PATTERN, "batch_first", "float64", "cpu") is not kernels


@pytest.mark.slow
def test_the_operator_of_a_graph() -> None:
    from kronsched.nn import ks_ops

    g, x = draw(7, torch.float32)
    found = ks_ops.ks_wgrad(g, x, PATTERN, "batch_first")
    torch.testing.assert_close(found, ks_wgrad.by_torch(g, x, PATTERN, "batch_first"))
    torch.library.opcheck(
        torch.ops.kronsched.ks_wgrad, (g, x, list(PATTERN), "batch_first"), test_utils=("test_schema", "test_faketensor")
    )


def test_on_a_gpu_kernels_serve_where_they_were_measured_to_be_faster() -> None:
    device = PRESETS["nvidia/h200"]
    for dtype, layout, faster in (
        ("float16", "batch_first", True),
        ("float16", "batch_last", False),
        ("float32", "batch_last", True),
    ):
        w = KSWeightGrad(25088, (1, 768, 192, 2), dtype, layout)
        assert kernel_pays(w, [expected_us(w, device)], device) is faster, w.label
    assert not kernel_pays(w, [None], device)


@pytest.mark.cuda
@pytest.mark.parametrize("layout", ["batch_first", "batch_last"])
def test_training_steps_on_a_gpu(layout: str) -> None:
    """A batch that is no bucket, eagerly, under autocast, and as a graph."""
    pattern, n = (1, 96, 64, 3), 3001
    first = layout == "batch_first"
    x = torch.randn((n, 64 * 3) if first else (64 * 3, n), device="cuda")
    g = torch.randn((n, 96 * 3) if first else (96 * 3, n), device="cuda")
    w = torch.randn(pattern, device="cuda", requires_grad=True)
    assert ks_wgrad.kernels_for(pattern, layout, "float32", f"cuda:{x.device.index}").serves(n)
    expected = KSWeightGrad(n, pattern, "float32", layout).reference(g, x)
    scale = float(expected.square().mean().sqrt())

    def step(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return ks_matmul(x, w, layout=layout)

    for call in (step, torch.compile(step, backend="aot_eager", fullgraph=True)):
        (found,) = torch.autograd.grad(call(x, w), w, g)
        assert float((found - expected).abs().max()) < 1e-4 * scale
    with torch.autocast("cuda", torch.float16):
        y = step(x, w)
    (found,) = torch.autograd.grad(y, w, g.half())
    assert found.dtype == torch.float32
    assert float((found - expected).abs().max()) < 1e-2 * scale
