"""Device descriptions for GPUs that need not be present: `--target nvidia/h200` emits, compiles and ranks without one.

Limits are from NVIDIA's CUDA programming guide (compute-capability tables). Rates are 1e9 flop/s (multiply-add = 2), dense, from
the data sheets unless a comment says "measured". A data-sheet bandwidth is scaled by 0.9, the share of it that a copy kernel
reaches on the GPU we measured (H200: 4280 of 4800 GB/s).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from kronsched.hardware.device import Device

_H200 = Device(
    kind="cuda",
    name="NVIDIA H200",
    arch="sm_90a",
    units=132,
    bandwidth_gbs=4280.0,  # measured: device-to-device copy of 1 GB, bytes read plus written
    peak_gflops={
        "float32": 67_000.0,
        "tfloat32": 494_500.0,
        "float64": 67_000.0,  # tensor cores; 34,000 without
        "float16": 790_000.0,  # measured: cuBLAS 4096³; data sheet 990,000
        "bfloat16": 790_000.0,  # as float16
        "float8_e4m3fn": 1_979_000.0,
        "float8_e5m2": 1_979_000.0,
        "int8": 1_979_000.0,
    },
    shared_per_block=232_448,
    shared_per_sm=233_472,
    l2_bytes=62_914_560,
    present=False,
)
_H100 = Device(
    kind="cuda",
    name="NVIDIA H100 80GB HBM3",
    arch="sm_90a",
    units=132,
    bandwidth_gbs=3015.0,  # 0.9 of 3350
    peak_gflops={
        "float32": 67_000.0,
        "tfloat32": 494_500.0,
        "float64": 67_000.0,
        "float16": 990_000.0,
        "bfloat16": 990_000.0,
        "float8_e4m3fn": 1_979_000.0,
        "float8_e5m2": 1_979_000.0,
        "int8": 1_979_000.0,
    },
    shared_per_block=232_448,
    shared_per_sm=233_472,
    l2_bytes=52_428_800,
    present=False,
)
_A100 = Device(
    kind="cuda",
    name="NVIDIA A100-SXM4-80GB",
    arch="sm_80",
    units=108,
    bandwidth_gbs=1835.0,  # 0.9 of 2039; the 40 GB model has 1555
    peak_gflops={
        "float32": 19_500.0,
        "tfloat32": 156_000.0,
        "float64": 19_500.0,  # tensor cores; 9,700 without
        "float16": 312_000.0,
        "bfloat16": 312_000.0,
        "int8": 624_000.0,
        "int4": 1_248_000.0,
        "uint4": 1_248_000.0,
    },
    shared_per_block=166_912,
    shared_per_sm=167_936,
    l2_bytes=41_943_040,
    present=False,
)
_L40S = Device(
    kind="cuda",
    name="NVIDIA L40S",
    arch="sm_89",
    units=142,
    bandwidth_gbs=778.0,  # 0.9 of 864
    peak_gflops={
        "float32": 91_600.0,
        "tfloat32": 183_000.0,
        "float64": 1_430.0,
        "float16": 362_000.0,
        "bfloat16": 362_000.0,
        "float8_e4m3fn": 733_000.0,
        "float8_e5m2": 733_000.0,
        "int8": 733_000.0,
        "int4": 733_000.0,
        "uint4": 733_000.0,
    },
    shared_per_block=101_376,
    shared_per_sm=102_400,
    max_threads_per_sm=1536,
    l2_bytes=100_663_296,
    present=False,
)

PRESETS: Mapping[str, Device] = MappingProxyType(
    {"nvidia/h200": _H200, "nvidia/h100": _H100, "nvidia/a100": _A100, "nvidia/l40s": _L40S}
)
"""Target name -> device. A GPU of this machine with the same name takes its rates from here."""
