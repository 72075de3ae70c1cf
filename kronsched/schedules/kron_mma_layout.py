"""Index maps of the tensor-core Kron-Matmul: where an element sits in shared memory and in an mma fragment.

Shared memory holds a tile row-major in 16-byte chunks; chunk c is stored at `swizzle(c)`. All maps work on Python ints and on TIR
expressions alike.

| operand of mma (lane = 4 g + t) | m16 × k | k × n8 | result m16 × n8 |
|---|---|---|---|
| 16-bit, k16 | rows g, g+8; k = 2t, 2t+1 (+8) | k = 2t, 2t+1 (+8); column g | rows g, g+8; columns 2t, 2t+1 |
| TF32, k8 | rows g, g+8; k = t, t+4 | k = t, t+4; column g | the same |

Since a sum does not depend on the order of k, and rows may be labelled at will, `spread` chooses which index of the tensor t
(or g) stands for, so that the lanes of one access fall into different banks.
"""

from __future__ import annotations

from typing import Any

CHUNK_BYTES = 16
LANES = 32
Bits = tuple[int, int, int]


def swizzle(chunk: Any, chunks: int) -> Any:
    """Where chunk `chunk` of a buffer of `chunks` is stored: its low three bits XORed with all higher groups of three.

    A bijection on every aligned run of 8 chunks, and linear over XOR. For a power of two s, the eight chunks c + s·i, i < 8, with
    c / s a multiple of 8, are stored in eight different bank groups whatever s is.
    """
    folded: Any = 0
    shift = 3
    while (chunks - 1) >> shift:
        folded = folded ^ (chunk >> shift)
        shift += 3
    return chunk ^ (folded & 7) if shift > 3 else chunk


def spread(stride: int) -> Bits:
    """Bits of an index of 0..7 for (bit 0 of t, bit 1 of t, the half), given the distance of neighbours in chunks.

    Four-byte accesses of 32 bytes in a row touch two neighbouring chunks for each of four values of t. With this choice these
    eight chunks differ in their low three bits after `swizzle`, for every power of two `stride` ≥ 2.
    """
    return {0: (1, 2, 0), 1: (0, 1, 2), 2: (2, 0, 1)}[((stride & -stride).bit_length() - 1) % 3]


def spread_index(bits: Bits, t: Any, half: Any) -> Any:
    """The index of 0..7 that t of 0..3 and half of 0..1 stand for under `spread`."""
    return ((t & 1) << bits[0]) + ((t >> 1) << bits[1]) + (half << bits[2])


def factor_element(
    word: Any, q_tiles: int, item: int, k_bits: tuple[int, int, int], q_bits: tuple[int, int, int]
) -> tuple[Any, Any]:
    """(p, q) of the first element in 32-bit word `word` of a factor stored in fragment order; a 16-bit word holds p and p + 1.

    Words run over (k tile, q tile of 16, lane, r): r = 2·(upper half of k) + (upper half of q). One 16-byte load of a lane is the
    m16 operand of a q tile, and also the two n8 operands of its halves.
    """
    r, lane, tile = word & 3, (word >> 2) & 31, word >> 7
    g, t, h_q, h_k = lane >> 2, lane & 3, r & 1, r >> 1
    q = tile % q_tiles * 16 + h_q * 8 + spread_index(q_bits, g & 3, g >> 2)
    if item == 2:
        return tile // q_tiles * 16 + h_k * 8 + t * 2, q
    return tile // q_tiles * 8 + spread_index(k_bits, t, h_k), q
