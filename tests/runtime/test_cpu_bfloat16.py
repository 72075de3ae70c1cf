"""bfloat16 results of CPU kernels whose rows end in a part vector: nothing beside y is written, nothing in it twice."""

from __future__ import annotations

import pytest
import torch

import kronsched
from kronsched import Conv2d, Gemm
from kronsched.hardware import resolve_target
from kronsched.workloads.base import Workload

GUARD = 32


@pytest.mark.parametrize(
    "workload",
    [
        Gemm(2, 9, 2, "bfloat16", "bfloat16"),
        Conv2d(1, 3, 3, 9, 9, 2, groups=9, in_dtype="bfloat16"),  # type: ignore[arg-type]
    ],
    ids=["gemm", "conv2d"],
)
def test_nine_results_a_row(workload: Workload) -> None:
    inputs = workload.make_inputs(1)
    around = torch.full((workload.output.size + 2 * GUARD,), 7.0, dtype=torch.bfloat16)
    before, out, after = around.split([GUARD, workload.output.size, GUARD])
    y = kronsched.load(workload, device="cpu")(*inputs, out=out.view(workload.output.shape))
    assert bool((before == 7).all()) and bool((after == 7).all())
    torch.testing.assert_close(y.double(), workload.reference(*inputs), rtol=1e-2, atol=1e-2)


def test_a_target_without_a_feature() -> None:
    device = resolve_target("cpu")
    assert list(device.tvm_target(without=("avx512bw",)).attrs.get("mattr", [])) == (
        ["-avx512bw"] if device.arch.startswith("x86-64") else []
    )
