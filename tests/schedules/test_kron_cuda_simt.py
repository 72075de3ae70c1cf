"""The fused CUDA schedule beyond the contract battery: geometry, in-place exchange, padding, what ptxas makes of it."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from kronsched.errors import InvalidConfig
from kronsched.hardware import resolve_target
from kronsched.runtime.build import build_artefact
from kronsched.runtime.lower import lower
from kronsched.schedules.kron_cuda_simt import KronCudaSimt
from kronsched.schedules.kron_plan import plan_launches
from kronsched.workloads.kron import KronMatmul

H200 = resolve_target("nvidia/h200")
A100 = resolve_target("nvidia/a100")
SCHEDULE = KronCudaSimt()
BASE = {
    "fuse": 4, "tile": 4096, "ctile": 32, "regs": 64, "grouping": "tail", "order": "tail", "stage_in": "shared",
    "stage_out": "direct", "threads": 64, "vec": 4, "pad": 4, "factors_in": "shared", "unroll": 4096, "tq": 8, "tr": 1,
}  # fmt: skip
WHOLE_ROW = {**BASE, "fuse": 5, "tile": 32768, "threads": 512, "grouping": "ends", "order": "inner_last", "stage_in": "direct"}


def test_whole_row_of_8_to_the_5_is_one_launch_with_in_place_exchanges() -> None:
    lowered = lower(KronMatmul(1024, [(8, 8)] * 5), SCHEDULE, WHOLE_ROW, H200)
    (launch,) = lowered.launches
    assert launch.grid == (1024, 1, 1) and launch.block == (512, 1, 1)
    # One padded row of float32 is 136 KB; two would not fit: both exchanges share it.
    assert 8**5 * 4 < launch.shared_bytes < 145_000


@pytest.mark.parametrize("device", [H200, A100], ids=["sm_90a", "sm_80"])
def test_the_best_small_kernel_compiles_without_spills(device, tmp_path: Path) -> None:
    manifest = build_artefact(KronMatmul(1024, [(8, 8)] * 4), SCHEDULE, BASE, device, tmp_path / "a")
    assert manifest.spill_bytes == 0
    assert manifest.registers is not None and manifest.registers <= 168  # 64 elements and their contraction, no more
    assert manifest.shared_bytes == 17920  # one padded exchange buffer of 4096 float32 and two factors


def test_padding_that_would_misalign_vectors_is_pruned() -> None:
    space = SCHEDULE.space(KronMatmul(64, [(8, 8)] * 4), H200)
    assert space.invalid(BASE) is None
    reason = space.invalid({**BASE, "pad": 2})
    assert reason is not None and "misalign" in reason


def test_vector_accesses_in_shared_memory_are_aligned() -> None:
    """Every float4 address in the source is a multiple of 4 elements: the constants in it are, which pad=2 would break."""
    lowered = lower(KronMatmul(64, [(8, 8)] * 4), SCHEDULE, BASE, H200)
    assert "* 68)" in lowered.source
    with pytest.raises(InvalidConfig, match="misalign"):
        lower(KronMatmul(64, [(8, 8)] * 4), SCHEDULE, {**BASE, "pad": 2}, H200)


@pytest.mark.parametrize("m", [1, 3, 1023])
def test_ragged_rows_are_guarded_not_rejected(m: int) -> None:
    lowered = lower(KronMatmul(m, [(8, 8)] * 4), SCHEDULE, {**BASE, "tile": 16384, "threads": 256}, H200)
    assert lowered.launches[0].grid[0] == -(-m // min(4, m))


def test_estimated_shared_memory_is_near_what_tvm_allocates() -> None:
    rng = random.Random(0)
    for workload in (KronMatmul(1024, [(8, 8)] * 4), KronMatmul(37, [(5, 7), (16, 16), (3, 4)]), KronMatmul(9, [(64, 64)] * 2)):
        space = SCHEDULE.space(workload, H200)
        for _ in range(6):
            candidate = space.sample(rng)
            assert candidate is not None
            plans = plan_launches(workload, candidate.config, H200.shared_per_block)
            lowered = lower(workload, SCHEDULE, candidate.config, H200)
            for plan, launch in zip(plans, lowered.launches, strict=True):
                assert 0.55 * launch.shared_bytes - 1024 <= plan.shared_bytes <= 2.1 * launch.shared_bytes + 2048, candidate.key
                assert plan.threads == launch.block[0] and plan.grid[0] * plan.grid[1] == launch.grid[0]


def test_a_knob_without_effect_is_not_searched_twice() -> None:
    space = SCHEDULE.space(KronMatmul(64, [(8, 8)] * 4), H200)
    knobs = {k.name: k.values for k in space.knobs}
    assert knobs["tq"] == (8,) and knobs["tr"] == (1,)  # no axis is larger than regs
    one_launch = {**BASE, "ctile": 64}
    reason = space.invalid(one_launch)
    assert reason is not None and "ctile" in reason


def test_sources_of_a_sample_differ() -> None:
    """The space holds few kernels twice."""
    rng = random.Random(1)
    workload = KronMatmul(256, [(8, 8)] * 3)
    space = SCHEDULE.space(workload, H200)
    sample = {c.key: c for c in (space.sample(rng) for _ in range(30)) if c is not None}
    digests = {lower(workload, SCHEDULE, c.config, H200).sha256 for c in sample.values()}
    assert len(digests) >= 0.8 * len(sample)


def test_exchange_buffers_of_one_element_are_pruned() -> None:
    """TVM 0.27 loses them when it merges shared memory; what the space calls valid must lower."""
    workload = KronMatmul(1, [(1021, 1)], "float16")
    space, rng = SCHEDULE.space(workload, H200), random.Random(0)
    drawn = [space.sample(rng) for _ in range(25)]
    assert any(c is not None for c in drawn)
    for candidate in drawn:
        if candidate is not None:
            lower(workload, SCHEDULE, candidate.config, H200)
