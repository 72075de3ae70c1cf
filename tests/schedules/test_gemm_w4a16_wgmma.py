"""The W4A16 schedule on warpgroup products: launches, pruning, resources, the kernel in the emulator."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kronsched.errors import InvalidConfig
from kronsched.hardware import resolve_target
from kronsched.runtime.build import build_artefact
from kronsched.runtime.lower import lower
from kronsched.schedules.gemm_w4a16_wgmma import GemmW4A16Wgmma
from kronsched.schedules.w4a16_wgmma_plan import plan_wgmma
from kronsched.workloads.gemm import Gemm
from tests.emulator import build, run_lowered, run_schedule

H200 = resolve_target("nvidia/h200")
SCHEDULE = GemmW4A16Wgmma()
BASE: dict[str, Any] = {
    "tiles": 1, "groups_n": 1, "groups_k": 1, "rows": 32, "stages": 3, "split_k": 1, "copies": "threads",
}  # fmt: skip
BOUND = {"float16": 6e-4, "bfloat16": 4e-3}
emulated = pytest.mark.skipif(build.available() is not None, reason="no C++ compiler for the emulator")


# -- launches and limits --------------------------------------------------------------------------------


def test_x_is_prepared_when_asked_for_gathered_or_padded() -> None:
    def symbols(w: Gemm, **knobs: Any) -> list[str]:
        return [x.symbol.removesuffix("_kernel") for x in lower(w, SCHEDULE, {**BASE, **knobs}, H200).launches]

    assert symbols(Gemm(32, 64, 256)) == ["w4a16_wgmma"]
    assert symbols(Gemm(32, 64, 256), split_k=2) == ["w4a16_wgmma", "w4a16_sum"]
    assert symbols(Gemm(32, 64, 256), copies="fetch") == ["w4a16_wgmma"]
    assert symbols(Gemm(32, 64, 256), copies="ring") == ["w4a16_prepare", "w4a16_wgmma"]
    assert symbols(Gemm(32, 64, 256, act_order=True), copies="ring") == ["w4a16_prepare", "w4a16_wgmma"]
    for w in (Gemm(32, 64, 201), Gemm(32, 64, 256, act_order=True), Gemm(32, 64, 256, zero_point="float")):
        with pytest.raises(InvalidConfig, match="x has to be gathered, padded or summed up first"):
            plan_wgmma(w, BASE, H200)


def test_launches_overlap() -> None:
    launches = lower(Gemm(32, 64, 256), SCHEDULE, {**BASE, "split_k": 2, "copies": "ring"}, H200).launches
    assert all(x.overlap for x in launches)
    gathers = lower(Gemm(32, 64, 256, act_order=True), SCHEDULE, {**BASE, "copies": "ring"}, H200).launches
    assert [x.overlap for x in gathers] == [False, True]
    serial = lower(Gemm(32, 64, 256), SCHEDULE, {**BASE, "start": "serial"}, H200)
    assert not serial.launches[0].overlap
    assert "griddepcontrol" not in serial.source


@pytest.mark.parametrize("copies", ["threads", "fetch", "ring"])
def test_x_is_read_after_the_wait_and_weights_before_it(copies: str) -> None:
    source = lower(Gemm(32, 64, 1024), SCHEDULE, {**BASE, "copies": copies}, H200).source
    kernels = source.split("__launch_bounds__")[1:]
    main = next(k for k in kernels if "(w_ptr[" in k)
    x = "(xs_ptr[" if copies == "ring" else "(x_ptr["
    assert main.index("(w_ptr[") < main.index("griddepcontrol_wait()") < main.index(x)
    for other in (k for k in kernels if "w4a16_prepare_kernel" in k and "(x_ptr[" in k):
        assert other.index("griddepcontrol_wait()") < other.index("(x_ptr[")


@pytest.mark.parametrize(
    "w",
    [
        Gemm(32, 4096, 4096),
        Gemm(64, 8192, 8192, zero_point="asymmetric"),
        pytest.param(Gemm(64, 4096, 14336, "bfloat16", group_size=32), marks=pytest.mark.slow),
        pytest.param(Gemm(64, 8192, 8192, zero_point="float"), marks=pytest.mark.slow),
        Gemm(3000, 28672, 8192),
    ],
    ids=lambda w: w.label,
)
def test_defaults_of_real_shapes_compile_without_spills(w: Gemm, tmp_path: Path) -> None:
    config = SCHEDULE.default_config(w, H200)
    plan = plan_wgmma(w, config, H200)
    manifest = build_artefact(w, SCHEDULE, config, H200, tmp_path / "a")
    assert manifest.spill_bytes == 0
    assert manifest.registers is not None and manifest.registers * plan.threads <= H200.registers_per_sm
    assert plan.grid[0] * plan.grid[1] * plan.grid[2] >= 0.7 * H200.units


def test_what_it_does_not_serve_is_said() -> None:
    ampere = resolve_target("nvidia/a100")
    assert "needs sm_90a" in str(SCHEDULE.supports(Gemm(64, 64, 128), ampere))
    assert "m=8" in str(SCHEDULE.supports(Gemm(8, 64, 128), H200))
    assert SCHEDULE.supports(Gemm(64, 64, 128), H200) is None


@pytest.mark.parametrize(
    ("knobs", "reason"),
    [
        ({"groups_n": 4, "groups_k": 2}, "threads, 512 at most"),
        ({"rows": 256, "stages": 6}, "bytes of shared memory"),
        ({"rows": 256, "tiles": 2}, "registers"),
        ({"groups_k": 4, "split_k": 4}, "for 8 chunks of k"),
        ({"groups_n": 4}, "256 columns a block"),
        ({"rows": 128}, "needs at most half"),
        ({"stages": 6, "split_k": 4}, "stages=6 with 2 trips"),
    ],
)
def test_configs_without_use_are_pruned(knobs: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidConfig) as caught:
        plan_wgmma(Gemm(40, 128, 1024), {**BASE, **knobs}, H200)
    assert reason in str(caught.value)


@emulated
@pytest.mark.parametrize(
    "w", [Gemm(11, 64, 320), Gemm(11, 64, 301, zero_point="float"), Gemm(11, 64, 256, act_order=True)], ids=str
)
def test_x_is_laid_out_in_nibble_order_and_swizzled(w: Gemm) -> None:
    """Launch by launch in the emulator: what the first one writes, against the layout's own description."""
    config = {**BASE, "rows": 16, "copies": "ring"}
    plan = plan_wgmma(w, config, H200)
    lowered = lower(w, SCHEDULE, config, H200)
    inputs = w.make_inputs(5)
    arrays = {
        s.name: np.array(t.contiguous().view(torch.int16 if t.element_size() == 2 else t.dtype).numpy())
        for s, t in zip(w.inputs, inputs, strict=True)
    }
    arrays["y"] = np.full(w.output.shape, -1, dtype=np.int16)
    arrays["xs"] = np.full(plan.image, -1, dtype=np.int16)
    run_lowered(lowered, arrays, order="random")
    xs = torch.from_numpy(arrays["xs"]).view(torch.float16).view(plan.chunks, 2, plan.rows, 8, 8)
    rows = w._packed_rows(*inputs)
    for chunk, half, row, piece in np.ndindex(plan.chunks, 2, w.m, 8):
        h, s, e = piece // 4, piece // 2 % 2, piece % 2
        start = chunk * 128 + half * 64 + h * 32 + 4 * s + 2 * e
        want = torch.stack([rows[row, start + 8 * t + f] for t in range(4) for f in range(2)])
        assert torch.equal(xs[chunk, half, row, piece ^ (row % 8)].double(), want)


