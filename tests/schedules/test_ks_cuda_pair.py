"""Two Kronecker-sparse factors in one launch: results over several tiles, what is refused, what ptxas makes of it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from kronsched.bench.suites import load_suite
from kronsched.errors import InvalidConfig
from kronsched.hardware import PRESETS
from kronsched.runtime.build import build_artefact
from kronsched.schedules.ks_cuda_pair import KSCudaPair
from kronsched.schedules.ks_pair_plan import plan_pair
from kronsched.workloads.ks import KSMatmul
from tests.emulator import run_schedule

H200, A100 = PRESETS["nvidia/h200"], PRESETS["nvidia/a100"]
TINY = dataclasses.replace(H200, units=2)
"""So few SMs that a block works through several tiles."""
PAIR = KSCudaPair()
VIT = KSMatmul(25088, [(2, 48, 192, 1), (1, 192, 48, 2)], "float16")


@pytest.mark.parametrize(
    ("batch", "chain", "mt", "warps_m", "warps_n"),
    [
        (70, [(2, 16, 32, 1), (1, 16, 16, 2)], 2, 1, 2),
        pytest.param(70, [(3, 16, 16, 1), (1, 24, 16, 3)], 2, 1, 1, marks=pytest.mark.slow),
        pytest.param(33, [(4, 8, 16, 1), (2, 8, 16, 1)], 1, 1, 4, marks=pytest.mark.slow),
        pytest.param(7, [(2, 16, 16, 1), (1, 8, 16, 2)], 1, 1, 1, marks=pytest.mark.slow),
    ],
)
def test_results_over_several_tiles(
    batch: int, chain: list[tuple[int, int, int, int]], mt: int, warps_m: int, warps_n: int
) -> None:
    config = {"mt": mt, "warps_m": warps_m, "warps_n": warps_n, "min_blocks": 1}
    assert run_schedule(PAIR, KSMatmul(batch, chain, "float16"), config, TINY, order="random") < 2e-3


@pytest.mark.slow
def test_the_chain_of_a_vision_transformer() -> None:
    w = dataclasses.replace(VIT, batch=150)
    assert run_schedule(PAIR, w, {"mt": 2, "warps_m": 2, "warps_n": 4, "min_blocks": 1}, TINY, order="reverse") < 2e-3


@pytest.mark.parametrize(
    ("w", "reason"),
    [
        (KSMatmul(64, (2, 16, 16, 1), "float16"), "1 factors"),
        (KSMatmul(64, [(2, 16, 16, 1)] * 3, "float16"), "3 factors"),
        (KSMatmul(64, [(2, 16, 16, 1)] * 2), "float32 in batch_first"),
        (KSMatmul(64, [(2, 16, 16, 1)] * 2, "float16", "batch_last"), "float16 in batch_last"),
        (KSMatmul(64, [(1, 16, 16, 2), (2, 16, 16, 1)], "float16"), "d = 2 and 1"),
        (KSMatmul(64, [(4, 16, 16, 1), (1, 16, 8, 8)], "float16"), "d = 1 and 8"),
        (KSMatmul(64, [(2, 12, 16, 1), (2, 16, 12, 1)], "float16"), "12 is no multiple"),
        (KSMatmul(64, [(6, 64, 64, 1), (1, 768, 192, 2)], "float16"), "do not fit"),
    ],
)
def test_what_it_refuses_it_names(w: KSMatmul, reason: str) -> None:
    assert reason in (PAIR.supports(w, H200) or "")


def test_a_config_that_is_too_large_is_refused() -> None:
    for change, reason in (
        ({"warps_m": 8}, "shared memory"),
        ({"warps_m": 4, "min_blocks": 2}, "shared memory"),
        ({"warps_n": 64}, "there is work for"),
    ):
        with pytest.raises(InvalidConfig, match=reason):
            plan_pair(VIT, {"mt": 1, "warps_m": 1, "warps_n": 1, "min_blocks": 1, **change}, H200)
    with pytest.raises(InvalidConfig, match="larger than the batch"):
        plan_pair(dataclasses.replace(VIT, batch=16), {"mt": 1, "warps_m": 2, "warps_n": 1, "min_blocks": 1}, H200)


def test_the_default_fills_the_gpu_and_does_not_spill(tmp_path: Path) -> None:
    assert VIT in load_suite("ks", "vit", "float16") and PAIR.supports(VIT, H200) is None
    config = PAIR.default_config(VIT, H200)
    assert config == {"mt": 1, "warps_m": 2, "warps_n": 4, "min_blocks": 1}
    plan = plan_pair(VIT, config, H200)
    assert plan.blocks == plan.min_blocks * H200.units and plan.tiles * plan.rows // H200.units <= 192
    manifest = build_artefact(VIT, PAIR, config, H200, tmp_path, "nvrtc")
    assert len(manifest.launches) == 1 and manifest.spill_bytes == 0
    smaller = plan_pair(VIT, PAIR.default_config(VIT, A100), A100)
    assert smaller.shared_words * smaller.min_blocks < plan.shared_words * plan.min_blocks
