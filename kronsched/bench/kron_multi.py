"""`kronsched bench kron-multi`: weak and strong scaling of one Kron-Matmul over the ranks of this host, or of torchrun.

    weak    every rank has `rows` rows (or as many elements): ideal is the time of one rank alone
    strong  all ranks together have `rows` rows: ideal is that time / ranks

One rank alone is measured before and after each grid: a GPU that grew warm in between is no effect of the grid.

Every grid GM × GK of the ranks is measured with the numbers of pieces and of local factors that are best on paper, each with the
last factor in place or not; a row of the result is the quickest of a grid. (n, 1) splits rows and exchanges nothing; (1, n)
splits columns, which a matrix needs whose rows are too few or too long for one GPU, and pays for it with two all-to-alls or more
(FastKron's scheme).

Read first: `calls` (what is measured), `measure` (which every rank runs).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from kronsched.distributed.choices import Pair, promising
from kronsched.distributed.comm import counting
from kronsched.distributed.cost import Link, plan
from kronsched.distributed.grid import Grid, Shapes, grids, needed_phases
from kronsched.distributed.kron import kron_matmul
from kronsched.distributed.measure import Choice, measure_link, measured_choices, time_us
from kronsched.dtypes import DTYPES
from kronsched.errors import ArgumentError, choose
from kronsched.hardware import Device
from kronsched.nn.functional import kron_matmul as local_product
from kronsched.workloads.kron import DTYPE_NAMES, parse_factors

MODES = ("weak", "strong")
BLOCK_BYTES = {"cuda": 4 << 30, "cpu": 1 << 20}
"""Rows of a case that names none fill so many bytes of X."""
CHECKED_BYTES = 1 << 33
"""Memory that the float64 reference of a checked row may take."""


@dataclass(frozen=True)
class Case:
    """X (rows, ΠPi) times factors; weak scaling gives every rank so many rows."""

    rows: int
    factors: Shapes
    dtype: str

    @property
    def label(self) -> str:
        """Such as "m=64 64x64^4 float32"."""
        return f"m={self.rows} {powers(self.factors)} {self.dtype}"


@dataclass(frozen=True)
class Call:
    """A product to measure: of one rank alone (mode "one") or of all ranks together, in each of the ways `pairs`.

    case: with the rows a rank.  m: rows of all ranks together.  pairs: (local, chunks).
    """

    case: Case
    mode: str
    grid: Grid
    m: int
    pairs: tuple[Pair, ...]

    @property
    def whole(self) -> Case:
        """The case with the rows of all ranks together."""
        return replace(self.case, rows=self.m)


@dataclass(frozen=True)
class Row:
    """The quickest call of one grid.

    m: rows of all ranks together.  us: of the slowest rank.  one_us: of one rank alone with the case's rows (all ranks by
    themselves at the same time, the slowest; mean of the medians before and after).  efficiency: of ideal scaling, 1 is
    perfect; speed-up is ranks times that.  exchange_bytes: what rank 0 sent, least_bytes: what the grid needs at least.
    paper_us: the cost model's time with the measured link, and kernels at the roofline or as logged.
    error: largest difference of checked rows from a float64 reference, relative to its root mean square; None where a row is
    too large to check.  tried: (µs, local, chunks, in_place) of all calls.
    """

    case: str
    mode: str
    ranks: int
    m: int
    grid: tuple[int, int]
    local: int
    chunks: int
    in_place: bool
    phases: tuple[int, ...]
    us: float
    one_us: float
    exchange_bytes: int
    least_bytes: int
    paper_us: float
    error: float | None
    tried: tuple[tuple[float, int, int, bool], ...]

    @property
    def speedup(self) -> float:
        """Work of all ranks over that of one, in the same time."""
        return self.efficiency * self.ranks

    @property
    def efficiency(self) -> float:
        """Ideal time / time."""
        return self.one_us / self.us / (self.ranks if self.mode == "strong" else 1)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "speedup": self.speedup, "efficiency": self.efficiency}


def rows_of(data: Mapping[str, Any]) -> list[Row]:
    """The rows of a result's JSON that are whole."""
    names = [f.name for f in fields(Row)]
    return [Row(**{name: row[name] for name in names}) for row in data["rows"] if all(name in row for name in names)]


