"""Gemm beyond the family contract: calls with packed weights, costs, the adversarial shapes on a CPU."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import kronsched
from kronsched.errors import ArgumentError
from kronsched.hardware import resolve_target
from kronsched.measure.check import max_relative_error
from kronsched.runtime.build import build_artefact
from kronsched.runtime.module import TunedModule
from kronsched.schedules.gemm_w4a16_cpu import GemmW4A16Cpu
from kronsched.workloads.gemm import Gemm
from tests.quant.test_pack import dequantised, raw

# The adversarial W4A16 cases (shared/cases/w4a16.json), n and k cut where they are large but as ragged as before.
ADVERSARIAL: list[dict[str, Any]] = [
    {"m": 1, "n": 256, "k": 512, "zero": "asymmetric"},
    {"m": 17, "n": 256, "k": 512},
    {"m": 16, "n": 128, "k": 512, "group": 32, "zero": "asymmetric"},
    {"m": 16, "n": 192, "k": 384, "zero": "asymmetric"},
    {"m": 8, "n": 256, "k": 11008 % 4096},
    {"m": 16, "n": 320, "k": 640, "dtype": "bfloat16"},
    {"m": 4, "n": 128, "k": 10944 % 1024, "group": 64, "zero": "asymmetric"},
    {"m": 3, "n": 64, "k": 128, "group": 64, "zero": "asymmetric"},
    {"m": 5, "n": 512, "k": 1024, "g_idx": True},
    {"m": 2, "n": 256, "k": 256, "group": 64, "zero": "asymmetric", "extreme": True},
    {"m": 16, "n": 64, "k": 2048},
    {"m": 16, "n": 256, "k": 896, "group": -1, "dtype": "bfloat16"},
    {"m": 3, "n": 48, "k": 4304 % 1024, "group": 128, "zero": "float"},
    {"m": 1, "n": 7, "k": 33, "group": 32, "zero": "asymmetric", "dtype": "bfloat16", "g_idx": True},
]


def problem(case: Mapping[str, Any]) -> tuple[Gemm, torch.Tensor, Any, torch.Tensor]:
    """(workload, x, packed weights, float64 result by plain matmul on the dequantised weights)."""
    dtype, group, zero = case.get("dtype", "float16"), case.get("group", 128), case.get("zero", "symmetric")
    q, scales, zeros = raw(case["k"], case["n"], group, zero)
    scales = (scales / (5 * case["k"] ** 0.5)).to(getattr(torch, dtype))
    if case.get("extreme"):
        zeros[0, :], zeros[1, :] = 0, 16
    rows = torch.zeros(case["k"], dtype=torch.long) if group == -1 else torch.arange(case["k"]) // group
    gen = torch.Generator().manual_seed(5)
    if case.get("g_idx"):
        rows = rows[torch.randperm(case["k"], generator=gen)]
    pw = kronsched.quant.pack(q, scales, zeros, group, rows if case.get("g_idx") else None)
    x = torch.randn(case["m"], case["k"], generator=gen).to(getattr(torch, dtype))
    w = Gemm(case["m"], case["n"], case["k"], dtype, group_size=group, zero_point=zero, act_order=bool(case.get("g_idx")))
    return w, x, pw, x.double() @ dequantised(q, scales, zeros, rows)


@pytest.mark.parametrize("case", ADVERSARIAL, ids=lambda c: " ".join(f"{k}={v}" for k, v in c.items()))
def test_adversarial_shapes_are_right_on_a_cpu(case: dict[str, Any], tmp_path: Path) -> None:
    w, x, pw, want = problem(case)
    assert max_relative_error(w.reference(*w.flatten_args((x, pw))), want) < 1e-12
    device, schedule = resolve_target("cpu"), GemmW4A16Cpu()
    build_artefact(w, schedule, schedule.default_config(w, device), device, tmp_path / "a")
    mod = TunedModule.from_artefact(tmp_path / "a")
    out = torch.full((w.m, w.n), float("nan"), dtype=x.dtype)
    assert mod(x, pw, out=out) is out
    assert max_relative_error(out, want) <= {"float16": 6e-4, "bfloat16": 4e-3}[w.a_dtype]
    assert torch.equal(mod(x, pw), out)


def test_numpy_in_numpy_out(tmp_path: Path) -> None:
    device, schedule = resolve_target("cpu"), GemmW4A16Cpu()
    for dtype in ("float16", "bfloat16"):
        w, x, pw, want = problem({"m": 2, "n": 64, "k": 128, "dtype": dtype})
        build_artefact(w, schedule, schedule.default_config(w, device), device, tmp_path / dtype)
        mod = TunedModule.from_artefact(tmp_path / dtype)
        array = w.flatten_args((np.zeros(1), pw))[2]  # the scales in this dtype, as numpy
        y = mod(x.float().numpy().astype(array.dtype), pw)
        assert isinstance(y, np.ndarray)
        assert max_relative_error(torch.from_numpy(y.astype(np.float32)), want) <= 4e-3


def test_weights_of_another_shape_are_named() -> None:
    _, x, pw, _ = problem({"m": 2, "n": 64, "k": 256})
    for other, message in (
        (Gemm(2, 64, 128), "pw has k=256, this module was made for k=128"),
        (Gemm(2, 32, 256), "pw has n=64"),
        (Gemm(2, 64, 256, group_size=64), "pw has group_size=128"),
    ):
        with pytest.raises(ArgumentError, match=message):
            other.flatten_args((x, pw))


def test_sorted_weights_work_without_act_order_too() -> None:
    _, x, pw, want = problem({"m": 2, "n": 64, "k": 320, "g_idx": True})
    plain = Gemm(2, 64, 320)
    assert max_relative_error(plain.reference(*plain.flatten_args((x, pw))), want) < 1e-12
    array, *tensors = plain.flatten_args((x.numpy(), pw))
    assert isinstance(array, np.ndarray) and all(isinstance(t, np.ndarray) for t in tensors)
    assert np.array_equal(array, plain.flatten_args((x, pw))[0].numpy())
    wrong = x[:, :100]
    assert plain.flatten_args((wrong, pw))[0] is wrong  # refused by the call, by name
    *_, gaps, _ = problem({"m": 2, "n": 64, "k": 600, "group": 256, "g_idx": True})
    with pytest.raises(ArgumentError, match="act_order=True is needed"):
        Gemm(2, 64, 600, group_size=256).flatten_args((x, gaps))


def test_scales_of_another_dtype_are_rounded_once() -> None:
    w, x, _, _ = problem({"m": 2, "n": 64, "k": 256, "dtype": "bfloat16"})
    q, scales, _ = raw(256, 64, 128)
    pw = kronsched.quant.pack(q, scales)
    assert w.flatten_args((x, pw))[2].dtype == torch.bfloat16
    assert w.flatten_args((x, pw))[2] is w.flatten_args((x, pw))[2]


def test_min_bytes_count_half_a_byte_a_weight() -> None:
    assert Gemm(16, 4096, 4096).min_bytes == 4096 * 4096 // 2 + 2 * 4096 * 32 + 2 * 16 * 4096 * 2
    assert Gemm(1, 7, 33, zero_point="float").min_bytes == 116 + 7 * (2 + 4) + 2 * (33 + 7)


def test_uint4_is_another_name_for_int4() -> None:
    assert Gemm(1, 64, 64, b_dtype="uint4") == Gemm(1, 64, 64)


def test_baseline_is_a_matmul_on_dequantised_weights() -> None:
    w, x, pw, want = problem({"m": 4, "n": 70, "k": 300, "zero": "asymmetric", "g_idx": True})
    name, call = w.baseline(*w.flatten_args((x, pw)))
    assert name == "torch matmul float32"  # on a CPU
    assert max_relative_error(call(), want) < 1e-5
