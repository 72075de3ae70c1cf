"""CUDA executable: a cubin loaded and launched through the CUDA driver (cuda-bindings), in torch's primary context.

Kernel parameters are prebuilt; a call sets pointers (or tensor maps, encoded once an address) and queues the launches on torch's
current stream. Nothing synchronises, and scratch comes from torch's caching allocator at each call, so a call can be captured in
a CUDA graph (scratch then belongs to the graph's own pool) and calls on several streams never share scratch.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kronsched.errors import UnsupportedError
from kronsched.runtime.executable import TensorLike
from kronsched.runtime.manifest import LaunchSpec, Manifest
from kronsched.runtime.tensor_map import MapCache, encode
from kronsched.workloads.base import TensorSpec

if TYPE_CHECKING:
    import torch

    from kronsched.runtime.cuda_binding import CudaBinding

_DEFAULT_SHARED = 48 * 1024  # dynamic shared memory above this must be asked for
_ALIGN = 256


class CudaExecutable:
    """A CUDA module on one device. The module stays loaded for the life of the process, as captured graphs may refer to it."""

    def __init__(self, artefact: Path, manifest: Manifest, device_index: int = 0) -> None:
        """Load the cubin into the primary context of a CUDA device."""
        import torch

        driver = _driver()
        if not torch.cuda.is_available():
            raise UnsupportedError(
                f"{str(artefact)!r} was built for {manifest.device}: this machine has no CUDA GPU that torch can use"
            )
        self.manifest = manifest
        self.device_index = device_index
        self._torch, self._driver = torch, driver
        torch.cuda.init()  # type: ignore[no-untyped-call]
        _check_arch(manifest, torch.cuda.get_device_capability(device_index))
        (device,) = checked(driver.cuDeviceGet(device_index))
        (self._context,) = checked(driver.cuDevicePrimaryCtxRetain(device))
        image = manifest.read_binary(artefact)
        checked(driver.cuCtxPushCurrent(self._context))
        try:
            (self._module,) = checked(driver.cuModuleLoadData(image))
            self._launches = [Kernel(driver, self._module, launch) for launch in manifest.launches]
        finally:
            checked(driver.cuCtxPopCurrent())
        self._names = [*(t.name for t in manifest.inputs), manifest.output.name]
        self._scratch = Scratch(manifest.scratch)
        # One call's pointers must not mix with another's between setting them and launching.
        self._lock = threading.Lock()

    def __call__(self, inputs: Sequence[TensorLike], output: TensorLike) -> None:
        """See `Executable`."""
        stream = self._torch.cuda.current_stream(self.device_index).cuda_stream
        self.launch(self._launches, self.addresses(inputs, output), self._scratch, stream)

    def bind(self, tensors: Mapping[str, TensorLike]) -> CudaBinding | None:
        """See `Executable`."""
        from kronsched.runtime.cuda_binding import CudaBinding

        constant = self.manifest.constant_launches(tensors)
        return CudaBinding(self, constant, tensors) if constant else None

    def addresses(self, inputs: Sequence[TensorLike], output: TensorLike) -> dict[str, int]:
        """Addresses of a call's tensors by name."""
        return {name: t.data_ptr() for name, t in zip(self._names, (*inputs, output), strict=True)}

    def kernel(self, position: int, overlap: bool) -> Kernel:
        """The kernel of a launch, with parameters of its own; overlap: whether it may, if the launch may."""
        launch = self.manifest.launches[position]
        checked(self._driver.cuCtxPushCurrent(self._context))
        try:
            return Kernel(self._driver, self._module, replace(launch, overlap=launch.overlap and overlap))
        finally:
            checked(self._driver.cuCtxPopCurrent())

    def launch(self, kernels: Sequence[Kernel], addresses: dict[str, int], scratch: Scratch, stream: int) -> None:
        """Queue kernels on a stream, torch's current one; scratch is made for them and its addresses are added."""
        driver = self._driver
        memory = self.new_scratch(scratch.nbytes) if scratch.nbytes else None
        if memory is not None:
            addresses.update(scratch.addresses(memory.data_ptr()))
        with self._lock:
            # The calling thread may have no context yet, or another device's.
            checked(driver.cuCtxPushCurrent(self._context))
            try:
                for kernel in kernels:
                    kernel.launch(driver, addresses, stream)
            finally:
                checked(driver.cuCtxPopCurrent())
        # Freed here, perhaps while still in use on the stream: torch's allocator reuses it on that same stream only.
        del memory

    def new_scratch(self, nbytes: int) -> torch.Tensor:
        """Memory of torch's caching allocator."""
        return self._torch.empty(nbytes, dtype=self._torch.uint8, device=f"cuda:{self.device_index}")


