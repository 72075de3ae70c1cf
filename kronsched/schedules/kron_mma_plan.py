"""How the tensor-core Kron-Matmul is cut up: pure arithmetic, no TVM. Programs, constraints and features read it.

    merged axes   adjacent small factors whose Kronecker product is formed once a block and contracted as one axis
    launches      consecutive merged axes contracted in one kernel on a tensor viewed as (outer, P_s … P_e, inner)
    tile          `rows` of outer × all axes × `ct` columns of inner, in shared memory, in lines: the innermost dimension, padded
                  to 8 elements (the last axis when inner = 1, else the columns)
    steps         one merged axis each, as small GEMMs on the tile where it lies
    units         what one warp does at a time: `width` n8 tiles of columns (or m16 tiles of rows) times `q_tiles` of the outputs

Read first: `plan_launches`, `Step`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import ceil, prod

from kronsched.dtypes import DTYPES
from kronsched.errors import InvalidConfig
from kronsched.schedules.kron_mma_layout import LANES
from kronsched.space import Config
from kronsched.workloads.kron import KronMatmul

ACCUMULATORS = 128
"""Accumulator registers of a thread at most."""
MERGED = 12
"""Factors in a product at most; only factors with a side of 1 could be more."""
OTHER_REGISTERS = 36
"""Registers of addresses and loop state, a guess that keeps ptxas from spilling; the register constraint uses it."""


@dataclass(frozen=True)
class Axis:
    """Factors first … last-1 contracted as one axis with the matrix F_first ⊗ … of shape (p, q)."""

    first: int
    last: int
    p: int
    q: int


@dataclass(frozen=True)
class Step:
    """One contraction on the tile, seen as (outer, p, inner chunks) -> (outer, q, inner chunks).

    axis: position among the launch's axes.
    by_rows: the axis is the innermost dimension (a line): data is the m16 operand. Else columns of data are the n8 operand.
    outer: what precedes the axis in the tile.  stride: distance in chunks between neighbours along the axis (by_rows: chunks of a
        line before the step).  stride_out: the same after the step.
    tiles: n8 tiles of columns, or m16 tiles of rows.  width: tiles of a unit.  q_tiles: tiles of 16 outputs of a unit.
    q_parts: units along q.
    k_tiles: multiplications along p; the last one is a half when k_half.
    src, dst: buffers (0 = the input stage, 1, 2 = work).  hold: all units are computed, then a barrier, then they are stored.
    exact: every extent is a power of two that fills its tiles, so that addresses split into a lane's part XOR a constant.
    turned: by columns, but 16 columns of data are the m16 operand, so that 8 outputs do not fill half of one (float32 only).
    fragments: first 32-bit word of the factor in the fragment area.
    """

    axis: int
    by_rows: bool
    p: int
    q: int
    outer: int
    stride: int
    stride_out: int
    tiles: int
    width: int
    q_tiles: int
    q_parts: int
    k_tiles: int
    k_half: bool
    src: int
    dst: int
    hold: bool
    exact: bool
    turned: bool
    fragments: int

    @property
    def groups(self) -> int:
        """Units along columns or rows."""
        return ceil(self.tiles / self.width)

    @property
    def units(self) -> int:
        """Units of a block's tile."""
        return self.groups * self.q_parts

    @property
    def factor_q_tiles(self) -> int:
        """Tiles of 16 outputs in which the factor is stored."""
        return ceil(self.q / 16)

    @property
    def words(self) -> int:
        """32-bit words of the factor in fragment order."""
        return self.k_tiles * self.factor_q_tiles * 4 * LANES

    @property
    def accumulators(self) -> int:
        """Accumulator registers of a thread."""
        return (8 if self.by_rows else 4) * self.width * self.q_tiles


