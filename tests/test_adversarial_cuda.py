"""Every adversarial case of the kron suite on a GPU: right with the default and with random configs, through the public path."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from kronsched.bench.suites import load_suite
from kronsched.dtypes import DTYPES
from kronsched.errors import InvalidConfig
from kronsched.hardware import resolve_target
from kronsched.measure.check import max_relative_error
from kronsched.runtime.build import build_artefact
from kronsched.runtime.executable import load_executable
from kronsched.schedules.kron_cuda_simt import KronCudaSimt
from kronsched.workloads.kron import KronMatmul

CASES = load_suite("kron", "adversarial")


@pytest.mark.cuda
@pytest.mark.parametrize("workload", CASES, ids=lambda w: w.label.replace(" ", "_"))
def test_adversarial_case_is_right_on_this_gpu(workload: KronMatmul, tmp_path: Path) -> None:
    device, schedule, rng = resolve_target("cuda"), KronCudaSimt(), random.Random(0)
    space = schedule.space(workload, device)
    configs = [schedule.default_config(workload, device)]
    configs += [c.config for c in (space.sample(rng) for _ in range(3)) if c is not None]
    inputs = workload.make_inputs(7, "cuda")
    reference = workload.reference(*inputs)
    for i, config in enumerate(configs):
        try:
            build_artefact(workload, schedule, config, device, tmp_path / str(i))
        except InvalidConfig as e:  # the space's estimate of shared memory may be too low for a drawn config
            assert i > 0, f"the default config must build: {e}"
            continue
        output = torch.full(workload.output.shape, float("nan"), dtype=DTYPES[workload.dtype].torch(), device="cuda")
        load_executable(tmp_path / str(i))(inputs, output)
        torch.cuda.synchronize()
        assert max_relative_error(output, reference) <= DTYPES[workload.dtype].tolerance, config


@pytest.mark.cuda
def test_a_nan_row_stays_in_its_row(tmp_path: Path) -> None:
    workload = KronMatmul(33, [(7, 7)] * 3)
    device, schedule = resolve_target("cuda"), KronCudaSimt()
    build_artefact(workload, schedule, schedule.default_config(workload, device), device, tmp_path / "a")
    inputs = workload.make_inputs(3, "cuda")
    inputs[0][5] = float("nan")
    output = torch.zeros(workload.output.shape, device="cuda")
    load_executable(tmp_path / "a")(inputs, output)
    rows = torch.isnan(output).any(dim=1)
    assert rows[5] and int(rows.sum()) == 1
    assert torch.isnan(output[5]).all()


@pytest.mark.cuda
def test_a_view_off_a_vector_boundary_is_right(tmp_path: Path) -> None:
    from kronsched.runtime.module import TunedModule

    workload = KronMatmul(64, [(8, 8)] * 4)
    device, schedule = resolve_target("cuda"), KronCudaSimt()
    build_artefact(workload, schedule, schedule.default_config(workload, device), device, tmp_path / "a")
    module = TunedModule.from_artefact(tmp_path / "a")
    x, *factors = workload.make_inputs(3, "cuda")
    shifted = torch.empty(x.numel() + 1, device="cuda")[1:].view(x.shape).copy_(x)
    out = torch.empty(x.numel() + 1, device="cuda")[1:].view(x.shape)
    y = module(shifted, *factors, out=out)
    assert max_relative_error(y, workload.reference(x, *factors)) <= DTYPES["float32"].tolerance
