"""Where things are in the wgmma Kron-Matmul: tiles in shared memory, fragments in registers, factors as operand B.

A unit is 64 lines of 64 floats, 16 chunks of 16 bytes a line. Two patterns read it as operand A of wgmma.m64nNk8 (64 rows, sums
over k): "line", where lines are A's rows and k runs along them (the last axis), and "column", where columns are A's rows and k
runs over lines (any other axis). Chunks are swizzled so that both patterns, and writing results back, are free of bank conflicts.
All functions take ints or TIR expressions.

Read first: `swizzle`, `factor_element`.
"""

from __future__ import annotations

from typing import Any

UNIT = 64
"""Lines of a unit, and floats of a line."""


def swizzle(line: Any) -> Any:
    """What the chunk index of a line is XORed with: 0, 2, 4 or 6.

    Distinct for lines 4i … 4i+3 and for lines i, i+2, i+4, i+6 (of eight), and different in bit 2 for lines 2i and 2i+1.
    """
    low = (line & 3) ^ ((line >> 2) & 1)
    return ((low & 1) << 2) | (low & 2)


def word(line: Any, column: Any) -> Any:
    """The float of a unit's buffer that holds (line, column)."""
    return line * UNIT + (((column >> 2) ^ swizzle(line)) << 2) + (column & 3)


def line_read(line: Any, low: Any, block: int, half: int) -> Any:
    """word(line + 8 half, 16 block + 4 t), from low = t ^ swizzle(line) for t < 4: what a thread loads in the line pattern."""
    return (line + 8 * half) * UNIT + (((low ^ (block % 2 * 4)) + block // 2 * 8) << 2)


def line_write(line: Any, low: Any, t: Any, j: int, half: int) -> Any:
    """word(line + 8 half, 8 j + 2 t), from low = (t >> 1) ^ swizzle(line): where a thread puts a pair of sums of that pattern."""
    return (line + 8 * half) * UNIT + (((low ^ (2 * j & 7)) + (2 * j & 8)) << 2) + (t & 1) * 2


def column_read(line: Any, column: Any, half: int) -> Any:
    """word(line, column + 8 half), where column % 16 < 8: what a thread loads in the column pattern."""
    return line * UNIT + (((column >> 2) ^ swizzle(line) ^ (2 * half)) << 2) + (column & 3)


def line_k(step: Any, k: Any) -> Any:
    """The column that k (0 … 7) of a k-step stands for in the line pattern.

    A thread takes four neighbouring columns by one 16-byte load; they serve two k-steps, as k = lane % 4 and k = lane % 4 + 4.
    """
    return 16 * (step // 2) + 4 * (k % 4) + 2 * (step % 2) + k // 4


def column_k(step: Any, k: Any) -> Any:
    """The line that k (0 … 7) of a k-step stands for in the column pattern."""
    return 8 * step + k


def factor_element(place: Any, n: int) -> tuple[Any, Any, Any]:
    """(k-step, k, column) of the element of operand B at a float of the factor's buffer; n columns, K-major, not swizzled.

    Core matrices of 8 columns × 4 k: neighbours in k are 128 bytes apart, neighbours in columns 256 bytes.
    """
    within = place % (8 * n)
    return place // (8 * n), ((within >> 5) & 1) * 4 + (within & 3), (within >> 6) * 8 + ((within & 31) >> 2)


LEADING, STRIDE = 128 // 16, 256 // 16
"""Descriptor offsets (in 16 bytes) between core matrices: along k, along columns."""