def case_of(text: str, dtype: str, kind: str) -> Case:
    """A case from "64^4", "128x128^4:8" or "8x4,4x8:100": factors, and after the colon the rows."""
    if dtype not in DTYPE_NAMES:
        raise choose("dtype", dtype, DTYPE_NAMES)
    shapes, _, rows = text.partition(":")
    square = re.fullmatch(r"(\d+)\^(\d+)", shapes.strip())
    factors = ((int(square[1]), int(square[1])),) * int(square[2]) if square else _factors(shapes)
    if rows and not rows.strip().isdigit():
        raise ArgumentError(f"case {text!r}: rows {rows!r} is not allowed: an int ≥ 1 is needed")
    row_bytes = max(prod(p for p, _ in factors), prod(q for _, q in factors)) * DTYPES[dtype].bits // 8
    found = int(rows) if rows else max(1, BLOCK_BYTES[kind] // row_bytes)
    if found < 1:
        raise ArgumentError(f"case {text!r}: rows 0 is not allowed: an int ≥ 1 is needed")
    return Case(found, factors, dtype)


def _factors(text: str) -> Shapes:
    """Factors such as "8x4,4x8" or "64x64^3,8x8"."""
    pieces = [piece.strip().partition("^") for piece in text.split(",")]
    return parse_factors(",".join(",".join([pair] * int(n or 1)) for pair, _, n in pieces if not n or n.isdigit()))


def powers(factors: Shapes) -> str:
    """Such as "64x64^4" or "8x4,4x8"."""
    same = len(set(factors)) == 1
    listed = [factors[0]] if same else list(factors)
    return ",".join(f"{p}x{q}" for p, q in listed) + (f"^{len(factors)}" if same and len(factors) > 1 else "")


def calls(
    cases: Sequence[Case], modes: Sequence[str], ranks: int, chunks: Sequence[int], device: Device, tries: int | None = None
) -> list[Call]:
    """What a measurement is made of: of each case first one rank alone, then every mode and grid.

    tries: how many (local, chunks) of a grid, the best on paper; None is all.
    """
    found = []
    for case in cases:
        found.append(Call(case, "one", Grid(1, 1), case.rows, ((len(case.factors), 1),)))
        for mode in modes:
            m = case.rows * (ranks if mode == "weak" else 1)
            for grid in grids(ranks, case.factors):
                if grid.rows <= m:
                    pairs = promising(m, case.factors, grid, case.dtype, device, chunks=chunks, tries=tries)
                    found.append(Call(case, mode, grid, m, tuple(pairs)))
    return found


# -- what every rank runs -------------------------------------------------------------------------------


def measure(say: Callable[[Any], None], device: torch.device, asked: Sequence[Call], repeats: int = 5) -> None:
    """Measure what `calls` lists; `say` gets lines of progress, a `Link` (with more than one rank), and a `Row` a call."""
    ranks = dist.get_world_size()
    mesh = init_device_mesh(device.type, (ranks,))
    say(f"{ranks} rank(s) have started")
    link = None
    if ranks > 1:
        sizes = (2**24, 2**31) if device.type == "cuda" else (2**14, 2**22)
        link = measure_link(mesh, *sizes, repeats=repeats)
        say(link)
    for call in asked:
        if call.mode == "one":
            say(f"{call.case.label}: one rank alone takes {_one_us(call.case, mesh, device, repeats):.0f} µs")
        else:
            before = _one_us(call.case, mesh, device, repeats)
            row = _row(call, mesh, device, link, repeats)
            say(replace(row, one_us=(before + _one_us(call.case, mesh, device, repeats)) / 2))


def _row(call: Call, mesh: DeviceMesh, device: torch.device, link: Link | None, repeats: int) -> Row:
    case, grid = call.whole, call.grid
    x, factors = _block(case, grid, device), _matrices(case, device)
    with torch.no_grad():
        tried = measured_choices(x, factors, mesh, grid=grid, pairs=call.pairs, repeats=repeats)
        best: Choice = tried[0]
        with counting() as sent:
            y = kron_matmul(x, factors, mesh, grid=grid, local=best.local, chunks=best.chunks, in_place=best.in_place)
        error = _error(case, grid, x, y, factors)
    paper = plan(
        case.rows,
        case.factors,
        grid.ranks,
        case.dtype,
        grid=grid,
        local=best.local,
        chunks=best.chunks,
        device=str(device),
        **({} if link is None else {"link": link}),  # type: ignore[arg-type]
    )
    steps = tuple(s.stop - s.start for s in needed_phases(case.factors, grid, best.local))
    return Row(
        case=call.case.label,
        mode=call.mode,
        ranks=grid.ranks,
        m=case.rows,
        grid=(grid.rows, grid.columns),
        local=best.local,
        chunks=best.chunks,
        in_place=best.in_place,
        phases=steps,
        us=best.us,
        one_us=best.us,
        exchange_bytes=sent.bytes,
        least_bytes=_least_bytes(case, grid, x.shape[0]),
        paper_us=paper.us,
        error=error,
        tried=tuple((t.us, t.local, t.chunks, t.in_place) for t in tried),
    )


def _least_bytes(case: Case, grid: Grid, rows: int) -> int:
    """Bytes that a rank with so many rows sends with the phases that exchange the fewest elements."""
    if grid.columns == 1:
        return 0
    columns = sum(s.k_out for s in needed_phases(case.factors, grid))
    return rows * columns // grid.columns**2 * (grid.columns - 1) * DTYPES[case.dtype].bits // 8


def _one_us(case: Case, mesh: DeviceMesh, device: torch.device, repeats: int) -> float:
    """One rank's rows on every rank at the same time, each by itself, as with one rank: nothing is exchanged."""
    x, factors = _block(case, Grid(1, 1), device), _matrices(case, device)
    with torch.no_grad():
        return time_us(lambda: local_product(x, factors), repeats, mesh, device)


def _block(case: Case, grid: Grid, device: torch.device) -> Tensor:
    """The block of X that this rank holds: rows as torch.tensor_split cuts them."""
    rank = dist.get_rank()
    row, _ = grid.place(rank) if grid.ranks > 1 else (0, 0)
    rows = case.rows // grid.rows + (row < case.rows % grid.rows)
    generator = torch.Generator(device).manual_seed(1 + rank)
    shape = (rows, prod(p for p, _ in case.factors) // grid.columns)
    return torch.randn(shape, dtype=DTYPES[case.dtype].torch(), device=device, generator=generator)


def _matrices(case: Case, device: torch.device) -> list[Tensor]:
    """The factors, the same on every rank, scaled so that Y is about as large as X."""
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(pair, generator=generator, dtype=torch.float64) / pair[0] ** 0.5 for pair in case.factors]
    return [f.to(device, DTYPES[case.dtype].torch()) for f in made]


def _error(case: Case, grid: Grid, x: Tensor, y: Tensor, factors: Sequence[Tensor]) -> float | None:
    """The largest error of the last row of each rank's block, whose pieces are collected from the ranks of its grid row."""
    if 24 * max(x.shape[1], y.shape[1]) * grid.columns > CHECKED_BYTES:
        return None
    pieces = [_gathered(t[-1].contiguous()) for t in (x, y)]
    own = grid.row_of(dist.get_rank())
    row, got = (torch.cat([all_pieces[r] for r in own]).double() for all_pieces in pieces)
    expected = _reference(row, [f.double() for f in factors])
    error = (got - expected).abs().max() / expected.square().mean().sqrt()
    dist.all_reduce(error, dist.ReduceOp.MAX)
    return float(error)


def _gathered(piece: Tensor) -> list[Tensor]:
    """The piece of every rank."""
    found = [torch.empty_like(piece) for _ in range(dist.get_world_size())]
    dist.all_gather(found, piece)
    return found


def _reference(row: Tensor, factors: Sequence[Tensor]) -> Tensor:
    """One row by torch alone: the last axis is contracted and goes to the front, once for each factor."""
    for f in reversed(factors):
        row = (f.mT @ row.reshape(-1, f.shape[0]).mT).reshape(-1)
    return row
