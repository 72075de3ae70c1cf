"""`DynamicW4A16` for any number of rows, and the switch to the library by a recorded crossover."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from kronsched import Gemm, quant
from kronsched.errors import ArgumentError, ArgumentTypeError, RecordError, UnsupportedError
from kronsched.hardware import resolve_target
from kronsched.nn import DynamicW4A16, W4A16Linear, w4a16_kernels, w4a16_library
from kronsched.nn.w4a16_library import Crossover, LibraryProduct, crossover, first_faster, recorded, save
from kronsched.records import database
from tests.quant import checkpoint_cases as cases

N, K = 40, 96
SHIPPED = database.shipped_dir()
CPU = resolve_target("cpu")


def packed(k: int = K, zeros: str = "asymmetric") -> quant.PackedWeight:
    c = cases.layer(k, N, 32, zeros=zeros)
    return quant.pack(c["q"], c["scales"] / 16, None if zeros == "symmetric" else c["zeros"], 32)


def record(rows: int | None, n: int = N, k: int = K, **changes: Any) -> Crossover:
    fields = {"a_dtype": "float16", "group_size": 32, "zero_point": "asymmetric", "act_order": False} | changes
    return Crossover(CPU.name, n, k, rows=rows, times={64: (1.0, 2.0)}, **fields)


@pytest.fixture(autouse=True)
def forget(monkeypatch: pytest.MonkeyPatch) -> Any:
    """No shipped record counts, and none of another test."""
    monkeypatch.setattr(database, "shipped_dir", lambda: database.user_dir())
    w4a16_kernels.clear()
    yield
    w4a16_kernels.clear()


def test_any_number_of_rows() -> None:
    pw = packed()
    module = DynamicW4A16.of(pw)
    assert module.plan(5) == [(0, 8)] and module.plan(100) == [(0, 64), (36, 64)] and module.threshold is None
    for m in (1, 5, 0):
        x = torch.randn(m, K).half()
        torch.testing.assert_close(module(x, pw).double(), x.double() @ pw.unpack(), rtol=0, atol=5e-3)
    module.prepare(5)
    assert sorted(module.modules) == [1, 8]
    assert repr(module) == "<DynamicW4A16 gemm n=40 k=96 float16xint4 g32 asymmetric on cpu, built for m in [1, 8]>"


@pytest.mark.parametrize(("k", "inside"), [(96, False), (80, True)])
def test_weights_whose_rows_are_sorted(k: int, inside: bool) -> None:
    c = cases.layer(k, N, 32)
    g_idx = c["rows"].flip(0) if not inside else (c["rows"] + 1) % 3
    pw = quant.pack(c["q"], c["scales"] / 16, None, 32, g_idx)
    x = torch.randn(3, k).half()
    torch.testing.assert_close(DynamicW4A16.of(pw)(x, pw).double(), x.double() @ pw.unpack(), rtol=0, atol=5e-3)


def test_layer_and_module_share_kernels() -> None:
    pw = packed()
    W4A16Linear(pw, dtype=torch.float16).prepare(3)
    assert sorted(DynamicW4A16.of(pw).modules) == [4]


@pytest.mark.parametrize("zeros", ["symmetric", "asymmetric", "float"])
def test_the_library_multiplies_from_the_recorded_rows_on(zeros: str, monkeypatch: pytest.MonkeyPatch) -> None:
    save(record(6, zero_point=zeros))
    pw = packed(zeros=zeros)
    module = DynamicW4A16.of(pw)
    assert module.threshold == 6 and module.plan(5) == [(0, 8)] and module.plan(6) == []
    module.prepare(6)
    monkeypatch.setattr(w4a16_kernels.W4A16Kernels, "by_kernels", None)  # nothing but the library may run
    x = torch.randn(7, K).half()
    torch.testing.assert_close(module(x, pw).double(), x.double() @ pw.unpack(), rtol=0, atol=5e-3)
    assert not module.modules
    layer = W4A16Linear(pw, dtype=torch.float16)
    with torch.no_grad():
        assert torch.equal(layer(x), module(x, pw))


@pytest.mark.parametrize(("k", "zeros"), [(96, "symmetric"), (100, "float")])
def test_the_library_follows_the_order_of_rows(k: int, zeros: str) -> None:
    workload = Gemm(3, N, k, group_size=32, zero_point=zeros, act_order=True)
    x, *weights = workload.make_inputs(0)
    x[:, 0] = torch.inf  # must not reach other columns through the padding
    x[1:, 0] = 1
    got = LibraryProduct(Gemm(1, N, k, group_size=32, zero_point=zeros, act_order=True), CPU)(x, weights)
    want = workload.reference(x, *weights)
    torch.testing.assert_close(got[1:].double(), want[1:], rtol=2e-3, atol=2e-3)


def test_comparing_stores_a_record_and_uses_it() -> None:
    module = DynamicW4A16(N, K, group_size=32, device="cpu")
    found = module.compare_with_library(1, 2)
    assert set(found.times) == {1, 2} and all(us > 0 for pair in found.times.values() for us in pair)
    assert found.rows == first_faster(found.times) == module.threshold
    assert recorded() == [found, found]  # both folders are the user's here
    [entry] = json.loads((database.user_dir() / w4a16_library.FILE).read_text())
    assert Crossover.from_dict(entry) == found and entry["device"] == CPU.name


def test_shipped_records_are_readable_and_consistent() -> None:
    found = recorded([SHIPPED])
    assert "NVIDIA H200" in {c.device for c in found}
    for c in found:
        assert c.rows == first_faster(c.times) and len(c.times) >= 3
        Gemm(1, c.n, c.k, c.a_dtype, group_size=c.group_size, zero_point=c.zero_point, act_order=c.act_order)


def test_first_faster() -> None:
    assert first_faster({64: (1, 2), 128: (3, 2), 256: (5, 2)}) == 128
    assert first_faster({64: (3, 2), 128: (1, 2), 256: (5, 2)}) == 256
    assert first_faster({64: (3, 2)}) == 64 and first_faster({64: (1, 2)}) is None and first_faster({}) is None


def test_the_nearest_record_counts() -> None:
    one = Gemm(1, N, K, group_size=32, zero_point="asymmetric")
    assert crossover(one, CPU) is None
    far, near = record(100, n=4000, k=9600), record(200, n=80)
    for entry in (far, near, record(1, zero_point="float"), record(2, a_dtype="bfloat16"), record(3, group_size=64)):
        save(entry)
    assert crossover(one, CPU) == near
    save(record(None))
    assert crossover(one, CPU) == record(None)
    assert crossover(one, resolve_target("nvidia/h200")) is None
    assert crossover(Gemm(1, N, K, "bfloat16", group_size=32, zero_point="symmetric"), CPU) == record(2, a_dtype="bfloat16")


def test_a_record_takes_the_place_of_an_older_one(tmp_path: Path) -> None:
    path = tmp_path / "new" / w4a16_library.FILE
    save(record(5), path)
    save(record(6, n=80), path)
    save(record(7), path)
    assert [c.rows for c in recorded([tmp_path])] == [6, 7]


@pytest.mark.parametrize("text", ["", "{", "3", "[3]", '[{"n": 1}]', '[{"device": "a", "n": 0}]'])
def test_a_damaged_file_is_passed_over(text: str) -> None:
    path = database.user_dir() / w4a16_library.FILE
    path.parent.mkdir(parents=True)
    path.write_text(text)
    assert crossover(Gemm(1, N, K), CPU) is None
    save(record(5))
    assert recorded()[0] == record(5)
    with pytest.raises(RecordError, match="no record of a crossover"):
        Crossover.from_dict({"device": "a"})


def test_errors() -> None:
    pw = packed()
    module = DynamicW4A16.of(pw)
    x = torch.ones(2, K).half()
    calls: list[tuple[type[Exception], str, Any]] = [
        (ArgumentTypeError, "pw is of type Tensor", lambda: module(x, torch.ones(3))),  # type: ignore[arg-type]
        (ArgumentTypeError, "x is of type ndarray: a torch.Tensor is needed", lambda: module(x.numpy(), pw)),
        (ArgumentError, "x has shape (96,), (m, 96) is needed", lambda: module(x[0], pw)),
        (ArgumentError, "x has shape (2, 95), (m, 96) is needed", lambda: module(x[:, 1:], pw)),
        (ArgumentTypeError, "x is torch.float32 on cpu, torch.float16 on cpu is needed", lambda: module(x.float(), pw)),
        (ArgumentError, "pw has k=128", lambda: module(x, packed(128))),
        (ArgumentTypeError, "m=2.5 must be an int", lambda: module.plan(2.5)),  # type: ignore[arg-type]
        (ArgumentError, "m=0 is not allowed", lambda: module.prepare(0)),
        (ArgumentTypeError, "pw is of type int", lambda: DynamicW4A16.of(3)),  # type: ignore[arg-type]
        (UnsupportedError, "is not on this machine", lambda: DynamicW4A16(N, K, device="nvidia/h200")),
        (ArgumentError, "group_size=33 is not allowed", lambda: DynamicW4A16(N, K, group_size=33)),
    ]
    for kind, text, call in calls:
        with pytest.raises(kind, match=re.escape(text)):
            call()
