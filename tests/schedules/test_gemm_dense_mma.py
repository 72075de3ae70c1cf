"""The mma.sync Gemm without a GPU: what it serves, every way of copying in the emulator, what ptxas makes of it."""

from __future__ import annotations

import pytest
import torch

from kronsched import Gemm
from kronsched.dtypes import DTYPES
from kronsched.errors import InvalidConfig
from kronsched.hardware import resolve_target
from kronsched.runtime.lower import lower
from kronsched.runtime.nvrtc import compile_cuda
from kronsched.schedules.gemm_dense_mma import GemmDenseMma
from kronsched.schedules.gemm_dense_mma_plan import plan_mma
from kronsched.space import Config
from tests.emulator import run_schedule
from tests.emulator.build import available
from tests.runtime.runtime_toys import A100

H200 = resolve_target("nvidia/h200")
PRESET_A100 = resolve_target("nvidia/a100")
SCHEDULE = GemmDenseMma()
emulated = pytest.mark.skipif(available() is not None, reason=str(available()))


def dense(m: int, n: int, k: int, dtype: str = "float16", out_dtype: str = "") -> Gemm:
    return Gemm(m, n, k, dtype, dtype, out_dtype=out_dtype)


def config(**knobs: int) -> Config:
    return {"warps_m": 2, "warps_n": 2, "warp_m": 32, "warp_n": 32, "stages": 3, **knobs}


def test_what_is_served() -> None:
    assert SCHEDULE.supports(dense(3, 5, 7), H200) is None
    assert SCHEDULE.supports(dense(3, 5, 7, "float8_e4m3fn"), A100) is None
    assert "dense" in str(SCHEDULE.supports(Gemm(16, 64, 128), H200))


def test_a_config_that_cannot_run_says_why() -> None:
    w = dense(4096, 4096, 4096)
    with pytest.raises(InvalidConfig, match="registers than a multiprocessor has"):
        plan_mma(w, config(warps_m=4, warps_n=4, warp_m=64, warp_n=64), H200)
    with pytest.raises(InvalidConfig, match="bytes of shared memory, the device has"):
        plan_mma(w, config(warps_m=4, warps_n=2, warp_m=64, warp_n=64, stages=5), H200)


@emulated
@pytest.mark.parametrize(
    ("w", "knobs", "order"),
    [
        (dense(70, 130, 200), {}, "reverse"),  # 16-byte chunks, ragged everywhere
        (dense(70, 129, 77, "bfloat16"), {"stages": 2}, "random"),  # element by element
        (dense(33, 40, 208, "int8"), {"warps_m": 1, "warp_n": 16}, "random"),
        (dense(50, 41, 77, "int8", "int32"), {"warps_n": 1}, "reverse"),
        (dense(20, 40, 150, "float8_e4m3fn"), {"warps_m": 1, "warps_n": 1, "stages": 4}, "random"),
    ],
    ids=lambda v: v.label if isinstance(v, Gemm) else None,
)
def test_emulated_kernel_is_right(w: Gemm, knobs: dict[str, int], order: str) -> None:
    assert run_schedule(SCHEDULE, w, config(**knobs), PRESET_A100, seed=3, order=order) <= DTYPES[w.out_dtype].tolerance / 10


@emulated
def test_every_float8_number_is_multiplied_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of x are multiples of the unit vectors: y shows each of w's 256 values, NaN and subnormal numbers among them."""
    w = dense(16, 16, 16, "float8_e4m3fn", "float16")

    def inputs(self: Gemm, seed: int, device: str = "cpu") -> list[torch.Tensor]:
        weight = torch.arange(256, dtype=torch.uint8).view(16, 16)
        weight[weight & 0x7F == 0x7F] = 0x08  # NaN would spread over a row: see test_gemm_dense.py
        return [torch.eye(16).to(torch.float8_e4m3fn), weight.view(torch.float8_e4m3fn), torch.ones(16), torch.ones(16)]

    monkeypatch.setattr(Gemm, "make_inputs", inputs)
    assert run_schedule(SCHEDULE, w, config(warps_m=1, warps_n=1, warp_m=16, warp_n=16), PRESET_A100) == 0.0


@pytest.mark.parametrize("dtype", ["float16", "int8", "float8_e5m2"])
@pytest.mark.parametrize("k", [4096, 4095])
def test_the_default_of_a_large_shape_compiles_without_spills(dtype: str, k: int) -> None:
    w = dense(4096, 4096, k, dtype)
    source = lower(w, SCHEDULE, SCHEDULE.default_config(w, PRESET_A100), PRESET_A100).source
    assert set(compile_cuda(source, "sm_80").spill_bytes.values()) == {0}
