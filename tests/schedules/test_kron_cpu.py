"""The CPU schedule beyond the contract battery: every adversarial case, NaN, precision, registers, plan, speed."""

from __future__ import annotations

import random
import re
import time

import pytest
import torch

from kronsched.bench.suites import load_suite
from kronsched.dtypes import DTYPES
from kronsched.hardware import Device, resolve_target
from kronsched.measure.check import max_relative_error
from kronsched.schedules.kron_cpu import KronCpu
from kronsched.schedules.kron_cpu_plan import accumulators, even_tile, merge_factors, plan_cpu, register_count, vector_tile
from kronsched.space import Config
from kronsched.workloads.kron import KronMatmul
from tests.contract.schedule_battery import run_on_cpu

CPU = resolve_target("cpu")
SCHEDULE = KronCpu()
CASES = [w for w in load_suite("kron", "adversarial") if isinstance(w, KronMatmul) and w.flops < 3e9]
HUGE = 2**26


def _with(workload: KronMatmul, **knobs: int | str | bool) -> Config:
    return {**SCHEDULE.default_config(workload, CPU), **knobs}


def _run(workload: KronMatmul, config: Config, inputs: list[torch.Tensor]) -> torch.Tensor:
    return run_on_cpu(SCHEDULE.apply(workload, config, CPU), workload, inputs)


# -- what it computes -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "workload", [pytest.param(w, id=w.label, marks=[pytest.mark.slow] if w.k_in > HUGE else []) for w in CASES]
)
def test_adversarial_cases_are_right(workload: KronMatmul) -> None:
    space = SCHEDULE.space(workload, CPU)
    rng = random.Random(workload.key)
    drawn = [space.sample(rng) for _ in range(3)]
    inputs = workload.make_inputs(5)
    ref = workload.reference(*inputs)
    for config in (SCHEDULE.default_config(workload, CPU), *(c.config for c in drawn if c is not None)):
        error = max_relative_error(_run(workload, config, inputs), ref)
        # A chain of 20 random 2x2 factors is ill-conditioned: numpy's own float32 result is off by 0.6 to 1.0e-5.
        allowed = DTYPES[workload.dtype].tolerance
        assert error <= allowed, f"{error:.2g} with {dict(config)}"


def test_there_are_as_many_cases_as_the_suite_has() -> None:
    assert len(CASES) >= 14


