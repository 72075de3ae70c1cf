"""Times a suite: the best known kernel of each shape, and its peers on the same tensors with the same clock.

Read first: `run_suite`; contest.py for how results are checked and timed, tuning.py for tuning a whole suite beforehand.
"""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from kronsched.bench.chains import chains
from kronsched.bench.contest import Contest, needed_bytes
from kronsched.bench.groups import groups
from kronsched.bench.peers import peers_for, w4a16_paper
from kronsched.bench.peers.base import slack_of
from kronsched.bench.row import Kernel, Row, best_geomean, by_dtype, geomean, published_geomean
from kronsched.bench.suites import Case
from kronsched.bench.tuning import Logs, load_module, prebuild, tune_cases
from kronsched.errors import KronschedError, UnsupportedError, choose
from kronsched.hardware import Device, floor_us, measure_ceilings
from kronsched.measure.memory import free_bytes, release

if TYPE_CHECKING:
    import torch

    from kronsched.bench.peers import Peer
    from kronsched.runtime.module import TunedModule
    from kronsched.workloads.base import Workload

OURS = "kronsched"


def run_suite(
    cases: Sequence[Case],
    device: Device,
    peers: Sequence[str] | None = None,
    *,
    trials: int = 0,
    tune_seconds: float | None = None,
    logs: Logs | None = None,
    progress: Callable[[Row], None] = lambda row: None,
    say: Callable[[str], None] = lambda line: None,
) -> list[Row]:
    """Time each case on a device of this machine.

    peers: names from `peers_for` of the workloads at hand; None takes all of them.  trials: shapes whose log holds fewer records
    are tuned up to so many first.  tune_seconds: no shape is tuned after so long.  logs: where records are kept and looked up.
    progress: called with each row as it is done.  say: called with lines for people.

    A shape that fails gets a row that says so. Raises ArgumentError for an unknown peer, UnsupportedError for a device that is
    not here.
    """
    if not device.present:
        raise UnsupportedError(f"target={device.name!r} is not on this machine: nothing can be timed")
    wanted = choose_peers(cases, peers)
    say(f"{len(cases)} shape(s) on {device.name}: all are built first, then timed one after another")
    device = measure_ceilings(device)
    logs = logs or Logs()
    _prepare(cases, device, wanted, trials, tune_seconds, logs, say)
    rows = []
    for number, case in enumerate(cases, 1):
        say(f"[{number}/{len(cases)}] timing {case.workload.label}")
        known = peers_for(case.workload)
        chosen = {name: known[name] for name in wanted if name in known}
        row = row_of(case, device, chosen, lambda workload: load_module(workload, device, logs))
        release(device)
        rows.append(row)
        progress(row)
    return rows


def choose_peers(cases: Sequence[Case], peers: Sequence[str] | None) -> list[str]:
    """The names of the peers to time; ArgumentError for one that no family at hand has."""
    known = list(dict.fromkeys(name for case in cases for name in peers_for(case.workload)))
    for name in peers or ():
        if name not in known:
            raise choose("peer", name, known)
    return known if peers is None else list(peers)


def summary(suite: str, device: Device, rows: Sequence[Row], peers: Sequence[str]) -> dict[str, Any]:
    """The object that `bench --json` prints."""
    device = measure_ceilings(device)
    published = dict.fromkeys(name for row in rows for name in row.published)
    return {
        "suite": suite,
        "device": device.to_dict(),
        "rows": [row.to_dict() for row in rows],
        "geomean": {name: geomean(rows, name) for name in peers},
        "geomean_by_dtype": by_dtype(rows, peers),
        "best_geomean": best_geomean(rows),
        "groups": [group.to_dict() for group in groups(rows, device.kind == "cuda")],
        "chains": [chain.to_dict() for chain in chains(rows)],
        "geomean_published": {name: published_geomean(rows, name) for name in published},
        "ceilings": {
            "bandwidth_gbs": device.bandwidth_gbs,
            "peak_gflops": dict(device.peak_gflops),
            "from": device.ceilings_from,
        },
        "versions": versions(),
    }


def versions() -> dict[str, str | None]:
    """Versions of everything that was timed; None for what is not installed."""
    found: dict[str, str | None] = {}
    for name in (
        "kronsched",
        "apache-tvm",
        "torch",
        "numpy",
        "linear_operator",
        "pyfastkron",
        "gemlite",
        "humming-kernels",
        "triton",
        "lazylinop",
    ):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def _prepare(
    cases: Sequence[Case],
    device: Device,
    peers: Sequence[str],
    trials: int,
    seconds: float | None,
    logs: Logs,
    say: Callable[[str], None],
) -> None:
    """Tune and build everything, with the same workers; they end before anything is timed."""
    from kronsched.measure.crew import Crew

    with Crew(device) as crew:
        if trials > 0:
            tune_cases(cases, device, trials, logs, crew, seconds=seconds, say=say)
        prebuild(cases, device, logs, crew, peers)
        w4a16_paper.prebuild([case.workload for case in cases], peers, device, crew)


