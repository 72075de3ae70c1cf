"""`kronsched thin`: a table that says the same as its log, smaller."""

from __future__ import annotations

from pathlib import Path

import pytest

from kronsched.errors import ArgumentError
from kronsched.records.journal import Journal, read_log
from kronsched.records.thin import thin_log
from kronsched.search.table import Table
from tests.records.record_factory import make_record


def test_a_table_keeps_what_simulation_reads(tmp_path: Path) -> None:
    log = tmp_path / "a.jsonl"
    journal = Journal(log)
    for i in range(5):
        journal.append(make_record(10.0 + i + 1 / 3, config={"k": i}))
    journal.append(make_record(99.123456789, config={"k": 0}))  # measured again: the last counts
    out = tmp_path / "a.jsonl.gz"
    assert thin_log(log, out) == 5
    assert out.stat().st_size < log.stat().st_size / 4
    assert all(not r.result.get("times_us") for r in read_log(out))
    full, thin = Table.load(log), Table.load(out)
    assert len(thin) == len(full) == 5
    assert thin.costs == pytest.approx(full.costs, rel=1e-4)
    assert [e.source_sha256 for _, e in thin] == [e.source_sha256 for _, e in full]
    assert read_log(out)[0].median_us == 99.123


def test_thinning_again_changes_nothing(tmp_path: Path) -> None:
    Journal(tmp_path / "a.jsonl").append(make_record())
    table = tmp_path / "t.jsonl.gz"
    thin_log(tmp_path / "a.jsonl", table)
    before = table.read_bytes()
    thin_log(table, table)
    assert table.read_bytes() == before


@pytest.mark.parametrize("out", ["t.jsonl", "no/such/folder/t.jsonl.gz"])
def test_a_bad_path_is_named(tmp_path: Path, out: str) -> None:
    Journal(tmp_path / "a.jsonl").append(make_record())
    with pytest.raises(ArgumentError, match="out="):
        thin_log(tmp_path / "a.jsonl", tmp_path / out)
