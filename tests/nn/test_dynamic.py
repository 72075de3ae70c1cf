"""Any number of rows from few builds: row plans, buckets, tuned sizes, configs of neighbours, threads."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kronsched import KronMatmul, kron_matmul
from kronsched.errors import ArgumentError, ArgumentTypeError, UnsupportedError
from kronsched.hardware import resolve_target
from kronsched.nn import DynamicKron, dynamic
from kronsched.records.database import user_dir
from tests.nn.nn_cases import SHAPES, dense, factors, rows
from tests.records.record_factory import make_record


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    dynamic.clear()
    yield
    dynamic.clear()


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of rows of every kernel that is made, in order."""
    made: list[int] = []
    build = dynamic.Kernels._build

    def counted(self: dynamic.Kernels, workload: KronMatmul) -> Any:
        made.append(workload.m)
        return build(self, workload)

    monkeypatch.setattr(dynamic.Kernels, "_build", counted)
    return made


def record(m: int, median_us: float, **config: Any) -> str:
    """A line of a log for SHAPES in float64 on this CPU: the default config but for some knobs."""
    from kronsched import registry

    workload, device = KronMatmul(m=m, factors=SHAPES, dtype="float64"), resolve_target("cpu")
    whole = {**registry.schedule("kron_cpu").default_config(workload, device), **config}
    return make_record(median_us, workload=workload, device=device, config=whole).to_json() + "\n"


def write_log(*lines: str) -> Path:
    path = user_dir() / "mine.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(lines), encoding="utf-8")
    return path


@pytest.mark.parametrize("cap", [1 << 30, 16])
def test_row_plans_cover_every_row_with_few_powers_of_two(cap: int) -> None:
    assert dynamic.row_plan(0) == []
    assert dynamic.row_plan(1000) == [(0, 512), (488, 512)]
    assert dynamic.row_plan(513) == [(0, 512), (512, 1)]
    for m in range(1, 200):
        plan = dynamic.row_plan(m, cap)
        assert {row for start, size in plan for row in range(start, start + size)} == set(range(m))
        assert all(size & (size - 1) == 0 and size <= cap for _, size in plan)
        assert len(plan) <= max(2, -(-m // cap))


def test_forty_batch_sizes_take_six_builds(builds: list[int]) -> None:
    fs = factors()
    for m in range(41):
        torch.testing.assert_close(kron_matmul(rows(m, 12), fs), rows(m, 12) @ dense(fs))
    assert sorted(builds) == [1, 2, 4, 8, 16, 32]
    kron_matmul(rows(39, 12), fs)
    assert len(builds) == 6


def test_y_is_added_once_where_calls_overlap() -> None:
    fs, x, y = factors(), rows(7, 12), rows(7, 6)
    torch.testing.assert_close(kron_matmul(x, fs, beta=1.0, y=y, out=y), x @ dense(fs) + rows(7, 6))


def test_a_tuned_number_of_rows_gets_its_own_kernel(builds: list[int]) -> None:
    write_log(record(7, 5.0, tq=2), record(7, 9.0, tq=4))
    kernels = DynamicKron(SHAPES, "float64", "cpu")
    assert kernels.plan(7) == [(0, 7)]
    assert kernels.plan(6) == [(0, 4), (4, 2)]
    fs = factors()
    torch.testing.assert_close(kernels(rows(7, 12), *fs), rows(7, 12) @ dense(fs))
    assert builds == [7]
    assert kernels.modules[7].config["tq"] == 2
    assert kernels.modules[7].origin.startswith("log")


def test_an_untuned_bucket_takes_the_config_of_the_nearest_tuned_one(builds: list[int]) -> None:
    write_log(record(64, 5.0, tq=4), record(3, 5.0, tq=2), "{torn", record(1000, 1.0, tq=6).replace('"m":1000', '"m":0'))
    kernels = DynamicKron(SHAPES, "float64", "cpu")
    kernels.prepare(4, 32)
    assert {m: module.config["tq"] for m, module in kernels.modules.items()} == {4: 2, 32: 4}
    assert kernels.modules[4].origin == "config of m=3, not measured"
    assert not kernels.modules[4].measured and kernels.modules[4].expected_us is None


def test_a_config_that_is_not_valid_there_is_passed_over() -> None:
    write_log(record(3, 5.0, tq=5), record(100, 5.0, tq=2))  # 5 is in no list of values
    kernels = DynamicKron(SHAPES, "float64", "cpu")
    kernels.prepare(2)
    assert kernels.modules[2].origin == "config of m=100, not measured"


def test_clear_makes_new_logs_count() -> None:
    kernels = DynamicKron(SHAPES, "float64", "cpu")
    assert kernels.plan(7) == [(0, 4), (3, 4)]
    write_log(record(7, 5.0))
    assert kernels.plan(7) == [(0, 4), (3, 4)]
    dynamic.clear()
    assert kernels.plan(7) == [(0, 7)]


def test_threads_share_one_build(builds: list[int]) -> None:
    fs, want = factors(), rows(8, 12) @ dense(factors())
    start, found = threading.Barrier(6), []

    def call() -> None:
        start.wait()
        found.append(kron_matmul(rows(8, 12), fs))

    threads = [threading.Thread(target=call) for _ in range(6)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert builds == [8] and len(found) == 6
    for got in found:
        torch.testing.assert_close(got, want)


def test_large_rows_are_cut_so_that_kernels_can_index_them() -> None:
    kernels = DynamicKron([(2**12, 2), (2**12, 2)], "float32", "cpu")
    assert kernels.plan(300) == [(0, 64), (64, 64), (128, 64), (192, 64), (236, 64)]
    with pytest.raises(UnsupportedError, match="needs a tensor of"):
        DynamicKron([(2**16, 2), (2**16, 2)], "float32", "cpu")


def test_describes_itself_and_says_what_is_wrong() -> None:
    kernels = DynamicKron(SHAPES, "float64", "cpu")
    kernels.prepare(0, 4)
    assert repr(kernels) == "<DynamicKron kron 2x3,3x1,2x2 float64 on cpu, built for m in [4]>"
    fs, x = factors(), rows(4, 12)
    for args, error, says in (
        ((x, *fs[:2]), ArgumentError, "factors have the shapes [(2, 3), (3, 1)], [(2, 3), (3, 1), (2, 2)] are needed"),
        ((x[0], *fs), ArgumentError, "x has shape (12,), (m, 12) is needed"),
        ((x.float(), *fs), ArgumentTypeError, "x is torch.float32 on cpu, torch.float64 on cpu is needed"),
    ):
        with pytest.raises(error, match=re.escape(says)):
            kernels(*args)
    for m, error, says in ((-1, ArgumentError, "m=-1 is not allowed"), (2.0, ArgumentTypeError, "m=2.0 must be an int")):
        with pytest.raises(error, match=re.escape(says)):
            kernels.plan(m)  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match="device='nvidia/h200' is not on this machine"):
        DynamicKron(SHAPES, "float64", "nvidia/h200")
    with pytest.raises(ArgumentError, match="dtype='int8' is not allowed"):
        DynamicKron(SHAPES, "int8", "cpu")
