"""The battery of every schedule of Kronecker-sparse products and of their weight gradients."""

from __future__ import annotations

from collections.abc import Sequence

from kronsched.dtypes import DTYPES
from kronsched.workloads.base import Workload
from kronsched.workloads.ks import KSMatmul
from kronsched.workloads.ks_wgrad import KSWeightGrad
from tests.contract.schedule_battery import CudaScheduleBattery, ScheduleBattery
from tests.emulator import run_schedule

LAYOUTS = ("batch_first", "batch_last")
# Both layouts, every dtype, chains, odd and degenerate extents, batches that no tile divides.
KS = [
    *(
        KSMatmul(13, (2, 10, 6, 3), dtype, layout)
        for dtype in ("float32", "float64", "float16", "bfloat16")
        for layout in LAYOUTS
    ),
    *(KSMatmul(37, (1, 17, 33, 20), layout=layout) for layout in LAYOUTS),
    *(KSMatmul(7, (1, 1, 1, 77), layout=layout) for layout in LAYOUTS),
    KSMatmul(1, (2, 40, 30, 4), "float16"),
    KSMatmul(2, (4, 16, 1, 4), "bfloat16", "batch_last"),
    KSMatmul(30, (2, 1, 24, 1)),
    KSMatmul(3, (1, 1, 1, 1)),
    *(KSMatmul(20, [(6, 4, 8, 1), (1, 12, 12, 2)], "float16", layout) for layout in LAYOUTS),
    KSMatmul(9, [(4, 2, 2, 1), (2, 2, 2, 2), (1, 2, 2, 4)]),
]


KS_COMPLEX = [
    KSMatmul(13, (2, 10, 6, 3), "complex64", bias=True, residual=True),
    KSMatmul(9, [(4, 2, 2, 1), (1, 5, 8, 1)], "complex128", "batch_last"),
]


class TestKSCpu(ScheduleBattery):
    name = "ks_cpu"
    quick = 5

    def workloads(self) -> Sequence[Workload]:
        return KS


class TestKSCudaSimt(CudaScheduleBattery):
    name = "ks_cuda_simt"
    quick = 5
    random_configs = 1

    def workloads(self) -> Sequence[Workload]:
        return KS


class TestKSCpuComplex(ScheduleBattery):
    name = "ks_cpu_complex"
    quick = 1
    random_configs = 1

    def workloads(self) -> Sequence[Workload]:
        return KS_COMPLEX


class TestKSCudaComplex(CudaScheduleBattery):
    name = "ks_cuda_complex"
    quick = 1
    random_configs = 1

    def workloads(self) -> Sequence[Workload]:
        return KS_COMPLEX


class TestKSCudaMma(CudaScheduleBattery):
    """A tile program on tensor cores: it runs in the emulator."""

    name = "ks_cuda_mma"
    quick = 4
    random_configs = 1

    def workloads(self) -> Sequence[Workload]:
        return [w for w in KS if self.schedule.supports(w, self.device()) is None]

    def test_computes_the_reference(self, workload: Workload) -> None:
        for config, order in zip(self._configs(workload), ("reverse", "random"), strict=False):
            error = run_schedule(self.schedule, workload, config, self.device(), seed=11, order=order)
            assert error <= DTYPES[workload.output.dtype].tolerance, f"{error:.2g} with {dict(config)}"


class TestKSCudaMmaLast(TestKSCudaMma):
    name = "ks_cuda_mma_last"


class TestKSCudaPair(TestKSCudaMma):
    name = "ks_cuda_pair"
    quick = None

    def workloads(self) -> Sequence[Workload]:
        return [KSMatmul(37, [(2, 8, 16, 1), (1, 8, 16, 1)], "bfloat16")]


class TestKSCudaPairWgmma(TestKSCudaMma):
    name = "ks_cuda_pair_wgmma"
    quick = None

    def workloads(self) -> Sequence[Workload]:
        return [KSMatmul(37, [(2, 8, 16, 1), (1, 8, 16, 1)], "bfloat16", bias=True)]


class TestKSCudaEach(TestKSCudaMma):
    name = "ks_cuda_each"
    quick = None

    def workloads(self) -> Sequence[Workload]:
        return [KSMatmul(37, [(2, 8, 16, 1), (1, 8, 16, 1)], "bfloat16", bias=True, activation="relu")]


class TestKSCudaTma(TestKSCudaMma):
    name = "ks_cuda_tma"
    quick = None

    def workloads(self) -> Sequence[Workload]:
        return [
            KSMatmul(24, (1, 96, 260, 2), "bfloat16", "batch_last"),
            KSMatmul(17, (1, 72, 64, 1), "float16"),
        ]


class TestKSCudaTmaLast(TestKSCudaMma):
    name = "ks_cuda_tma_last"
    quick = None

    def workloads(self) -> Sequence[Workload]:
        return [KSMatmul(24, (1, 72, 52, 2), "bfloat16", "batch_last")]


KS_WGRAD = [
    KSWeightGrad(13, (2, 10, 6, 3)),
    KSWeightGrad(14, (1, 17, 33, 2), "float16", "batch_last"),
    KSWeightGrad(1, (2, 4, 6, 24), "bfloat16"),
]


class TestKSWgradCpu(ScheduleBattery):
    name = "ks_wgrad_cpu"
    quick = 1
    random_configs = 1

    def workloads(self) -> Sequence[Workload]:
        return [*KS_WGRAD, KSWeightGrad(3, (1, 1, 1, 1), "float64", "batch_last")]


class TestKSWgradSimt(TestKSCudaMma):
    name = "ks_wgrad_simt"
    quick = 1

    def workloads(self) -> Sequence[Workload]:
        return [KSWeightGrad(7, (1, 5, 3, 2), "float64"), *KS_WGRAD]


class TestKSWgradMma(TestKSCudaMma):
    name = "ks_wgrad_mma"
    quick = 1

    def workloads(self) -> Sequence[Workload]:
        return KS_WGRAD
