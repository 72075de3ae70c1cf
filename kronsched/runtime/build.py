"""Workload + schedule + config -> an artefact directory: source, binary, `manifest.json`.

Read first: `build_artefact`. It is what a builder worker of the tuner runs and what `load` runs on a cache miss.
"""

from __future__ import annotations

import hashlib
import platform
import shutil
import subprocess
import tempfile
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kronsched.errors import ArgumentError, CompileError
from kronsched.runtime.lower import Lowered, check_limits, first_line, lower
from kronsched.runtime.manifest import FILE_NAME, FORMAT, Manifest
from kronsched.runtime.nvrtc import check_compiler, compile_cuda
from kronsched.schedules.base import Schedule
from kronsched.space import Config
from kronsched.workloads.base import Workload

if TYPE_CHECKING:
    from kronsched.hardware import Device


def lower_source(workload: Workload, schedule: Schedule, config: Config, device: Device) -> tuple[str, str]:
    """(source text, its SHA-256): the CUDA source, or on CPU the scheduled TIR script. Compiles no binary.

    The same in every process and on every machine with the same versions. Raises InvalidConfig or CompileError.
    """
    lowered = lower(workload, schedule, config, device)
    return lowered.source, lowered.sha256


def build_artefact(
    workload: Workload, schedule: Schedule, config: Config, device: Device, out_dir: Path, compiler: str = "nvrtc"
) -> Manifest:
    """Build into `out_dir`, which appears complete or not at all.

    Files: `kernel.cu` and `kernel.cubin` (CUDA), `kernel.py` (TIR script) and `kernel.so` (CPU), `manifest.json`. Without a host
    linker a CPU artefact has no binary and is compiled in the process that loads it. `compiler`: "nvrtc" or "nvcc" (CUDA only).
    Raises InvalidConfig or CompileError with a one-line message, UnsupportedError when the compiler is not installed.
    """
    check_compiler(compiler)
    out_dir = Path(out_dir)
    lowered = lower(workload, schedule, config, device)
    out_dir.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{out_dir.name}.", dir=out_dir.parent))
    try:
        built = _build_cuda(lowered, device, scratch, compiler) if device.kind == "cuda" else _build_cpu(lowered, device, scratch)
        manifest = Manifest(
            format=FORMAT,
            kind=device.kind,
            workload=workload.to_dict(),
            space=schedule.name,
            config=dict(config),
            arch=device.arch,
            device=device.name,
            source_sha256=lowered.sha256,
            launches=lowered.launches,
            inputs=workload.inputs,
            scratch=lowered.scratch,
            output=workload.output,
            binary_sha256=_sha256(scratch / built["binary_file"]) if built["binary_file"] is not None else None,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            **built,
        )
        manifest.save(scratch)
        scratch.chmod(0o755)  # mkdtemp makes it private
        _publish(scratch, out_dir)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return manifest


def versions(compiler: str) -> dict[str, str]:
    """What a built module depends on besides workload and config."""
    return {**library_versions(), "compiler": compiler, "platform": f"{platform.system()}-{platform.machine()}"}


@cache
def library_versions() -> dict[str, str]:
    """Versions of kronsched and TVM, without importing TVM."""
    import kronsched

    return {"kronsched": kronsched.__version__, "tvm": version("apache-tvm")}


def _sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _publish(scratch: Path, out_dir: Path) -> None:
    if (out_dir / FILE_NAME).is_file():  # never a directory that is not an artefact
        shutil.rmtree(out_dir)
    try:
        scratch.rename(out_dir)
    except OSError as e:
        raise ArgumentError(f"artefact directory {str(out_dir)!r} cannot be written: {e.strerror}") from None


def _build_cuda(lowered: Lowered, device: Device, where: Path, compiler: str) -> dict[str, Any]:
    cubin = compile_cuda(lowered.source, device.arch, compiler)
    for launch in lowered.launches:
        check_limits(launch, device, cubin.static_shared.get(launch.symbol, 0))
    (where / "kernel.cu").write_text(lowered.source, encoding="utf-8")
    (where / "kernel.cubin").write_bytes(cubin.image)
    return {
        "source_file": "kernel.cu",
        "binary_file": "kernel.cubin",
        "registers": max(cubin.registers.values(), default=None),
        "spill_bytes": max(cubin.spill_bytes.values(), default=None),
        "shared_bytes": max((x.shared_bytes + cubin.static_shared.get(x.symbol, 0) for x in lowered.launches), default=None),
        "versions": versions(cubin.compiler),
    }


def _build_cpu(lowered: Lowered, device: Device, where: Path) -> dict[str, Any]:
    (where / "kernel.py").write_text(lowered.source, encoding="utf-8")
    linker = host_linker()
    module = compile_cpu(lowered, device)
    if linker is not None:
        obj = where / "kernel.o"
        module.write_to_file(str(obj), "o")
        _link(linker, obj, where / "kernel.so")
        obj.unlink()
    return {
        "source_file": "kernel.py",
        "binary_file": "kernel.so" if linker is not None else None,
        "registers": None,
        "spill_bytes": None,
        "shared_bytes": None,
        "versions": versions("llvm"),
    }


def compile_cpu(lowered: Lowered, device: Device) -> Any:
    """The LLVM runtime module of a lowered CPU program. CompileError with one line when TVM or LLVM fails."""
    import tvm

    try:
        return tvm.compile(lowered.mod, target=device.tvm_target(without=_features_to_avoid(lowered))).mod
    except Exception as e:
        raise CompileError(f"llvm for {device.arch}: {first_line(e)}") from e


def _features_to_avoid(lowered: Lowered) -> tuple[str, ...]:
    """AVX512BW for programs with bfloat16.

    LLVM 22 stores four bytes, over the next value or past the end of y, where a mask leaves one 16-bit lane of a vector narrowed
    from int32, as rounded bfloat16 are. It masks no 16-bit lanes without AVX512BW; Gemm and Conv2d are as fast without it.
    """
    return ("avx512bw",) if "bfloat16" in lowered.source else ()


def host_linker() -> str | None:
    """The system C compiler used to link shared libraries, or None."""
    return next((found for name in ("cc", "gcc", "clang") if (found := shutil.which(name))), None)


def _link(linker: str, obj: Path, library: Path) -> None:
    command = [linker, "-shared", "-o", str(library), str(obj), "-lm"]
    if platform.system() == "Darwin":
        command += ["-undefined", "dynamic_lookup"]  # TVM's runtime symbols are resolved when the library is loaded
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        raise CompileError(f"{Path(linker).name} cannot link the module: {lines[0][:300] if lines else done.returncode}")
