"""The cost on paper: bytes, times with and without overlap, the choice of a grid, scaling."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from kronsched import KronMatmul
from kronsched.distributed import LINKS, Link, plan, scaling
from kronsched.errors import ArgumentError, ArgumentTypeError, UserError
from kronsched.hardware import resolve_target
from kronsched.hardware.roofline import floor_us

FACTORS = ((8, 8),) * 4
EASY: dict[str, Any] = {"device": "nvidia/h200", "kernel_us": lambda w: w.m / 100}
FREE = Link(1e9, 0.0, "as good as free")


def test_bytes() -> None:
    chosen = plan(6, FACTORS, 8, "float16", grid=(2, 4), **EASY)
    block = 3 * 8**4 // 4 * 2
    assert len(chosen.phases) == 2
    assert chosen.exchange_bytes == 2 * block * 3 // 4
    assert chosen.total_exchange_bytes == 8 * chosen.exchange_bytes
    assert plan(7, FACTORS, 8, "float16", grid=(2, 4), **EASY).exchange_bytes == chosen.exchange_bytes // 3 * 4
    assert plan(6, FACTORS, 8, grid=(8, 1), **EASY).exchange_bytes == 0


def test_time_is_the_sum_without_overlap_and_less_with() -> None:
    one = plan(64, FACTORS, 2, grid=(1, 2), chunks=1, link=Link(0.5, 0.0, "slow"), **EASY)
    many = plan(64, FACTORS, 2, grid=(1, 2), chunks=8, link=Link(0.5, 0.0, "slow"), **EASY)
    assert one.us == pytest.approx(one.compute_us + one.exchange_us)
    assert one.exchange_us == pytest.approx(one.exchange_bytes / 0.5e3)
    assert max(many.compute_us, many.exchange_us) < many.us < one.us
    assert many.exchange_us == pytest.approx(one.exchange_us)


def test_latency_stands_against_chunks() -> None:
    slow = Link(100.0, 1e6, "far")
    assert plan(64, FACTORS, 2, grid=(1, 2), link=slow, **EASY).chunks == 1
    assert plan(64, ((32, 32),) * 3, 2, grid=(1, 2), link=Link(5.0, 0.0, "slow"), **EASY).chunks > 1


def test_rows_are_split_while_there_are_rows_and_then_columns() -> None:
    assert plan(1024, FACTORS, 8, device="nvidia/h200").grid.columns == 1
    few = plan(1, ((64, 64),) * 4, 8, device="nvidia/h200", link=FREE)
    assert few.grid.columns == 8, "one row leaves all but one rank idle otherwise"
    assert plan(1, FACTORS, 8, device="nvidia/h200", link=Link(1.0, 1e6, "far")).exchange_bytes == 0


def test_local_is_kept_and_costs_exchanges() -> None:
    one = plan(8, FACTORS, 4, grid=(1, 4), local=1, **EASY)
    assert [p.stop - p.start for p in one.phases] == [1, 1, 1, 1]
    best = plan(8, FACTORS, 4, grid=(1, 4), **EASY)
    assert one.exchange_bytes == 2 * best.exchange_bytes
    assert plan(8, FACTORS, 4, grid=(1, 4), local=best.local, **EASY).phases == best.phases


def test_ranks_beyond_a_host_use_the_network() -> None:
    far: dict[str, Any] = {"link": FREE, "network": Link(10.0, 0.0, "network"), "chunks": 1, **EASY}
    inside = plan(64, FACTORS, 8, grid=(1, 8), per_host=8, **far)
    across = plan(64, FACTORS, 8, grid=(1, 8), per_host=4, **far)
    assert inside.exchange_us < 0.01 * across.exchange_us
    assert across.exchange_us == pytest.approx(across.exchange_bytes * 4 / 7 / 10e3)


def test_kernel_time_is_that_of_the_log_or_of_the_roofline(monkeypatch: pytest.MonkeyPatch) -> None:
    from kronsched.records import database
    from tests.records.record_factory import make_record

    h200, workload = resolve_target("nvidia/h200"), KronMatmul(m=8, factors=FACTORS)
    without = plan(8, FACTORS, 1, device=h200)
    assert without.us == pytest.approx(5.0 + floor_us(workload, h200))
    record = make_record(777.0, workload=workload, device=h200)
    monkeypatch.setattr(database, "find_best", lambda w, device: record if w == workload else None)
    assert plan(8, FACTORS, 1, device=h200).us == pytest.approx(782.0)
    other = replace(h200, name="another GPU")
    assert plan(8, FACTORS, 1, device=other).us == pytest.approx(without.us), "the time of another GPU says nothing"


def test_more_rows_than_a_tensor_may_have() -> None:
    assert plan(2**20, FACTORS, 1, **EASY).us == pytest.approx(2**20 / 100, rel=1e-2)


def test_weak_scaling_of_rows_is_nearly_perfect_and_of_columns_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    from kronsched.records import database

    # A shipped record of one of these products, beside the roofline of the others, would make the others look too good.
    monkeypatch.setattr(database, "find_best", lambda w, device: None)
    big = ((64, 64),) * 4
    points = scaling(16, big, ranks=(1, 16, 1024), device="nvidia/h200")
    assert [p.ranks for p in points] == [1, 16, 1024]
    assert points[0].speedup == 1
    assert all(0.9 < p.efficiency <= 1.0001 for p in points)
    columns = scaling(16, big, ranks=(2, 16), device="nvidia/h200", columns=2)
    assert [p.plan.grid.columns for p in columns] == [2, 2]
    assert columns[0].efficiency < points[1].efficiency


def test_strong_scaling_ends() -> None:
    near, far = scaling(16, ((64, 64),) * 4, ranks=(16, 1024), weak=False, device="nvidia/h200")
    assert near.plan.m == far.plan.m == 16
    assert far.efficiency < near.efficiency


def test_a_plan_is_json() -> None:
    told = json.loads(json.dumps(plan(8, FACTORS, 4, grid=(1, 4), **EASY).to_dict()))
    assert told["grid"] == [1, 4]
    assert told["exchange_bytes"] > 0


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"ranks": 0}, "ranks=0 is not allowed"),
        ({"m": 0}, "m=0 is not allowed"),
        ({"factors": "8x8"}, "factors='8x8' must be a sequence"),
        ({"factors": []}, "factors: 0 given"),
        ({"factors": [(8, 0)]}, "=0 is not allowed"),
        ({"dtype": "int8"}, "dtype='int8'"),
        ({"grid": (1, 3)}, r"grid=\(1, 3\) has 3 ranks, ranks=4 is needed"),
        ({"ranks": 3, "grid": (1, 3)}, r"nearest grid that works with 3 ranks is \(3, 1\)"),
        ({"chunks": 0}, "chunks=0"),
        ({"local": 0}, "local=0"),
        ({"per_host": 0}, "per_host=0"),
        ({"link": "string"}, "link='string' is not allowed: choose one of h200-nvlink"),
        ({"network": 3}, "network=3 is not allowed"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(UserError, match=text) as caught:
        plan(**{"m": 8, "factors": FACTORS, "ranks": 4, "device": "nvidia/h200", **arguments})
    assert "\n" not in str(caught.value)


def test_bad_links_and_columns() -> None:
    with pytest.raises(ArgumentError, match="gbs=0"):
        Link(0, 1.0, "")
    with pytest.raises(ArgumentError, match="latency_us=-1"):
        Link(1.0, -1, "")
    with pytest.raises(ArgumentError, match="columns=3 does not divide ranks=4"):
        scaling(8, FACTORS, ranks=(4,), columns=3, **EASY)
    with pytest.raises(ArgumentTypeError, match="must be an int"):
        scaling(8, FACTORS, columns=1.5, **EASY)  # type: ignore[arg-type]
    assert all(link.source for link in LINKS.values())
