"""What works on this machine, found by trying it: each check runs the thing it reports on.

Read first: `diagnose` (the list of checks) and `Check`.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import kronsched
from kronsched.hardware import cuda_driver

PACKAGES = ("kronsched", "apache-tvm", "apache-tvm-ffi", "torch", "numpy", "cuda-bindings", "nvidia-cuda-nvrtc")
_KERNEL = """
#include <cuda_fp16.h>
extern "C" __global__ void twice(__half* x) { x[threadIdx.x] = x[threadIdx.x] + x[threadIdx.x]; }
"""


@dataclass(frozen=True)
class Check:
    """One finding.

    status: "ok", "absent" (an optional part is not there; nothing is broken) or "broken" (kronsched cannot work as it should).
    detail: what was found.  advice: what to do about it, empty when nothing.
    """

    name: str
    status: str
    detail: str
    advice: str = ""

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready form."""
        return asdict(self)


class _Absent(Exception):
    """Raised by a check whose optional subject is not there: (detail, advice)."""


def diagnose() -> list[Check]:
    """Run every check, each in about a second at most. Never raises for something missing or broken."""
    checks: list[tuple[str, Callable[[], str], str]] = [
        ("python", _python, "install Python 3.11 or later"),
        ("packages", _packages, "reinstall: pip install kronsched"),
        ("cpu", _cpu, "report this CPU: kronsched could not describe it"),
        ("llvm", _llvm, "reinstall the compiler: pip install --force-reinstall apache-tvm==0.27.0.post1"),
        ("C compiler", _c_compiler, "repair it: apt-get install --reinstall gcc libc6-dev"),
        ("xgboost", _xgboost, "reinstall the cost model: pip install --force-reinstall xgboost-cpu"),
        ("cache directory", _cache, "make it writable, or set KRONSCHED_CACHE_DIR to a directory that is"),
        ("log directory", _logs, "make it writable, or name a log with --log"),
        ("shipped data", _shipped, "reinstall: pip install --force-reinstall --no-deps kronsched"),
        ("nvrtc", _nvrtc, 'reinstall it: pip install --force-reinstall "kronsched[cuda]"'),
        ("gpu", _gpu, "see the message; `nvidia-smi` tells more"),
    ]
    return [_run(name, call, advice) for name, call, advice in checks]


def _run(name: str, call: Callable[[], str], advice: str) -> Check:
    try:
        return Check(name, "ok", call())
    except _Absent as e:
        return Check(name, "absent", str(e.args[0]), str(e.args[1]))
    except Exception as e:  # a doctor reports every failure; it does not have one itself
        return Check(name, "broken", " ".join(f"{type(e).__name__}: {e}".split())[:300], advice)


def _python() -> str:
    return f"{platform.python_version()} on {platform.platform()}"


def _packages() -> str:
    found = {}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    if "kronsched" not in found:  # run from a source tree on PYTHONPATH
        found = {"kronsched": f"{kronsched.__version__} (source tree)", **found}
    missing = [n for n in PACKAGES[:5] if n not in found]
    if missing:
        raise RuntimeError(f"{', '.join(missing)} not installed")
    return ", ".join(f"{n} {v}" for n, v in found.items())


def _cpu() -> str:
    from kronsched.hardware import resolve_target

    device = resolve_target("cpu")
    return f"{device.name}, {device.units} cores, {device.arch}"


def _llvm() -> str:
    import numpy as np
    import tvm
    from tvm import te
    from tvm.target import codegen

    from kronsched.hardware import resolve_target

    x = te.placeholder((8,), "float32", name="x")
    y = te.compute((8,), lambda i: x[i] * 2.0, name="y")
    lib = tvm.compile(te.create_prim_func([x, y]), target=resolve_target("cpu").tvm_target())
    a, b = tvm.runtime.tensor(np.arange(8, dtype="float32")), tvm.runtime.tensor(np.zeros(8, "float32"))
    lib["main"](a, b)
    if not np.array_equal(b.numpy(), 2 * a.numpy()):
        raise RuntimeError("a compiled kernel gives a wrong result")
    return f"LLVM {codegen.llvm_version_major()} compiles and runs a kernel"


def _c_compiler() -> str:
    from kronsched.runtime.build import host_linker

    linker = host_linker()
    if linker is None:
        raise _Absent("no cc, gcc or clang: a CPU module is compiled again by each process that loads it", "apt-get install gcc")
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "one.c"
        source.write_text("int one(void) { return 1; }\n", encoding="utf-8")
        command = [linker, "-shared", "-fPIC", "-o", str(source.with_suffix(".so")), str(source)]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
        if done.returncode != 0:
            raise RuntimeError(f"{linker} cannot link a library: {done.stderr.strip()}")
    return f"{linker} links a library"


def _xgboost() -> str:
    import numpy as np
    import xgboost

    data = xgboost.DMatrix(np.arange(16.0).reshape(8, 2), label=np.arange(8.0))
    xgboost.train({"nthread": 1}, data, num_boost_round=2).predict(data)
    return f"xgboost {xgboost.__version__} trains a model"


def _cache() -> str:
    from kronsched.paths import cache_dir

    return _writable(cache_dir())


def _logs() -> str:
    from kronsched.records.database import user_dir

    return _writable(user_dir())


def _writable(folder: Path) -> str:
    """Raises OSError when a file cannot be made there."""
    folder.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=folder, prefix=".doctor-")
    os.close(handle)
    Path(name).unlink()
    free = shutil.disk_usage(folder).free / 1e9
    return f"{folder} is writable, {free:.0f} GB free"


def _shipped() -> str:
    from kronsched.records.database import shipped_dir
    from kronsched.space import spaces_dir

    spaces = sorted(p.stem for p in spaces_dir().glob("*.toml"))
    if not spaces:
        raise FileNotFoundError(f"no search spaces in {spaces_dir()}")
    logs = sorted(shipped_dir().rglob("*.jsonl*"))
    return f"{len(spaces)} search spaces ({', '.join(spaces)}), {len(logs)} tuning logs"


def _nvrtc() -> str:
    if importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.bindings") is None:
        raise _Absent("cuda-bindings is not installed", 'to emit or run CUDA kernels: pip install "kronsched[cuda]"')
    from kronsched.runtime.nvrtc import compile_cuda

    found = cuda_driver.gpus()
    arch = f"sm_{found[0].attributes['major']}{found[0].attributes['minor']}" if found else "sm_90"
    cubin = compile_cuda(_KERNEL, arch)
    return f"{cubin.compiler} compiles a kernel for {arch}"


def _gpu() -> str:
    found = cuda_driver.gpus()
    if not found:
        raise _Absent("no CUDA GPU or no driver", "kernels are tuned for this CPU; --target nvidia/h200 emits CUDA without a GPU")
    import torch

    if not torch.cuda.is_available():
        raise RuntimeError(
            f"{found[0].name} is there, but this torch ({torch.__version__}) cannot use it: install torch with CUDA"
        )
    if not bool((torch.ones(8, device="cuda") * 2 == 2).all()):
        raise RuntimeError("a torch kernel gives a wrong result")
    names = ", ".join(g.name for g in found)
    return f"{names}; driver {cuda_driver.driver_version()}; torch {torch.__version__} runs on it"
