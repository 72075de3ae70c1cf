"""Complex numbers in KSMatmul: which schedules serve them, any shape and config on the CPU, the CUDA kernel in the emulator."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kronsched import registry
from kronsched.dtypes import DTYPES
from kronsched.hardware import PRESETS, resolve_target
from kronsched.measure.check import max_relative_error
from kronsched.runtime.load import load
from kronsched.runtime.lower import lower
from kronsched.schedules.ks_cpu_complex import KSCpuComplex
from kronsched.schedules.ks_cuda_complex import KSCudaComplex
from kronsched.workloads.ks import KSMatmul
from tests.contract.schedule_battery import run_on_cpu
from tests.emulator import build, run_schedule

H200 = PRESETS["nvidia/h200"]
LAYOUTS = ("batch_first", "batch_last")


@pytest.mark.parametrize("dtype", ["complex64", "complex128"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_schedule_serves_them_on_each_kind_of_device(dtype: str, layout: str) -> None:
    for pattern in ((4, 64, 64, 4), ((2, 16, 16, 1), (1, 16, 32, 1))):
        workload = KSMatmul(25088, pattern, dtype, layout)
        assert [s.name for s in registry.schedules_for(workload, H200)] == ["ks_cuda_complex"]
        assert [s.name for s in registry.schedules_for(workload, resolve_target("cpu"))] == ["ks_cpu_complex"]


@settings(max_examples=6, deadline=None)
@given(st.tuples(*[st.integers(1, 20)] * 3), st.integers(1, 3), st.integers(1, 20), st.sampled_from(LAYOUTS), st.integers(0, 99))
def test_any_shape_and_config_is_right_on_the_cpu(bcd: tuple[int, int, int], a: int, batch: int, layout: str, seed: int) -> None:
    cpu, schedule = resolve_target("cpu"), KSCpuComplex()
    w = KSMatmul(batch, (a, *bcd), "complex64", layout, bias=bool(seed & 1), residual=bool(seed & 2))
    candidate = schedule.space(w, cpu).sample(random.Random(seed))
    assert candidate is not None
    inputs = w.make_inputs(seed)
    output = run_on_cpu(schedule.apply(w, candidate.config, cpu), w, inputs)
    assert max_relative_error(output, w.reference(*inputs)) < 2e-6


@pytest.mark.skipif(build.available() is not None, reason="no emulator")
@pytest.mark.parametrize(
    ("workload", "order"),
    [
        (KSMatmul(7, (2, 11, 9, 3), "complex64", bias=True, residual=True), "random"),
        (KSMatmul(3, (2, 5, 3, 2), "complex128", "batch_last"), "reverse"),
    ],
    ids=str,
)
def test_cuda_kernels_are_right_and_stay_in_bounds(workload: KSMatmul, order: str) -> None:
    schedule = KSCudaComplex()
    error = run_schedule(schedule, workload, schedule.default_config(workload, H200), H200, order=order)
    assert error < (5e-7 if workload.dtype == "complex64" else 1e-14)


@pytest.mark.parametrize(("dtype", "vector"), [("complex64", "float2"), ("complex128", "double2")])
def test_a_pair_is_one_access(dtype: str, vector: str) -> None:
    workload = KSMatmul(25088, (4, 64, 64, 4), dtype)
    schedule = KSCudaComplex()
    source = lower(workload, schedule, schedule.default_config(workload, H200), H200).source
    for pointer in ("x_ptr", "w_ptr", "y_ptr"):
        assert f"*({vector}*)({pointer} +" in source


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", ["complex64", "complex128", "float64"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_on_a_gpu(dtype: str, layout: str) -> None:
    for batch, pattern in ((77, (3, 17, 5, 7)), (1000, ((4, 16, 32, 2), (1, 96, 128, 1))))[: 2 if dtype == "complex64" else 1]:
        w = KSMatmul(batch, pattern, dtype, layout, bias=True, residual=True)
        module = load(w, device="cuda")
        x, *rest = w.make_inputs(1, "cuda")
        assert max_relative_error(module(x, *rest), w.reference(x, *rest)) <= DTYPES[dtype].tolerance / 10
        if x.is_complex():
            assert torch.equal(module(x.conj(), *rest), module(x.conj().resolve_conj(), *rest))
