"""CPU executable: a shared library called through the TVM-FFI C ABI with ctypes; TVM's Python package is never imported.

ABI (tvm/ffi/c_api.h, dlpack.h): `int __tvm_ffi_<name>(void* self, const TVMFFIAny* args, int32_t n, TVMFFIAny* result)`, each
argument a `TVMFFIAny` that points to a `DLTensor`. The structs are built once a thread; a call only sets data pointers.
"""

from __future__ import annotations

import ctypes
import re
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kronsched.errors import RecordError, UnsupportedError
from kronsched.hardware.cpu import cpu_arch
from kronsched.runtime.build import versions
from kronsched.runtime.executable import TensorLike, pointer
from kronsched.runtime.manifest import LaunchSpec, Manifest
from kronsched.runtime.tvm_libs import raised_error, tvm_ffi, tvm_runtime

if TYPE_CHECKING:
    from collections.abc import Callable

_DL_CPU = 1
_NONE, _DLTENSOR_PTR = 0, 7  # TVMFFITypeIndex
_ALIGN = 64
_CODES = {"int": 0, "uint": 1, "float": 2, "bfloat": 4, "float8_e4m3fn": 10, "float8_e5m2": 12}  # DLDataTypeCode
_RUNTIME_FUNCTIONS = (
    "TVMBackendParallelLaunch",
    "TVMBackendParallelBarrier",
    "TVMBackendAllocWorkspace",
    "TVMBackendFreeWorkspace",
)


class _DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Any(ctypes.Structure):
    _fields_ = (("type_index", ctypes.c_int32), ("zero_padding", ctypes.c_uint32), ("value", ctypes.c_void_p))


# x86-64 psABI levels, as hardware.cpu names them: a machine runs code of its own level and of lower ones.
_X86_LEVELS = ("x86-64", "x86-64-v2", "x86-64-v3", "x86-64-v4")


# What this process has loaded from which path: dlopen goes by path, so a path must not come to mean two libraries.
_opened: dict[str, str | None] = {}
_opened_lock = threading.Lock()


class CpuExecutable:
    """A CPU module. Each calling thread has its own argument structs and scratch memory, so calls may overlap."""

    def __init__(self, artefact: Path, manifest: Manifest) -> None:
        """Load the library (or compile the program in this process when the artefact has none)."""
        self.manifest = manifest
        if manifest.binary_file is not None:
            _check_machine(manifest)
        self._names = [*(t.name for t in manifest.inputs), manifest.output.name]
        self._functions, self._keep = _link(artefact, manifest)
        self._local = threading.local()

    def __call__(self, inputs: Sequence[TensorLike], output: TensorLike) -> None:
        """See `Executable`."""
        frame = getattr(self._local, "frame", None)
        if frame is None:
            frame = self._local.frame = _Frame(self.manifest)
        for name, tensor in zip(self._names, (*inputs, output), strict=True):
            address = pointer(tensor)
            for view in frame.views[name]:
                view.data = address
        for launch, function, (args, count) in zip(self.manifest.launches, self._functions, frame.calls, strict=True):
            frame.result.type_index = _NONE
            if function(args, count, ctypes.byref(frame.result)) != 0:
                raise RuntimeError(f"{launch.symbol} of {self.manifest.space} failed: {raised_error()}")

    def bind(self, tensors: Mapping[str, TensorLike]) -> None:
        """See `Executable`. There is no such launch: CPU programs are one function."""


class _Frame:
    """The argument structs and scratch memory of one thread."""

    def __init__(self, manifest: Manifest) -> None:
        names = [t.name for t in (*manifest.inputs, *manifest.scratch, manifest.output)]
        self.views: dict[str, list[_DLTensor]] = {name: [] for name in names}
        self.calls = [self._call(launch) for launch in manifest.launches]
        self.result = _Any(_NONE, 0, None)
        self._memory = []
        for spec in manifest.scratch:
            block = ctypes.create_string_buffer(spec.nbytes + _ALIGN)
            self._memory.append(block)
            address = ctypes.addressof(block)
            for view in self.views[spec.name]:
                view.data = address + (-address % _ALIGN)

    def _call(self, launch: LaunchSpec) -> tuple[Any, int]:
        n = len(launch.args)
        args = (_Any * n)()
        for slot, name, shape, dtype in zip(args, launch.args, launch.shapes, launch.dtypes, strict=True):
            view = _view(shape, dtype)
            self.views[name].append(view)
            slot.type_index, slot.value = _DLTENSOR_PTR, ctypes.addressof(view)
        return args, n


