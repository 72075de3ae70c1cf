from __future__ import annotations

import json
from pathlib import Path

import pytest

from kronsched.bench.suites import ALL, load_cases, load_file, load_suite, suite_families, suite_names
from kronsched.errors import ArgumentError, ArgumentTypeError

KRON = {"family": "kron", "m": 2, "factors": [[3, 4]]}


def test_every_shipped_suite_is_made_of_valid_workloads() -> None:
    assert "kron" in suite_families()
    names = ["large", "tall", "real_world", "gaussian_process", "anchors", "cpu", "adversarial"]
    assert suite_names("kron") == names
    for family in suite_families():
        for name in suite_names(family):
            assert load_suite(family, name)


def test_dtype_is_for_the_cases_that_name_none() -> None:
    assert {w.compute_dtype for w in load_suite("kron", "large", "float16")} == {"float16"}
    assert load_suite("kron", "adversarial", "float16")[0].compute_dtype == "float32"


def test_several_dtypes_give_every_shape_in_each() -> None:
    cases = load_cases("kron", "anchors", ["float32", "bfloat16"])
    assert len(cases) == 32
    assert [c.workload.compute_dtype for c in cases] == ["float32"] * 16 + ["bfloat16"] * 16


def test_a_limit_is_of_shapes() -> None:
    labels = [c.workload.label for c in load_cases("kron", "anchors", ["float32", "float16"], limit=2)]
    assert labels == [f"kron m=1024 8x8^{n} {d}" for d in ("float32", "float16") for n in (4, 5)]


def test_a_case_with_its_own_dtype_comes_once() -> None:
    once = load_cases("kron", "adversarial", ["float32"])
    assert load_cases("kron", "adversarial", ["float32", "float16"]) == once


def test_all_is_every_suite_without_repeats() -> None:
    cases = load_cases("kron", ALL)
    keys = [c.workload.key for c in cases]
    assert len(keys) == len(set(keys))
    assert set(keys) == {w.key for name in suite_names("kron") for w in load_suite("kron", name)}
    # Shapes of "large" that are anchors too keep what was published for them.
    assert {c.workload.key for c in cases if c.published} == {w.key for w in load_suite("kron", "anchors")}


def test_published_times_are_microseconds_of_their_dtype_and_device() -> None:
    [first, *_] = load_cases("kron", "anchors")
    assert first.workload.label == "kron m=1024 8x8^4 float32"
    assert first.published == {"fastkron": pytest.approx(29.2), "gpytorch": pytest.approx(166)}
    assert first.published_on == "NVIDIA H200"
    assert not any(c.published for c in load_cases("kron", "anchors", ["float16"]))


def test_unknown_suite() -> None:
    with pytest.raises(ArgumentError, match=r"suite='huge' is not allowed: choose one of large, tall.*, all"):
        load_suite("kron", "huge")


def test_a_list_of_workloads_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps([KRON, {**KRON, "dtype": "float64"}]))
    assert [c.workload.compute_dtype for c in load_file(path, None, ["float16"])] == ["float16", "float64"]


def test_named_lists_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"source": "me", "a": [KRON], "b": [{**KRON, "m": 3}]}))
    assert [c.workload.m for c in load_file(path)] == [2]  # type: ignore[attr-defined]
    assert [c.workload.m for c in load_file(path, "b")] == [3]  # type: ignore[attr-defined]
    assert len(load_file(path, "all")) == 2
    with pytest.raises(ArgumentError, match=r"mine\.json': suite='c' is not allowed: choose one of a, b, all"):
        load_file(path, "c")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nonsense", "cannot be read"),
        ("3", "a list of workloads is needed"),
        ("{}", "a list of workloads is needed"),
        ('[{"m": 3}]', "case 0: .*family"),
        ('[{"family": "kron", "m": 0, "factors": [[2, 2]]}]', "case 0: m=0 is not allowed"),
        ("[7]", "case 0 is 7"),
    ],
)
def test_a_wrong_file_is_one_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "mine.json"
    path.write_text(text)
    with pytest.raises((ArgumentError, ArgumentTypeError), match=message) as caught:
        load_file(path)
    assert "\n" not in str(caught.value)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="No such file"):
        load_file(tmp_path / "none.json")
