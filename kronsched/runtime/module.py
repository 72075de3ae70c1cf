"""`TunedModule`: a loaded kernel that is called like a function: `y = mod(x, *factors)` or `mod(x, *factors, out=y)`."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kronsched import registry
from kronsched.dtypes import DTYPES
from kronsched.errors import ArgumentError
from kronsched.runtime import arguments
from kronsched.runtime.executable import Executable, load_executable
from kronsched.runtime.manifest import Manifest
from kronsched.workloads.base import Workload

if TYPE_CHECKING:
    import numpy as np
    import torch

    from kronsched.runtime.bound import BoundModule

# The custom op names a module by its artefact directory and finds it here, so that it is not loaded twice.
_live: weakref.WeakValueDictionary[tuple[str, int], TunedModule] = weakref.WeakValueDictionary()


class TunedModule:
    """A compiled kernel for one workload on one device. Made by `kronsched.load`.

    workload: what it computes.  config: knob values.  artefact: directory of source, binary and manifest.  device: "cpu" or
    "cuda:N".  expected_us: microseconds a call measured on this model of device, None when it was not.  measured: whether the
    config comes from a measurement on this model of device.  origin: where the config came from, in words.
    """

    def __init__(
        self,
        workload: Workload,
        executable: Executable,
        artefact: Path,
        *,
        device_index: int = 0,
        expected_us: float | None = None,
        measured: bool = False,
        origin: str = "",
    ) -> None:
        """Wrap a loaded executable; see the class."""
        self.workload = workload
        self.artefact = Path(artefact).resolve()
        self.expected_us = expected_us
        self.measured = measured
        self.origin = origin
        self._executable = executable
        self._index = device_index
        self._handle = str(self.artefact)
        self._signature: arguments.TorchSignature | None = None
        _live[self._handle, device_index] = self

    @classmethod
    def from_artefact(
        cls,
        artefact: Path,
        *,
        device_index: int = 0,
        expected_us: float | None = None,
        measured: bool = False,
        origin: str = "",
    ) -> TunedModule:
        """Load an artefact directory. Raises RecordError for a broken one, UnsupportedError when this machine cannot run it."""
        executable = load_executable(Path(artefact), device_index)
        workload = registry.workload_from_dict(executable.manifest.workload)
        return cls(
            workload,
            executable,
            artefact,
            device_index=device_index,
            expected_us=expected_us,
            measured=measured,
            origin=origin,
        )

    # -- description --------------------------------------------------------------------------------

    @property
    def manifest(self) -> Manifest:
        """The description of the built module: launches, registers, shared memory, versions."""
        return self._executable.manifest

    @property
    def config(self) -> Mapping[str, Any]:
        """The value of every knob."""
        return dict(self.manifest.config)

    @property
    def space(self) -> str:
        """The name of the schedule and its search space."""
        return self.manifest.space

    @property
    def source(self) -> str:
        """The CUDA source; on CPU the scheduled TensorIR script."""
        return (self.artefact / self.manifest.source_file).read_text(encoding="utf-8")

    @property
    def device(self) -> str:
        """Where it runs: "cpu" or "cuda:N"."""
        return f"cuda:{self._index}" if self.manifest.kind == "cuda" else "cpu"

    @property
    def gradient(self) -> str | None:
        """Where the gradient of the workload's family is, "module:function"; None when it has none.

        The function takes (inputs, gradient of the output, which inputs need one) and returns a gradient or None for each input,
        made of differentiable calls.
        """
        where: str | None = getattr(self.workload, "gradient", None)
        return where

    def __repr__(self) -> str:
        time = f"{self.expected_us:.4g} us" if self.expected_us is not None else "time not measured"
        return f"<TunedModule {self.workload.label} on {self.device}, {time}, {self.space}>"

    def __reduce__(self) -> tuple[Any, ...]:
        # Copied and pickled by path: a loaded library cannot be.
        return _rebuild, (str(self.artefact), self._index, self.expected_us, self.measured, self.origin)

    # -- calls --------------------------------------------------------------------------------------

    def __call__(self, *args: Any, out: Any = None, **named: Any) -> Any:
        """Run the kernel on the inputs of the workload and return the output (`out` when given).

        Inputs: all torch tensors on this module's device, or all numpy arrays, with the workload's shapes and dtypes (bfloat16
        in numpy through ml_dtypes). Contiguous inputs are not copied (on CUDA: those that start on a 16-byte
        boundary); others are copied first. A CUDA module runs on
        torch's current stream, does not synchronise and may be captured in a CUDA graph; it copies numpy arrays to the GPU and
        the result back. Calls are thread-safe.

        named: a family's optional inputs, such as bias of Conv2d.  out: a contiguous tensor or array of the output's shape and
        dtype that shares no memory with an input. Gradients (of any order) are recorded for families that have them
        (`KronMatmul`), without `out`. Raises ArgumentError or ArgumentTypeError naming the argument; UnsupportedError where
        gradients cannot be recorded.
        """
        return self.call_flat(self.workload.flatten_named(args, named) if named else self.workload.flatten_args(args), out)

    def call_flat(self, flat: Sequence[Any], out: Any) -> Any:
        """`__call__`, of all inputs in workload order."""
        # Compiling comes first: torch.compile must not see, and guard on, a signature that a later plain call creates.
        plain = out is None and not _is_numpy(flat) and not _is_compiling() and not _is_traced()
        if plain and self._signature is not None and self._signature.fits(flat):
            out = self._signature.new_output()
            self._executable(flat, out)
            return out
        specs = self.manifest.inputs
        arguments.check_count(specs, len(flat), self.workload)
        if arguments.kind_of(specs, flat, out) == "numpy":
            return self._call_numpy(flat, out)
        import torch

        plain = all(type(t) in (torch.Tensor, torch.nn.Parameter) for t in flat)
        if _is_compiling() or _is_traced() or not plain or (out is None and arguments.needs_grad(flat)):
            arguments.check_grad(specs, flat, out, self.gradient)
            from kronsched.runtime import ops

            return ops.call(self._handle, flat, out)
        return self.call_torch(flat, out)

    def bind(self, **tensors: torch.Tensor) -> BoundModule:
        """Fix some inputs, by name (those of `manifest.inputs`): the result is called with the others, in their order.

        What depends on them alone, such as weights in the order that tensor cores read, is computed once, here: on torch's
        current stream, so bind before a CUDA graph is captured, and keep the result as long as the graph. For inference: bind
        again after a change of these tensors. Raises ArgumentError or ArgumentTypeError naming the argument.
        """
        from kronsched.runtime.bound import BoundModule

        return BoundModule(self, tensors)

    def bind_executable(self, tensors: Mapping[str, torch.Tensor]) -> Executable | None:
        """`Executable.bind`, for tensors that were checked."""
        return self._executable.bind(tensors)

    def reference(self, *args: Any, **named: Any) -> Any:
        """The result in float64 by the workload's reference, of the same kind and on the same device as the inputs."""
        flat = self.workload.flatten_named(args, named) if named else self.workload.flatten_args(args)
        specs = self.manifest.inputs
        arguments.check_count(specs, len(flat), self.workload)
        if arguments.kind_of(specs, flat, None) == "numpy":
            import numpy as np

            for spec, array in zip(specs, flat, strict=True):
                arguments.check_numpy(spec, array)
            ready = [_from_numpy(np.require(a, requirements=["C", "A", "W"])) for a in flat]
            return self.workload.reference(*ready).numpy()
        for spec, tensor in zip(specs, flat, strict=True):
            arguments.check_torch(spec, tensor, flat[0].device)
        return self.workload.reference(*flat)

    def call_torch(self, flat: Sequence[torch.Tensor], out: torch.Tensor | None) -> torch.Tensor:
        """Check flat torch inputs and run, without the custom op."""
        import torch

        if self._signature is None:
            self._signature = arguments.TorchSignature(self.manifest.inputs, self.manifest.output, self.device)
        signature = self._signature
        arguments.check_grad(self.manifest.inputs, flat, out)
        device = signature.device
        ready = []
        for spec, tensor in zip(self.manifest.inputs, flat, strict=True):
            arguments.check_torch(spec, tensor, device)
            if tensor.is_neg() or tensor.is_conj():
                tensor = tensor.resolve_neg().resolve_conj()
            tensor = tensor if tensor.is_contiguous() else tensor.contiguous()
            ready.append(tensor if signature.aligned(tensor) else tensor.clone())
        spec = self.manifest.output
        if out is None:
            out = signature.new_output()
        else:
            arguments.check_torch(spec, out, device, "out")
            spans = [(s.name, t.data_ptr(), s.nbytes) for s, t in zip(self.manifest.inputs, ready, strict=True)]
            arguments.check_out(out.is_contiguous() and not (out.is_neg() or out.is_conj()), out.data_ptr(), spec.nbytes, spans)
        if signature.aligned(out):
            self._executable(ready, out)
        else:
            whole = signature.new_output()
            self._executable(ready, whole)
            out.copy_(whole)
        if not out.is_inference():
            torch.autograd.graph.increment_version(out)  # it was written behind autograd's back
        return out

    def _call_numpy(self, flat: Sequence[np.ndarray], out: np.ndarray | None) -> np.ndarray:
        import numpy as np

        ready = []
        for spec, array in zip(self.manifest.inputs, flat, strict=True):
            arguments.check_numpy(spec, array)
            ready.append(np.require(array, requirements=["C", "A"]))
        spec = self.manifest.output
        if out is None:
            out = np.empty(spec.shape, dtype=DTYPES[spec.dtype].numpy())
        else:
            arguments.check_numpy(spec, out, "out")
            if not out.flags.writeable:
                raise ArgumentError("out is read-only")
            spans = [(s.name, a.ctypes.data, s.nbytes) for s, a in zip(self.manifest.inputs, ready, strict=True)]
            arguments.check_out(out.flags.c_contiguous and out.flags.aligned, out.ctypes.data, spec.nbytes, spans)
        if self.manifest.kind == "cpu":
            self._executable(ready, out)
            return out
        result = self.call_torch([_from_numpy(a).to(self.device) for a in ready], None)
        _from_numpy(out).copy_(result)
        return out


