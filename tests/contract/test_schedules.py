"""Every schedule, put through the schedule contract."""

from __future__ import annotations

from collections.abc import Sequence

from kronsched.dtypes import DTYPES
from kronsched.workloads.base import Workload
from kronsched.workloads.conv2d import Conv2d
from kronsched.workloads.gemm import Gemm
from kronsched.workloads.kron import KronMatmul
from tests.contract.schedule_battery import CudaScheduleBattery, ScheduleBattery
from tests.emulator import run_schedule

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
    quick = 6
    random_configs = 1

    def workloads(self) -> Sequence[Workload]:
        return KRON


# Odd shapes, ragged edges, every dtype, group size and kind of zero, rows sorted by group. Small: the emulator is slow.
GEMM = [
    Gemm(3, 48, 384),
    Gemm(1, 1, 1),
    Gemm(1, 70, 320, group_size=32, zero_point="asymmetric"),
    Gemm(17, 64, 264, "bfloat16", group_size=64, zero_point="float"),
    Gemm(2, 130, 1000, "bfloat16", group_size=-1, zero_point="asymmetric"),
    Gemm(9, 66, 301, group_size=96, zero_point="float", act_order=True),
    Gemm(40, 64, 512, "bfloat16", group_size=256),
]


class TestGemmW4A16Cpu(ScheduleBattery):
    name = "gemm_w4a16_cpu"

    def workloads(self) -> Sequence[Workload]:
        return GEMM


class TestGemmW4A16Cuda(CudaScheduleBattery):
    """A tile program: it runs in the emulator, the others' serial form being out of reach."""

    name = "gemm_w4a16_cuda"
    quick = 3
    random_configs = 1

    def workloads(self) -> Sequence[Workload]:
        return GEMM

    def test_computes_the_reference(self, workload: Workload) -> None:
        for config, order in zip(self._configs(workload), ("forward", "reverse"), strict=False):
            error = run_schedule(self.schedule, workload, config, self.device(), seed=11, order=order)
            assert error <= DTYPES[workload.output.dtype].tolerance, f"{error:.2g} with {dict(config)}"


class TestGemmW4A16Wgmma(CudaScheduleBattery):
    """A tile program for Hopper: run in the emulator."""

    name = "gemm_w4a16_wgmma"
    random_configs = 1
    quick = 1

    def workloads(self) -> Sequence[Workload]:
        return [
            Gemm(17, 70, 320, group_size=32, zero_point="asymmetric"),
            Gemm(34, 66, 301, "bfloat16", group_size=96, act_order=True),
            Gemm(40, 64, 512, "bfloat16", group_size=256),
            Gemm(130, 130, 264, group_size=-1),
        ]

    def test_computes_the_reference(self, workload: Workload) -> None:
        for config, order in zip(self._configs(workload), ("forward", "reverse"), strict=False):
            error = run_schedule(self.schedule, workload, config, self.device(), seed=11, order=order)
            assert error <= DTYPES[workload.output.dtype].tolerance, f"{error:.2g} with {dict(config)}"


# Odd shapes, ragged edges, every dtype. Rows of k of whole 16 bytes first: TMA needs them.
GEMM_TMA = [
    Gemm(70, 136, 200, "float16", "float16"),
    Gemm(1, 1, 8, "bfloat16", "bfloat16"),
    Gemm(65, 72, 400, "int8", "int8"),
    Gemm(66, 71, 656, "float8_e4m3fn", "float8_e4m3fn"),
]
GEMM_DENSE = [
    *GEMM_TMA[1:],
    Gemm(6, 70, 77, "bfloat16", "bfloat16"),
    Gemm(4, 33, 41, "int8", "int8", out_dtype="int32"),
    Gemm(6, 20, 50, "float8_e5m2", "float8_e5m2", out_dtype="float16"),
]


class TestGemmDenseCpu(ScheduleBattery):
    name = "gemm_dense_cpu"
    random_configs = 1

    def workloads(self) -> Sequence[Workload]:
        return GEMM_DENSE


class TestGemmDenseWgmma(CudaScheduleBattery):
    """TMA and warpgroup tensor cores: run in the emulator."""

    name = "gemm_dense_wgmma"
    random_configs = 1

    def workloads(self) -> Sequence[Workload]:
        return GEMM_TMA

    def test_computes_the_reference(self, workload: Workload) -> None:
        for config, order in zip(self._configs(workload), ("reverse", "random"), strict=False):
            error = run_schedule(self.schedule, workload, config, self.device(), seed=11, order=order)
            assert error <= DTYPES[workload.output.dtype].tolerance, f"{error:.2g} with {dict(config)}"


class TestGemmDenseMma(TestGemmDenseWgmma):
    """Tensor cores by mma.sync."""

    name = "gemm_dense_cuda_mma"

    def workloads(self) -> Sequence[Workload]:
        return GEMM_DENSE


