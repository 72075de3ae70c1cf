"""4-bit kernels for any number of rows from few builds, and the torch operator of `W4A16Linear` in a compiled graph.

    few rows   one call: rows padded to the next power of two, as reading the weights twice would cost more (`PADDED_ROWS`)
    more       at most two calls on row views, no copy: the largest power of two ≤ m, then the last rows (see `row_plan`)
    m ≥ the recorded crossover: dequantise, then torch's library (w4a16_library.py)

A number of rows that was tuned gets its own kernel. Read first: `W4A16Kernels`, `product`.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import cached_property
from math import ceil, log2
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kronsched import registry
from kronsched.errors import ArgumentError, CompileError, InvalidConfig, RecordError, UnsupportedError
from kronsched.hardware import Device, resolve_target
from kronsched.nn.autograd import is_recorded, is_tracked
from kronsched.nn.dynamic import row_plan
from kronsched.nn.w4a16_library import LibraryProduct, crossover
from kronsched.records import database
from kronsched.records.journal import MAX_LINE
from kronsched.records.schema import TuningRecord
from kronsched.runtime.cache import get_or_build
from kronsched.runtime.load import load
from kronsched.runtime.module import TunedModule
from kronsched.workloads.gemm import Gemm

PADDED_ROWS = {"cuda": 128, "cpu": 64}
"""Up to so many rows one padded call is made: for the H200 see 96 and 128 rows in tuning_logs/h200/w4a16_library.json."""
TILE_ROWS = 8
"""Rows of a tile of tensor cores. With a config for fewer tiles weights are read again; one for more multiplies padding."""
_LARGEST_POWER = 24


class W4A16Kernels:
    """The kernels of one weight shape, kind of weights, dtype and device, built as they are needed. Thread-safe."""

    def __init__(self, one: Gemm, device: str) -> None:
        """Nothing is built yet. one: the workload with m=1."""
        self.one = one
        self._device = resolve_target(device)
        if not self._device.present:
            raise UnsupportedError(f"device={device!r} is not on this machine")
        self.device = f"cuda:{self._device.index}" if self._device.kind == "cuda" else "cpu"
        self._cap = next(1 << e for e in range(_LARGEST_POWER, -1, -1) if self._fits(1 << e))
        self._lock = threading.Lock()
        self.modules: dict[int, TunedModule] = {}
        self.library = LibraryProduct(one, self._device)

    @cached_property
    def threshold(self) -> int | None:
        """From so many rows on the library multiplies, by the record for this device; None for never."""
        found = crossover(self.one, self._device)
        return None if found is None else found.rows

    def uses_library(self, m: int) -> bool:
        """Whether m rows are multiplied by the library."""
        return self.threshold is not None and m >= self.threshold

    def prepare(self, m: int) -> None:
        """Build and load what m rows need."""
        if self.uses_library(m):
            self.library.prepare()
            return
        for _, bucket in self.plan(m):
            self.module(bucket)

    def plan(self, m: int) -> list[tuple[int, int]]:
        """(first row, rows of the kernel) of each call that m rows take; a single call may be of a kernel for more rows."""
        if m in self._known:
            return [(0, m)]
        if m <= min(PADDED_ROWS[self._device.kind], self._cap):
            return [(0, 1 << (m - 1).bit_length())]
        return row_plan(m, self._cap)

    def module(self, m: int) -> TunedModule:
        """The kernel for exactly m rows, built when there is none."""
        found = self.modules.get(m)
        if found is None:
            with self._lock:
                found = self.modules.get(m)
                if found is None:
                    found = self.modules[m] = self._build(replace(self.one, m=m))
        return found

    def __call__(self, x: Tensor, weights: list[Tensor]) -> Tensor:
        """Y (m, n) of x (m, k), m ≥ 1, and the flat tensors of the weights, without autograd."""
        return self.library(x, weights) if self.uses_library(x.shape[0]) else self.by_kernels(x, weights)

    def by_kernels(self, x: Tensor, weights: list[Tensor]) -> Tensor:
        """The same by the fused kernels, however many rows."""
        m = x.shape[0]
        spans = self.plan(m)
        if len(spans) == 1:
            rows = spans[0][1]
            whole = x if rows == m else _padded(x, rows)
            y: Tensor = self.module(rows)(whole, *weights)
            return y if rows == m else y[:m]
        x = x.contiguous()
        out = x.new_empty((m, self.one.n))
        for start, rows in spans:
            self.module(rows).call_torch([x[start : start + rows], *weights], out[start : start + rows])
        return out

    @cached_property
    def _known(self) -> dict[int, TuningRecord]:
        """The record for each m that was tuned for exactly these weights on this device."""
        records = (r for r in self._nearby if _fields(r) == _fields(self.one))
        best: dict[int, TuningRecord] = {}
        for record in records:
            best.setdefault(int(record.workload["m"]), record)
        return best

    @cached_property
    def _nearby(self) -> list[TuningRecord]:
        """Ok records of this device, n and k, in the order of the folders, the fastest first in each."""
        found: list[TuningRecord] = []
        for folder in database.search_dirs():
            found += sorted(_records(folder, self.one, self._device), key=lambda r: r.median_us or float("inf"))
        return found

    def _fits(self, m: int) -> bool:
        try:
            replace(self.one, m=m)
        except UnsupportedError:
            return False
        return True

    def _build(self, workload: Gemm) -> TunedModule:
        for record in self._usable(workload):
            try:
                artefact = get_or_build(workload, record.space["name"], record.config, self._device)
            except (CompileError, InvalidConfig):
                continue
            origin = f"config of m={record.workload['m']}, not measured"
            return TunedModule.from_artefact(artefact, device_index=self._device.index, origin=origin)
        return load(workload, device=self.device)

    def _usable(self, workload: Gemm) -> Iterator[TuningRecord]:
        """Records that `_lends` and whose config is valid: the same kind of weights first, then the nearest m (by ratio)."""
        if workload.m in self._known:  # `load` finds it, and says that it was measured
            return

        def distance(record: TuningRecord) -> tuple[int, float]:
            ours, theirs = _fields(workload), _fields(record)
            different = sum(ours[name] != theirs.get(name) for name in ours)
            return different, abs(log2(int(record.workload["m"]) / workload.m))

        tried: set[tuple[int, str]] = set()
        for record in sorted(self._nearby, key=distance):
            key = (int(record.workload["m"]), record.space["name"])
            if key in tried or not _lends(record, workload):
                continue
            tried.add(key)
            try:
                schedule = registry.schedule(record.space["name"])
            except ArgumentError:  # a space this process does not know
                continue
            if schedule.supports(workload, self._device) is not None:
                continue
            if schedule.space(workload, self._device).invalid(record.config) is None:
                yield record


def _lends(record: TuningRecord, workload: Gemm) -> bool:
    """Whether a config may serve other weights or rows: as many tiles of rows; float zeros (more registers) in both or none."""
    theirs = record.workload
    floats = [zeros == "float" for zeros in (theirs.get("zero_point"), workload.zero_point)]
    return ceil(theirs["m"] / TILE_ROWS) == ceil(workload.m / TILE_ROWS) and floats[0] == floats[1]


def _padded(x: Tensor, rows: int) -> Tensor:
    """More rows under x, with what is there: rows do not meet in a product, and filling them would take another launch."""
    whole = x.new_empty((rows, x.shape[1]))
    whole[: x.shape[0]] = x
    return whole


def _records(folder: Path, one: Gemm, device: Device) -> Iterator[TuningRecord]:
    """Records of a folder for this n and k. Lines are told apart by bytes first: parsing all would take seconds."""
    marks = [[json.dumps({name: value}, separators=s)[1:-1].encode() for s in ((",", ":"), (", ", ": "))]
             for name, value in (("family", one.family), ("n", one.n), ("k", one.k))]  # fmt: skip
    for path in database._logs(folder):
        try:
            data = path.read_bytes()
        except OSError:
            continue
        if not all(any(mark in data for mark in either) for either in marks):
            continue
        for line in data.split(b"\n"):
            if len(line) > MAX_LINE or not all(any(mark in line for mark in either) for either in marks):
                continue
            try:
                record = TuningRecord.from_json(line)
            except RecordError:  # `load` and `show` warn of it
                continue
            w = record.workload
            same = (w.get("family"), w.get("n"), w.get("k")) == (one.family, one.n, one.k)
            if same and record.ok and database.matches_device(record, device) and isinstance(w.get("m"), int) and w["m"] > 0:
                yield record


def _fields(source: TuningRecord | Gemm) -> dict[str, Any]:
    """What a config depends on besides m, n and k."""
    values = asdict(source) if isinstance(source, Gemm) else source.workload
    return {name: values.get(name) for name in ("a_dtype", "group_size", "zero_point", "act_order")}


# -- kernels shared by every layer of this process -----------------------------------------------------

_shared: dict[tuple[Gemm, str], W4A16Kernels] = {}
_shared_lock = threading.Lock()


def kernels_for(one: Gemm, device: str) -> W4A16Kernels:
    """The process's kernels for a workload with m=1 and a device ("cpu" or "cuda:N")."""
    key = (one, device)
    found = _shared.get(key)
    if found is None:
        made = W4A16Kernels(one, device)
        with _shared_lock:
            found = _shared.setdefault(key, made)
    return found