def find(handle: str, device_index: int) -> TunedModule:
    """The live module of an artefact directory on a device, loaded when there is none."""
    found = _live.get((handle, device_index))
    return found if found is not None else TunedModule.from_artefact(Path(handle), device_index=device_index)


def _is_numpy(flat: Sequence[Any]) -> bool:
    import numpy as np

    return len(flat) > 0 and isinstance(flat[0], np.ndarray)


def _is_compiling() -> bool:
    import torch

    return torch.compiler.is_compiling()


def _is_traced() -> bool:
    """Whether something records what torch does (make_fx, FakeTensorMode, torch.jit.trace): only an operator is recorded."""
    import torch

    return torch._C._len_torch_dispatch_stack() > 0 or torch._C._get_tracing_state() is not None


def _rebuild(artefact: str, index: int, expected_us: float | None, measured: bool, origin: str) -> TunedModule:
    return TunedModule.from_artefact(
        Path(artefact), device_index=index, expected_us=expected_us, measured=measured, origin=origin
    )


def _from_numpy(array: np.ndarray) -> torch.Tensor:
    """A torch tensor over an array's memory; dtypes torch does not know from numpy pass as bytes."""
    import torch

    if array.dtype.kind in "fiuc" and array.dtype.type.__module__ == "numpy":
        return torch.from_numpy(array)
    carrier = {1: "uint8", 2: "int16"}[array.dtype.itemsize]
    return torch.from_numpy(array.view(carrier)).view(getattr(torch, array.dtype.name))
