"""Builds in parallel, before the ranks of `bench kron-multi` start, the kernels that they will need.

A rank builds a kernel at its first call, one after another; here all cores build into the artefact cache at once.

Read first: `prepare`.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kronsched.bench.kron_multi import Case
from kronsched.distributed.grid import Grid, grids, phases
from kronsched.distributed.pipeline import ways
from kronsched.hardware import Device
from kronsched.measure.crew import default_builders
from kronsched.measure.pools import Workers
from kronsched.measure.worker import set_up_builder

if TYPE_CHECKING:
    from kronsched.records.schema import TuningRecord
    from kronsched.workloads.base import Workload

TIMEOUT_S = 300.0
"""Seconds of one build; what takes longer is left to the ranks."""
Kernel = tuple[str, tuple[Any, ...], str, int]
"""("kron", factors, dtype, rows) or ("ks", pattern, dtype, batch)."""
Choice = tuple[str, dict[str, Any]]
"""A space's name and a config of it."""


def prepare(cases: Sequence[Case], modes: Sequence[str], ranks: int, chunks: Sequence[int], device: Device) -> int:
    """Build what `kron_multi.measure` of these arguments will call; returns how many kernels it asked for.

    A kernel that cannot be built is left out: the rank that needs it will say why.
    """
    asked = tasks(dict.fromkeys(needed(cases, modes, ranks, chunks)), device)
    with tempfile.TemporaryDirectory(prefix="kronsched-build-") as folder:
        workers = Workers(min(len(asked), default_builders(device)), Path(folder) / "log", set_up_builder)
        try:
            started: list[Future[Any]] = [workers.schedule(_build, w, c, device, timeout=TIMEOUT_S) for w, c in asked.items()]
            for future in started:
                future.exception()
        finally:
            workers.replace()
    return len(asked)


def needed(cases: Iterable[Case], modes: Sequence[str], ranks: int, chunks: Sequence[int]) -> Iterable[Kernel]:
    """Every product of one rank alone that the measurement is made of."""
    for case in cases:
        yield "kron", case.factors, case.dtype, case.rows
        for mode in modes:
            rows = case.rows * (ranks if mode == "weak" else 1)
            for grid in grids(ranks, case.factors):
                for block in {rows // grid.rows, -(-rows // grid.rows)} - {0}:
                    yield from _of_block(case, grid, block, chunks)


def _of_block(case: Case, grid: Grid, rows: int, chunks: Sequence[int]) -> Iterable[Kernel]:
    """Of a rank with so many rows: each phase of each way to divide the factors, for each size of piece."""
    count = len(case.factors)
    for local in (None, *range(count, 0, -1)) if grid.columns > 1 else (None,):
        steps = phases(case.factors, grid.columns, local) or ()
        for pieces in chunks if grid.columns > 1 else (1,):
            for piece in {rows // pieces, -(-rows // pieces)} - {0}:
                for step in steps:
                    lead = step.k_in // step.group_in // grid.columns
                    yield "kron", case.factors[step.start : step.stop], case.dtype, piece * lead
                if True in ways(steps, grid.columns):
                    p, q = case.factors[0]
                    yield "ks", (piece, q, p, 1), case.dtype, steps[0].group_out // grid.columns


def tasks(kernels: Iterable[Kernel], device: Device) -> dict[Workload, tuple[Choice, ...]]:
    """The workloads that the products are computed by, each with the configs of logs that would be tried first."""
    from kronsched.nn import dynamic, ks_dynamic

    found: dict[Workload, tuple[Choice, ...]] = {}
    for family, shape, dtype, size in kernels:
        if family == "ks":
            ks = ks_dynamic.kernels_for((shape,), "batch_last", dtype, device.torch_device)
            made: list[Workload] = [ks._workload(bucket) for _, _, bucket in ks.plan(size)]
            tuned, field = ks._known(), "batch"
        else:
            kron = dynamic.kernels_for(shape, dtype, device.torch_device)
            made, tuned, field = [kron._workload(bucket) for _, bucket in kron.plan(size)], kron._known(), "m"
        for workload in made:
            if workload not in found:
                found[workload] = _choices(workload, tuned, field, device)
    return found


def _choices(workload: Workload, tuned: Mapping[int, TuningRecord], field: str, device: Device) -> tuple[Choice, ...]:
    from kronsched.nn import nearby
    from kronsched.records import database

    if getattr(workload, field) in tuned:
        records = database.ranked(workload, device)
    else:
        records = list(nearby.usable(workload, device, tuned, field))
    return tuple((record.space["name"], dict(record.config)) for record in records)


def _build(workload: Workload, choices: Sequence[Choice], device: Device) -> None:
    """Fill the cache. The process does not touch the GPU: contexts of many processes are made one after another."""
    from kronsched.errors import CompileError, InvalidConfig
    from kronsched.runtime.cache import get_or_build
    from kronsched.runtime.load import choose_config

    for space, config in choices:
        with contextlib.suppress(CompileError, InvalidConfig):
            get_or_build(workload, space, config, device)
            return
    space, chosen, _ = choose_config(workload, device)
    get_or_build(workload, space, chosen, device)  # type: ignore[arg-type]
