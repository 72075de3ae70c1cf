"""CUDA source -> cubin, without a GPU."""

from __future__ import annotations

import importlib.util
import re
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from kronsched import KronMatmul, registry
from kronsched.errors import ArgumentError, CompileError, UnsupportedError
from kronsched.runtime import nvrtc
from kronsched.runtime.lower import lower
from kronsched.workloads.conv2d import Conv2d
from tests.runtime.runtime_toys import H200, OneKernel, TwoStagesCuda, W

SPILLS = """
extern "C" __global__ void __launch_bounds__(1024, 2) spills(const float* __restrict__ x, float* __restrict__ y) {
  float r[96];
  for (int i = 0; i < 96; ++i) r[i] = x[i * 1024 + threadIdx.x];
  for (int k = 0; k < 96; ++k) {
    float s = 0;
    #pragma unroll
    for (int i = 0; i < 96; ++i) { r[i] = r[i] * s + r[(i * 7 + 3) % 96]; s += r[i]; }
    y[k * 1024 + threadIdx.x] = s;
  }
}
extern "C" __global__ void tiny(float* y) { __shared__ float s[64]; s[threadIdx.x] = y[0]; __syncthreads(); y[1] = s[5]; }
"""


@pytest.fixture(scope="module")
def source() -> str:
    return lower(W, TwoStagesCuda(), {}, H200).source


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_compiles_for_both_architectures(source: str, arch: str) -> None:
    cubin = nvrtc.compile_cuda(source, arch)
    assert cubin.image[:4] == b"\x7fELF"
    assert set(cubin.registers) == set(cubin.spill_bytes) == set(cubin.static_shared) == {"first_kernel", "second_kernel"}
    assert all(0 < n < 64 for n in cubin.registers.values())
    assert set(cubin.spill_bytes.values()) == {0}
    assert re.fullmatch(r"nvrtc \d+\.\d+", cubin.compiler)


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
def test_slim_preamble_gives_the_same_kernel_sooner(dtype: str) -> None:
    full = lower(KronMatmul(m=32, factors=[(32, 32)], dtype=dtype), OneKernel(), {"threads": 32, "stage": True}, H200).source
    slim = nvrtc.slim_preamble(full)
    assert slim is not None
    assert "cuda/std" not in slim.split("main_kernel")[0]
    nvrtc._nvrtc(slim, "sm_90a")  # loads the library
    start = time.perf_counter()
    a = nvrtc._nvrtc(slim, "sm_90a")
    middle = time.perf_counter()
    b = nvrtc._nvrtc(full, "sm_90a")
    end = time.perf_counter()
    assert (a.registers, a.spill_bytes, a.static_shared) == (b.registers, b.spill_bytes, b.static_shared)
    assert middle - start < end - middle


def test_source_that_needs_the_full_preamble_gets_it(source: str) -> None:
    traits = source + "static_assert(std::is_same<int, int>::value);\n"
    assert nvrtc.slim_preamble(traits) is None
    assert nvrtc.compile_cuda(traits, "sm_90a").registers
    limits = source + "__device__ int largest() { return INT32_MAX; }\n"
    slim = nvrtc.slim_preamble(limits)
    assert slim is not None
    with pytest.raises(CompileError, match="INT32_MAX"):
        nvrtc._nvrtc(slim, "sm_90a")
    assert nvrtc.compile_cuda(limits, "sm_90a").registers  # the first attempt failed, the second had libcu++


