"""The torch custom operators behind a module call, so that torch.compile(fullgraph=True) and torch.export see one opaque op.

`kronsched::call(Tensor[] inputs, str artefact) -> Tensor`, `kronsched::call_out(Tensor[] inputs, Tensor(a!) out, str artefact)`.
A module is named by its artefact directory, not by a number: a graph that torch cached on disk then still finds it in another
process. Plain calls do not come here (a custom op costs more than a launch), calls that autograd records do. Imports torch.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from kronsched import registry
from kronsched.dtypes import DTYPES
from kronsched.errors import UnsupportedError
from kronsched.runtime import arguments
from kronsched.runtime.manifest import Manifest
from kronsched.runtime.module import TunedModule, find


def call(handle: str, inputs: Sequence[Tensor], out: Tensor | None) -> Tensor:
    """Run the module in the artefact directory `handle` through the custom op."""
    if out is None:
        result: Tensor = torch.ops.kronsched.call(list(inputs), handle)
        return result
    torch.ops.kronsched.call_out(list(inputs), out, handle)
    return out


@cache
def _module(handle: str, device_index: int) -> TunedModule:
    # Strong: a compiled graph outlives the module object it was traced with.
    return find(handle, device_index)


@cache
def _manifest(handle: str) -> Manifest:
    from pathlib import Path

    return Manifest.load(Path(handle))


@torch.library.custom_op("kronsched::call", mutates_args=())
def _call(inputs: Sequence[Tensor], artefact: str) -> Tensor:
    return _module(artefact, inputs[0].device.index or 0).call_torch(inputs, None)


@torch.library.custom_op("kronsched::call_out", mutates_args=("out",))
def _call_out(inputs: Sequence[Tensor], out: Tensor, artefact: str) -> None:
    _module(artefact, inputs[0].device.index or 0).call_torch(inputs, out)


def _setup_context(ctx: Any, inputs: tuple[list[Tensor], str], output: Tensor) -> None:
    tensors, ctx.artefact = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, grad: Tensor) -> tuple[list[Tensor | None], None]:
    label, where = _gradient(ctx.artefact)
    if where is None:
        raise UnsupportedError(f"backward of {label} is not supported yet; use torch.no_grad()")
    module, _, function = where.partition(":")
    rule = getattr(importlib.import_module(module), function)
    return rule(ctx.saved_tensors, grad, ctx.needs_input_grad[0]), None


@cache
def _gradient(handle: str) -> tuple[str, str | None]:
    """The label of a module's workload and where the gradient of its family is."""
    workload = registry.workload_from_dict(_manifest(handle).workload)
    return workload.label, getattr(workload, "gradient", None)


_call.register_autograd(_backward, setup_context=_setup_context)


@_call.register_fake
def _(inputs: Sequence[Tensor], artefact: str) -> Tensor:
    manifest = _check(inputs, artefact)
    spec = manifest.output
    return inputs[0].new_empty(spec.shape, dtype=DTYPES[spec.dtype].torch())


@_call_out.register_fake
def _(inputs: Sequence[Tensor], out: Tensor, artefact: str) -> None:
    manifest = _check(inputs, artefact)
    arguments.check_torch(manifest.output, out, inputs[0].device, "out")


def _check(inputs: Sequence[Tensor], artefact: str) -> Manifest:
    manifest = _manifest(artefact)
    for spec, tensor in zip(manifest.inputs, inputs, strict=True):
        arguments.check_torch(spec, tensor, inputs[0].device)
    return manifest
