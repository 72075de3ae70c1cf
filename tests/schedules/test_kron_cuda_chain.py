"""The one-launch chained Kron-Matmul: index maps, what the space holds, the kernels in the emulator and through NVRTC."""

from __future__ import annotations

import dataclasses
from itertools import product
from pathlib import Path

import pytest

from kronsched.dtypes import DTYPES
from kronsched.hardware import resolve_target
from kronsched.runtime.build import build_artefact
from kronsched.runtime.lower import lower
from kronsched.schedules.kron_chain_layout import (
    chunk_index,
    chunk_position,
    chunk_strides,
    last_axes,
    pairs,
    tile_digits,
    tiles_a_row,
    unit_digits,
    units_a_row,
)
from kronsched.schedules.kron_chain_plan import PITCH, RADIX, SERVED
from kronsched.schedules.kron_cuda_chain import KronCudaChain
from kronsched.workloads.kron import KronMatmul
from tests.emulator import run_schedule

H200 = resolve_target("nvidia/h200")
ONE_SM = dataclasses.replace(H200, units=1)  # so that a persistent grid walks over few rows
SCHEDULE = KronCudaChain()
HALF = SERVED["float16"]
BASE = {"load": "nc", "store": "wb", "unroll": 2, "group": 2}


def equal(m: int, p: int, n: int, dtype: str) -> KronMatmul:
    return KronMatmul(m, [(p, p)] * n, dtype)


def thread_axes(p: int, t: int, g: int) -> list[tuple[int, int]]:
    """(t axis, g axis) of a thread's chunks when a tile is read, as the kernels have them."""
    if p == 8:
        return [(2 * t + r, g) for r in range(2)]
    return [(8 * r + 2 * t + e, 8 * a + g) for a, r, e in product(range(2), range(2), range(2))]


# -- index maps -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("p", "n"), HALF)
def test_every_axis_is_contracted_once(p: int, n: int) -> None:
    assert sorted([axis for pair in pairs(p, n) for axis in pair] + list(last_axes(p, n))) == list(range(n))