def row_of(
    case: Case,
    device: Device,
    peers: Mapping[str, Peer],
    module_of: Callable[[Workload], TunedModule],
    make_contest: Callable[[Workload, Device], Contest] = Contest,
    need_bytes: Callable[[Workload, Device], int] = needed_bytes,
) -> Row:
    """Time one case. module_of: our kernel of a workload.  make_contest: who checks and times; see `Contest`.

    need_bytes: memory that must be free for it.
    """
    workload, blank = case.workload, _blank(case, device, peers)
    try:
        _check_memory(need_bytes(workload, device), device)
        contest = make_contest(workload, device)
    except _NoRoom as e:
        return blank.but(failure=str(e))
    except Exception as e:  # out of memory after all, a broken CUDA context, or a family from outside that fails
        return blank.but(failure=f"inputs or reference cannot be made: {_line(e)}")
    kernel, failure = _enter_ours(contest, workload, module_of)
    notes = _enter_peers(contest, workload, peers)
    try:
        times = contest.times()
    except Exception as e:
        return blank.but(failure=failure or f"timing failed: {_line(e)}", kernel=kernel, notes=notes)
    errors = dict(contest.errors)
    return blank.but(
        us=times.get(OURS),
        peers={name: times.get(name) for name in peers},
        error=errors.pop(OURS, None),
        peer_errors=errors,
        failure=failure,
        kernel=kernel,
        notes={**contest.notes, **notes},
        joules=contest.joules,
    )


def _blank(case: Case, device: Device, peers: Mapping[str, Peer]) -> Row:
    """The row of a case that has no times."""
    workload, floor = case.workload, floor_us(case.workload, device)
    by_bytes = workload.min_bytes / (device.bandwidth_gbs * 1e3)
    return Row(
        workload,
        None,
        dict.fromkeys(peers),
        floor,
        floor_by="bandwidth" if by_bytes >= floor else "compute",
        published=case.published if case.published_on == device.name else {},
        information=shown_of(peers),
    )


class _NoRoom(KronschedError):
    """A case does not fit in the memory that is left."""


def _check_memory(need: int, device: Device) -> None:
    """Raises _NoRoom when so many bytes cannot be had, even once everything that earlier cases held is given back."""
    if need > free_bytes(device):
        release(device)  # takes a while; the graphs of an earlier case may hold gigabytes
        if need > (free := free_bytes(device)):
            raise _NoRoom(f"needs about {need / 1e9:.1f} GB for tensors, reference and peers; {free / 1e9:.1f} GB are free")


def _enter_ours(
    contest: Contest, workload: Workload, module_of: Callable[[Workload], TunedModule]
) -> tuple[Kernel | None, str | None]:
    """(our kernel, why it does not take part)."""
    kernel = None
    try:
        module = module_of(workload)
        kernel = _kernel(module)
        ahead = module.manifest.constant_launches(workload.weight_names)
        contest.enter(OURS, partial(_call, module), expected_us=None if ahead else module.expected_us)
    except Exception as e:  # whatever ours raises is a finding too, and the peers still have their times
        return kernel, _line(e)
    return kernel, None


def _call(module: TunedModule, inputs: Sequence[torch.Tensor]) -> Callable[[], Any]:
    """A call of our kernel. What depends on weights alone is computed here, as peers prepare theirs before they are timed."""
    names = module.workload.weight_names
    if not module.manifest.constant_launches(names):
        return partial(module, *inputs)
    given = dict(zip((spec.name for spec in module.manifest.inputs), inputs, strict=True))
    bound = module.bind(**{name: given.pop(name) for name in names})
    return partial(bound, *given.values())


def _enter_peers(contest: Contest, workload: Workload, peers: Mapping[str, Peer]) -> dict[str, str]:
    """Why the peers that do not take part do not, by name."""
    notes = {}
    for name, peer in peers.items():
        try:
            contest.enter(name, partial(peer, workload), slack_of(peer))
        except Exception as e:  # a peer may fail in any way
            notes[name] = _line(e)
    return notes


def shown_of(peers: Mapping[str, Peer]) -> tuple[str, ...]:
    """The peers that are shown for information and do not count as the best."""
    return tuple(name for name, peer in peers.items() if getattr(peer, "information", False))


def _kernel(module: TunedModule) -> Kernel:
    how = "tuned" if module.measured else next((w for w in ("predicted", "default") if module.origin.startswith(w)), "elsewhere")
    launches = len(module.manifest.launches) - len(module.manifest.constant_launches(module.workload.weight_names))
    return Kernel(how, module.space, module.config, launches, without_folders(module.origin))


def without_folders(origin: str) -> str:
    """The text with the name of each file in place of its path: results are shown to others, who have other folders."""
    return re.sub(r"\b(log|export) (?:[^\s,/]*/)+", r"\1 ", origin)


def _line(error: BaseException) -> str:
    """An error as one line, with its type where the text may not explain itself."""
    text = " ".join(str(error).split())[:300]
    return text if isinstance(error, KronschedError) and text else f"{type(error).__name__}: {text}".removesuffix(": ")
