from __future__ import annotations

import json
import math
import random
import subprocess
import sys
import warnings
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kronsched.errors import RecordError
from kronsched.measure.base import STATUSES, BuildResult, Measured, RunResult
from kronsched.records import RecordWarning, TuningRecord, record_of
from kronsched.records.schema import MAX_ERROR
from kronsched.space import Candidate
from tests.records.record_factory import H200, KRON, make_record

RECORD = make_record()
TEXT = st.text(st.characters(codec="utf-8"))
FINITE = st.floats(allow_nan=False, allow_infinity=False, min_value=-1e299, max_value=1e299)
SCALAR = st.one_of(st.integers(-(2**62), 2**62), FINITE, st.booleans(), TEXT)
JSON = st.recursive(
    SCALAR | st.none(), lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3), max_leaves=8
)


def changed(path: str, value: Any) -> str:
    """The JSON of RECORD with one field set; "result.status" is nested."""
    data = json.loads(RECORD.to_json())
    *outer, last = path.split(".")
    node = data
    for name in outer:
        node = node[name]
    node[last] = value
    return json.dumps(data)


@given(
    config=st.dictionaries(TEXT, SCALAR, max_size=5),
    times=st.lists(st.floats(0, 1e12, allow_nan=False), max_size=5),
    median=st.floats(1e-3, 1e12),
    status=st.sampled_from(STATUSES),
    error=st.none() | TEXT,
    extra=st.dictionaries(TEXT.map(lambda t: "x_" + t), JSON, max_size=3),
    nested=JSON,
)
def test_round_trip(config, times, median, status, error, extra, nested):
    result = {"status": status, "times_us": times, "median_us": median, "error": error, "x_future": nested}
    record = make_record(config=config or {"k": 1}, result=result, extra=extra)
    line = record.to_json()
    assert "\n" not in line and line.isascii()
    again = TuningRecord.from_json(line)
    assert again == record
    assert list(again.config.items()) == list(record.config.items())
    assert again.to_json() == line


def test_workload_key_is_the_workloads_own():
    assert RECORD.workload_key == KRON.key
    assert json.loads(RECORD.to_json())["workload_key"] == KRON.key
    assert TuningRecord.from_json(changed("workload_key", "kron-0000000000000000")).workload_key == KRON.key
    without = json.loads(RECORD.to_json())
    del without["workload_key"]
    assert TuningRecord.from_json(json.dumps(without)) == RECORD


def test_properties():
    assert RECORD.ok and RECORD.median_us == 12.5
    assert RECORD.candidate == Candidate("kron_cuda_simt", (("rows", 2), ("groups", "12,34"), ("pad", True), ("share", 0.5)))
    failed = make_record(status="timeout")
    assert not failed.ok and failed.median_us is None and failed.status == "timeout"


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("schema", "1", "schema must be an integer"),
        ("schema", True, "schema must be an integer"),
        ("schema", 0, "schema must be an integer"),
        ("workload", [], "workload must be an object, not a list of 0"),
        ("workload.family", 3, "workload.family must be a string, not 3"),
        ("target.kind", "rocm", "target.kind must be 'cuda' or 'cpu', not 'rocm'"),
        ("target.kind", ["cuda"], "target.kind must be"),
        ("target.name", None, "target.name must be a string"),
        ("target.units", 1.5, "target.units must be an integer or null"),
        ("space.name", {}, "space.name must be a string"),
        ("config", "rows=2", "config must be an object"),
        ("config.rows", [1], "config.'rows' must be a finite number, a string or a boolean"),
        ("config.rows", None, "config.'rows' must be"),
        ("config.rows", 10**400, "config.'rows' must be"),
        ("result.status", "fine", "result.status must be one of ok, invalid"),
        ("result.status", {}, "result.status must be one of"),
        ("result.times_us", [1.0, "2"], "result.times_us must be a list of finite numbers"),
        ("result.times_us", [True], "result.times_us must be a list"),
        ("result.times_us", [10**400], "result.times_us must be a list"),
        ("result.times_us", "12", "result.times_us must be a list"),
        ("result.times_us", [-1.0], "result.times_us must be a list"),
        ("result.median_us", None, "result.median_us must be a number > 0"),
        ("result.median_us", -3.0, "result.median_us must be a number > 0"),
        ("result.median_us", "12", "result.median_us must be a finite number or null"),
        ("result.error", 5, "result.error must be a string or null"),
        ("kernel.source_sha256", 5, "kernel.source_sha256 must be a string or null"),
        ("kernel", None, "kernel must be an object"),
        ("search.round", "first", "search.round must be an integer or null"),
        ("search.build_seconds", [], "search.build_seconds must be a finite number or null"),
        ("versions", [], "versions must be an object"),
        ("timestamp", 12, "timestamp must be a string"),
        ("result.error", "\ud800", "unpaired surrogate"),
        ("x_future", {"\udfff": 1}, "unpaired surrogate"),
    ],
)
def test_wrong_field_is_named(path, value, message):
    with pytest.raises(RecordError) as caught:
        TuningRecord.from_json(changed(path, value))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("path", ["schema", "workload", "target", "space", "config", "result"])
def test_missing_field_is_named(path):
    data = json.loads(RECORD.to_json())
    del data[path]
    with pytest.raises(RecordError, match=f"^{path} is missing"):
        TuningRecord.from_json(json.dumps(data))


