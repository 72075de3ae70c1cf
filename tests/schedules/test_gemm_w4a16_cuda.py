"""The W4A16 tensor-core schedule beyond the contract battery: launches, pruning, resources, the kernel in the emulator."""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kronsched.errors import InvalidConfig
from kronsched.hardware import resolve_target
from kronsched.measure.check import max_relative_error
from kronsched.runtime.build import build_artefact
from kronsched.runtime.lower import Lowered, lower
from kronsched.schedules.gemm_w4a16_cuda import GemmW4A16Cuda
from kronsched.schedules.w4a16_indices import Indices
from kronsched.schedules.w4a16_plan import plan_w4
from kronsched.workloads.gemm import Gemm
from tests.emulator import run_lowered, run_schedule

H200 = resolve_target("nvidia/h200")
A100 = resolve_target("nvidia/a100")
SCHEDULE = GemmW4A16Cuda()
BASE: dict[str, Any] = {
    "strips": 2, "warps_n": 1, "warps_k": 2, "mtile": 1, "stages": 0, "split_k": 1, "x_load": "late", "batch": 1, "unroll": 1,
    "reduction": "flat", "zeros": "fold",
}  # fmt: skip
BOUND = {"float16": 6e-4, "bfloat16": 4e-3}


def run(w: Gemm, config: dict[str, Any], inputs: list[torch.Tensor], order: str = "forward") -> torch.Tensor:
    """The kernel's result in the emulator, from an output full of NaN."""
    tensors = {
        s.name: t.contiguous().view(torch.int16 if t.element_size() == 2 else t.dtype)
        for s, t in zip(w.inputs, inputs, strict=True)
    }
    arrays = {name: np.array(t.numpy()) for name, t in tensors.items()}
    arrays["y"] = np.full(w.output.shape, -1, dtype=np.int16)
    run_lowered(lower(w, SCHEDULE, config, H200), arrays, order=order)
    return torch.from_numpy(arrays["y"]).view(getattr(torch, w.a_dtype))


@functools.cache
def _lowered(w: Gemm, knobs: str) -> Lowered:
    return lower(w, SCHEDULE, {**BASE, **json.loads(knobs)}, H200)


def lowered_of(w: Gemm, **knobs: Any) -> Lowered:
    """BASE with other knobs, lowered for an H200 once for all tests."""
    return _lowered(w, json.dumps(knobs))


# -- launches and limits --------------------------------------------------------------------------------


def test_one_launch_unless_x_is_gathered_or_k_is_split() -> None:
    def symbols(w: Gemm, **knobs: Any) -> list[str]:
        return [x.symbol.removesuffix("_kernel") for x in lowered_of(w, **knobs).launches]

    assert symbols(Gemm(3, 64, 1024)) == ["w4a16"]
    assert symbols(Gemm(3, 64, 1024), split_k=2) == ["w4a16", "w4a16_sum"]
    assert symbols(Gemm(3, 64, 1024, act_order=True)) == ["w4a16_gather", "w4a16"]
    assert symbols(Gemm(3, 64, 1020), split_k=2) == ["w4a16_gather", "w4a16", "w4a16_sum"]
    assert symbols(Gemm(3, 64, 1016)) == ["w4a16"]  # rows of x start on 16 bytes


def test_launches_overlap_where_the_gpu_can() -> None:
    w = Gemm(3, 64, 1024)
    for knobs, order in (({}, "early"), ({"split_k": 2}, "wait")):
        assert plan_w4(w, {**BASE, **knobs}, H200).start == order
        lowered = lowered_of(w, **knobs)
        assert all(x.overlap for x in lowered.launches)
    old = lower(w, SCHEDULE, BASE, A100)
    assert not old.launches[0].overlap and "griddepcontrol" not in old.source