@pytest.mark.parametrize(("p", "n"), HALF)
def test_a_row_is_cut_into_tiles_and_units_that_cover_it_once(p: int, n: int) -> None:
    whole = set(range(p**n // 8))
    for pair in pairs(p, n):
        seen = [
            chunk_index(p, *tile_digits(p, n, pair, tile, *axes))
            for tile in range(tiles_a_row(p, n))
            for t, g in product(range(4), range(8))
            for axes in thread_axes(p, t, g)
        ]
        assert len(seen) == len(whole) and set(seen) == whole
    units = [
        chunk_index(p, unit_digits(p, n, unit, low), half)
        for unit in range(units_a_row(p, n))
        for low in range(p)
        for half in range(p // 8)
    ]
    assert len(units) == len(whole) and set(units) == whole


@pytest.mark.parametrize(("p", "n"), HALF)
def test_places_in_shared_memory_differ_and_lie_in_the_row(p: int, n: int) -> None:
    places = {chunk_position(p, n, d, half) for *d, half in product(*[range(p)] * (n - 1), range(p // 8))}
    assert len(places) == p**n // 8
    assert min(places) >= 0 and max(places) < chunk_strides(p, n)[2] < 1.2 * p**n / 8


@pytest.mark.parametrize(("p", "n"), HALF)
def test_every_access_of_eight_lanes_hits_eight_bank_groups(p: int, n: int) -> None:
    """16-byte accesses are served eight lanes at a time, ldmatrix eight addresses at a time."""
    for pair in pairs(p, n):
        for tile, quarter in product(range(tiles_a_row(p, n)), range(4)):
            lanes = [(lane % 4, lane // 4) for lane in range(8 * quarter, 8 * quarter + 8)]
            for swapped in (False, True) if p == 8 else (False,):  # P = 8 writes with the axes swapped
                for chunk in range(len(thread_axes(p, 0, 0))):
                    axes = [thread_axes(p, t, g)[chunk] for t, g in lanes]
                    axes = [a[::-1] if swapped else a for a in axes]
                    assert len({chunk_position(p, n, *tile_digits(p, n, pair, tile, *a)) % 8 for a in axes}) == 8
    for unit, start, half in product(range(units_a_row(p, n)), range(0, p, 8), range(p // 8)):
        assert len({chunk_position(p, n, unit_digits(p, n, unit, start + k), half) % 8 for k in range(8)}) == 8


def test_float32_lines_are_aligned_and_free_of_bank_conflicts() -> None:
    assert PITCH % 4 == 0 and PITCH >= RADIX
    assert len({lane * PITCH // 4 % 8 for lane in range(8)}) == 8


# -- what it serves -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "workload",
    [
        equal(4, 8, 6, "float16"), equal(4, 8, 5, "float64"), equal(4, 5, 3, "float16"), equal(4, 16, 4, "float32"),
        KronMatmul(4, [(8, 8), (8, 4), (8, 8)], "float16"), KronMatmul(4, [(8, 8), (16, 16), (8, 8)], "float16"),
    ],
    ids=lambda w: w.label,
)  # fmt: skip
def test_other_shapes_are_refused_in_one_line(workload: KronMatmul) -> None:
    reason = SCHEDULE.supports(workload, H200)
    assert reason is not None and "equal square factors" in reason and "\n" not in reason


def test_old_or_small_gpus_are_refused() -> None:
    turing = dataclasses.replace(H200, arch="sm_75")
    assert "sm_80" in str(SCHEDULE.supports(equal(4, 8, 4, "float16"), turing))
    assert "does not fit" in str(SCHEDULE.supports(equal(4, 16, 4, "float16"), resolve_target("nvidia/l40s")))


def test_knobs_without_effect_and_misfits_are_pruned() -> None:
    workload = equal(1024, 8, 5, "float16")
    space = SCHEDULE.space(workload, H200)
    good = {**BASE, "rows": 1, "threads": 256, "per_sm": 2, "persistent": True, "prefetch": "split"}
    assert space.invalid(good) is None
    assert "no next block" in str(space.invalid({**good, "persistent": False}))
    assert "shared memory" in str(space.invalid({**good, "per_sm": 4}))
    assert "same kernel" in str(space.invalid({**good, "threads": 512, "per_sm": 1, "prefetch": "async", "load": "stream"}))
    few = SCHEDULE.space(equal(3, 8, 4, "float32"), H200)
    assert all(int(v) <= 3 for k in few.knobs if k.name == "rows" for v in k.values)


def test_default_of_large_problems_is_persistent_and_prefetches() -> None:
    for p, n, dtype in ((8, 5, "float16"), (16, 4, "bfloat16"), (8, 5, "float32")):
        config = SCHEDULE.default_config(equal(1024, p, n, dtype), H200)
        assert config["persistent"] and config["prefetch"] != "none"


# -- the kernels ----------------------------------------------------------------------------------------

RUNS = [
    (equal(5, 8, 3, "float16"), {"rows": 4, "threads": 64, "per_sm": 1, "persistent": False, "prefetch": "none"}),
    (equal(9, 8, 3, "bfloat16"), {"rows": 2, "threads": 32, "per_sm": 1, "persistent": True, "prefetch": "async"}),
    (equal(3, 8, 4, "bfloat16"), {"rows": 1, "threads": 128, "per_sm": 1, "persistent": True, "prefetch": "registers"}),
    (equal(5, 8, 4, "float16"), {"rows": 2, "threads": 128, "per_sm": 1, "persistent": True, "prefetch": "split"}),
    (equal(3, 8, 5, "float16"), {"rows": 1, "threads": 256, "per_sm": 2, "persistent": True, "prefetch": "split"}),
    (equal(3, 16, 3, "float16"), {"rows": 2, "threads": 64, "per_sm": 1, "persistent": True, "prefetch": "split"}),
    (equal(2, 16, 4, "bfloat16"), {"rows": 1, "threads": 512, "per_sm": 1, "persistent": True, "prefetch": "split"}),
    (equal(3, 8, 4, "float32"), {"rows": 2, "threads": 128, "per_sm": 1, "persistent": False, "prefetch": "none"}),
    (equal(2, 8, 5, "float32"), {"rows": 1, "threads": 512, "per_sm": 1, "persistent": True, "prefetch": "async"}),
    (equal(3, 4, 6, "float32"), {"rows": 2, "threads": 128, "per_sm": 1, "persistent": True, "prefetch": "async"}),
    (equal(3, 4, 7, "float32"), {"rows": 1, "threads": 256, "per_sm": 2, "persistent": True, "prefetch": "split"}),
    (equal(2, 2, 12, "float32"), {"rows": 1, "threads": 64, "per_sm": 1, "persistent": True, "prefetch": "async"}),
    (equal(2, 2, 13, "float32"), {"rows": 2, "threads": 256, "per_sm": 1, "persistent": False, "prefetch": "none"}),
]


@pytest.mark.parametrize(("workload", "config"), RUNS, ids=[f"{w.label}-{c['prefetch']}" for w, c in RUNS])
@pytest.mark.parametrize("order", ["forward", "reverse"])
def test_computes_the_reference_in_any_order_of_threads(workload: KronMatmul, config: dict[str, object], order: str) -> None:
    error = run_schedule(SCHEDULE, workload, {**BASE, **config}, ONE_SM, order=order)
    # float32 is plain FMA; a 16-bit result has one rounding an axis.
    assert error <= (2e-6 if workload.dtype == "float32" else DTYPES[workload.dtype].tolerance)


@pytest.mark.parametrize(
    "workload",
    [equal(1024, p, n, dtype) for dtype in ("float16", "bfloat16", "float32") for p, n in SERVED[dtype]],
    ids=lambda w: w.label,
)
def test_default_is_one_launch_without_spills_within_its_register_cap(workload: KronMatmul, tmp_path: Path) -> None:
    config = SCHEDULE.default_config(workload, H200)
    (launch,) = lower(workload, SCHEDULE, config, H200).launches
    manifest = build_artefact(workload, SCHEDULE, config, H200, tmp_path / "a")
    assert manifest.spill_bytes == 0
    assert manifest.registers is not None
    assert manifest.registers * launch.block[0] * int(config["per_sm"]) <= H200.registers_per_sm
