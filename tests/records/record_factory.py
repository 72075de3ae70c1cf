"""Made-up but complete records for the tests of `kronsched.records`."""

from __future__ import annotations

from typing import Any

from kronsched import KronMatmul
from kronsched.hardware import Device
from kronsched.records import TuningRecord

H200 = Device("cuda", "NVIDIA H200", "sm_90a", 132, 4800.0, {}, shared_per_block=232448)
A100 = Device("cuda", "NVIDIA A100-SXM4-80GB", "sm_80", 108, 2000.0, {}, shared_per_block=166912)
CPU = Device("cpu", "Xeon 8480", "sapphirerapids", 2, 20.0, {})
OTHER_CPU = Device("cpu", "EPYC 9654", "znver4", 96, 400.0, {})
KRON = KronMatmul(m=64, factors=[(8, 8)] * 4)


def make_record(
    median_us: float = 12.5,
    *,
    workload: KronMatmul = KRON,
    device: Device = H200,
    status: str = "ok",
    config: dict[str, Any] | None = None,
    **fields: Any,
) -> TuningRecord:
    """A record as the tuner writes it."""
    ok = status == "ok"
    data = {
        "workload": workload.to_dict(),
        "target": device.to_dict(),
        "space": {"name": "kron_cuda_simt" if device.kind == "cuda" else "kron_cpu", "digest": "0123456789abcdef"},
        "config": config or {"rows": 2, "groups": "12,34", "pad": True, "share": 0.5},
        "result": {
            "status": status,
            "times_us": [median_us, median_us * 0.99, median_us * 1.01] if ok else [],
            "median_us": median_us if ok else None,
            "max_relative_error": 1e-7 if ok else None,
            "noise": 0.02 if ok else None,
            "energy_j": None,
            "error": None if ok else f"{status}: made up",
        },
        "kernel": {"source_sha256": "ab" * 32, "registers": 64, "shared_bytes": 49152, "spill_bytes": 0},
        "search": {
            "strategy": "random",
            "round": 0,
            "predicted_rank": None,
            "seed": 0,
            "build_seconds": 0.5,
            "run_seconds": 0.25,
        },
        "versions": {"kronsched": "0.1.0"},
        "timestamp": "2025-01-02T03:04:05.678+00:00",
    }
    return TuningRecord(**{**data, **fields})