def clear() -> None:
    """Forget the shared kernels, so that the next call looks into the logs again, such as after tuning."""
    with _shared_lock:
        _shared.clear()
        _by_layer.clear()


# -- the product ---------------------------------------------------------------------------------------


def product(x: Tensor, weights: list[Tensor], n: int, group_size: int, zero_point: str, act_order: bool) -> Tensor:
    """Y (m, n) of x (m, k) and the flat tensors of `PackedWeight.tensors`. Differentiable by x, once."""
    if is_recorded((x, *weights)) or is_tracked((x,)):
        result: Tensor = torch.ops.kronsched.w4a16(x, weights, n, group_size, zero_point, act_order)
        return result
    return run(x, weights, n, group_size, zero_point, act_order)


def run(x: Tensor, weights: list[Tensor], n: int, group_size: int, zero_point: str, act_order: bool) -> Tensor:
    """`product` by the kernels, without autograd."""
    if x.shape[0] == 0:
        return x.new_empty((0, n))
    return kernels_of(x.shape[1], x.dtype, x.device, n, group_size, zero_point, act_order)(x, weights)


def kernels_of(
    k: int, dtype: torch.dtype, device: torch.device, n: int, group_size: int, zero_point: str, act_order: bool
) -> W4A16Kernels:
    """The process's kernels for a layer."""
    key = (k, dtype, device, n, group_size, zero_point, act_order)
    found = _by_layer.get(key)
    if found is None:  # making a workload, and hashing it, takes longer than a launch
        name = str(dtype).removeprefix("torch.")
        one = Gemm(1, n, k, name, group_size=group_size, zero_point=zero_point, act_order=act_order)
        found = _by_layer[key] = kernels_for(one, f"cuda:{device.index}" if device.type == "cuda" else device.type)
    return found


