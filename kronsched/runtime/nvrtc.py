"""CUDA source -> cubin through NVRTC (from PyPI wheels, no toolkit needed) or nvcc, with what ptxas reports.

No fast-math: division, square root and denormals stay IEEE; multiply-add contraction stays on, as in nvcc's default.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from kronsched.errors import CompileError, UnsupportedError, choose

COMPILERS = ("nvrtc", "nvcc")
INSTALL = "pip install 'kronsched[cuda]'"

# TVM's generated preamble pulls in libcu++ for the fixed-width integers and a few traits: 1.0 of the 1.4 s that a small kernel
# takes to compile. These are the same types libcu++ defines under NVRTC.
_STD_BLOCK = re.compile(
    r"  #include <cuda/std/cstdint>\n.*?#include <cuda/std/type_traits>\n  namespace std \{.*?\n  \}\n", re.DOTALL
)
_PLAIN_TYPES = """\
  typedef signed char int8_t;
  typedef unsigned char uint8_t;
  typedef short int16_t;
  typedef unsigned short uint16_t;
  typedef int int32_t;
  typedef unsigned int uint32_t;
  typedef long long int64_t;
  typedef unsigned long long uint64_t;
"""
_IS_SAME = """\
  namespace std {
    template <class A, class B> constexpr bool is_same_v = false;
    template <class A> constexpr bool is_same_v<A, A> = true;
  }
"""
"""The one trait that the preamble of 8-bit floats asks for."""

_PLACEHOLDER = bytes.fromhex("f079ff3f00000000")
"""The first half of `HGMMA.64x8x16.F16 RZ, gdesc[URZ], RZ, !UPT`; the second half has the scheduler's bits."""
_INSTRUCTION_BYTES = 16


def check_compiler(compiler: str) -> None:
    """ArgumentError for an unknown CUDA compiler name."""
    if compiler not in COMPILERS:
        raise choose("compiler", compiler, COMPILERS)


@dataclass(frozen=True)
class Cubin:
    """A compiled module and what ptxas said of each kernel: registers, spill bytes (stores plus loads), static shared bytes."""

    image: bytes
    registers: dict[str, int]
    spill_bytes: dict[str, int]
    static_shared: dict[str, int]
    compiler: str


def compile_cuda(source: str, arch: str, compiler: str = "nvrtc") -> Cubin:
    """Compile CUDA source to a cubin for an arch such as "sm_90a".

    Raises CompileError with the first error line, or where ptxas left out a part of a kernel; UnsupportedError when the compiler
    is not installed; ArgumentError for an unknown `compiler`.
    """
    check_compiler(compiler)
    cubin = _nvcc(source, arch) if compiler == "nvcc" else _slim_first(source, arch)
    if lost := lost_products(cubin.image):
        raise CompileError(f"{cubin.compiler} for {arch} left out {lost} groups of wgmma: a bug of ptxas, results would be wrong")
    return cubin


def lost_products(image: bytes) -> int:
    """How many groups of wgmma ptxas left out of a cubin: it puts an instruction without operands in the place of each.

    Seen where products that take turns in the same registers are added to sums that begin with 0 (`ks_mma_parts.zero`). Kernels
    with this instruction had fewer groups than their PTX, and results that were wrong; no other kernel had it.
    """
    found, at = 0, image.find(_PLACEHOLDER)
    while at >= 0:
        found += at % _INSTRUCTION_BYTES == 0
        at = image.find(_PLACEHOLDER, at + 1)
    return found


def _slim_first(source: str, arch: str) -> Cubin:
    slim = slim_preamble(source)
    if slim is not None:
        try:
            return _nvrtc(slim, arch)
        except CompileError:
            if not any((Path(d) / "cuda" / "std" / "cstdint").is_file() for d in include_dirs()):
                raise  # no libcu++ on this machine: the full preamble would only fail on that
    return _nvrtc(source, arch)  # the slim preamble may lack something: the full one decides


def slim_preamble(source: str) -> str | None:
    """The source with libcu++ headers replaced by eight typedefs and a trait, or None when it may need more of them than that."""
    slim, n = _STD_BLOCK.subn(lambda _: _PLAIN_TYPES + _IS_SAME, source)
    if n != 1 or "std::" in slim.replace("std::is_same_v<", ""):
        return None
    return slim


