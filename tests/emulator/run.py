"""Run emitted CUDA on the CPU: allocate, launch, check, copy back.

Read first: `run_lowered` and `run_schedule`.
"""

from __future__ import annotations

import ctypes
import struct
import zlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from kronsched.dtypes import DTYPES
from kronsched.errors import choose
from kronsched.measure.check import max_relative_error
from kronsched.runtime.lower import Lowered, lower
from tests.emulator.build import load
from tests.emulator.errors import EmulatorError

if TYPE_CHECKING:
    from kronsched.hardware import Device
    from kronsched.runtime.manifest import LaunchSpec
    from kronsched.runtime.tensor_map import TensorMap
    from kronsched.schedules.base import Schedule
    from kronsched.space import Config
    from kronsched.workloads.base import Workload

ORDERS = ("forward", "reverse", "random")
POISON = 0xFF
_MAP_MAGIC = 0x544D4150
_kept_maps: list[Any] = []


class _Launch(ctypes.Structure):
    """As emu::Launch in runtime/emu.hpp."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("dynamic_bytes", ctypes.c_uint),
        ("order", ctypes.c_uint),
        ("seed", ctypes.c_uint),
        ("cluster", ctypes.c_uint),
        ("max_blocks", ctypes.c_uint64),
    )


def run_lowered(
    lowered: Lowered, arrays: dict[str, np.ndarray[Any, Any]], *, order: str = "forward", max_blocks: int | None = None
) -> None:
    """Run all launches of `lowered.source` in order, writing the arrays in place.

    arrays: C-contiguous, by tensor name, of the sizes the launches need. Scratch is allocated here and filled with 0xFF bytes.
    order: in which order threads, warps and blocks run (see runtime/scheduler.cpp).  max_blocks: run only so many blocks of
    each launch. Raises EmulatorError for an out-of-bounds or misaligned access, a deadlock, or an unknown instruction.
    """
    if order not in ORDERS:
        raise choose("order", order, ORDERS)
    tensors = dict(arrays)
    for spec in lowered.scratch:
        tensors[spec.name] = np.full(spec.nbytes, POISON, np.uint8)
    for launch in lowered.launches:
        _check_sizes(launch, tensors)
    library = load(lowered.source)
    library.emu_alloc.restype = ctypes.c_void_p
    library.emu_alloc.argtypes = (ctypes.c_char_p, ctypes.c_size_t)
    try:
        pointers = {}
        for name, array in tensors.items():
            pointers[name] = library.emu_alloc(name.encode(), array.nbytes)
            if not pointers[name]:
                raise EmulatorError(f"no memory for {array.nbytes} bytes of {name!r}")
            ctypes.memmove(pointers[name], array.ctypes.data, array.nbytes)
        for launch in lowered.launches:
            _launch(library, launch, pointers, order, max_blocks)
        for name, array in arrays.items():
            ctypes.memmove(array.ctypes.data, pointers[name], array.nbytes)
    finally:
        library.emu_free_all()


def _check_sizes(launch: LaunchSpec, tensors: Mapping[str, np.ndarray[Any, Any]]) -> None:
    names = {m.name: m.tensor for m in launch.maps}
    for arg, shape, dtype in zip(launch.args, launch.shapes, launch.dtypes, strict=True):
        name = names.get(arg, arg)
        if name not in tensors:
            raise EmulatorError(f"launch {launch.symbol} needs a tensor {name!r}")
        array = tensors[name]
        need = int(np.prod(shape)) * _itemsize(dtype)
        if array.nbytes != need or not array.flags.c_contiguous:
            raise EmulatorError(f"tensor {name!r}: {need} contiguous bytes are needed for {shape} {dtype}, {array.nbytes} given")


def _itemsize(dtype: str) -> int:
    return DTYPES[dtype].itemsize if dtype in DTYPES else np.dtype(dtype).itemsize


def _launch(library: ctypes.CDLL, launch: LaunchSpec, pointers: Mapping[str, int], order: str, max_blocks: int | None) -> None:
    run = getattr(library, f"emu_run_{launch.symbol}")
    run.restype = ctypes.c_char_p
    maps = {m.name: _encoded(m, pointers[m.tensor]) for m in launch.maps}
    args = (ctypes.c_void_p * len(launch.args))(*(maps[a] if a in maps else pointers[a] for a in launch.args))
    triple = ctypes.c_uint * 3
    seed = zlib.crc32(launch.symbol.encode())
    how = _Launch(
        triple(*launch.grid),
        triple(*launch.block),
        launch.shared_bytes,
        ORDERS.index(order),
        seed,
        launch.cluster,
        0 if max_blocks is None else max_blocks,
    )
    error = run(args, len(launch.args), ctypes.byref(how))
    if error:
        raise EmulatorError(f"{launch.symbol}: {error.decode(errors='replace')}")


def _encoded(spec: TensorMap, address: int) -> int:
    """The address of a tensor map as runtime/tensor.cpp reads it: 128-byte aligned, kept alive by `_kept_maps`."""
    rank = len(spec.extents)

    def padded(values: tuple[int, ...], n: int) -> tuple[int, ...]:
        return values + (0,) * (n - len(values))

    fields = (address, rank, _itemsize(spec.dtype), spec.swizzle, _MAP_MAGIC, *padded(spec.extents, 5), *padded(spec.box, 5))
    window = (*padded(spec.steps, 2), *padded(spec.lower, 2), *padded(spec.upper, 2))  # no steps: not in im2col mode
    content = struct.pack("=Q4I5I5I4Q2I4i", *fields, *padded(spec.strides, 4), *window)
    memory = ctypes.create_string_buffer(320)
    aligned = -(-ctypes.addressof(memory) // 128) * 128
    ctypes.memmove(aligned, content, len(content))
    _kept_maps.append(memory)
    del _kept_maps[:-64]
    return aligned


def run_schedule(
    schedule: Schedule, workload: Workload, config: Config, device: Device, seed: int = 0, order: str = "forward"
) -> float:
    """Lower a schedule, run it on fresh random inputs (`workload.make_inputs`) and return its `max_relative_error`.

    The output is poisoned with NaN bytes first. Raises as `lower` and `run_lowered` do.
    """
    import torch

    lowered = lower(workload, schedule, config, device)
    inputs = workload.make_inputs(seed)
    output = torch.empty(workload.output.shape, dtype=DTYPES[workload.output.dtype].torch())
    tensors = {t.name: v.contiguous() for t, v in zip(workload.inputs, inputs, strict=True)}
    tensors[workload.output.name] = output
    arrays = {name: tensor.reshape(-1).view(torch.uint8).numpy() for name, tensor in tensors.items()}
    arrays[workload.output.name][:] = POISON
    kept = {name: array.copy() for name, array in arrays.items() if name != workload.output.name}
    run_lowered(lowered, arrays, order=order)
    for name, before in kept.items():
        if not np.array_equal(before, arrays[name]):
            raise EmulatorError(f"the kernel changed its input {name!r}")
    return max_relative_error(output, workload.reference(*inputs))
