"""The weight gradient's schedules: where partial sums lie, ragged batches, what ptxas makes of them, a GPU's answer."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import pytest

from kronsched import registry
from kronsched.hardware import PRESETS
from kronsched.runtime.build import build_artefact
from kronsched.schedules.ks_wgrad_plan import plan_wgrad
from kronsched.schedules.ks_wgrad_simt import plan_simt
from kronsched.workloads.ks_wgrad import KSWeightGrad
from tests.emulator import build, run_schedule

H200, A100 = PRESETS["nvidia/h200"], PRESETS["nvidia/a100"]
SMALL = dataclasses.replace(H200, units=5)
"""So few SMs that a slice has several chunks of samples."""
MMA: dict[str, Any] = {
    "vector": 4, "warps_j": 1, "warps_k": 2, "warps_l": 1, "mj": 1, "nk": 2, "lunits": 0, "steps": 1, "stages": 2,
    "min_blocks": 1, "waves": 1,
}  # fmt: skip
VIT = ((6, 64, 256, 1), (1, 128, 128, 3), (1, 768, 192, 2), (2, 48, 192, 1))
emulated = pytest.mark.skipif(build.available() is not None, reason="no emulator here")


@pytest.mark.parametrize(
    ("pattern", "layout", "change"),
    [
        ((2, 17, 20, 2), "batch_first", {"vector": 8, "mj": 2, "nk": 4}),
        ((1, 5, 9, 24), "batch_first", {"lunits": 2, "warps_l": 2}),
        ((2, 20, 9, 3), "batch_last", {"vector": 16}),
    ],
)
def test_every_weight_has_one_place_among_the_partial_sums(pattern: Any, layout: str, change: dict[str, Any]) -> None:
    w = KSWeightGrad(64, pattern, "float16", layout)
    simt = registry.schedule("ks_wgrad_simt").default_config(w, H200)
    for plan in (plan_wgrad(w, {**MMA, **change}, H200), plan_simt(w, simt, H200)):
        places = [plan.place(e) for e in range(plan.elements)]
        inside = [p for p in places if all(at < extent for at, extent in zip(p, pattern, strict=True))]
        assert sorted(inside) == list(itertools.product(*map(range, pattern)))


@emulated
@pytest.mark.parametrize(
    ("pattern", "batch", "dtype", "layout", "change", "bound"),
    [
        ((1, 18, 10, 3), 70, "float16", "batch_first", {"warps_k": 1}, 1e-3),
        ((2, 17, 20, 2), 7, "float32", "batch_first", {"vector": 8}, 1e-6),
        pytest.param((1, 18, 17, 24), 70, "bfloat16", "batch_first", {"lunits": 1, "warps_l": 2}, 8e-3, marks=pytest.mark.slow),
        ((2, 20, 9, 2), 70, "float16", "batch_last", {"vector": 16, "stages": 3}, 1e-3),
        pytest.param((1, 20, 18, 3), 300, "float32", "batch_last", {"vector": 16}, 1e-6, marks=pytest.mark.slow),
        pytest.param(
            (2, 40, 70, 1), 300, "float32", "batch_first", {"vector": 16, "mj": 2, "nk": 4}, 1e-6, marks=pytest.mark.slow
        ),
        pytest.param((1, 5, 3, 20), 1, "float32", "batch_first", {"lunits": 1}, 1e-6, marks=pytest.mark.slow),
    ],
)
def test_tensor_cores_with_ragged_edges(
    pattern: Any, batch: int, dtype: str, layout: str, change: dict[str, Any], bound: float
) -> None:
    w = KSWeightGrad(batch, pattern, dtype, layout)
    assert run_schedule(registry.schedule("ks_wgrad_mma"), w, {**MMA, **change}, SMALL, order="random") < bound


@emulated
@pytest.mark.parametrize(
    ("pattern", "batch", "dtype", "layout", "bound"),
    [
        ((1, 17, 5, 3), 70, "float16", "batch_last", 1e-3),
        ((2, 10, 6, 1), 7, "float64", "batch_first", 1e-14),
        pytest.param((1, 3, 5, 77), 1, "bfloat16", "batch_first", 8e-3, marks=pytest.mark.slow),
    ],
)
def test_cuda_cores_with_ragged_edges(pattern: Any, batch: int, dtype: str, layout: str, bound: float) -> None:
    schedule, w = registry.schedule("ks_wgrad_simt"), KSWeightGrad(batch, pattern, dtype, layout)
    assert run_schedule(schedule, w, schedule.default_config(w, SMALL), SMALL, order="reverse") < bound


def test_what_tensor_cores_leave_to_cuda_cores_is_said() -> None:
    schedule = registry.schedule("ks_wgrad_mma")
    for w, reason in (
        (KSWeightGrad(8, (1, 4, 4, 1), "float64"), "float64"),
        (KSWeightGrad(8, (1, 5, 4, 1), "float16"), "runs of 5"),
        (KSWeightGrad(7, (1, 4, 4, 1), "float16", "batch_last"), "runs of 7"),
        (KSWeightGrad(8, (1, 4, 4, 17), "bfloat16"), "odd"),
    ):
        assert reason in str(schedule.supports(w, H200))
        assert [s.name for s in registry.schedules_for(w, H200)] == ["ks_wgrad_simt"]


@pytest.mark.parametrize(
    ("pattern", "dtype", "layout", "device"),
    [
        pytest.param(
            p,
            dtype,
            layout,
            device,
            marks=() if (p, dtype, layout, device) == (VIT[2], "float32", "batch_first", H200) else pytest.mark.slow,
        )
        for p in VIT
        for dtype in ("float16", "float32")
        for layout in ("batch_first", "batch_last")
        for device in (A100, H200)
    ],
)
def test_no_register_is_spilled(pattern: Any, dtype: str, layout: str, device: Any, tmp_path: Path) -> None:
    schedule, w = registry.schedule("ks_wgrad_mma"), KSWeightGrad(25088, pattern, dtype, layout)
    config = schedule.default_config(w, device)
    made = build_artefact(w, schedule, config, device, tmp_path / "artefact")
    assert made.spill_bytes == 0
    assert made.registers is not None
    assert made.registers <= 255


@pytest.mark.cuda
@pytest.mark.parametrize("name", ["ks_wgrad_mma", "ks_wgrad_simt"])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("layout", ["batch_first", "batch_last"])
def test_on_a_gpu_right_and_the_same_each_time(name: str, dtype: str, layout: str, tmp_path: Path) -> None:
    import torch

    from kronsched.dtypes import DTYPES
    from kronsched.hardware import resolve_target
    from kronsched.measure.check import max_relative_error
    from kronsched.runtime.module import TunedModule

    device, w = resolve_target("cuda"), KSWeightGrad(3000, (2, 48, 40, 3), dtype, layout)
    schedule = registry.schedule(name)
    build_artefact(w, schedule, schedule.default_config(w, device), device, tmp_path / "artefact")
    module = TunedModule.from_artefact(tmp_path / "artefact")
    inputs = w.make_inputs(0, "cuda")
    first = module(*inputs)
    assert max_relative_error(first, w.reference(*inputs)) < DTYPES[dtype].tolerance
    assert all(torch.equal(first, module(*inputs)) for _ in range(5))
