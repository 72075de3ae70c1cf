"""Conv2d by windows: what it refuses, positions against pixels, kernels without spills, and ways through it in the emulator."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kronsched import registry
from kronsched.errors import InvalidConfig
from kronsched.hardware import resolve_target
from kronsched.runtime.build import build_artefact
from kronsched.runtime.lower import lower
from kronsched.schedules.conv2d_window_plan import WindowPlan, plan_window
from kronsched.workloads.conv2d import Conv2d
from tests.emulator import build, run_schedule

H200 = resolve_target("nvidia/h200")
FEW = replace(H200, units=2)
WINDOW = registry.schedule("conv2d_cuda_window")
KNOBS = {"pixels": 64, "groups": 1, "stages": 1, "per_sm": 1, "in_turn": False}
LAYER = Conv2d(128, 56, 56, 64, 64, 3, padding=1)
emulated = pytest.mark.skipif(build.available() is not None, reason="the emulator cannot be built here")


# -- arithmetic ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"stride": (1, 2)}, "stride=(1, 2)"),
        ({"kernel": 1, "padding": 0}, "kernel=(1, 1)"),
        ({"padding": 3}, "padding=(3, 3)"),
        ({"c_in": 48}, "c_in=48"),
        ({"c_in": 20}, "c_in=20"),
        ({"c_out": 40}, "c_out=40"),
        ({"has_residual": True}, "has_residual"),
        ({"c_in": 160}, "terms of 1440 bytes"),
        ({"w": 2000}, "w=2000: the smallest window has 4068 pixels"),
        ({"c_in": 256, "w": 900, "kernel": 2}, "bytes of shared memory"),
        ({"groups": 2}, "groups=2"),
        ({"out_dtype": "int32", "has_scale": False}, "int8 to int32"),
        ({"layout": "NHWCnc"}, "layout"),
        ({"c_in": 32, "c_out": 16, "kernel": (1, 7), "padding": (0, 2)}, None),
    ],
)
def test_layers_without_windows_to_share_are_left_to_others(change: dict[str, Any], says: str | None) -> None:
    reason = WINDOW.supports(replace(LAYER, **change), H200)
    assert reason is None if says is None else says in str(reason)
    assert "sm_90a" in str(WINDOW.supports(LAYER, resolve_target("nvidia/a100")))


@pytest.mark.parametrize(
    ("knobs", "says"),
    [
        ({"in_turn": True}, "there is one warpgroup"),
        ({}, "stages=1: a block has 50 tiles"),
        ({"pixels": 256, "groups": 4}, "a window has 1140 pixels, one copy brings 1024"),
        ({"pixels": 256, "groups": 3, "per_sm": 2}, "128 sums a thread do not fit"),
        ({"pixels": 128, "groups": 4, "stages": 4}, "bytes of shared memory"),
        ({"pixels": 256, "groups": 2, "stages": 3}, None),
    ],
)
def test_values_that_cannot_be_are_invalid(knobs: dict[str, int], says: str | None) -> None:
    if says is None:
        assert plan_window(LAYER, {**KNOBS, **knobs}, H200).turns == 7
        return
    with pytest.raises(InvalidConfig, match=says):
        plan_window(LAYER, {**KNOBS, **knobs}, H200)


@pytest.mark.parametrize(
    "conv",
    [
        Conv2d(2, 5, 6, 32, 16, 3, padding=1),
        Conv2d(3, 7, 9, 32, 16, (2, 3), padding=(0, 4), dilation=(1, 2)),
        Conv2d(2, 11, 5, 32, 16, (4, 2), stride=(3, 1), padding=(2, 1)),
    ],
)
def test_a_tap_is_a_fixed_distance_away(conv: Conv2d) -> None:
    plan = WindowPlan(conv, 64, 1, 1, 1)
    (ph, pw), (kh, kw), (dh, dw), (oh, ow), sh = conv.padding, conv.kernel, conv.dilation, conv.out_hw, conv.stride[0]
    taps = [(i * dh, j * dw) for i in range(kh) for j in range(kw)]

    def pixel(phase: int, at: int) -> tuple[int, int, int] | None:
        """What TMA brings as pixel number `at` of the padded images, from line `phase` on; None: zeros."""
        image, y, x = at // plan.pitch // plan.lines, at // plan.pitch % plan.lines * sh - ph + phase, at % plan.pitch - pw
        return (image, y, x) if image < conv.n and 0 <= y < conv.h and 0 <= x < conv.w else None

    for image, y, x in [(b, i, j) for b in range(conv.n) for i in range(oh) for j in range(ow)]:
        position = (image * plan.lines + y) * plan.pitch + x
        assert position < plan.positions
        for (i, j), (phase, distance) in zip(taps, plan.taps, strict=True):
            inside = 0 <= y * sh + i - ph < conv.h and 0 <= x + j - pw < conv.w
            sees = pixel(plan.phases[phase], position + distance)
            assert sees == ((image, y * sh + i - ph, x + j - pw) if inside else None)


def test_windows_are_copied_once_for_all_taps() -> None:
    x = next(
        m
        for m in lower(LAYER, WINDOW, {**KNOBS, "pixels": 128, "groups": 2, "stages": 2}, H200).launches[0].maps
        if m.name == "x_map"
    )
    assert (x.box, x.lower, x.upper) == ((64, 256 + 2 * 57 + 2), (-1, -1), (0, 0))


def test_layers_of_few_channels_are_expected_to_take_less_by_windows() -> None:
    def expected(name: str, conv: Conv2d) -> float:
        schedule = registry.schedule(name)
        us = schedule.expected_us(conv, schedule.default_config(conv, H200), H200)
        assert us is not None
        return us

    many = Conv2d(128, 28, 28, 128, 128, 3, padding=1)
    assert expected("conv2d_cuda_window", LAYER) < expected("conv2d_cuda_tma", LAYER) / 1.5
    assert expected("conv2d_cuda_window", many) > expected("conv2d_cuda_tma", many)


@pytest.mark.parametrize(("n", "dtype"), [(128, "int8"), (8, "float16")])
def test_default_config_of_a_real_layer_has_no_spills(n: int, dtype: str, tmp_path: Path) -> None:
    conv = replace(LAYER, n=n, in_dtype=dtype, out_dtype=dtype, has_scale=None)
    manifest = build_artefact(conv, WINDOW, WINDOW.default_config(conv, H200), H200, tmp_path / "a")
    assert manifest.spill_bytes == 0
    assert manifest.launches[0].overlap


# -- in the emulator ----------------------------------------------------------------------------------


SLOW = pytest.mark.slow
WIDE = Conv2d(1, 7, 9, 64, 32, (2, 3), padding=(0, 2), dilation=(2, 2))
FIRST = Conv2d(1, 20, 20, 3, 64, 7, stride=2, padding=3, has_bias=True, relu=True)


@emulated
@pytest.mark.parametrize(
    ("conv", "knobs", "order"),
    [
        pytest.param(
            Conv2d(3, 9, 8, 64, 96, 3, padding=1, has_bias=True, relu=True),
            {"stages": 2, "groups": 2, "in_turn": True},
            "random",
            id="many tiles",
        ),
        pytest.param(WIDE, {"pixels": 96}, "reverse", id="far taps"),
        pytest.param(
            replace(WIDE, in_dtype="float16", out_dtype="float16", has_bias=True),
            {},
            "random",
            marks=SLOW,
            id="f16",
        ),
        pytest.param(FIRST, {}, "reverse", id="folded"),
        pytest.param(replace(FIRST, in_dtype="float16", out_dtype="float16"), {}, "random", marks=SLOW, id="folded f16"),
        pytest.param(Conv2d(2, 9, 8, 64, 64, (4, 3), (3, 1), (2, 1)), {}, "forward", marks=SLOW, id="phases"),
        pytest.param(replace(WIDE, c_in=96), {"groups": 2}, "random", marks=SLOW, id="planes"),
        pytest.param(Conv2d(1, 20, 30, 32, 16, 3), {"pixels": 256, "groups": 2}, "random", marks=SLOW, id="halves"),
        pytest.param(
            replace(WIDE, in_dtype="float8_e4m3fn", out_dtype="bfloat16"), {"groups": 2}, "reverse", marks=SLOW, id="f8"
        ),
        pytest.param(Conv2d(1, 9, 8, 128, 64, 3, padding=1, in_dtype="bfloat16"), {}, "forward", marks=SLOW, id="two planes"),
    ],
)
def test_ways_through_the_kernel(conv: Conv2d, knobs: dict[str, int], order: str) -> None:
    config = {**KNOBS, **knobs}
    if WINDOW.space(conv, FEW).invalid(config):  # a block has several tiles
        config["stages"] = 2
    error = run_schedule(WINDOW, conv, config, FEW, seed=1, order=order)
    assert error <= (0.0 if conv.in_dtype == "int8" else 1e-2 if conv.out_dtype == "bfloat16" else 1e-3)