class TestKronCudaMma(CudaScheduleBattery):
    """Tile programs on tensor cores: run in the emulator."""

    name = "kron_cuda_mma"
    quick = 5
    random_configs = 1

    def workloads(self) -> Sequence[Workload]:
        return [w for w in KRON if w.dtype != "float64"]

    def test_computes_the_reference(self, workload: Workload) -> None:
        for config, order in zip(self._configs(workload), ("reverse", "random"), strict=False):
            error = run_schedule(self.schedule, workload, config, self.device(), seed=11, order=order)
            assert error <= DTYPES[workload.output.dtype].tolerance, f"{error:.2g} with {dict(config)}"


# float16 16x16^4 is not here: on sm_80 its default config spills a few registers. tests/schedules/test_kron_cuda_chain.py has it.
CHAIN = [
    KronMatmul(5, [(8, 8)] * 3, "float16"),
    KronMatmul(3, [(8, 8)] * 4, "bfloat16"),
    KronMatmul(1, [(8, 8)] * 5, "float16"),
    KronMatmul(3, [(16, 16)] * 3, "bfloat16"),
    KronMatmul(3, [(8, 8)] * 4),
    KronMatmul(1, [(8, 8)] * 5),
    KronMatmul(2, [(4, 4)] * 7),
    KronMatmul(1, [(2, 2)] * 12),
]


class TestKronCudaChain(CudaScheduleBattery):
    """Tile programs on registers: run in the emulator."""

    name = "kron_cuda_chain"
    quick = 4
    random_configs = 1

    def workloads(self) -> Sequence[Workload]:
        return CHAIN

    def test_computes_the_reference(self, workload: Workload) -> None:
        for config, order in zip(self._configs(workload), ("reverse", "random"), strict=False):
            error = run_schedule(self.schedule, workload, config, self.device(), seed=11, order=order)
            assert error <= DTYPES[workload.output.dtype].tolerance, f"{error:.2g} with {dict(config)}"


class TestKronCudaTf32(TestKronCudaChain):
    name = "kron_cuda_tf32"
    quick = 1

    def workloads(self) -> Sequence[Workload]:
        return [KronMatmul(1, [(8, 8)] * 5)]


class TestKronCudaLong(TestKronCudaChain):
    name = "kron_cuda_long"
    quick = 1

    def workloads(self) -> Sequence[Workload]:
        return [KronMatmul(1, [(4, 4)] * 8, "float16"), KronMatmul(1, [(2, 2)] * 14)]


class TestKronCudaSlab(CudaScheduleBattery):
    """Tile programs on warpgroup tensor cores: run in the emulator."""

    name = "kron_cuda_slab"
    random_configs = 1

    def workloads(self) -> Sequence[Workload]:
        return [KronMatmul(3, [(64, 64)] * 2, "bfloat16"), KronMatmul(1, [(8, 8)] * 6, "float16")]

    def test_computes_the_reference(self, workload: Workload) -> None:
        for config, order in zip(self._configs(workload), ("reverse", "random"), strict=False):
            error = run_schedule(self.schedule, workload, config, self.device(), seed=11, order=order)
            assert error <= DTYPES[workload.output.dtype].tolerance, f"{error:.2g} with {dict(config)}"


class TestKronCudaWgmma(CudaScheduleBattery):
    """Tile programs on warpgroup tensor cores: run in the emulator."""

    name = "kron_cuda_wgmma"
    random_configs = 1

    def workloads(self) -> Sequence[Workload]:
        return [KronMatmul(3, [(64, 64)] * 2), KronMatmul(1, [(64, 64), (128, 128)])]

    def test_computes_the_reference(self, workload: Workload) -> None:
        for config, order in zip(self._configs(workload), ("reverse", "random"), strict=False):
            error = run_schedule(self.schedule, workload, config, self.device(), seed=11, order=order)
            assert error <= DTYPES[workload.output.dtype].tolerance, f"{error:.2g} with {dict(config)}"


EVERYTHING = {"has_bias": True, "has_residual": True, "relu": True}
# Odd, padded, strided and dilated shapes, channels that are no multiple of anything, every dtype and part of the epilogue.
CONV = [
    Conv2d(1, 7, 5, 3, 10, 3, stride=2, padding=1),
    Conv2d(2, 9, 9, 48, 40, 3, stride=2, padding=1, **EVERYTHING),
    Conv2d(2, 1, 1, 512, 100, 1),
    Conv2d(1, 8, 8, 64, 64, 3, out_dtype="int32", **EVERYTHING),
    Conv2d(1, 8, 8, 72, 70, (3, 1), padding=(1, 0), dilation=2, in_dtype="float16", has_scale=True, **EVERYTHING),
    Conv2d(1, 8, 8, 20, 64, 3, padding=(0, 1), in_dtype="bfloat16"),
    Conv2d(1, 8, 8, 64, 72, 1, stride=2, in_dtype="float8_e5m2", out_dtype="bfloat16", has_scale=True),
    Conv2d(1, 6, 6, 16, 16, 3, in_dtype="float8_e4m3fn", has_bias=True, relu=True),
]
GROUPED = [
    Conv2d(2, 7, 6, 12, 8, 3, padding=1, groups=4, in_dtype="float16"),
    Conv2d(1, 7, 6, 16, 16, 3, stride=2, groups=16, has_bias=True),
    Conv2d(1, 5, 5, 4, 8, 3, padding=1, groups=4, in_dtype="bfloat16", **EVERYTHING),
]


