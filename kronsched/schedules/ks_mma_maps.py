"""Index maps of the batch-first tensor-core Kronecker-sparse kernel: plain arithmetic, on ints or TVM expressions. No TVM.

See ks_mma_plan.py for the tiling, its letters, and why the order of k and j is what it is.

Read first: `own_k`, `own_j`, `weight_at`.
"""

from __future__ import annotations

from typing import Any

from kronsched.schedules.ks_mma_limits import LANES
from kronsched.schedules.ks_mma_plan import MmaPlan


def own_k(p: MmaPlan, lane: Any, q: Any) -> Any:
    """The k, within an instruction, of element q (below Q) of lane t."""
    return lane * p.own + q if p.small else q * 4 + lane


def own_j(p: MmaPlan, lane: Any, q: Any) -> Any:
    """The j, within a pair of instructions, of result q (below 4) of lane t."""
    return lane * 4 + q if p.small else q * 4 + lane


def weight_at(p: MmaPlan, index: Any) -> tuple[Any, Any, Any, Any]:
    """(i, j, k, l) of an element of the weights in fragment order; j, k or l may be beyond the pattern (padding: zero).

    Order: slice (i, j-chunk, l-chunk), chunk of k, l, k step, part, 16 outputs j, then
        mma.sync  lane, 8 outputs, half of k, element of a word
        wgmma     8 outputs, half of k, output, element of 16 bytes
    """
    per_word = 4 // p.item
    part, word = index % per_word, index // per_word
    if p.wgmma:  # core matrices of 8 columns × 16 bytes of k
        t, column, word = word % 4, word // 4 % 8, word // LANES
        half, e, word = word % 2, word // 2 % 2, word // 4
    else:
        half, e, word = word % 2, word // 2 % 2, word // 4
        t, column, word = word % 4, word // 4 % 8, word // LANES
    pair, word = word % (p.jb // 16), word // (p.jb // 16) // p.parts
    step, word = word % (p.ks // p.k_step), word // (p.ks // p.k_step)
    m, word = word % p.lb, word // p.lb
    chunk, slice_ = word % p.chunks, word // p.chunks
    _, nj, nl = p.slices
    k = chunk * p.ks + step * p.k_step + own_k(p, t, half * per_word + part)
    j = slice_ // nl % nj * p.jb + pair * 16 + own_j(p, column // 2, e * 2 + column % 2)
    return slice_ // (nl * nj), j, k, slice_ % nl * p.lb + m


def low_weight(p: MmaPlan, index: Any) -> Any:
    """Whether an element of the packed weights is a low part (`parts` = 2)."""
    return index // (p.jb * p.k_step) % 2 == 1


def x_word(p: MmaPlan, row: Any, k: Any, byte: Any) -> Any:
    """The word of a stage where byte `byte` of X lies: within the l at step k of the chunk, or (small, k = 0) within all."""
    if p.small:
        return (row * p.pitch + byte) // 4
    unit = byte // 16
    if p.swizzled:
        unit = unit ^ (k // 2 % 2)
    return (row * p.pitch + k * (p.lb * p.item)) // 4 + unit * 4 + byte % 16 // 4
