"""Two Kronecker-sparse factors in one launch of TMA and wgmma: results over several tiles, refusals, what ptxas makes of it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from kronsched.bench.suites import load_suite
from kronsched.errors import InvalidConfig
from kronsched.hardware import PRESETS
from kronsched.runtime.build import build_artefact
from kronsched.schedules.ks_cuda_pair_wgmma import KSCudaPairWgmma
from kronsched.schedules.ks_pair_wgmma_plan import plan_wgmma_pair
from kronsched.workloads.ks import KSMatmul
from tests.emulator import build, run_schedule

H200, A100 = PRESETS["nvidia/h200"], PRESETS["nvidia/a100"]
TINY = dataclasses.replace(H200, units=2)
"""So few SMs that a block works through several tiles."""
PAIR = KSCudaPairWgmma()
CONFIG: dict[str, Any] = {
    "groups": 1, "split": "samples", "block_j": 64, "x_stages": 2, "w_stages": 2, "weights": "stream",
    "panels": 1, "store": 128, "copy": "tma", "min_blocks": 1,
}  # fmt: skip
ALL: dict[str, Any] = {"bias": True, "activation": "gelu", "residual": True}
VIT = [w for w in load_suite("ks", "vit", "float16") if len(w.patterns) == 2]  # type: ignore[attr-defined]
SMALL = next(w for w in VIT if w.patterns[0][0] == 2)
emulated = pytest.mark.skipif(build.available() is not None, reason=str(build.available()))


SLOW = [
    (150, [(3, 32, 72, 1), (2, 24, 16, 3)], {"block_j": 16, "groups": 2, "split": "outputs", "weights": "gather"}, {}),
    (150, [(3, 32, 64, 1), (2, 72, 48, 1)], {"groups": 3, "split": "outputs", "weights": "resident"}, {}),
    (300, [(2, 64, 24, 1), (1, 16, 32, 4)], {"block_j": 16, "groups": 3, "weights": "apart"}, {}),
    (70, [(1, 96, 136, 1), (2, 8, 16, 3)], {"block_j": 16, "weights": "apart", "copy": "threads"}, ALL),
    (200, [(2, 64, 64, 1), (1, 96, 128, 1)], {"block_j": 128, "groups": 2, "panels": 2}, ALL),
]


@emulated
@pytest.mark.parametrize(
    ("batch", "chain", "change", "epilogue"),
    [
        (150, [(2, 48, 72, 1), (1, 40, 48, 2)], {"block_j": 32, "store": 64, "x_stages": 1, "copy": "threads"}, ALL),
        (200, [(3, 16, 64, 1), (1, 40, 16, 3)], {"block_j": 32, "groups": 2, "panels": 2}, {}),
        (70, [(2, 16, 64, 1), (2, 72, 16, 1)], {"weights": "resident"}, {}),
        (150, [(3, 48, 72, 1), (1, 40, 48, 3)], {"block_j": 16, "groups": 2, "split": "outputs", "w_stages": 3}, {}),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW),
    ],
)
def test_results_over_several_tiles(
    batch: int, chain: list[tuple[int, int, int, int]], change: dict[str, Any], epilogue: dict[str, Any]
) -> None:
    w = KSMatmul(batch, chain, "float16", **epilogue)
    assert run_schedule(PAIR, w, {**CONFIG, **change}, TINY, order="random") < 2e-3


@emulated
@pytest.mark.slow
@pytest.mark.parametrize("w", VIT, ids=lambda w: w.label)
def test_the_chains_of_a_vision_transformer(w: KSMatmul) -> None:
    config = PAIR.default_config(w, H200)
    assert run_schedule(PAIR, dataclasses.replace(w, batch=450), config, TINY, order="reverse") < 2e-3


@pytest.mark.parametrize(
    ("w", "reason"),
    [
        (KSMatmul(64, (2, 16, 16, 1), "float16"), "1 factors"),
        (KSMatmul(64, [(2, 16, 16, 1)] * 2), "float32 in batch_first"),
        (KSMatmul(64, [(2, 16, 16, 1)] * 2, "float16", "batch_last"), "float16 in batch_last"),
        (KSMatmul(64, [(1, 16, 16, 2), (2, 16, 16, 1)], "float16"), "d = 2 and 1"),
        (KSMatmul(64, [(4, 16, 16, 1), (1, 16, 8, 8)], "float16"), "d = 1 and 8"),
        (KSMatmul(64, [(2, 12, 16, 1), (2, 16, 12, 1)], "float16"), "12 is no multiple"),
        (KSMatmul(64, [(1, 264, 16, 1), (1, 16, 264, 1)], "float16"), "264 outputs"),
        (KSMatmul(64, [(64, 64, 64, 1), (1, 64, 4096, 1)], "float16"), "does not fit"),
    ],
)
def test_what_it_refuses_it_names(w: KSMatmul, reason: str) -> None:
    assert reason in (PAIR.supports(w, H200) or "")
    assert "sm_90a" in (PAIR.supports(VIT[0], A100) or "")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"block_j": 48}, "not whole panels"),
        ({"block_j": 96, "panels": 2}, "panels=2"),
        ({"block_j": 192, "groups": 3}, "registers for sums"),
        ({"block_j": 96, "groups": 3, "x_stages": 8}, "shared memory"),
        ({"min_blocks": 3}, "too many"),
        ({"panels": 2, "copy": "threads"}, "no effect"),
        ({"split": "outputs"}, "groups=1"),
        ({"split": "outputs", "groups": 2, "weights": "apart"}, "weights=apart"),
        ({"weights": "apart", "w_stages": 8}, "there are 6 panels"),
    ],
)
def test_a_config_that_cannot_be_built_is_refused(change: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidConfig, match=reason):
        plan_wgmma_pair(SMALL, {**CONFIG, **change}, H200)


WAYS: list[dict[str, Any]] = [
    {},
    {"groups": 2, "weights": "apart", "block_j": 32, "store": 64},
    {"groups": 2, "split": "outputs", "w_stages": 3, "block_j": 32},
    {"groups": 2, "split": "outputs", "weights": "resident"},
    {"weights": "gather"},
]


@pytest.mark.parametrize("change", WAYS)
def test_regions_of_shared_memory_lie_one_behind_the_other(change: dict[str, Any]) -> None:
    p = plan_wgmma_pair(SMALL, {**CONFIG, **change}, H200)
    first, second = p.rings
    places = [0, p.x_at, p.w_at, p.stores_at, p.barriers_at, first.barriers_at, p.turns_at]
    assert places == sorted(places) and p.turns_at + 16 == p.shared_bytes <= H200.shared_per_block
    assert first.end <= p.stores_at and second.end <= p.stores_at and first.barriers_end <= p.turns_at
    assert (second.at, second.barriers_at) == ((p.x_at, first.barriers_end) if p.apart else (first.at, first.barriers_at))
    assert all(at % 1024 == 0 for at in (p.x_at, p.w_at, p.stores_at, first.size, second.size))


DEFAULTS = {
    256: {"groups": 2, "split": "outputs", "weights": "stream", "block_j": 64, "x_stages": 6, "w_stages": 4, "copy": "tma"},
    64: {"groups": 3, "split": "samples", "weights": "apart", "block_j": 96, "x_stages": 2, "w_stages": 2, "copy": "tma"},
    192: {"groups": 1, "split": "samples", "weights": "gather", "block_j": 96, "x_stages": 6, "w_stages": 2, "copy": "threads"},
}
"""The best configs of the chains of a ViT-S/16 on an H200, by c of the first factor."""


@pytest.mark.parametrize("w", VIT, ids=lambda w: w.label)
def test_the_default_is_what_was_best_and_does_not_spill(w: KSMatmul, tmp_path: Path) -> None:
    config = PAIR.default_config(w, H200)
    wanted = DEFAULTS[w.patterns[0][2]]
    assert {name: config[name] for name in wanted} == wanted and PAIR.space(w, H200).invalid(config) is None
    plan = plan_wgmma_pair(w, config, H200)
    assert plan.blocks == min(plan.tiles, H200.units)
    manifest = build_artefact(w, PAIR, config, H200, tmp_path, "nvrtc")
    assert [launch.symbol for launch in manifest.launches] == ["ks_pack_1_kernel", "ks_pair_kernel"][0 if plan.packs else 1 :]
    assert manifest.spill_bytes == 0 and manifest.registers <= 168 and manifest.shared_bytes == plan.shared_bytes


def test_more_work_is_expected_to_take_longer() -> None:
    chains = [[(2, 48, 192, 1), (1, 192, 48, 2)], [(6, 64, 256, 1), (1, 128, 128, 3)], [(6, 64, 64, 1), (1, 768, 192, 2)]]
    times = [PAIR.expected_us(w, PAIR.default_config(w, H200), H200) for w in (KSMatmul(25088, c, "float16") for c in chains)]
    assert times == sorted(times) and times[0] < times[2] / 2
