"""Times suites of hundreds of shapes shortly: kernels are built by all cores while earlier shapes are timed.

Read first: `run_grid`; screen.py for how a shape is timed, grid_tuning.py for how a grid is tuned.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from kronsched.bench.peers import peers_for
from kronsched.bench.run import choose_peers, row_of, shown_of
from kronsched.bench.screen import ScreenedContest
from kronsched.bench.tuning import BuiltAhead, Logs
from kronsched.errors import UnsupportedError
from kronsched.hardware import Device, measure_ceilings
from kronsched.measure.crew import Crew
from kronsched.measure.memory import release

if TYPE_CHECKING:
    from kronsched.bench.row import Row
    from kronsched.bench.suites import Case

COLLECT_EVERY = 32
"""Rows between two runs of the garbage collector; torch's cache is emptied after each row."""


def run_grid(
    cases: Sequence[Case],
    device: Device,
    peers: Sequence[str] | None = None,
    *,
    logs: Logs | None = None,
    known: Mapping[str, Row] | None = None,
    seconds: float | None = None,
    energy: bool = False,
    progress: Callable[[Row], None] = lambda row: None,
    say: Callable[[str], None] = lambda line: None,
) -> list[Row]:
    """Time each case once and shortly; see `run_suite` for the arguments that both have.

    known: rows by workload key that need not be timed again.  seconds: no row is started after so long.  energy: joules a call
    of ours and of the best peer as well (most of a second a row more).

    The rows come in the order of the cases; where time was up, there are fewer rows than cases.
    """
    if not device.present:
        raise UnsupportedError(f"target={device.name!r} is not on this machine: nothing can be timed")
    wanted, known = choose_peers(cases, peers), known or {}
    device, begin = measure_ceilings(device), time.perf_counter()
    rows: list[Row] = []
    left = [c for c in cases if c.workload.key not in known]
    if left and seconds != 0:
        say(f"{len(left)} shape(s) on {device.name}: each is timed once it is built, the first after some seconds")
    with Crew(device) as crew:
        ahead = BuiltAhead(left if seconds != 0 else [], device, logs or Logs(), crew, wanted)
        for number, case in enumerate(cases):
            row = known.get(case.workload.key)
            if row is None:
                if seconds is not None and time.perf_counter() - begin > seconds:
                    count = sum(c.workload.key not in known for c in cases[number:])
                    say(f"stopped after {seconds:g} s: {count} of {len(cases)} shapes are left")
                    break
                served = peers_for(case.workload)
                chosen = {name: served[name] for name in wanted if name in served}
                contest = partial(ScreenedContest, energy=energy, shown=shown_of(chosen))
                row = row_of(case, device, chosen, ahead.module, contest)
                _give_back(device, number)
            rows.append(row)
            progress(row)
    return rows


def _give_back(device: Device, number: int) -> None:
    """Memory of the row's graphs: torch can use it for no other pool until its cache is emptied."""
    if number % COLLECT_EVERY == COLLECT_EVERY - 1 or device.kind == "cpu":
        release(device)
        return
    import torch

    torch.cuda.empty_cache()
