"""KronMatmul beyond the family contract: order of contraction, costs, parsing, baseline."""

from __future__ import annotations

import itertools
from math import prod

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kronsched.errors import ArgumentError, ArgumentTypeError, UnsupportedError
from kronsched.measure.check import max_relative_error
from kronsched.workloads.kron import KronMatmul, parse_factors, shuffle


def _flops_in_order(m: int, factors: list[tuple[int, int]], order: tuple[int, ...]) -> int:
    size, total = prod(p for p, _ in factors), 0
    for i in order:
        p, q = factors[i]
        total += 2 * m * size * q
        size = size // p * q
    return total


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=5), st.integers(1, 7))
def test_flops_are_those_of_the_cheapest_order(factors: list[tuple[int, int]], m: int) -> None:
    costs = [_flops_in_order(m, factors, order) for order in itertools.permutations(range(len(factors)))]
    workload = KronMatmul(m, factors)
    assert workload.flops == min(costs)
    assert _flops_in_order(m, factors, workload.order) == min(costs)


def test_only_long_16_bit_chains_get_more_than_the_tolerance_of_the_dtype() -> None:
    found = {dtype: [KronMatmul(2, [(2, 2)] * n, dtype).slack for n in (1, 3, 6)] for dtype in ("float16", "bfloat16", "float32")}
    assert found == {"float16": [1, 1, 2], "bfloat16": [1, 1, 2], "float32": [1, 1, 1]}
    assert KronMatmul(2, [(1, 1)] * 40 + [(2, 2)] * 3, "bfloat16").slack == 1
    assert KronMatmul(2, [(2, 2)] * 20, "bfloat16").slack == 3


def test_equal_factors_are_contracted_from_the_last() -> None:
    assert KronMatmul(4, [(8, 8)] * 4).order == (3, 2, 1, 0)


def test_costs_of_a_known_shape() -> None:
    workload = KronMatmul(64, [(8, 8)] * 4)
    assert workload.flops == 4 * 2 * 64 * 4096 * 8
    assert workload.min_bytes == 4 * (2 * 64 * 4096 + 4 * 64)
    assert KronMatmul(64, [(8, 8)] * 4, "float16").min_bytes * 2 == workload.min_bytes
    assert (workload.k_in, workload.k_out) == (4096, 4096)


def test_any_integer_type_and_sequence_is_accepted_and_normalised() -> None:
    workload = KronMatmul(np.int64(3), [[np.int32(4), 5], (6, 7)])  # type: ignore[arg-type,list-item]
    assert workload == KronMatmul(3, ((4, 5), (6, 7)))
    assert type(workload.m) is int
    assert workload.factors == ((4, 5), (6, 7))


def test_label_folds_runs() -> None:
    assert KronMatmul(7, [(8, 8), (8, 8), (2, 3), (8, 8)], "float16").label == "kron m=7 8x8^2,2x3,8x8 float16"


@pytest.mark.parametrize(
    ("text", "factors"), [("8x8", ((8, 8),)), ("8x8, 4x3", ((8, 8), (4, 3))), ("12x1,1x12", ((12, 1), (1, 12)))]
)
def test_factor_text_is_parsed(text: str, factors: tuple[tuple[int, int], ...]) -> None:
    assert parse_factors(text) == factors


@pytest.mark.parametrize("text", ["", "8", "8xx8", "8x", "x8", "8x8,", "8x8;8x8", "8x-8", "8.0x8", "axb", "8x8x8"])
def test_factor_text_that_is_wrong_is_named(text: str) -> None:
    with pytest.raises(ArgumentError, match="PxQ"):
        parse_factors(text)


def test_errors_are_also_value_and_type_errors() -> None:
    with pytest.raises(ValueError, match="m=0"):
        KronMatmul(0, [(2, 2)])
    with pytest.raises(TypeError, match="m='x'"):
        KronMatmul("x", [(2, 2)])  # type: ignore[arg-type]
    assert issubclass(ArgumentTypeError, TypeError)


def test_the_largest_tensor_on_the_way_counts() -> None:
    # Input and output fit, the intermediate in the cheapest order does too; one element more does not.
    KronMatmul(1, [(2**15, 2**15), (2**15, 2**15)])
    with pytest.raises(UnsupportedError, match="2147483648 elements"):
        KronMatmul(2, [(2**15, 2**15), (2**15, 2**15)])


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
def test_baseline_computes_the_same(dtype: str) -> None:
    workload = KronMatmul(6, [(4, 3), (5, 7), (2, 8)], dtype)
    inputs = workload.make_inputs(0)
    name, run = workload.baseline(*inputs)
    assert name == ("torch shuffle" if dtype == "float16" else "numpy shuffle")
    result = torch.as_tensor(run())
    assert max_relative_error(result, workload.reference(*inputs)) < {"float16": 0.02, "float32": 1e-5, "float64": 1e-12}[dtype]


def test_shuffle_is_the_same_for_numpy_and_torch() -> None:
    inputs = KronMatmul(3, [(2, 3), (4, 2)], "float64").make_inputs(0)
    ours = shuffle(inputs[0], inputs[1:])
    theirs = shuffle(inputs[0].numpy(), [f.numpy() for f in inputs[1:]])
    np.testing.assert_allclose(ours.numpy(), theirs, rtol=1e-13)


def test_nan_in_one_row_stays_there() -> None:
    workload = KronMatmul(5, [(3, 2), (2, 3)])
    inputs = workload.make_inputs(0)
    inputs[0][2] = float("nan")
    nan_rows = torch.isnan(workload.reference(*inputs)).any(dim=1)
    assert nan_rows.tolist() == [False, False, True, False, False]