@cache
def include_dirs() -> tuple[str, ...]:
    """CUDA header directories: the PyPI wheels, else CUDA_PATH, else /usr/local/cuda. UnsupportedError when there are none."""
    candidates = []
    spec = importlib.util.find_spec("nvidia")
    for base in spec.submodule_search_locations or [] if spec is not None else []:
        candidates += [Path(base) / "cu13" / "include", Path(base) / "cuda_runtime" / "include"]
    # Not ours: the toolkit's own convention for where it is installed.
    candidates += [Path(p) / "include" for p in (os.environ.get("CUDA_PATH"), "/usr/local/cuda") if p]
    for include in candidates:
        if (include / "cuda_fp16.h").is_file():
            return tuple(str(d) for d in (include, include / "cccl") if d.is_dir())
    raise UnsupportedError(f"CUDA headers were not found in PyPI wheels, CUDA_PATH or /usr/local/cuda: {INSTALL}")


def _nvrtc(source: str, arch: str) -> Cubin:
    try:
        from cuda.bindings import nvrtc
    except ImportError:
        raise UnsupportedError(f"compiler='nvrtc' needs cuda-bindings: {INSTALL}") from None
    try:
        version = "nvrtc {}.{}".format(*_checked(nvrtc.nvrtcVersion()))
    except RuntimeError as e:  # cuda-bindings loads the library on the first call
        raise UnsupportedError(f"compiler='nvrtc': the NVRTC library cannot be loaded ({e}): {INSTALL}") from None
    options = [
        f"--gpu-architecture={arch}",
        "--std=c++17",
        "-default-device",
        "--ptxas-options=-v",
        "--diag-suppress=177",  # TVM declares a variable for every common subexpression, used or not
        *(f"-I{d}" for d in include_dirs()),
    ]
    (program,) = _checked(nvrtc.nvrtcCreateProgram(source.encode(), b"kernel.cu", 0, [], []))
    try:
        (result,) = nvrtc.nvrtcCompileProgram(program, len(options), [o.encode() for o in options])
        log = b" " * _checked(nvrtc.nvrtcGetProgramLogSize(program))[0]
        _checked(nvrtc.nvrtcGetProgramLog(program, log))
        text = log.rstrip(b"\0").decode(errors="replace")
        if int(result) != 0:
            raise CompileError(f"nvrtc for {arch}: {_first_error(text) or result.name}")
        image = b" " * _checked(nvrtc.nvrtcGetCUBINSize(program))[0]
        _checked(nvrtc.nvrtcGetCUBIN(program, image))
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    return Cubin(image, *parse_ptxas(text), version)


def _nvcc(source: str, arch: str) -> Cubin:
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        raise UnsupportedError("compiler='nvcc': nvcc is not on PATH; use compiler='nvrtc' or install the CUDA toolkit")
    with tempfile.TemporaryDirectory(prefix="kronsched-nvcc-") as scratch:
        cu, cubin = Path(scratch) / "kernel.cu", Path(scratch) / "kernel.cubin"
        cu.write_text(source, encoding="utf-8")
        command = [nvcc, "-cubin", f"-arch={arch}", "-std=c++17", "-Xptxas=-v", "-diag-suppress=177", "-o", str(cubin), str(cu)]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
        text = done.stdout + done.stderr
        if done.returncode != 0:
            raise CompileError(f"nvcc for {arch}: {_first_error(text) or f'exit code {done.returncode}'}")
        return Cubin(cubin.read_bytes(), *parse_ptxas(text), f"nvcc {_nvcc_version(nvcc)}")


@cache
def _nvcc_version(nvcc: str) -> str:
    text = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=False).stdout
    match = re.search(r"release ([\d.]+)", text)
    return match[1] if match else "unknown"


def parse_ptxas(log: str) -> tuple[dict[str, int], dict[str, int], dict[str, int]]:
    """(registers, spill bytes, static shared bytes), each by kernel name, from a `ptxas -v` log."""
    registers: dict[str, int] = {}
    spills: dict[str, int] = {}
    shared: dict[str, int] = {}
    kernel = ""
    for line in log.splitlines():
        if match := re.search(r"(?:Compiling entry function|Function properties for) '?([\w$]+)'?", line):
            kernel = match[1]
        elif match := re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", line):
            spills[kernel] = int(match[1]) + int(match[2])
        elif match := re.search(r"Used (\d+) registers", line):
            registers[kernel] = int(match[1])
            smem = re.search(r"(\d+) bytes smem", line)
            shared[kernel] = int(smem[1]) if smem else 0
    return registers, spills, shared


def _first_error(log: str) -> str | None:
    for line in log.splitlines():
        if re.search(r"\berror\b|ptxas fatal|\bfatal\b", line):
            return line.strip()[:300]
    return None


def _checked(result: tuple[Any, ...]) -> tuple[Any, ...]:
    if int(result[0]) != 0:
        raise CompileError(f"nvrtc call failed: {result[0].name}")
    return result[1:]
