"""Workers of a cluster, and what happens when any of them ends."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import Listener
from pathlib import Path
from typing import Any

import pytest

import kronsched
from kronsched.errors import ArgumentError
from kronsched.hardware import PRESETS, resolve_target
from kronsched.measure import farm, farm_protocol, runner
from kronsched.measure.base import BuildResult, Measured, RunResult
from kronsched.measure.farm import Farm
from kronsched.measure.farm_worker import Worker
from kronsched.measure.live import MeasureError
from kronsched.measure.timing import TimingPlan
from kronsched.records.journal import Journal
from kronsched.space import Candidate
from kronsched.workloads.kron import KronMatmul
from tests.measure import farm_plugin  # noqa: F401
from tests.measure.injected_kernels import Double, Injected, candidate

CPU = resolve_target("cpu")
ROOT = Path(__file__).parents[2]
QUICK = TimingPlan(budget_s=0.02, wanted=10, fewest=3, sample_us=100, longest_us=100)
WORKLOAD = Double(512)
MIXED = ["good", "wrong", "good_otherwise", "changes_input", "no_load", "invalid"]


def statuses(results: Any) -> Counter[tuple[str, str]]:
    return Counter((str(m.candidate.config["kind"]), m.status) for m in results)


# -- a cluster ------------------------------------------------------------------------------------------

KEY = b"k" * 32


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "cluster.key"
    path.write_bytes(KEY + b"\n")
    return path


@contextmanager
def worker_here(devices: int = 1) -> Iterator[str]:
    """A worker in this process; its builders and runners are processes as ever."""
    made = Worker(("127.0.0.1", 0), KEY, [CPU] * devices, builders=1, say=lambda line: None)
    threading.Thread(target=made.serve, daemon=True).start()
    try:
        yield f"127.0.0.1:{made.port}"
    finally:
        made.close()


def start_worker(key_file: Path) -> tuple[subprocess.Popen[str], str]:
    """A worker as users start it."""
    command = [sys.executable, "-m", "kronsched", "--plugin", "tests.measure.farm_plugin", "worker", "--listen", "127.0.0.1:0"]
    command += ["--devices", "cpu", "--key", str(key_file), "--builders", "1"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line.startswith("worker on 127.0.0.1:"), line + (process.communicate()[1] or "")
    return process, line.split()[2]


def measurer(found: Farm, **options: Any) -> farm.FarmMeasurer:
    return found.measurer(WORKLOAD, [Injected()], **{"run_timeout_s": 1.0, **options})


def test_a_worker_that_is_killed_loses_nothing(key_file: Path) -> None:
    process, address = start_worker(key_file)
    try:
        with worker_here() as other:
            found = Farm([address, other], key_file)
            kinds = [*MIXED, *["endless"] * 3]
            results = []
            with pytest.warns(RuntimeWarning, match="go back to the queue: worker .* is gone"):
                for measured in measurer(found).measure([candidate(k) for k in kinds]):
                    results.append(measured)
                    if len(results) == 1:
                        process.kill()
            assert Counter(k for k, _ in statuses(results).elements()) == Counter(kinds)
            assert {s for k, s in statuses(results) if k.startswith("good")} == {"ok"}
            assert {s for k, s in statuses(results) if k == "endless"} == {"timeout"}
            found.close()
    finally:
        process.kill()
        process.communicate()


def test_a_worker_serves_one_tuner_at_a_time_and_then_the_next(key_file: Path) -> None:
    with worker_here() as address:
        first = Farm([address], key_file)
        assert first.device.name == CPU.name and not first.device.present
        with pytest.raises(ArgumentError, match="measuring for another tuner"):
            Farm([address], key_file)
        with measuring_once(first) as results:
            assert statuses(results) == {("good", "ok"): 1, ("wrong", "wrong_result"): 1}
            assert all(m.build.artefact is None for m in results)
        first.close()
        time.sleep(0.2)
        second = Farm([address], key_file)
        generator = measurer(second).measure([candidate("good"), candidate("endless")])
        next(generator)
        generator.close()  # what is left is dropped
        second.close()


@contextmanager
def measuring_once(found: Farm) -> Iterator[list[Measured]]:
    yield list(measurer(found).measure([candidate("good"), candidate("wrong")]))


class Stub:
    """A worker without devices that says what a test wants."""

    def __init__(self, **hello: Any) -> None:
        self.hello = {
            "protocol": farm_protocol.PROTOCOL,
            "version": "0",
            "devices": [farm_protocol.device_to_json(CPU)],
            **hello,
        }
        self.asked: list[list[Any]] = []
        self.listener = Listener(("127.0.0.1", 0), "AF_INET")
        self.address = f"127.0.0.1:{self.listener.address[1]}"
        threading.Thread(target=self.serve, daemon=True).start()

    def serve(self) -> None:
        while True:
            try:
                channel = farm_protocol.accept(self.listener.accept(), KEY, "tuner")
                channel.send("hello", **self.hello)
                while (message := channel.receive(60))["kind"] != "close":
                    if message["kind"] == "open":
                        channel.send("opened", slots=4)
                    else:
                        self.asked.append(message["candidates"])
                        self.measure(channel, message["candidates"])
            except farm_protocol.FarmError:
                pass

    def measure(self, channel: farm_protocol.Channel, candidates: list[Any]) -> None:
        for index in range(len(candidates)):
            self.answer(channel, index)
        channel.send("done")

    @staticmethod
    def answer(channel: farm_protocol.Channel, index: int) -> None:
        run = RunResult("ok", None, (1.0, 2.0), 0.0)
        result = Measured(Candidate("x", ()), BuildResult("ok", artefact="/there"), run)
        channel.send("result", index=index, **farm_protocol.measured_to_json(result))


class Breaking(Stub):
    """Answers one candidate and hangs up."""

    def measure(self, channel: farm_protocol.Channel, candidates: list[Any]) -> None:
        if candidates:
            self.answer(channel, 0)
        channel.close()


class Lazy(Stub):
    """Shows signs of life and nothing else."""

    def measure(self, channel: farm_protocol.Channel, candidates: list[Any]) -> None:
        for _ in range(200):
            channel.send("alive")
            time.sleep(0.05)


class Silent(Stub):
    """Says nothing more."""

    def measure(self, channel: farm_protocol.Channel, candidates: list[Any]) -> None:
        time.sleep(10)


@pytest.mark.parametrize("kind", [Breaking, Lazy, Silent])
def test_what_a_lost_worker_had_is_measured_by_another(key_file: Path, kind: type[Stub], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(farm, "PREPARE_S", 0.3)
    real = farm_protocol.Channel.receive
    monkeypatch.setattr(farm_protocol.Channel, "receive", lambda self, silence_s=0.6: real(self, silence_s))
    bad, good = kind(), Stub()
    found = Farm([bad.address, good.address], key_file)
    batch = [candidate(f"{i}") for i in range(16)]
    with pytest.warns(RuntimeWarning, match="go back to the queue"):
        results = list(measurer(found, build_timeout_s=0.1, run_timeout_s=0.1).measure(batch))
    assert sorted(m.candidate.key for m in results) == sorted(c.key for c in batch)
    assert {m.status for m in results} == {"ok"} and {m.median_us for m in results} == {1.5}
    found.close()


def test_a_worker_that_comes_back_joins_again_unless_it_has_changed(key_file: Path) -> None:
    class Leaving(Stub):
        """Answers its first chunk and goes; answers all once it is called again."""

        def measure(self, channel: farm_protocol.Channel, candidates: list[Any]) -> None:
            super().measure(channel, candidates)
            if len(self.asked) == 1:
                channel.close()

    leaving, good = Leaving(), Stub()
    found = Farm([leaving.address, good.address], key_file)
    made = measurer(found)
    for _ in range(2):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert len(list(made.measure([candidate(f"{i}") for i in range(12)]))) == 12
    assert len(leaving.asked) > 1
    leaving.hello["devices"] = [farm_protocol.device_to_json(replace(CPU, name="Other"))]
    found.close()
    assert len(list(made.measure([candidate(f"{i}") for i in range(4)]))) == 4
    assert made._reasons == [f"worker {leaving.address} came back with other devices"]
    found.close()


def test_a_candidate_that_loses_every_worker_is_a_crash_and_no_worker_is_an_error(key_file: Path) -> None:
    class Dead(Stub):
        def measure(self, channel: farm_protocol.Channel, candidates: list[Any]) -> None:
            channel.close()

    found = Farm([Dead().address, Dead().address], key_file)
    results = []
    with pytest.raises(MeasureError, match="no worker of the cluster is left"), pytest.warns(RuntimeWarning):
        for measured in measurer(found).measure([candidate(f"{i}") for i in range(20)]):
            results.append(measured)
    assert all(m.status == "crash" and "2 workers were lost with it" in str(m.error) for m in results)


def test_chunks_shrink_towards_the_end(key_file: Path) -> None:
    stubs = [Stub(), Stub()]
    found = Farm([s.address for s in stubs], key_file)
    made = measurer(found)
    assert made.parallel == 8
    assert len(list(made.measure([candidate(f"{i}") for i in range(40)]))) == 40
    sizes = [len(chunk) for stub in stubs for chunk in stub.asked]
    assert sum(sizes) == 40 and max(sizes) == 4 and min(sizes) == 1
    found.close()


def test_unlike_or_strange_workers_are_refused(key_file: Path, tmp_path: Path) -> None:
    gpu = farm_protocol.device_to_json(replace(PRESETS["nvidia/h200"], driver="1"))
    for hello, message in [
        ({"devices": [gpu]}, "worker .*NVIDIA H200.* is not like the first"),
        ({"protocol": 99}, "protocol 99.*protocol 1 is needed"),
        ({"devices": [{"no": 1}]}, "does not say what it has"),
        ({"devices": []}, "does not say what it has"),
    ]:
        with pytest.raises(ArgumentError, match=message):
            Farm([Stub().address, Stub(**hello).address], key_file)
    with pytest.raises(ArgumentError, match=r"cannot be reached: Connection refused"):
        Farm(["127.0.0.1:9"], key_file)
    other = tmp_path / "other.key"
    other.write_text("another key of some length")
    with pytest.raises(ArgumentError, match="has another key"):
        Farm([Stub().address], other)
    with pytest.raises(ArgumentError, match="is named twice"):
        Farm(["a:1", "a:1"], key_file)


def test_tune_over_a_cluster(key_file: Path, tmp_path: Path) -> None:
    with worker_here() as address:
        workload = KronMatmul(m=8, factors=((2, 2), (2, 3)))
        log = tmp_path / "a.jsonl"
        options = {"trials": 4, "log": log, "strategy": "random", "cluster_key": key_file}
        result = kronsched.tune(workload, cluster=address, **options)
        assert result.trials == 4 == len(Journal(log).read()) and result.best is not None and result.reference_us is None
        time.sleep(0.2)
        with pytest.raises(ArgumentError, match="builders is not allowed with a cluster"):
            kronsched.tune(workload, cluster=address, builders=2, **options)
    # replayed and loaded like any other
    assert kronsched.load(log, workload, device="cpu").measured


# -- the protocol ---------------------------------------------------------------------------------------


def test_addresses() -> None:
    parse = farm_protocol.parse_address
    assert parse("node") == ("node", farm_protocol.DEFAULT_PORT)
    assert parse(" node:1 ") == ("node", 1)
    assert parse("[::1]:5") == ("::1", 5)
    for wrong in ("", ":1", "node:x", "node:70000"):
        with pytest.raises(ArgumentError, match="is not allowed"):
            parse(wrong)


def test_keys(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "key"
    with pytest.raises(ArgumentError, match="cannot be read"):
        farm_protocol.cluster_key(path)
    key = farm_protocol.cluster_key(path, make=True)
    assert len(key) == 64 and farm_protocol.cluster_key(path, make=True) == key
    assert path.stat().st_mode & 0o077 == 0
    path.write_text("short")
    with pytest.raises(ArgumentError, match="fewer than 16 bytes"):
        farm_protocol.cluster_key(path)


def test_results_and_devices_survive_the_wire() -> None:
    def wire(data: Any) -> Any:
        return json.loads(json.dumps(data))

    one = Candidate("s", (("a", 1), ("b", True), ("c", "x"), ("d", 0.5)))
    assert farm_protocol.candidate_from_json(wire(farm_protocol.candidate_to_json(one))) == one
    run = RunResult("ok", None, (1.0, 3.0), 1e-7, 0.1, 0.5, 2.0)
    measured = Measured(one, BuildResult("ok", None, "/path", "ab", 32, 1024, 0, 1.5), run)
    back = farm_protocol.measured_from_json(one, {**wire(farm_protocol.measured_to_json(measured)), "later": 1})
    assert back == replace(measured, build=replace(measured.build, artefact=None))
    gpu = PRESETS["nvidia/h200"]
    assert farm_protocol.device_from_json(wire(farm_protocol.device_to_json(gpu))) == replace(gpu, present=False)


def test_exit_codes_from_outside() -> None:
    assert -signal.SIGKILL in runner.FROM_OUTSIDE and -signal.SIGSEGV not in runner.FROM_OUTSIDE
