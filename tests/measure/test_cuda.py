"""The same injected faults on a GPU, and timing by graph replay. Without a GPU, only that the kernels compile is checked."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kronsched.errors import CompileError
from kronsched.hardware import PRESETS, resolve_target
from kronsched.measure.baseline import time_callable
from kronsched.measure.energy import NvmlEnergy
from kronsched.measure.live import LiveMeasurer
from kronsched.runtime.build import build_artefact
from tests.measure.injected_kernels import CUDA_BODIES, Double, InjectedCuda, candidate

SPACE = InjectedCuda.name
BAD = {
    "wrong": ("wrong_result", "max relative error"),
    "beyond": ("wrong_result", "wrote out of bounds: 4 bytes changed just after tensor 'y'"),
    "changes_input": ("wrong_result", "changed its input 'x'"),
    "flaky": ("flaky", ""),
    "illegal": ("launch_error", ""),
    "endless": ("timeout", "over 2 s"),
    "no_compile": ("compile_error", "kronsched_test_no_such_function"),
}


@pytest.mark.parametrize("kind", sorted(CUDA_BODIES))
def test_the_injected_kernels_compile_as_meant(kind: str, tmp_path: Path) -> None:
    def build() -> str:
        build_artefact(Double(512), InjectedCuda(), {"kind": kind}, PRESETS["nvidia/h200"], tmp_path / "out")
        return (tmp_path / "out" / "kernel.cu").read_text()

    if kind == "no_compile":
        with pytest.raises(CompileError, match="kronsched_test_no_such_function"):
            build()
        return
    source = build()
    assert (tmp_path / "out" / "kernel.cubin").stat().st_size > 0
    assert ("while (1)" in source) == (kind == "endless")
    assert ("17592186044416" in source) == (kind == "illegal")


@pytest.fixture(scope="module")
def live() -> Iterator[LiveMeasurer]:
    made = LiveMeasurer(
        Double(512),
        [InjectedCuda()],
        resolve_target("cuda"),
        builders=2,
        run_timeout_s=2.0,
        dedupe=False,
        observers=(NvmlEnergy(),),
    )
    with made:
        yield made


@pytest.mark.cuda
@pytest.mark.parametrize("kind", BAD)
def test_a_bad_candidate_has_its_status_and_a_good_one_follows(live: LiveMeasurer, kind: str) -> None:
    results = list(live.measure([candidate(kind, SPACE)])) + list(live.measure([candidate("good", SPACE)]))
    status, error = BAD[kind]
    assert results[0].status == status, results[0].error
    assert error in str(results[0].error)
    good = results[1]
    assert good.status == "ok", good.error
    assert good.run is not None and len(good.run.times_us) >= 7
    assert good.median_us is not None and 0.5 < good.median_us < 50
    assert good.run.energy_j is not None and 0 < good.run.energy_j < 1


@pytest.mark.cuda
def test_times_agree_with_bandwidth_and_a_candidate_is_quick() -> None:
    device = resolve_target("cuda")
    workload = Double(1 << 26)  # 0.5 GB read and written: far beyond the cache
    with LiveMeasurer(workload, [InjectedCuda()], device, builders=1) as live:
        (first,) = live.measure([candidate("good", SPACE)])
        start = time.perf_counter()
        (second,) = live.measure([candidate("good_otherwise", SPACE)])
        wall = time.perf_counter() - start
    for found in (first, second):
        assert found.median_us is not None, found.error
        assert found.median_us > 0.9 * workload.min_bytes / device.bandwidth_gbs / 1e3
    assert second.run is not None and second.run.noise is not None and second.run.noise < 0.1
    assert second.run.seconds < 0.5
    assert wall - second.build.seconds < 1.0


@pytest.mark.cuda
def test_what_cannot_be_captured_is_timed_by_events() -> None:
    import torch

    x = torch.ones(1 << 20, device="cuda")
    replayed = time_callable(lambda: x.mul_(1.0), "cuda")
    synchronising = time_callable(lambda: x.sum().item(), "cuda")
    assert 0.5 < replayed < 100
    assert 0.5 < synchronising < 1000
    assert time_callable([lambda: x.mul_(1.0), lambda: x.add_(0.0)], resolve_target("cuda")) > 0


@pytest.mark.cuda
def test_a_capturable_call_becomes_a_graph() -> None:
    import torch

    from kronsched.measure.timing import repeated

    x = torch.zeros(8, device="cuda")
    calls = 0

    def call() -> None:
        nonlocal calls
        calls += 1
        x.add_(1.0)

    with torch.cuda.stream(torch.cuda.Stream()):
        call()
        replay = repeated([call], 5, "cuda:0")
        assert calls == 6  # captured once
        x.zero_()
        replay()
        replay()
        torch.cuda.synchronize()
    assert calls == 6
    assert x.tolist() == [10.0] * 8
