"""Every way a candidate can go wrong has its status, and the next good candidate is measured all the same."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kronsched.errors import ArgumentError, UnsupportedError
from kronsched.hardware import PRESETS, resolve_target
from kronsched.measure.base import STATUSES, Measured
from kronsched.measure.live import LiveMeasurer, MeasureError
from kronsched.measure.timing import TimingPlan
from kronsched.measure.worker import Session, prepare, run
from kronsched.space import Candidate
from kronsched.workloads.kron import KronMatmul
from tests.measure.injected_kernels import Double, Injected, Meter, NoReference, Plain, candidate

CPU = resolve_target("cpu")
ROOT = str(Path(__file__).parents[2])
QUICK = TimingPlan(budget_s=0.02, wanted=10, fewest=3, sample_us=100, longest_us=100)
WORKLOAD = Double(512)

BAD = {
    "wrong": ("wrong_result", "max relative error"),
    "beyond": ("wrong_result", "wrote out of bounds: 4 bytes changed just after tensor 'y'"),
    "before": ("wrong_result", "wrote out of bounds: 4 bytes changed just before tensor 'y'"),
    "beyond_input": ("wrong_result", "got nan"),
    "changes_input": ("wrong_result", "changed its input 'x'"),
    "unwritten": ("wrong_result", "left 3 of 512 elements of the output unwritten"),
    "flaky": ("flaky", "different results"),
    "abort": ("crash", "SIGABRT"),
    "segfault": ("crash", "SIGSEGV"),
    "endless": ("timeout", "over 1 s"),
    "no_load": ("launch_error", "kronsched_test_no_such_function"),
    "no_compile": ("compile_error", "llvm"),
    "invalid": ("invalid", "breaks the constraint"),
    "build_endless": ("timeout", "the build took over"),
    "build_abort": ("crash", "the builder process ended by SIGABRT"),
}


def measurer(workload=WORKLOAD, **options) -> LiveMeasurer:
    options = {"builders": 1, "run_timeout_s": 1.0, "build_timeout_s": 3.0, "plan": QUICK, **options}
    return LiveMeasurer(workload, [Injected(), Plain()], CPU, **options)


def kind_of(measured: Measured) -> str:
    return str(measured.candidate.config["kind"])


@pytest.fixture(scope="module")
def live() -> Iterator[LiveMeasurer]:
    with measurer(dedupe=False) as made:
        yield made


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_candidate_has_its_status_and_a_good_one_follows(live: LiveMeasurer, kind: str) -> None:
    results = {kind_of(m): m for m in live.measure([candidate(kind), candidate("good")])}
    status, error = BAD[kind]
    bad, good = results[kind], results["good"]
    assert bad.status == status in STATUSES
    assert error in str(bad.error)
    assert bad.median_us is None
    assert good.status == "ok", good.error
    assert good.run is not None and len(good.run.times_us) >= 3
    assert good.median_us is not None and 0 < good.median_us < 1e5
    assert good.run.max_relative_error == 0.0


def test_results_carry_what_a_record_needs(live: LiveMeasurer) -> None:
    (good,) = live.measure([candidate("good_otherwise")])
    assert good.build.source_sha256 is not None and len(good.build.source_sha256) == 64
    assert good.build.artefact is not None
    artefact = Path(good.build.artefact)
    assert artefact.is_absolute() and (artefact / "manifest.json").exists()
    assert good.build.seconds > 0
    assert good.run is not None and good.run.seconds > 0
    assert good.run.noise is not None and good.run.noise >= 0
    assert good.run.energy_j is None


def test_an_unknown_space_is_invalid(live: LiveMeasurer) -> None:
    (found,) = live.measure([Candidate("elsewhere", ())])
    assert found.status == "invalid"
    assert "elsewhere" in str(found.error) and "test_injected" in str(found.error)


def test_leaving_early_and_going_on(live: LiveMeasurer) -> None:
    for _ in live.measure([candidate("good"), candidate("endless"), candidate("good")]):
        break
    assert [m.status for m in live.measure([candidate("good")])] == ["ok"]
    assert list(live.measure([])) == []


def test_equal_sources_are_run_once_and_energy_is_per_call() -> None:
    with measurer(observers=(Meter(),)) as live:
        directory = live._dir
        batch = [candidate(kind) for kind in ("good", "good_again", "good_otherwise", "good")]
        first = list(live.measure(batch))
        again = list(live.measure([candidate("good_again")]))
        runs = {kind_of(m): m.run for m in (*first, *again)}
        assert len(first) == 4
        assert runs["good"] is runs["good_again"] is again[0].run
        assert runs["good_otherwise"] is not runs["good"]
        assert all(m.status == "ok" and m.run is not None and 0 < (m.run.energy_j or 0) < 3 for m in first)
        assert again[0].build.source_sha256 == first[0].build.source_sha256
    assert not directory.exists()
    with pytest.raises(MeasureError, match="closed"):
        next(live.measure([candidate("good")]))
    live.close()


def test_a_real_program_and_integers(tmp_path: Path) -> None:
    with measurer(KronMatmul(m=5, factors=[(4, 3), (3, 5)]), work_dir=tmp_path / "kept") as live:
        (found,) = live.measure([Candidate("test_plain", (("unused", 0),))])
    assert found.status == "ok", found.error
    assert found.run is not None and found.run.max_relative_error is not None and found.run.max_relative_error < 1e-6
    assert (Path(str(found.build.artefact)) / "manifest.json").exists()  # a given directory is kept


def test_measuring_from_threads_that_end() -> None:
    # The workers' parent-death signal is sent when the thread that started them ends.
    statuses: list[str] = []
    with measurer() as live:
        for kind in ("good", "good_otherwise"):
            thread = threading.Thread(target=lambda k=kind: statuses.extend(m.status for m in live.measure([candidate(k)])))
            thread.start()
            thread.join()
    assert statuses == ["ok", "ok"]


def test_without_reference_nothing_is_measured() -> None:
    with measurer(NoReference(8)) as live, pytest.raises(MeasureError, match="no reference today"):
        list(live.measure([candidate("good")]))


def test_mistakes_are_named() -> None:
    with pytest.raises(UnsupportedError, match="H200"):
        LiveMeasurer(WORKLOAD, [Injected()], PRESETS["nvidia/h200"])
    with pytest.raises(ArgumentError, match="builders=0"):
        measurer(builders=0)
    local = Injected()
    local.lock = threading.Lock()  # type: ignore[attr-defined]
    with pytest.raises(ArgumentError, match="picklable"):
        LiveMeasurer(WORKLOAD, [local], CPU)


# -- the runner's own functions, in this process --------------------------------------------------------


@pytest.fixture
def built(tmp_path: Path):
    """Builds a kind for int32, where poison is a number like others."""
    from kronsched.runtime.build import build_artefact

    def make(kind: str) -> str:
        build_artefact(Double(64, "int32"), Injected(), {"kind": kind}, CPU, tmp_path / kind)
        return str(tmp_path / kind)

    return make


def test_integers_left_unwritten_are_found(built) -> None:
    session = Session(Double(64, "int32"), CPU, seed=3, plan=QUICK)
    size = prepare(session, 0)
    assert size == 4
    for which in range(size):
        assert run(session, built("good"), which).result.status == "ok"
        ran = run(session, built("unwritten"), which)
        assert (ran.result.status, ran.replace) == ("wrong_result", False)
        assert ran.result.error == "left 3 of 64 elements of the output unwritten"
    ran = run(session, built("beyond"), 0)
    assert (ran.result.status, ran.replace) == ("wrong_result", True)


def test_inputs_differ_from_problem_to_problem_and_from_seed_to_seed() -> None:
    from kronsched.measure.worker import Bench

    benches = [Bench(Session(WORKLOAD, CPU, seed)) for seed in (0, 1)]
    firsts = [float(bench.problem(which).inputs[0][0]) for bench in benches for which in range(4)]
    assert len(set(firsts)) == 8
    problem = benches[0].problem(1)
    assert benches[0].problem(1) is problem
    benches[0].forget(1)
    assert benches[0].problem(1) is not problem


# -- processes ------------------------------------------------------------------------------------------

# No `__main__` guard, as users write it.
SCRIPT = """
import signal
import sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # where pytest itself runs in the background it is ignored
sys.path.insert(0, {root!r})
from tests.measure.injected_kernels import Double, Injected, candidate
from kronsched.hardware import resolve_target
from kronsched.measure.live import LiveMeasurer

