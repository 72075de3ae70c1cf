"""Conv2d on tensor cores: the arithmetic of tiles, kernels of real layers without spills, values at the edges of dtypes."""

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
from kronsched.measure.check import max_relative_error
from kronsched.runtime.build import build_artefact
from kronsched.runtime.lower import lower
from kronsched.schedules.conv2d_tile import ConvTile, make_tile, read_channels
from kronsched.workloads.conv2d import Conv2d
from tests.emulator import build, run_lowered, run_schedule

H200, A100 = resolve_target("nvidia/h200"), resolve_target("nvidia/a100")
KNOBS = {"per_sm": 1, "vector": 16, "cache": "l1", "order": "tap"}
TENSOR_CORES = ("conv2d_cuda_mma", "conv2d_cuda_wgmma")
emulated = pytest.mark.skipif(build.available() is not None, reason="the emulator cannot be built here")


def tile(conv: Conv2d, **knobs: Any) -> ConvTile:
    return make_tile(conv, {**KNOBS, **knobs}, H200, (128, 64), 128, 3, 2)


@pytest.mark.parametrize("name", TENSOR_CORES)
def test_an_odd_number_of_int32_channels_is_left_to_others(name: str) -> None:
    odd = Conv2d(2, 8, 8, 16, 21, 3, padding=1, in_dtype="int8", out_dtype="int32")
    assert "c_out=21" in str(registry.schedule(name).supports(odd, H200))
    assert registry.schedule(name).supports(replace(odd, c_out=22), H200) is None
    assert [s.name for s in registry.schedules_for(odd, H200)] == ["conv2d_cuda_simt"]


@emulated
@pytest.mark.parametrize("name", TENSOR_CORES)
def test_relu_keeps_nan(name: str) -> None:
    conv = Conv2d(1, 2, 2, 16, 16, 1, in_dtype="float16", relu=True)
    schedule = registry.schedule(name)
    x, w = conv.make_inputs(0)
    x[0, 1, 1, 3] = float("nan")
    lowered = lower(conv, schedule, schedule.default_config(conv, H200), H200)
    y = torch.zeros(conv.output.shape, dtype=torch.float16)
    run_lowered(lowered, {"x": x.numpy(), "w": w.numpy(), "y": y.numpy()})
    assert y[0, 1, 1].isnan().all() and not y[0, 0].isnan().any() and y[0, 0].min() == 0


# -- arithmetic ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("c_in", "dtype", "wanted"),
    [
        (64, "int8", (64, 16)),
        (8, "float16", (8, 16)),
        (24, "int8", (24, 8)),
        (4, "int8", (4, 4)),
        (3, "int8", (4, 4)),
        (3, "float16", (4, 8)),
        (5, "int8", (8, 8)),
        (33, "int8", (48, 16)),
        (33, "bfloat16", (40, 16)),
    ],
)
def test_channels_are_padded_to_whole_pieces(c_in: int, dtype: str, wanted: tuple[int, int]) -> None:
    assert read_channels(Conv2d(1, 8, 8, c_in, 8, 3, in_dtype=dtype)) == wanted