def test_x_is_read_after_the_wait_and_weights_before_it() -> None:
    source = lowered_of(Gemm(3, 64, 1024)).source
    body = source[source.index("__launch_bounds__") :]
    waits = body.index("griddepcontrol_wait()")
    assert 0 < body.index("(w_ptr[") < waits < body.index("(x_ptr[")
    gathers = lowered_of(Gemm(3, 64, 1024, act_order=True)).source.split("__launch_bounds__")[1:]
    first = next(k for k in gathers if "(perm_ptr[" in k)
    assert 0 < first.index("(perm_ptr[") < first.index("griddepcontrol_wait()") < first.index("(x_ptr[")
    safe = lower(Gemm(3, 64, 1024), SCHEDULE, {**BASE, "start": "wait"}, H200).source
    body = safe[safe.index("__launch_bounds__") :]
    assert body.index("griddepcontrol_wait()") < min(body.index("(w_ptr["), body.index("(s_ptr["), body.index("(x_ptr["))


@pytest.mark.parametrize("device", [H200, A100], ids=["sm_90a", "sm_80"])
@pytest.mark.parametrize(
    "w",
    [
        Gemm(1, 4096, 4096),
        Gemm(16, 4096, 4096, zero_point="asymmetric"),
        Gemm(16, 4096, 14336, "bfloat16", group_size=-1),
        Gemm(64, 8192, 8192),
        Gemm(16, 1024, 4096, group_size=32, zero_point="float"),
        Gemm(1, 4096, 4096, "bfloat16"),
        Gemm(70000, 4096, 4096, group_size=32),
    ],
    ids=lambda w: w.label,
)
def test_defaults_of_real_shapes_compile_without_spills(w: Gemm, device: Any, tmp_path: Path) -> None:
    config = SCHEDULE.default_config(w, device)
    plan = plan_w4(w, config, device)
    manifest = build_artefact(w, SCHEDULE, config, device, tmp_path / "a")
    assert manifest.spill_bytes == 0
    assert manifest.registers is not None and manifest.registers * plan.threads <= device.registers_per_sm
    assert plan.grid[0] * plan.grid[1] * plan.grid[2] >= 0.4 * device.units  # enough blocks to read at full speed


def test_an_old_gpu_is_refused() -> None:
    turing = dataclasses.replace(A100, arch="sm_75", name="T4")
    assert SCHEDULE.supports(Gemm(1, 64, 64), turing) == "gemm_w4a16_cuda needs sm_80 or later, T4 is sm_75"
    assert SCHEDULE.supports(Gemm(1, 64, 64), A100) is None


def test_many_rows_are_left_to_the_warpgroup_schedule_where_there_is_one() -> None:
    many = Gemm(65, 64, 64)
    assert "gemm_w4a16_wgmma" in str(SCHEDULE.supports(many, H200))
    assert SCHEDULE.supports(many, A100) is None and SCHEDULE.supports(Gemm(64, 64, 64), H200) is None


def test_the_space_is_small_enough_to_be_measured_whole() -> None:
    for w in (Gemm(1, 4096, 4096), Gemm(16, 4096, 4096)):
        count = sum(1 for _ in SCHEDULE.space(w, H200))
        assert 500 <= count <= 2500


@pytest.mark.parametrize(
    ("knobs", "reason"),
    [
        ({"batch": 4}, "batch=4 does not divide strips=2"),
        ({"x_load": "segment"}, "would load x 2 times"),
        ({"warps_n": 4, "strips": 4, "warps_k": 8}, "threads, 512 at most"),
        ({"warps_k": 8, "split_k": 2}, "leaves 8 of 16 trips along k without work"),
        ({"mtile": 2}, "mtile=2 holds 16 rows"),
        ({"warps_n": 4, "strips": 4}, "256 columns a block"),
        ({"unroll": 2, "warps_k": 4}, "unroll=2 with 2 trips"),
        ({"reduction": "halving"}, "'flat' is as good"),
    ],
)
def test_configs_without_use_are_pruned(knobs: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidConfig) as caught:
        plan_w4(Gemm(3, 64, 1024), {**BASE, **knobs}, H200)
    assert reason in str(caught.value)


