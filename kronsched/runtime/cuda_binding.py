"""A CUDA module with some inputs bound: what depends on these alone, such as reordered weights, is computed once.

The launches that are left are queued call by call. The first of them does not start while the kernel before it on the stream
runs: in a plain call it would have started early behind the launches that are now done, which had waited for everything before
them. The others overlap as ever.

Read first: `CudaBinding`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from kronsched.runtime.cuda import Scratch
from kronsched.runtime.executable import TensorLike

if TYPE_CHECKING:
    from kronsched.runtime.cuda import CudaExecutable


class CudaBinding:
    """An executable whose launches `constant` are done; made by `CudaExecutable.bind`.

    A CUDA graph that captured a call refers to the memory of this object: it must outlive the graph.
    """

    def __init__(self, executable: CudaExecutable, constant: Sequence[int], tensors: Mapping[str, TensorLike]) -> None:
        """Queue the launches `constant` on torch's current stream, with these inputs by name."""
        import torch

        self.manifest = manifest = executable.manifest
        self._executable, self._torch = executable, torch
        kept = frozenset[str]().union(*(manifest.launches[i].tensors for i in constant)) - frozenset(tensors)
        left = [i for i in range(len(manifest.launches)) if i not in constant]
        self._kernels = [executable.kernel(i, overlap=n > 0) for n, i in enumerate(left)]
        self._scratch = Scratch(t for t in manifest.scratch if t.name not in kept)
        own = Scratch(t for t in manifest.scratch if t.name in kept)
        self._memory = executable.new_scratch(own.nbytes)
        self._kept = own.addresses(self._memory.data_ptr())
        stream = torch.cuda.current_stream(executable.device_index)
        self._stream, none = stream.cuda_stream, Scratch(())
        addresses = {**{name: t.data_ptr() for name, t in tensors.items()}, **self._kept}
        kernels = [executable.kernel(i, overlap=n > 0) for n, i in enumerate(constant)]
        executable.launch(kernels, addresses, none, self._stream)
        self._done = stream.record_event()

    def __call__(self, inputs: Sequence[TensorLike], output: TensorLike) -> None:
        """See `Executable`. Another stream than that of the constructor waits for it; in a capture, the caller has seen to it."""
        torch, executable = self._torch, self._executable
        stream = torch.cuda.current_stream(executable.device_index)
        if stream.cuda_stream != self._stream and not torch.cuda.is_current_stream_capturing():
            stream.wait_event(self._done)
            self._memory.record_stream(stream)
        addresses = {**executable.addresses(inputs, output), **self._kept}
        executable.launch(self._kernels, addresses, self._scratch, stream.cuda_stream)

    def bind(self, tensors: Mapping[str, TensorLike]) -> None:
        """See `Executable`: nothing more is done once."""
