"""Activations in float32 as arithmetic that a CPU's vector units do: libm's erf and exp are called lane by lane.

Read first: `activated_fast`. The gelu is that of the CUDA kernels (ks_epilogue.py).
"""

from __future__ import annotations

from typing import Any

from tvm.script import tirx as T

from kronsched.schedules.ks_epilogue import FARTHEST, LOG2E, log2_tail
from kronsched.workloads.ks_epilogue import activated

EXP2 = (1.0, 0.6931471824645996, 0.24022646248340607, 0.05550328642129898, 0.009618489071726799, 0.0013399930903688073,
        0.0001534581242594868)  # fmt: skip
"""Coefficients of 2^f on |f| ≤ 1/2, lowest power first: off by at most 1e-7 of the result in float32."""


def activated_fast(activation: str | None, value: Any, dtype: str) -> Any:
    """As `activated`; in float32 without calls."""
    if dtype != "float32" or activation not in ("gelu", "silu"):
        return activated(activation, value, dtype)
    if activation == "silu":
        return value / (T.float32(1) + _exp2(value * T.float32(-LOG2E)))
    size = T.abs(value)
    u = T.min(size, T.float32(FARTHEST))
    return T.float32(0.5) * (value + size) - u * _exp2(log2_tail(u, 4))


def _exp2(x: Any) -> Any:
    """2^x: from about 127.5 on infinite, below -126 that of -126."""
    x = T.max(T.min(x, T.float32(128)), T.float32(-126))
    whole = T.floor(x + T.float32(0.5))
    part = x - whole
    *rest, value = (T.float32(c) for c in EXP2)
    for coefficient in reversed(rest):
        value = value * part + coefficient
    return value * T.reinterpret("float32", T.shift_left(T.Cast("int32", whole) + 127, 23))
