"""TVM's C libraries by ctypes. Its Python packages are not imported: `tvm` takes 2.6 s, and `tvm_ffi` imports torch."""

from __future__ import annotations

import ctypes
import importlib.util
import os
from functools import cache
from pathlib import Path

from kronsched.errors import UnsupportedError
from kronsched.hardware.cpu import cores

_CPU_DIR = Path("/sys/devices/system/cpu")


@cache
def tvm_ffi() -> ctypes.CDLL:
    """libtvm_ffi: the function-call ABI and its errors."""
    return _library("tvm_ffi", "tvm_ffi")


@cache
def tvm_runtime() -> ctypes.CDLL:
    """libtvm_runtime: the thread pool and workspaces of generated code, its threads set up for this machine."""
    tvm_ffi()  # libtvm_runtime needs it and has no path to it
    # TVM binds its workers and the calling thread to cores counted from 0: that widens a taskset, collides with other
    # processes, and every thread the caller starts later inherits it. Read when a thread makes its first parallel call.
    os.environ.setdefault("TVM_BIND_THREADS", "0")
    library = _library("tvm", "tvm_runtime")
    # By default TVM uses half of the logical CPUs, supposing two a core; wrong on most virtual machines.
    if "TVM_NUM_THREADS" not in os.environ and "OMP_NUM_THREADS" not in os.environ:
        set_threads = getattr(library, "_ZN3tvm7runtime9threading17SetMaxConcurrencyEi", None)  # exported C++, not in the C ABI
        if set_threads is not None:
            set_threads(ctypes.c_int(physical_cores()))
    return library


def physical_cores(root: Path = _CPU_DIR) -> int:
    """Physical cores this process may use; logical CPUs where the system does not tell."""
    if not hasattr(os, "sched_getaffinity"):
        return cores()
    siblings = set()
    for cpu in os.sched_getaffinity(0):
        try:
            siblings.add((root / f"cpu{cpu}" / "topology" / "thread_siblings_list").read_text())
        except OSError:
            return cores()
    return max(1, min(len(siblings), cores()))


def raised_error() -> str:
    """Kind and message of the error that the last call in this thread raised; the error object is released."""
    ffi, handle = tvm_ffi(), ctypes.c_void_p()
    ffi.TVMFFIErrorMoveFromRaised(ctypes.byref(handle))
    if not handle.value:
        return "no error message"
    error = _Error.from_address(handle.value)
    kind, message = (ctypes.string_at(b.data, b.size).decode(errors="replace") for b in (error.kind, error.message))
    ffi.TVMFFIObjectDecRef(handle)
    return f"{kind}: {message}".splitlines()[0]


class _Bytes(ctypes.Structure):
    _fields_ = (("data", ctypes.c_void_p), ("size", ctypes.c_size_t))


class _Error(ctypes.Structure):
    # TVMFFIObject header (24 bytes), then TVMFFIErrorCell.
    _fields_ = (("header", ctypes.c_uint8 * 24), ("kind", _Bytes), ("message", _Bytes))


def _library(package: str, name: str) -> ctypes.CDLL:
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise UnsupportedError(f"the {package} package is not installed: pip install kronsched")
    for file in sorted((Path(spec.origin).parent / "lib").glob(f"*{name}.*")):
        if file.suffix in (".so", ".dylib", ".dll"):
            # Global, so that built modules find TVMFFIErrorSetRaisedFromCStrParts in it.
            return ctypes.CDLL(str(file), mode=ctypes.RTLD_GLOBAL)
    raise UnsupportedError(f"lib{name} was not found in the {package} package: reinstall it")
