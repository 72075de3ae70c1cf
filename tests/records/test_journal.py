from __future__ import annotations

import gzip
import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest

from kronsched.errors import ArgumentError, RecordError
from kronsched.records import Journal, RecordWarning, TuningRecord, read_log
from kronsched.records.journal import MAX_LINE, MAX_WARNINGS
from tests.records.record_factory import make_record

APPENDER = """
import sys
from pathlib import Path
sys.path.insert(0, {here!r})
from tests.records.record_factory import make_record
from kronsched.records import Journal
journal = Journal(sys.argv[1])
if sys.argv[4:] == ["torn"]:  # a system that takes a write in pieces, so that only the lock keeps lines whole
    import os, time
    whole = os.write
    def pieces(fd, data):
        time.sleep(0.001)
        return whole(fd, data[:5000])
    os.write = pieces
for i in range(int(sys.argv[3])):
    journal.append(make_record(i + 1.0, config={{"writer": sys.argv[2], "i": i, "pad": "x" * 20000}}))
    print(i, flush=True)
"""


def appender(log: Path, name: str, count: int, *options: str) -> subprocess.Popen[str]:
    code = APPENDER.format(here=str(Path(__file__).parents[2]))
    return subprocess.Popen([sys.executable, "-c", code, str(log), name, str(count), *options], stdout=subprocess.PIPE, text=True)


def quiet_read(path: Path) -> list[TuningRecord]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RecordWarning)
        return Journal(path).read()


def test_append_then_read(tmp_path):
    journal = Journal(tmp_path / "sub" / "log.jsonl")
    records = [make_record(i + 1.0) for i in range(3)]
    for record in records:
        journal.append(record)
    assert journal.read() == records == read_log(journal.path)
    assert journal.path.read_bytes().count(b"\n") == 3


def test_missing_file_holds_nothing(tmp_path):
    assert Journal(tmp_path / "none.jsonl").read() == []
    with pytest.raises(ArgumentError, match="is not a file"):
        read_log(tmp_path / "none.jsonl")
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(ArgumentError, match="holds no usable tuning record"):
        read_log(tmp_path / "empty.jsonl")


@pytest.mark.parametrize("cut", [1, 2, 30, 400])
def test_torn_tail_is_skipped_and_healed(tmp_path, cut):
    journal = Journal(tmp_path / "log.jsonl")
    journal.append(make_record(1.0))
    journal.append(make_record(2.0))
    journal.path.write_bytes(journal.path.read_bytes()[:-cut])
    whole = cut == 1  # only the newline is missing: the record is complete
    assert len(quiet_read(journal.path)) == 1 + whole
    journal.append(make_record(3.0))
    if whole:
        assert [r.median_us for r in journal.read()] == [1.0, 2.0, 3.0]
    else:
        with pytest.warns(RecordWarning, match=r"log\.jsonl:2: skipped: not JSON"):
            assert [r.median_us for r in journal.read()] == [1.0, 3.0]


def test_bad_lines_are_named_and_skipped(tmp_path):
    good = make_record().to_json().encode()
    bad = [b"\xff\xfe\x80", b"hello", b"[]", b"{}", b'{"a":' * 100_000, good.replace(b'"ok"', b'"best"'), b"\xc3" + good]
    path = tmp_path / "log.jsonl"
    path.write_bytes(b"\r\n\n".join([good, *bad, good]))
    with pytest.warns(RecordWarning) as caught:
        assert len(Journal(path).read()) == 2
    assert len(caught) == len(bad)
    assert all(f"{path}:{3 + 2 * i}: skipped: " in str(w.message) for i, w in enumerate(caught))


