"""A shape's peers, timed in the runner process that has just checked its candidates, on the inputs that it holds anyway.

Read first: `Contests.row` (called by the tuner of a grid), `compete` (what the runner does).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kronsched.bench.peers import peers_for
from kronsched.bench.run import row_of, shown_of
from kronsched.bench.screen import ScreenedContest, sampled
from kronsched.bench.suites import Case
from kronsched.bench.tuning import kernels_of_peers
from kronsched.measure import worker
from kronsched.measure.pools import Workers
from kronsched.runtime.module import TunedModule

if TYPE_CHECKING:
    import torch

    from kronsched.bench.peers import Peer
    from kronsched.bench.row import Row
    from kronsched.hardware import Device
    from kronsched.workloads.base import Workload

TIMEOUT_S = 120.0
"""For all peers of a shape together; the longest of the Kronecker-sparse grid take some tenths of a second a call."""
SPARE_BYTES = 1 << 30


@dataclass(frozen=True)
class Entry:
    """Our kernel of a contest: where it was built and what its record says."""

    artefact: str
    expected_us: float | None
    origin: str


class Contests:
    """The peers of a grid's shapes and where the rows go.

    cases: by workload key.  peers: names.  energy: joules a call as well.  progress: gets each row; a shape whose kernel got
    better comes again.
    """

    def __init__(
        self, cases: Sequence[Case], peers: Sequence[str], progress: Callable[[Row], None], energy: bool = False
    ) -> None:
        """Nothing is timed yet."""
        self._cases: Mapping[str, Case] = {case.workload.key: case for case in cases}
        self._peers, self._progress, self._energy = tuple(peers), progress, energy

    @staticmethod
    def warm_up(device: Device, runner: Workers) -> None:
        """Let the runner import torch and open the device while the first kernels are built."""
        runner.schedule(_open, device.torch_device, timeout=TIMEOUT_S)

    def kernels(self, workload: Workload) -> list[Workload]:
        """The workloads whose kernels of ours the peers of a shape run; they find them in the artefact cache."""
        return kernels_of_peers(workload, self._peers)

    def row(self, session: worker.Session, entry: Entry, runner: Workers) -> Row:
        """Time a shape in a runner that may hold its inputs. Raises what the runner's end raises."""
        case = self._cases[session.workload.key]
        served = peers_for(case.workload)
        chosen = {name: served[name] for name in self._peers if name in served}
        row: Row = runner.schedule(compete, session, case, entry, chosen, self._energy, timeout=TIMEOUT_S).result()
        self._progress(row)
        return row


def _open(device: str) -> None:
    import torch

    torch.zeros(1, device=device)


def compete(session: worker.Session, case: Case, entry: Entry, peers: Mapping[str, Peer], energy: bool) -> Row:
    """In the runner: the row of a shape."""
    bench = worker.bench_of(session)

    def module(workload: Workload) -> TunedModule:
        return TunedModule.from_artefact(
            Path(entry.artefact),
            device_index=session.device.index,
            expected_us=entry.expected_us,
            measured=True,
            origin=entry.origin,
        )

    def contest(workload: Workload, device: Device) -> ScreenedContest:
        return SharedContest(bench, workload, device, energy, shown_of(peers))

    with bench.stream():
        return row_of(case, session.device, peers, module, contest, lambda w, d: 2 * w.min_bytes + SPARE_BYTES)


class SharedContest(ScreenedContest):
    """A contest on the inputs and the reference of a runner. Ours was checked there already and is compared on a sample again."""

    def __init__(self, bench: worker.Bench, workload: Workload, device: Device, energy: bool, shown: Sequence[str]) -> None:
        """Takes the runner's first problem."""
        self._bench = bench
        super().__init__(workload, device, energy, shown)

    def _prepare(self) -> None:
        problem, arena = self._bench.problem(0), self._bench.arena()
        arena.load(problem.inputs)
        self._sets = [inputs for inputs, _ in arena.sets]
        self._reference, self._rms = problem.reference, problem.reference_rms

    def _compared(self, name: str, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return sampled(y, self._reference)
