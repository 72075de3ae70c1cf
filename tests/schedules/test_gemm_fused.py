"""Dense Gemm with an epilogue on CUDA: each store path in the emulator, registers of large tiles, on a GPU every kind."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from kronsched import Gemm, registry
from kronsched.dtypes import DTYPES
from kronsched.errors import InvalidConfig
from kronsched.hardware import PRESETS, resolve_target
from kronsched.measure.check import max_relative_error
from kronsched.runtime.build import build_artefact
from kronsched.runtime.lower import lower
from kronsched.runtime.module import TunedModule
from kronsched.runtime.nvrtc import compile_cuda
from kronsched.schedules.gemm_dense_wgmma_plan import plan_dense
from tests.emulator import run_schedule
from tests.emulator.build import available

H200 = PRESETS["nvidia/h200"]
WGMMA, MMA, INT4, INT4_WGMMA = "gemm_dense_wgmma", "gemm_dense_cuda_mma", "gemm_int4_cuda", "gemm_int4_wgmma"
ALL: dict[str, Any] = {"has_bias": True, "has_residual": True, "relu": True}
TILE = {"block_m": 64, "block_n": 64, "warpgroups": 1, "stages": 2, "group": 1, "split_k": 1, "promote": 0}
TILE |= {"pair": False, "pingpong": False, "cluster": 1}


def dense(m: int, n: int, k: int, dtype: str, out_dtype: str = "", **parts: bool) -> Gemm:
    return Gemm(m, n, k, dtype, dtype, out_dtype=out_dtype, **parts)


CASES: list[tuple[str, Gemm, dict[str, Any] | None]] = [
    (WGMMA, dense(70, 144, 80, "int8", "int8", **ALL), {"block_n": 128}),  # panels of int8
    (WGMMA, dense(70, 71, 37, "int8", "int8", **ALL), {}),  # element by element
    (WGMMA, dense(70, 104, 80, "int8", **ALL), {}),  # panels of float16, scales first
    (MMA, dense(20, 72, 48, "int8", "int8", **ALL), None),  # pairs
    (MMA, dense(20, 71, 48, "bfloat16", **ALL), None),
    (INT4, dense(20, 72, 48, "int4", "int4", has_bias=True, relu=True), None),
]
SLOW: list[tuple[str, Gemm, dict[str, Any] | None]] = [
    (WGMMA, dense(130, 272, 80, "int8", "int8", **ALL), {"block_m": 128, "block_n": 256, "warpgroups": 2}),
    (WGMMA, dense(70, 200, 300, "int8", "int8", **ALL), {"split_k": 2}),
    (WGMMA, dense(70, 100, 80, "int8", "int32", **ALL), {}),
    (WGMMA, dense(200, 200, 72, "float16", **ALL), {"pingpong": True, "warpgroups": 2}),
    (WGMMA, dense(70, 104, 656, "float8_e4m3fn", "float16", **ALL), {"promote": 2}),
    (WGMMA, dense(70, 70, 80, "int8", "int8", has_residual=True), {}),
    (MMA, dense(20, 72, 48, "float8_e5m2", "float16", **ALL), None),
    (MMA, dense(20, 70, 48, "int8", "int32", **ALL), None),
    (INT4, Gemm(20, 72, 48, "uint4", out_dtype="int32", **ALL), None),
    (INT4_WGMMA, Gemm(70, 71, 50, "uint4", out_dtype="int32", **ALL), None),
]


@pytest.mark.skipif(available() is not None, reason=str(available()))
@pytest.mark.parametrize(
    ("name", "w", "knobs"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)],
    ids=lambda v: v.label if isinstance(v, Gemm) else None,
)
def test_emulated_kernel_is_right(name: str, w: Gemm, knobs: dict[str, Any] | None) -> None:
    schedule = registry.schedule(name)
    assert schedule.supports(w, H200) is None
    config = schedule.default_config(w, H200) if knobs is None else {**TILE, **knobs}
    tolerance = 0.0 if w.output.dtype.startswith("int") else DTYPES[w.out_dtype].tolerance / 10
    assert run_schedule(schedule, w, config, H200, seed=3, order="random") <= tolerance


def test_int8_is_staged_in_whole_panels() -> None:
    w = dense(256, 1024, 64, "int8", "int8")
    with pytest.raises(InvalidConfig, match="block_n=192: results are staged 128 columns at a time"):
        plan_dense(w, {**TILE, "block_n": 192}, H200)
    assert [plan_dense(w, {**TILE, "block_n": n}, H200).span for n in (64, 128, 256)] == [0, 1, 2]


def test_two_slabs_of_rows_leave_registers_for_sums() -> None:
    """Scale and bias of a tile's columns must not stay in registers from one slab to the next."""
    w = dense(4096, 4096, 4096, "int8", "int8", **ALL)
    config = {**TILE, "block_m": 128, "block_n": 128, "warpgroups": 2, "stages": 5, "group": 8, "pingpong": True}
    cubin = compile_cuda(lower(w, registry.schedule(WGMMA), config, H200).source, H200.arch)
    assert set(cubin.spill_bytes.values()) == {0}


def test_4_bit_results_are_served_by_the_schedule_that_packs_them() -> None:
    w = dense(64, 64, 64, "int4", "int4")
    assert [s.name for s in registry.schedules_for(w, H200)] == [INT4]
    assert "out_dtype=int4: there is gemm_int4_cuda" in str(registry.schedule(INT4_WGMMA).supports(w, H200))


GPU_CASES = [
    *(case[1] for case in (*CASES, *SLOW)),
    dense(1000, 1002, 1008, "int8", "int8", has_bias=True),
    dense(64, 4096, 4096, "int8", "int8", **ALL),
    dense(4000, 4104, 4040, "int8", "int8", **ALL),
    dense(333, 520, 272, "bfloat16", **ALL),
]


@pytest.mark.cuda
@pytest.mark.parametrize("w", GPU_CASES, ids=lambda w: w.label)
def test_every_schedule_is_right_on_the_gpu(w: Gemm, tmp_path: Path) -> None:
    import torch

    device, inputs = resolve_target("cuda"), w.make_inputs(5, "cuda")
    reference = w.reference(*inputs)
    exact = w.output.dtype.startswith("int")
    for schedule in registry.schedules_for(w, device):
        found = schedule.space(w, device).sample(random.Random(1))
        for i, config in enumerate([schedule.default_config(w, device), *([found.config] if found else [])]):
            where = tmp_path / f"{schedule.name}{i}"
            build_artefact(w, schedule, config, device, where)
            mod = TunedModule.from_artefact(where)
            out = torch.full_like(mod(*inputs), 77 if exact else float("nan"))
            mod(*inputs, out=out)
            error = max_relative_error(out, reference)
            assert error <= (0.0 if exact else DTYPES[w.out_dtype].tolerance / 2), f"{schedule.name} {dict(config)}"
