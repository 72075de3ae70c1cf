"""The kernel that dequantises whole weights, run in the emulator, and its TensorIR program and torch form."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kronsched.dtypes import DTYPES
from kronsched.hardware import PRESETS
from kronsched.measure.check import max_relative_error
from kronsched.schedules.dequantise_cuda import DequantiseCuda
from kronsched.workloads.dequantise import Dequantise
from kronsched.workloads.gemm import Gemm
from tests.emulator import build, run_schedule

H200 = PRESETS["nvidia/h200"]
CASES = [
    Dequantise(64, 128, "float16", 32, "symmetric", False),
    Dequantise(100, 300, "bfloat16", 64, "asymmetric", False),
    Dequantise(130, 257, "float16", -1, "float", False),
    Dequantise(64, 200, "float16", 96, "float", True),
]


@pytest.mark.skipif(build.available() is not None, reason=str(build.available()))
@pytest.mark.parametrize("workload", CASES, ids=lambda w: w.label)
def test_the_kernel_is_right(workload: Dequantise) -> None:
    assert run_schedule(DequantiseCuda(), workload, {}, H200, order="random") <= DTYPES[workload.dtype].tolerance


@pytest.mark.parametrize("workload", CASES, ids=lambda w: w.label)
def test_torch_and_tensorir_compute_the_same(workload: Dequantise) -> None:
    import tvm

    inputs = workload.make_inputs(0)
    want = workload.reference(*inputs)
    assert want.shape == workload.output.shape
    torch.testing.assert_close(workload.values(*inputs).double(), want, rtol=1e-6, atol=0)
    if workload.dtype != "float16":
        return
    out = np.empty(workload.output.shape, "float16")
    tvm.compile(workload.program(), target="llvm")["main"](
        *(tvm.runtime.tensor(t.numpy()) for t in inputs), (y := tvm.runtime.tensor(out))
    )
    assert max_relative_error(torch.as_tensor(y.numpy()), want) <= DTYPES["float16"].tolerance


def test_it_is_the_weight_of_the_product() -> None:
    gemm = Gemm(3, 40, 96, group_size=32, zero_point="asymmetric")
    x, *weights = gemm.make_inputs(0)
    workload = Dequantise.of(gemm)
    assert [t.name for t in workload.inputs] == ["w", "s", "z"]
    want = gemm.reference(x, *weights)
    torch.testing.assert_close(x.double() @ workload.reference(*weights)[:40, :96].T, want)
