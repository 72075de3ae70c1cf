"""Conv2d by TMA: what it refuses, its tensor maps, kernels without spills, and every way through the kernel in the emulator."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kronsched import registry
from kronsched.errors import InvalidConfig
from kronsched.hardware import resolve_target
from kronsched.runtime.build import build_artefact
from kronsched.runtime.lower import lower
from kronsched.schedules.conv2d_fold import fold_of, pair_of
from kronsched.schedules.conv2d_tma_plan import TmaPlan, plan_tma
from kronsched.workloads.conv2d import Conv2d
from tests.emulator import build, run_lowered, run_schedule

H200 = resolve_target("nvidia/h200")
TMA = registry.schedule("conv2d_cuda_tma")
SHAPE = {"block_m": 64, "block_n": 64, "row_groups": 1, "col_groups": 1}
KNOBS = {**SHAPE, "stages": 3, "depth": 1, "split": 1, "per_sm": 1, "pair": False}
LAYER = Conv2d(128, 14, 14, 256, 256, 3, padding=1)
emulated = pytest.mark.skipif(build.available() is not None, reason="the emulator cannot be built here")


def plan(conv: Conv2d, **knobs: int) -> TmaPlan:
    return plan_tma(conv, {**KNOBS, **knobs}, H200)


# -- arithmetic ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"c_in": 48}, "c_in=48"),
        ({"c_out": 72}, "c_out=72"),
        ({"out_dtype": "int32", "has_scale": False}, "int32"),
        ({"groups": 4}, "groups=4"),
        ({"stride": 9}, "stride=(9, 9)"),
        ({"in_dtype": "float16", "out_dtype": "float16", "c_in": 16}, None),
    ],
)
def test_what_tma_and_stmatrix_cannot_do_is_left_to_others(change: Mapping[str, Any], says: str | None) -> None:
    reason = TMA.supports(replace(LAYER, **change), H200)
    assert reason is None if says is None else says in str(reason)
    assert "sm_90a" in str(TMA.supports(LAYER, resolve_target("nvidia/a100")))


@pytest.mark.parametrize(
    ("conv", "knobs", "says"),
    [
        (LAYER, {"depth": 4}, "depth=4: there are 18 chunks"),
        (LAYER, {"split": 8}, "split=8: 64 channels of a warpgroup are not whole shares"),
        (LAYER, {"block_m": 256, "block_n": 256}, "512 sums a thread"),
        (LAYER, {"block_m": 192, "block_n": 256, "row_groups": 1, "col_groups": 2, "stages": 6}, "shared memory"),
        (LAYER, {"pair": True}, "pair=True"),
        (replace(LAYER, n=1), {"per_sm": 2}, "per_sm=2: there are 16 tiles"),
        (replace(LAYER, n=1, kernel=1, padding=0), {"stages": 8}, "stages=8: a block makes 2 trips"),
    ],
)
def test_values_that_cannot_be_or_change_nothing_are_invalid(conv: Conv2d, knobs: dict[str, int], says: str) -> None:
    with pytest.raises(InvalidConfig, match=says):
        plan(conv, **knobs)


def test_registers_move_to_warpgroups_with_many_sums() -> None:
    large = plan(LAYER, block_m=192, block_n=256, col_groups=2)
    assert (large.sums, large.uneven, large.threads) == (192, True, 384)
    small = plan(LAYER, block_m=128, block_n=256, row_groups=2)
    assert (small.sums, small.uneven, small.threads) == (128, False, 288)


def test_tensor_maps_of_a_strided_layer() -> None:
    conv = Conv2d(2, 15, 14, 128, 64, (3, 5), stride=(2, 1), padding=(1, 2), dilation=(1, 2))
    maps = {m.name: m for m in lower(conv, TMA, KNOBS, H200).launches[0].maps}
    x = maps["x_map"]
    assert (x.extents, x.strides, x.box) == ((128, 14, 15, 2), (128, 128 * 14, 128 * 14 * 15), (128, 64))
    assert (x.lower, x.upper, x.steps) == ((-2, -1), (2 - 8, 1 - 2), (1, 2))  # along w, along h
    assert maps["w_map"].box == (128, 2, 4, 2, 4)
    assert "im2col lower=(-2, -1)" in x.describe()
    assert "im2col" not in maps["y_map"].describe()


@pytest.mark.parametrize("conv", [Conv2d(2, 8, 8, 40, 32, 3), Conv2d(2, 8, 10, 3, 32, 3, padding=1)])
def test_layers_whose_channels_do_not_fold_are_left_to_others(conv: Conv2d) -> None:
    assert fold_of(conv) is None
    assert f"c_in={conv.c_in}" in str(TMA.supports(conv, H200))


def test_the_first_layer_of_a_network_is_folded() -> None:
    fold = fold_of(Conv2d(2, 224, 224, 3, 64, 7, stride=2, padding=3))
    assert fold is not None and (fold.channels, fold.outputs, fold.line) == (4, 2, 4 * 236)
    assert fold.folded == Conv2d(2, 224, 56, 64, 128, (7, 1), stride=(2, 1), padding=(3, 0))
    assert fold.strides == (16, 944, 944 * 224)  # windows overlap


def test_pairs_of_pixels_are_folded_without_a_copy() -> None:
    conv = Conv2d(2, 56, 56, 64, 64, 3, padding=1)
    paired = plan(conv, pair=True, block_n=128)
    assert paired.conv == Conv2d(2, 56, 56, 64, 128, (3, 4), stride=(1, 2), padding=1)
    assert (paired.chunks, plan(conv).chunks) == (12, 9)  # for twice as many outputs
    lowered = lower(conv, TMA, {**KNOBS, "pair": True}, H200)
    assert [t.name for t in lowered.scratch] == ["w_fold", "scale_fold"]


@pytest.mark.parametrize("change", [{"c_out": 128}, {"kernel": (3, 1)}, {"w": 55}, {"stride": 2}, {"dilation": (1, 2)}])
def test_pairs_that_share_nothing_or_are_not_whole_are_not_folded(change: dict[str, Any]) -> None:
    assert pair_of(Conv2d(2, 56, 56, 64, 64, 3, padding=1)) is not None
    assert pair_of(replace(Conv2d(2, 56, 56, 64, 64, 3, padding=1), **change)) is None


@pytest.mark.parametrize(("c_in", "dtype"), [(3, "int8"), (3, "float16"), (8, "int8")])
def test_layers_of_few_channels_with_stride_1_have_a_default(c_in: int, dtype: str) -> None:
    """As VGG's first: their own fold, never pairs."""
    conv = Conv2d(1, 224, 224, c_in, 64, 3, padding=1, in_dtype=dtype, out_dtype=dtype)
    if TMA.supports(conv, H200) is None:
        assert TMA.default_config(conv, H200)["pair"] is False
    with pytest.raises(InvalidConfig, match="pair=True"):
        plan(conv, pair=True)


