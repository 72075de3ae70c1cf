"""What a rank does between its block of X and its block of Y: phases of pieces of rows, each followed by an exchange.

Every phase multiplies trailing axes, and what is sent is transposed so that the next axes are the trailing ones:

    (m, L, G)  ── pack ──►  (GK, m, G/GK, L)  ── all-to-all ──►  (GK, m, G/GK, L)  ── unpack ──►  (m, G/GK, GK·L)

A last phase of one factor can do without: its axis is left where it stands, in front, and is multiplied from the left, which is a
Kronecker-sparse product of the pattern (m, Q, P, 1) in batch-last. Then whole runs of G / GK are copied:

    (m, L, G)  ── pack, runs G/GK ──►  (GK, m, L, G/GK)  ── all-to-all ──►  ── unpack, runs L·G/GK ──►  (m, P, G/GK)
               ── F1ᵀ from the left ──►  (m, Q, G/GK)  ── pack ──►  (GK, m, Q/GK, G/GK)  ── all-to-all ──►
               ── unpack, runs G/GK ──►  (m, Q/GK, G)            for a piece of one row the two copies in the middle are views

Both send the same bytes. A piece's exchange is waited for only when its next phase, or the end, needs it, so the exchange of one
piece overlaps with the multiplication and the copies of the others.

Read first: `pipeline`.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from kronsched.distributed.comm import Flight, GridGroups, Start, Wait
from kronsched.distributed.grid import Grid, Phase
from kronsched.errors import ArgumentError
from kronsched.nn.functional import kron_matmul as local_product
from kronsched.nn.ks_functional import ks_matmul

LONG_RUN = 4096
"""Elements of a run from which on `in_place` is taken when it is not asked for."""
Part = tuple[Tensor, Flight | None]


def stands(steps: Sequence[Phase], grid: Grid, asked: bool | None) -> bool:
    """Whether the last factor is multiplied in place; ArgumentError where that is asked for and cannot be."""
    can = True in ways(steps, grid.columns)
    if asked and not can:
        parts = "+".join(str(s.stop - s.start) for s in steps)
        raise ArgumentError(f"in_place=True is not allowed: two phases, the last of one factor, are needed; here are {parts}")
    if asked is not None:
        return asked
    return can and steps[0].group_out // grid.columns >= LONG_RUN


def ways(steps: Sequence[Phase], columns: int) -> tuple[bool, ...]:
    """The values of `in_place` that phases allow."""
    return (False, True) if len(steps) == 2 and steps[1].stop == 1 and columns > 1 else (False,)


def pipeline(
    x: Tensor, factors: Sequence[Tensor], steps: Sequence[Phase], groups: GridGroups, chunks: int, in_place: bool
) -> Tensor:
    """Every phase of every piece of this rank's rows."""
    parts: list[Part] = [(part, None) for part in x.tensor_split(chunks)]
    for number, step in enumerate(steps, 1):
        what = f"exchange {number} of {len(steps)}"
        if in_place:
            phase = _first if number == 1 else _from_left
            parts = [phase(part, factors, step, groups, what) for part in parts]
        else:
            parts = [_phase(_landed(*part), factors, step, groups, what) for part in parts]
    if len(parts) == 1:
        return _landed(*parts[0])
    if torch.is_grad_enabled() and any(part.requires_grad for part, _ in parts):
        return torch.cat([_landed(*part) for part in parts])
    return _collected(x, parts, steps[-1].k_out // groups.grid.columns)


def _collected(x: Tensor, parts: Sequence[Part], columns: int) -> Tensor:
    """The pieces, each unpacked to where it belongs in the result."""
    out = x.new_empty((x.shape[0], columns))
    row = 0
    for part in parts:
        blocks = _moved(*part)
        rows = blocks.shape[0]
        out[row : row + rows].view(blocks.shape).copy_(blocks)
        row += rows
    return out


def _moved(x: Tensor, flight: Flight | None) -> Tensor:
    """What was sent off, once it has arrived, as a view whose elements are in the order of the block."""
    if flight is None:
        return x
    received: Tensor = Wait.apply(x, flight)  # type: ignore[no-untyped-call]
    return received.permute(1, 2, 0, 3)  # (rank, m, group, L) to (m, group, rank, L); in place, (m, Q / GK, rank, R)


def _landed(x: Tensor, flight: Flight | None) -> Tensor:
    """The block (m, columns) of what was sent off."""
    blocks = _moved(x, flight)
    return blocks if flight is None else blocks.reshape(blocks.shape[0], prod(blocks.shape[1:]))


def _sent(send: Tensor, groups: GridGroups, what: str) -> Part:
    flight = Flight(groups, what)
    return Start.apply(send, flight), flight  # type: ignore[no-untyped-call]


# -- phases that transpose ------------------------------------------------------------------------------


def _phase(x: Tensor, factors: Sequence[Tensor], step: Phase, groups: GridGroups, what: str) -> Part:
    """Multiply a group of trailing axes of the block (m, L · ΠPi) and send it off as (GK, m, ΠQi / GK, L)."""
    gk, m = groups.grid.columns, x.shape[0]
    lead = step.k_in // step.group_in // gk
    y = local_product(x.reshape(m * lead, step.group_in), factors[step.start : step.stop])
    if gk == 1:
        return y.reshape(m, lead, step.group_out).transpose(1, 2).reshape(m, step.k_out), None
    send = y.reshape(m, lead, gk, step.group_out // gk).permute(2, 0, 3, 1).contiguous()
    return _sent(send, groups, what)


# -- a last factor that stays where it is ---------------------------------------------------------------


def _first(part: Part, factors: Sequence[Tensor], step: Phase, groups: GridGroups, what: str) -> Part:
    """All factors but the first, and send it off as (GK, m, L, ΠQi / GK)."""
    x, gk = part[0], groups.grid.columns
    m, lead = x.shape[0], step.k_in // step.group_in // gk
    y = local_product(x.reshape(m * lead, step.group_in), factors[step.start : step.stop])
    return _sent(y.reshape(m, lead, gk, step.group_out // gk).permute(2, 0, 1, 3).contiguous(), groups, what)


def _from_left(part: Part, factors: Sequence[Tensor], step: Phase, groups: GridGroups, what: str) -> Part:
    """The first factor: (GK, m, P / GK, R) arrives, F1ᵀ is applied to each (P, R), and it leaves as (GK, m, Q / GK, R)."""
    received: Tensor = Wait.apply(*part)  # type: ignore[no-untyped-call]
    gk, m, _, run = received.shape
    p, q = step.group_in, step.group_out
    rows = received.transpose(0, 1).reshape(m * p, run)
    if m == 0:  # nothing to compute, but gradients must find their way
        y = torch.matmul(factors[0].mT, rows.reshape(0, p, run))
    else:
        weights = factors[0].mT.expand(m, q, p).reshape(m, q, p, 1)
        y = ks_matmul(rows, weights, layout="batch_last")
    return _sent(y.reshape(m, gk, q // gk, run).transpose(0, 1).contiguous(), groups, what)
