from __future__ import annotations

from pathlib import Path

import pytest

from kronsched.errors import ArgumentError
from kronsched.records.journal import Journal, read_log
from kronsched.records.thin import best_log
from tests.records.record_factory import make_record


def test_only_the_fastest_of_each_workload_stay(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "a.jsonl")
    for i, us in enumerate((30.0, 10.0, 20.0)):
        journal.append(make_record(us, config={"k": i}))
    journal.append(make_record(5.0, status="wrong_result", config={"k": 9}))
    journal.append(make_record(15.0, config={"k": 1}))  # again, slower
    out = tmp_path / "best.jsonl"
    assert best_log(journal.path, out) == 1
    assert [(r.median_us, r.config) for r in read_log(out)] == [(10.0, {"k": 1})]
    assert best_log(journal.path, out, count=2) == 2
    assert [r.median_us for r in read_log(out)] == [10.0, 20.0]


def test_a_name_that_load_would_not_read_is_refused(tmp_path: Path) -> None:
    Journal(tmp_path / "a.jsonl").append(make_record())
    with pytest.raises(ArgumentError, match=r"ends in \.jsonl"):
        best_log(tmp_path / "a.jsonl", tmp_path / "b.jsonl.gz")
