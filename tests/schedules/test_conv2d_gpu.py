"""Conv2d on a GPU: the adversarial suite through every schedule that serves it, and persistent kernels with many tiles."""

from __future__ import annotations

import os
import random
from collections.abc import Iterable, Iterator
from dataclasses import replace

import pytest

from kronsched import registry
from kronsched.bench.suites import load_suite
from kronsched.hardware import resolve_target
from kronsched.measure.crew import Crew, default_builders
from kronsched.measure.live import LiveMeasurer
from kronsched.measure.timing import TimingPlan
from kronsched.space import Candidate
from kronsched.workloads.conv2d import Conv2d

CASES = [w for w in load_suite("conv2d", "adversarial") if isinstance(w, Conv2d)]
FOUR_BIT = [
    Conv2d(1, 7, 5, 6, 10, (3, 3), (2, 2), (1, 1), in_dtype="int4"),
    Conv2d(3, 17, 17, 34, 66, (5, 5), padding=(2, 2), in_dtype="uint4"),
    Conv2d(2, 1, 1, 512, 1000, (1, 1), in_dtype="int4", out_dtype="int32"),
]
BRIEFLY = TimingPlan(budget_s=0.0, wanted=1, fewest=1, sample_us=1.0)
"""What counts here is the result."""


@pytest.fixture(scope="module")
def crew() -> Iterator[Crew]:
    """Builders and a runner for all tests of this file; builders of all of pytest's workers together are as many as cores."""
    device = resolve_target("cuda")
    with Crew(device, max(1, default_builders(device) // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))) as crew:
        yield crew


def wrong(conv: Conv2d, candidates: Iterable[Candidate], crew: Crew) -> list[str]:
    """What is not right, of candidates of any schedules: each is built and compared with the float64 reference."""
    device = resolve_target("cuda")
    schedules = registry.schedules_for(conv, device)
    with LiveMeasurer(conv, schedules, device, crew=crew, seed=5, plan=BRIEFLY) as measurer:
        found = [m for m in measurer.measure(list(candidates)) if m.status != "ok"]
    return [f"{m.candidate.key}: {m.status}: {m.error}" for m in found]


@pytest.mark.cuda
@pytest.mark.parametrize("everything", [False, True], ids=["plain", "epilogue"])
@pytest.mark.parametrize("conv", CASES + FOUR_BIT, ids=lambda w: w.label)
def test_adversarial_case_is_right(conv: Conv2d, everything: bool, crew: Crew) -> None:
    if everything:
        residual = conv.in_dtype not in ("int4", "uint4")
        conv = replace(conv, has_bias=True, has_residual=residual, relu=True, has_scale=conv.out_dtype != "int32")
    device, rng = resolve_target("cuda"), random.Random(1)
    candidates = {}
    for schedule in registry.schedules_for(conv, device):
        space = schedule.space(conv, device)
        default = space.candidate(schedule.default_config(conv, device))
        candidates.update({c.key: c for c in (default, *(space.sample(rng) for _ in range(2))) if c is not None})
    assert candidates
    assert not wrong(conv, candidates.values(), crew)


@pytest.mark.cuda
@pytest.mark.parametrize("start", ["serial", "wait"])
def test_blocks_that_go_through_many_tiles(start: str, crew: Crew) -> None:
    schedule, device = registry.schedule("conv2d_cuda_wgmma"), resolve_target("cuda")
    conv = Conv2d(16, 56, 56, 64, 128, (3, 3), padding=(1, 1), has_residual=True)
    if (reason := schedule.supports(conv, device)) is not None:
        pytest.skip(reason)
    space = schedule.space(conv, device)
    fixed = {"persistent": True, "block_m": 128, "block_n": 64, "row_groups": 2, "col_groups": 1, "stages": 4, "per_sm": 2}
    configs = [
        {**schedule.default_config(conv, device), **fixed, "start": start, "overlap": overlap, "vector": 16} for overlap in (0, 1)
    ]
    assert [space.invalid(config) for config in configs] == [None, None]
    assert not wrong(conv, [space.candidate(config) for config in configs], crew)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", ["int8", "float16"])
@pytest.mark.parametrize(
    "conv",
    [
        Conv2d(16, 56, 56, 64, 64, (3, 3), padding=(1, 1), has_bias=True, relu=True),
        Conv2d(8, 224, 224, 3, 64, (7, 7), (2, 2), (3, 3)),
    ],
    ids=lambda w: w.label,
)
def test_layers_by_windows(conv: Conv2d, dtype: str, crew: Crew) -> None:
    schedule, device = registry.schedule("conv2d_cuda_window"), resolve_target("cuda")
    conv = replace(conv, in_dtype=dtype, out_dtype=dtype, has_scale=None)
    if (reason := schedule.supports(conv, device)) is not None:
        pytest.skip(reason)
    assert not wrong(conv, [schedule.space(conv, device).candidate(schedule.default_config(conv, device))], crew)
