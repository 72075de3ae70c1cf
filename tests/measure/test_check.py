"""The correctness gate and the guarded buffers."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kronsched.dtypes import DTYPES
from kronsched.measure import check
from kronsched.measure.arena import ALIGN, BAND, Arena, same_bytes
from kronsched.measure.check import gate, max_relative_error, rms

INF, NAN = math.inf, math.nan


def tensor(*values: float, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


def formula(y: torch.Tensor, ref: torch.Tensor) -> float:
    y, ref = y.double(), ref.double()
    return float(((y - ref).abs() / (ref.abs() + ref.square().mean().sqrt())).max())


def test_is_the_formula() -> None:
    gen = torch.Generator().manual_seed(0)
    ref = torch.randn(7, 11, generator=gen, dtype=torch.float64)
    y = (ref + 1e-3 * torch.randn(7, 11, generator=gen, dtype=torch.float64)).float()
    assert max_relative_error(y, ref) == pytest.approx(formula(y, ref), rel=1e-12)
    assert max_relative_error(y, ref, rms(ref)) == max_relative_error(y, ref)


def test_chunks_see_every_element(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(check.CHUNK, "cpu", 5)
    ref = torch.arange(1.0, 24.0, dtype=torch.float64)
    for wrong in range(23):
        y = ref.clone()
        y[wrong] += 1.0
        assert max_relative_error(y, ref) == pytest.approx(formula(y, ref))
        y[wrong] = NAN
        verdict = gate(y, ref, "float32")
        assert verdict.error == INF
        assert verdict.message is not None and f"({wrong},)" in verdict.message


@pytest.mark.parametrize(
    ("y", "ref", "error"),
    [
        ((0.0, 0.0), (0.0, 0.0), 0.0),
        ((NAN, 1.0), (NAN, 1.0), 0.0),
        ((NAN, 1.0), (1.0, 1.0), INF),
        ((1.0, 1.0), (NAN, 1.0), INF),
        ((INF, 1.0), (INF, 1.0), 0.0),
        ((-INF, 1.0), (INF, 1.0), INF),
        ((INF, 1.0), (1.0, 1.0), INF),
        ((1.0, 1.0), (INF, 1.0), INF),
        ((INF, 1.0), (NAN, 1.0), INF),
        ((NAN, 2.0), (NAN, 1.0), 0.5),
        ((1e300, 1.0), (1e300, 1.0), 0.0),
    ],
)
def test_special_values(y: tuple[float, ...], ref: tuple[float, ...], error: float) -> None:
    assert max_relative_error(tensor(*y), tensor(*ref)) == pytest.approx(error)


def test_overflow_of_the_storage_dtype_is_not_an_error() -> None:
    y = tensor(INF, -INF, 1.0, dtype=torch.float16)
    assert max_relative_error(y, tensor(65520.0, -1e6, 1.0)) == 0.0
    assert max_relative_error(y, tensor(65520.0, 1e6, 1.0)) == INF
    assert max_relative_error(y, tensor(60000.0, -1e6, 1.0)) == INF


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.uint8])
def test_integers_are_exact(dtype: torch.dtype) -> None:
    ref = torch.arange(100, dtype=dtype)
    y = ref.clone()
    assert gate(y, ref.double(), "int32").message is None
    y[41] += 1
    verdict = gate(y, ref.double(), "int32")
    assert verdict.error > 0
    assert verdict.message is not None and "(41,)" in verdict.message


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_gate_has_the_tolerance_of_the_dtype(dtype: str) -> None:
    tolerance, torch_dtype = DTYPES[dtype].tolerance, DTYPES[dtype].torch()
    ref = torch.linspace(1, 2, 50, dtype=torch.float64).to(torch_dtype)
    allowance = tolerance * (ref[7].double() + rms(ref))
    for factor, accepted in ((0.5, True), (3.0, False)):
        y = ref.clone()
        y[7] = (ref[7].double() + factor * allowance).to(torch_dtype)
        verdict = gate(y.reshape(5, 10), ref.double().reshape(5, 10), dtype)
        assert (verdict.message is None) is accepted
        if not accepted:
            assert "(0, 7)" in str(verdict.message)


def test_a_workload_may_allow_more_than_its_dtype() -> None:
    ref = torch.ones(8, dtype=torch.float64)
    y = ref.clone().half()
    y[3] += 3 * DTYPES["float16"].tolerance  # of |ref| + rms = 2: one and a half times the tolerance
    assert gate(y, ref, "float16").message is not None and gate(y, ref, "float16", slack=2.0).message is None


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_float8_is_compared(dtype: str) -> None:
    y = torch.tensor([0.5, 1.0, 2.0]).to(DTYPES[dtype].torch())
    assert max_relative_error(y, y.double()) == 0.0
    assert rms(y) == pytest.approx(math.sqrt((0.25 + 1 + 4) / 3))


@given(st.lists(st.floats(-1e150, 1e150), min_size=1, max_size=20))
def test_rms(values: list[float]) -> None:
    largest = max(map(abs, values)) or 1.0
    expected = largest * math.sqrt(sum((v / largest) ** 2 for v in values) / len(values))
    assert rms(tensor(*values)) == pytest.approx(expected, rel=1e-9, abs=1e-160)


def test_rms_of_huge_and_special_values() -> None:
    assert rms(tensor(3e200, 4e200, NAN, INF)) == pytest.approx(math.sqrt(12.5) * 1e200)
    assert rms(tensor(NAN)) == rms(torch.empty(0)) == 0.0
    assert max_relative_error(torch.empty(0), torch.empty(0)) == 0.0


def test_shapes_must_agree() -> None:
    with pytest.raises(ValueError, match="shape"):
        max_relative_error(torch.zeros(2, 3), torch.zeros(3, 2))


# -- arena ------------------------------------------------------------------------------------------

NAMES = ["x", "f0", "y"]


@pytest.fixture
def inputs() -> list[torch.Tensor]:
    gen = torch.Generator().manual_seed(1)
    return [torch.randn(5, 7, generator=gen), torch.randn(3, generator=gen).to(torch.bfloat16)]


@pytest.fixture
def arena(inputs: list[torch.Tensor]) -> Arena:
    made = Arena(inputs, torch.empty(5, 3), 3)
    made.load(inputs)
    return made


def test_sets_are_aligned_equal_and_apart(arena: Arena, inputs: list[torch.Tensor]) -> None:
    spans = []
    for views, output in arena.sets:
        assert all(torch.equal(view, value) for view, value in zip(views, inputs, strict=True))
        assert output.shape == (5, 3) and torch.isnan(output).all()
        for t in (*views, output):
            assert t.data_ptr() % ALIGN == 0 and t.is_contiguous()
            spans.append((t.data_ptr(), t.data_ptr() + t.nbytes))
    spans.sort()
    assert all(after[0] - before[1] >= 2 * BAND for before, after in pairwise(spans))
    assert arena.damage(NAMES, inputs) is None


@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("offset", [-BAND, -1, 0, BAND - 1])
def test_a_changed_band_is_found(arena: Arena, inputs: list[torch.Tensor], which: int, offset: int) -> None:
    first, size = arena._spans[which]
    at = first + offset if offset < 0 else first + size + offset
    arena._slab[0, at] ^= 1
    found = arena.damage(NAMES, inputs)
    side = "before" if offset < 0 else "after"
    assert found == f"wrote out of bounds: 1 bytes changed just {side} tensor {NAMES[which]!r}"
    arena.load(inputs)
    assert arena.damage(NAMES, inputs) is None


def test_a_changed_input_is_found(arena: Arena, inputs: list[torch.Tensor]) -> None:
    arena.sets[0][0][1][2] = 9
    assert arena.damage(NAMES, inputs) == "changed its input 'f0'"


def test_a_read_beyond_an_input_is_nan(arena: Arena) -> None:
    x = arena.sets[0][0][0]
    for offset in (-1, x.numel()):
        beyond = torch.as_strided(x, (1,), (1,), x.storage_offset() + offset)
        assert torch.isnan(beyond).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int32, torch.int8])
def test_unwritten_elements_are_counted(dtype: torch.dtype) -> None:
    arena = Arena([torch.zeros(1)], torch.empty(40, dtype=dtype), 1)
    for left in (0, 1, 39):
        arena.load([torch.zeros(1)])
        arena.sets[0][1][left:] = -1
        first = arena.output_bytes().clone()
        arena.poison(1)
        arena.sets[0][1][left:] = -1
        assert arena.unwritten(first) == left


def test_rotated_sets_are_renewed_only_when_stale(arena: Arena, inputs: list[torch.Tensor]) -> None:
    arena.sets[2][0][0].zero_()
    arena.load(inputs)
    assert not arena.sets[2][0][0].any()
    arena.stale = True
    arena.load(inputs)
    assert torch.equal(arena.sets[2][0][0], inputs[0])


def test_same_bytes_is_bitwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kronsched.measure.arena.COMPARE_BYTES", 8)
    a = tensor(NAN, 0.0, 1.0, 2.0)
    assert same_bytes(a, a.clone())
    assert not same_bytes(a, tensor(NAN, -0.0, 1.0, 2.0))
    assert not same_bytes(a, tensor(NAN, 0.0, 1.0, 2.0000000000000004))


@pytest.mark.parametrize("first", [0, 1, 8])
def test_same_bytes_sees_every_byte(first: int) -> None:
    whole = torch.arange(37, dtype=torch.uint8)
    a, b = whole[first:], whole.clone()[first:]
    assert same_bytes(a, b)
    for at in range(len(b)):
        b[at] ^= 128
        assert not same_bytes(a, b), at
        b[at] ^= 128


def test_underflow_of_a_small_dtype_is_not_wrong() -> None:
    zero = torch.zeros(4, dtype=torch.float16)
    assert max_relative_error(zero, torch.full((4,), 1.8e-18, dtype=torch.float64)) <= DTYPES["float16"].tolerance
    assert max_relative_error(zero, torch.full((4,), 1e-3, dtype=torch.float64)) > DTYPES["float16"].tolerance
    # float32 has room below: the same zero is wrong there.
    assert max_relative_error(zero.float(), torch.full((4,), 1.8e-18, dtype=torch.float64)) > DTYPES["float32"].tolerance


def test_anything_beyond_underflow_is_wrong_where_the_reference_is_zero() -> None:
    zero = torch.zeros(2, dtype=torch.float64)
    assert max_relative_error(zero, zero) == 0.0
    assert max_relative_error(torch.tensor([0.0, 1e-30], dtype=torch.float64), zero) > 1e200


def test_the_parts_of_complex_numbers_are_compared_one_by_one() -> None:
    ref = torch.complex(torch.full((4,), 100.0, dtype=torch.float64), torch.arange(4, dtype=torch.float64))
    assert max_relative_error(ref.to(torch.complex64), ref) < 1e-7
    assert max_relative_error(ref.to(torch.complex64).conj(), ref) > 0.01, "a wrong sign of the imaginary part"
    wrong = ref.to(torch.complex64)
    wrong[2] = complex(100.0, math.inf)
    verdict = gate(wrong, ref, "complex64")
    assert verdict.error == math.inf
    assert verdict.message is not None and "at (2, 1): got inf, expected 2" in verdict.message
