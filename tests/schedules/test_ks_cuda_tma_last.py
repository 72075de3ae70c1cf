"""The TMA schedule of batch-last KSMatmul with samples as rows: sizes, limits, results at ragged edges, what ptxas says."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import pytest

from kronsched.errors import InvalidConfig
from kronsched.hardware import PRESETS
from kronsched.runtime.build import build_artefact
from kronsched.schedules.ks_cuda_tma_last import KSCudaTmaLast
from kronsched.schedules.ks_last_tile_plan import plan_samples
from kronsched.workloads.ks import KSMatmul
from tests.emulator import run_schedule
from tests.emulator.build import available

H200 = PRESETS["nvidia/h200"]
TINY = dataclasses.replace(H200, units=2)
SCHEDULE = KSCudaTmaLast()
CONFIG: dict[str, Any] = {
    "block_m": 64,
    "block_n": 48,
    "warpgroups": 1,
    "stages": 2,
    "pingpong": False,
    "cluster": 1,
}
WIDE = {"block_m": 128, "warpgroups": 2}
emulated = pytest.mark.skipif(available() is not None, reason=str(available()))


def last(batch: int, pattern: Any, dtype: str = "float16", **more: Any) -> KSMatmul:
    return KSMatmul(batch, pattern, dtype, "batch_last", **more)


@pytest.mark.parametrize(
    ("workload", "reason"),
    [
        (KSMatmul(64, (1, 64, 64, 1), "float16"), "batch_first"),
        (last(64, (1, 64, 64, 1), bias=True), "epilogue"),
        (last(63, (1, 64, 64, 1)), "batch=63"),
        (last(64, (1, 64, 64, 1), "float32"), "float32"),
    ],
)
def test_what_is_not_served_is_said(workload: KSMatmul, reason: str) -> None:
    assert reason in str(SCHEDULE.supports(workload, H200))


def test_trips_share_out_what_there_is_of_k() -> None:
    for c, expected in ((48, (48, 1)), (64, (64, 1)), (96, (48, 2)), (136, (48, 3)), (192, (64, 3)), (65, (48, 2))):
        plan = plan_samples(last(256, (1, 64, c, 1)), (1, 64, c, 1), CONFIG, H200)
        assert (plan.block_k, plan.trips) == expected
        assert plan.block_k * plan.trips >= c > plan.block_k * (plan.trips - 1)


def test_tiles_far_too_large_and_panels_that_do_not_fit_are_refused() -> None:
    with pytest.raises(InvalidConfig, match="much larger"):
        plan_samples(last(4096, (1, 64, 64, 4)), (1, 64, 64, 4), {**CONFIG, "block_n": 128}, H200)
    full = {**CONFIG, "block_m": 128, "block_n": 192, "warpgroups": 2, "stages": 5, "pingpong": True}
    for change, reason in (
        ({"pingpong": True}, "pingpong"),
        ({"block_m": 512}, "one to 4 times"),
        ({"block_m": 256, "block_n": 128}, "registers"),
        ({"block_n": 128, "cluster": 2}, "cluster=2"),
    ):
        with pytest.raises(InvalidConfig, match=reason):
            plan_samples(last(4096, (1, 256, 64, 4)), (1, 256, 64, 4), {**CONFIG, **change}, H200)
    with pytest.raises(InvalidConfig, match="stages=5"):
        plan_samples(last(4096, (1, 192, 192, 4)), (1, 192, 192, 4), full, H200)


@pytest.mark.parametrize(("block_n", "cluster"), [(48, 1), (48, 2), (80, 2)])
def test_every_tile_is_taken_once_and_those_of_the_same_samples_in_turn(block_n: int, cluster: int) -> None:
    pattern = (2, 136, 72, 3)
    plan = plan_samples(last(264, pattern), pattern, {**CONFIG, **WIDE, "block_n": block_n, "cluster": cluster}, H200)
    assert plan.shares_samples == (block_n == 80 or cluster == 1)
    places = [plan.place(unit, rank) for unit in range(plan.units) for rank in range(cluster)]
    wanted = set(itertools.product(range(plan.m_tiles), range(plan.n_tiles), range(6)))
    assert len(set(places)) == len(places) and wanted <= set(places)
    assert {row for row, _, _ in set(places) - wanted} <= {plan.m_tiles}  # the second block of the last cluster has nothing to do
    rows = [plan.place(unit)[0] for unit in range(plan.tiles)]
    assert rows == sorted(rows)


@emulated
@pytest.mark.parametrize(
    ("workload", "change"),
    [
        (last(136, (1, 48, 48, 2)), {}),
        (last(136, (2, 72, 65, 2)), {"block_m": 128, "block_n": 96, "warpgroups": 2, "pingpong": True, "stages": 3}),
        (last(264, (1, 200, 136, 1), "bfloat16"), {"block_m": 256, "block_n": 96, "warpgroups": 2, "stages": 3}),
        (last(264, (1, 136, 65, 2)), {"block_m": 128, "block_n": 64, "warpgroups": 2, "stages": 3, "cluster": 2}),
        (last(264, (1, 200, 136, 2)), {"block_m": 256, "block_n": 64, "warpgroups": 2, "stages": 3, "cluster": 2}),
        (last(40, ((1, 64, 48, 2), (2, 48, 64, 1))), {"block_n": 64}),
    ],
    ids=lambda value: value.label if isinstance(value, KSMatmul) else "",
)
def test_results_at_ragged_edges(workload: KSMatmul, change: dict[str, Any]) -> None:
    error = run_schedule(SCHEDULE, workload, {**CONFIG, **change}, TINY, order="random")
    assert error < (8e-3 if workload.dtype == "bfloat16" else 1e-3)


def test_the_default_compiles_without_spills(tmp_path: Path) -> None:
    w = last(25088, (4, 192, 192, 4))
    manifest = build_artefact(w, SCHEDULE, SCHEDULE.default_config(w, H200), H200, tmp_path / "built")
    assert manifest.spill_bytes == 0
