"""How rows of X lie in the ring of a chained Kron-Matmul that bulk copies feed: pure arithmetic, no TVM.

A plane is what a row holds at one a_0, padded as in the exchange buffer. A row lands where it is exchanged afterwards, plane by
plane; the ring holds as many planes as fit. With two rows or more it is cut at a whole row. With less than two, the first
`early` planes of the next row land while the present row is contracted, and the others as soon as its first planes are free.

Read first: `Ring`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kronsched.errors import InvalidConfig
from kronsched.schedules.kron_chain_layout import CHUNK, MERGED_STRIDES, chunk_strides, merged_size

MOST_ROWS = 8
"""Rows in flight: more would not help."""
LINE32 = 129
"""16-bit 32^3: chunks from one a_0 to the next."""


@dataclass(frozen=True)
class Ring:
    """a: planes of a row.  planes: of the ring.  plane_chunks: from one plane to the next.

    pieces: contiguous parts of a plane in global memory, one bulk copy each.  piece_chunks: chunks of a piece.
    piece_pitch: chunks from one piece to the next in shared memory; one more after every eighth piece where `skewed`.
    """

    a: int
    planes: int
    plane_chunks: int
    pieces: int
    piece_chunks: int
    piece_pitch: int
    skewed: bool = False

    def piece(self, i: Any) -> Any:
        """The place of a piece in its plane, in chunks."""
        return i * self.piece_pitch + (i // 8 if self.skewed else 0)

    @property
    def wraps(self) -> bool:
        """Whether a row may begin at the end of the ring and go on at its start."""
        return self.planes % self.a != 0

    @property
    def early(self) -> int:
        """Planes of a row that land before the row before the last is done with: all but where the ring wraps."""
        return self.planes - self.a if self.wraps else self.a

    @property
    def rows(self) -> int:
        """Rows that may be on their way or in use at once: mbarriers."""
        return 2 if self.wraps else self.planes // self.a

    @property
    def bytes(self) -> int:
        """Shared memory of the planes."""
        return self.planes * self.plane_chunks * 16

    def plane(self, base: Any, a0: Any) -> Any:
        """The place of a plane of the row that begins at plane `base`, in chunks."""
        from tvm.script import tirx as T

        at = base + a0
        return (T.Select(at >= self.planes, at - self.planes, at) if self.wraps else at) * self.plane_chunks


def ring_of(p: int, n: int, room: int, rows: int = MOST_ROWS) -> Ring:
    """The ring of P^N in `room` bytes, for no more than `rows` rows; it has no planes where no more than a row fits."""
    if p == 8:
        a, plane, pieces, chunks, pitch = 8, chunk_strides(8, n)[0][0], 8 ** (n - 3), 8, 9
    elif p == 32:
        a, plane, pieces, chunks, pitch = 32, LINE32, 1, 128, 128
    elif p == 16:
        a, plane = 16, chunk_strides(16, n)[0][0]
        pieces, chunks, pitch = (16, 32, chunk_strides(16, n)[0][1]) if n > 3 else (1, 32, 32)
    else:
        size = merged_size(p, n)
        plane, pitch = MERGED_STRIDES[size][:2]
        a, pieces, chunks = (16, 16, 2 * size) if size > 1 else (16, 1, 32)
    planes = min(room // (plane * 2 * CHUNK), min(rows, MOST_ROWS) * a)
    if planes <= a:
        planes = 0
    elif planes >= 2 * a:
        planes -= planes % a
    return Ring(a, planes, plane, pieces, chunks, pitch, p == 8)


def ring_fixed(p: int, n: int) -> int:
    """Bytes beside the ring: four factors of 16 or n larger ones in fragment order, mbarriers."""
    factors = n if p > 16 else 4
    return (n * 32 if p == 8 else factors * 32 * (max(p, 16) // 8) ** 2) * 4 + 8 * MOST_ROWS


def ring_bytes(p: int, n: int, rows: int, a_warp: int, most: int) -> int:
    """Bytes of shared memory of a kernel fed by bulk copies."""
    if (p, n) == (8, 3) or p == 64 or rows != 1:
        raise InvalidConfig(f"rows={rows}: only one row at a time, and not of {p}^{n}, lands in a ring")
    if p in (2, 4, 16) and a_warp != 2:
        raise InvalidConfig("a row that lands in a ring is held by all warps at once, a tile each")
    ring = ring_of(p, n, most - ring_fixed(p, n))
    if ring.planes == 0 or (p in (8, 32) and ring.wraps):
        raise InvalidConfig("there is no room in shared memory for a ring of more than a row")
    return ring.bytes + ring_fixed(p, n)