def _check_machine(manifest: Manifest) -> None:
    """UnsupportedError when a library was built for another system, TVM version or CPU: it would not load, or crash."""
    here = {**versions("llvm"), "arch": cpu_arch()[0]}
    built = {**manifest.versions, "arch": manifest.arch}
    for name in ("platform", "tvm", "arch"):
        if built.get(name) == here[name]:
            continue
        if name == "arch" and here[name] in _X86_LEVELS and built[name] in _X86_LEVELS[: _X86_LEVELS.index(here[name])]:
            continue
        raise UnsupportedError(
            f"the module was built for {name} {built.get(name)}, this machine has {here[name]}: load its tuning log instead, "
            "which rebuilds it"
        )


def _view(shape: Sequence[int], dtype: str) -> _DLTensor:
    """A row-major CPU DLTensor without data; strides NULL means contiguous."""
    code, bits, lanes = dl_dtype(dtype)
    extents = (ctypes.c_int64 * len(shape))(*shape)
    return _DLTensor(None, _DL_CPU, 0, len(shape), code, bits, lanes, extents, None, 0)


def dl_dtype(dtype: str) -> tuple[int, int, int]:
    """DLPack (code, bits, lanes) of a TVM dtype string, such as "bfloat16" or "float32x4"."""
    name, _, lanes = dtype.partition("x")
    if name in _CODES:
        return _CODES[name], 8, int(lanes or 1)
    match = re.fullmatch(r"(u?int|b?float)(\d+)", name)
    if match is None:
        raise RecordError(f"dtype {dtype!r} has no DLPack code")
    return _CODES[match[1]], int(match[2]), int(lanes or 1)


def _link(artefact: Path, manifest: Manifest) -> tuple[list[Callable[..., int]], Any]:
    """The functions of the launches, each (args, count, result) -> status, and what must be kept alive for them."""
    runtime = tvm_runtime()
    if manifest.binary_file is None:
        return _compile_here(manifest)
    library = _open(artefact, manifest)
    # TVM's generated code calls its runtime through these pointers; a TVM process fills them in when it loads a module.
    for name in _RUNTIME_FUNCTIONS:
        try:
            slot = ctypes.c_void_p.in_dll(library, f"__{name}")
        except ValueError:
            continue  # this module does not need it
        slot.value = ctypes.cast(getattr(runtime, name), ctypes.c_void_p).value
    return [_bind(library, launch) for launch in manifest.launches], library


def _open(artefact: Path, manifest: Manifest) -> ctypes.CDLL:
    """The library of an artefact, and never another one that was loaded from the same path before."""
    content, path = manifest.read_binary(artefact), (artefact / str(manifest.binary_file)).resolve()
    with _opened_lock:
        try:
            if _opened.setdefault(str(path), manifest.binary_sha256) == manifest.binary_sha256:
                return ctypes.CDLL(str(path))
            # dlopen would hand out the library it already has for this path; a rebuilt one needs a path of its own.
            with tempfile.TemporaryDirectory(prefix="kronsched-") as scratch:
                (Path(scratch) / path.name).write_bytes(content)
                return ctypes.CDLL(str(Path(scratch) / path.name))
        except OSError as e:
            raise RecordError(f"{str(path)!r} cannot be loaded: {e}") from None


def _bind(library: ctypes.CDLL, launch: LaunchSpec) -> Callable[..., int]:
    try:
        function = getattr(library, launch.symbol)
    except AttributeError:
        raise RecordError(f"{library._name!r} has no function {launch.symbol}") from None
    function.restype = ctypes.c_int
    function.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int32, ctypes.c_void_p)
    return lambda args, count, result: int(function(None, args, count, result))


def _compile_here(manifest: Manifest) -> tuple[list[Callable[..., int]], Any]:
    """Without a host linker: rebuild from workload and config and let LLVM's JIT run it. Imports TVM."""
    from kronsched import registry
    from kronsched.hardware import resolve_target
    from kronsched.runtime.build import compile_cpu
    from kronsched.runtime.lower import lower

    device = resolve_target("cpu")
    lowered = lower(registry.workload_from_dict(manifest.workload), registry.schedule(manifest.space), manifest.config, device)
    module = compile_cpu(lowered, device)
    call = tvm_ffi().TVMFFIFunctionCall
    call.restype = ctypes.c_int
    call.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int32, ctypes.c_void_p)

    def bind(launch: LaunchSpec) -> Callable[..., int]:
        function = module.get_function(launch.symbol.removeprefix("__tvm_ffi_"))
        handle = function.__chandle__()
        # `function` is a default argument only to keep it alive as long as the closure.
        return lambda args, count, result, keep=function: int(call(handle, args, count, result))

    return [bind(launch) for launch in manifest.launches], module