def test_the_preamble_of_8_bit_floats_compiles_without_libcudacxx(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    conv = Conv2d(1, 7, 5, 3, 10, (3, 3), (2, 2), (1, 1), in_dtype="float8_e4m3fn", out_dtype="float16")
    schedule = registry.schedule("conv2d_cuda_simt")
    full = lower(conv, schedule, schedule.default_config(conv, H200), H200).source
    assert "std::is_same_v<" in full
    include = tmp_path / "include"  # the CUDA headers but libcu++
    include.mkdir()
    for header in Path(nvrtc.include_dirs()[0]).iterdir():
        if header.name != "cccl":
            (include / header.name).symlink_to(header)
    monkeypatch.setattr(nvrtc, "include_dirs", lambda: (str(include),))
    assert nvrtc.compile_cuda(full, "sm_90a").registers
    with pytest.raises(CompileError, match="cstdint"):
        nvrtc._nvrtc(full, "sm_90a")


def test_slim_typedefs_are_those_of_libcudacxx(source: str) -> None:
    names = [f"{u}int{bits}_t" for u in ("", "u") for bits in (8, 16, 32, 64)]
    checks = "".join(f"static_assert(std::is_same_v<{n}, slim::{n}>);\n" for n in names)
    nvrtc._nvrtc(f"{source}\nnamespace slim {{\n{nvrtc._PLAIN_TYPES}}}\n{checks}", "sm_90a")


def test_registers_spills_and_static_shared_are_per_kernel() -> None:
    cubin = nvrtc.compile_cuda(SPILLS, "sm_80")
    assert cubin.spill_bytes["spills"] > 0
    assert cubin.registers["spills"] <= 32
    assert cubin.spill_bytes["tiny"] == 0
    assert cubin.static_shared == {"spills": 0, "tiny": 256}


def test_no_fast_math() -> None:
    """Under fast math a division becomes an approximate reciprocal; IEEE division calls a subroutine or uses div.rn."""
    kernel = 'extern "C" __global__ void k(float* x) { x[0] = x[1] / x[2]; }'
    slow = nvrtc.compile_cuda(kernel, "sm_80").image
    fast = nvrtc.compile_cuda(kernel.replace("x[1] / x[2]", "__fdividef(x[1], x[2])"), "sm_80").image
    assert len(slow) > len(fast)


def test_error_is_one_line() -> None:
    with pytest.raises(CompileError) as e:
        nvrtc.compile_cuda('extern "C" __global__ void k(float* x) { x[0] = nothing; }', "sm_80")
    assert str(e.value).startswith("nvrtc for sm_80: kernel.cu(1): error:")
    assert "\n" not in str(e.value)


def test_ptxas_error_is_reported() -> None:
    with pytest.raises(CompileError, match=r"ptxas .*wgmma|wgmma.*sm_80|not supported"):
        nvrtc.compile_cuda('extern "C" __global__ void k() { asm volatile("wgmma.fence.sync.aligned;"); }', "sm_80")


def test_unknown_arch_and_compiler() -> None:
    with pytest.raises(CompileError, match="sm_1"):
        nvrtc.compile_cuda(SPILLS, "sm_1")
    with pytest.raises(ArgumentError, match="compiler='gcc' is not allowed: choose one of nvrtc, nvcc"):
        nvrtc.compile_cuda(SPILLS, "sm_80", "gcc")


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc")
def test_nvcc_takes_the_exported_source(source: str) -> None:
    cubin = nvrtc.compile_cuda(source, "sm_90a", "nvcc")
    assert cubin.compiler.startswith("nvcc 1")
    assert cubin.registers.keys() == nvrtc.compile_cuda(source, "sm_90a").registers.keys()
    with pytest.raises(CompileError, match=r"nvcc for sm_90a: .*error"):
        nvrtc.compile_cuda("nonsense", "sm_90a", "nvcc")


def test_missing_tools_name_the_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UnsupportedError, match="nvcc is not on PATH"):
        nvrtc.compile_cuda(SPILLS, "sm_80", "nvcc")
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(UnsupportedError, match=re.escape("pip install 'kronsched[cuda]'")):
        nvrtc.compile_cuda(SPILLS, "sm_80")


def test_headers_are_looked_up_in_wheels_then_toolkit(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    nvrtc.include_dirs.cache_clear()
    try:
        assert any("site-packages" in d for d in nvrtc.include_dirs())
        nvrtc.include_dirs.cache_clear()
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
        (tmp_path / "include").mkdir()
        (tmp_path / "include" / "cuda_fp16.h").touch()
        monkeypatch.setenv("CUDA_PATH", str(tmp_path))
        assert nvrtc.include_dirs() == (str(tmp_path / "include"),)
    finally:
        nvrtc.include_dirs.cache_clear()


def test_without_libcuxx_the_error_is_of_the_source(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """torch's own CUDA wheels come without libcu++: a kernel that does not compile must not be reported as a missing header."""
    seen = []

    def fail(source: str, arch: str) -> nvrtc.Cubin:
        seen.append(source)
        raise CompileError(f"nvrtc for {arch}: error: reason {len(seen)}")

    monkeypatch.setattr(nvrtc, "_nvrtc", fail)
    monkeypatch.setattr(nvrtc, "slim_preamble", lambda _: "slim")
    monkeypatch.setattr(nvrtc, "include_dirs", lambda: (str(tmp_path),))
    with pytest.raises(CompileError, match="reason 1"):
        nvrtc.compile_cuda("full", "sm_90")
    assert seen == ["slim"]
    (tmp_path / "cuda" / "std").mkdir(parents=True)
    (tmp_path / "cuda" / "std" / "cstdint").touch()
    with pytest.raises(CompileError, match="reason 3"):
        nvrtc.compile_cuda("full", "sm_90")
    assert seen == ["slim", "slim", "full"]


def test_a_kernel_that_lost_products_is_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    lost, other = bytes.fromhex("f079ff3f00000000ff00000c00e20f00"), bytes(16)
    assert nvrtc.lost_products(other + lost + lost + other) == 2
    assert nvrtc.lost_products(bytes(8) + lost + bytes(8)) == 0  # across two instructions
    monkeypatch.setattr(nvrtc, "_nvrtc", lambda source, arch: nvrtc.Cubin(other + lost, {}, {}, {}, "nvrtc 13.0"))
    with pytest.raises(CompileError, match=r"nvrtc 13\.0 for sm_90a left out 1 groups of wgmma"):
        nvrtc.compile_cuda("", "sm_90a")
