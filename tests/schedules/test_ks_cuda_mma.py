"""The tensor-core schedules of KSMatmul: index maps, rings over several tiles, edges, accuracy, what ptxas makes of them."""

from __future__ import annotations

import dataclasses
import random
import re
from pathlib import Path
from typing import Any

import pytest

from kronsched.bench.suites import load_suite
from kronsched.errors import CompileError, InvalidConfig
from kronsched.hardware import PRESETS
from kronsched.runtime.build import build_artefact, lower_source
from kronsched.runtime.nvrtc import compile_cuda, lost_products
from kronsched.schedules import ks_last_plan, ks_mma_maps
from kronsched.schedules.ks_cuda_mma import KSCudaMma, KSCudaMmaLast, KSTensorCore
from kronsched.schedules.ks_last_plan import plan_last
from kronsched.schedules.ks_mma_plan import plan_mma
from kronsched.workloads.ks import KSMatmul
from tests.emulator import run_schedule

H200, A100 = PRESETS["nvidia/h200"], PRESETS["nvidia/a100"]
TINY = dataclasses.replace(H200, units=2)
"""So few SMs that a block works through several tiles."""
FIRST: dict[str, Any] = {
    "mt": 1, "warps_m": 2, "warps_j": 2, "warps_l": 1, "pairs": 1, "lunits": 1, "ksteps": 1, "stages": 3, "groups": 1,
    "weights": "resident", "store": "direct", "min_blocks": 1, "waves": 1, "mma": "sync",
}  # fmt: skip
LAST: dict[str, Any] = {
    "mj": 1, "units": 1, "warps_j": 2, "warps_n": 2, "ksteps": 1, "stages": 3, "weights": "resident", "min_blocks": 1, "waves": 1,
    "mma": "sync", "vector": 16,
}  # fmt: skip


def error_of(w: KSMatmul, change: dict[str, Any], device: Any = TINY, order: str = "random") -> float:
    schedule: KSTensorCore = KSCudaMma() if w.batch_first else KSCudaMmaLast()
    config = {**(FIRST if w.batch_first else LAST), **change}
    return float(run_schedule(schedule, w, config, device, order=order))


# -- index maps -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("pattern", [(2, 17, 20, 1), (1, 40, 33, 3), (2, 20, 9, 20)])
@pytest.mark.parametrize("mma", ["sync", "wgmma"])
def test_every_weight_has_one_place_in_the_packed_order(mma: str, dtype: str, pattern: tuple[int, int, int, int]) -> None:
    w = KSMatmul(500, pattern, dtype)
    first = plan_mma(w, pattern, {**FIRST, "lunits": 2, "warps_m": 4, "mma": mma}, H200)
    last = plan_last(dataclasses.replace(w, layout="batch_last"), pattern, {**LAST, "warps_n": 4, "mma": mma}, H200)
    for plan, module in ((first, ks_mma_maps), (last, ks_last_plan)):
        low = [plan.parts > 1 and module.low_weight(plan, index) for index in range(plan.weight_elements)]
        places = [module.weight_at(plan, index) for index in range(plan.weight_elements) if not low[index]]
        assert sum(low) == (plan.parts - 1) * len(places)
        assert len(set(places)) == len(places), "two places for one weight"
        a, b, c, d = pattern
        inside = [p for p in places if p[0] < a and p[1] < b and p[2] < c and p[3] < d]
        assert len(inside) == a * b * c * d