def test_indices_are_clamped_only_where_they_can_leave_the_weights() -> None:
    exact = Indices(plan_w4(Gemm(3, 128, 1024), {**BASE, "warps_n": 2}, H200))
    assert not (exact.clamp_n or exact.clamp_k or exact.clamp_groups)
    ragged = Indices(plan_w4(Gemm(3, 130, 896), {**BASE, "warps_k": 4, "warps_n": 4}, H200))
    assert ragged.clamp_n and ragged.clamp_k and ragged.clamp_groups
    assert Indices(plan_w4(Gemm(3, 64, 160, group_size=32), {**BASE, "strips": 1}, H200)).clamp_groups


# -- what the kernel computes ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("w", "knobs"),
    [
        (Gemm(1, 48, 392), {"warps_k": 1, "stages": 3, "x_load": "ahead"}),
        (Gemm(13, 64, 1040, zero_point="float"), {"mtile": 2, "zeros": "sum"}),
        (Gemm(3, 48, 384, group_size=32, zero_point="asymmetric"), {"warps_k": 1, "unroll": 1, "zeros": "sum"}),
        (Gemm(3, 48, 384, group_size=32, zero_point="asymmetric"), {"stages": 2, "strips": 4, "batch": 4, "x_load": "segment"}),
        (Gemm(17, 130, 904, "bfloat16", group_size=64, zero_point="float"), {"mtile": 2, "split_k": 2, "zeros": "sum"}),
        (Gemm(40, 72, 1024, "bfloat16", zero_point="asymmetric"), {"mtile": 4, "warps_k": 8, "reduction": "halving"}),
        (Gemm(33, 64, 520), {"mtile": 4, "strips": 1, "warps_n": 4, "x_load": "segment", "warps_k": 1}),
    ],
    ids=lambda v: v.label if isinstance(v, Gemm) else " ".join(map(str, v.values())),
)
def test_every_part_of_the_kernel_is_right(w: Gemm, knobs: dict[str, Any]) -> None:
    assert run_schedule(SCHEDULE, w, {**BASE, **knobs}, H200, seed=3, order="random") <= BOUND[w.a_dtype]


def test_results_do_not_depend_on_the_order_of_threads() -> None:
    w = Gemm(5, 48, 1024)
    inputs = w.make_inputs(4)
    config = {**BASE, "warps_k": 4, "split_k": 2}
    first = run(w, config, inputs)
    assert max_relative_error(first, w.reference(*inputs)) <= BOUND["float16"]
    for order in ("reverse", "random"):
        assert torch.equal(run(w, config, inputs, order), first)


def test_results_beyond_the_range_of_float16_are_right_in_bfloat16() -> None:
    w = Gemm(2, 64, 256, "bfloat16")
    x, words, scales = w.make_inputs(4)
    scales = scales * 2**24
    y = run(w, BASE, [x, words, scales])
    assert float(y.float().abs().max()) > 65504
    assert max_relative_error(y, w.reference(x, words, scales)) <= BOUND["bfloat16"]


def test_zero_points_of_0_and_16_are_exact() -> None:
    w = Gemm(1, 64, 256, zero_point="asymmetric")
    x, words, scales, _ = w.make_inputs(4)
    x = torch.zeros_like(x)
    x[0, 37], x[0, 200] = 1, 1
    zeros = torch.zeros(w.layout.columns, dtype=torch.float16)
    zeros[:, 1] = 16
    scales = torch.ones_like(scales)
    for method in ("fold", "sum"):
        y = run(w, {**BASE, "zeros": method}, [x, words, scales, zeros])
        assert torch.equal(y.double(), w.reference(x, words, scales, zeros))


def test_nan_in_a_row_of_x_stays_in_that_row() -> None:
    w = Gemm(3, 64, 264)
    inputs = w.make_inputs(4)
    inputs[0][1, 263] = float("nan")
    y = run(w, BASE, inputs)
    assert bool(y[1].isnan().all())
    assert not bool(y[[0, 2]].isnan().any())
