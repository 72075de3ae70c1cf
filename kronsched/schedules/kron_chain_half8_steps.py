"""The register steps of the 16-bit chained Kron-Matmul kernels of 8 x 8 factors, emitted as TIRx.

Read first: `Steps.both` (two axes on a tile), `Steps.last` (the last one or two).
"""

from __future__ import annotations

from typing import Any

from kronsched.schedules.kron_chain_names import MMA, MMA_K8, PACK
from kronsched.schedules.kron_mma_kernel import evaluate


class Steps:
    """Register arrays and instructions of a kernel: b and c of 8 and 16 words, f of 2: the phase's two factors."""

    def __init__(self, dtype: str, b: Any, c: Any, f: Any) -> None:
        self.mma, self.mma_k8, self.pack = MMA[dtype], MMA_K8[dtype], PACK[dtype]
        self.b, self.c, self.f = b, c, f

    def round(self, to: Any, high: Any, low: Any) -> None:
        """Two sums to two neighbouring 16-bit numbers."""
        from tvm.script import tirx as T

        evaluate(T.ptx[self.pack](to, high, low))

    def swap(self, q: int) -> None:
        """Contract the axis along lane % 4 with f[0] on words b[2q], b[2q+1]; afterwards it runs along lane / 4."""
        from tvm.script import tirx as T

        b, c, none = self.b, self.c, T.uint32(0)
        sums = [c[4 * q + i] for i in range(4)]
        factor = [self.f[0], none, none, self.f[0]]
        evaluate(T.ptx[self.mma](*sums, *factor, b[2 * q], b[2 * q + 1], *[T.float32(0)] * 4))
        self.round(b[2 * q], c[4 * q + 1], c[4 * q])
        self.round(b[2 * q + 1], c[4 * q + 3], c[4 * q + 2])

    def stay(self, s: int, q: int) -> None:
        """Contract the axis along lane % 4 with f[s] on words b[2q], b[2q+1]; it stays there, in c[4q …]."""
        from tvm.script import tirx as T

        sums = [self.c[4 * q + i] for i in range(4)]
        evaluate(T.ptx[self.mma_k8](*sums, self.b[2 * q], self.b[2 * q + 1], self.f[s], *[T.float32(0)] * 4))

    def both(self, tile: Any, at: Any) -> None:
        """The two axes of a pair, on the chunks tile[at … at+3] (t axis even) and tile[at+4 … at+7] (odd)."""
        from tvm.script import tirx as T

        b, c = self.b, self.c
        for q in range(4):
            for r, bytes_of in enumerate((0x5410, 0x7632)):
                evaluate(T.ptx["prmt.b32"](b[2 * q + r], tile[at + q], tile[at + 4 + q], T.uint32(bytes_of)))
            self.swap(q)
            self.stay(1, q)
            # from here tile[at … at+3] holds g axis even, tile[at+4 … at+7] odd
            self.round(tile[at + q], c[4 * q + 2], c[4 * q])
            self.round(tile[at + 4 + q], c[4 * q + 3], c[4 * q + 1])

    def last(self, two: bool) -> None:
        """The last one or two axes on b[0 … 3], in place."""
        b, c = self.b, self.c
        for h in range(2):
            if two:
                self.swap(h)
            self.stay(int(two), h)
            for e in range(2):
                self.round(b[2 * h + e], c[4 * h + 2 * e + 1], c[4 * h + 2 * e])