@pytest.mark.parametrize("mma", ["sync", "wgmma"])
def test_sixteen_aligned_weights_of_the_packed_order_always_lie_alike(mma: str) -> None:
    pattern = (2, 40, 33, 3)
    plan = plan_last(KSMatmul(500, pattern, "float16", "batch_last"), pattern, {**LAST, "warps_n": 4, "mma": mma}, H200)
    packing = KSCudaMmaLast().packing(plan)
    assert packing.in_runs(2, 3, 1 << 18) and not packing.in_runs(4, 3, 1 << 18)
    assert not packing.in_runs(2, 3, plan.weight_elements) and not packing.in_runs(2, 1, 1 << 18)
    assert packing.slice * 2 * 3 == plan.weight_elements
    for index in range(plan.weight_elements):
        run, element = divmod(index, 16)
        l_and_i, inside = divmod(run * 16, packing.slice)
        _, j, k, _ = packing.at(inside)
        _, more_j, more_k, _ = packing.at(element)
        assert packing.at(index) == (l_and_i // 3, j + more_j, k + more_k, l_and_i % 3)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("d", [1, 2, 3, 4, 5, 6, 7, 8, 16, 64])
def test_loads_of_a_warp_meet_no_bank_conflict(dtype: str, d: int) -> None:
    w = KSMatmul(100, (1, 32, 64, d), dtype)
    for lunits in (1, 2, 4):
        config = {**FIRST, "lunits": lunits}
        try:
            p = plan_mma(w, w.patterns[0], config, H200)
        except InvalidConfig:
            continue
        width, together = p.load_words, 32 // p.load_words
        places: list[list[int]] = [[] for _ in range(32 // together)]
        for lane in range(32):
            g, t = lane // 4, lane % 4
            k, byte = (0, t * p.own * d * p.item) if p.small else (t, 0)
            places[lane // together].append(ks_mma_maps.x_word(p, g, k, byte))
        for phase in places:
            banks = [(word + z) % 32 for word in phase for z in range(width)]
            assert len(set(banks)) == len(banks), f"lunits={lunits}"


@pytest.mark.parametrize("vector", [8, 16])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_loads_of_wgmma_samples_meet_no_bank_conflict(dtype: str, vector: int) -> None:
    w = KSMatmul(25088, (1, 32, 64, 2), dtype, "batch_last")
    p = plan_last(w, w.patterns[0], {**LAST, "mma": "wgmma", "warps_n": 4, "warps_j": 1, "vector": vector}, H200)
    width = vector // 4
    words = [lane % 4 * p.pitch // 4 + lane // 4 * width for lane in range(32)]
    for phase in range(0, 32, 32 // width):
        banks = [(word + z) % 32 for word in words[phase : phase + 32 // width] for z in range(width)]
        assert len(set(banks)) == 32


def test_a_stage_has_room_for_every_byte_once() -> None:
    w = KSMatmul(100, (1, 32, 64, 32), "float16")
    p = plan_mma(w, w.patterns[0], {**FIRST, "lunits": 2, "warps_l": 2, "warps_j": 1, "weights": "stream"}, H200)
    assert p.swizzled
    words = {
        ks_mma_maps.x_word(p, row, k, byte) for row in range(p.rows) for k in range(p.ks) for byte in range(0, p.lb * p.item, 4)
    }
    assert len(words) == p.rows * p.row_bytes // 4 and max(words) < p.rows * p.pitch // 4


def test_stores_of_a_batch_last_lane_group_are_neighbours() -> None:
    for r in range(2):
        chunks = sorted(ks_last_plan.chunk_of(2 * t + r) for t in range(4))
        assert chunks == list(range(4 * r, 4 * r + 4))


# -- results ----------------------------------------------------------------------------------------------

BOUNDS = {"float16": 1e-3, "bfloat16": 8e-3, "float32": 2e-6}
WARPGROUP = {"mma": "wgmma", "warps_m": 4, "warps_n": 4, "warps_j": 1}


@pytest.mark.parametrize(
    ("pattern", "dtype", "change"),
    [
        ((2, 40, 48, 2), "float16", {"store": "staged", "groups": 2}),
        ((2, 40, 48, 2), "float32", {"store": "quad", "groups": 2, "weights": "gather"}),
        pytest.param((1, 20, 36, 4), "float32", {"ksteps": 2, "stages": 2}, marks=pytest.mark.slow),
        pytest.param((1, 40, 34, 32), "float32", {"store": "pair", "lunits": 2, "warps_l": 1}, marks=pytest.mark.slow),
        pytest.param((1, 18, 17, 24), "float16", {"store": "staged", "warps_l": 2, "weights": "stream"}, marks=pytest.mark.slow),
        ((1, 18, 17, 24), "float32", {"store": "staged", "warps_l": 2, "weights": "gather"}),
        ((2, 10, 22, 1), "bfloat16", {"weights": "stream", "mt": 2, "pairs": 4, "warps_m": 4}),
        pytest.param((1, 12, 10, 6), "float16", {"warps_m": 4, "weights": "gather"}, marks=pytest.mark.slow),
    ],
)
def test_batch_first_with_ragged_edges_over_several_tiles(pattern: Any, dtype: str, change: dict[str, Any]) -> None:
    assert error_of(KSMatmul(203, pattern, dtype), change) < BOUNDS[dtype]


@pytest.mark.parametrize(
    ("pattern", "dtype", "change"),
    [
        ((1, 36, 20, 4), "float16", {"pairs": 3, "store": "quad"}),
        ((1, 36, 20, 4), "float32", {"pairs": 3, "weights": "gather"}),
        ((2, 20, 40, 1), "float32", {"weights": "stream", "mt": 2, "ksteps": 2}),
        pytest.param((2, 20, 90, 1), "bfloat16", {"weights": "stream", "mt": 2, "stages": 2}, marks=pytest.mark.slow),
        pytest.param((1, 17, 33, 16), "float16", {"warps_j": 2, "lunits": 2, "store": "pair"}, marks=pytest.mark.slow),
    ],
)
def test_batch_first_by_wgmma(pattern: Any, dtype: str, change: dict[str, Any]) -> None:
    assert error_of(KSMatmul(300, pattern, dtype), {**WARPGROUP, **change}) < BOUNDS[dtype]


@pytest.mark.parametrize(
    ("pattern", "dtype", "change"),
    [
        ((2, 40, 24, 3), "float16", {"mj": 2, "weights": "gather"}),
        ((2, 40, 24, 3), "float32", {"mj": 2}),
        ((1, 33, 50, 2), "float32", {"weights": "stream", "ksteps": 2, "stages": 2}),
        ((1, 3, 1, 5), "bfloat16", {"units": 2, "waves": 4, "warps_n": 4}),
    ],
)
def test_batch_last_with_ragged_edges_over_several_tiles(pattern: Any, dtype: str, change: dict[str, Any]) -> None:
    assert error_of(KSMatmul(594, pattern, dtype, "batch_last"), change) < BOUNDS[dtype]


def test_many_weights_are_packed_in_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kronsched.schedules.ks_pack._MANY", 0)
    for mma in ("sync", "wgmma"):
        change = {"mma": mma, "warps_j": 1, "warps_n": 4, "mj": 2}
        assert error_of(KSMatmul(296, (2, 40, 35, 3), "float16", "batch_last"), change) < BOUNDS["float16"]


def test_blocks_with_long_sums_work_side_by_side_in_memory() -> None:
    w = KSMatmul(1096, (1, 16, 100, 3), "float16", "batch_last")
    change = {"mma": "wgmma", "warps_j": 1, "warps_n": 4, "ksteps": 4, "min_blocks": 2, "waves": 2, "vector": 8}
    plan = plan_last(w, w.patterns[0], {**LAST, **change}, TINY)
    assert plan.in_rows and 1 < plan.grid_tiles < plan.tiles
    assert error_of(w, change) < BOUNDS["float16"]


@pytest.mark.parametrize(
    ("pattern", "dtype", "change"),
    [
        ((1, 33, 50, 2), "float16", {"vector": 8, "mj": 3, "weights": "gather"}),
        ((1, 33, 50, 2), "float32", {"vector": 8, "mj": 3, "weights": "gather"}),
        pytest.param((2, 40, 90, 3), "bfloat16", {"warps_j": 2, "weights": "stream"}, marks=pytest.mark.slow),
        ((2, 40, 90, 3), "float32", {"warps_j": 2, "weights": "stream"}),
        pytest.param((1, 16, 200, 1), "float16", {"units": 2, "ksteps": 2, "stages": 2}, marks=pytest.mark.slow),
    ],
)
def test_batch_last_by_wgmma(pattern: Any, dtype: str, change: dict[str, Any]) -> None:
    assert error_of(KSMatmul(594, pattern, dtype, "batch_last"), {**WARPGROUP, **change}) < BOUNDS[dtype]


@pytest.mark.parametrize(
    ("layout", "weights"),
    [
        ("batch_first", "resident"),
        pytest.param("batch_last", "stream", marks=pytest.mark.slow),
        pytest.param("batch_first", "gather", marks=pytest.mark.slow),
    ],
)
def test_factors_of_a_chain_overlap(layout: str, weights: str) -> None:
    w = KSMatmul(64, ((3, 16, 32, 1), (1, 24, 24, 2)), "float16", layout)
    schedule: KSTensorCore = KSCudaMma() if w.batch_first else KSCudaMmaLast()
    config = {**(FIRST if w.batch_first else LAST), "weights": weights}
    launches = schedule.apply(w, config, H200).launches
    packs = [] if weights == "gather" else ["ks_pack_0", "ks_pack_1"]
    assert [launch.func for launch in launches] == [*packs, "ks_0", "ks_1"]
    assert all(launch.overlap for launch in launches)
    assert not any(launch.overlap for launch in schedule.apply(w, config, A100).launches)
    assert error_of(w, {"weights": weights}, H200) < 3e-3


@pytest.mark.parametrize("batch", [pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow), 7])
def test_small_batches_are_guarded(batch: int) -> None:
    for dtype, layout in (("float16", "batch_first"), ("float32", "batch_first"), ("float32", "batch_last")):
        assert error_of(KSMatmul(batch, (2, 24, 16, 4), dtype, layout), {}, H200, "reverse") < 1e-3


@pytest.mark.parametrize(("mma", "ksteps"), [("sync", 2), ("sync", 8), ("wgmma", 2)])
@pytest.mark.parametrize("layout", ["batch_first", "batch_last"])
def test_long_float32_sums_are_taken_in_parts(layout: str, mma: str, ksteps: int) -> None:
    w = KSMatmul(100, (1, 16, 600, 1), "float32", layout)
    change = {**WARPGROUP, "ksteps": ksteps, "mma": mma}
    config = {**(FIRST if w.batch_first else LAST), **change}
    plan = plan_mma(w, w.patterns[0], config, H200) if w.batch_first else plan_last(w, w.patterns[0], config, H200)
    assert plan.two_sums and plan.fresh == (mma == "wgmma")
    if mma == "sync":  # a chunk of 64 steps has two parts
        schedule: KSTensorCore = KSCudaMma() if w.batch_first else KSCudaMmaLast()
        source, _ = lower_source(w, schedule, config, H200)
        assert source.count("tot_ptr[0] = (tot_ptr[0] + acc_ptr[0])") == (2 if ksteps == 8 else 1)
    assert error_of(w, change) < 1e-6


@pytest.mark.parametrize("c", [32, 33, 48, 49])
def test_how_long_a_float32_sum_stays_whole(c: int) -> None:
    """48 steps in batch_first, 32 in batch_last, where the error of a longer one is over 2e-6."""
    first, last = (KSMatmul(100, (1, 16, c, 1), "float32", layout) for layout in ("batch_first", "batch_last"))
    assert plan_mma(first, first.patterns[0], FIRST, H200).two_sums == (c > 48)
    assert plan_last(last, last.patterns[0], LAST, H200).two_sums == (c > 32)


def test_small_batches_choose_other_tiles_than_large_ones() -> None:
    chosen = [KSCudaMma().default_config(KSMatmul(batch, (4, 64, 64, 4), "float16"), H200) for batch in (16, 25088)]
    assert chosen[0] != chosen[1]


@pytest.mark.parametrize("layout", ["batch_first", "batch_last"])
def test_more_work_is_predicted_to_take_longer(layout: str) -> None:
    schedule: KSTensorCore = KSCudaMma() if layout == "batch_first" else KSCudaMmaLast()
    times = []
    for pattern in [(1, 64, 64, 4), (4, 64, 64, 4), (4, 256, 256, 4), (1, 1024, 1024, 4)]:
        w = KSMatmul(25088, pattern, "float32", layout)
        times.append(schedule.features(w, schedule.default_config(w, H200), H200)["predicted_us"])
    assert times == sorted(times)


# -- what is served, limits, binaries -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("workload", "reason"),
    [
        (KSMatmul(8, (1, 8, 8, 1), "float64"), "float64"),
        (KSMatmul(8, (1, 8, 8, 1), layout="batch_last"), "layout batch_last"),
        (KSMatmul(8, (1, 5, 8, 1), "float16"), "runs of 5 float16"),
        (KSMatmul(8, (1, 4, 4, 9), "float16"), "runs of 9 float16"),
    ],
)
def test_what_is_not_served_is_said(workload: KSMatmul, reason: str) -> None:
    said = KSCudaMma().supports(workload, H200)
    assert said is not None and reason in said
    old = dataclasses.replace(A100, arch="sm_75")
    assert "sm_80" in str(KSCudaMma().supports(KSMatmul(8, (1, 8, 8, 1)), old))
    assert "runs of 7" in str(KSCudaMmaLast().supports(KSMatmul(7, (1, 8, 8, 1), "float16", "batch_last"), H200))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"warps_m": 8, "warps_j": 4, "min_blocks": 4}, "threads a block"),
        ({"mt": 2, "pairs": 4, "lunits": 2}, "registers"),
        ({"ksteps": 8, "stages": 4, "warps_m": 8, "warps_j": 1}, "shared memory"),
        ({"groups": 2, "weights": "stream"}, "groups=1"),
        ({"lunits": 4, "warps_l": 2}, "64 bytes"),
        ({"warps_m": 1, "warps_j": 1}, "too few"),
        ({"mma": "wgmma"}, "whole warpgroups"),
    ],
)
def test_limits_are_named(change: dict[str, Any], reason: str) -> None:
    w = KSMatmul(25088, (4, 96, 96, 64), "float16")
    with pytest.raises(InvalidConfig, match=reason):
        plan_mma(w, w.patterns[0], {**FIRST, **change}, H200)


@pytest.mark.parametrize("layout", ["batch_first", "batch_last"])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_every_pattern_of_the_grid_has_a_default(layout: str, dtype: str) -> None:
    schedule: KSTensorCore = KSCudaMma() if layout == "batch_first" else KSCudaMmaLast()
    for w in random.Random(0).sample(load_suite("ks", "grid", dtype), 6):
        assert isinstance(w, KSMatmul)
        w = dataclasses.replace(w, layout=layout)
        config = schedule.default_config(w, H200)
        assert schedule.space(w, H200).invalid(config) is None
        features = schedule.features(w, config, H200)
        assert features["predicted_us"] >= features["roofline_us"] > 0


LOST: list[tuple[KSMatmul, dict[str, Any]]] = [
    (KSMatmul(25088, (1, 64, 64, 3), "float32"), {"warps_m": 4, "warps_j": 1, "ksteps": 8, "stages": 2, "mma": "wgmma"}),
    (
        KSMatmul(25088, (1, 128, 96, 4), "float32", "batch_last"),
        {"mj": 2, "warps_j": 4, "warps_n": 4, "ksteps": 4, "stages": 5, "mma": "wgmma"},
    ),
]
"""Kernels that lost products where their sums began with a constant."""
LOSING = ("nvrtc 13.0", "nvrtc 13.5")


@pytest.mark.parametrize(("w", "change"), LOST, ids=lambda value: value.label if isinstance(value, KSMatmul) else "")
def test_the_compiler_keeps_all_products(w: KSMatmul, change: dict[str, Any]) -> None:
    schedule: KSTensorCore = KSCudaMma() if w.batch_first else KSCudaMmaLast()
    source, _ = lower_source(w, schedule, {**(FIRST if w.batch_first else LAST), **change}, H200)
    cubin = compile_cuda(source, "sm_90a")
    assert lost_products(cubin.image) == 0
    constant, found = re.subn(r"(tot_ptr\[\d+\]) = \(\(float\)[^;]*\^ 1\)[^;]*>> 30\)\);", r"\1 = 0.0f;", source)
    assert found > 1
    if cubin.compiler in LOSING:
        with pytest.raises(CompileError, match=r"left out \d+ groups of wgmma"):
            compile_cuda(constant, "sm_90a")


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("layout", [pytest.param("batch_first", marks=pytest.mark.slow), "batch_last"])
def test_defaults_of_large_shapes_compile_without_spills(dtype: str, layout: str, tmp_path: Path) -> None:
    schedule: KSTensorCore = KSCudaMma() if layout == "batch_first" else KSCudaMmaLast()
    for n, pattern in enumerate([(4, 64, 64, 4), (1, 768, 192, 2)]):
        w = KSMatmul(25088, pattern, dtype, layout)
        manifest = build_artefact(w, schedule, schedule.default_config(w, H200), H200, tmp_path / str(n))
        assert manifest.spill_bytes == 0
        assert [len(launch.args) for launch in manifest.launches] in ([2, 3], [3])


@pytest.mark.cuda
@pytest.mark.parametrize(
    ("w", "change"),
    [
        *LOST,
        (KSMatmul(3000, (1, 128, 128, 3), "float32"), {"warps_m": 4, "warps_j": 1, "ksteps": 4, "mma": "wgmma"}),
        (
            KSMatmul(3000, (2, 96, 96, 4), "float32", "batch_last"),
            {"mj": 6, "warps_j": 1, "warps_n": 8, "ksteps": 4, "mma": "wgmma"},
        ),
        (
            KSMatmul(3000, (6, 48, 48, 4), "float32", "batch_last"),
            {"mj": 3, "warps_j": 1, "warps_n": 4, "ksteps": 3, "mma": "wgmma"},
        ),
        (KSMatmul(3000, (1, 64, 640, 1), "float32"), {"ksteps": 8}),
        (KSMatmul(3000, (1, 64, 640, 1), "float32", "batch_last"), {"ksteps": 8}),
    ],
    ids=lambda value: value.label if isinstance(value, KSMatmul) else "",
)
def test_on_a_gpu_float32_sums_are_right(w: KSMatmul, change: dict[str, Any], tmp_path: Path) -> None:
    from kronsched.hardware import resolve_target
    from kronsched.measure.check import max_relative_error
    from kronsched.runtime.module import TunedModule

    schedule: KSTensorCore = KSCudaMma() if w.batch_first else KSCudaMmaLast()
    build_artefact(w, schedule, {**(FIRST if w.batch_first else LAST), **change}, resolve_target("cuda"), tmp_path / "built")
    inputs = w.make_inputs(0, "cuda")
    assert max_relative_error(TunedModule.from_artefact(tmp_path / "built")(*inputs), w.reference(*inputs)) < 2e-6
