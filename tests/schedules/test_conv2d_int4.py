"""4-bit convolution: sm_80's instruction in the emulator, every architecture through NVRTC, and extremes on a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import kronsched
from kronsched import Conv2d, Gemm, registry
from kronsched.errors import ArgumentError
from kronsched.hardware import PRESETS, resolve_target
from kronsched.hardware.device import Device
from kronsched.runtime.build import build_artefact, lower_source
from kronsched.runtime.module import TunedModule
from kronsched.workloads.base import Workload
from kronsched.workloads.int4 import pack_int4, unpack_int4
from tests.emulator import build, run_schedule

emulated = pytest.mark.skipif(build.available() is not None, reason=str(build.available()))
SCHEDULE = registry.schedule("conv2d_cuda_int4")


def _device(arch: str) -> Device:
    return next((p for p in PRESETS.values() if p.arch == arch), replace(PRESETS["nvidia/a100"], arch=arch))


def test_packing_is_inverted_by_unpacking() -> None:
    signed, unsigned = torch.arange(-8, 8).reshape(2, 8), torch.arange(16).reshape(2, 8)
    assert torch.equal(unpack_int4(pack_int4(signed)), signed.to(torch.int8))
    assert torch.equal(unpack_int4(pack_int4(unsigned), signed=False), unsigned.to(torch.int8))
    assert pack_int4(torch.tensor([1, 2])).tolist() == [0x21]
    with pytest.raises(ArgumentError, match="last extent of 3"):
        pack_int4(torch.zeros(2, 3))


@emulated
@pytest.mark.parametrize(
    ("workload", "knobs"),
    [
        (Conv2d(2, 9, 9, 32, 64, 3, padding=1, in_dtype="int4"), {"vector": 16, "warp_col_tiles": 8}),
        (Conv2d(1, 9, 9, 32, 32, 3, padding=1, in_dtype="uint4", has_bias=True, relu=True), {"vector": 8, "warp_col_tiles": 4}),
        (Conv2d(1, 9, 9, 6, 22, 3, stride=2, padding=1, in_dtype="uint4", out_dtype="int4"), {"vector": 2}),
        (Conv2d(1, 8, 8, 34, 32, 1, in_dtype="int4", out_dtype="int32"), {}),
    ],
    ids=["8 bytes a store", "4 bytes", "1 byte, padded channels", "int32"],
)
def test_the_instruction_for_four_bits(workload: Workload, knobs: Mapping[str, Any]) -> None:
    device = _device("sm_80")
    config = {**SCHEDULE.default_config(workload, device), **knobs}
    assert run_schedule(SCHEDULE, workload, config, device, seed=3, order="reverse") == 0


def test_only_hopper_and_later_unpack() -> None:
    workload = Conv2d(1, 8, 8, 64, 64, 3, padding=1, in_dtype="uint4")
    for arch, native in (("sm_80", True), ("sm_89", True), ("sm_90a", False)):
        device = _device(arch)
        source, _ = lower_source(workload, SCHEDULE, SCHEDULE.default_config(workload, device), device)
        assert ("m16n8k64.row.col.s32.u4.s4.s32" in source) == native
        assert ("conv2d_unpack" in source) != native


@pytest.mark.parametrize("arch", ["sm_80", pytest.param("sm_86", marks=pytest.mark.slow), "sm_89", "sm_90a"])
@pytest.mark.parametrize(
    "workload", [Conv2d(8, 14, 14, 256, 256, 3, padding=1, in_dtype="int4"), Gemm(64, 256, 256, "int4", "int4")]
)
def test_compiles_for(arch: str, workload: Workload, tmp_path: Path) -> None:
    device = _device(arch)
    schedule = next(s for s in registry.schedules_for(workload, device) if "cuda_int4" in s.name or "int4_cuda" in s.name)
    manifest = build_artefact(workload, schedule, schedule.default_config(workload, device), device, tmp_path / "x")
    assert manifest.registers and not manifest.spill_bytes


def test_a_product_with_odd_columns_is_refused_with_the_reason_or_served() -> None:
    workload, device = Gemm(5, 7, 24, "int4", "int4"), PRESETS["nvidia/a100"]
    assert not registry.schedules_for(workload, device)
    assert "gemm_int4_cuda: n=7: it stores two columns at a time" in registry.not_served(workload, device)
    assert [s.name for s in registry.schedules_for(workload, PRESETS["nvidia/h200"])] == ["gemm_int4_wgmma"]


@pytest.mark.cuda
@pytest.mark.parametrize("out_dtype", ["int4", "int32"])
def test_extremes_are_exact(out_dtype: str) -> None:
    workload = Conv2d(2, 14, 14, 256, 64, 3, padding=1, in_dtype="int4", out_dtype=out_dtype)
    inputs = workload.make_inputs(0, "cuda")
    for value in (-8, 7):
        inputs[0].copy_(pack_int4(torch.full((2, 14, 14, 256), value)))
        inputs[1].copy_(pack_int4(torch.full((64, 3, 3, 256), -8)))
        y = kronsched.load(workload, device="cuda")(*inputs)
        assert torch.equal(y.double(), workload.reference(*inputs))


@pytest.mark.cuda
@pytest.mark.parametrize("name", ["gemm_int4_cuda", "gemm_int4_wgmma"])
@pytest.mark.parametrize("m", [1, 100])
def test_a_product_on_the_gpu(m: int, name: str, tmp_path: Path) -> None:
    workload, device, schedule = Gemm(m, 200, 130, "int4", "int4"), resolve_target("cuda"), registry.schedule(name)
    if (reason := schedule.supports(workload, device)) is not None:
        pytest.skip(reason)
    build_artefact(workload, schedule, schedule.default_config(workload, device), device, tmp_path / "x")
    inputs = workload.make_inputs(1, "cuda")
    assert torch.equal(TunedModule.from_artefact(tmp_path / "x")(*inputs).double(), workload.reference(*inputs))
