from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from kronsched import KronMatmul
from kronsched.errors import ArgumentError
from kronsched.records import Journal, RecordWarning, TuningRecord, best_in, default_log, find_best, search_dirs
from kronsched.records.database import matches_device, ranked, shipped_dir, user_dir
from tests.records.record_factory import A100, CPU, H200, KRON, OTHER_CPU, make_record

OTHER = KronMatmul(m=65, factors=[(8, 8)] * 4)


@pytest.fixture
def user(tmp_path: Path) -> Path:
    return tmp_path / "user"


@pytest.fixture
def shipped(tmp_path: Path) -> Path:
    return tmp_path / "shipped"


def write(path: Path, *records: TuningRecord) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as f:
        f.writelines(r.to_json() + "\n" for r in records)


def best_us(user: Path, shipped: Path, device=H200, workload=KRON) -> float | None:
    found = find_best(workload, device, [user, shipped])
    return None if found is None else found.median_us


def test_nothing_anywhere(user, shipped):
    assert best_us(user, shipped) is None


def test_lowest_ok_median_of_the_workload_and_gpu(user, shipped):
    write(shipped / "h200" / "a.jsonl", make_record(9.0), make_record(7.0), make_record(8.0), make_record(status="timeout"))
    write(shipped / "h200" / "deep" / "b.jsonl", make_record(6.5), make_record(1.0, workload=OTHER))
    write(shipped / "a100" / "a.jsonl", make_record(2.0, device=A100))
    assert best_us(user, shipped) == 6.5
    assert best_us(user, shipped, A100) == 2.0
    assert best_us(user, shipped, workload=OTHER) == 1.0
    assert best_us(user, shipped, CPU) is None
    assert best_us(user, shipped, A100, OTHER) is None  # only measured on another GPU


def test_the_users_log_wins_over_a_faster_shipped_one(user, shipped):
    write(shipped / "h200" / "a.jsonl", make_record(1.0))
    write(user / "failed.jsonl", make_record(status="crash"))
    assert best_us(user, shipped) == 1.0
    write(user / "mine.jsonl", make_record(5.0), make_record(4.0))
    assert best_us(user, shipped) == 4.0


def test_cpu_records_of_another_cpu_serve_last_and_are_told_apart(user, shipped):
    write(user / "a.jsonl", make_record(1.0, device=OTHER_CPU))
    found = find_best(KRON, CPU, [user, shipped])
    assert found is not None and found.median_us == 1.0 and not matches_device(found, CPU)
    write(shipped / "cpu" / "a.jsonl", make_record(50.0, device=CPU))
    found = find_best(KRON, CPU, [user, shipped])
    assert found is not None and found.median_us == 50.0 and matches_device(found, CPU)
    assert [r.median_us for r in ranked(KRON, CPU, [user, shipped])] == [50.0, 1.0]


def test_tables_are_not_logs(user, shipped):
    write(shipped / "h200" / "tables" / "t.jsonl", make_record(1.0))
    write(shipped / "tables" / "deep" / "t.jsonl", make_record(1.0))
    write(shipped / "h200" / "notes.txt", make_record(1.0))
    assert best_us(user, shipped) is None


def test_records_without_the_key_field_are_found(user, shipped):
    data = json.loads(make_record(3.0).to_json())
    del data["workload_key"]
    write(user / "a.jsonl", make_record(8.0, workload=OTHER))
    with (user / "a.jsonl").open("a") as f:
        f.write(json.dumps(data) + "\n")
    assert best_us(user, shipped) == 3.0


def test_a_lying_key_field_is_not_believed(user, shipped):
    write(user / "a.jsonl", make_record(8.0, workload=OTHER))
    text = (user / "a.jsonl").read_text().replace(OTHER.key, KRON.key)
    (user / "a.jsonl").write_text(text)
    assert KRON.key in text and best_us(user, shipped) is None


def test_bad_lines_are_warned_about_and_skipped(user, shipped):
    write(user / "a.jsonl", make_record(8.0))
    with (user / "a.jsonl").open("ab") as f:
        f.write(make_record(1.0).to_json().encode()[:-40] + b"\n\xff\xff\n")
    with pytest.warns(RecordWarning, match=r"a\.jsonl:2: skipped: .*\(and 1 more\)"):
        assert best_us(user, shipped) == 8.0


def test_bad_lines_of_other_workloads_are_nobodys_business(user, shipped, recwarn):
    write(user / "a.jsonl", make_record(8.0))
    with (user / "a.jsonl").open("ab") as f:
        f.write(make_record(1.0, workload=OTHER).to_json().encode()[:-40] + b"\n")
    assert best_us(user, shipped) == 8.0 and not recwarn.list


def test_a_hundred_shipped_logs_are_searched_in_50_ms(user, shipped):
    for i in range(100):
        other = KronMatmul(m=1000 + i, factors=[(8, 8)] * 4)
        write(shipped / "h200" / f"{i}.jsonl", *(make_record(j + 1.0, workload=other) for j in range(64)))
    wanted = KronMatmul(m=1050, factors=[(8, 8)] * 4)
    seconds = []
    for _ in range(7):
        start = time.perf_counter()
        assert best_us(user, shipped, workload=wanted) == 1.0
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 0.05, seconds  # the least disturbed run: other tests share the cores


def test_best_in():
    records = [make_record(3.0), make_record(2.0), make_record(status="flaky"), make_record(1.0, device=A100)]
    assert best_in([]) is None and best_in([make_record(status="flaky")]) is None
    assert best_in(records) is records[3]
    assert best_in(records, KRON, H200) is records[1]
    assert best_in(records, KRON, CPU) is None and best_in(records, OTHER) is None
    mixed = [*records, make_record(0.5, workload=OTHER)]
    with pytest.raises(ArgumentError, match="hold 2 workloads") as caught:
        best_in(mixed)
    assert KRON.key in str(caught.value) and OTHER.key in str(caught.value)
    assert best_in(mixed, OTHER) is mixed[-1]
    assert best_in([make_record(4.0, device=OTHER_CPU)], device=CPU) is not None


def test_default_places(user_dirs):
    assert default_log(KRON) == user_dirs / "kronsched" / "logs" / f"{KRON.key}.jsonl"
    assert search_dirs() == [user_dir(), shipped_dir()]
    assert shipped_dir().name == "tuning_logs" and shipped_dir().is_dir()
    Journal(default_log(KRON)).append(make_record(3.0))
    found = find_best(KRON, H200)
    assert found is not None and found.median_us == 3.0
