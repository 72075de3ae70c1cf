"""Launches that sort X into slices and merge Y, and the schedule that multiplies between them."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from kronsched.hardware import PRESETS
from kronsched.schedules.ks_cuda_mma import KSCudaSorted
from kronsched.schedules.ks_sort import piece_run, sorted_at
from kronsched.workloads.ks import KSMatmul
from tests.emulator import run_schedule
from tests.emulator.build import available

H200, A100 = PRESETS["nvidia/h200"], PRESETS["nvidia/a100"]
TINY = dataclasses.replace(H200, units=2)
SCHEDULE = KSCudaSorted()
CONFIG: dict[str, Any] = {
    "mt": 1, "warps_m": 4, "warps_j": 1, "pairs": 1, "ksteps": 1, "stages": 3, "groups": 1, "weights": "resident",
    "store": "direct", "min_blocks": 1, "waves": 1, "mma": "sync",
}  # fmt: skip
emulated = pytest.mark.skipif(available() is not None, reason=str(available()))


def test_sorting_moves_each_piece_to_its_place() -> None:
    rows, f, d, each = 3, 16, 5, 8
    for piece in range(rows * f // each):
        row, k = divmod(piece * each, f)
        for l in range(d):  # noqa: E741 (the axis has that name everywhere)
            assert sorted_at(piece, l, f, d, each) == (row * d + l) * f + k


@pytest.mark.parametrize(("item", "d"), [(2, 2), (2, 4), (2, 16), (2, 64), (4, 4), (4, 16), (4, 64)])
def test_eight_neighbouring_pieces_are_in_different_banks(item: int, d: int) -> None:
    """A warp reads an element of 8 neighbouring pieces for 4 l (2 where d = 2): no bank holds two words of them."""
    pitch = (d + 1) * (16 // item)
    words = {(piece * pitch + inner) * item // 4 for piece in range(8) for inner in range(min(4, d))}
    assert len({word % 32 for word in words}) == len(words)
    assert piece_run(d) % 8 == 0


def test_what_is_not_served_is_said() -> None:
    assert "nothing to sort" in str(SCHEDULE.supports(KSMatmul(64, (2, 64, 64, 1)), H200))
    assert "rows of 66" in str(SCHEDULE.supports(KSMatmul(64, (2, 64, 66, 2)), H200))
    assert "too small" in str(SCHEDULE.supports(KSMatmul(64, (2, 256, 256, 4)), H200))
    assert "float16" in str(SCHEDULE.supports(KSMatmul(64, (2, 512, 512, 4), "float16"), H200))
    assert SCHEDULE.supports(KSMatmul(64, (2, 256, 256, 16)), H200) is None
    assert "layout" in str(SCHEDULE.supports(KSMatmul(64, (2, 64, 64, 2), layout="batch_last"), H200))


@pytest.mark.slow
def test_launches_overlap_where_the_gpu_can() -> None:
    w = KSMatmul(64, ((1, 24, 48, 4), (2, 24, 12, 4)))
    launches = SCHEDULE.apply(w, CONFIG, H200).launches
    factors = [f"ks{step}_{i}" for i in range(2) for step in ("_sort", "", "_merge")]
    assert [launch.func for launch in launches] == ["ks_pack_0", "ks_pack_1", *factors]
    assert all(launch.overlap for launch in launches)
    assert not any(launch.overlap for launch in SCHEDULE.apply(w, CONFIG, A100).launches)


@emulated
@pytest.mark.parametrize(
    ("workload", "change"),
    [
        (KSMatmul(100, (2, 40, 100, 3)), {"mma": "wgmma", "pairs": 3, "ksteps": 2, "weights": "stream"}),
        (KSMatmul(72, (2, 40, 48, 2)), {"pairs": 2}),
    ],
    ids=lambda value: value.label if isinstance(value, KSMatmul) else "",
)
def test_results(workload: KSMatmul, change: dict[str, Any]) -> None:
    assert run_schedule(SCHEDULE, workload, {**CONFIG, **change}, TINY, order="random") < 1e-6
