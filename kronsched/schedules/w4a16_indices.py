"""Index expressions that the W4A16 main kernels share: which tile, chunk and group a warp works on.

Read first: `Indices`.
"""

from typing import Any

from tvm.script import tirx as T

from kronsched.quant.layout import TILE_K
from kronsched.schedules.w4a16_plan import W4Tiles


class Indices:
    """Index expressions of a kernel, clamped only where the shape makes it necessary: what they read there meets zeros of x."""

    def __init__(self, p: W4Tiles) -> None:
        """Take the sizes from a plan."""
        layout = p.workload.layout
        self.p, self.groups, self.rows_per_group = p, layout.groups, layout.rows_per_group
        self.last_tile = layout.words[0] - 1
        self.clamp_n = p.grid[0] * p.columns > layout.n_packed
        self.clamp_k = p.trips * p.warps_k * p.split_k != p.chunks
        self.clamp_groups = self.clamp_k or layout.k_packed > layout.groups * layout.rows_per_group

    def tile(self, strip: Any) -> Any:
        """The 64-column tile of a strip."""
        return T.min(strip // 4, self.last_tile) if self.clamp_n else strip // 4

    def slot(self, it: Any, by: Any, wk: Any) -> Any:
        """The chunk a warp works on in trip `it`; it may lie beyond the end."""
        return (by * self.p.trips + it) * self.p.warps_k + wk

    def chunk(self, it: Any, by: Any, wk: Any) -> Any:
        """The chunk whose weights are read in trip `it`."""
        slot = self.slot(it, by, wk)
        return T.min(slot, self.p.chunks - 1) if self.clamp_k else slot

    def group(self, it: Any, by: Any, wk: Any, part: Any) -> Any:
        """The group of a part (of `span` rows) of a chunk."""
        if self.groups == 1:
            return 0
        index = (self.chunk(it, by, wk) * TILE_K + part * self.p.span) // self.rows_per_group
        return T.min(index, self.groups - 1) if self.clamp_groups else index
