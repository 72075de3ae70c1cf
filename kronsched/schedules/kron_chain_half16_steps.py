"""The register steps of the 16-bit chained Kron-Matmul kernels of 16 x 16 factors, emitted as TIRx.

Read first: `pair_axes` (two axes on a tile), `last_axes_of` (the last one or two).
"""

from __future__ import annotations

from typing import Any

from kronsched.schedules.kron_chain_names import MMA, PACK
from kronsched.schedules.kron_mma_kernel import evaluate


class Steps:
    """Register arrays and instructions of a kernel: b, c, d of 16, 16 and 2 words, f of 8: the phase's two factors."""

    def __init__(self, dtype: str, b: Any, c: Any, d: Any, f: Any) -> None:
        self.mma, self.pack = MMA[dtype], PACK[dtype]
        self.b, self.c, self.d, self.f = b, c, d, f

    def contract(self, o: int, s: int, b0: Any, b1: Any) -> None:
        """c[o …] = the phase's factor s as operand A (16 x 16) times (b0, b1)."""
        from tvm.script import tirx as T

        sums, factor = [self.c[o + i] for i in range(4)], [self.f[s * 4 + i] for i in range(4)]
        evaluate(T.ptx[self.mma](*sums, *factor, b0, b1, *[T.float32(0)] * 4))

    def round(self, to: Any, high: Any, low: Any) -> None:
        """Two sums to two neighbouring 16-bit numbers."""
        from tvm.script import tirx as T

        evaluate(T.ptx[self.pack](to, high, low))

    def turn(self, tile: Any, at: int, w: int, odd: int) -> None:
        """Contract the t axis on one 16-bit element of word w of a tile's 16 chunks, tile[at …]; into b[8 odd …]."""
        from tvm.script import tirx as T

        b, c, d = self.b, self.c, self.d
        for a in range(4):
            for h in range(2):
                word = at + (a * 4 + h * 2) * 4 + w
                evaluate(T.ptx["prmt.b32"](d[h], tile[word], tile[word + 4], T.uint32(0x7632 if odd else 0x5410)))
            self.contract(a * 4, 0, d[0], d[1])
        # c[4a + 2h + e]: t axis 8h + g, half e of a_{n-1}, g axis 4a + t. Word 4e + 2h + r: operand B (e, h), word r.
        for e in range(2):
            for h in range(2):
                for r in range(2):
                    self.round(b[odd * 8 + e * 4 + h * 2 + r], c[r * 8 + 4 + h * 2 + e], c[r * 8 + h * 2 + e])

    def pair_axes(self, tile: Any, at: int) -> None:
        """The two axes of the pair on a tile, in place; chunk z is `written_chunk` afterwards."""
        b, c = self.b, self.c
        for w in range(4):
            self.turn(tile, at, w, 0)
            self.turn(tile, at, w, 1)
            for i in range(4):  # 2 (half of a_{n-1}) + (half of the t axis)
                self.contract(0, 1, b[i * 2], b[i * 2 + 1])
                self.contract(4, 1, b[8 + i * 2], b[8 + i * 2 + 1])
                # c[4 odd + 2a + e]: g axis 8a + g, t axis 8h + 2t + e
                for z in range(4):
                    self.round(tile[at + (i * 4 + z) * 4 + w], c[4 + z], c[z])

    def last_axes_of(self, two: bool) -> None:
        """The last one or two axes on b[0 … 3] = (half of a_{n-1}, half of a_{n-2}); in place as b[2 (half of a_{n-2}) + h]."""
        from tvm.script import tirx as T

        b, c, f = self.b, self.c, self.f
        if two:
            for a in range(2):
                self.contract(a * 4, 0, b[a * 2], b[a * 2 + 1])
            for h in range(2):
                for a in range(2):
                    self.round(b[h * 2 + a], c[a * 4 + h * 2 + 1], c[a * 4 + h * 2])
            for h in range(2):
                self.contract(h * 4, 1, b[h * 2], b[h * 2 + 1])
        else:  # data as operand A: rows a_{n-2}
            for h in range(2):
                sums = [c[h * 4 + i] for i in range(4)]
                evaluate(T.ptx[self.mma](*sums, b[0], b[2], b[1], b[3], f[h], f[2 + h], *[T.float32(0)] * 4))
        # c[4h + 2a + e]: a_{n-2} = 8a + g, a_{n-1} = 4t + 2h + e
        for h in range(2):
            for a in range(2):
                self.round(b[a * 2 + h], c[h * 4 + a * 2 + 1], c[h * 4 + a * 2])
