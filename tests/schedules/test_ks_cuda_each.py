"""Chains whose factors have configs of their own: the space, the default, results."""

from __future__ import annotations

import dataclasses

import pytest

from kronsched.hardware import PRESETS
from kronsched.schedules.ks_cuda_each import KSCudaEach, KSCudaEachLast
from kronsched.schedules.ks_cuda_mma import KSCudaMma, KSCudaMmaLast
from kronsched.workloads.ks import KSMatmul
from tests.emulator import run_schedule
from tests.emulator.build import available

H200 = PRESETS["nvidia/h200"]
VIT = KSMatmul(25088, ((6, 64, 256, 1), (1, 128, 128, 3)), "float16")
SMALL = KSMatmul(70, ((2, 16, 32, 1), (1, 32, 16, 2)), "float16", bias=True, activation="gelu", residual=True)


@pytest.mark.parametrize("layout", ["batch_first", "batch_last"])
def test_the_default_is_that_of_each_factor_and_never_expected_to_be_slower(layout: str) -> None:
    w = dataclasses.replace(VIT, layout=layout)
    each, shared = (KSCudaEach(), KSCudaMma()) if layout == "batch_first" else (KSCudaEachLast(), KSCudaMmaLast())
    config = each.default_config(w, H200)
    assert each.space(w, H200).invalid(config) is None
    plans = each.plans(w, H200, config)
    for pattern, plan in zip(w.patterns, plans, strict=True):
        alone = dataclasses.replace(w, pattern=pattern)
        assert shared.plans(alone, H200, shared.default_config(alone, H200)) == [plan]
    ours = each.expected_us(w, config, H200)
    assert ours <= shared.expected_us(w, shared.default_config(w, H200), H200) * (1 + 1e-9)


def test_a_wrong_knob_names_its_factor() -> None:
    each = KSCudaEach()
    config = {**each.default_config(VIT, H200), "pairs_1": 64}
    assert (reason := each.space(VIT, H200).invalid(config)) is not None and "pairs_1" in reason
    config = {**each.default_config(VIT, H200), "mma_1": "wgmma", "warps_m_1": 2, "mt_1": 1}
    assert (reason := each.space(VIT, H200).invalid(config)) is not None and reason.startswith("factor 1: ")


@pytest.mark.parametrize("patterns", [((2, 16, 32, 1),), ((2, 16, 16, 1),) * 5])
def test_other_numbers_of_factors_are_refused(patterns: tuple[tuple[int, int, int, int], ...]) -> None:
    w = KSMatmul(64, patterns, "float16")
    assert KSCudaEach().supports(w, H200) == f"{len(patterns)} factors: 2 to 4 are served"


@pytest.mark.slow  # in the contract test there is one of batch_first
@pytest.mark.skipif(available() is not None, reason=str(available()))
@pytest.mark.parametrize("layout", ["batch_first", "batch_last"])
def test_results_with_different_configs(layout: str) -> None:
    first = layout == "batch_first"
    w = dataclasses.replace(SMALL, batch=72, layout=layout)
    each = KSCudaEach() if first else KSCudaEachLast()
    change = {"store_0": "direct", "store_1": "staged"} if first else {"vector_0": 8, "vector_1": 16}
    config = {**each.default_config(w, H200), **change}
    assert run_schedule(each, w, config, H200, order="random") < 2e-3
