from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kronsched.errors import ArgumentError, UnsupportedError
from kronsched.hardware import PRESETS, cuda_driver, query, resolve_target
from kronsched.hardware.cpu import cache_bytes, cores, cpu_arch, cpu_name

V3 = "avx avx2 bmi1 bmi2 f16c fma abm movbe"
V2 = "cx16 lahf_lm popcnt sse4_1 sse4_2 ssse3"
V4 = "avx512f avx512bw avx512cd avx512dq avx512vl"
H200 = {
    "max_threads_per_block": 1024,
    "warp_size": 32,
    "units": 132,
    "l2_bytes": 62_914_560,
    "max_threads_per_sm": 2048,
    "major": 9,
    "minor": 0,
    "shared_per_sm": 233_472,
    "registers_per_sm": 65_536,
    "shared_per_block": 232_448,
}


def have(monkeypatch: pytest.MonkeyPatch, *gpus: cuda_driver.GpuInfo, torch_version: str = "2.13.0") -> None:
    monkeypatch.setattr(cuda_driver, "gpus", lambda: gpus)
    monkeypatch.setattr(cuda_driver, "driver_version", lambda: "580.1")
    monkeypatch.setattr(query, "version", lambda name: torch_version)


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_presets_are_whole(name: str) -> None:
    device = resolve_target(name)
    assert device.kind == "cuda" and not device.present and device.ceilings_from == "preset"
    assert device.shared_per_block < device.shared_per_sm and device.units > 0 and device.l2_bytes > 0
    assert {"float32", "float64", "float16", "bfloat16", "int8"} <= set(device.peak_gflops)
    assert min(device.peak_gflops.values()) > 1000


def test_h200_preset_has_the_real_shared_memory() -> None:
    h200 = PRESETS["nvidia/h200"]
    assert (h200.arch, h200.units, h200.shared_per_block, h200.bandwidth_gbs) == ("sm_90a", 132, 232_448, 4280.0)


@pytest.mark.parametrize("target", ["gpu", "", "nvidia/h300", "cuda:x", "cuda:", "CPU", None, 3])
def test_unknown_target_lists_what_is_allowed(target: object) -> None:
    with pytest.raises(ArgumentError, match=r"target=.* is not allowed: choose one of auto, cpu, cuda, cuda:N, nvidia/h200"):
        resolve_target(target)  # type: ignore[arg-type]


def test_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    have(monkeypatch)
    assert resolve_target("auto").kind == "cpu"
    with pytest.raises(UnsupportedError, match="no CUDA GPU"):
        resolve_target("cuda")


def test_a_known_gpu_takes_its_rates_from_the_preset(monkeypatch: pytest.MonkeyPatch) -> None:
    have(monkeypatch, cuda_driver.GpuInfo("NVIDIA H200", H200))
    device = resolve_target("auto")
    preset = PRESETS["nvidia/h200"]
    assert (device.kind, device.name, device.arch, device.index, device.present) == ("cuda", "NVIDIA H200", "sm_90a", 0, True)
    assert (device.bandwidth_gbs, device.peak_gflops, device.ceilings_from) == (4280.0, preset.peak_gflops, "preset")
    assert (device.shared_per_block, device.l2_bytes, device.driver) == (232_448, 62_914_560, "580.1")


def test_an_unknown_gpu_is_an_estimate_to_be_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    other = cuda_driver.GpuInfo("NVIDIA Other", {**H200, "major": 8, "minor": 6})
    have(monkeypatch, cuda_driver.GpuInfo("NVIDIA H200", H200), other)
    device = resolve_target("cuda:1")
    assert (device.name, device.arch, device.torch_device) == ("NVIDIA Other", "sm_86", "cuda:1")
    assert device.ceilings_from == "estimate" and device.bandwidth_gbs > 0
    with pytest.raises(UnsupportedError, match=r"cuda:2.*2 CUDA GPU"):
        resolve_target("cuda:2")


def test_a_cpu_only_torch_cannot_use_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    have(monkeypatch, cuda_driver.GpuInfo("NVIDIA H200", H200), torch_version="2.13.0+cpu")
    assert resolve_target("auto").kind == "cpu"
    with pytest.raises(UnsupportedError, match="CPU-only build"):
        resolve_target("cuda")


@pytest.mark.parametrize(
    ("flags", "machine", "expected"),
    [
        (f"{V2} {V3} {V4}", "x86_64", ("x86-64-v4", 64)),
        (f"{V2} {V3} {V4}".replace("avx512bw", ""), "x86_64", ("x86-64-v3", 32)),  # a hypervisor masks one: never use AVX-512
        (f"{V2} {V4}", "x86_64", ("x86-64-v2", 16)),
        ("sse2", "AMD64", ("x86-64", 16)),
        ("", "aarch64", ("generic", 16)),
    ],
)
def test_cpu_arch_needs_every_flag_of_the_level(tmp_path: Path, flags: str, machine: str, expected: tuple[str, int]) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text(f"processor\t: 0\nmodel name\t: Some CPU @ 2GHz\nflags\t\t: {flags}\n\nprocessor\t: 1\nmodel name\t: Other\n")
    assert cpu_arch(info, machine) == expected
    assert cpu_name(info) == "Some CPU @ 2GHz"


def test_cpu_without_proc(tmp_path: Path) -> None:
    assert cpu_name(tmp_path / "none")
    assert cpu_arch(tmp_path / "none", "x86_64") == ("x86-64", 16)
    assert cache_bytes(3, tmp_path) == 0


def test_cache_bytes_skips_instruction_caches(tmp_path: Path) -> None:
    for index, (level, kind, size) in enumerate([(1, "Instruction", "64K"), (1, "Data", "32K"), (3, "Unified", "32768K")]):
        folder = tmp_path / f"index{index}"
        folder.mkdir()
        for name, text in (("level", level), ("type", kind), ("size", size)):
            (folder / name).write_text(f"{text}\n")
    assert cache_bytes(1, tmp_path) == 32 << 10 and cache_bytes(3, tmp_path) == 32 << 20 and cache_bytes(2, tmp_path) == 0


def test_this_cpu() -> None:
    device = resolve_target("cpu")
    assert device.kind == "cpu" and device.units == cores() >= 1 and device.present
    assert device.tvm_target().kind.name == "llvm"


def test_query_imports_neither_torch_nor_tvm() -> None:
    code = (
        "import sys; from kronsched.hardware import resolve_target; resolve_target('cpu'); resolve_target('nvidia/h200');"
        "print([m for m in ('torch', 'tvm', 'numpy') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"


def test_every_preset_crosses_process_borders() -> None:
    """Devices are sent to worker processes with each candidate."""
    import pickle

    from kronsched.hardware.presets import PRESETS

    for device in PRESETS.values():
        assert pickle.loads(pickle.dumps(device)) == device
