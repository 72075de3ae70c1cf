"""Conv2d on a GPU: the adversarial suite through every schedule that serves it, and a persistent kernel with many tiles."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kronsched import registry
from kronsched.bench.suites import load_suite
from kronsched.dtypes import DTYPES
from kronsched.hardware import resolve_target
from kronsched.measure.check import max_relative_error
from kronsched.runtime.build import build_artefact
from kronsched.runtime.module import TunedModule
from kronsched.workloads.conv2d import Conv2d

CASES = [w for w in load_suite("conv2d", "adversarial") if isinstance(w, Conv2d)]


def check(conv: Conv2d, name: str, config: object, where: Path) -> None:
    build_artefact(conv, registry.schedule(name), config, resolve_target("cuda"), where)  # type: ignore[arg-type]
    inputs = conv.make_inputs(5, "cuda")
    out = torch.full(conv.output.shape, 77, dtype=getattr(torch, conv.out_dtype), device="cuda")
    TunedModule.from_artefact(where)(*inputs, out=out)
    error = max_relative_error(out, conv.reference(*inputs))
    assert error <= DTYPES[conv.out_dtype].tolerance, f"{error:.2g} by {name} with {config}"


@pytest.mark.cuda
@pytest.mark.parametrize("everything", [False, True], ids=["plain", "epilogue"])
@pytest.mark.parametrize("conv", CASES, ids=lambda w: w.label)
def test_adversarial_case_is_right(conv: Conv2d, everything: bool, tmp_path: Path) -> None:
    if everything:
        conv = replace(conv, has_bias=True, has_residual=True, relu=True, has_scale=conv.out_dtype != "int32")
    device, rng = resolve_target("cuda"), random.Random(1)
    schedules = registry.schedules_for(conv, device)
    assert schedules
    for schedule in schedules:
        found = [schedule.space(conv, device).sample(rng) for _ in range(2)]
        configs = [schedule.default_config(conv, device), *(c.config for c in found if c is not None)]
        for i, config in enumerate(configs):
            check(conv, schedule.name, config, tmp_path / f"{schedule.name}{i}")


@pytest.mark.cuda
@pytest.mark.parametrize("start", ["serial", "wait"])
def test_blocks_that_go_through_many_tiles(start: str, tmp_path: Path) -> None:
    schedule, device = registry.schedule("conv2d_cuda_wgmma"), resolve_target("cuda")
    conv = Conv2d(16, 56, 56, 64, 128, 3, padding=1, has_residual=True)
    if (reason := schedule.supports(conv, device)) is not None:
        pytest.skip(reason)
    for overlap in (0, 1):
        config = {**schedule.default_config(conv, device), "persistent": True, "start": start, "overlap": overlap}
        config |= {"block_m": 128, "block_n": 64, "row_groups": 2, "col_groups": 1, "stages": 4, "per_sm": 2, "vector": 16}
        assert schedule.space(conv, device).invalid(config) is None
        check(conv, schedule.name, config, tmp_path / str(overlap))
