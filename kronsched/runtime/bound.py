"""`BoundModule`: a `TunedModule` some of whose inputs, such as weights, are fixed; made by `TunedModule.bind`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from kronsched.errors import ArgumentError, ArgumentTypeError, choose
from kronsched.runtime import arguments
from kronsched.runtime.module import TunedModule, _is_compiling, _is_traced


class BoundModule:
    """A module with some inputs fixed.

    module: the whole.  bound: the fixed inputs by name.  once: whether anything was computed ahead.
    A call that is more than a plain one (gradients, numpy arrays, tensors that must be copied, torch.compile) is the module's
    own, which computes everything anew.
    """

    def __init__(self, module: TunedModule, tensors: Mapping[str, torch.Tensor]) -> None:
        """See `TunedModule.bind`."""
        specs = {s.name: s for s in module.manifest.inputs}
        for name, tensor in tensors.items():
            if name not in specs:
                raise choose("bound input", name, specs)
            if not isinstance(tensor, torch.Tensor):
                raise ArgumentTypeError(f"{name} is of type {type(tensor).__name__}: a torch.Tensor is needed")
            arguments.check_torch(specs[name], tensor, torch.device(module.device))
        if module.manifest.kind == "cuda" and torch.cuda.is_current_stream_capturing():
            raise ArgumentError("inputs cannot be bound while a CUDA graph is captured: bind them before")
        self.module, self.bound = module, dict(tensors)
        self._signature = arguments.TorchSignature(module.manifest.inputs, module.manifest.output, module.device)
        self._order = [self.bound.get(name) for name in specs]
        plain = [t.detach() for t in tensors.values()]
        usable = all(t.is_contiguous() and not t.is_neg() and not t.is_conj() and self._signature.aligned(t) for t in plain)
        self._binding = module.bind_executable(dict(zip(tensors, plain, strict=True))) if usable else None

    @property
    def once(self) -> bool:
        """See the class."""
        return self._binding is not None

    def __call__(self, *args: Any, out: Any = None, **named: Any) -> Any:
        """The output, of the inputs that are not bound, by position."""
        if named:
            raise ArgumentError(f"{next(iter(named))} was given by name: inputs that are not bound are given by position")
        flat = self._flat(args)
        if self._binding is None or _is_compiling() or _is_traced() or not self._signature.fits(flat):
            return self.module.call_flat(flat, out)
        if out is None:
            result = self._signature.new_output()
            self._binding(flat, result)
            return result
        if not self._serves(out, flat):
            return self.module.call_flat(flat, out)
        self._binding(flat, out)
        if not out.is_inference():
            torch.autograd.graph.increment_version(out)
        return out

    def _serves(self, out: Any, flat: Sequence[torch.Tensor]) -> bool:
        """Whether `out` can be written as it is; the module says what is wrong with another one."""
        if not isinstance(out, torch.Tensor) or out.requires_grad or not self._signature.aligned(out):
            return False
        manifest = self.module.manifest
        arguments.check_torch(manifest.output, out, self._signature.device, "out")
        spans = [(s.name, t.data_ptr(), s.nbytes) for s, t in zip(manifest.inputs, flat, strict=True)]
        plain = out.is_contiguous() and not (out.is_neg() or out.is_conj())
        arguments.check_out(plain, out.data_ptr(), manifest.output.nbytes, spans)
        return True

    def _flat(self, args: Sequence[Any]) -> list[Any]:
        """All inputs in the module's order."""
        free = len(self._order) - len(self.bound)
        if len(args) != free:
            beside = f" beside {', '.join(self.bound)}" if self.bound else ""
            raise ArgumentError(f"{len(args)} tensors were given: {free} are needed{beside}")
        given = iter(args)
        return [next(given) if t is None else t for t in self._order]

    def __repr__(self) -> str:
        return f"<BoundModule of {self.module!r} with {', '.join(self.bound)}>"