class Scratch:
    """Where scratch tensors lie in one piece of memory of `nbytes`."""

    def __init__(self, specs: Iterable[TensorSpec]) -> None:
        """Lay them out one behind the other."""
        self.nbytes = 0
        self._offsets: list[tuple[str, int]] = []
        for spec in specs:
            self._offsets.append((spec.name, self.nbytes))
            self.nbytes += -(-spec.nbytes // _ALIGN) * _ALIGN

    def addresses(self, base: int) -> dict[str, int]:
        """Addresses by name in memory that starts at `base`."""
        return {name: base + offset for name, offset in self._offsets}


class Kernel:
    """A kernel with its parameter block: an array of pointers to 8-byte values, and to 128-byte tensor maps."""

    def __init__(self, driver: Any, module: Any, launch: LaunchSpec) -> None:
        """Look the kernel up in the module."""
        caches = {m.name: MapCache(m, partial(encode, driver)) for m in launch.maps}
        self.maps = [(i, caches[name]) for i, name in enumerate(launch.args) if name in caches]
        self.args = [(i, name) for i, name in enumerate(launch.args) if name not in caches]
        (self.function,) = checked(driver.cuModuleGetFunction(module, launch.symbol.encode()), launch.symbol)
        if launch.shared_bytes > _DEFAULT_SHARED:
            attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            checked(driver.cuFuncSetAttribute(self.function, attribute, launch.shared_bytes), launch.symbol)
        n = len(launch.args)
        self.values = (ctypes.c_uint64 * n)()
        base = ctypes.addressof(self.values)
        self.params = (ctypes.c_void_p * n)(*(base + 8 * i for i in range(n)))
        self.geometry = (*launch.grid, *launch.block, launch.shared_bytes)
        self.symbol = launch.symbol
        self.config = _extended(driver, launch) if launch.overlap or launch.cluster > 1 else None

    def launch(self, driver: Any, addresses: Mapping[str, int], stream: int) -> None:
        """Queue it on a stream."""
        values = self.values
        for i, name in self.args:
            values[i] = addresses[name]
        for i, cache in self.maps:
            self.params[i] = cache.address(addresses[cache.spec.tensor])
        params = ctypes.addressof(self.params)
        if self.config is None:
            checked(driver.cuLaunchKernel(self.function, *self.geometry, stream, params, 0), self.symbol)
        else:
            self.config.hStream = stream
            checked(driver.cuLaunchKernelEx(self.config, self.function, params, 0), self.symbol)


def _extended(driver: Any, launch: LaunchSpec) -> Any:
    """The launch configuration of a kernel in clusters, or one that may start before the one before it has ended."""
    attributes = []
    if launch.overlap:
        attribute = driver.CUlaunchAttribute()
        attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value.programmaticStreamSerializationAllowed = 1
        attributes.append(attribute)
    if launch.cluster > 1:
        attribute = driver.CUlaunchAttribute()
        attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        size = attribute.value.clusterDim
        size.x, size.y, size.z = launch.cluster, 1, 1
        attributes.append(attribute)
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = launch.grid
    config.blockDimX, config.blockDimY, config.blockDimZ = launch.block
    config.sharedMemBytes = launch.shared_bytes
    config.attrs, config.numAttrs = attributes, len(attributes)
    return config


def checked(result: tuple[Any, ...], what: str = "CUDA driver call") -> tuple[Any, ...]:
    """The values of a driver call; RuntimeError naming the CUDA error otherwise."""
    if result[0] != 0:
        raise RuntimeError(f"{what} failed: {getattr(result[0], 'name', result[0])}")
    return result[1:]


def _driver() -> Any:
    try:
        from cuda.bindings import driver
    except ImportError:
        raise UnsupportedError("running CUDA modules needs cuda-bindings: pip install 'kronsched[cuda]'") from None
    return driver


def _check_arch(manifest: Manifest, capability: tuple[int, int]) -> None:
    """A cubin runs on its own major version from its minor version up; an "a" cubin on exactly its version."""
    text = manifest.arch.removeprefix("sm_")
    digits = text.rstrip("abcdefghijklmnopqrstuvwxyz")
    major, minor = int(digits[:-1]), int(digits[-1])
    exact = text != digits
    if capability[0] != major or capability[1] < minor or (exact and capability[1] != minor):
        raise UnsupportedError(
            f"the module was built for {manifest.arch} ({manifest.device}); this GPU is sm_{capability[0]}{capability[1]}: "
            "load its tuning log instead, which rebuilds it"
        )
