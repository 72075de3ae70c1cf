"""The emulator agrees with the reference on kernels that are right, and finds each fault it is there for."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from kronsched import hardware, registry
from kronsched.dtypes import DTYPES
from kronsched.errors import ArgumentError
from kronsched.runtime.lower import Lowered
from kronsched.runtime.manifest import LaunchSpec
from kronsched.workloads.kron import KronMatmul
from tests.emulator import ORDERS, EmulatorError, build, run_lowered, run_schedule
from tests.emulator.kernels import MMA_SOURCE, SOURCE, WGMMA_SOURCE, WGMMA_WAIT

pytestmark = pytest.mark.skipif(build.available() is not None, reason=str(build.available()))
H200 = hardware.PRESETS["nvidia/h200"]
A = np.arange(1, 65, dtype=np.int32) * 3


def run(name: str, order: str = "forward") -> np.ndarray[Any, Any]:
    """y of a kernel of kernels.py on A."""
    spec = LaunchSpec(name, ("a", "y"), ((64,), (64,)), block=(64, 1, 1), shared_bytes=1024, dtypes=("int32", "int32"))
    y = np.full(64, -1, np.int32)
    run_lowered(Lowered(SOURCE, "", (spec,), (), None), {"a": A.copy(), "y": y}, order=order)
    return y


def wrong_orders(name: str, expected: np.ndarray[Any, Any]) -> list[str]:
    return [order for order in ORDERS if not np.array_equal(run(name, order), expected)]


# -- schedules ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("m", "factors", "dtype"),
    [
        (3, ((8, 8), (8, 8), (4, 6)), "float32"),
        (3, ((8, 8), (8, 8), (4, 6)), "float16"),
        (5, ((4, 3), (7, 5)), "bfloat16"),
        (2, ((16, 16), (3, 5)), "float64"),
        (2, ((8, 8),) * 4, "float32"),
    ],
)
def test_simt_schedule_is_right(m: int, factors: tuple[tuple[int, int], ...], dtype: str) -> None:
    workload, schedule = KronMatmul(m, factors, dtype), registry.schedule("kron_cuda_simt")
    config = schedule.default_config(workload, H200)
    for order in ORDERS:
        assert run_schedule(schedule, workload, config, H200, order=order) <= DTYPES[dtype].tolerance


def test_a_kernel_with_its_barriers_removed_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.emulator import run as module

    workload, schedule = KronMatmul(3, ((8, 8), (8, 8), (4, 6)), "float32"), registry.schedule("kron_cuda_simt")
    real = module.lower

    def without_barriers(*args: Any) -> Lowered:
        lowered = real(*args)
        assert "__syncthreads();" in lowered.source
        source = lowered.source.replace("__syncthreads();", "")
        return Lowered(source, hashlib.sha256(source.encode()).hexdigest(), lowered.launches, lowered.scratch, None)

    monkeypatch.setattr(module, "lower", without_barriers)
    config = schedule.default_config(workload, H200)
    assert max(run_schedule(schedule, workload, config, H200, order=o) for o in ORDERS) > DTYPES["float32"].tolerance


# -- barriers and asynchronous copies ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("reverse_right", A[::-1]),
        ("rewrite_right", -np.roll(A, -1)),
        ("warp_exchange", A.reshape(2, 32)[:, ::-1].reshape(-1)),
        ("named_barrier", A.reshape(2, 32)[:, ::-1].reshape(-1)),
        ("exit_early", np.where(np.arange(64) < 32, A, -1)),
        ("async_right", A),
        ("async_zero_fill", np.where(np.arange(64) % 2, A, 0)),
        ("async_predicated", np.where(np.arange(64) % 2, A, 0)),
        ("static_shared", A[::-1]),
        ("bulk", A[::-1]),
    ],
)
def test_right_kernels_are_right_in_every_order(name: str, expected: np.ndarray[Any, Any]) -> None:
    assert wrong_orders(name, expected) == []


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("reverse_no_sync", A[::-1]),
        ("rewrite_no_sync", -np.roll(A, -1)),
        ("warp_exchange_no_sync", A.reshape(2, 32)[:, ::-1].reshape(-1)),
    ],
)
def test_a_missing_barrier_is_wrong_in_some_order(name: str, expected: np.ndarray[Any, Any]) -> None:
    assert wrong_orders(name, expected)


@pytest.mark.parametrize(("name", "expected"), [("async_no_wait", A), ("async_wait_too_few", A), ("async_too_early", A[::-1])])
def test_a_missing_wait_is_wrong_in_every_order(name: str, expected: np.ndarray[Any, Any]) -> None:
    assert wrong_orders(name, expected) == list(ORDERS)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("past_end", "byte 256 of y, which has 256 bytes"),
        ("before_start", "before the start of y"),
        ("far_away", "out-of-bounds access"),
        ("ptx_past_end", r"ld\.global\.nc\.b32 of 4 bytes at byte 256 of a, which has 256 bytes"),
        ("shared_past_end", "past the end of its 1024 bytes of dynamic shared memory"),
        ("ptx_shared_past_end", r"st\.shared\.b32 of 4 bytes at byte 1024 of 1024"),
        ("local_index", "index 4 is out of bounds"),
        ("ptx_misaligned", r"misaligned access: ld\.global\.v4\.b32"),
        ("misaligned", "misaligned access: .*int4"),
        ("async_misaligned", r"misaligned access: cp\.async\.cg\.shared\.global"),
        ("barrier_short", r"deadlock: thread 0 waits at bar\.sync"),
        ("diverged", "diverged"),
        ("divide_by_zero", "integer division by zero"),
    ],
)
def test_a_fault_is_an_error_that_names_it(name: str, message: str) -> None:
    with pytest.raises(EmulatorError, match=message):
        run(name)
    assert np.array_equal(run("reverse_right"), A[::-1])  # the emulator is usable after it


def test_shuffles_and_votes() -> None:
    lanes = A.reshape(2, 32).astype(np.int64)
    up, across = np.concatenate([lanes[:, :1], lanes[:, :-1]], 1), lanes[:, np.arange(32) ^ 16]
    one, votes = lanes[:, np.arange(32) // 8 * 8 + 3], (lanes & 1).sum(1, keepdims=True)
    expected = (up + 1000 * across + 1000000 * one + 100000000 * votes).reshape(-1).astype(np.int32)
    assert wrong_orders("shuffles", expected) == []


# -- tensor cores -------------------------------------------------------------------------------------


def _mma(name: str, a: np.ndarray[Any, Any], b: np.ndarray[Any, Any], out: type) -> np.ndarray[Any, Any]:
    d = np.zeros((16, 8), out)
    kinds = ("uint16", "uint16") if "f16" in name else (str(a.dtype), str(b.dtype))
    spec = LaunchSpec(name, ("a", "b", "d"), (a.shape, b.shape, d.shape), block=(32, 1, 1), dtypes=(*kinds, str(d.dtype)))
    run_lowered(Lowered(MMA_SOURCE, "", (spec,), (), None), {"a": a, "b": b, "d": d}, order="random")
    return d


@pytest.mark.parametrize(("name", "dtype"), [("mma_f16", np.float16), ("mma_bf16", ml_dtypes.bfloat16)])
def test_ldmatrix_and_mma_of_16_bits(name: str, dtype: type) -> None:
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((16, 16)).astype(dtype), rng.standard_normal((16, 8)).astype(dtype)
    expected = a.astype(np.float64) @ b.astype(np.float64) + 1
    assert np.allclose(_mma(name, a, b, np.float32), expected, rtol=0, atol=1e-5)


def test_mma_of_tf32_ignores_the_low_bits() -> None:
    rng = np.random.default_rng(1)
    a, b = rng.standard_normal((16, 8)).astype(np.float32), rng.standard_normal((8, 8)).astype(np.float32)
    cut = [(v.view(np.uint32) & 0xFFFFE000).view(np.float32).astype(np.float64) for v in (a, b)]
    d = _mma("mma_tf32", a, b, np.float32)
    assert np.allclose(d, cut[0] @ cut[1], rtol=0, atol=1e-5)
    assert not np.allclose(d, a @ b, rtol=0, atol=1e-5)


def test_mma_of_int8_is_exact() -> None:
    rng = np.random.default_rng(2)
    a, b = rng.integers(-128, 128, (16, 32)).astype(np.int8), rng.integers(-128, 128, (32, 8)).astype(np.int8)
    assert np.array_equal(_mma("mma_s8", a, b, np.int32), a.astype(np.int32) @ b.astype(np.int32))


@pytest.mark.parametrize(("name", "low"), [("mma_s4", -8), ("mma_u4", 0)])
def test_mma_of_four_bits_is_exact(name: str, low: int) -> None:
    rng = np.random.default_rng(3)
    a, b = rng.integers(low, low + 16, (16, 64)).astype(np.int8), rng.integers(-8, 8, (64, 8)).astype(np.int8)
    assert np.array_equal(_mma(name, a, b, np.int32), a.astype(np.int32) @ b.astype(np.int32))


@pytest.mark.parametrize("waits", [True, False])
def test_wgmma_of_swizzled_operands(waits: bool) -> None:
    rng = np.random.default_rng(3)
    a, b = rng.standard_normal((64, 64)).astype(np.float16), rng.standard_normal((8, 64)).astype(np.float16)
    d = np.zeros((64, 8), np.float32)
    kinds = ("uint16", "uint16", "float32")
    spec = LaunchSpec(
        "wgmma_f16", ("a", "b", "d"), (a.shape, b.shape, d.shape), block=(128, 1, 1), shared_bytes=9216, dtypes=kinds
    )
    lowered = Lowered(WGMMA_SOURCE.replace("WAIT", WGMMA_WAIT if waits else ""), "", (spec,), (), None)
    if not waits:
        with pytest.raises(EmulatorError, match="not waited for"):
            run_lowered(lowered, {"a": a, "b": b, "d": d})
        return
    run_lowered(lowered, {"a": a, "b": b, "d": d}, order="random")
    assert np.allclose(d, -(a.astype(np.float64) @ b.astype(np.float64).T), rtol=0, atol=1e-4)


# -- the front -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "instruction",
    [
        "wgmma.mma_async.sync.aligned.m64n8k8.f32.f16.f16 {%0}, {%0}, %0, 1, 1, 1;",
        "ld.global.v4.b32.unheard [%0];",
        "cvt.rz.f16x2.f32 %0, %0, %0;",
        "barrier.cluster.arrive.unheard;",
        "mma.sync.aligned.m16n8k16.row.col.f16.bf16.bf16.f16 {%0}, {%0}, {%0}, {%0};",
    ],
)
def test_an_unknown_instruction_is_refused_by_name(instruction: str) -> None:
    source = f'extern "C" __global__ void k(int* y) {{ int v; asm volatile("{instruction}" : "=r"(v)); y[0] = v; }}'
    spec = LaunchSpec("k", ("y",), ((1,),), dtypes=("int32",))
    with pytest.raises(EmulatorError, match=instruction.split(" ")[0].rstrip(";").replace(".", r"\.")):
        run_lowered(Lowered(source, "", (spec,), (), None), {"y": np.zeros(1, np.int32)})


def test_wrong_arguments_are_refused() -> None:
    spec = LaunchSpec("reverse_right", ("a", "y"), ((64,), (64,)), block=(64, 1, 1), dtypes=("int32", "int32"))
    lowered = Lowered(SOURCE, "", (spec,), (), None)
    with pytest.raises(EmulatorError, match="needs a tensor 'y'"):
        run_lowered(lowered, {"a": A.copy()})
    with pytest.raises(EmulatorError, match="'y': 256 contiguous bytes are needed"):
        run_lowered(lowered, {"a": A.copy(), "y": np.zeros(63, np.int32)})
    with pytest.raises(ArgumentError, match="order='up' is not allowed: choose one of forward, reverse, random"):
        run_lowered(lowered, {"a": A.copy(), "y": A.copy()}, order="up")


def test_command_prints_the_error_of_every_order() -> None:
    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", "tests.emulator", "kron", "--m", "2", "--factors", "4x4,4x4", "--schedule", "kron_cuda_simt"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=root, env=dict(os.environ), timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    assert [line.split(":")[0] for line in done.stdout.splitlines()[1:]] == list(ORDERS)
    refused = subprocess.run(
        [*command[:-1], "none"], capture_output=True, text=True, cwd=root, env=dict(os.environ), timeout=200, check=False
    )
    assert refused.returncode == 1 and "space='none' is not allowed" in refused.stderr
