from __future__ import annotations

from pathlib import Path

import pytest

from kronsched import KronMatmul
from kronsched.hardware import (
    PRESETS,
    Device,
    ceilings,
    floor_us,
    measure_ceilings,
    raise_ceilings,
    resolve_target,
    roofline_fraction,
)

CPU = Device("cpu", "Test CPU", "generic", 3, 30.0, {"float32": 9.0}, ceilings_from="estimate")
FIGURES = (50.0, {"float32": 100.0, "float64": 40.0, "float16": 3.0, "bfloat16": 300.0})


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KRONSCHED_CACHE_DIR", str(tmp_path / "cache"))


def measured(monkeypatch: pytest.MonkeyPatch) -> Device:
    monkeypatch.setattr(ceilings, "_measure", lambda device: (FIGURES[0], dict(FIGURES[1])))
    return measure_ceilings(CPU)


def test_measured_once_then_read_from_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    device = measured(monkeypatch)
    assert (device.bandwidth_gbs, device.ceilings_from) == (50.0, "measured")
    # A slow library half matmul is no ceiling for a kernel that accumulates in float32.
    assert device.peak_gflops == {"float32": 100.0, "float64": 40.0, "float16": 100.0, "bfloat16": 300.0, "int8": 100.0}
    assert ceilings.with_known_ceilings(CPU) == device
    monkeypatch.setattr(ceilings, "_measure", lambda device: pytest.fail("measured twice"))
    assert measure_ceilings(device) is device


def test_ceilings_measured_on_a_busy_machine_are_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    device = measured(monkeypatch)
    monkeypatch.setattr(ceilings, "_measure", lambda device: (40.0, {"float32": 180.0, "float64": 30.0}))
    raised = raise_ceilings(device)
    assert raised.bandwidth_gbs == 50.0  # the larger of the two
    assert (raised.peak_gflops["float32"], raised.peak_gflops["float64"]) == (180.0, 40.0)
    assert ceilings.with_known_ceilings(CPU) == raised
    preset = PRESETS["nvidia/h200"]
    assert raise_ceilings(preset) is preset


def test_another_core_count_is_another_device(monkeypatch: pytest.MonkeyPatch) -> None:
    measured(monkeypatch)
    other = Device("cpu", "Test CPU", "generic", 4, 30.0, {"float32": 9.0}, ceilings_from="estimate")
    assert ceilings.with_known_ceilings(other) is other


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        '{"schema": 99}',
        '{"schema": 2, "bandwidth_gbs": -1, "peak_gflops": {"float32": 1}}',
        '{"schema": 2, "bandwidth_gbs": 5, "peak_gflops": 7}',
        '{"schema": 2, "bandwidth_gbs": 5, "peak_gflops": {}}',
    ],
)
def test_a_damaged_cache_file_is_ignored(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    measured(monkeypatch)
    ceilings._path(CPU).write_text(text)
    assert ceilings.with_known_ceilings(CPU) is CPU


def test_an_unwritable_cache_still_measures(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("KRONSCHED_CACHE_DIR", str(blocked))
    assert measured(monkeypatch).ceilings_from == "measured"


def test_presets_are_never_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ceilings, "_measure", lambda device: pytest.fail("measured a preset"))
    assert measure_ceilings(PRESETS["nvidia/h200"]) is PRESETS["nvidia/h200"]


def test_real_measurement_on_this_cpu() -> None:
    device = measure_ceilings(resolve_target("cpu"))
    assert device.ceilings_from == "measured"
    assert 0.5 < device.bandwidth_gbs < 20_000
    assert 0.5 < device.peak_gflops["float64"] < device.peak_gflops["float32"] * 1.5


def test_floor_is_the_larger_of_bandwidth_and_arithmetic() -> None:
    h200 = PRESETS["nvidia/h200"]
    copy_bound = KronMatmul(1024, ((8, 8),) * 4)
    assert floor_us(copy_bound, h200) == pytest.approx(copy_bound.min_bytes / 4280e3)
    flop_bound = KronMatmul(1024, ((128, 128),) * 2)
    assert floor_us(flop_bound, h200) == pytest.approx(flop_bound.flops * 3 / 494_500e3)  # three TF32 products
    double = KronMatmul(1024, ((128, 128),) * 2, "float64")
    assert floor_us(double, h200) == pytest.approx(double.flops / 67_000e3)
    assert floor_us(flop_bound, h200) > flop_bound.min_bytes / 4280e3
    assert roofline_fraction(flop_bound, h200, 2 * floor_us(flop_bound, h200)) == pytest.approx(0.5)


def test_floor_of_a_dtype_without_a_rate_uses_float32() -> None:
    w = KronMatmul(64, ((64, 64),) * 2, "float16")
    assert floor_us(w, CPU) == pytest.approx(w.flops / 9e3)
