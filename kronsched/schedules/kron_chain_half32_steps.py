"""The register steps of the 16-bit chained Kron-Matmul kernels of 32^3, emitted as TIRx.

Arrays of words: V 32, a tile or line; b 16, operands; c 16, sums; f 16, the factor in use.

Read first: `head` (a_0 on a tile), `tail_first` and `tail_second` (a_2 and a_1 on a line).
"""

from __future__ import annotations

from typing import Any

from kronsched.schedules.kron_chain_names import MMA, PACK
from kronsched.schedules.kron_mma_kernel import evaluate


class Steps:
    """The instructions of a dtype."""

    def __init__(self, dtype: str) -> None:
        self.mma, self.pack = MMA[dtype], PACK[dtype]

    def multiply(self, d: Any, o: int, f: Any, tile: int, b: list[Any]) -> None:
        """Emit d[o …] = tile `tile` of the factor in f times operand b, two words for each of the two k steps."""
        from tvm.script import tirx as T

        sums = [d[o + i] for i in range(4)]
        for s in range(2):
            factor = [f[(tile * 2 + s) * 4 + i] for i in range(4)]
            start = sums if s else [T.float32(0)] * 4
            evaluate(T.ptx[self.mma](*sums, *factor, b[2 * s], b[2 * s + 1], *start))

    def round(self, to: Any, high: Any, low: Any) -> None:
        """Two sums to two neighbouring 16-bit numbers."""
        from tvm.script import tirx as T

        evaluate(T.ptx[self.pack](to, high, low))

    def head(self, V: Any, b: Any, c: Any, f: Any) -> None:
        """Emit the contraction of a_0 on the eight chunks in V."""
        from tvm.script import tirx as T

        for w in range(4):
            for odd in range(2):
                for i in range(4):
                    words = V[i * 8 + w], V[i * 8 + 4 + w]
                    evaluate(T.ptx["prmt.b32"](b[odd * 4 + i], *words, T.uint32(0x7632 if odd else 0x5410)))
                for tile in range(2):
                    self.multiply(c, odd * 8 + tile * 4, f, tile, [b[odd * 4 + i] for i in range(4)])
            # c[8 odd + 4 tile + 2h + e]: a_0 = row g of half h of the tile, chunk 2t + e
            for z in range(8):
                self.round(V[z * 4 + w], c[8 + z], c[z])

    def tail_first(self, V: Any, b: Any, c: Any, f: Any) -> None:
        """Emit the contraction of a_2 on a line in V (four words for each a_1 = 8i + g) into operands b."""
        for tile in range(2):
            for i in range(4):
                self.multiply(c, i * 4, f, tile, [V[i * 4 + k] for k in range(4)])
            # c[4i + 2h + e]: a_2 = row g of half h of the tile, a_1 = 8i + 2t + e
            for h in range(2):
                for i in range(4):
                    self.round(b[(tile * 2 + h) * 4 + i], c[i * 4 + h * 2 + 1], c[i * 4 + h * 2])

    def tail_second(self, V: Any, b: Any, c: Any, f: Any) -> None:
        """Emit the contraction of a_1 on operands b into V: four words for each a_1 = 16 tile + 8h + g."""
        for tile in range(2):
            for i in range(4):
                self.multiply(c, i * 4, f, tile, [b[i * 4 + k] for k in range(4)])
            # c[4i + 2h + e]: a_1 = row g of half h of the tile, a_2 = 8t + 2i + e
            for h in range(2):
                for i in range(4):
                    self.round(V[(tile * 2 + h) * 4 + i], c[i * 4 + h * 2 + 1], c[i * 4 + h * 2])
