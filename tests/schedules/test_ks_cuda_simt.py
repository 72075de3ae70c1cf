"""The SIMT CUDA schedule of KSMatmul: geometry, one launch a factor, the shipped adversarial list, guards in the emulator."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from kronsched.bench.suites import load_suite
from kronsched.dtypes import DTYPES
from kronsched.errors import InvalidConfig
from kronsched.hardware import PRESETS
from kronsched.measure.check import max_relative_error
from kronsched.runtime.build import build_artefact
from kronsched.runtime.lower import lower
from kronsched.schedules.ks_cuda_mma import KSCudaMmaLast
from kronsched.schedules.ks_cuda_simt import KSCudaSimt, plan_tiles
from kronsched.workloads.ks import KSMatmul
from tests.contract.schedule_battery import run_on_cpu
from tests.emulator import run_schedule

H200 = PRESETS["nvidia/h200"]
SCHEDULE = KSCudaSimt()
BASE = {"tn": 8, "tj": 8, "tl": 4, "rn": 4, "rj": 4, "bk": 16, "pad": 1, "unroll": 256}


@pytest.mark.parametrize("workload", load_suite("ks", "adversarial"), ids=lambda w: w.label)
def test_the_adversarial_list_is_right(workload: KSMatmul) -> None:
    w = dataclasses.replace(workload, batch=max(1, min(workload.batch, 20_000_000 // (workload.flops // workload.batch), 70)))
    inputs = w.make_inputs(0)
    output = run_on_cpu(SCHEDULE.apply(w, SCHEDULE.default_config(w, H200), H200), w, inputs)
    error = max_relative_error(output, w.reference(*inputs))
    assert error <= DTYPES[w.dtype].tolerance / (2 if len(w.patterns) > 1 else 4)  # a chain is rounded between its factors


@pytest.mark.parametrize("layout", ["batch_first", "batch_last"])
@pytest.mark.parametrize("batch", [1, 2, 7])
def test_no_access_is_out_of_bounds(layout: str, batch: int) -> None:
    assert run_schedule(SCHEDULE, KSMatmul(batch, (2, 11, 9, 3), "float16", layout), BASE, H200, order="random") < 2e-3


def test_grid_and_block_of_a_known_shape() -> None:
    workload = KSMatmul(25088, (4, 64, 64, 4), "float16")
    (plan,) = plan_tiles(workload, BASE, H200)
    assert plan.tile == (32, 32, 4) and plan.blocks == 784 * 4 * 2 and plan.threads == 256
    (launch,) = lower(workload, SCHEDULE, BASE, H200).launches
    assert launch.grid == (plan.blocks, 1, 1) and launch.block == (4, 8, 8)
    assert plan.shared_bytes <= launch.shared_bytes <= plan.shared_bytes + 64
    last = lower(dataclasses.replace(workload, layout="batch_last"), SCHEDULE, {**BASE, "tn": 32, "tl": 1}, H200).launches[0]
    assert last.block == (32, 1, 8), "lanes run along the samples in batch_last"


def test_a_chain_is_one_launch_a_factor_in_one_source(tmp_path: Path) -> None:
    workload = KSMatmul(100, [(4, 2, 2, 1), (2, 2, 2, 2), (1, 2, 2, 4)], "bfloat16")
    manifest = build_artefact(workload, SCHEDULE, SCHEDULE.default_config(workload, H200), H200, tmp_path / "a")
    assert [set(launch.args) for launch in manifest.launches] == [{"x", "w0", "t0"}, {"t0", "w1", "t1"}, {"t1", "w2", "y"}]
    assert manifest.spill_bytes == 0


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"tn": 64, "tj": 32}, "8192 threads a block"),
        ({"tn": 64, "rn": 8, "bk": 32, "rj": 8, "tj": 4}, "bytes of shared memory"),
        ({"rn": 16, "rj": 8}, "128 sums a thread"),
    ],
)
def test_limits_are_named(change: dict[str, int], reason: str) -> None:
    with pytest.raises(InvalidConfig, match=reason):
        plan_tiles(KSMatmul(25088, (4, 64, 64, 4)), {**BASE, **change}, H200)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_tiles_of_a_few_bytes_lower(dtype: str) -> None:
    """TVM 0.27 loses shared buffers of 4 bytes or less when it merges them."""
    for pattern in ((1, 1, 1, 1), (4, 1, 2, 1), (1, 16, 1, 4)):
        for layout in ("batch_first", "batch_last"):
            workload = KSMatmul(1, pattern, dtype, layout)
            lower(workload, SCHEDULE, SCHEDULE.default_config(workload, H200), H200)


def test_few_samples_and_many_steps_of_k_go_to_tensor_cores() -> None:
    w, tensor = KSMatmul(512, (1, 80, 144, 1), "float32", "batch_last"), KSCudaMmaLast()
    simt = SCHEDULE.expected_us(w, SCHEDULE.default_config(w, H200), H200)
    assert simt is not None and simt > tensor.expected_us(w, tensor.default_config(w, H200), H200)
    unknown = dataclasses.replace(H200, bandwidth_gbs=0.0)
    assert SCHEDULE.expected_us(w, SCHEDULE.default_config(w, unknown), unknown) is None
