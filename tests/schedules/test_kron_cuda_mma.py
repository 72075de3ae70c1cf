"""The tensor-core schedule beyond the contract battery: index maps, plans, results under emulation, what ptxas makes of it."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import random
from types import SimpleNamespace

import pytest

from kronsched.errors import InvalidConfig
from kronsched.hardware import Device, resolve_target
from kronsched.runtime.lower import lower
from kronsched.runtime.nvrtc import compile_cuda
from kronsched.schedules.kron_cuda_mma import KronCudaMma, compute_capability, plan_for
from kronsched.schedules.kron_mma_layout import factor_element, spread, spread_index, swizzle
from kronsched.schedules.kron_mma_plan import LaunchPlan, Step, merge_axes
from kronsched.schedules.kron_mma_stores import StepStores
from kronsched.workloads.kron import KronMatmul
from tests.emulator import run_schedule

H200 = resolve_target("nvidia/h200")
A100 = resolve_target("nvidia/a100")
SCHEDULE = KronCudaMma()


# -- index maps ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunks", [8, 16, 72, 512, 4096])
def test_swizzle_is_a_bijection(chunks: int) -> None:
    assert sorted(swizzle(c, chunks) for c in range(chunks)) == list(range(chunks))


@pytest.mark.parametrize("stride", [1, 2, 4, 8, 16, 32, 64, 128, 256, 512])
def test_eight_neighbours_along_any_axis_lie_in_eight_bank_groups(stride: int) -> None:
    """What ldmatrix reads at a time, and stores of 16-bit results write."""
    for start in range(min(stride, 64)):
        assert len({swizzle(start + stride * i, 8 * stride) % 8 for i in range(8)}) == 8


@pytest.mark.parametrize("stride", [2, 4, 8, 16, 32, 64, 128, 256])
@pytest.mark.parametrize("half", [0, 1])
def test_float32_fragments_have_no_bank_conflicts(stride: int, half: int) -> None:
    """Lane (g, t) reads float g of 8 at row t: 32 lanes, 32 banks."""
    bits = spread(stride)
    banks = set()
    for g, t in itertools.product(range(8), range(4)):
        chunk = swizzle(spread_index(bits, t, half) * stride + (g >> 2), 8 * stride)
        banks.add((chunk * 4 + (g & 3)) % 32)
    assert len(banks) == 32


@pytest.mark.parametrize("stride", [1, 2, 4, 8, 24])
def test_spread_is_a_permutation(stride: int) -> None:
    assert sorted(spread_index(spread(stride), t, h) for t in range(4) for h in range(2)) == list(range(8))


@pytest.mark.parametrize(("item", "k"), [(2, 16), (4, 8)])
def test_fragments_hold_each_element_of_the_factor_once(item: int, k: int) -> None:
    q_tiles, k_tiles, bits = 3, 2, spread(8)
    seen = []
    for word in range(k_tiles * q_tiles * 128):
        p, q = factor_element(word, q_tiles, item, bits, bits)
        seen += [(p, q), (p + 1, q)] if item == 2 else [(p, q)]
    assert sorted(seen) == list(itertools.product(range(k_tiles * k), range(q_tiles * 16)))


# -- who touches what ---------------------------------------------------------------------------------


def places(plan: LaunchPlan, step: Step, lane: int) -> StepStores:
    """The emitter's arithmetic for one lane, on ints; stores are collected in `.seen` as (chunk, first word, words)."""
    kernel = SimpleNamespace(plan=plan, g=lane >> 2, t=lane & 3, guarded=lambda guards: contextlib.nullcontext())
    seen: list[tuple[int, int, int]] = []
    words = plan.item // 2  # of two accumulators

    def store_to(chunk: int, fixed: int, word: int, acc: list[int]) -> None:
        seen.append((chunk + fixed, word, max(1, len(acc) * words // 2)))

    stores = StepStores(kernel, step, store_to)  # type: ignore[arg-type]
    stores.seen = seen  # type: ignore[attr-defined]
    return stores


def phases(accesses: list[tuple[int, int, int]], chunks: int) -> list[list[int]]:
    """The banks of a warp-wide access, in the groups of lanes that the hardware serves together."""
    lanes = 32 // max(1, accesses[0][2])
    banks = [[(swizzle(c, chunks) * 4 + w + i) % 32 for i in range(n)] for c, w, n in accesses]
    return [list(itertools.chain(*banks[i : i + lanes])) for i in range(0, 32, lanes)]


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("cols", [8, 16, 32, 64])
@pytest.mark.parametrize("sides", [(8, 8), (8, 16), (16, 8), (64, 8), (8, 64), (32, 128)])
def test_stores_cover_the_tile_once_without_bank_conflicts(dtype: str, cols: int, sides: tuple[int, int]) -> None:
    workload = KronMatmul(16, [(s, s) for s in sides], dtype)
    config = {
        **SCHEDULE.default_config(workload, H200),
        "merge": 0,
        "fuse": 2,
        "cols": cols,
        "tile": 16384,
        "blocks": 1,
        "threads": 128,
    }
    (plan,) = plan_for(workload, config, H200)
    for step in plan.steps:
        assert step.exact
        covered: list[tuple[int, int]] = []
        for unit in range(step.units):
            lanes = [places(plan, step, lane) for lane in range(32)]
            for lane in lanes:
                lane.store(unit)
            for at_once in zip(*(lane.seen for lane in lanes), strict=True):  # type: ignore[attr-defined]
                for banks in phases(list(at_once), plan.in_chunks):
                    assert len(set(banks)) == len(banks)
                covered += [(c, w + i) for c, w, n in at_once for i in range(n)]
        assert sorted(covered) == list(itertools.product(range(plan.in_chunks), range(4)))


@pytest.mark.parametrize("cols", [8, 16, 32])
@pytest.mark.parametrize("side", [8, 16, 32, 64, 128])
def test_float32_columns_are_read_once_without_bank_conflicts(cols: int, side: int) -> None:
    workload = KronMatmul(16, [(8, 8), (side, side)])
    config = {
        **SCHEDULE.default_config(workload, H200),
        "merge": 0,
        "fuse": 2,
        "cols": cols,
        "tile": 8192,
        "blocks": 1,
        "threads": 128,
    }
    (plan,) = plan_for(workload, config, H200)
    step = next(s for s in plan.steps if not s.by_rows)
    elements: list[tuple[int, int]] = []
    for group, half in itertools.product(range(step.groups), range(2)):
        for tile in range(0, step.width, places(plan, step, 0).vec):
            accesses = []
            for lane in range(32):
                at = places(plan, step, lane)
                p = spread_index(at.k_bits, lane & 3, half)
                chunk, fixed = at.column(group * step.width, 0, tile, p, 0, step.p, step.stride)
                own, word = at.lane_column()
                accesses.append((chunk + fixed + own, word, at.vec))
            for banks in phases(accesses, plan.in_chunks):
                assert len(set(banks)) == len(banks)
            elements += [(c, w + i) for c, w, n in accesses for i in range(n)]
    assert sorted(elements) == list(itertools.product(range(plan.in_chunks), range(4)))


# -- plans --------------------------------------------------------------------------------------------


def test_merging_makes_few_and_even_axes() -> None:
    def sides(factors: list[tuple[int, int]], limit: int) -> list[tuple[int, int]]:
        axes = merge_axes(KronMatmul(1, factors), limit)
        assert [a.first for a in axes] == [0, *(a.last for a in axes[:-1])] and axes[-1].last == len(factors)
        return [(a.p, a.q) for a in axes]

    assert sides([(8, 8)] * 5, 64) == [(8, 8), (64, 64), (64, 64)]
    assert sorted(sides([(4, 4)] * 7, 64)) == [(16, 16), (16, 16), (64, 64)]
    assert sides([(2, 8)] * 3, 16) == [(2, 8)] * 3  # both sides count
    assert sides([(8, 8)] * 3, 0) == [(8, 8)] * 3
    assert len(sides([(1, 1)] * 64, 16)) == 6  # products of at most 12


def test_whole_row_of_8_to_the_5_is_one_launch() -> None:
    workload = KronMatmul(1024, [(8, 8)] * 5, "float16")
    config = SCHEDULE.default_config(workload, H200)
    (plan,) = plan_for(workload, config, H200)
    assert plan.inner == 1 and all(s.src == s.dst == 0 for s in plan.steps)  # square: in place
    assert plan.grid <= 132 * plan.blocks


def test_small_problems_spread_over_the_device() -> None:
    workload = KronMatmul(1024, [(64, 64)] * 2, "float16")
    plans = plan_for(workload, SCHEDULE.default_config(workload, H200), H200)
    assert all(p.grid >= 128 for p in plans)


def test_what_does_not_fit_is_pruned_in_one_line() -> None:
    workload = KronMatmul(64, [(64, 64)] * 3, "float32")
    base = dict(SCHEDULE.default_config(workload, H200))
    with pytest.raises(InvalidConfig, match="bytes of shared memory"):
        plan_for(workload, {**base, "fuse": 3}, H200)
    with pytest.raises(InvalidConfig, match="registers"):
        plan_for(workload, {**base, "threads": 512, "blocks": 2, "tile": 4096, "cols": 32, "split": "late"}, H200)


@pytest.mark.parametrize(
    ("workload", "device", "says"),
    [
        (KronMatmul(4, [(8, 8)], "float64"), "nvidia/h200", "float64"),
        (KronMatmul(4, [(4096, 4096)], "float16"), "nvidia/h200", "4096x4096"),
    ],
)
def test_what_is_not_supported_is_said(workload: KronMatmul, device: str, says: str) -> None:
    reason = SCHEDULE.supports(workload, resolve_target(device))
    assert reason is not None and says in reason and "\n" not in reason


def test_compute_capability() -> None:
    assert [compute_capability(a) for a in ("sm_90a", "sm_80", "sm_75", "sm_120", "znver3")] == [90, 80, 75, 120, 0]


def test_a_knob_without_effect_is_not_searched_twice() -> None:
    rng = random.Random(1)
    workload = KronMatmul(256, [(8, 8)] * 3, "float16")
    space = SCHEDULE.space(workload, H200)
    sample = {c.key: c for c in (space.sample(rng) for _ in range(8)) if c is not None}
    digests = {lower(workload, SCHEDULE, c.config, H200).sha256 for c in sample.values()}
    assert len(digests) == len(sample) >= 6


# -- results, in the emulator -------------------------------------------------------------------------

# Each config differs from the default in what the case is about.
CASES: list[tuple[KronMatmul, dict[str, object], float]] = [
    (KronMatmul(4, [(8, 8)] * 3, "float16"), {"merge": 0, "fuse": 3}, 4e-3),
    (KronMatmul(4, [(8, 8)] * 3, "bfloat16"), {"merge": 64, "fuse": 3, "store": "direct"}, 3e-2),
    (KronMatmul(4, [(8, 8)] * 3), {"merge": 0, "fuse": 3, "cols": 32}, 2e-6),  # turned, 16-byte columns
    (KronMatmul(2, [(16, 32), (32, 16)]), {"fuse": 2, "cols": 64, "split": "early", "unroll": 1}, 2e-6),
    (KronMatmul(2, [(16, 32), (32, 16)]), {"fuse": 1, "ctile": 32, "stages": 2, "store": "shared"}, 2e-6),
    (KronMatmul(300, [(8, 8), (4, 4)], "float16"), {"fuse": 1, "merge": 0, "tile": 1024, "stages": 2}, 4e-3),
    (KronMatmul(3, [(64, 64), (8, 8)]), {"fuse": 2, "unroll": 2}, 2e-6),  # k tiles summed apart
    (KronMatmul(3, [(24, 40), (3, 3)], "float16"), {"fuse": 1, "merge": 0}, 4e-3),  # half k tile, lines of no whole chunk
    (KronMatmul(5, [(12, 7), (40, 24)]), {"fuse": 2, "order": "head", "store": "shared", "split": "early"}, 2e-6),
    (KronMatmul(7, [(3, 9), (9, 3), (2, 6), (6, 2)], "bfloat16"), {"merge": 16}, 6e-2),
    (KronMatmul(3, [(16, 16), (24, 24)]), {"precision": "tf32", "fuse": 2}, 4e-3),  # not in the shipped space
    (KronMatmul(1, [(1, 1)], "float16"), {}, 1e-3),
    (KronMatmul(2, [(8, 300), (2, 2)], "float16"), {"merge": 0}, 4e-3),  # outputs in several parts
]


@pytest.mark.parametrize(("workload", "knobs", "limit"), CASES, ids=lambda v: v.label if isinstance(v, KronMatmul) else "")
@pytest.mark.parametrize("order", ["reverse", "random"])
def test_computes_the_reference(workload: KronMatmul, knobs: dict[str, object], limit: float, order: str) -> None:
    config = {**SCHEDULE.default_config(workload, H200), "store": "shared", "blocks": 1, **knobs}
    assert run_schedule(SCHEDULE, workload, config, H200, seed=3, order=order) <= limit


def test_several_tiles_a_block_keep_their_stages_apart() -> None:
    """Two SMs, so that a persistent block works on many tiles."""
    device = dataclasses.replace(H200, units=2)
    for stages, store in itertools.product((1, 2), ("shared", "direct")):
        workload = KronMatmul(40, [(8, 8)] * 2)
        config = {**SCHEDULE.default_config(workload, device), "tile": 1024, "blocks": 1, "stages": stages, "store": store}
        (plan,) = plan_for(workload, config, device)
        assert plan.grid == 2 and plan.tile_grid[0] >= 3
        assert run_schedule(SCHEDULE, workload, config, device, seed=5, order="random") <= 2e-6


# -- what ptxas makes of the defaults -----------------------------------------------------------------

SHAPES = [(1024, 8, 4), (1024, 8, 5), (1024, 16, 4), (1024, 32, 3), (1024, 64, 3), (1024, 128, 2), (1024, 4, 7)]


@pytest.mark.slow
@pytest.mark.parametrize("device", [H200, A100], ids=["sm_90a", "sm_80"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize(("m", "p", "n"), SHAPES, ids=lambda v: str(v))
def test_defaults_compile_without_spills(m: int, p: int, n: int, dtype: str, device: Device) -> None:
    workload = KronMatmul(m, [(p, p)] * n, dtype)
    config = SCHEDULE.default_config(workload, device)
    cubin = compile_cuda(lower(workload, SCHEDULE, config, device).source, device.arch, "nvrtc")
    plans = plan_for(workload, config, device)
    assert set(cubin.spill_bytes.values()) == {0}
    assert max(cubin.registers.values()) <= min(65536 // (q.threads * q.blocks) for q in plans)
