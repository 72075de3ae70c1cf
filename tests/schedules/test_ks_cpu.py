"""The CPU schedule of KSMatmul: plans, the shift of the last tile, the shipped adversarial list, odd shapes."""

from __future__ import annotations

import dataclasses
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kronsched.bench.suites import load_suite
from kronsched.dtypes import DTYPES
from kronsched.errors import InvalidConfig
from kronsched.hardware import Device, resolve_target
from kronsched.measure.check import max_relative_error
from kronsched.schedules.ks_cpu import KSCpu, plan_factors
from kronsched.workloads.ks import KSMatmul
from tests.contract.schedule_battery import run_on_cpu

SCHEDULE = KSCpu()
BASE = {"along": "j", "tile": 4, "vectors": 2, "block": 64, "parallel": True}


@pytest.fixture(scope="module")
def cpu() -> Device:
    return resolve_target("cpu")


def _cut(w: KSMatmul) -> KSMatmul:
    """The same workload with a batch of which a CPU test can compute the reference."""
    return dataclasses.replace(w, batch=max(1, min(w.batch, 200_000_000 // (w.flops // w.batch), 300)))


@pytest.mark.parametrize("workload", load_suite("ks", "adversarial"), ids=lambda w: w.label)
def test_the_adversarial_list_is_right(workload: KSMatmul, cpu: Device) -> None:
    w = _cut(workload)
    inputs = w.make_inputs(0)
    scheduled = SCHEDULE.apply(w, SCHEDULE.default_config(w, cpu), cpu)
    error = max_relative_error(run_on_cpu(scheduled, w, inputs), w.reference(*inputs))
    assert error <= DTYPES[w.dtype].tolerance / 4


@settings(max_examples=15, deadline=None)
@given(st.tuples(*[st.integers(1, 40)] * 3), st.integers(1, 3), st.integers(1, 20), st.booleans(), st.integers(0, 99))
def test_any_shape_and_config_is_right(bcd: tuple[int, int, int], a: int, batch: int, first: bool, seed: int) -> None:
    cpu = resolve_target("cpu")
    w = KSMatmul(batch, (a, *bcd), layout="batch_first" if first else "batch_last")
    candidate = SCHEDULE.space(w, cpu).sample(random.Random(seed))
    assert candidate is not None
    inputs = w.make_inputs(seed)
    output = run_on_cpu(SCHEDULE.apply(w, candidate.config, cpu), w, inputs)
    assert max_relative_error(output, w.reference(*inputs)) < 2e-6


def test_tiles_cover_every_extent_and_are_whole_vectors(cpu: Device) -> None:
    (plan,) = plan_factors(KSMatmul(13, (1, 3 * 16 + 5, 8, 3)), BASE, dataclasses.replace(cpu, vector_bytes=64))
    assert (plan.tile_n, plan.tile_j, plan.tile_l) == (4, 32, 1) and plan.tiles == (4, 2, 3) and plan.sums == 8
    (narrow,) = plan_factors(KSMatmul(13, (1, 5, 8, 3)), BASE, dataclasses.replace(cpu, vector_bytes=64))
    assert narrow.tile_j == 5, "an extent below a vector is one tile"


def test_the_vectorised_dimension_must_suit_the_layout(cpu: Device) -> None:
    for layout, along in (("batch_first", "n"), ("batch_last", "l")):
        with pytest.raises(InvalidConfig, match=f"along={along} is not for layout {layout}"):
            plan_factors(KSMatmul(4, (1, 4, 4, 4), layout=layout), {**BASE, "along": along}, cpu)


def test_a_tile_leaves_registers_for_operands(cpu: Device) -> None:
    with pytest.raises(InvalidConfig, match="128 vectors of sums"):
        plan_factors(KSMatmul(64, (1, 256, 4, 1)), {**BASE, "tile": 16, "vectors": 8}, cpu)


def test_intermediates_of_a_chain_keep_float32(cpu: Device) -> None:
    w = KSMatmul(8, [(6, 4, 8, 1), (1, 12, 12, 2)], "float16")
    scheduled = SCHEDULE.apply(w, SCHEDULE.default_config(w, cpu), cpu)
    assert [(t.name, t.dtype, t.shape) for t in scheduled.scratch] == [("t0", "float32", (8, 24))]
    assert [launch.args for launch in scheduled.launches] == [("x", "w0", "t0"), ("t0", "w1", "y")]