@pytest.mark.parametrize("nest", ["rows", "groups"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_bad_row_stays_in_its_row(nest: str, value: float) -> None:
    workload = KronMatmul(33, [(7, 7)] * 3)
    inputs = workload.make_inputs(0)
    inputs[0][17] = value
    y = _run(workload, _with(workload, nest=nest, chunk=64, rows=4), inputs)
    bad = ~torch.isfinite(y)
    assert bad[17].all()
    assert not bad[torch.arange(33) != 17].any()


@pytest.mark.parametrize("rows", [1, 2, 8, 64])
@pytest.mark.parametrize("m", [1, 2, 31, 33])
def test_ragged_row_blocks(m: int, rows: int) -> None:
    for factors in ([(6, 6)], [(5, 3), (2, 4)]):
        workload = KronMatmul(m, factors)
        inputs = workload.make_inputs(m)
        for nest in ("rows", "groups"):
            y = _run(workload, _with(workload, rows=rows, nest=nest, chunk=64), inputs)
            assert max_relative_error(y, workload.reference(*inputs)) < 1e-6


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_16_bit_types_accumulate_in_float32(dtype: str) -> None:
    # 16-bit sums would stop at 2048 (256); an intermediate of 90,000 is beyond float16's range.
    workload = KronMatmul(2, [(4096, 1)], dtype)
    ones = [torch.ones(t.shape, dtype=DTYPES[dtype].torch()) for t in workload.inputs]
    assert torch.equal(_run(workload, _with(workload), ones).float(), torch.full((2, 1), 4096.0))
    workload = KronMatmul(1, [(1, 1), (1, 1)], dtype)
    values = [
        torch.full(t.shape, v, dtype=DTYPES[dtype].torch()) for t, v in zip(workload.inputs, (256, 2**-6, 512), strict=True)
    ]
    assert _run(workload, _with(workload), values).item() == 2048.0


@pytest.mark.parametrize("merge", [1, 4, 16])
def test_merged_factors_give_the_same_result(merge: int) -> None:
    workload = KronMatmul(3, [(2, 3), (3, 2), (2, 2), (4, 1), (1, 4), (2, 2)])
    inputs = workload.make_inputs(2)
    y = _run(workload, _with(workload, merge=merge), inputs)
    assert max_relative_error(y, workload.reference(*inputs)) < 1e-6


# -- the code -------------------------------------------------------------------------------------------


@pytest.mark.skipif(CPU.vector_bytes < 32, reason="needs AVX2 or AVX-512")
def test_sums_stay_in_vector_registers() -> None:
    import tvm

    workload = KronMatmul(64, [(64, 64)] * 2)
    built = tvm.compile(SCHEDULE.apply(workload, _with(workload), CPU).mod, target=CPU.tvm_target())
    assembly = str(built.mod.inspect_source("asm"))
    register = "zmm" if CPU.vector_bytes == 64 else "ymm"
    fused = re.findall(rf"vfmadd\w+ps\s.*%{register}", assembly)
    spilled = re.findall(rf"vmov\w+\s+%{register}\d+, -?\d*\(%r[sb]p\)", assembly)
    assert len(fused) >= 8
    assert not spilled


@pytest.mark.skipif(not CPU.arch.startswith("x86-64"), reason="looks for x86 instructions")
@pytest.mark.parametrize("order", ["head", "tail"])
@pytest.mark.parametrize("nest", ["rows", "groups"])
def test_no_index_is_divided_in_vectors(order: str, nest: str) -> None:
    """Views of neighbouring steps must match up exactly, or addresses are computed lane by lane (three times slower)."""
    import tvm

    for factors in ([(10, 10)] * 4, [(9, 11), (13, 4), (6, 7)]):
        workload = KronMatmul(16, factors)
        mod = SCHEDULE.apply(workload, _with(workload, order=order, nest=nest, chunk=64), CPU).mod
        assembly = str(tvm.compile(mod, target=CPU.tvm_target()).mod.inspect_source("asm"))
        assert not re.findall("vpmuldq|vpextrd|gather", assembly)


def test_a_program_of_64_factors_is_scheduled_quickly() -> None:
    workload = KronMatmul(1, [(2, 1)] * 20 + [(1, 1)] * 24 + [(1, 2)] * 20)
    start = time.process_time()
    SCHEDULE.apply(workload, _with(workload), CPU)
    SCHEDULE.apply(workload, _with(workload, merge=1), CPU)
    assert time.process_time() - start < 5


def test_faster_than_the_shuffle_algorithm() -> None:
    """Measured 7 to 12 times; 2 leaves room for a busy machine."""
    import tvm

    workload = KronMatmul(64, [(8, 8)] * 4)
    scheduled = SCHEDULE.apply(workload, _with(workload), CPU)
    main = tvm.compile(scheduled.mod, target=CPU.tvm_target())["main"]
    inputs = workload.make_inputs(0)
    params = scheduled.mod["main"].params
    views = [t.view([int(n) for n in p.shape]) for t, p in zip((*inputs, torch.empty(64, 4096)), params, strict=True)]
    baseline = workload.baseline(*inputs)[1]
    ours, theirs = min(_seconds(lambda: main(*views)) for _ in range(40)), min(_seconds(baseline) for _ in range(40))
    assert theirs > 2 * ours


def _seconds(call: object) -> float:
    start = time.perf_counter()
    call()  # type: ignore[operator]
    return time.perf_counter() - start


# -- the plan -------------------------------------------------------------------------------------------


def test_tiles_along_vectors_waste_few_lanes() -> None:
    assert vector_tile(8, 32, 16) == 8  # less than a vector: as it is
    assert vector_tile(64, 32, 16) == 32
    assert vector_tile(48, 32, 16) == 32  # 32 + 16, no waste
    assert vector_tile(17, 64, 16) == 16  # 16 + 1, never one odd vector of 17
    assert all(vector_tile(n, 64, 16) % 16 == 0 for n in range(16, 300))


def test_tiles_across_are_divisors_or_even() -> None:
    assert even_tile(8, 12) == 8
    assert even_tile(32, 12) == 8  # a divisor near
    assert even_tile(13, 8) == 7  # 7 + 6 rather than 8 + 5
    assert all(1 <= even_tile(n, w) <= w or n <= w for n in range(1, 60) for w in range(1, 17))


def test_neighbours_merge_from_the_last() -> None:
    workload = KronMatmul(1, [(2, 2)] * 5 + [(16, 16)] + [(2, 2)])
    members = [f.members for f in merge_factors(workload, 8)]
    assert members == [(0, 1), (2, 3, 4), (5,), (6,)]
    assert [f.members for f in merge_factors(workload, 1)] == [(i,) for i in range(7)]


def test_few_rows_still_use_all_cores() -> None:
    workload = KronMatmul(1, [(2, 2)] * 20)
    device = Device("cpu", "many cores", "x86-64-v4", 64, 100.0, {"float32": 1e4}, vector_bytes=64)
    config = SCHEDULE.default_config(workload, device)
    assert config["nest"] == "groups"
    assert config["parallel"]
    assert plan_cpu(workload, config, 64).parallel_blocks >= 32
    assert plan_cpu(workload, {**config, "nest": "rows"}, 64).parallel_blocks == 1


@pytest.mark.parametrize("arch", ["x86-64-v2", "x86-64-v3", "x86-64-v4", "generic"])
def test_valid_configs_fit_the_registers_of_the_cpu(arch: str) -> None:
    width = {"x86-64-v3": 32, "x86-64-v4": 64}.get(arch, 16)
    device = Device("cpu", "some CPU", arch, 8, 50.0, {"float32": 500.0}, vector_bytes=width)
    assert register_count(device) == (16 if arch in ("x86-64-v2", "x86-64-v3") else 32)
    workload = KronMatmul(64, [(16, 16)] * 3)
    space = SCHEDULE.space(workload, device)
    assert space.invalid(SCHEDULE.default_config(workload, device)) is None
    assert space.invalid({**SCHEDULE.default_config(workload, device), "vectors": 8, "tq": 16}) is not None
    rng = random.Random(0)
    for _ in range(50):
        candidate = space.sample(rng)
        assert candidate is not None
        plan = plan_cpu(workload, candidate.config, width)
        assert max(accumulators(s, plan.lanes) for g in plan.groups for s in g.steps) <= register_count(device) - 2


def test_knob_values_without_effect_are_left_out() -> None:
    knobs = {k.name: k.values for k in SCHEDULE.space(KronMatmul(2, [(4, 4)]), CPU).knobs}
    assert knobs["nest"] == ("rows",)
    assert knobs["rows"] == (1, 2)
    assert knobs["merge"] == (1,)
    assert len(knobs["chunk"]) == len(knobs["ctile"]) == len(knobs["order"]) == 1
    large = {k.name: k.values for k in SCHEDULE.space(KronMatmul(256, [(32, 32)] * 3), CPU).knobs}
    assert large["parallel"] == ((True,) if CPU.units > 1 else (True, False))


def test_features_follow_the_plan() -> None:
    workload = KronMatmul(64, [(8, 8)] * 4)
    base = SCHEDULE.features(workload, _with(workload, rows=8, merge=1), CPU)
    assert base["flops"] == workload.flops
    assert base["extra_flops"] == 1.0
    assert base["chunk_kb"] == 8 * 16
    assert SCHEDULE.features(workload, _with(workload, rows=1, merge=1), CPU)["chunk_kb"] == 16
    assert SCHEDULE.features(workload, _with(workload, merge=64), CPU)["extra_flops"] == 4.0
    odd = SCHEDULE.features(KronMatmul(64, [(5, 5)] * 4), _with(workload), CPU)
    assert odd["lane_use"] < base["lane_use"]
