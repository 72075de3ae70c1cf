"""Every schedule, put through the schedule contract."""

from __future__ import annotations

from collections.abc import Sequence

from kronsched.workloads.base import Workload
from kronsched.workloads.kron import KronMatmul
from tests.contract.schedule_battery import CudaScheduleBattery, ScheduleBattery

# Ordinary, odd, rectangular and degenerate shapes, few and many rows, every dtype. Small: CUDA schedules run serially here.
KRON = [
    KronMatmul(4, [(8, 8)] * 3),
    KronMatmul(6, [(4, 3), (5, 7), (2, 8)]),
    KronMatmul(1, [(2, 2)] * 12),
    KronMatmul(5, [(33, 17)]),
    KronMatmul(9, [(8, 1)] * 3),
    KronMatmul(9, [(1, 8)] * 3),
    KronMatmul(1, [(1, 1)]),
    KronMatmul(3, [(11, 11), (13, 13)]),
    KronMatmul(2, [(3, 3), (4, 4), (5, 5)], "float64"),
    KronMatmul(67, [(4, 4)] * 2, "float16"),
    KronMatmul(7, [(3, 9), (9, 3), (2, 6), (6, 2)], "bfloat16"),
    KronMatmul(16, [(5, 5)] * 3, "float16"),
    KronMatmul(2, [(1, 1)] * 60 + [(2, 3)] * 4),
]


class TestKronCpu(ScheduleBattery):
    name = "kron_cpu"
    random_configs = 4

    def workloads(self) -> Sequence[Workload]:
        return KRON


class TestKronCudaSimt(CudaScheduleBattery):
    name = "kron_cuda_simt"
    random_configs = 1

    def workloads(self) -> Sequence[Workload]:
        return KRON
