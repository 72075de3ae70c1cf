"""The wgmma Gemm without a GPU: sizes, order of tiles, traps of each dtype in the emulator, what ptxas makes of it."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest

from kronsched import Gemm
from kronsched.dtypes import DTYPES
from kronsched.errors import InvalidConfig
from kronsched.hardware import resolve_target
from kronsched.runtime.lower import lower
from kronsched.runtime.nvrtc import compile_cuda
from kronsched.schedules.gemm_dense_wgmma import GemmDenseWgmma
from kronsched.schedules.gemm_dense_wgmma_plan import PANEL_BYTES, plan_dense
from kronsched.space import Config
from tests.emulator import run_schedule
from tests.emulator.build import available
from tests.runtime.runtime_toys import A100

H200 = resolve_target("nvidia/h200")
CPU = resolve_target("cpu")
SCHEDULE = GemmDenseWgmma()
emulated = pytest.mark.skipif(available() is not None, reason=str(available()))


def dense(m: int, n: int, k: int, dtype: str = "float16", out_dtype: str = "") -> Gemm:
    return Gemm(m, n, k, dtype, dtype, out_dtype=out_dtype)


def config(**knobs: int | bool) -> Config:
    base: dict[str, int | bool] = {
        "block_m": 128,
        "block_n": 128,
        "warpgroups": 2,
        "stages": 3,
        "group": 1,
        "split_k": 1,
        "promote": 0,
        "pair": False,
        "pingpong": False,
        "cluster": 1,
    }
    return {**base, **knobs}


# -- what it serves -------------------------------------------------------------------------------------


def test_what_is_not_served_says_why() -> None:
    assert SCHEDULE.supports(dense(1, 1, 8), H200) is None
    assert SCHEDULE.supports(dense(64, 64, 23, "int8"), H200) is None
    assert "131072" not in str(SCHEDULE.supports(dense(64, 64, 131056, "int8"), H200))
    assert "k=131071" in str(SCHEDULE.supports(dense(64, 64, 131071, "int8"), H200))
    assert "sm_90a" in str(SCHEDULE.supports(dense(64, 64, 64), A100))
    assert "dense" in str(SCHEDULE.supports(Gemm(16, 64, 128), H200))


@pytest.mark.parametrize(
    ("knobs", "says"),
    [
        ({"block_m": 192}, "block_m=192"),
        ({"block_m": 256, "block_n": 256}, "256 x 256 needs 256 registers"),
        ({"block_m": 128, "block_n": 256, "promote": 1}, "256 registers"),
        ({"group": 8}, "group=8"),
        ({"split_k": 8}, "split_k=8"),
        ({"pingpong": True, "split_k": 2}, "pingpong=True"),
        ({"pingpong": True, "block_m": 256}, "block_m=256: 1 warpgroups own"),
        ({"block_m": 512, "cluster": 2}, "block_m=512"),
        ({"group": 4, "cluster": 2}, "group=4: there are 2 rows of tiles"),
        ({"stages": 8}, "bytes of shared memory"),
    ],
)
def test_a_config_that_cannot_run_says_why(knobs: dict[str, int], says: str) -> None:
    w = dense(500, 500, 256, "float8_e4m3fn" if knobs.get("promote") else "float16")
    with pytest.raises(InvalidConfig, match=says):
        plan_dense(w, config(**knobs), H200)
    assert says in str(SCHEDULE.space(w, H200).invalid(config(**knobs)) or says)


# -- plan -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("m_tiles", "n_tiles", "group", "split_k"), [(5, 3, 2, 1), (8, 4, 8, 1), (7, 2, 16, 1), (3, 3, 2, 4)])
def test_every_unit_is_taken_once(m_tiles: int, n_tiles: int, group: int, split_k: int) -> None:
    """The arithmetic of `_Kernel._place`, in Python: bands of rows of tiles, the last one lower."""
    band = group * n_tiles
    seen = set()
    for unit in range(m_tiles * n_tiles * split_k):
        tile = unit % (m_tiles * n_tiles)
        first = tile // band * group
        rows = min(m_tiles - first, group)
        seen.add((first + tile % band % rows, tile % band // rows, unit // (m_tiles * n_tiles)))
    assert seen == set(itertools.product(range(m_tiles), range(n_tiles), range(split_k)))


@pytest.mark.parametrize("w", [dense(4096, 4096, 4096), dense(8192, 8192, 8192, "int8", "int32"), dense(100, 4104, 4040)])
def test_plans_of_a_space_fit_the_device(w: Gemm) -> None:
    count = 0
    for candidate in itertools.islice(SCHEDULE.space(w, H200), 0, 2000, 7):
        plan = plan_dense(w, candidate.config, H200)
        turns = 16 if plan.pingpong else 0
        used = plan.stages * (plan.stage_bytes + 16) + plan.warpgroups * plan.span * PANEL_BYTES + turns
        assert used == plan.shared_bytes
        assert plan.shared_bytes <= H200.shared_per_block
        assert plan.split_k > 1 or plan.block_n // plan.panel_columns % plan.span == 0
        assert 0 < plan.blocks <= min(H200.units, plan.units * plan.cluster)
        assert plan.blocks % plan.cluster == 0
        assert plan.unit_trips * plan.split_k >= plan.trips > plan.unit_trips * (plan.split_k - 1)
        count += 1
    assert count > 20


@pytest.mark.parametrize(
    ("w", "tile", "group", "cluster"),
    [  # the fastest ones measured on an H200; 256 × 128 fills exactly four waves of the ragged shape
        (dense(4096, 4096, 4096), (128, 256), 16, 1),
        (dense(8192, 8192, 8192, "bfloat16"), (128, 256), 8, 2),
        (dense(8192, 8192, 8192, "int8", "int32"), (128, 256), 16, 1),
        (dense(4096, 4096, 4096, "float8_e4m3fn"), (128, 128), 16, 1),
        (dense(4000, 4104, 4040), (256, 128), 4, 2),
    ],
    ids=lambda v: v.label if isinstance(v, Gemm) else "",
)
def test_the_default_is_the_tile_that_was_fastest(w: Gemm, tile: tuple[int, int], group: int, cluster: int) -> None:
    found = SCHEDULE.default_config(w, H200)
    assert (found["block_m"], found["block_n"]) == tile
    assert (found["group"], found["cluster"]) == (group, cluster)


def test_the_default_fills_the_gpu() -> None:
    for n, k in ((4096, 4096), (4095, 4097)):
        skinny = plan_dense(dense(64, n, k), SCHEDULE.default_config(dense(64, n, k), H200), H200)
        assert skinny.block_m == 64
        assert skinny.blocks > 100


# -- kernels --------------------------------------------------------------------------------------------

CASES: list[tuple[Gemm, dict[str, int], str]] = [
    (dense(260, 200, 72), {"block_m": 256, "block_n": 64, "stages": 2}, "random"),  # two row tiles a warpgroup
    (dense(130, 520, 80, "int8", "int32"), {"block_n": 256}, "reverse"),  # two halves of wgmma, panels of int32
    (dense(100, 130, 592, "int8"), {"split_k": 3, "block_n": 64}, "reverse"),
    (dense(70, 71, 203, "bfloat16"), {"block_m": 64, "warpgroups": 1, "block_n": 64}, "reverse"),  # odd rows of x, w and Y
    (dense(70, 64, 37, "int8", "int32"), {"block_m": 64, "warpgroups": 1, "block_n": 64}, "random"),
    (dense(70, 136, 1296, "float8_e4m3fn"), {"promote": 2, "pair": True, "block_m": 64, "warpgroups": 1}, "random"),
    (dense(70, 72, 656, "float8_e5m2", "float16"), {"promote": 4, "block_m": 64, "warpgroups": 1, "block_n": 64}, "random"),
    (dense(130, 67, 272, "int8"), {"cluster": 2, "block_m": 64, "warpgroups": 1, "block_n": 64, "stages": 2}, "random"),
    (dense(300, 260, 264), {"pingpong": True, "block_m": 64, "block_n": 64, "units": 3}, "random"),  # several turns each
]
SLOW_CASES: list[tuple[Gemm, dict[str, int], str]] = [
    (dense(300, 130, 200), {"block_m": 192, "block_n": 64, "warpgroups": 3, "stages": 2}, "forward"),
    (dense(100, 130, 456), {"split_k": 3}, "random"),
    (dense(200, 262, 208, "int8"), {"block_n": 192}, "forward"),  # pairs
    (dense(70, 264, 656, "float8_e4m3fn"), {"promote": 1, "block_n": 192}, "reverse"),
    (dense(300, 136, 264), {"cluster": 2, "block_m": 64, "warpgroups": 1, "block_n": 64, "group": 2}, "random"),
    (dense(100, 130, 456), {"cluster": 2, "split_k": 3, "block_m": 64, "warpgroups": 1}, "forward"),
    (dense(300, 196, 272, "int8", "int32"), {"pingpong": True, "block_n": 64, "cluster": 2, "units": 4}, "reverse"),
    (dense(200, 130, 528, "float8_e4m3fn"), {"pingpong": True, "block_m": 64, "promote": 2, "units": 1}, "forward"),
]


@emulated
@pytest.mark.parametrize(
    ("w", "knobs", "order"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW_CASES)],
    ids=lambda v: v.label if isinstance(v, Gemm) else None,
)
def test_emulated_kernel_is_right(w: Gemm, knobs: dict[str, int], order: str) -> None:
    device = dataclasses.replace(H200, units=knobs.get("units", H200.units))  # few multiprocessors: several units for each block
    found = config(**{name: value for name, value in knobs.items() if name != "units"})
    assert run_schedule(SCHEDULE, w, found, device, seed=3, order=order) <= DTYPES[w.out_dtype].tolerance / 10


@emulated
def test_special_values_pass_through(monkeypatch: pytest.MonkeyPatch) -> None:
    """NaN and infinities of float8 inputs reach exactly the rows and columns they belong to."""
    import torch

    w = dense(70, 72, 144, "float8_e5m2", "float16")
    real = Gemm.make_inputs

    def with_specials(self: Gemm, seed: int, device: str = "cpu") -> list[torch.Tensor]:
        inputs = real(self, seed, device)
        for tensor, places in ((inputs[0], ((3, 5, 0x7F), (9, 1, 0x7C))), (inputs[1], ((4, 7, 0xFC), (71, 143, 0x7E)))):
            for i, j, bits in places:
                tensor.view(torch.uint8)[i, j] = bits
        return inputs

    monkeypatch.setattr(Gemm, "make_inputs", with_specials)
    assert run_schedule(SCHEDULE, w, config(promote=2, block_m=64, warpgroups=1), H200, seed=3) <= DTYPES["float16"].tolerance


NO_SPILLS = [
    (dense(4096, 4096, 4096), {"block_n": 256, "stages": 4, "group": 8}),
    (dense(4096, 4096, 4096), {"block_m": 256, "stages": 4, "group": 8}),
    (dense(4096, 4096, 4096, "int8"), {"block_n": 256, "stages": 4}),
    (dense(4096, 4096, 4096, "float8_e4m3fn"), {"promote": 2, "pair": True, "stages": 5}),
    (dense(4096, 4096, 4096), {"pingpong": True, "stages": 5, "cluster": 2}),
]


@pytest.mark.parametrize(("w", "knobs"), NO_SPILLS, ids=lambda v: v.label if isinstance(v, Gemm) else str(v))
def test_large_tiles_compile_without_spills(w: Gemm, knobs: dict[str, int]) -> None:
    cubin = compile_cuda(lower(w, SCHEDULE, config(**knobs), H200).source, H200.arch)
    assert set(cubin.spill_bytes.values()) == {0}


def test_source_is_the_same_in_every_lowering() -> None:
    sources: list[Any] = [lower(dense(256, 256, 256), SCHEDULE, config(), H200).sha256 for _ in range(2)]
    assert sources[0] == sources[1] != lower(dense(256, 256, 256), SCHEDULE, config(stages=2), H200).sha256
