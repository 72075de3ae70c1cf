from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kronsched.errors import RecordError
from kronsched.runtime.manifest import FILE_NAME, LaunchSpec, Manifest
from kronsched.workloads.base import TensorSpec
from tests.runtime.runtime_toys import W

MANIFEST = Manifest(
    format=1,
    kind="cuda",
    workload=W.to_dict(),
    space="toy",
    config={"n": 1, "pad": True},
    arch="sm_90a",
    device="NVIDIA H200",
    source_sha256="0" * 64,
    source_file="kernel.cu",
    binary_file="kernel.cubin",
    launches=(LaunchSpec("k", ("x", "t"), ((16, 8, 5), (16, 8, 7)), (4, 1, 1), (32, 2, 1), 1024, ("float32", "float32")),),
    inputs=W.inputs,
    scratch=(TensorSpec("t", (16, 8, 7), "float32"),),
    output=W.output,
    registers=40,
    spill_bytes=0,
    shared_bytes=1024,
    versions={"tvm": "0.27"},
    created="2026-01-01T00:00:00+00:00",
)


def test_round_trip(tmp_path: Path) -> None:
    MANIFEST.save(tmp_path)
    assert Manifest.load(tmp_path) == MANIFEST
    exported = replace(MANIFEST, expected_us=12.5, origin="log", binary_file=None, registers=None)
    exported.save(tmp_path)
    assert Manifest.load(tmp_path) == exported
    assert exported.launches[0].threads == 64


def test_unknown_fields_are_ignored(tmp_path: Path) -> None:
    MANIFEST.save(tmp_path)
    file = tmp_path / FILE_NAME
    file.write_text(json.dumps({**json.loads(file.read_text()), "future": [1]}))
    assert Manifest.load(tmp_path) == MANIFEST


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="cannot be read"):
        Manifest.load(tmp_path)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"format": 99}, "format=99"),
        ({"kind": "rocm"}, "kind='rocm'"),
        ({"source_file": "../../etc/passwd"}, "plain file name"),
        ({"binary_file": "/lib/x.so"}, "plain file name"),
        ({"binary_file": ".."}, "plain file name"),
        ({"launches": [{"symbol": "k"}]}, "'args' is missing"),
        ({"launches": 3}, "not a kronsched manifest"),
        ({"registers": "many"}, "'many' must be an int"),
        ({"workload": []}, "workload must be an object"),
        ({"inputs": [{"name": "x", "shape": "ab", "dtype": "float32"}]}, "not a kronsched manifest"),
        ({"scratch": []}, "tensors that are not described"),
    ],
)
def test_malformed_fields_are_one_clear_error(tmp_path: Path, change: dict[str, Any], says: str) -> None:
    MANIFEST.save(tmp_path)
    file = tmp_path / FILE_NAME
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    with pytest.raises(RecordError) as e:
        Manifest.load(tmp_path)
    assert says in str(e.value)
    assert "\n" not in str(e.value)


@pytest.mark.parametrize("text", ["", "[]", "null", "{", "\x00\xff", '{"format": 1}', "[" * 100_000])
def test_garbage_is_a_record_error(tmp_path: Path, text: str) -> None:
    (tmp_path / FILE_NAME).write_text(text, encoding="latin-1")
    with pytest.raises(RecordError):
        Manifest.load(tmp_path)
