"""Checks and converts the arguments of a module call. Every error is one line that names the argument.

Shapes and the number of arguments are an ArgumentError (a ValueError); type, dtype and device an ArgumentTypeError (a TypeError).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kronsched.dtypes import DTYPES
from kronsched.errors import ArgumentError, ArgumentTypeError, UnsupportedError
from kronsched.runtime import huge_pages
from kronsched.workloads.base import TensorSpec, Workload

if TYPE_CHECKING:
    import numpy as np
    import torch


class TorchSignature:
    """The quick check of a call whose torch tensors are right in every respect: a kernel may take less time than full checks."""

    def __init__(self, inputs: Sequence[TensorSpec], output: TensorSpec, device: str) -> None:
        """Precompute what each tensor must look like."""
        import torch

        self.device = torch.device(device)
        # CUDA kernels use 16-byte vector accesses, which fault on a view that starts in between; CPU code takes any element.
        self.alignment = 16 if self.device.type == "cuda" else 1
        self.inputs = [(DTYPES[s.dtype].torch(), s.shape) for s in inputs]
        self.output = (DTYPES[output.dtype].torch(), output.shape)
        self._plain = (torch.Tensor, torch.nn.Parameter)

    def fits(self, tensors: Sequence[Any]) -> bool:
        """Whether every tensor can be used as it is: no error, no copy, no autograd, no tensor subclass."""
        import torch
        from torch.autograd import forward_ad

        if len(tensors) != len(self.inputs):
            return False
        recording = torch.is_grad_enabled()
        for t, (dtype, shape) in zip(tensors, self.inputs, strict=True):
            if type(t) not in self._plain or t.dtype is not dtype or t.shape != shape or (recording and t.requires_grad):
                return False
            if t.device != self.device or not t.is_contiguous() or t.is_neg() or t.is_conj() or not self.aligned(t):
                return False
        return not (forward_ad._current_level >= 0 and any(carries_tangent(t) for t in tensors))

    def aligned(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor's first element lies where the kernel's vector accesses need it."""
        return self.alignment == 1 or tensor.data_ptr() % self.alignment == 0

    def new_output(self) -> torch.Tensor:
        """An uninitialised output tensor."""
        import torch

        dtype, shape = self.output
        out = torch.empty(shape, dtype=dtype, device=self.device)
        if self.device.type == "cpu":
            huge_pages.advise(out.data_ptr(), out.nbytes)
        return out


def check_count(specs: Sequence[TensorSpec], given: int, workload: Workload) -> None:
    """ArgumentError unless as many tensors are given as there are specs."""
    if given != len(specs):
        wanted = ", ".join(f"{s.name} {_shape(s.shape)}" for s in specs)
        raise ArgumentError(f"{given} tensors were given; {workload.label} takes {len(specs)}: {wanted}")


def kind_of(specs: Sequence[TensorSpec], tensors: Sequence[Any], out: Any) -> str:
    """Whether all tensors are "numpy" or "torch"; ArgumentTypeError names the first that is of another kind."""
    import numpy as np

    named = [*zip((s.name for s in specs), tensors, strict=True), *([("out", out)] if out is not None else [])]
    wanted: Any
    if isinstance(named[0][1], np.ndarray):
        kind, wanted = "numpy", np.ndarray
    else:
        import torch

        kind, wanted = "torch", torch.Tensor
    for name, tensor in named:
        if not isinstance(tensor, wanted):
            first = named[0][0]
            needed = (
                "torch.Tensor or numpy.ndarray is needed" if name == first else f"{_type_name(wanted)} is needed, as {first} is"
            )
            raise ArgumentTypeError(f"{name} is of type {_type_name(type(tensor))}: a {needed}")
    return kind


def check_numpy(spec: TensorSpec, array: np.ndarray, name: str | None = None) -> None:
    """Check dtype and shape of an array against a spec; `name` defaults to the spec's."""
    name = name or spec.name
    if array.dtype != DTYPES[spec.dtype].numpy():
        raise ArgumentTypeError(f"{name} has dtype {array.dtype}, {spec.dtype} is needed")
    if array.shape != spec.shape:
        raise ArgumentError(f"{name} has shape {_shape(array.shape)}, {_shape(spec.shape)} is needed")


def check_torch(spec: TensorSpec, tensor: torch.Tensor, device: torch.device, name: str | None = None) -> None:
    """Check dtype, shape, device and layout of a tensor against a spec; `name` defaults to the spec's."""
    import torch

    name = name or spec.name
    if tensor.dtype != DTYPES[spec.dtype].torch():
        raise ArgumentTypeError(f"{name} has dtype {str(tensor.dtype).removeprefix('torch.')}, {spec.dtype} is needed")
    if tuple(tensor.shape) != spec.shape:
        raise ArgumentError(f"{name} has shape {_shape(tensor.shape)}, {_shape(spec.shape)} is needed")
    if tensor.device != device:
        raise ArgumentTypeError(f"{name} is on {tensor.device}, this module runs on {device}")
    if tensor.layout != torch.strided:
        raise ArgumentTypeError(f"{name} has layout {tensor.layout}, torch.strided is needed")


def needs_grad(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether autograd has to record a call with these inputs."""
    import torch

    return torch.is_grad_enabled() and any(t.requires_grad for t in tensors)


def check_grad(
    specs: Sequence[TensorSpec], tensors: Sequence[torch.Tensor], out: torch.Tensor | None, gradient: str | None = None
) -> None:
    """UnsupportedError when autograd would have to record the call and cannot: there is no `gradient`, or there is an `out`."""
    import torch

    for spec, tensor in zip(specs, tensors, strict=True):
        if torch.compiler.is_compiling():  # which traces neither question; under it the operator has no formula for them
            break
        if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            raise UnsupportedError(f"{spec.name} is inside a torch.func transform (vmap, grad, jvp), which is not supported yet")
        if carries_tangent(tensor):
            raise UnsupportedError(f"{spec.name} carries a tangent: forward-mode differentiation is not supported yet")
    if torch.is_grad_enabled():
        for spec, tensor in zip(specs, tensors, strict=True):
            if tensor.requires_grad and (gradient is None or out is not None):
                why = "backward is not supported yet" if out is None else "out= is not allowed where gradients are recorded"
                raise UnsupportedError(f"{spec.name} requires grad: {why}; use torch.no_grad()")
        if out is not None and out.requires_grad:
            raise UnsupportedError("out requires grad: out= is not allowed where gradients are recorded; use torch.no_grad()")


def carries_tangent(tensor: torch.Tensor) -> bool:
    """Whether forward-mode differentiation would have to propagate a tangent through the call."""
    from torch.autograd import forward_ad

    level = forward_ad._current_level
    return level >= 0 and forward_ad.unpack_dual(tensor, level=level).tangent is not None  # type: ignore[no-untyped-call]


def check_out(contiguous: bool, address: int, nbytes: int, inputs: Sequence[tuple[str, int, int]]) -> None:
    """Check a given `out`: contiguous, and no byte shared with an input given as (name, address, bytes)."""
    if not contiguous:
        raise ArgumentError("out is not contiguous, or lazily conjugated or negated: a plain row-major tensor is needed")
    for name, start, size in inputs:
        if start < address + nbytes and address < start + size:
            raise ArgumentError(f"out shares memory with {name}: the result cannot be computed in place")


def _shape(shape: Sequence[int]) -> str:
    return "(" + ", ".join(map(str, shape)) + ("," if len(shape) == 1 else "") + ")"


def _type_name(cls: type) -> str:
    return cls.__name__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__name__}"
