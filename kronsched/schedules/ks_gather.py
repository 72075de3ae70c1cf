"""Kronecker-sparse weights (a, b, c, d) straight to shared memory in fragment order, by each block for its slice.

It saves the launch that packs weights (ks_pack.py), and pays where a slice is small.

Read first: `gathering`.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc,valid-type,name-defined"

from typing import Any

from tvm.script import tirx as T

from kronsched.dtypes import DTYPES
from kronsched.schedules.ks_pack import Packing, packed_bits
from kronsched.workloads.ks import Pattern

UNROLL = 4


def gathering(pattern: Pattern, dtype: str, packing: Packing, words: int, threads: int) -> Any:
    """The inline function that fills the first `words` words of shared memory: over w, shared memory, slice and thread."""
    per_word = 4 // DTYPES[dtype].itemsize

    def word(w, index):
        """The word of the packed weights that begins at an element."""
        parts = [T.Cast("uint32", packed_bits(w, pattern, packing, index + n)) for n in range(per_word)]
        return parts[0] if per_word == 1 else parts[0] | (parts[1] << T.uint32(16))

    @T.inline
    def gather(w, smem, sl, me):
        for many in T.serial(T.ceildiv(words, UNROLL * threads)):
            for e in T.unroll(UNROLL):  # so that several loads are under way
                at: T.let = (many * UNROLL + e) * threads + me
                if words % (UNROLL * threads) == 0 or at < words:
                    smem[at] = word(w, (sl * words + at) * per_word)

    return gather
