"""The ring in which bulk copies put rows of a chained Kron-Matmul: what lands where, and what is overwritten when."""

from __future__ import annotations

import dataclasses
from itertools import product

import pytest

from kronsched.dtypes import DTYPES
from kronsched.errors import InvalidConfig
from kronsched.hardware import resolve_target
from kronsched.schedules.kron_chain_layout import chunk_position, merged_position, merged_size, read_chunk
from kronsched.schedules.kron_chain_plan import plan_chain
from kronsched.schedules.kron_chain_ring_plan import Ring, ring_of
from kronsched.schedules.kron_cuda_chain import KronCudaChain
from kronsched.workloads.kron import KronMatmul
from tests.emulator import run_schedule

H200 = resolve_target("nvidia/h200")
ONE_SM = dataclasses.replace(H200, units=1)  # so that a persistent grid walks over few rows
SCHEDULE = KronCudaChain()
ROOM = 220_000
SHAPES = [(8, 4), (8, 5), (16, 3), (16, 4), (32, 3), (4, 6), (4, 7), (2, 12), (2, 13)]
BULK = {"rows": 1, "prefetch": "bulk", "persistent": True, "load": "nc", "store": "wb", "unroll": 2, "group": 2, "l2": False}


def slots(ring: Ring, it: int, planes: range) -> set[int]:
    """Where planes of row number `it` lie in the ring."""
    return {(it * ring.a + i) % ring.planes for i in planes}


@pytest.mark.parametrize(("p", "n"), SHAPES)
def test_pieces_cover_a_row_and_lie_apart(p: int, n: int) -> None:
    ring = ring_of(p, n, ROOM)
    assert ring.a * ring.pieces * ring.piece_chunks == p**n // 8 and ring.bytes <= ROOM
    inside = {ring.piece(i) + c for i in range(ring.pieces) for c in range(ring.piece_chunks)}
    assert len(inside) == ring.pieces * ring.piece_chunks and max(inside) < ring.plane_chunks


@pytest.mark.parametrize(("p", "n", "room"), [(16, 4, ROOM), (32, 3, ROOM), (4, 7, ROOM), (4, 7, 108_000), (16, 4, 200_000)])
def test_planes_land_only_where_everybody_is_done(p: int, n: int, room: int) -> None:
    """The order of events of the kernels: a row's planes are free after its last phase, the first `late` ones midway."""
    ring = ring_of(p, n, room)
    every, early, late = range(ring.a), range(ring.early), range(ring.early, ring.a)
    busy = slots(ring, 0, every)  # rows that have landed or are on their way

    def land(it: int, planes: range) -> None:
        new = slots(ring, it, planes)
        assert len(new) == len(planes) and not new & busy
        busy.update(new)

    for it in range(1, ring.rows):
        land(it, early)
    for it in range(20):
        if ring.wraps:
            busy -= slots(ring, it, range(len(late)))
            land(it + 1, late)
        busy -= slots(ring, it, range(len(late), ring.a) if ring.wraps else every)
        land(it + ring.rows, early)
    assert len(busy) == (ring.planes if ring.wraps else ring.rows * ring.a)


@pytest.mark.parametrize(("p", "n"), [(16, 4), (4, 7)])
def test_landed_chunks_are_read_without_bank_conflicts(p: int, n: int) -> None:
    ring = ring_of(p, n, ROOM)
    size = 16 if p == 16 else merged_size(p, n)
    for z, inner, start in product(range(16), range(size), range(0, 8, 2)):
        chunks = [read_chunk(z, t, g) for g in (start, start + 1) for t in range(4)]
        places = {a0 * ring.plane_chunks + a1 * ring.piece_pitch + inner * 2 + half for a1, a0, half in chunks}
        assert len({place % 8 for place in places}) == 8


def test_a_tile_of_merged_factors_lands_where_it_is_put_afterwards() -> None:
    ring = ring_of(4, 7, ROOM)
    for a0, a1, b, half in product(range(16), range(16), range(4), range(2)):
        assert merged_position(4, a0, a1, b, half) == a0 * ring.plane_chunks + a1 * ring.piece_pitch + b * 2 + half


def test_chunks_of_8_to_the_5_land_where_they_are_exchanged() -> None:
    ring = ring_of(8, 5, ROOM)
    for *digits, a3 in product(range(8), repeat=4):
        a0, a1, a2 = digits
        landed = a0 * ring.plane_chunks + ring.piece(a1 * 8 + a2) + a3
        assert landed == chunk_position(8, 5, [a0, a1, a2, a3], 0)


def test_misfits_are_refused_in_one_line() -> None:
    for p, n, change, says in (
        (8, 3, {"threads": 32}, "not of 8"),
        (4, 7, {"threads": 64}, "a tile each"),
        (4, 7, {"threads": 128, "per_sm": 6}, "no room"),
        (4, 7, {"threads": 128, "persistent": False}, "no next block"),
    ):
        with pytest.raises(InvalidConfig, match=says):
            plan_chain(KronMatmul(1024, [(p, p)] * n, "float16"), {**BULK, "per_sm": 1, **change}, H200)
    for p, n, dtype in ((64, 2, "float16"), (8, 5, "float32"), (16, 4, "float32"), (4, 7, "float32")):
        config = {**BULK, "threads": 256 if p > 8 or n == 5 else 128, "per_sm": 1}
        with pytest.raises(InvalidConfig):
            plan_chain(KronMatmul(1024, [(p, p)] * n, dtype), config, H200)


RUNS = [
    (KronMatmul(6, [(8, 8)] * 4, "bfloat16"), {"threads": 256, "per_sm": 2, "l2": "sooner", "unroll": 1}),
    (KronMatmul(6, [(8, 8)] * 5, "float16"), {"threads": 512, "per_sm": 1}),
    (KronMatmul(5, [(32, 32)] * 3, "float16"), {"threads": 512, "per_sm": 1, "unroll": 1}),
    (KronMatmul(5, [(4, 4)] * 7, "bfloat16"), {"threads": 128, "per_sm": 2, "l2": "first", "prefetch": "ring"}),
    (KronMatmul(4, [(16, 16)] * 4, "float16"), {"threads": 512, "per_sm": 1}),
    (KronMatmul(4, [(16, 16)] * 4, "bfloat16"), {"threads": 512, "per_sm": 1, "prefetch": "ring"}),
    pytest.param(
        KronMatmul(5, [(32, 32)] * 3, "float16"), {"threads": 256, "per_sm": 1, "prefetch": "ring"}, marks=pytest.mark.slow
    ),
    pytest.param(
        KronMatmul(5, [(8, 8)] * 5, "bfloat16"), {"threads": 512, "per_sm": 1, "prefetch": "ring"}, marks=pytest.mark.slow
    ),
    pytest.param(KronMatmul(9, [(2, 2)] * 12, "float16"), {"threads": 32, "per_sm": 8}, marks=pytest.mark.slow),
    pytest.param(KronMatmul(7, [(2, 2)] * 13, "bfloat16"), {"threads": 64, "per_sm": 4}, marks=pytest.mark.slow),
    pytest.param(KronMatmul(9, [(16, 16)] * 3, "float16"), {"threads": 32, "per_sm": 8}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("workload", "config"), RUNS)
def test_computes_the_reference(workload: KronMatmul, config: dict[str, object]) -> None:
    error = run_schedule(SCHEDULE, workload, {**BULK, **config}, ONE_SM, order="random")
    assert error <= DTYPES[workload.dtype].tolerance * workload.slack
