"""The one-launch chained Kron-Matmul: index maps, what the space holds, the kernels in the emulator and through NVRTC."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest

from kronsched.dtypes import DTYPES
from kronsched.hardware import resolve_target
from kronsched.runtime.build import build_artefact
from kronsched.runtime.lower import lower
from kronsched.schedules import kron_chain_half32, kron_chain_half64, kron_chain_head, kron_chain_tf32p32
from kronsched.schedules.kron_chain_layout import (
    chunk_index,
    chunk_position,
    chunk_strides,
    last_axes,
    merged_axes,
    merged_position,
    merged_size,
    pairs,
    read_chunk,
    row_chunks,
    tile_digits,
    tiles_a_row,
    unit_digits,
    units_a_row,
    written_chunk,
)
from kronsched.schedules.kron_chain_plan import PITCH, RADIX, SERVED
from kronsched.schedules.kron_chain_tf32 import columns, place, rows
from kronsched.schedules.kron_cuda_chain import KronCudaChain
from kronsched.workloads.kron import KronMatmul
from tests.emulator import run_schedule

H200 = resolve_target("nvidia/h200")
ONE_SM = dataclasses.replace(H200, units=1)  # so that a persistent grid walks over few rows
SCHEDULE = KronCudaChain()
HALF = [(p, n) for p, n in SERVED["float16"] if p in (8, 16)]
BASE = {"load": "nc", "store": "wb", "unroll": 2, "group": 2, "l2": False}
L2 = {"l2": True}


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


@pytest.mark.parametrize(("p", "n"), [(4, 6), (4, 7), (2, 12), (2, 13)])
def test_merged_factors_are_whole_axes_and_places_are_free_of_bank_conflicts(p: int, n: int) -> None:
    axes, size = merged_axes(p, n), merged_size(p, n)
    assert [p ** len(a) for a in axes] == [16, 16, size, 16] and [f for a in axes for f in a] == list(range(n))
    chunks = list(product(range(16), range(16), range(size), range(2)))
    places = [merged_position(size, *chunk) for chunk in chunks]
    assert len(set(places)) == len(chunks) and max(places) < row_chunks(p, n)
    for g, z, b in product(range(0, 8, 2), range(16), range(size)):  # written by eight lanes of the first phase
        axes_of = [written_chunk(z, t, g + i) for i in range(2) for t in range(4)]
        assert len({merged_position(size, a0, a1, b, half) % 8 for a1, a0, half in axes_of}) == 8
    for a1, half, start in product(range(size if size > 1 else 1), range(2), (0, 8)):  # eight rows of ldmatrix
        rows_of = [(low if size == 1 else a1 * (16 // size) + low // size, low % size) for low in range(start, start + 8)]
        assert len({merged_position(size, 5, a, b, half) % 8 for a, b in rows_of}) == 8


def test_float32_lines_are_aligned_and_free_of_bank_conflicts() -> None:
    assert PITCH % 4 == 0 and PITCH >= RADIX
    assert len({lane * PITCH // 4 % 8 for lane in range(8)}) == 8


@pytest.mark.parametrize("chunk", [read_chunk, written_chunk])
def test_a_warp_of_the_kernel_for_16_holds_a_whole_tile(chunk: Callable[[int, int, int], tuple[int, int, int]]) -> None:
    tile = {chunk(z, t, g) for z, t, g in product(range(16), range(4), range(8))}
    assert tile == set(product(range(16), range(16), range(2)))


def test_the_kernel_for_16_loads_whole_sectors() -> None:
    for z, t, g in product(range(16), range(4), range(0, 8, 2)):
        assert read_chunk(z, t, g)[:2] == read_chunk(z, t, g + 1)[:2]
        assert [read_chunk(z, t, g + i)[2] for i in range(2)] == [0, 1]


@pytest.mark.parametrize("axis", range(4))
def test_float32_factors_of_16_keep_every_row_and_column(axis: int) -> None:
    assert sorted(columns(axis, s, r, t) for s, r, t in product(range(2), range(2), range(4))) == list(range(16))
    assert sorted(rows(axis, h, g) for h, g in product(range(2), range(8))) == list(range(16))


def test_float32_rows_of_16_lie_apart_and_are_free_of_bank_conflicts() -> None:
    places = {place(*line) + chunk for *line, chunk in product(range(3), range(8), range(8), range(64))}
    assert len(places) == 3 * 8 * 8 * 64
    for quarter, bit, start in product(range(3), range(2), range(0, 8, 2)):
        lanes = [place(quarter, g, t + 4 * bit) % 8 for g, t in product((start, start + 1), range(4))]
        assert len(set(lanes)) == 8


@pytest.mark.parametrize("axis", range(3))
def test_factors_of_32_keep_every_row_and_column(axis: int) -> None:
    both, four, eight = range(2), range(4), range(8)
    half, tf32 = kron_chain_half32, kron_chain_tf32p32
    assert sorted(half.columns(axis, s, r, t, e) for s, r, t, e in product(both, both, four, both)) == list(range(32))
    assert sorted(tf32.columns(axis, s, r, t) for s, r, t in product(four, both, four)) == list(range(32))
    for kernel in (half, tf32):
        assert sorted(kernel.rows_of(axis, tile, h, g) for tile, h, g in product(both, both, eight)) == list(range(32))


def test_rows_of_32_lie_apart_and_are_free_of_bank_conflicts() -> None:
    half, tf32 = kron_chain_half32, kron_chain_tf32p32
    assert len({half.place(a0, c) for a0, c in product(range(32), range(128))}) == 32 * 128
    assert len({tf32.place(a0, a1, c) for a0, a1, c in product(range(32), range(32), range(8))}) == 32 * 256
    for start, part in product(range(0, 8, 2), range(2)):  # eight lanes: four t, two g
        lanes = list(product(range(4), (start, start + 1)))
        assert len({half.place(g, 2 * t + part) % 8 for t, g in lanes}) == 8
        assert len({tf32.place(g, 5, 2 * t + part) % 8 for t, g in lanes}) == 8  # written
        assert len({tf32.place(3, g, t + 4 * part) % 8 for t, g in lanes}) == 8  # read


@pytest.mark.parametrize("axis", range(2))
def test_factors_of_64_keep_every_row_and_column(axis: int) -> None:
    both, four, eight, kernel = range(2), range(4), range(8), kron_chain_half64
    assert sorted(kernel.columns(axis, s, r, t, e) for s, r, t, e in product(four, both, four, both)) == list(range(64))
    assert sorted(kernel.rows_of(axis, tile, h, g) for tile, h, g in product(four, both, eight)) == list(range(64))


def test_rows_of_64_lie_apart_and_are_free_of_bank_conflicts() -> None:
    place = kron_chain_half64.place
    assert len({place(a0, c) for a0, c in product(range(64), range(8))}) == 512
    for start, part in product(range(0, 8, 2), range(2)):
        for line in (lambda g: g, lambda g: 8 * 3 + g):  # written, read
            assert len({place(line(g), 2 * t + part) % 8 for t, g in product(range(4), (start, start + 1))}) == 8


def test_a_head_launch_stores_whole_sectors() -> None:
    chunk = kron_chain_head.chunk
    assert sorted(map(chunk, range(8))) == list(range(8))
    assert [[chunk(2 * t + e) for t in range(4)] for e in range(2)] == [[0, 1, 2, 3], [4, 5, 6, 7]]


# -- what it serves -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "workload",
    [
        equal(4, 8, 6, "float16"), equal(4, 8, 5, "float64"), equal(4, 5, 3, "float16"), equal(4, 16, 3, "float32"),
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
    for p, n, dtype in ((8, 5, "float16"), (32, 3, "bfloat16"), (16, 4, "float32"), (8, 5, "float32")):
        config = SCHEDULE.default_config(equal(1024, p, n, dtype), H200)
        assert config["persistent"] and config["prefetch"] != "none"


# -- the kernels ----------------------------------------------------------------------------------------

RUNS = [
    (equal(5, 8, 3, "float16"), {"rows": 4, "threads": 64, "per_sm": 1, "persistent": False, "prefetch": "none"}),
    (equal(9, 8, 3, "bfloat16"), {**L2, "rows": 2, "threads": 32, "per_sm": 1, "persistent": True, "prefetch": "async"}),
    (equal(3, 8, 4, "bfloat16"), {"rows": 1, "threads": 128, "per_sm": 1, "persistent": True, "prefetch": "none"}),
    (equal(5, 8, 4, "float16"), {"rows": 2, "threads": 128, "per_sm": 1, "persistent": True, "prefetch": "split"}),
    (equal(3, 8, 5, "float16"), {"rows": 1, "threads": 256, "per_sm": 2, "persistent": True, "prefetch": "split"}),
    (equal(3, 16, 3, "float16"), {"rows": 2, "threads": 64, "per_sm": 1, "persistent": True, "prefetch": "split"}),
    (equal(2, 16, 4, "bfloat16"), {"rows": 1, "threads": 512, "per_sm": 1, "persistent": True, "prefetch": "split"}),
    (equal(2, 16, 4, "float16"), {"rows": 1, "threads": 256, "per_sm": 1, "persistent": True, "prefetch": "split"}),
    (equal(2, 32, 3, "float16"), {"rows": 1, "threads": 256, "per_sm": 1, "persistent": True, "prefetch": "split"}),
    (equal(3, 32, 3, "bfloat16"), {"rows": 2, "threads": 512, "per_sm": 1, "persistent": False, "prefetch": "none"}),
    (equal(5, 64, 2, "float16"), {"rows": 2, "threads": 64, "per_sm": 1, "persistent": True, "prefetch": "registers"}),
    (equal(1, 64, 3, "bfloat16"), {"rows": 4, "threads": 128, "per_sm": 1, "persistent": True, "prefetch": "none"}),
    (equal(2, 32, 3, "float32"), {"rows": 1, "threads": 512, "per_sm": 1, "persistent": True, "prefetch": "registers"}),
    (equal(3, 8, 4, "float32"), {"rows": 2, "threads": 128, "per_sm": 1, "persistent": False, "prefetch": "none"}),
    (equal(3, 8, 4, "float32"), {"rows": 1, "threads": 32, "per_sm": 1, "persistent": True, "prefetch": "split"}),
    (equal(2, 8, 5, "float32"), {"rows": 1, "threads": 512, "per_sm": 1, "persistent": True, "prefetch": "async"}),
    (equal(2, 8, 5, "float32"), {"rows": 1, "threads": 256, "per_sm": 1, "persistent": True, "prefetch": "async", "group": 8}),
    (equal(2, 16, 4, "float32"), {**L2, "rows": 1, "threads": 256, "per_sm": 1, "persistent": True, "prefetch": "registers"}),
    (equal(3, 4, 7, "float16"), {"rows": 1, "threads": 128, "per_sm": 1, "persistent": True, "prefetch": "async"}),
    (equal(3, 2, 12, "bfloat16"), {"rows": 2, "threads": 64, "per_sm": 1, "persistent": True, "prefetch": "split"}),
    (equal(3, 2, 13, "bfloat16"), {"rows": 2, "threads": 128, "per_sm": 1, "persistent": True, "prefetch": "none"}),
    (equal(3, 4, 6, "float32"), {"rows": 2, "threads": 128, "per_sm": 1, "persistent": True, "prefetch": "async"}),
    (equal(3, 4, 7, "float32"), {"rows": 1, "threads": 256, "per_sm": 2, "persistent": True, "prefetch": "split"}),
    (equal(2, 2, 12, "float32"), {"rows": 1, "threads": 64, "per_sm": 1, "persistent": True, "prefetch": "async"}),
    (equal(2, 2, 13, "float32"), {"rows": 2, "threads": 256, "per_sm": 1, "persistent": False, "prefetch": "none"}),
]


LENGTHY = {
    *((8, 5, "float32"), (16, 4, "float16"), (64, 2, "float16")),
    *((16, 4, "bfloat16"), (32, 3, "float16"), (4, 7, "float16"), (2, 13, "bfloat16")),
}
"""Kernels of which one more run of the same path, or one of their ring, is left to the slow tests."""


@pytest.mark.parametrize(
    ("workload", "config"),
    [
        pytest.param(
            w,
            c,
            id=f"{w.label}-{c['prefetch']}",
            marks=[pytest.mark.slow] if (w.factors[0][0], len(w.factors), w.dtype) in LENGTHY else [],
        )
        for w, c in RUNS
    ],
)
@pytest.mark.parametrize("order", [pytest.param("forward", marks=pytest.mark.slow), "reverse"])
def test_computes_the_reference_in_any_order_of_threads(workload: KronMatmul, config: dict[str, object], order: str) -> None:
    error = run_schedule(SCHEDULE, workload, {**BASE, **config}, ONE_SM, order=order)
    # float32 sums are as exact as plain FMA; a 16-bit result has one rounding an axis.
    assert error <= (2e-6 if workload.dtype == "float32" else DTYPES[workload.dtype].tolerance * workload.slack)


SPILLS = {(8, 5): 64, (16, 3): 96, (16, 4): 64, (64, 3): 64, (64, 4): 64, (4, 7): 64, (2, 13): 64}
"""Bytes a thread may spill in 16-bit kernels whose register tiles leave the compiler no room."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "workload",
    [equal(16 if (p, n) == (64, 4) else 1024, p, n, t) for t in ("float16", "bfloat16", "float32") for p, n in SERVED[t]],
    ids=lambda w: w.label,
)
def test_default_hardly_spills_and_stays_within_its_register_cap(workload: KronMatmul, tmp_path: Path) -> None:
    config = SCHEDULE.default_config(workload, H200)
    p, n = workload.factors[0][0], len(workload.factors)
    launches = lower(workload, SCHEDULE, config, H200).launches
    assert len(launches) == (n - 1 if p == 64 else 1)
    manifest = build_artefact(workload, SCHEDULE, config, H200, tmp_path / "a")
    assert manifest.spill_bytes is not None and manifest.registers is not None
    assert manifest.spill_bytes <= (16 if workload.dtype == "float32" else SPILLS.get((p, n), 0))
    assert manifest.registers * launches[0].block[0] * int(config["per_sm"]) <= H200.registers_per_sm


def test_default_of_8_to_the_5_is_one_launch_without_spills(tmp_path: Path) -> None:
    workload = equal(1024, 8, 5, "float32")
    manifest = build_artefact(workload, SCHEDULE, SCHEDULE.default_config(workload, H200), H200, tmp_path / "a")
    assert len(manifest.launches) == 1 and manifest.spill_bytes == 0
