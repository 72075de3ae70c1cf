"""The 16-bit Kron-Matmul of large factors: index maps, which launches, the kernels in the emulator and through NVRTC."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import pytest

from kronsched import KronMatmul
from kronsched.dtypes import DTYPES
from kronsched.errors import InvalidConfig
from kronsched.hardware import Device, resolve_target
from kronsched.runtime.build import build_artefact
from kronsched.schedules.kron_cuda_slab import KronCudaSlab
from kronsched.schedules.kron_slab_kernel import chunk_byte, line_byte
from kronsched.schedules.kron_slab_plan import CubeLaunch, merged, plan_slabs
from tests.emulator import build, run_schedule

H200 = resolve_target("nvidia/h200")
ONE_SM = dataclasses.replace(H200, units=1)  # so that a persistent grid walks over few slabs
ONE_CLUSTER = dataclasses.replace(H200, units=8)
SCHEDULE = KronCudaSlab()
BASE = {"fuse": 2, "spare": 0, "ahead": False, "prefetch": False, "load": "cg", "store": "wb"}


def equal(m: int, p: int, n: int, dtype: str = "float16") -> KronMatmul:
    return KronMatmul(m, [(p, p)] * n, dtype)


@pytest.mark.parametrize("p", [64, 128])
def test_every_chunk_of_a_slab_has_a_place_and_eight_rows_share_no_bank(p: int) -> None:
    places = {chunk_byte(p, row, chunk) for row, chunk in itertools.product(range(p), range(p // 8))}
    assert places == set(range(0, 2 * p * p, 16))
    for chunk in range(p // 8):  # how wgmma reads: eight rows, one chunk
        assert len({chunk_byte(p, row, chunk) % 128 for row in range(8)}) == 8


def test_lines_of_a_warp_are_written_and_read_free_of_bank_conflicts() -> None:
    assert {line_byte(row, chunk) for row, chunk in itertools.product(range(16), range(8))} == set(range(0, 2048, 16))
    for chunk in range(8):
        assert len({line_byte(row, chunk) % 128 for row in range(8)}) == 8
    for row in range(16):
        assert len({line_byte(row, chunk) % 128 for chunk in range(8)}) == 8


@pytest.mark.parametrize(
    ("workload", "axes"),
    [
        (equal(1024, 64, 2), [(0, 1)]),
        (equal(1024, 64, 3), [(0, 1, 2)]),
        (equal(16, 64, 4), [(1, 2, 3), (0,)]),
        (equal(320, 128, 3), [(1, 2), (0,)]),
        (equal(1, 64, 3), [(1, 2), (0,)]),
        (equal(8, 64, 3), [(1, 2), (0,)]),
    ],
    ids=lambda v: v.label if isinstance(v, KronMatmul) else "",
)
def test_default_takes_the_fewest_launches(workload: KronMatmul, axes: list[tuple[int, ...]]) -> None:
    assert [launch.axes for launch in plan_slabs(workload, SCHEDULE.default_config(workload, H200), H200)] == axes


@pytest.mark.parametrize(
    ("workload", "config", "line"),
    [
        (equal(4, 128, 3), {"fuse": 3, "groups": 1, "stages": 1, "per_sm": 1}, "three factors of 64"),
        (equal(1024, 64, 3), {"fuse": 3, "groups": 1, "stages": 2, "per_sm": 1}, "stages=2 has no effect"),
        (equal(1024, 64, 3), {"fuse": 3, "groups": 1, "stages": 1, "per_sm": 1, "load": "tma"}, "the same kernel"),
        (equal(200, 64, 2), {"groups": 1, "stages": 1, "per_sm": 2, "ahead": True}, "a group has one slab"),
        (equal(1024, 64, 2), {"groups": 4, "stages": 1, "per_sm": 4}, "registers"),
        (equal(1024, 128, 2), {"groups": 2, "stages": 3, "per_sm": 1}, "shared memory"),
        (equal(10, 64, 2), {"groups": 1, "stages": 2, "per_sm": 1}, "fewer stages do"),
    ],
)
def test_what_cannot_run_is_refused_in_one_line(workload: KronMatmul, config: dict[str, object], line: str) -> None:
    with pytest.raises(InvalidConfig, match=line):
        plan_slabs(workload, {**BASE, **config}, H200)


@pytest.mark.parametrize(
    ("factors", "groups"),
    [
        ([8] * 6, ((0, 1), (2, 3), (4, 5))),
        ([64, 4, 16, 64], ((0,), (1, 2), (3,))),
        ([128, 128], ((0,), (1,))),
        ([8] * 4, None),  # a row fits in shared memory
        ([8] * 5, None),
        ([8] * 8, None),  # two launches without
        ([64, 128], None),
        ([16] * 6, None),
    ],
)
def test_adjacent_factors_are_multiplied_out(factors: list[int], groups: tuple[tuple[int, ...], ...] | None) -> None:
    found = merged(KronMatmul(1, [(p, p) for p in factors], "float16"))
    assert (found and found[1]) == groups


MIXED = KronMatmul(1, [(64, 64), (4, 4), (16, 16), (2, 2), (2, 2), (16, 16)], "float16")
RUNS = [
    (equal(3, 64, 2), {"groups": 1, "stages": 1, "per_sm": 1}, ONE_SM, "forward"),
    (equal(5, 64, 2), {"groups": 2, "stages": 3, "per_sm": 1, "ahead": True, "prefetch": True}, ONE_SM, "random"),
    (equal(9, 64, 2, "bfloat16"), {"groups": 2, "stages": 2, "per_sm": 1, "load": "wide", "store": "cs"}, ONE_SM, "reverse"),
    (equal(5, 128, 2), {"groups": 1, "stages": 2, "per_sm": 1, "load": "tma", "prefetch": True}, ONE_SM, "random"),
    (equal(1, 64, 3), {"groups": 4, "stages": 3, "per_sm": 1, "ahead": True, "load": "tma"}, ONE_SM, "random"),
    (equal(3, 64, 3), {"fuse": 3, "groups": 1, "stages": 1, "per_sm": 1}, ONE_CLUSTER, "reverse"),
    (MIXED, {"groups": 2, "stages": 1, "per_sm": 1}, H200, "random"),
    (equal(5, 64, 3, "bfloat16"), {"fuse": 3, "groups": 1, "stages": 1, "per_sm": 1, "spare": 1}, H200, "forward"),
]


def run_id(run: tuple[KronMatmul, dict[str, object], Device, str]) -> str:
    return f"{run[0].label}-{run[3]}"


@pytest.mark.skipif(build.available() is not None, reason=str(build.available()))
@pytest.mark.parametrize(
    "run", [pytest.param(r, id=run_id(r), marks=[pytest.mark.slow] if r[0].dtype == "bfloat16" else []) for r in RUNS]
)
def test_computes_the_reference(run: tuple[KronMatmul, dict[str, object], Device, str]) -> None:
    workload, config, device, order = run
    error = run_schedule(SCHEDULE, workload, {**BASE, **config}, device, seed=5, order=order)
    assert error <= DTYPES[workload.dtype].tolerance


@pytest.mark.slow
@pytest.mark.parametrize(
    "workload", [equal(10, 64, 2), equal(1024, 64, 2), equal(1024, 64, 3), equal(1024, 128, 2)], ids=lambda w: w.label
)
def test_default_does_not_spill(workload: KronMatmul, tmp_path: Path) -> None:
    config = SCHEDULE.default_config(workload, H200)
    manifest = build_artefact(workload, SCHEDULE, config, H200, tmp_path / "a")
    launch = plan_slabs(workload, config, H200)[0]
    assert manifest.spill_bytes == 0 and len(manifest.launches) == 1
    assert manifest.launches[0].cluster == (8 if isinstance(launch, CubeLaunch) else 1)
