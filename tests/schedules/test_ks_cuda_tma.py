"""The TMA schedule of KSMatmul: sizes, launches, results of both layouts at ragged edges, what ptxas makes of it."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import pytest

from kronsched.errors import InvalidConfig
from kronsched.hardware import PRESETS
from kronsched.runtime.build import build_artefact
from kronsched.schedules.ks_cuda_tma import KSCudaTma
from kronsched.schedules.ks_tile_plan import plan_tile
from kronsched.workloads.ks import KSMatmul
from tests.emulator import run_schedule
from tests.emulator.build import available

H200, A100 = PRESETS["nvidia/h200"], PRESETS["nvidia/a100"]
TINY = dataclasses.replace(H200, units=2)
"""So few SMs that a block works through several units."""
SCHEDULE = KSCudaTma()
CONFIG: dict[str, Any] = {"block_m": 64, "block_n": 64, "warpgroups": 1, "stages": 2, "pingpong": False}
PAIR = {"warpgroups": 2, "pingpong": True, "stages": 3}
emulated = pytest.mark.skipif(available() is not None, reason=str(available()))


# -- what it serves ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("workload", "reason"),
    [
        (KSMatmul(64, (1, 64, 64, 4)), "float32"),
        (KSMatmul(64, (1, 64, 40, 1), "float16"), "smaller than 48"),
        (KSMatmul(64, (1, 64, 68, 1), "float16"), "runs of 68"),
        (KSMatmul(64, (1, 192, 192, 4), "float16"), "too small"),
        (KSMatmul(63, (1, 96, 256, 4), "float16", "batch_last"), "batch=63"),
    ],
)
def test_what_is_not_served_is_said(workload: KSMatmul, reason: str) -> None:
    assert reason in str(SCHEDULE.supports(workload, H200))
    assert "sm_90a" in str(SCHEDULE.supports(KSMatmul(64, (1, 64, 64, 4), "float16"), A100))


def test_tiles_that_would_be_half_empty_are_refused() -> None:
    w = KSMatmul(4096, (1, 64, 64, 4), "float16", "batch_last")
    with pytest.raises(InvalidConfig, match="twice as large"):
        plan_tile(w, w.patterns[0], {**CONFIG, "block_m": 128, "warpgroups": 2}, H200)
    assert SCHEDULE.default_config(KSMatmul(8, (1, 64, 64, 4), "float16"), H200)["block_m"] == 64


@pytest.mark.parametrize("layout", ["batch_first", "batch_last"])
def test_maps_reach_each_element_once(layout: str) -> None:
    w = KSMatmul(16, (2, 64, 72, 5), "float16", layout)
    plan = plan_tile(w, w.patterns[0], CONFIG, H200)
    for view, elements in ((plan.data(72), 16 * 2 * 72 * 5), (plan.data(64), 16 * 2 * 64 * 5), (plan.weights, 2 * 64 * 72 * 5)):
        fast, rows, inner, outer = view.extents
        places = {
            r * view.strides[0] + x * view.strides[1] + o * view.strides[2] + f
            for r in range(rows) for x in range(inner) for o in range(outer) for f in (0, fast - 1)
        }  # fmt: skip
        assert fast * rows * inner * outer == elements
        assert len(places) == 2 * rows * inner * outer and max(places) == elements - 1
        assert all(stride % 8 == 0 for stride in view.strides)


@pytest.mark.parametrize(
    ("pattern", "layout"),
    [
        ((2, 136, 72, 5), "batch_first"),
        ((2, 136, 72, 1), "batch_first"),
        ((2, 136, 72, 3), "batch_last"),
        ((1, 4096, 4096, 1), "batch_first"),
    ],
)
def test_every_unit_is_taken_once(pattern: Any, layout: str) -> None:
    w = KSMatmul(200, pattern, "float16", layout)
    plan = plan_tile(w, pattern, CONFIG, H200)
    places = {plan.place(unit) for unit in range(plan.units)}
    assert places == set(itertools.product(range(plan.m_tiles), range(plan.n_tiles), range(pattern[0] * pattern[3])))


def test_launches_of_each_kind() -> None:
    def funcs(w: KSMatmul) -> list[str]:
        launches = SCHEDULE.apply(w, CONFIG, H200).launches
        assert all(launch.overlap for launch in launches)
        return [launch.func for launch in launches]

    assert funcs(KSMatmul(64, (2, 64, 64, 1), "float16")) == ["ks_0"]
    assert funcs(KSMatmul(64, (2, 64, 68, 1), "float16", "batch_last")) == ["ks_pack_0", "ks_0"]
    assert funcs(KSMatmul(64, (2, 64, 64, 8), "float16")) == ["ks_pack_0", "ks_sort_0", "ks_0", "ks_merge_0"]
    chain = KSMatmul(64, ((1, 64, 64, 2), (2, 64, 64, 1)), "float16", "batch_last")
    assert funcs(chain) == ["ks_pack_0", "ks_0", "ks_1"]


# -- results ----------------------------------------------------------------------------------------------


@emulated
@pytest.mark.parametrize(
    ("workload", "change"),
    [
        (KSMatmul(136, (2, 72, 65, 2), "float16", "batch_last"), {"block_n": 128, **PAIR}),
        pytest.param(
            KSMatmul(136, (2, 136, 136, 1), "bfloat16", "batch_last"), {"block_m": 128, "warpgroups": 2}, marks=pytest.mark.slow
        ),
        (KSMatmul(200, (3, 72, 136, 1), "float16"), {"block_m": 128, "block_n": 128, **PAIR}),
        (KSMatmul(72, (2, 72, 64, 5), "float16"), {}),
        (KSMatmul(24, ((1, 64, 64, 16), (2, 64, 64, 8)), "float16"), {}),
    ],
    ids=lambda value: value.label if isinstance(value, KSMatmul) else "",
)
def test_results_at_ragged_edges(workload: KSMatmul, change: dict[str, Any]) -> None:
    error = run_schedule(SCHEDULE, workload, {**CONFIG, **change}, TINY, order="random")
    assert error < (8e-3 if workload.dtype == "bfloat16" else 1e-3)


# -- configs and binaries ---------------------------------------------------------------------------------


def test_more_work_is_predicted_to_take_longer() -> None:
    times = []
    for pattern in [(1, 128, 128, 4), (4, 128, 128, 4), (2, 512, 512, 4), (1, 768, 768, 16)]:
        w = KSMatmul(25088, pattern, "float16", "batch_last")
        times.append(SCHEDULE.features(w, SCHEDULE.default_config(w, H200), H200)["predicted_us"])
    assert times == sorted(times)


def test_the_default_of_a_large_shape_compiles_without_spills(tmp_path: Path) -> None:
    w = KSMatmul(25088, (1, 768, 768, 16), "float16", "batch_last")
    manifest = build_artefact(w, SCHEDULE, SCHEDULE.default_config(w, H200), H200, tmp_path / "built")
    assert manifest.spill_bytes == 0
    assert len(manifest.launches) == 2
