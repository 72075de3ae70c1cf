"""The wgmma schedule without a GPU: index maps, a whole tile through them in numpy, and what ptxas makes of it."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from kronsched import KronMatmul
from kronsched.errors import InvalidConfig
from kronsched.hardware import resolve_target
from kronsched.runtime.lower import lower
from kronsched.runtime.nvrtc import compile_cuda
from kronsched.schedules import kron_wgmma_layout as layout
from kronsched.schedules.kron_cuda_wgmma import KronCudaWgmma
from kronsched.schedules.kron_wgmma_plan import plan_wgmma
from tests.emulator import run_schedule
from tests.emulator.build import available
from tests.runtime.runtime_toys import A100

H200 = resolve_target("nvidia/h200")

LANES = [(lane // 4, lane % 4) for lane in range(32)]  # (g, t)


def banks(words: list[int], width: int) -> int:
    """The most wavefronts an access of `width` floats a lane needs beyond the least, over its groups of lanes."""
    group, worst = 32 // width, 0
    for start in range(0, 32, group):
        used = [(w + i) % 32 for w in words[start : start + group] for i in range(width)]
        worst = max(worst, max(used.count(b) for b in used))
    return worst


def test_swizzled_words_are_a_permutation() -> None:
    words = {layout.word(line, column) for line in range(64) for column in range(64)}
    assert words == set(range(64 * 64))


@pytest.mark.parametrize("warp", range(4))
def test_reads_and_writes_are_where_they_should_be_and_free_of_bank_conflicts(warp: int) -> None:
    base = 16 * warp
    for block, half in itertools.product(range(4), range(2)):
        got = [layout.line_read(base + g, t ^ layout.swizzle(g), block, half) for g, t in LANES]
        assert got == [layout.word(base + g + 8 * half, 16 * block + 4 * t) for g, t in LANES]
        assert banks(got, 4) == 1
    for j, half in itertools.product(range(8), range(2)):
        got = [layout.line_write(base + g, (t >> 1) ^ layout.swizzle(g), t, j, half) for g, t in LANES]
        assert got == [layout.word(base + g + 8 * half, 8 * j + 2 * t) for g, t in LANES]
        assert banks(got, 2) == 1
    for k, half in itertools.product(range(2), range(2)):
        got = [layout.column_read(t + 4 * k, base + g, half) for g, t in LANES]
        assert got == [layout.word(t + 4 * k, base + g + 8 * half) for g, t in LANES]
        assert banks(got, 1) == 1


@pytest.mark.parametrize("n", [64, 128])
def test_operand_b_holds_each_element_once(n: int) -> None:
    seen = {layout.factor_element(place, n) for place in range(n * n)}
    assert seen == set(itertools.product(range(n // 8), range(8), range(n)))
    # wgmma finds (k, column) of a step at: column / 8 strides, k / 4 leading offsets, then 16 bytes a column
    for place in range(8 * n):
        _, k, q = layout.factor_element(place, n)
        assert place * 4 == q // 8 * layout.STRIDE * 16 + k // 4 * layout.LEADING * 16 + q % 8 * 16 + k % 4 * 4


@pytest.mark.parametrize("k_of", [layout.line_k, layout.column_k])
def test_k_steps_cover_the_axis(k_of) -> None:
    assert sorted(k_of(step, k) for step in range(16) for k in range(8)) == list(range(128))


def test_a_tile_through_the_maps() -> None:
    """Operand A as the threads of a warpgroup load it, times operand B as it is stored: the product, in both patterns."""
    rng = np.random.default_rng(0)
    tile, factor = rng.standard_normal((64, 64)), rng.standard_normal((64, 64))
    shared = np.zeros(64 * 64)
    for line, column in itertools.product(range(64), range(64)):
        shared[layout.word(line, column)] = tile[line, column]
    for lines in (True, False):
        a = np.full((8, 64, 8), np.nan)  # k-step, row of A, k
        for warp, (g, t), half in itertools.product(range(4), LANES, range(2)):
            row = 16 * warp + g + 8 * half
            if lines:
                for b, v in itertools.product(range(4), range(4)):
                    at = layout.line_read(16 * warp + g, t ^ layout.swizzle(g), b, half) + v
                    a[2 * b + v // 2, row, t + 4 * (v % 2)] = shared[at]
            else:
                for step, k in itertools.product(range(8), range(2)):
                    at = layout.column_read(t + 4 * k, 16 * warp + g, half) + step * 8 * 64
                    a[step, row, t + 4 * k] = shared[at]
        b_of = np.zeros((8, 8, 64))
        for place in range(64 * 64):
            step, k, q = layout.factor_element(place, 64)
            b_of[step, k, q] = factor[layout.line_k(step, k) if lines else layout.column_k(step, k), q]
        got = np.einsum("smk,skq->mq", a, b_of)
        np.testing.assert_allclose(got, (tile if lines else tile.T) @ factor, rtol=1e-12)


@pytest.mark.parametrize(
    ("workload", "kinds"),
    [
        (KronMatmul(10, [(64, 64)] * 2), ["pair"]),
        (KronMatmul(16, [(64, 64)] * 4), ["pair", "column", "column"]),
        (KronMatmul(2, [(64, 64), (128, 128)]), ["line", "column"]),
        (KronMatmul(64, [(128, 128)]), ["line"]),
    ],
)
def test_launches_and_registers(workload: KronMatmul, kinds: list[str]) -> None:
    schedule = KronCudaWgmma()
    config = schedule.default_config(workload, H200)
    launches = plan_wgmma(workload, config, H200)
    assert [x.kind for x in launches] == kinds
    for x in launches:
        assert x.tiles * 64 * x.p == workload.m * workload.k_in
        assert x.grid * x.groups >= min(x.tiles, 132)
    lowered = lower(workload, schedule, config, H200)
    cubin = compile_cuda(lowered.source, H200.arch)
    for launch in lowered.launches:
        assert cubin.spill_bytes[launch.symbol] == 0
        assert cubin.registers[launch.symbol] * launch.threads <= 65536


def test_what_it_does_not_serve() -> None:
    schedule = KronCudaWgmma()
    assert "float16" in str(schedule.supports(KronMatmul(64, [(64, 64)], "float16"), H200))
    assert "sm_90a" in str(schedule.supports(KronMatmul(64, [(64, 64)]), A100))
    assert "32x32" in str(schedule.supports(KronMatmul(64, [(64, 64), (32, 32)]), H200))
    assert "65 lines" in str(schedule.supports(KronMatmul(65, [(64, 64)]), H200))
    with pytest.raises(InvalidConfig, match="warpgroups an SM"):
        plan_wgmma(KronMatmul(64, [(64, 64)]), {"pair": False, "groups": 4, "stages": 1, "per_sm": 2}, H200)


@pytest.mark.skipif(available() is not None, reason=str(available()))
@pytest.mark.parametrize(
    ("workload", "config", "order"),
    [
        (KronMatmul(3, [(64, 64)] * 2), {"pair": True, "groups": 2, "stages": 2, "per_sm": 1}, "reverse"),
        (KronMatmul(2, [(64, 64)] * 2), {"pair": False, "groups": 1, "stages": 1, "per_sm": 1}, "random"),
        pytest.param(
            KronMatmul(1, [(128, 128), (64, 64)]),
            {"pair": False, "groups": 1, "stages": 3, "per_sm": 1},
            "forward",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            KronMatmul(64, [(128, 128)]),
            {"pair": False, "groups": 2, "stages": 2, "per_sm": 1},
            "reverse",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_emitted_kernels_are_right(workload: KronMatmul, config: dict[str, int], order: str) -> None:
    assert run_schedule(KronCudaWgmma(), workload, config, H200, order=order) < 2e-6
