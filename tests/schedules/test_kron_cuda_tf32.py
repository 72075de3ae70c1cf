"""The float32 Kron-Matmul of 8^5 on tensor cores: index maps, the kernel in the emulator, its registers."""

from __future__ import annotations

import dataclasses
from itertools import product
from pathlib import Path

import pytest

from kronsched.errors import InvalidConfig
from kronsched.hardware import resolve_target
from kronsched.runtime.build import build_artefact
from kronsched.schedules.kron_chain_tf32p8_plan import ROW_CHUNKS, place, plan_chain8, read_chunk, written_chunk
from kronsched.schedules.kron_cuda_tf32 import KronCudaTf32
from kronsched.workloads.kron import KronMatmul
from tests.emulator import run_schedule

H200 = resolve_target("nvidia/h200")
ONE_SM = dataclasses.replace(H200, units=1)  # so that a persistent grid walks over few rows
SCHEDULE = KronCudaTf32()
LANES = [(lane % 4, lane // 4) for lane in range(32)]
DIGITS = list(product(range(8), range(8), range(2)))


@pytest.mark.parametrize("chunk", [read_chunk, written_chunk])
def test_a_warp_holds_a_whole_unit(chunk: object) -> None:
    assert callable(chunk)
    assert sorted(chunk(z, t, g) for z in range(4) for t, g in LANES) == sorted(DIGITS)


def test_eight_lanes_load_a_whole_line_of_memory() -> None:
    for z, t in product(range(4), range(4)):
        chunks = [read_chunk(z, t, g) for g in range(8)]
        offsets = [a2 * 16 + a3 * 2 + half for a2, a3, half in chunks]
        assert offsets == list(range(offsets[0], offsets[0] + 8)) and offsets[0] % 8 == 0


def test_places_differ_and_no_access_has_a_bank_conflict() -> None:
    places = {place(*digits) for digits in product(*[range(8)] * 4, range(2))}
    assert len(places) == 8192 and min(places) >= 0 and max(places) < ROW_CHUNKS
    for z, start in product(range(4), range(0, 32, 8)):
        written = [written_chunk(z, *lane) for lane in LANES[start : start + 8]]
        read = [read_chunk(z, *lane) for lane in LANES[start : start + 8]]
        for chunks in (
            [place(3, 5, a, b, half) for a, b, half in written],  # first phase
            [place(b, a, 3, 5, half) for a, b, half in written],  # second phase
            [place(b, a, 3, 5, half) for a, b, half in read],
        ):
            assert len({c % 8 for c in chunks}) == 8
    for a2, start in product(range(8), (0, 16)):  # 8-byte loads are served sixteen lanes at a time
        banks = {(place(3, 5, a2, g, t // 2) * 4 + t % 2 * 2) % 32 for t, g in LANES[start : start + 16]}
        assert len(banks) == 16


@pytest.mark.parametrize(("threads", "prefetch"), [(256, "registers"), pytest.param(512, "split", marks=pytest.mark.slow)])
def test_computes_the_reference(threads: int, prefetch: str) -> None:
    config = {"threads": threads, "prefetch": prefetch, "l2": "none", "load": "nc", "store": "wb", "unroll": 2}
    workload = KronMatmul(3, [(8, 8)] * 5)
    assert run_schedule(SCHEDULE, workload, config, ONE_SM, order="random") <= 2e-6  # as exact as plain FMA


def test_default_prefetches_without_spills(tmp_path: Path) -> None:
    workload = KronMatmul(1024, [(8, 8)] * 5)
    config = SCHEDULE.default_config(workload, H200)
    manifest = build_artefact(workload, SCHEDULE, config, H200, tmp_path / "a")
    assert config["prefetch"] == "registers" and manifest.spill_bytes == 0 and len(manifest.launches) == 1


def test_other_shapes_and_small_devices_are_refused_in_one_line() -> None:
    for workload in (KronMatmul(4, [(8, 8)] * 4), KronMatmul(4, [(8, 8)] * 5, "float16")):
        assert "8x8^5 in float32 only" in str(SCHEDULE.supports(workload, H200))
    small = dataclasses.replace(H200, shared_per_block=100_000)
    assert "shared memory" in str(SCHEDULE.supports(KronMatmul(4, [(8, 8)] * 5), small))
    with pytest.raises(InvalidConfig, match="no next row"):
        plan_chain8(4, {"threads": 512, "prefetch": "split", "l2": "first", "load": "nc", "store": "wb", "unroll": 1}, H200)
