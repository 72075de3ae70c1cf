"""Running a built module: the interface, and `load_executable`, which picks the kind by the manifest.

An executable trusts its caller: shapes, dtypes, device and contiguity are checked by `TunedModule` (or by the measurer).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from kronsched.runtime.manifest import Manifest

TensorLike = Any
"""A torch tensor (CUDA or CPU) or a numpy array."""


class Executable(Protocol):
    """A loaded module. Calls are thread-safe."""

    manifest: Manifest

    def __call__(self, inputs: Sequence[TensorLike], output: TensorLike) -> None:
        """Compute `output` in place from `inputs` (flat, in workload order, contiguous, right dtype and device).

        On CUDA the work is queued on torch's current stream of the module's device, and can be captured in a CUDA graph. On CPU
        the call returns when the result is there; RuntimeError when the function reports an error.
        """

    def bind(self, tensors: Mapping[str, TensorLike]) -> Executable | None:
        """The same module with these inputs, by name, as they are now: launches that depend on them alone are done here, once.

        It is called like the module, with all inputs. None where there is no such launch.
        """


def pointer(tensor: TensorLike) -> int:
    """Address of the first element of a torch tensor or numpy array."""
    try:
        address: int = tensor.data_ptr()
    except AttributeError:
        address = tensor.ctypes.data
    return address


def load_executable(artefact: Path, device_index: int = 0) -> Executable:
    """Load the module in an artefact directory. `device_index`: the CUDA device to load it on (ignored on CPU).

    Imports neither TVM nor the tuner (except for a CPU artefact without a binary, which is compiled here). Raises RecordError
    for a broken artefact, UnsupportedError when this machine cannot run it.
    """
    manifest = Manifest.load(Path(artefact))
    if manifest.kind == "cuda":
        from kronsched.runtime.cuda import CudaExecutable

        return CudaExecutable(Path(artefact), manifest, device_index)
    from kronsched.runtime.cpu import CpuExecutable

    return CpuExecutable(Path(artefact), manifest)
