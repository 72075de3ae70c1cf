"""Bias, activation and residual in the CUDA kernels of Kronecker-sparse products: results, the gelu polynomial, who serves."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest

from kronsched.hardware import PRESETS
from kronsched.registry import schedule
from kronsched.schedules.ks_epilogue import FARTHEST, LOG2_TAIL
from kronsched.workloads.ks import KSMatmul
from tests.emulator import run_schedule
from tests.emulator.build import available

H200 = PRESETS["nvidia/h200"]
TINY = dataclasses.replace(H200, units=2)
ALL: dict[str, Any] = {"bias": True, "activation": "gelu", "residual": True}
slow = pytest.mark.slow
RESULTS = [
    ("ks_cuda_mma", KSMatmul(37, (2, 20, 24, 1), "float16", **ALL), {"store": "staged"}),
    ("ks_cuda_mma_last", KSMatmul(40, (2, 20, 24, 3), "float32", "batch_last", **ALL), {}),
    (
        "ks_cuda_tma",
        KSMatmul(136, (2, 72, 65, 2), "bfloat16", "batch_last", **ALL),
        {"block_m": 64, "block_n": 64, "warpgroups": 1, "stages": 2, "pingpong": False},
    ),
    ("ks_cuda_pair", KSMatmul(70, [(2, 16, 32, 1), (1, 32, 16, 2)], "float16", **ALL), {}),  # type: ignore[arg-type]
]
MORE = [
    ("ks_cuda_simt", KSMatmul(5, [(2, 3, 2, 1), (1, 4, 3, 2)], "float32", **ALL), {}),  # type: ignore[arg-type]
    ("ks_cuda_simt", KSMatmul(5, (2, 3, 2, 3), "float16", "batch_last", bias=True, activation="silu"), {}),
    ("ks_cuda_mma", KSMatmul(37, (1, 20, 24, 2), "float32", activation="silu", residual=True), {"store": "direct"}),
    (
        "ks_cuda_mma",
        KSMatmul(70, (1, 24, 24, 16), "bfloat16", bias=True, activation="relu"),
        {"store": "pair", "lunits": 2, "pairs": 1, "mt": 1, "mma": "sync"},
    ),
    ("ks_cuda_mma", KSMatmul(67, (2, 20, 24, 8), "float16", bias=True, residual=True), {"mma": "wgmma", "warps_m": 4, "mt": 1}),
    ("ks_cuda_mma_last", KSMatmul(520, (2, 20, 24, 1), "bfloat16", "batch_last", **ALL), {"mma": "wgmma", "warps_n": 4}),
    ("ks_cuda_mma_last", KSMatmul(516, (1, 20, 72, 2), "float32", "batch_last", **ALL), {"mma": "wgmma", "warps_n": 4}),
    ("ks_cuda_tma", KSMatmul(200, (3, 72, 136, 1), "float16", **ALL), {}),
]


@pytest.mark.skipif(available() is not None, reason=str(available()))
@pytest.mark.parametrize(
    ("name", "w", "change"),
    [pytest.param(*c, id=f"{c[0]} {c[1].label}") for c in RESULTS]
    + [pytest.param(*c, id=f"{c[0]} {c[1].label}", marks=slow) for c in MORE],
)
def test_results(name: str, w: KSMatmul, change: dict[str, Any]) -> None:
    chosen = schedule(name)
    config = {**chosen.default_config(w.plain, TINY), **change}
    error = run_schedule(chosen, w, config, TINY, order="random")
    assert error < {"float32": 2e-6, "float16": 2e-3, "bfloat16": 1e-2}[w.dtype]


@pytest.mark.parametrize(("item", "least"), [(2, 1e-6), (4, 4e-7)])
def test_the_gelu_polynomial_is_near_the_normal_distribution(item: int, least: float) -> None:
    """As the kernels compute it, in float32, but for ex2, whose error is below 2^-22."""
    x = np.linspace(-9, 9, 20_001, dtype=np.float32)
    u = np.minimum(np.abs(x), np.float32(FARTHEST))
    log2 = np.zeros_like(u)
    for coefficient in reversed(LOG2_TAIL[item]):
        log2 = log2 * u + np.float32(coefficient)
    y = np.float32(0.5) * (x + np.abs(x)) - u * np.exp2(log2)
    want = np.array([0.5 * v * math.erfc(-v / math.sqrt(2)) for v in x.astype(np.float64)])
    assert np.max(np.abs(y - want) / np.maximum(1, np.abs(want))) < least
    tail = (x < -1) & (x > -4)
    assert np.max(np.abs(y - want)[tail] / -want[tail]) < (2e-4 if item == 2 else 4e-5)  # also relative to small results


def test_a_chain_has_its_epilogue_in_the_last_launch() -> None:
    w = KSMatmul(64, [(2, 16, 16, 1), (1, 32, 32, 1)], "float16", **ALL)  # type: ignore[arg-type]
    chosen = schedule("ks_cuda_mma")
    *first, last = chosen.apply(w, chosen.default_config(w, H200), H200).launches
    assert {"bias", "residual"} <= set(last.args) and not any({"bias", "residual"} & set(one.args) for one in first)


@pytest.mark.parametrize("name", ["ks_cuda_tma", "ks_cuda_sorted"])
def test_schedules_that_merge_slices_refuse(name: str) -> None:
    w = KSMatmul(4096, (1, 1024, 1024, 4), "float16" if name == "ks_cuda_tma" else "float32")
    assert schedule(name).supports(w, H200) is None
    reason = schedule(name).supports(dataclasses.replace(w, bias=True), H200)
    assert reason is not None and "epilogue is not served" in reason
