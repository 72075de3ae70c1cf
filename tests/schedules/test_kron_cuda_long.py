"""Kron-Matmul of many small factors by a chained kernel and tiles: which shapes, which launches, the result in the emulator."""

from __future__ import annotations

from math import prod

import pytest

from kronsched.dtypes import DTYPES
from kronsched.hardware import resolve_target
from kronsched.runtime.lower import lower
from kronsched.schedules.kron_cuda_long import KronCudaLong, plan_head
from kronsched.workloads.kron import KronMatmul
from tests.emulator import run_schedule

H200 = resolve_target("nvidia/h200")
SCHEDULE = KronCudaLong()


def equal(m: int, p: int, n: int, dtype: str) -> KronMatmul:
    return KronMatmul(m, [(p, p)] * n, dtype)


@pytest.mark.parametrize("dtype", ["float16", pytest.param("float32", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("m", "p", "n"), [(16, 8, 8), (16, 16, 6), (1024, 8, 6)])
def test_two_launches_of_whole_lines_do_what_three_did(m: int, p: int, n: int, dtype: str) -> None:
    workload = equal(m, p, n, dtype)
    config = SCHEDULE.default_config(workload, H200)
    launches = lower(workload, SCHEDULE, config, H200).launches
    assert len(launches) == 2
    assert launches[1].args[-1] == "y" and "x" not in launches[1].args  # in place
    (plan,) = plan_head(workload, config, H200)
    assert plan.inner == p ** int(config["last"]) and plan.ct * plan.item >= 128
    assert plan.outer * prod(a.p for a in plan.axes) * plan.inner == workload.m * workload.k_in


def test_only_products_longer_than_a_chained_kernel_are_served() -> None:
    for workload in (
        equal(4, 8, 5, "float16"),
        equal(4, 64, 4, "float16"),
        equal(4, 5, 7, "float16"),
        equal(4, 8, 7, "float64"),
        KronMatmul(4, [(8, 8)] * 6 + [(8, 4)], "float16"),
    ):
        assert "more equal square factors" in str(SCHEDULE.supports(workload, H200))


RUNS = [
    (equal(1, 8, 6, "float16"), {}),
    (equal(2, 4, 8, "bfloat16"), {"last": 7, "hints": "stream", "fuse": 1}),
    (equal(1, 2, 15, "float32"), {"last": 12}),
]


@pytest.mark.parametrize(
    ("workload", "change"),
    [pytest.param(w, c, id=w.label, marks=[pytest.mark.slow] if w.dtype == "float32" else []) for w, c in RUNS],
)
def test_computes_the_reference(workload: KronMatmul, change: dict[str, object]) -> None:
    config = {**SCHEDULE.default_config(workload, H200), **change}
    error = run_schedule(SCHEDULE, workload, config, H200, order="random")
    assert error <= DTYPES[workload.dtype].tolerance * workload.slack