_by_layer: dict[tuple[Any, ...], W4A16Kernels] = {}


@torch.library.custom_op("kronsched::w4a16", mutates_args=())
def _w4a16(x: Tensor, weights: list[Tensor], n: int, group_size: int, zero_point: str, act_order: bool) -> Tensor:
    return run(x.detach(), weights, n, group_size, zero_point, act_order)


@_w4a16.register_fake
def _(x: Tensor, weights: list[Tensor], n: int, group_size: int, zero_point: str, act_order: bool) -> Tensor:
    return x.new_empty((x.shape[0], n))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weights, ctx.n, ctx.group_size, ctx.zero_point, ctx.act_order = inputs
    ctx.k = x.shape[1]
    ctx.save_for_backward(*weights)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, list[None], None, None, None, None]:
    weights = list(ctx.saved_tensors)
    dx = torch.ops.kronsched.w4a16_gradient(grad, weights, ctx.k, ctx.n, ctx.group_size, ctx.zero_point, ctx.act_order)
    return dx, [None] * len(weights), None, None, None, None


_w4a16.register_autograd(_backward, setup_context=_setup_context)


@torch.library.custom_op("kronsched::w4a16_gradient", mutates_args=())
def _w4a16_gradient(
    grad: Tensor, weights: list[Tensor], k: int, n: int, group_size: int, zero_point: str, act_order: bool
) -> Tensor:
    kernels = kernels_of(k, grad.dtype, grad.device, n, group_size, zero_point, act_order)
    return kernels.library.gradient(grad.detach(), weights)


@_w4a16_gradient.register_fake
def _(grad: Tensor, weights: list[Tensor], k: int, n: int, group_size: int, zero_point: str, act_order: bool) -> Tensor:
    return grad.new_empty((grad.shape[0], k))