@pytest.mark.parametrize(("out_dtype", "vector"), [("int8", 16), ("int8", 4), ("int8", 2), ("int32", 16), ("int32", 8)])
def test_columns_of_a_thread_are_neighbouring_channels(out_dtype: str, vector: int) -> None:
    t = tile(Conv2d(1, 8, 8, 64, 64, 3, out_dtype=out_dtype), vector=vector)
    assert sorted(t.channel(c) for c in range(64)) == list(range(64))
    for group in range(8 // t.group):
        for quad in range(4):
            mine = [t.channel((group * t.group + i) * 8 + 2 * quad + odd) for i in range(t.group) for odd in (0, 1)]
            assert mine == list(range(mine[0], mine[0] + 2 * t.group))
            assert len(mine) * {"int8": 1, "int32": 4}[out_dtype] == vector


def test_values_without_effect_are_invalid() -> None:
    conv = Conv2d(1, 8, 8, 64, 64, 3)
    with pytest.raises(InvalidConfig, match="order=channel has no effect"):
        tile(conv, order="channel")
    with pytest.raises(InvalidConfig, match="cache=l1"):
        tile(replace(conv, kernel=1))
    with pytest.raises(InvalidConfig, match="cache=l2"):
        tile(replace(conv, c_in=4), cache="l2")
    with pytest.raises(InvalidConfig, match="vector=16"):
        tile(replace(conv, c_out=72), vector=16)


# -- kernels ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["int8", "float16"])
@pytest.mark.parametrize(
    "shape",
    [
        pytest.param({"h": 56, "w": 56, "c_in": 64, "c_out": 64, "kernel": 3, "padding": 1}, marks=pytest.mark.slow),
        {"h": 14, "w": 14, "c_in": 256, "c_out": 256, "kernel": 3, "padding": 1},
        pytest.param({"h": 56, "w": 56, "c_in": 64, "c_out": 256, "kernel": 1}, marks=pytest.mark.slow),
        {"h": 224, "w": 224, "c_in": 3, "c_out": 64, "kernel": 7, "stride": 2, "padding": 3},
    ],
    ids=lambda s: f"{s['h']} {s['c_in']} {s['kernel']}",
)
@pytest.mark.parametrize("schedule", TENSOR_CORES)
def test_default_config_of_a_real_layer_has_no_spills(
    schedule: str, shape: Mapping[str, Any], dtype: str, tmp_path: Path
) -> None:
    device = A100 if schedule == "conv2d_cuda_mma" else H200
    conv, instance = Conv2d(128, **shape, in_dtype=dtype), registry.schedule(schedule)
    manifest = build_artefact(conv, instance, instance.default_config(conv, device), device, tmp_path / "a")
    assert manifest.spill_bytes == 0


def test_channels_of_whole_pieces_are_read_where_they_are() -> None:
    schedule = registry.schedule("conv2d_cuda_wgmma")
    for c_in, launches in ((4, 1), (3, 2)):
        conv = Conv2d(1, 8, 8, c_in, 16, 3)
        scheduled = schedule.apply(conv, schedule.default_config(conv, H200), H200)
        assert len(scheduled.launches) == launches
        assert len(scheduled.scratch) == 2 * (launches - 1)


def test_the_source_names_the_tensor_core_instruction() -> None:
    for name, dtype, instruction in (
        ("conv2d_cuda_mma", "int8", "m16n8k32.row.col.s32.s8.s8.s32"),
        ("conv2d_cuda_wgmma", "float8_e4m3fn", "k32.f32.e4m3.e4m3"),
    ):
        schedule, conv = registry.schedule(name), Conv2d(1, 8, 8, 64, 64, 1, in_dtype=dtype)
        assert instruction in lower(conv, schedule, schedule.default_config(conv, H200), H200).source


@emulated
@pytest.mark.parametrize(
    "knobs",
    [
        {"block_m": 192, "block_n": 64, "row_groups": 3, "stages": 3, "overlap": 1, "order": "channel"},  # rows shared unevenly
        {"block_m": 64, "block_n": 64, "row_groups": 1, "col_groups": 2, "stages": 4, "cache": "l2", "vector": 8},
    ],
    ids=["uneven", "columns"],
)
def test_ways_to_copy(knobs: Mapping[str, Any]) -> None:
    conv = Conv2d(2, 9, 9, 256, 64, 3, padding=1)
    base = {"col_groups": 1, "overlap": 0, "persistent": False, "start": "serial", **KNOBS}
    schedule, config = registry.schedule("conv2d_cuda_wgmma"), {**base, **knobs}
    assert schedule.space(conv, H200).invalid(config) is None
    assert run_schedule(schedule, conv, config, H200, seed=1, order="random") == 0.0


@emulated
@pytest.mark.parametrize("schedule", TENSOR_CORES)
def test_int8_saturates_and_rounds_halves_to_even(schedule: str) -> None:
    conv = Conv2d(1, 1, 8, 16, 32, 1)
    x = torch.zeros(1, 1, 8, 16, dtype=torch.int8)
    x[0, 0, :, 0] = torch.tensor([1, 3, 5, -1, -3, 127, -127, 0], dtype=torch.int8)
    w = torch.zeros(32, 1, 1, 16, dtype=torch.int8)
    w[:, 0, 0, 0] = 1
    w[1, 0, 0, 0] = 127
    y = emulate(schedule, conv, [x, w, torch.full((32,), 0.5)])
    assert y[0, 0, :, 0].tolist() == [0, 2, 2, 0, -2, 64, -64, 0]
    assert y[0, 0, :, 1].tolist() == [64, 127, 127, -64, -128, 127, -128, 0]


@emulated
def test_fp8_nan_and_inf_propagate_and_padding_does_not_make_any() -> None:
    conv = Conv2d(1, 4, 4, 16, 16, 3, padding=1, in_dtype="float8_e5m2")
    x, w = conv.make_inputs(3)
    x[0, 0, 0, 0], x[0, 3, 3, 1] = float("nan"), float("inf")
    w[:, :, :, 1] = 1.0
    y = emulate("conv2d_cuda_wgmma", conv, [x, w])
    assert max_relative_error(y, conv.reference(x, w)) < 1e-3  # special values in the same places
    assert torch.isnan(y[0, :2, :2]).all()
    assert torch.isinf(y[0, 2:, 2:]).all()
    assert torch.isfinite(y[0, 0, 2:]).all()


@emulated
@pytest.mark.parametrize("name", TENSOR_CORES)
def test_one_tap_with_padding_reads_no_channel_of_the_next_pixel(name: str) -> None:
    conv = Conv2d(1, 2, 3, 96, 16, 1, padding=1, in_dtype="float16")  # a chunk and a half
    x, w = conv.make_inputs(0)
    x[0, 1, 2] = float("nan")
    y = emulate(name, conv, [x, w])
    assert torch.isnan(y[0, 2, 3]).all() and torch.isnan(y).any(-1).sum() == 1


def emulate(name: str, conv: Conv2d, inputs: list[torch.Tensor]) -> torch.Tensor:
    schedule = registry.schedule(name)
    lowered = lower(conv, schedule, schedule.default_config(conv, H200), H200)
    y = torch.full(conv.output.shape, 77, dtype=getattr(torch, conv.out_dtype))
    named = dict(zip((t.name for t in conv.inputs), inputs, strict=True)) | {"y": y}
    run_lowered(lowered, {n: t.view(torch.uint8).numpy() for n, t in named.items()}, order="reverse")
    return y