IN_BLOCKS = [
    Conv2d(8, 5, 5, 64, 32, 3, padding=1, layout="NHWCnc", has_bias=True),
    Conv2d(16, 5, 4, 32, 48, 3, stride=2, padding=1, in_dtype="float16", layout="NHWCnc"),
]
FOUR_BIT = [
    Conv2d(2, 6, 7, 32, 64, 3, padding=1, in_dtype="int4"),
    Conv2d(1, 6, 7, 6, 22, 3, stride=2, padding=1, in_dtype="uint4", has_bias=True, relu=True),
    Conv2d(1, 7, 6, 34, 20, 1, in_dtype="uint4", out_dtype="int32", has_bias=True),
]


class TestConv2dCpu(ScheduleBattery):
    name = "conv2d_cpu"
    random_configs = 1

    def workloads(self) -> Sequence[Workload]:
        return CONV + GROUPED + FOUR_BIT[1:2]


class TestConv2dCudaSimt(CudaScheduleBattery):
    name = "conv2d_cuda_simt"
    random_configs = 1

    def workloads(self) -> Sequence[Workload]:
        return CONV + GROUPED + FOUR_BIT[1:2]


class TestConv2dCudaMma(CudaScheduleBattery):
    """A tile program on tensor cores: it runs in the emulator."""

    name = "conv2d_cuda_mma"
    quick = 5
    random_configs = 1

    def workloads(self) -> Sequence[Workload]:
        return CONV + IN_BLOCKS

    def test_computes_the_reference(self, workload: Workload) -> None:
        for config, order in zip(self._configs(workload), ("reverse", "random"), strict=False):
            error = run_schedule(self.schedule, workload, config, self.device(), seed=11, order=order)
            assert error <= DTYPES[workload.output.dtype].tolerance, f"{error:.2g} with {dict(config)}"


class TestConv2dCudaInt4(TestConv2dCudaMma):
    name = "conv2d_cuda_int4"
    quick = 1

    def workloads(self) -> Sequence[Workload]:
        return FOUR_BIT


class TestConv2dInt4Wgmma(TestConv2dCudaInt4):
    name = "conv2d_int4_wgmma"


class TestGemmInt4Cuda(TestConv2dCudaMma):
    name = "gemm_int4_cuda"
    quick = 1

    def workloads(self) -> Sequence[Workload]:
        return [Gemm(70, 40, 136, "int4", "int4"), Gemm(3, 18, 34, "int4", "int4")]


class TestGemmInt4Wgmma(TestGemmInt4Cuda):
    name = "gemm_int4_wgmma"

    def workloads(self) -> Sequence[Workload]:
        return [Gemm(70, 41, 136, "int4", "int4"), Gemm(3, 18, 34, "int4", "int4")]


class TestConv2dCudaWgmma(TestConv2dCudaMma):
    name = "conv2d_cuda_wgmma"

    def workloads(self) -> Sequence[Workload]:
        return CONV


class TestConv2dCudaWindow(TestConv2dCudaMma):
    name = "conv2d_cuda_window"
    quick = 1

    def workloads(self) -> Sequence[Workload]:
        return [
            Conv2d(2, 9, 9, 64, 48, 3, padding=1, has_bias=True, relu=True),
            Conv2d(1, 8, 8, 32, 80, (3, 1), padding=(1, 0), dilation=2, in_dtype="float16", has_scale=True, has_bias=True),
        ]


class TestConv2dCudaTma(TestConv2dCudaMma):
    name = "conv2d_cuda_tma"
    quick = 2

    def workloads(self) -> Sequence[Workload]:
        return [
            Conv2d(2, 9, 9, 64, 48, 3, stride=2, padding=1, **EVERYTHING),
            Conv2d(2, 1, 1, 512, 112, 1),
            Conv2d(1, 8, 8, 32, 80, (3, 1), padding=(1, 0), dilation=2, in_dtype="float16", has_scale=True, **EVERYTHING),
            Conv2d(1, 8, 8, 64, 64, 3, padding=(0, 1), in_dtype="bfloat16"),
            Conv2d(1, 8, 8, 64, 96, 1, stride=2, in_dtype="float8_e5m2", out_dtype="bfloat16", has_scale=True),
        ]