def test_many_bad_lines_give_few_warnings(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text("junk\n" * 500)
    with pytest.warns(RecordWarning) as caught:
        assert Journal(path).read() == []
    assert len(caught) == MAX_WARNINGS + 1 and "490 more bad lines" in str(caught[-1].message)


def test_an_overlong_line_is_skipped(tmp_path):
    path = tmp_path / "log.jsonl"
    good = make_record().to_json()
    path.write_text(good + "\n" + "x" * (3 * MAX_LINE) + "\n" + good + "\n" + '{"a":"' + "y" * MAX_LINE)
    with pytest.warns(RecordWarning, match=f"longer than {MAX_LINE} bytes") as caught:
        assert len(Journal(path).read()) == 2
    assert [":2:" in str(w.message) for w in caught] == [True, False] and ":4:" in str(caught[1].message)


def test_an_overlong_record_is_refused(tmp_path):
    journal = Journal(tmp_path / "log.jsonl")
    with pytest.raises(RecordError, match="too long"):
        journal.append(make_record(config={"k": "x" * MAX_LINE}))
    assert not journal.path.exists()


def test_unknown_fields_survive(tmp_path):
    data = json.loads(make_record().to_json())
    data["future"] = {"a": [1, {"b": None}]}
    data["kernel"]["clusters"] = 2
    data["result"]["percentiles"] = [1.5]
    path = tmp_path / "log.jsonl"
    path.write_text(json.dumps(data))
    (record,) = Journal(path).read()
    assert json.loads(record.to_json()) == data


def test_compressed_log(tmp_path):
    path = tmp_path / "table.jsonl.gz"
    lines = [make_record(i + 1.0).to_json() for i in range(200)]
    path.write_bytes(gzip.compress("\n".join(lines).encode()))
    assert [r.median_us for r in Journal(path).read()] == [i + 1.0 for i in range(200)]
    with pytest.raises(ArgumentError, match="read-only"):
        Journal(path).append(make_record())
    for damaged in (path.read_bytes()[:-20], b"no gzip at all", path.read_bytes()[:400] + b"\0" * 50):
        path.write_bytes(damaged)
        with pytest.warns(RecordWarning):
            Journal(path).read()


def test_unwritable_paths(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "dir.jsonl").mkdir()
    for path in (
        tmp_path / "file" / "log.jsonl",
        tmp_path / "dir.jsonl",
        "/proc/kronsched/log.jsonl",
        "bad\0name",
        tmp_path / ("n" * 300),
    ):
        for use in (Journal.check_writable, lambda journal: journal.append(make_record())):
            with pytest.raises(ArgumentError) as caught:
                use(Journal(path))
            assert str(caught.value).startswith("log=") and "cannot be written" in str(caught.value)
            assert "\n" not in str(caught.value)
    with pytest.raises(ArgumentError, match="cannot be read"):
        Journal(tmp_path / "dir.jsonl").read()


def test_check_writable_keeps_what_is_there(tmp_path):
    journal = Journal(tmp_path / "log.jsonl")
    journal.check_writable()
    assert journal.path.exists()
    journal.append(make_record())
    journal.check_writable()
    assert len(journal.read()) == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_full_disk_is_one_clear_error(tmp_path):
    (tmp_path / "log.jsonl").symlink_to("/dev/full")
    with pytest.raises(RecordError, match="No space left"):
        Journal(tmp_path / "log.jsonl").append(make_record())


@pytest.mark.parametrize("options", [(), ("torn",)])
def test_several_processes_append_at_once(tmp_path, options):
    log, count = tmp_path / "log.jsonl", 25
    writers = [appender(log, name, count, *options) for name in "abc"]
    assert [w.wait(60) for w in writers] == [0, 0, 0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        records = Journal(log).read()
    assert len(records) == 3 * count
    for name in "abc":
        assert [r.config["i"] for r in records if r.config["writer"] == name] == list(range(count))


def test_kill_at_any_moment_loses_at_most_the_line_in_flight(tmp_path):
    log, rng, acknowledged = tmp_path / "log.jsonl", random.Random(0), 0
    bystander = appender(log, "bystander", 150)
    for round_ in range(4):
        victim = appender(log, f"victim{round_}", 10**6)
        assert victim.stdout is not None and victim.stdout.readline() == "0\n"
        time.sleep(rng.uniform(0, 0.1))
        victim.send_signal(signal.SIGKILL)
        victim.wait(10)
        done = 1 + len(victim.stdout.read().split("\n")[:-1])
        acknowledged += done
        mine = [r.config["i"] for r in quiet_read(log) if r.config["writer"] == f"victim{round_}"]
        assert mine == list(range(len(mine))) and len(mine) in (done, done + 1)
    assert bystander.wait(60) == 0
    records = quiet_read(log)
    assert sum(r.config["writer"] == "bystander" for r in records) == 150
    lines = log.read_bytes().count(b"\n")
    assert lines - len(records) <= 4


@pytest.mark.skipif(multiprocessing.get_start_method() == "spawn", reason="needs fork or os.write patched in a child")
def test_killed_in_the_middle_of_a_write(tmp_path):
    log = tmp_path / "log.jsonl"
    Journal(log).append(make_record(1.0))
    child = os.fork()
    if child == 0:  # writes a half of the line, then dies holding the lock
        real = os.write

        def half(fd: int, data: bytes) -> int:
            real(fd, data[: len(data) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
            return 0

        os.write = half
        Journal(log).append(make_record(2.0))
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert not log.read_bytes().endswith(b"\n")
    Journal(log).append(make_record(3.0))
    assert [r.median_us for r in quiet_read(log)] == [1.0, 3.0]


def test_a_write_the_system_splits_is_completed(tmp_path, monkeypatch):
    real = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: real(fd, data[:100]) if len(data) > 100 else real(fd, data))
    Journal(tmp_path / "log.jsonl").append(make_record(2.0))
    monkeypatch.undo()
    assert [r.median_us for r in Journal(tmp_path / "log.jsonl").read()] == [2.0]


def test_ten_thousand_mutations_of_a_log_are_read(tmp_path):
    """Whole files: newlines appear and vanish, too. The record parser alone gets its mutations in test_schema."""
    rng, path = random.Random(2), tmp_path / "log.jsonl"
    original = "\n".join(make_record(i + 1.0).to_json() for i in range(5)).encode() + b"\n"
    kept = []
    for _ in range(10_000):
        data = bytearray(original)
        for _ in range(rng.randint(1, 20)):
            place, kind = rng.randrange(len(data)), rng.randrange(4)
            if kind == 0:
                del data[place : place + rng.randint(1, 50)]
            elif kind == 1:
                data[place:place] = bytes([rng.randrange(256)]) * rng.randint(1, 5)
            else:
                data[place] = rng.choice((10, 0, 34, 123, rng.randrange(256)))
        path.unlink(missing_ok=True)  # rewriting in place makes ext4 flush to disk each time
        path.write_bytes(data)
        kept.append(len(quiet_read(path)))
    assert max(kept) >= 4 and sum(kept) > 2500
