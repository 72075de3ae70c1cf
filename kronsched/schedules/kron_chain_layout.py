"""Where the chained Kron-Matmul kernels keep a row in shared memory: index maps, pure arithmetic, no TVM.

A row of the 16-bit kernels is (a_0, …, a_{n-1}), axes of size P, cut into chunks of 16 bytes along a_{n-1}. A pair phase
contracts two axes at once on a tile of chunks that one warp holds in registers: when it is read, the axis `t` runs over
lane % 4 and registers, the axis `g` over lane / 4. The tile goes back to where it came from. The last phase reads by ldmatrix.

All functions take Python ints or TIR expressions alike: the tests check the very maps the kernels use.

Read first: `chunk_strides` (how bank conflicts are avoided), `pairs` (which axes meet in which phase).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

CHUNK = 8
"""16-bit elements of a 16-byte chunk, the unit of vector loads, shared-memory swizzles and ldmatrix."""

MERGED_STRIDES = {1: (33, 1, 0, 16), 2: (113, 7, 4, 1), 4: (145, 9, 2, 1), 8: (273, 17, 1, 8)}
"""16-bit, P = 2 and 4: chunks from one a_0, a_1, b, half of c to the next, for each size of b."""

PITCH64 = 9
"""16-bit, P = 64: chunks from one a_0 to the next in shared memory: 1 modulo 8."""


def merged_axes(p: int, n: int) -> tuple[tuple[int, ...], ...]:
    """P = 2, 4: which factors make the axes a_0, a_1, c of 16 and b of 1 to 8 (the third) of a row (a_0, a_1, b, c)."""
    four = {2: 4, 4: 2}[p]
    ends = 0, four, 2 * four, n - four, n
    return tuple(tuple(range(*ends[i : i + 2])) for i in range(4))


def merged_size(p: int, n: int) -> int:
    """P = 2, 4: extent of b."""
    size: int = p ** len(merged_axes(p, n)[2])
    return size


def merged_position(b_size: int, a0: Any, a1: Any, b: Any, half: Any) -> Any:
    """P = 2, 4: the place of a chunk in shared memory, in chunks from the start of its row."""
    return sum(s * v for s, v in zip(MERGED_STRIDES[b_size], (a0, a1, b, half), strict=True))


def pairs(p: int, n: int) -> tuple[tuple[int, int], ...]:
    """(t axis, g axis) of each pair phase, first executed first; the other axes are contracted in the last phase.

    P = 32 has none: a_0 is contracted first, then the others.

    The first pair reads global memory: for 8^5 it holds the last two chunk axes, so that a warp reads whole 128-byte lines.
    """
    if p == 8:
        return {3: ((0, 1),), 4: ((0, 1),), 5: ((2, 3), (1, 0))}[n]
    return ((1, 0),) if p == 16 else ()


def last_axes(p: int, n: int) -> tuple[int, ...]:
    """The axes of the last phase, in the order in which they are contracted."""
    paired = {axis for pair in pairs(p, n) for axis in pair}
    left = tuple(axis for axis in range(n) if axis not in paired)
    return left if p == 8 else left[::-1]


def chunks_per_axis(p: int) -> int:
    """Chunks along the last axis."""
    return p // CHUNK


def chunk_index(p: int, digits: Sequence[Any], half: Any) -> Any:
    """The number of a chunk in row-major order (its place in global memory, in chunks). digits: a_0 … a_{n-2}."""
    index: Any = 0
    for digit in digits:
        index = index * p + digit
    return index * chunks_per_axis(p) + half


def chunk_strides(p: int, n: int) -> tuple[tuple[int, ...], int, int]:
    """(strides of a_0 … a_{n-2}, stride of the half, chunks of a row) in shared memory, in chunks of 16 bytes.

    Eight chunks make the 32 banks. Every access takes eight lanes at a time. In a pair phase those are four values, two apart,
    of one axis of the pair (lane % 4) and two neighbours on the other (lane / 4), in the last phase eight neighbours along
    a_{n-2}. With every stride 1 modulo 8 they fall in different banks. Padding, not XOR, so that addresses are a base plus
    constants: a register for each address would not be left. The half of a_{n-1} (P = 16) lies between a_{n-3} and a_{n-2}.
    """
    strides = [1]
    half = p
    size = p * chunks_per_axis(p)
    for _ in range(n - 2):
        size += -(size - 1) % CHUNK
        strides.insert(0, size)
        size *= p
    return tuple(strides), half, size


def row_chunks(p: int, n: int) -> int:
    """Chunks of a row in shared memory."""
    if p < 8:
        return 16 * MERGED_STRIDES[merged_size(p, n)][0]
    return 64 * PITCH64 if p == 64 else chunk_strides(p, n)[2]


def chunk_position(p: int, n: int, digits: Sequence[Any], half: Any) -> Any:
    """The place of a chunk in shared memory, in chunks from the start of its row."""
    strides, half_stride, _ = chunk_strides(p, n)
    position: Any = half * half_stride
    for digit, stride in zip(digits, strides, strict=True):
        position = position + digit * stride
    return position


def tile_digits(p: int, n: int, pair: tuple[int, int], tile: Any, t: Any, g: Any) -> tuple[list[Any], Any]:
    """The chunk (digits a_0 … a_{n-2}, half of a_{n-1}) at (t, g) of a tile of a pair phase.

    tile: number of the tile in its row: the axes that are not in the pair, row-major, then the half.
    """
    halves = chunks_per_axis(p)
    others = [axis for axis in range(n - 1) if axis not in pair]
    digits: list[Any] = [0] * (n - 1)
    digits[pair[0]], digits[pair[1]] = t, g
    half, rest = (tile % halves, tile // halves) if halves > 1 else (0, tile)
    for axis in reversed(others):
        digits[axis] = rest % p if axis != others[0] else rest
        rest = rest // p
    return digits, half


def read_chunk(z: Any, t: Any, g: Any) -> tuple[Any, Any, Any]:
    """P = 16: (t axis, g axis, half of a_{n-1}) of a thread's chunk z of 16, as it is loaded for a pair phase.

    Lanes that differ in the low bit of g load neighbouring chunks: whole 32-byte sectors.
    """
    return z // 2 % 2 * 8 + 2 * t + z % 2, z // 4 * 4 + g // 2, g % 2


def written_chunk(z: Any, t: Any, g: Any) -> tuple[Any, Any, Any]:
    """P = 16: the same of its chunk z after the phase."""
    return z // 4 % 2 * 8 + 2 * t + z % 2, z // 2 % 2 * 8 + g, z // 8


def unit_digits(p: int, n: int, unit: Any, neighbour: Any) -> list[Any]:
    """The digits of a chunk of the last phase: `unit` numbers a_0 … a_{n-3} in row-major order, `neighbour` is a_{n-2}."""
    digits = [neighbour]
    rest = unit
    for axis in reversed(range(n - 2)):
        digits.insert(0, rest % p if axis else rest)
        rest = rest // p
    return digits


def tiles_a_row(p: int, n: int) -> int:
    """Tiles of a row in the first phase: each holds P² chunks; P = 32, 64: eight neighbouring chunks for each a_0."""
    if p == 64:
        return 1
    if p < 8:
        return 2 * merged_size(p, n)
    chunks: int = p ** (n - 3) * chunks_per_axis(p)
    return chunks if p < 32 else p * chunks // 8


def words_a_tile(p: int) -> int:
    """32-bit words of a tile in a thread."""
    p = max(p, 16) if p != 8 else p
    return p * p * 4 // 32 if p < 32 else p


def units_a_row(p: int, n: int) -> int:
    """Units of a row in the last phase."""
    if p < 8:
        return 16 * merged_size(p, n)
    units: int = p ** (n - 2)
    return units
