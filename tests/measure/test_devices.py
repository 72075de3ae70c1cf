"""Several runners of one machine, and what happens when any of them ends."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pebble import ProcessExpired

from kronsched.cli.root import run
from kronsched.errors import ArgumentError, UnsupportedError
from kronsched.hardware import PRESETS, resolve_target
from kronsched.measure import runner
from kronsched.measure.crew import as_devices
from kronsched.measure.live import LiveMeasurer
from kronsched.measure.timing import TimingPlan
from kronsched.measure.worker import Session
from kronsched.records.journal import Journal
from kronsched.search.places import place_for
from tests.measure import farm_plugin  # noqa: F401
from tests.measure.injected_kernels import Double, Injected, NoReference, candidate

CPU = resolve_target("cpu")
QUICK = TimingPlan(budget_s=0.02, wanted=10, fewest=3, sample_us=100, longest_us=100)
WORKLOAD = Double(512)


def statuses(results: Any) -> Counter[tuple[str, str]]:
    return Counter((str(m.candidate.config["kind"]), m.status) for m in results)


def live(devices: int = 2, workload: Double = WORKLOAD, **options: Any) -> LiveMeasurer:
    options = {"builders": 1, "run_timeout_s": 2.0, "plan": QUICK, **options}
    return LiveMeasurer(workload, [Injected()], [CPU] * devices, **options)


@pytest.fixture(scope="module")
def two() -> Iterator[LiveMeasurer]:
    with live(dedupe=False) as made:
        deadline = time.monotonic() + 120
        while not all(r.ready for r in made._runners) and time.monotonic() < deadline:
            list(made.measure([candidate("good")]))
        yield made


def test_two_runners_give_each_candidate_one_result(two: LiveMeasurer) -> None:
    found = statuses(two.measure([candidate(k) for k in ["good", "wrong", "good_otherwise", "no_load", "invalid", "good"]]))
    good = {("good", "ok"): 2, ("good_otherwise", "ok"): 1}
    assert found == {**good, ("wrong", "wrong_result"): 1, ("no_load", "launch_error"): 1, ("invalid", "invalid"): 1}


def test_a_candidate_whose_runner_is_killed_from_outside_runs_again_beside_others(two: LiveMeasurer) -> None:
    def kill() -> None:
        """One runner that is busy with an endless kernel, while the other is busy too."""
        while not all(r.job is not None and r._preparing is None for r in two._runners):
            time.sleep(0.02)
        [pid] = two._runners[0]._workers._pool._pool_manager.worker_manager.workers  # type: ignore[union-attr]
        os.kill(pid, signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    found = statuses(two.measure([candidate("endless"), candidate("endless")]))
    thread.join()
    assert found == {("endless", "timeout"): 2}  # the second run of the one went its own way


class Pool:
    """Stands for `Workers`: runs nothing, counts how often it was replaced."""

    replaced = 0

    def replace(self) -> None:
        self.replaced += 1

    def log_tail(self) -> str:
        return "the log"


def expired(code: int) -> ProcessExpired:
    error = ProcessExpired("Abnormal termination")
    error.exitcode = code
    return error


@pytest.mark.parametrize(
    ("error", "runs", "status", "text"),
    [
        (expired(-signal.SIGKILL), 2, "crash", "ended by SIGKILL; it printed: the log"),
        (expired(-signal.SIGTERM), 2, "crash", "ended by SIGTERM"),
        (expired(-signal.SIGSEGV), 1, "crash", "ended by SIGSEGV"),
        (BrokenProcessPool("it broke"), 3, "crash", "it broke"),
        (TimeoutError(), 1, "timeout", "the run took over 2 s"),
        (ValueError("of no known kind"), 1, "launch_error", "of no known kind"),
    ],
)
def test_how_often_a_candidate_runs_whose_runner_ends(error: Exception, runs: int, status: str, text: str) -> None:
    session = Session(WORKLOAD, CPU, 0)
    job = runner.Job(candidate("good"), "")
    for count in range(1, runs + 1):
        made = runner.Runner(Pool(), session, CPU, 2.0)  # type: ignore[arg-type]
        made.job, made.future, job.tries = job, Future(), count
        made.future.set_exception(error)
        returned, result = made.advance()
        assert returned is job and (result is None) == (count < runs)
    assert result is not None and result.status == status and text in str(result.error)


def test_a_runner_that_cannot_prepare_is_left_out(two: LiveMeasurer, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = two._runners
    second.replace()
    monkeypatch.setattr(second, "_session", replace(second._session, workload=NoReference(512)))
    with pytest.warns(RuntimeWarning, match="is used no more: inputs or reference"):
        while len(two._runners) == 2:  # the first runner goes on alone until the other has failed
            assert statuses(two.measure([candidate("good"), candidate("wrong")])) == {
                ("good", "ok"): 1,
                ("wrong", "wrong_result"): 1,
            }
    assert two._runners == [first]


def test_only_devices_of_one_model_are_mixed() -> None:
    with pytest.raises(ArgumentError, match=r"name 'Other'.* is not like the first .*one log"):
        as_devices([CPU, replace(CPU, name="Other")])
    gpu = replace(PRESETS["nvidia/h200"], present=True, driver="1")
    with pytest.raises(ArgumentError, match="driver '2'"):
        as_devices([gpu, replace(gpu, index=1, driver="2")])
    with pytest.raises(ArgumentError, match="'cuda:0' is named twice"):
        as_devices([gpu, gpu])
    with pytest.raises(UnsupportedError, match="nothing can be measured"):
        as_devices([CPU, PRESETS["nvidia/h200"]])
    assert as_devices([gpu, replace(gpu, index=1)])[1].torch_device == "cuda:1"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"devices": "cpu,cpu", "cluster": "a"}, "not allowed together"),
        ({"devices": "cpu", "target": "cpu"}, "target='cpu' is not allowed with devices"),
        ({"devices": " , "}, "at least one is needed"),
        ({"devices": "cpu,gpu"}, "target='gpu' is not allowed"),
        ({"devices": 3}, "must be a list of names"),
        ({"devices": [3]}, "3 must be a name"),
    ],
)
def test_wrong_places_are_one_line(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises((ArgumentError, TypeError), match=message):
        place_for(**{"target": "auto", "devices": None, "cluster": None, "cluster_key": None, **arguments})


def test_tune_on_two_devices_measures_each_candidate_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "a.jsonl"
    command = [
        "tune",
        "kron",
        "--m",
        "8",
        "--factors",
        "2x2,2x3",
        "--devices",
        "cpu,cpu",
        "--trials",
        "6",
        "--strategy",
        "random",
    ]
    assert run([*command, "--log", str(log), "--json"]) == 0
    out, err = capfd.readouterr()
    assert json.loads(out)["trials"] == 6 and "on cpu,cpu" in err
    records = Journal(log).read()
    assert len({r.candidate.key for r in records}) == 6 and {r.target["name"] for r in records} == {CPU.name}