# -- what the kernel computes ---------------------------------------------------------------------------


@emulated
@pytest.mark.parametrize(
    ("w", "knobs"),
    [
        (Gemm(20, 48, 326), {}),
        (Gemm(20, 130, 512, group_size=32, zero_point="asymmetric"), {"tiles": 2, "stages": 2}),
        (Gemm(130, 64, 128, group_size=64), {"rows": 128}),
        (Gemm(20, 48, 330), {"copies": "fetch"}),
        (
            Gemm(20, 130, 640, group_size=32, zero_point="asymmetric"),
            {"tiles": 2, "groups_k": 2, "stages": 2, "copies": "fetch"},
        ),
        (Gemm(16, 128, 2176), {"rows": 16, "groups_k": 4, "copies": "fetch"}),
        (
            Gemm(40, 256, 1024, "bfloat16"),
            {"stages": 2, "rows": 64, "groups_n": 2, "split_k": 2, "copies": "fetch"},
        ),
        (Gemm(33, 64, 520, act_order=True), {"copies": "ring", "groups_k": 4, "stages": 2}),
        (Gemm(20, 64, 1024, group_size=-1, zero_point="float"), {"split_k": 2, "copies": "ring"}),
        (Gemm(20, 130, 640, group_size=32, zero_point="float"), {"copies": "ring", "tiles": 2, "groups_k": 2}),
        (
            Gemm(20, 130, 640, group_size=32, zero_point="asymmetric"),
            {"copies": "ring", "groups_k": 2, "stages": 2},
        ),
        (
            Gemm(33, 200, 901, "bfloat16", group_size=96, zero_point="float", act_order=True),
            {"copies": "ring", "rows": 64},
        ),
        (Gemm(40, 256, 1024, "bfloat16"), {"copies": "ring", "rows": 64, "groups_n": 2, "tiles": 2, "split_k": 2}),
        (Gemm(17, 131, 1000), {"stages": 2, "copies": "ring", "groups_n": 2, "split_k": 2}),
    ],
    ids=lambda v: v.label if isinstance(v, Gemm) else " ".join(map(str, v.values())),
)
def test_every_part_of_the_kernel_is_right(w: Gemm, knobs: dict[str, Any]) -> None:
    assert run_schedule(SCHEDULE, w, {**BASE, **knobs}, H200, seed=3, order="random") <= BOUND[w.a_dtype]


@emulated
def test_nan_in_a_row_of_x_stays_in_that_row() -> None:
    w = Gemm(20, 64, 264)
    inputs = w.make_inputs(4)
    inputs[0][1, 263] = float("nan")
    arrays = {
        s.name: np.array(t.contiguous().view(torch.int16 if t.element_size() == 2 else t.dtype).numpy())
        for s, t in zip(w.inputs, inputs, strict=True)
    }
    arrays["y"] = np.full(w.output.shape, -1, dtype=np.int16)
    run_lowered(lower(w, SCHEDULE, {**BASE, "copies": "ring"}, H200), arrays, order="forward")
    y = torch.from_numpy(arrays["y"]).view(torch.float16)
    assert bool(y[1].isnan().all())
    assert not bool(y[[i for i in range(20) if i != 1]].isnan().any())
