"""The shipped logs are usable: read without a warning, found by `load`, and their best records rebuild to the same source."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from pathlib import Path

import pytest

from kronsched import registry
from kronsched.hardware import resolve_target
from kronsched.records.database import find_best, shipped_dir
from kronsched.records.journal import read_log
from kronsched.records.replay import replay
from kronsched.search.table import Table

LOGS = sorted(p for p in shipped_dir().rglob("*.jsonl") if "tables" not in p.parts)
MOST = 24
"""Workloads of a log that are looked at; a grid has a thousand and more."""
TABLES = sorted(shipped_dir().rglob("tables/*.jsonl.gz"))


def test_there_are_shipped_logs_and_tables() -> None:
    assert len(LOGS) >= 2 and len(TABLES) >= 7
    families = {read_log(p)[0].workload["family"] for p in TABLES}
    assert families >= {"kron", "gemm"}


@pytest.mark.parametrize("path", LOGS, ids=lambda p: p.stem)
def test_a_shipped_log_reads_and_its_records_are_found(path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        records = read_log(path)
    assert records and all(r.ok for r in records)
    for key in _some(dict.fromkeys(r.workload_key for r in records)):
        own = [r for r in records if r.workload_key == key]
        found = find_best(registry.workload_from_dict(own[0].workload), resolve_target("nvidia/h200"), [shipped_dir()])
        assert found is not None and found.median_us is not None
        assert found.median_us <= min(r.median_us for r in own if r.median_us)


@pytest.mark.parametrize("path", LOGS, ids=lambda p: p.stem)
def test_the_first_record_of_a_shipped_log_rebuilds(path: Path, tmp_path: Path) -> None:
    one = tmp_path / "one.jsonl"
    one.write_bytes(path.read_bytes().splitlines(keepends=True)[0])
    (again,) = replay(one)
    assert again.digest_matches is True, (again.status, again.error)


@pytest.mark.slow
@pytest.mark.parametrize("path", LOGS, ids=lambda p: p.stem)
def test_the_best_records_of_a_shipped_log_rebuild(path: Path, tmp_path: Path) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    keys = _some(dict.fromkeys(r.workload_key for r in read_log(path)))
    some = tmp_path / path.name
    some.write_bytes(b"".join(line for line in lines if any(key.encode() in line for key in keys)))
    assert [(r.record.workload_key, r.error) for r in replay(some, best=True) if r.digest_matches is not True] == []


def _some(keys: Iterable[str]) -> list[str]:
    """Keys spread over all of them."""
    found = list(keys)
    return found[:: -(-len(found) // MOST)]


@pytest.mark.parametrize("path", TABLES, ids=lambda p: p.stem)
def test_a_shipped_table_is_whole(path: Path) -> None:
    records = read_log(path)
    assert 1000 <= len(records) <= 5000 and all(r.ok for r in records)
    assert {r.search["strategy"] for r in records} == {"exhaustive"}
    # Configs that are the same kernel were measured once.
    times: dict[str, set[float | None]] = {}
    for r in records:
        times.setdefault(r.kernel["source_sha256"], set()).add(r.median_us)
    assert all(len(found) == 1 for found in times.values())
    assert len(times) >= len(records) / 2


def test_the_safe_default_is_near_the_best_of_the_shipped_tables() -> None:
    tables = [Table.load(path) for path in TABLES]
    held = [(table, table.get(default)) for table in tables for default in table.default()]
    assert len(held) >= 6  # of the narrowed spaces, one does not hold it
    for table, entry in held:
        assert entry is not None and entry.cost is not None and table.optimum / entry.cost > 0.9, table.name