@dataclass(frozen=True)
class LaunchPlan:
    """One kernel. Buffers hold `in_chunks` (each stage) and `work_chunks` (none when 0) 16-byte chunks."""

    axes: tuple[Axis, ...]
    outer: int
    inner: int
    rows: int
    ct: int
    item: int
    threads: int
    blocks: int
    stages: int
    direct: bool
    unroll: int
    early: bool
    products: int
    steps: tuple[Step, ...]
    in_chunks: int
    work_chunks: int
    units: int

    @property
    def first(self) -> int:
        """First factor of the launch."""
        return self.axes[0].first

    @property
    def last(self) -> int:
        """One past the last factor of the launch."""
        return self.axes[-1].last

    @property
    def tile_grid(self) -> tuple[int, int]:
        """Tiles along outer and inner."""
        return ceil(self.outer / self.rows), ceil(self.inner / self.ct)

    @property
    def grid(self) -> int:
        """Blocks: as many as the device holds at a time, or fewer."""
        return min(prod(self.tile_grid), self.units * self.blocks)

    @property
    def fragment_words(self) -> int:
        """32-bit words of all factors in fragment order (twice that of the values when high and low parts are kept)."""
        return sum(s.words for s in self.steps) * (2 if self.early else 1)

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block."""
        return 16 * (self.stages * self.in_chunks + self.work_chunks) + 4 * self.fragment_words

    def lines(self, after: bool) -> tuple[int, int, int]:
        """(lines of a tile, elements of a line in global memory, its chunks in shared memory) before or after the launch."""
        sizes = [a.q if after else a.p for a in self.axes]
        chunk = 16 // self.item
        if self.inner > 1:
            return self.rows * prod(sizes), self.inner, self.ct // chunk
        return self.rows * prod(sizes[:-1]), sizes[-1], _pad(sizes[-1], 8) // chunk

    def all_lines(self, after: bool) -> int:
        """Lines of the whole tensor before or after the launch."""
        sizes = [a.q if after else a.p for a in self.axes]
        return self.outer * (prod(sizes) if self.inner > 1 else prod(sizes[:-1]))


def merge_axes(w: KronMatmul, limit: int) -> tuple[Axis, ...]:
    """Adjacent factors joined while both sides of their product stay within `limit` (0: none), at most MERGED of them.

    As few axes as possible; among these choices, the one whose smallest axis is largest.
    """
    return tuple(
        Axis(i, j, prod(p for p, _ in w.factors[i:j]), prod(q for _, q in w.factors[i:j])) for i, j in _cut(w.factors, limit)
    )


@cache
def _cut(factors: tuple[tuple[int, int], ...], limit: int) -> tuple[tuple[int, int], ...]:
    n = len(factors)
    # best[i]: (axes, −smallest axis, cuts) of the factors from i on; the least is taken, ties by longer axes last.
    best: list[tuple[int, int, tuple[tuple[int, int], ...]]] = [(0, 0, ())] * (n + 1)
    for i in range(n - 1, -1, -1):
        found = []
        p = q = 1
        for j in range(i + 1, min(n, i + MERGED) + 1):
            p, q = p * factors[j - 1][0], q * factors[j - 1][1]
            if j > i + 1 and max(p, q) > limit:
                break
            axes, smallest, cuts = best[j]
            found.append((axes + 1, max(-max(p, q), smallest or -max(p, q)), ((i, j), *cuts)))
        best[i] = min(found)
    return best[0][2]


def group_sizes(n: int, most: int) -> list[int]:
    """Axes of each launch, first executed first: as few launches as possible, as equal as possible, larger ones first."""
    base, extra = divmod(n, ceil(n / most))
    return [base + 1] * extra + [base] * (ceil(n / most) - extra)


def plan_launches(
    w: KronMatmul, config: Config, shared_block: int, shared_sm: int, units: int, registers: int = 65536, inner: int = 1
) -> tuple[LaunchPlan, ...]:
    """The launches of a config in order of execution (last axes first). Raises InvalidConfig with one line.

    shared_block, shared_sm: bytes of shared memory of a block and of an SM.  units: SMs.  registers: of an SM.
    inner: columns after the axes of w, which are the first of a longer product.
    """
    axes = merge_axes(w, int(config["merge"]))
    plans, end = [], len(axes)
    for size in group_sizes(end, int(config["fuse"])):
        start = end - size
        outer = w.m * prod(a.p for a in axes[:start])
        plan = _plan_launch(w, config, axes[start:end], outer, prod(a.q for a in axes[end:]) * inner, units)
        if plan.shared_bytes > shared_block:
            raise InvalidConfig(f"a block needs {plan.shared_bytes} bytes of shared memory, the device has {shared_block}")
        if (plan.shared_bytes + 1024) * plan.blocks > shared_sm:
            raise InvalidConfig(f"blocks={plan.blocks} of {plan.shared_bytes} bytes of shared memory do not fit an SM")
        need, have = registers_needed(plan), registers_left(plan, registers)
        if need > have:
            which = f"threads={plan.threads} blocks={plan.blocks}"
            raise InvalidConfig(f"a thread needs about {need} registers, {which} leave {have}")
        plans.append(plan)
        end = start
    return tuple(plans)


def registers_needed(plan: LaunchPlan) -> int:
    """An estimate of the registers of a thread: accumulators, operands, addresses."""
    parts = 2 if plan.item == 4 and plan.products == 3 else 1

    def operands(step: Step) -> int:
        return (4 if step.by_rows else 2) * step.width * parts + 4 * parts

    # The operands of a second k tile in the loop body are loaded ahead; float32 sums of one k tile are kept apart.
    return OTHER_REGISTERS + max(
        s.accumulators + min(plan.unroll, s.k_tiles) * operands(s) + (parts - 1) * s.accumulators // s.q_tiles for s in plan.steps
    )


def registers_left(plan: LaunchPlan, registers: int) -> int:
    """Registers a thread may have when an SM has `registers`."""
    return min(255, registers // (plan.threads * plan.blocks))


def _plan_launch(w: KronMatmul, config: Config, axes: tuple[Axis, ...], outer: int, inner: int, units: int) -> LaunchPlan:
    item = DTYPES[w.dtype].itemsize
    width = max(prod(a.p for a in axes), prod(a.q for a in axes))
    ct = min(_pad(inner, 8), int(config["ctile"])) if inner > 1 else 1
    rows = max(1, min(_ceil_pow2(outer), _floor_pow2(int(config["tile"]) // (width * ct))))
    threads = int(config["threads"])
    extent = [a.p for a in axes]
    order = range(len(axes)) if config["order"] == "head" else range(len(axes) - 1, -1, -1)
    last = order[-1]
    steps: list[Step] = []
    sizes = [_chunks(rows, extent, ct, inner, item), 0]
    at, words = 0, 0
    for i in order:
        before, after = list(extent), list(extent)
        after[i] = axes[i].q
        step = _step(axes[i], i, before, rows, ct, inner, item, int(config["cols"]), threads // LANES, at, words)
        extent = after
        words += step.words
        steps.append(step)
        at = step.dst
        if not (i == last and config["store"] == "direct"):
            sizes[at] = max(sizes[at], _chunks(rows, extent, ct, inner, item))
    split = item == 4 and config["precision"] == "tf32x3"
    plan = LaunchPlan(
        axes, outer, inner, rows, ct, item, threads, int(config["blocks"]), int(config["stages"]), config["store"] == "direct",
        int(config["unroll"]), split and config["split"] == "early", 3 if split else 1, tuple(steps), _pad(sizes[0], 8),
        _pad(sizes[1], 8), units,
    )  # fmt: skip
    if plan.direct and not _direct_ok(plan):
        raise InvalidConfig("store=direct needs a last step of exact powers of two and lines of whole 16-byte chunks")
    return plan


def _step(
    axis: Axis, i: int, extent: list[int], rows: int, ct: int, inner: int, item: int, cols: int, warps: int, src: int, words: int
) -> Step:
    chunk = 16 // item
    by_rows = inner == 1 and i == len(extent) - 1
    outer = rows * prod(extent[:i])
    if by_rows:
        stride, stride_out = _pad(axis.p, 8) // chunk, _pad(axis.q, 8) // chunk
        tiles, width = ceil(outer / 16), max(1, cols // 16)
    else:
        line = ct if inner > 1 else _pad(extent[-1], 8)
        tail = prod(extent[i + 1 :]) if inner > 1 else prod(extent[i + 1 : -1])
        stride = stride_out = tail * line // chunk
        tiles, width = outer * tail * line // 8, cols // 8
    q_all = ceil(axis.q / 16)
    width = min(width, _ceil_pow2(tiles))
    k = 16 if item == 2 else 8
    k_tiles = ceil(axis.p / k)
    q_tiles = max(1, min(q_all, ACCUMULATORS // ((8 if by_rows else 4) * width)))
    groups = ceil(tiles / width)
    while q_tiles > 1 and groups * ceil(q_all / q_tiles) < warps // 2:
        q_tiles = ceil(q_tiles / 2)
    q_parts = ceil(q_all / q_tiles)
    own = stride == stride_out and axis.p == axis.q and q_parts == 1
    hold = not own and groups * q_parts <= warps
    dst = src if own or hold else 1 - src
    even = all(_is_pow2(v) for v in (axis.p, axis.q, stride, stride_out, width)) and axis.p % 8 == 0 and axis.q % 8 == 0
    exact = even and tiles % width == 0 and q_parts * q_tiles == q_all and (not by_rows or outer % 16 == 0)
    turned = item == 4 and not by_rows and width % 2 == 0 and 0 < axis.q % 16 <= 8
    return Step(
        i, by_rows, axis.p, axis.q, outer, stride, stride_out, tiles, width, q_tiles, q_parts, k_tiles,
        item == 2 and 0 < axis.p % 16 <= 8, src, dst, hold, exact, turned, words,
    )  # fmt: skip


def _direct_ok(plan: LaunchPlan) -> bool:
    _, length, _ = plan.lines(after=True)
    return plan.steps[-1].exact and length % 8 == 0 and (plan.inner == 1 or _is_pow2(plan.ct))


def _chunks(rows: int, extent: list[int], ct: int, inner: int, item: int) -> int:
    line = ct if inner > 1 else _pad(extent[-1], 8)
    lines = rows * (prod(extent) if inner > 1 else prod(extent[:-1]))
    return lines * line * item // 16


def _pad(n: int, to: int) -> int:
    return -(-n // to) * to


def _is_pow2(n: int) -> bool:
    return n & (n - 1) == 0


def _floor_pow2(n: int) -> int:
    return 1 << (n.bit_length() - 1) if n > 0 else 1


def _ceil_pow2(n: int) -> int:
    return 1 << (n - 1).bit_length()
