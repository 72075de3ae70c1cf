"""Peers of the dense Gemm: right where they can take part on a CPU, one line where they cannot; the suites."""

from __future__ import annotations

import pytest
import torch

from kronsched import Gemm
from kronsched.bench.peers import PeerUnavailable, peers_for
from kronsched.bench.suites import load_cases, suite_names
from kronsched.dtypes import DTYPES
from kronsched.hardware import resolve_target
from kronsched.measure.check import max_relative_error
from kronsched.registry import schedules_for


def dense(dtype: str, out_dtype: str = "") -> Gemm:
    return Gemm(20, 24, 32, dtype, dtype, out_dtype=out_dtype)


@pytest.mark.parametrize(
    ("w", "name"),
    [
        (dense("float16"), "cublas"),
        (dense("bfloat16"), "cublas"),
        (dense("int8"), "int_mm"),
        (dense("int8", "int32"), "int_mm"),
        (dense("int4"), "int_mm"),
    ],
    ids=lambda v: v.label if isinstance(v, Gemm) else v,
)
def test_a_peer_is_right(w: Gemm, name: str) -> None:
    inputs = w.make_inputs(0)
    result = peers_for(w)[name](w, inputs)()
    assert max_relative_error(result, w.reference(*inputs)) <= DTYPES[w.out_dtype].tolerance


@pytest.mark.parametrize(
    ("w", "name", "says"),
    [
        (dense("int8"), "cublas", "cublas multiplies float16 and bfloat16 only"),
        (dense("float16"), "int_mm", "int_mm multiplies int8 and int4 only"),
        (dense("float8_e4m3fn"), "scaled_mm", "on CUDA"),
        (dense("float8_e5m2"), "scaled_mm_fast", "scaled_mm multiplies float8_e4m3fn only"),
    ],
    ids=lambda v: v.label if isinstance(v, Gemm) else None,
)
def test_a_peer_that_cannot_serve_says_so(w: Gemm, name: str, says: str) -> None:
    with pytest.raises(PeerUnavailable, match=says):
        peers_for(w)[name](w, w.make_inputs(0))


def test_4_bit_weights_have_other_peers() -> None:
    assert "int_mm" not in peers_for(Gemm(16, 64, 128))


def test_every_case_of_the_suites_has_a_schedule() -> None:
    h200 = resolve_target("nvidia/h200")
    assert suite_names("gemm") == ["square", "ragged", "llama", "few_rows", "int4", "cpu"]
    for case in load_cases("gemm", "all"):
        assert schedules_for(case.workload, h200), case.workload.label


@pytest.mark.cuda
def test_float8_peers_are_right_on_a_gpu() -> None:
    w = Gemm(256, 512, 1024, "float8_e4m3fn", "float8_e4m3fn")
    inputs = w.make_inputs(0, "cuda")
    for name in ("scaled_mm", "scaled_mm_fast"):
        result = peers_for(w)[name](w, inputs)()
        torch.cuda.synchronize()
        assert max_relative_error(result, w.reference(*inputs)) < 0.1
