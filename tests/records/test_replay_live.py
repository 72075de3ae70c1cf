"""Replay with the real runtime and measurer, on this machine's CPU and, for digests, on a GPU that is not here."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

from kronsched import KronMatmul, registry, replay
from kronsched.hardware import PRESETS, resolve_target
from kronsched.measure.base import BuildResult, Measured, RunResult
from kronsched.records import Journal, TuningRecord, record_of
from tests.records.plain_schedule import PlainCpu

WORKLOAD = KronMatmul(m=8, factors=[(4, 4)] * 3)


def retimed(record: TuningRecord, factor: float) -> TuningRecord:
    return dataclasses.replace(record, result={**record.result, "median_us": record.result["median_us"] * factor})


def test_measure_log_and_replay_on_this_cpu(tmp_path):
    from kronsched.measure.live import LiveMeasurer

    device = resolve_target("cpu")
    registry.register_schedule(PlainCpu)
    schedule = registry.schedule("plain_cpu")
    space = schedule.space(WORKLOAD, device)
    candidate = space.candidate(schedule.default_config(WORKLOAD, device))
    with LiveMeasurer(WORKLOAD, [schedule], device) as measurer:
        (measured,) = measurer.measure([candidate])
    record = record_of(WORKLOAD, device, schedule.name, space.digest, measured, {"strategy": "test"})
    assert record.ok, record.result["error"]
    log = tmp_path / "log.jsonl"
    # Times that no machine's noise reaches: the first can only be met, the second never.
    for entry in (retimed(record, 100), retimed(record, 0.01)):
        Journal(log).append(entry)
    results = replay(log, measure=True, verify=True)
    assert [r.status for r in results] == ["reproduced", "slower"], [r.error for r in results]
    for result in results:
        assert result.digest_matches and result.versions == {}
        assert result.measured_us is not None and result.measured_us > 0
        assert result.max_relative_error is not None and result.max_relative_error < 1e-5


def test_a_gpu_source_is_rebuilt_exactly_in_another_process(tmp_path):
    device = PRESETS["nvidia/h200"]
    schedule = registry.schedule("kron_cuda_simt")
    space = schedule.space(WORKLOAD, device)
    candidate = space.candidate(schedule.default_config(WORKLOAD, device))
    code = (
        "from kronsched import KronMatmul, registry; from kronsched.hardware import PRESETS; "
        "from kronsched.runtime.build import lower_source; w = KronMatmul(m=8, factors=[(4, 4)] * 3); "
        "s = registry.schedule('kron_cuda_simt'); d = PRESETS['nvidia/h200']; "
        "print(lower_source(w, s, s.default_config(w, d), d)[1])"
    )
    digest = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    log = tmp_path / "log.jsonl"
    for sha in (digest, digest[::-1]):
        measured = Measured(candidate, BuildResult("ok", source_sha256=sha), RunResult("ok", times_us=(12.0,)))
        Journal(log).append(record_of(WORKLOAD, device, schedule.name, space.digest, measured, {}))
    assert [r.status for r in replay(log)] == ["reproduced", "source_differs"]
