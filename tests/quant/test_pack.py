"""Packing of 4-bit weights: round trips, the documented order, act-order, and one clear line for each mistake."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from kronsched.errors import ArgumentError, ArgumentTypeError, UnsupportedError, UserError
from kronsched.quant import PackedWeight, pack
from kronsched.quant.layout import Layout, pack_columns, pack_words, row_groups, unpack_columns, unpack_words


def raw(k: int, n: int, group: int, zeros: str = "symmetric", seed: int = 0) -> tuple[Any, ...]:
    gen = torch.Generator().manual_seed(seed)
    groups = 1 if group == -1 else -(-k // group)
    q = torch.randint(0, 16, (k, n), dtype=torch.uint8, generator=gen)
    scales = (0.5 + torch.rand(groups, n, generator=gen)).half()
    z = {
        "symmetric": None,
        "asymmetric": torch.randint(0, 17, (groups, n), generator=gen),
        "float": 15 * torch.rand(groups, n, generator=gen),
    }[zeros]
    return q, scales, z


def dequantised(q: Any, scales: Any, zeros: Any, rows: Any) -> torch.Tensor:
    zero = 8.0 if zeros is None else zeros.double()[rows]
    return (q.double() - zero) * scales.double()[rows]


@pytest.mark.parametrize("zeros", ["symmetric", "asymmetric", "float"])
@pytest.mark.parametrize(
    ("k", "n", "group"), [(128, 64, 128), (384, 48, 32), (1, 1, -1), (200, 70, 64), (513, 130, 256), (96, 65, 96)]
)
def test_round_trip(k: int, n: int, group: int, zeros: str) -> None:
    q, scales, z = raw(k, n, group, zeros)
    pw = pack(q, scales, z, group)
    rows = torch.zeros(k, dtype=torch.long) if group == -1 else torch.arange(k) // group
    assert torch.equal(pw.unpack(), dequantised(q, scales, z, rows))
    assert (pw.k, pw.n, pw.group_size, pw.zero_point, pw.act_order) == (k, n, group, zeros, False)
    assert tuple(pw.words.shape) == pw.layout.words and pw.words.shape[0] * 64 >= n and pw.words.shape[1] * 128 >= k


@pytest.mark.parametrize(("k", "group"), [(512, 128), (320, 128), (96, 32), (300, 96)])
def test_rows_of_act_order_are_sorted_and_x_gathered(k: int, group: int) -> None:
    q, scales, z = raw(k, 40, group, "asymmetric")
    g_idx = (torch.arange(k) // group)[torch.randperm(k, generator=torch.Generator().manual_seed(1))]
    pw = pack(q, scales, z, group, g_idx)
    want = dequantised(q, scales, z, g_idx)
    assert torch.equal(pw.unpack(), want)
    assert pw.act_order and pw.perm is not None
    real = pw.perm >= 0
    assert sorted(pw.perm[real].tolist()) == list(range(k))
    assert torch.equal(g_idx[pw.perm[real].long()], row_groups(pw.layout)[real])


def test_g_idx_in_order_counts_as_none() -> None:
    q, scales, _ = raw(256, 64, 128)
    assert not pack(q, scales, None, 128, torch.arange(256) // 128).act_order
    assert not pack(q, scales[:1], None, -1, torch.zeros(256, dtype=torch.int32)).act_order


def test_a_word_holds_what_the_layout_says() -> None:
    """One nonzero nibble, found by the arithmetic of the docstring."""
    layout = Layout(n=128, k=256, group_size=128)
    for k, n in [(0, 0), (1, 0), (131, 77), (255, 127), (37, 9), (94, 120)]:
        q = torch.zeros((256, 128), dtype=torch.uint8)
        q[k, n] = 15
        words = pack_words(q, layout)
        strip, c, g = n % 64 // 16, n % 16 // 8, n % 8
        half, h, t, s, e, f = k % 128 // 64, k % 64 // 32, k % 32 // 8, k % 8 // 4, k % 4 // 2, k % 2
        (tile_n, tile_k, word), *more = words.nonzero().tolist()
        assert not more and (tile_n, tile_k) == (n // 64, k // 128)
        assert word == ((strip * 2 + half) * 32 + 4 * g + t) * 4 + 2 * h + s
        assert int(words[tile_n, tile_k, word]) & 0xFFFFFFFF == 15 << (4 * (2 * e + c) + 16 * f)


def test_every_nibble_has_one_place() -> None:
    layout = Layout(n=64, k=128, group_size=128)
    words = torch.randint(-(2**31), 2**31, layout.words, dtype=torch.int32, generator=torch.Generator().manual_seed(0))
    assert torch.equal(pack_words(unpack_words(words, layout), layout), words)


def test_a_lane_reads_its_eight_scales_in_a_row() -> None:
    layout = Layout(n=64, k=256, group_size=128)
    values = torch.arange(128, dtype=torch.float32).view(2, 64)
    packed = pack_columns(values, layout)
    assert packed.shape == (1, 2, 64)
    g = 3
    assert packed[0, 1, g * 8 : g * 8 + 8].tolist() == [64 + strip * 16 + c * 8 + g for strip in range(4) for c in range(2)]
    assert torch.equal(unpack_columns(packed), values)


def test_numpy_arrays_pack_too() -> None:
    q, scales, _ = raw(128, 64, 128)
    assert torch.equal(pack(q.numpy(), scales.numpy()).unpack(), pack(q, scales).unpack())
    assert isinstance(pack(np.zeros((32, 3), np.uint8), np.ones((1, 3), np.float32)), PackedWeight)


def test_special_cases_are_converted_for_a_more_general_workload() -> None:
    q, scales, _ = raw(128, 64, 128)
    _, s, zeros = pack(q, scales).tensors("bfloat16", "asymmetric", False)
    assert s.dtype == torch.bfloat16 and zeros.dtype == torch.bfloat16 and bool((zeros == 8).all())
    whole = pack(q, scales, torch.full((1, 64), 16.0))
    assert whole.zero_point == "float"
    assert bool((whole.tensors("float16", "asymmetric", False)[2] == 16).all())
    assert whole.tensors("float16", "float", False)[0] is whole.words
    *_, perm = pack(q, scales).tensors("float16", "symmetric", True)
    assert perm.tolist() == list(range(128))
    with pytest.raises(ArgumentError, match="zero_point='float' is needed"):
        pack(q, scales, torch.full((1, 64), 7.5)).tensors("float16", "asymmetric", False)
    with pytest.raises(ArgumentError, match="has no zeros"):
        whole.tensors("float16", "symmetric", False)


def test_conversions_are_made_once() -> None:
    q, scales, _ = raw(128, 64, 128)
    pw = pack(q, scales.float())
    assert pw.tensors("float16", "symmetric", False)[1] is pw.tensors("float16", "symmetric", False)[1]
    assert pw.to("cpu") is pw


GOOD: dict[str, Any] = {
    "q": torch.zeros((256, 64), dtype=torch.uint8),
    "scales": torch.ones((2, 64)),
    "zeros": torch.full((2, 64), 8),
    "group_size": 128,
    "g_idx": torch.arange(256) // 128,
}


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ({"q": torch.zeros((256, 64), dtype=torch.int32)}, ArgumentTypeError, "q has dtype int32"),
        ({"q": torch.full((256, 64), 16, dtype=torch.uint8)}, ArgumentError, "q holds the value 16"),
        ({"q": torch.zeros(64, dtype=torch.uint8)}, ArgumentError, "q has shape (64,)"),
        ({"scales": torch.ones((64, 2))}, ArgumentError, "scales has shape (64, 2), (2, 64) is needed"),
        ({"scales": torch.ones((2, 64), dtype=torch.int32)}, ArgumentTypeError, "scales has dtype int32"),
        ({"scales": torch.full((2, 64), float("nan"))}, ArgumentError, "scales holds NaN"),
        ({"zeros": torch.full((2, 64), 17)}, ArgumentError, "zeros holds the value 17"),
        ({"zeros": torch.full((2, 64), -1)}, ArgumentError, "zeros holds the value -1"),
        ({"zeros": torch.full((2, 63), 8)}, ArgumentError, "zeros has shape (2, 63)"),
        ({"zeros": torch.full((2, 64), float("inf"))}, ArgumentError, "zeros holds NaN"),
        ({"group_size": 48}, ArgumentError, "group_size=48"),
        ({"group_size": 0}, ArgumentError, "group_size=0"),
        ({"group_size": 128.0}, ArgumentTypeError, "group_size=128.0"),
        ({"group_size": 64}, ArgumentError, "(4, 64) is needed for q of 256×64 with group_size=64"),
        ({"g_idx": torch.arange(255) // 128}, ArgumentError, "g_idx has shape (255,)"),
        ({"g_idx": torch.arange(256) // 100}, ArgumentError, "g_idx holds the value 2"),
        ({"g_idx": torch.full((256,), -1)}, ArgumentError, "g_idx holds the value -1"),
        ({"g_idx": torch.zeros(256)}, ArgumentTypeError, "g_idx has dtype float32"),
        ({"g_idx": torch.zeros(256, dtype=torch.long)}, UnsupportedError, "g_idx puts 256 rows in group 0"),
    ],
)
def test_mistakes_are_one_line(wrong: dict[str, Any], error: type[UserError], message: str) -> None:
    pack(**GOOD)
    with pytest.raises(error) as caught:
        pack(**{**GOOD, **wrong})
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
