"""The linear_operator adapter: the original's numbers and gradients, by our kernels where they fit, and off when disabled."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.nn.nn_cases import factors, rows

pytest.importorskip("linear_operator")
from linear_operator import settings
from linear_operator.operators import (
    DiagLinearOperator,
    KroneckerProductLinearOperator,
    RootLinearOperator,
    ToeplitzLinearOperator,
    TriangularLinearOperator,
)

from kronsched.nn import linear_operator as adapter

close = torch.testing.assert_close


@pytest.fixture(autouse=True)
def switched_off_afterwards() -> Iterator[None]:
    yield
    adapter.disable()


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For every Kronecker product of linear_operator that came to the adapter, whether our kernels computed it."""
    log: list[bool] = []
    product = adapter._product

    def spy(*args: Any) -> Tensor | None:
        result = product(*args)
        log.append(result is not None)
        return result

    monkeypatch.setattr(adapter, "_product", spy)
    adapter.enable()
    return log


def on_and_off(compute: Any) -> tuple[Any, Any]:
    adapter.enable()
    on = compute()
    adapter.disable()
    assert not adapter.enabled()
    return on, compute()


def spd(n: int, seed: int) -> Tensor:
    a = rows(n, n, seed=seed)
    return a @ a.T / n + torch.eye(n, dtype=a.dtype)


@pytest.mark.parametrize("batch", [(), (2,)])
@pytest.mark.parametrize("columns", [(), (1,), (4,)])
def test_products_both_ways(served: list[bool], batch: tuple[int, ...], columns: tuple[int, ...]) -> None:
    operator = KroneckerProductLinearOperator(*factors(batch=batch))
    for op, size in ((operator, 6), (operator.mT, 12)):
        x = rows(size, *columns)
        got = op._matmul(x)
        assert got.is_contiguous()
        close(got, op.to_dense() @ x)
        back = rows(op.size(-2), *columns)
        close(op._t_matmul(back), op.to_dense().mT @ back)
        close(op.matmul(x), op.to_dense() @ x)
    assert served and all(served)


def test_gradients(served: list[bool]) -> None:
    def compute() -> tuple[Tensor, ...]:
        leaves = [t.clone().requires_grad_() for t in (rows(6, 3), *factors())]
        y = KroneckerProductLinearOperator(*leaves[1:]).matmul(leaves[0])
        return (y, *torch.autograd.grad(y.square().sum(), leaves))

    for a, b in zip(*on_and_off(compute), strict=True):
        close(a, b)
    assert served and all(served)


def test_what_has_a_structure_of_its_own(served: list[bool]) -> None:
    x = rows(12, 2)
    f = rows(3, 3)
    lower = TriangularLinearOperator(torch.tril(f))
    inner = KroneckerProductLinearOperator(rows(2, 2), rows(2, 2, seed=1))
    root = RootLinearOperator(rows(3, 1))
    for ours, parts in (
        (True, (lower, rows(4, 4))),
        (True, (rows(3, 3), inner)),
        (True, (root, rows(4, 4))),
        (False, (ToeplitzLinearOperator(rows(3)), rows(4, 4))),
        (False, (DiagLinearOperator(rows(3)), rows(4, 4))),
    ):
        served.clear()
        operator = KroneckerProductLinearOperator(*parts)
        close(operator._matmul(x), operator.to_dense() @ x)
        assert served[0] is ours
    with torch.no_grad():
        close(
            KroneckerProductLinearOperator(f.cfloat(), f.cfloat())._matmul(rows(9, 1).cfloat()),
            torch.kron(f, f).cfloat() @ rows(9, 1).cfloat(),
        )
    assert served[-1] is False


def test_solves_by_conjugate_gradients(served: list[bool]) -> None:
    def compute() -> tuple[Tensor, ...]:
        leaves = [t.requires_grad_() for t in (spd(3, 1), spd(2, 2), spd(2, 3))]
        # A sum that is solved as any operator, by products, and not by the eigenvectors of the factors.
        identity = DiagLinearOperator(torch.linspace(0.9, 1.1, 12, dtype=torch.float64))
        operator = KroneckerProductLinearOperator(*leaves) + identity
        with settings.max_cholesky_size(1), settings.cg_tolerance(1e-5), settings.max_cg_iterations(100):
            y = operator.solve(rows(12, 2))
        return (y, *torch.autograd.grad(y.square().sum(), leaves))

    on, off = on_and_off(compute)
    for a, b in zip(on, off, strict=True):
        close(a, b, rtol=1e-6, atol=1e-8)
    matrix = torch.kron(torch.kron(spd(3, 1), spd(2, 2)), spd(2, 3)) + torch.linspace(0.9, 1.1, 12, dtype=torch.float64).diag()
    close(on[0], torch.linalg.solve(matrix, rows(12, 2)), rtol=1e-3, atol=1e-4)
    assert any(served)


def test_switches() -> None:
    adapter.disable()
    original = KroneckerProductLinearOperator._matmul
    adapter.enable()
    adapter.enable()
    assert adapter.enabled() and KroneckerProductLinearOperator._matmul is adapter._matmul
    adapter.disable()
    adapter.disable()
    assert KroneckerProductLinearOperator._matmul is original


def test_importing_switches_it_on() -> None:
    import subprocess
    import sys

    code = """
import kronsched.nn
import linear_operator.operators as ops
before = ops.KroneckerProductLinearOperator._matmul
import kronsched.nn.linear_operator as adapter
assert adapter.enabled() and ops.KroneckerProductLinearOperator._matmul is not before
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("cholesky_up_to", [1, 800])
def test_a_small_gaussian_process(served: list[bool], cholesky_up_to: int) -> None:
    gpytorch = pytest.importorskip("gpytorch")

    class Model(gpytorch.models.ExactGP):  # type: ignore[misc, name-defined]
        def __init__(self, x: Tensor, y: Tensor, likelihood: Any) -> None:
            super().__init__(x, y, likelihood)
            self.mean_module = gpytorch.means.MultitaskMean(gpytorch.means.ConstantMean(), num_tasks=2)
            self.covar_module = gpytorch.kernels.MultitaskKernel(gpytorch.kernels.RBFKernel(), num_tasks=2, rank=1)

        def forward(self, x: Tensor) -> Any:
            return gpytorch.distributions.MultitaskMultivariateNormal(self.mean_module(x), self.covar_module(x))

    x = torch.linspace(0, 1, 12, dtype=torch.float64)[:, None]
    y = torch.cat([torch.sin(6 * x), torch.cos(6 * x)], -1)

    def compute() -> tuple[Tensor, ...]:
        torch.manual_seed(0)
        likelihood = gpytorch.likelihoods.MultitaskGaussianLikelihood(num_tasks=2).double()
        model = Model(x, y, likelihood).double()
        for n, p in enumerate(model.parameters()):
            p.data.copy_(0.1 * rows(*p.shape, seed=n))
        with settings.max_cholesky_size(cholesky_up_to), settings.cg_tolerance(1e-8), settings.deterministic_probes(True):
            loss = -gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, model)(model(x), y)
            loss.backward()
            gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
            model.eval()
            with torch.no_grad():
                mean = likelihood(model(x[:5] + 0.01)).mean
        return (loss.detach(), mean, *gradients)

    on, off = on_and_off(compute)
    for a, b in zip(on, off, strict=True):
        close(a, b, rtol=1e-6, atol=1e-8)
    assert any(served)