def test_optional_objects_may_be_missing():
    data = json.loads(RECORD.to_json())
    for name in ("kernel", "search", "versions", "timestamp"):
        del data[name]
    record = TuningRecord.from_json(json.dumps(data))
    assert record.ok and record.kernel == {} and record.timestamp == ""


@pytest.mark.parametrize("text", ["", "null", "[]", "3", '"ok"', "{", "{}", "\x00", "{'a': 1}", b"\xff\xfe", "1" * 5000])
def test_not_a_record(text):
    with pytest.raises(RecordError):
        TuningRecord.from_json(text)


@pytest.mark.parametrize("depth", [40, 900, 200_000])
@pytest.mark.parametrize("pair", ["[]", "{}"])
def test_nesting_bomb(depth, pair):
    bomb = "[" * depth + "]" * depth if pair == "[]" else '{"a":' * depth + "1" + "}" * depth
    with pytest.raises(RecordError, match="nested"):
        TuningRecord.from_json(changed("x_future", 0)[:-2] + bomb + "}")


def test_non_finite_numbers_are_written_as_null_and_read_as_bad_values():
    result = {**RECORD.result, "noise": math.nan, "max_relative_error": math.inf, "times_us": [1.0, -math.inf]}
    line = make_record(result=result, extra={"future": [math.nan]}).to_json()
    assert "NaN" not in line and "Infinity" not in line
    again = TuningRecord.from_json(line)
    assert again.result["noise"] is None and again.result["max_relative_error"] is None
    assert again.result["times_us"] == [1.0] and again.extra == {"future": [None]}
    tokens = (
        RECORD.to_json()
        .replace('"noise":0.02', '"noise":NaN')
        .replace('"max_relative_error":1e-07', '"max_relative_error":1e999')
    )
    read = TuningRecord.from_json(tokens)
    assert read.result["noise"] is None and read.result["max_relative_error"] is None
    with pytest.raises(RecordError, match="median_us"):
        TuningRecord.from_json(RECORD.to_json().replace('"median_us":12.5', '"median_us":Infinity'))


def test_newer_schema_is_read_with_a_warning():
    with pytest.warns(RecordWarning, match="schema 7 is newer"):
        record = TuningRecord.from_json(changed("schema", 7))
    assert record.median_us == 12.5 and json.loads(record.to_json())["schema"] == 7


def test_ten_thousand_mutations_of_a_record_never_crash():
    rng, lines = random.Random(1), [make_record(float(i + 1), status=STATUSES[i]).to_json().encode() for i in range(5)]
    outcomes = {"read": 0, "refused": 0}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RecordWarning)
        for _ in range(10_000):
            line = bytearray(rng.choice(lines))
            for _ in range(rng.choice((1, 1, 1, 2, 8))):
                line[rng.randrange(len(line))] = rng.randrange(256)
            try:
                record = TuningRecord.from_json(bytes(line))
            except RecordError as e:
                outcomes["refused"] += 1
                assert "\n" not in str(e)
            else:
                outcomes["read"] += 1
                assert record.workload_key and (record.median_us or 1) > 0
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", RecordWarning)
                    assert TuningRecord.from_json(record.to_json()) == record
    assert min(outcomes.values()) > 500, outcomes


def test_record_of_a_measured_candidate():
    candidate = Candidate("kron_cuda_simt", (("rows", 2), ("pad", False)))
    build = BuildResult(
        "ok", artefact="/tmp/a", source_sha256="cd" * 32, registers=40, shared_bytes=1024, spill_bytes=0, seconds=1.5
    )
    run = RunResult("ok", None, (3.0, 1.0, 2.0), 2e-7, 0.1, None, 0.75)
    record = record_of(KRON, H200, "kron_cuda_simt", "0011", Measured(candidate, build, run), {"strategy": "random", "round": 3})
    assert record.ok and record.median_us == 2.0 and record.result["times_us"] == [3.0, 1.0, 2.0]
    assert record.candidate == candidate and record.workload_key == KRON.key and record.target == H200.to_dict()
    assert record.kernel == {"source_sha256": "cd" * 32, "registers": 40, "shared_bytes": 1024, "spill_bytes": 0}
    assert record.search == {"strategy": "random", "round": 3, "build_seconds": 1.5, "run_seconds": 0.75}
    assert record.versions["kronsched"] and record.versions["apache-tvm"] and record.timestamp.endswith("+00:00")
    assert TuningRecord.from_json(record.to_json()) == record


def test_record_of_a_failure():
    candidate = Candidate("kron_cuda_simt", (("rows", 2),))
    failed = Measured(candidate, BuildResult("compile_error", "x" * 10_000 + "\ud800", seconds=0.5))
    record = record_of(KRON, H200, "kron_cuda_simt", "0011", failed, {})
    assert record.status == "compile_error" and len(record.result["error"]) == MAX_ERROR and record.result["times_us"] == []
    wrong = Measured(candidate, BuildResult("ok"), RunResult("wrong_result", "bad \ud800", (), math.inf))
    record = record_of(KRON, H200, "kron_cuda_simt", "0011", wrong, {})
    assert record.status == "wrong_result" and record.result["max_relative_error"] is None
    assert TuningRecord.from_json(record.to_json()) == record


def test_import_is_light():
    code = (
        "import sys, kronsched.records; print(sorted({m.split('.')[0] for m in sys.modules} & {'tvm','torch','xgboost','numpy'}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
