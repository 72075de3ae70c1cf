from __future__ import annotations

import pytest

from kronsched.report.curves import PAUSE_SECONDS, over_time, over_trials, seconds_of
from tests.records.record_factory import make_record


def at(second: str, median_us: float = 10.0, status: str = "ok", **fields):
    return make_record(median_us, status=status, timestamp=f"2025-01-02T03:{second}+00:00", **fields)


def test_best_so_far_over_trials():
    records = [make_record(status="crash"), make_record(9.0), make_record(12.0), make_record(4.0), make_record(status="timeout")]
    curve = over_trials(records, floor_us=2.0)
    assert curve.measured == ((2, 9.0), (3, 12.0), (4, 4.0))
    assert curve.failed == (1, 5)
    assert curve.best == ((2, 9.0), (4, 4.0), (5, 4.0))
    assert curve.floor_us == 2.0


def test_nothing_ok():
    curve = over_trials([make_record(status="crash")])
    assert curve.best == () and curve.measured == () and curve.failed == (1,)


def test_seconds_follow_the_timestamps_without_pauses():
    own = 0.75  # build and run seconds of a made-up record
    records = [
        at("04:00"),
        at("04:10"),
        at("04:10.500"),
        at("30:00"),
        at("29:00"),
        make_record(timestamp="yesterday"),
        at("29:05"),
    ]
    assert seconds_of(records) == pytest.approx([own, own + 10, own + 10.5, *(own + 10.5 + own * i for i in range(1, 5))])
    assert PAUSE_SECONDS < 20 * 60


def test_over_time():
    curve = over_time([at("04:00", 9.0), at("04:10", status="crash"), at("04:20", 3.0)])
    assert curve.best == ((0.75, 9.0), (20.75, 3.0)) and curve.failed == (10.75,)


def test_odd_seconds_are_harmless():
    record = make_record(search={"build_seconds": -5.0, "run_seconds": None}, timestamp="9999-99-99")
    assert seconds_of([record]) == [0.0]
