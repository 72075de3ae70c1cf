"""kill -9 of a real tuner process: the log stays readable and the next run goes on from it."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kronsched.records.journal import Journal

# The measurer takes 20 ms a candidate, so that the kill falls into the middle of a batch.
SCRIPT = """
import sys, time
from pathlib import Path
from kronsched import registry, tune
from kronsched.search.table import SimulatedMeasurer
from tests.search.synthetic import FusedSchedule, fused_table, fused_workload

class Slow(SimulatedMeasurer):
    def measure(self, batch):
        for result in super().measure(batch):
            time.sleep(0.02)
            yield result

registry.register_schedule(FusedSchedule)
registry.schedules_for = lambda workload, device: [FusedSchedule()]
result = tune(fused_workload(), target="nvidia/h200", trials=int(sys.argv[2]), log=sys.argv[1], measurer=Slow(fused_table()))
print(result.known, result.trials)
"""


def start(log: Path, trials: int) -> subprocess.Popen[str]:
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", SCRIPT, str(log), str(trials)]
    return subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("after", [3, 21])
def test_kill_9_and_resume(tmp_path: Path, after: int) -> None:
    log = tmp_path / "a.jsonl"
    process = start(log, 10_000)
    end = time.monotonic() + 60
    while not log.exists() or log.read_bytes().count(b"\n") < after:
        assert process.poll() is None and time.monotonic() < end, process.communicate()
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    kept = Journal(log).read()
    assert len(kept) >= after
    resumed = start(log, 16)
    out, err = resumed.communicate(timeout=60)
    assert resumed.returncode == 0, err
    assert out.split() == [str(len(kept)), "16"]
    keys = [r.candidate.key for r in Journal(log).read()]
    assert len(keys) == len(set(keys)) == len(kept) + 16
