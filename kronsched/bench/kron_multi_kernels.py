"""Builds in parallel, before the ranks of `bench kron-multi` start, the kernels that they will need.

A rank builds a kernel at its first call, one after another; here all cores build into the artefact cache at once.

    calls ── `needed` ──► products of one rank ── `tasks` ──► workloads with configs ── builders ──► artefact cache

Read first: `prepare`.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import as_completed
from pathlib import Path
from typing import TYPE_CHECKING

from kronsched.bench.kron_multi import Call, Case
from kronsched.bench.kron_multi_build import Choice, first_that_builds
from kronsched.distributed.grid import Grid, phases
from kronsched.distributed.pipeline import ways
from kronsched.errors import UserError
from kronsched.hardware import Device
from kronsched.measure.crew import default_builders
from kronsched.measure.pools import Workers
from kronsched.measure.worker import set_up_builder

if TYPE_CHECKING:
    from kronsched.records.schema import TuningRecord
    from kronsched.workloads.base import Workload

TIMEOUT_S = 300.0
"""Seconds of one build; what takes longer is left to the ranks."""
EVERY_S = 5.0
"""Seconds between two lines of progress."""
Kernel = tuple[str, tuple[tuple[int, int], ...] | tuple[int, int, int, int], str, int]
"""("kron", factors, dtype, rows) or ("ks", pattern, dtype, batch)."""


def prepare(calls: Sequence[Call], device: Device, note: Callable[[str], None]) -> None:
    """Build what `kron_multi.measure` of these calls will run; `note` gets lines of progress.

    A kernel that cannot be built is left out: the rank that needs it will say why.
    """
    asked = tasks(dict.fromkeys(needed(calls)), device)
    note(f"{len(asked)} kernels to build")
    with tempfile.TemporaryDirectory(prefix="kronsched-build-") as folder:
        workers = Workers(min(len(asked), default_builders(device)), Path(folder) / "log", set_up_builder)
        try:
            started = {workers.schedule(first_that_builds, w, c, device, timeout=TIMEOUT_S): w for w, c in asked.items()}
            failed, last = 0, time.perf_counter()
            for count, future in enumerate(as_completed(started), 1):
                failed += future.exception() is not None
                if time.perf_counter() - last > EVERY_S or count == len(started):
                    last = time.perf_counter()
                    note(f"{count} of {len(started)} kernels built" + (f", {failed} of them failed" if failed else ""))
        finally:
            workers.replace()


def needed(calls: Iterable[Call]) -> Iterable[Kernel]:
    """Every product of one rank alone that the calls are made of."""
    for call in calls:
        rows, grid = call.m, call.grid
        for block in {rows // grid.rows, -(-rows // grid.rows)} - {0}:
            for local, pieces in call.pairs:
                yield from _of_block(call.case, grid, block, local, pieces)


def _of_block(case: Case, grid: Grid, rows: int, local: int, pieces: int) -> Iterable[Kernel]:
    """Of a rank with so many rows: each phase, for each size of piece."""
    steps = phases(case.factors, grid.columns, local) or ()
    for piece in {rows // pieces, -(-rows // pieces)} - {0}:
        for step in steps:
            lead = step.k_in // step.group_in // grid.columns
            yield "kron", case.factors[step.start : step.stop], case.dtype, piece * lead
        if True in ways(steps, grid.columns):
            p, q = case.factors[0]
            yield "ks", (piece, q, p, 1), case.dtype, steps[0].group_out // grid.columns


def tasks(kernels: Iterable[Kernel], device: Device) -> dict[Workload, list[Choice]]:
    """The workloads that the products are computed by, slow builds first, each with the configs that would be tried first."""
    from kronsched.nn import dynamic, ks_dynamic

    found: dict[Workload, list[Choice]] = {}
    for family, shape, dtype, size in sorted(kernels, key=_slowness, reverse=True):
        if family == "ks":
            ks = ks_dynamic.kernels_for((shape,), "batch_last", dtype, device.torch_device)  # type: ignore[arg-type]
            made: list[Workload] = [ks.workload(bucket) for _, _, bucket in ks.plan(size)]
            tuned, field = ks._known(), "batch"
        else:
            kron = dynamic.kernels_for(shape, dtype, device.torch_device)  # type: ignore[arg-type]
            made, tuned, field = [kron._workload(bucket) for _, bucket in kron.plan(size)], kron._known(), "m"
        for workload in made:
            if workload not in found:
                found[workload] = _choices(workload, tuned, field, device)
    return {workload: choices for workload, choices in found.items() if choices}


def _slowness(kernel: Kernel) -> int:
    """Grows with the time that a kernel takes to build: with the number of factors and their sizes."""
    family, shape, _, _ = kernel
    return 0 if family == "ks" else sum(p for p, _ in shape)  # type: ignore[misc]


def _choices(workload: Workload, tuned: Mapping[int, TuningRecord], field: str, device: Device) -> list[Choice]:
    """The configs of logs, else the one of a cost model, which a builder would need xgboost and a second for."""
    from kronsched.nn import nearby
    from kronsched.records import database
    from kronsched.runtime.load import choose_config

    if getattr(workload, field) in tuned:
        records = database.ranked(workload, device)
    else:
        records = list(nearby.usable(workload, device, tuned, field))
    if not records:
        try:
            return [choose_config(workload, device)[:2]]
        except UserError:
            return []
    return [(record.space["name"], dict(record.config)) for record in records]
