"""The W4A16 kernels on a GPU: every adversarial case at full size, repeatability, through the public call."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

import kronsched
from kronsched.errors import InvalidConfig
from kronsched.hardware import resolve_target
from kronsched.measure.check import max_relative_error
from kronsched.runtime.build import build_artefact
from kronsched.runtime.module import TunedModule
from kronsched.schedules.gemm_w4a16_cuda import GemmW4A16Cuda
from kronsched.schedules.gemm_w4a16_wgmma import GemmW4A16Wgmma
from kronsched.workloads.gemm import Gemm
from tests.workloads.test_gemm import problem

SCHEDULE = GemmW4A16Cuda()
WARPGROUPS = [
    {"tiles": 1, "groups_n": 2, "groups_k": 2, "stages": 4, "split_k": 2, "copies": "threads"},
    {"tiles": 2, "groups_n": 1, "groups_k": 2, "stages": 4, "split_k": 2, "copies": "fetch"},
    {"tiles": 2, "groups_n": 2, "groups_k": 1, "stages": 3, "split_k": 1, "copies": "ring"},
    {"tiles": 1, "groups_n": 2, "groups_k": 1, "stages": 2, "split_k": 2, "copies": "ring"},
]
BOUND = {"float16": 6e-4, "bfloat16": 4e-3}
CASES: list[dict[str, Any]] = [
    {"m": 1, "n": 4096, "k": 4096, "zero": "asymmetric"},
    {"m": 17, "n": 4096, "k": 4096},
    {"m": 16, "n": 1024, "k": 4096, "group": 32, "zero": "asymmetric"},
    {"m": 16, "n": 1536, "k": 384, "zero": "asymmetric"},
    {"m": 8, "n": 4096, "k": 11008},
    {"m": 16, "n": 5120, "k": 12800, "dtype": "bfloat16"},
    {"m": 4, "n": 2048, "k": 10944, "group": 64, "zero": "asymmetric"},
    {"m": 3, "n": 64, "k": 128, "group": 64, "zero": "asymmetric"},
    {"m": 5, "n": 512, "k": 1024, "g_idx": True},
    {"m": 2, "n": 256, "k": 256, "group": 64, "zero": "asymmetric", "extreme": True},
    {"m": 16, "n": 512, "k": 8192},
    {"m": 16, "n": 4096, "k": 14336, "group": -1, "dtype": "bfloat16"},
    {"m": 1, "n": 48, "k": 4304, "zero": "float"},
    {"m": 100, "n": 130, "k": 1001, "group": 96, "zero": "float", "dtype": "bfloat16", "g_idx": True},
]


def built(w: Gemm, config: Any, where: Path) -> TunedModule:
    build_artefact(w, SCHEDULE, config, resolve_target("cuda"), where)
    return TunedModule.from_artefact(where)


@pytest.mark.cuda
@pytest.mark.parametrize("case", CASES, ids=lambda c: " ".join(f"{k}={v}" for k, v in c.items()))
def test_adversarial_case_is_right_on_this_gpu(case: dict[str, Any], tmp_path: Path) -> None:
    device, rng = resolve_target("cuda"), random.Random(0)
    w, x, pw, want = problem(case)
    x, pw, want = x.cuda(), pw.to("cuda"), want.cuda()
    space = SCHEDULE.space(w, device)
    configs = [SCHEDULE.default_config(w, device), *(c.config for c in (space.sample(rng) for _ in range(4)) if c is not None)]
    for i, config in enumerate(configs):
        try:
            mod = built(w, config, tmp_path / str(i))
        except InvalidConfig as e:
            assert i > 0, f"the default config must build: {e}"
            continue
        out = torch.full((w.m, w.n), float("nan"), dtype=x.dtype, device="cuda")
        mod(x, pw, out=out)
        assert max_relative_error(out, want) <= BOUND[w.a_dtype], config


@pytest.mark.cuda
@pytest.mark.parametrize("split_k", [1, 4])
def test_200_runs_are_bitwise_equal(split_k: int, tmp_path: Path) -> None:
    w, x, pw, _ = problem({"m": 16, "n": 512, "k": 8192})
    x, pw = x.cuda(), pw.to("cuda")
    config = {**SCHEDULE.default_config(w, resolve_target("cuda")), "warps_k": 8, "split_k": split_k}
    mod = built(w, config, tmp_path / "a")
    first = mod(x, pw)
    out = torch.empty_like(first)
    for _ in range(200):
        out.fill_(float("nan"))
        assert torch.equal(mod(x, pw, out=out), first)


@pytest.mark.cuda
def test_weights_packed_on_the_gpu_are_those_packed_on_the_cpu() -> None:
    gen = torch.Generator().manual_seed(0)
    q = torch.randint(0, 16, (320, 130), dtype=torch.uint8, generator=gen)
    scales, zeros = torch.rand(3, 130, generator=gen).half(), torch.randint(0, 17, (3, 130), generator=gen)
    g_idx = (torch.arange(320) // 128)[torch.randperm(320, generator=gen)]
    here = kronsched.quant.pack(q, scales, zeros, 128, g_idx)
    there = kronsched.quant.pack(q.cuda(), scales.cuda(), zeros.cuda(), 128, g_idx.cuda())
    assert torch.equal(there.words.cpu(), here.words) and torch.equal(there.unpack().cpu(), here.unpack())


@pytest.mark.cuda
@pytest.mark.parametrize("zero", ["symmetric", "asymmetric"])
@pytest.mark.parametrize("config", WARPGROUPS, ids=lambda c: " ".join(map(str, c.values())))
def test_200_runs_on_warpgroups_are_right_and_bitwise_equal(config: dict[str, Any], zero: str, tmp_path: Path) -> None:
    w, x, pw, want = problem({"m": 50, "n": 1000, "k": 2176, "zero": zero})
    x, pw, want = x.cuda(), pw.to("cuda"), want.cuda()
    build_artefact(w, GemmW4A16Wgmma(), {"rows": 64, **config}, resolve_target("cuda"), tmp_path)
    mod = TunedModule.from_artefact(tmp_path)
    first = mod(x, pw).clone()
    assert max_relative_error(first, want) <= BOUND[w.a_dtype]
    assert all(torch.equal(mod(x, pw), first) for _ in range(200))