live = LiveMeasurer(Double(512), [Injected()], resolve_target("cpu"), builders=1, run_timeout_s=600)
for measured in live.measure([candidate("good"), candidate("endless")]):
    print(measured.status, flush=True)
"""


def descendants(pid: int) -> set[int]:
    found = set()
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in map(int, (task / "children").read_text().split()):
            found |= {child} | descendants(child)
    return found


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_no_worker_outlives_the_tuner(tmp_path: Path, how: signal.Signals) -> None:
    script = tmp_path / "user_script.py"
    script.write_text(SCRIPT.format(root=ROOT))
    environment = {**os.environ, "TMPDIR": str(tmp_path)}  # a killed tuner leaves its artefacts there
    command = [sys.executable, str(script)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ok\n"  # by then the endless kernel has been sent to the runner
        workers = descendants(process.pid)
        assert len(workers) >= 3
        start = time.monotonic()
        os.kill(process.pid, how)
        process.wait(timeout=30)
        while any(map(alive, workers)) and time.monotonic() - start < 10:
            time.sleep(0.05)
        assert not any(map(alive, workers))
        assert time.monotonic() - start < 5
    finally:
        process.kill()


OWN = """
import sys
sys.path.insert(0, {root!r})
from tests.measure.injected_kernels import Double, Injected, candidate
from kronsched.hardware import resolve_target
from kronsched.measure.live import LiveMeasurer

class Mine(Injected):
    name = "mine"

if __name__ == "__main__":
    with LiveMeasurer(Double(512), [Mine()], resolve_target("cpu"), builders=1) as live:
        print([m.status for m in live.measure([candidate("good", "mine")])])
"""


def test_a_schedule_defined_in_a_guarded_script(tmp_path: Path) -> None:
    script = tmp_path / "own.py"
    script.write_text(OWN.format(root=ROOT))
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60)
    assert done.stdout == "['ok']\n", done.stderr


def test_a_schedule_defined_interactively_is_refused() -> None:
    done = subprocess.run([sys.executable, "-c", OWN.format(root=ROOT)], capture_output=True, text=True, timeout=60)
    assert "ArgumentError" in done.stderr and "interactive" in done.stderr


def test_builders_do_not_import_torch_and_the_tuner_imports_neither() -> None:
    code = (
        "import sys; from kronsched.measure import live, worker; assert not {'torch', 'tvm'} & {*sys.modules};"
        "worker.set_up_builder(); assert 'tvm' in sys.modules and 'torch' not in sys.modules;"
        "import torch; torch.zeros(1)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_device_elsewhere_is_refused_before_processes_start() -> None:
    with pytest.raises(UnsupportedError):
        LiveMeasurer(WORKLOAD, [Injected()], replace(CPU, present=False))
