"""Turns a target name into a `Device`. Imports neither torch nor TVM."""

from __future__ import annotations

import re
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version

from kronsched.errors import UnsupportedError, choose
from kronsched.hardware import cuda_driver
from kronsched.hardware.ceilings import with_known_ceilings
from kronsched.hardware.cpu import cache_bytes, cores, cpu_arch, cpu_name
from kronsched.hardware.device import Device
from kronsched.hardware.presets import PRESETS


def resolve_target(target: str = "auto") -> Device:
    """The device a target name means.

    target: "auto" (the first CUDA GPU when there is one that torch can use, else this CPU), "cpu", "cuda", "cuda:N", or a
    preset such as "nvidia/h200", which needs no GPU. Raises ArgumentError for another name and UnsupportedError for a GPU
    that is not there. The rates of a device that is neither a preset nor measured before are rough estimates until
    `measure_ceilings`.
    """
    if isinstance(target, str):
        if target in PRESETS:
            return PRESETS[target]
        if target == "cpu":
            return _cpu()
        if target == "auto":
            return _cuda(0) if cuda_driver.gpus() and _torch_has_cuda() else _cpu()
        if match := re.fullmatch(r"cuda(?::(\d{1,4}))?", target):
            return _cuda(int(match[1] or 0))
    raise choose("target", target, ["auto", "cpu", "cuda", "cuda:N", *PRESETS])


def _torch_has_cuda() -> bool:
    """False for a torch wheel that says it is CPU-only; told without importing torch."""
    try:
        return not version("torch").endswith("+cpu")
    except PackageNotFoundError:
        return False


def _cpu() -> Device:
    arch, width = cpu_arch()
    units = cores()
    # Order-of-magnitude figures, replaced by measured ones; they keep divisions by a rate sane until then.
    lane_rate = units * 2 * 2 * 2.5  # two FMA pipes, 2 flops each, 2.5 GHz
    f32 = lane_rate * width / 4
    device = Device(
        kind="cpu",
        name=cpu_name(),
        arch=arch,
        units=units,
        bandwidth_gbs=10.0 * units,
        peak_gflops={"float32": f32, "float64": f32 / 2, "float16": f32, "bfloat16": f32, "int8": f32},
        l2_bytes=cache_bytes(2),
        vector_bytes=width,
        ceilings_from="estimate",
        extra={"l3_bytes": cache_bytes(3)},
    )
    return with_known_ceilings(device)


def _cuda(index: int) -> Device:
    found = cuda_driver.gpus()
    if not found:
        raise UnsupportedError(f"target='{'cuda' if index == 0 else f'cuda:{index}'}': no CUDA GPU was found on this machine")
    if index >= len(found):
        raise UnsupportedError(
            f"target='cuda:{index}': this machine has {len(found)} CUDA GPU(s), cuda:0 to cuda:{len(found) - 1}"
        )
    if not _torch_has_cuda():
        raise UnsupportedError(f"target='cuda:{index}': the installed torch is a CPU-only build; install one with CUDA")
    gpu = found[index]
    a = gpu.attributes
    # sm_90a, not sm_90: ptxas rejects wgmma and setmaxnreg without the suffix.
    arch = f"sm_{a['major']}{a['minor']}" + ("a" if a["major"] >= 9 else "")
    cores_per_sm, ghz = 128, 1.5
    f32 = a["units"] * cores_per_sm * 2 * ghz
    device = Device(
        kind="cuda",
        name=gpu.name,
        arch=arch,
        units=a["units"],
        bandwidth_gbs=500.0,
        peak_gflops={"float32": f32, "float64": f32 / 2, "float16": 4 * f32, "bfloat16": 4 * f32, "int8": 8 * f32},
        shared_per_block=a["shared_per_block"],
        shared_per_sm=a["shared_per_sm"],
        registers_per_sm=a["registers_per_sm"],
        max_threads_per_block=a["max_threads_per_block"],
        max_threads_per_sm=a["max_threads_per_sm"],
        warp_size=a["warp_size"],
        l2_bytes=a["l2_bytes"],
        driver=cuda_driver.driver_version(),
        index=index,
        ceilings_from="estimate",
    )
    for preset in PRESETS.values():
        if preset.name == gpu.name:
            return replace(device, bandwidth_gbs=preset.bandwidth_gbs, peak_gflops=preset.peak_gflops, ceilings_from="preset")
    return with_known_ceilings(device)
