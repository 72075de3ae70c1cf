"""The one layout of packed 4-bit weights that every kernel reads: tensor-core fragment order, padded to whole tiles.

A weight matrix (k, n) is cut into tiles of 64 columns by 128 rows of k, padded with the nibble 8. A tile is 4,096 bytes:

    words[n / 64][k / 128][16-column strip: 4][64-row half: 2][lane: 32][word: 4]        int32

so that one 16-byte load gives each lane of a warp what four `mma.m16n8k16` steps need of a strip (the weights are the A
operand). Lane 4g + t holds columns g and g + 8; word 2h + s of it holds rows k = 32h + 8t + 4s … + 3 of the half, because x is
then read in runs of 8 (16 bytes), and because a step never crosses a multiple of 32, the smallest group. The nibble of row
k + 2e + f and column g + 8c is at bit 4 (2e + c) + 16 f: pairs (f = 0, 1) lie 16 bits apart, as `lop3` turns them into two
halves at once.

Scales and zeros have one value a (group, column), ordered as lanes read them (16 bytes for a lane's 8 columns of a tile):

    scales[n / 64][group][g: 8][strip: 4][c: 2]

Padding: columns beyond n have scale 0; rows beyond k hold the nibble 8 and meet zeros of x. With act-order the rows are sorted by
group, each group starts at a multiple of the group size, and `perm` gives the row of x for each packed row (-1: padding).

Read first: `Layout`, `pack_words`, `pack_columns`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

TILE_N = 64
TILE_K = 128
GROUP_STEP = 32
"""Groups are whole multiples of this many rows: what one tensor-core step of a lane's words spans."""
NEUTRAL = 8
"""The nibble that stands for 0 in symmetric weights, and the padding of the others."""


def ceil_to(value: int, step: int) -> int:
    """The smallest multiple of `step` that is not below `value`."""
    return -(-value // step) * step


@dataclass(frozen=True)
class Layout:
    """Shapes of packed weights (k, n). group_size: a multiple of 32, or -1 for one group; act_order: rows sorted by group."""

    n: int
    k: int
    group_size: int
    act_order: bool = False

    @property
    def rows_per_group(self) -> int:
        """Rows of k that share a scale; the whole padded k when there is one group."""
        return self.k_packed if self.groups == 1 else self.group_size

    @property
    def groups(self) -> int:
        """Number of groups along k; the last one may be short."""
        return 1 if self.group_size == -1 else -(-self.k // self.group_size)

    @property
    def n_packed(self) -> int:
        """Columns with padding."""
        return ceil_to(self.n, TILE_N)

    @property
    def k_packed(self) -> int:
        """Rows with padding."""
        whole_groups = self.groups * self.group_size if self.act_order and self.groups > 1 else self.k
        return ceil_to(whole_groups, TILE_K)

    @property
    def words(self) -> tuple[int, int, int]:
        """Shape of the int32 words."""
        return (self.n_packed // TILE_N, self.k_packed // TILE_K, TILE_N * TILE_K // 8)

    @property
    def columns(self) -> tuple[int, int, int]:
        """Shape of the scales, and of the zeros."""
        return (self.n_packed // TILE_N, self.groups, TILE_N)


def pack_words(q: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Nibbles (k_packed or fewer, n) uint8 into words (`Layout.words`) int32."""
    import torch

    full = torch.full((layout.k_packed, layout.n_packed), NEUTRAL, dtype=torch.uint8, device=q.device)
    full[: q.shape[0], : q.shape[1]] = q
    # k: (tile, half, h, t, s, e, f); n: (tile, strip, c, g)
    split = full.view(-1, 2, 2, 4, 2, 2, 2, layout.n_packed // TILE_N, 4, 2, 8)
    pairs = split[..., 0, :] | split[..., 1, :] << 4  # a byte holds both c
    return pairs.permute(7, 0, 8, 1, 9, 3, 2, 4, 6, 5).reshape(-1, 4).view(torch.int32).view(layout.words)


def unpack_words(words: torch.Tensor, layout: Layout) -> torch.Tensor:
    """The inverse of `pack_words`: nibbles (k_packed, n_packed) uint8, padding included.

    `words` may hold fewer column tiles than the layout: the result then has their columns.
    """
    import torch

    tiles, chunks = words.shape[0], layout.k_packed // TILE_K
    pairs = words.contiguous().view(torch.uint8).view(tiles, chunks, 4, 2, 8, 4, 2, 2, 2, 2).permute(1, 3, 6, 5, 7, 9, 8, 0, 2, 4)
    full = torch.empty((chunks, 2, 2, 4, 2, 2, 2, tiles, 4, 2, 8), dtype=torch.uint8, device=words.device)
    torch.bitwise_and(pairs, 15, out=full[..., 0, :])
    torch.bitwise_right_shift(pairs, 4, out=full[..., 1, :])
    return full.view(layout.k_packed, tiles * TILE_N)


def pack_columns(values: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Values (groups, n) of any dtype, one a group and column, into `Layout.columns`; padded with 0."""
    full = values.new_zeros((layout.groups, layout.n_packed))
    full[:, : values.shape[1]] = values
    split = full.view(layout.groups, -1, 4, 2, 8)  # (group, tile, strip, c, g)
    return split.permute(1, 0, 4, 2, 3).contiguous().view(layout.columns)


def unpack_columns(packed: torch.Tensor) -> torch.Tensor:
    """The inverse of `pack_columns`: (groups, columns of the given tiles)."""
    tiles, groups, _ = packed.shape
    return packed.view(tiles, groups, 8, 4, 2).permute(1, 0, 3, 4, 2).reshape(groups, tiles * TILE_N)


def row_groups(layout: Layout, device: torch.device | str = "cpu") -> torch.Tensor:
    """The group of each packed row, (k_packed,) int64."""
    import torch

    rows = torch.arange(layout.k_packed, device=device) // layout.rows_per_group
    return rows.clamp_(max=layout.groups - 1)