@pytest.mark.parametrize(("n", "dtype"), [pytest.param(8, "int8", marks=pytest.mark.slow), (128, "float16")])
def test_default_config_of_a_real_layer_has_no_spills(n: int, dtype: str, tmp_path: Path) -> None:
    conv = replace(LAYER, n=n, in_dtype=dtype, out_dtype=dtype, has_scale=None)
    manifest = build_artefact(conv, TMA, TMA.default_config(conv, H200), H200, tmp_path / "a")
    assert manifest.spill_bytes == 0
    assert manifest.launches[0].overlap


# -- in the emulator ----------------------------------------------------------------------------------


FIRST = Conv2d(1, 20, 20, 3, 64, 7, stride=2, padding=3, has_bias=True, relu=True)
SLOW = pytest.mark.slow


@emulated
@pytest.mark.parametrize(
    ("conv", "knobs", "order"),
    [
        pytest.param(Conv2d(2, 8, 9, 64, 64, 3, padding=1), {"depth": 3, "stages": 2}, "random", marks=SLOW, id="depth"),
        pytest.param(Conv2d(2, 7, 7, 128, 128, 3, stride=2, padding=1), {"block_n": 128, "split": 4}, "random", id="split"),
        pytest.param(FIRST, {"block_n": 128}, "random", marks=SLOW, id="folded"),
        pytest.param(Conv2d(2, 6, 8, 64, 32, 3, padding=1, has_bias=True), {"pair": True}, "reverse", id="pairs"),
        pytest.param(Conv2d(1, 9, 10, 64, 32, (2, 5), (2, 1), (0, 2)), {"pair": True}, "random", marks=SLOW, id="long pairs"),
        pytest.param(replace(FIRST, in_dtype="float16", out_dtype="float16"), {}, "reverse", marks=SLOW, id="folded f16"),
        pytest.param(Conv2d(2, 6, 8, 6, 16, 3, padding=1, dilation=2), {"block_n": 32}, "random", marks=SLOW, id="folded by 4"),
        pytest.param(
            Conv2d(2, 9, 9, 128, 128, 3, padding=1),
            {"block_m": 192, "block_n": 128, "col_groups": 2, "split": 2},
            "reverse",
            marks=SLOW,
            id="split slabs",
        ),
        pytest.param(
            Conv2d(1, 14, 14, 256, 256, 3, padding=1),
            {"block_m": 192, "block_n": 256, "col_groups": 2},
            "forward",
            marks=SLOW,
            id="uneven registers",
        ),
        pytest.param(
            Conv2d(2, 9, 9, 32, 80, (3, 2), stride=(1, 2), padding=(2, 1), in_dtype="float16"),
            {"col_groups": 2},
            "reverse",
            marks=SLOW,
            id="half empty channels",
        ),
    ],
)
def test_ways_through_the_kernel(conv: Conv2d, knobs: dict[str, int], order: str) -> None:
    error = run_schedule(TMA, conv, {**KNOBS, **knobs}, H200, seed=1, order=order)
    assert error <= (0.0 if conv.in_dtype == "int8" else 1e-3)


@emulated
def test_a_block_goes_through_many_tiles() -> None:
    few = replace(H200, units=2)
    conv = Conv2d(5, 9, 9, 64, 96, 3, padding=1, has_residual=True)
    assert plan_tma(conv, KNOBS, few).persistent
    assert run_schedule(TMA, conv, KNOBS, few, seed=1, order="random") == 0.0


@emulated
def test_int8_saturates_and_rounds_halves_to_even() -> None:
    conv = Conv2d(1, 1, 8, 32, 32, 1)
    x = torch.zeros(1, 1, 8, 32, dtype=torch.int8)
    x[0, 0, :, 0] = torch.tensor([1, 3, 5, -1, -3, 127, -127, 0], dtype=torch.int8)
    w = torch.zeros(32, 1, 1, 32, dtype=torch.int8)
    w[:, 0, 0, 0] = 1
    w[1, 0, 0, 0] = 127
    lowered = lower(conv, TMA, {**KNOBS, "block_n": 32, "stages": 2}, H200)
    y = torch.full(conv.output.shape, 77, dtype=torch.int8)
    run_lowered(lowered, {"x": x.numpy(), "w": w.numpy(), "scale": torch.full((32,), 0.5).numpy(), "y": y.numpy()})
    assert y[0, 0, :, 0].tolist() == [0, 2, 2, 0, -2, 64, -64, 0]
    assert y[0, 0, :, 1].tolist() == [64, 127, 127, -64, -128, 127, -128, 0]
