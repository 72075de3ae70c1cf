"""How the float32 chained Kron-Matmul of 8^5 is cut up and where a row is in shared memory: pure arithmetic, no TVM.

A row is (a_0, …, a_4), cut into chunks of four a_4; `half` is which half of a_4. A unit is the 8 x 8 chunks of two axes, both
halves: (a_2, a_3) in the first phase, (a_1, a_0) in the second.

Read first: `place`, `Chain8Plan`.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING, Any

from kronsched.errors import InvalidConfig
from kronsched.schedules.kron_chain_plan import generation
from kronsched.space import Config

if TYPE_CHECKING:
    from kronsched.hardware import Device

SIZE = 8**5
"""Elements of a row."""
UNIT_WORDS = 16
"""Numbers of a thread in a unit."""
UNITS = 64
"""Units of a row, in either phase."""
_A2, _A1, _A0 = 17, 137, 1097  # chunks from one a_i to the next: all odd
ROW_CHUNKS = 8 * _A0
"""Chunks of 16 bytes of a row in shared memory."""


def read_chunk(z: Any, t: Any, g: Any) -> tuple[Any, Any, Any]:
    """(first contracted axis, second, half) of a thread's chunk z of four before a phase: 128 bytes for eight lanes."""
    return t + z % 2 * 4, z // 2 * 4 + g // 2, g % 2


def written_chunk(z: Any, t: Any, g: Any) -> tuple[Any, Any, Any]:
    """The same of its chunk z after the phase."""
    return 2 * t + z % 2, g, z // 2


def place(a0: Any, a1: Any, a2: Any, a3: Any, half: Any) -> Any:
    """Where a chunk is in shared memory, in chunks; the lanes of an access fall into different banks in every phase."""
    return a0 * _A0 + a1 * _A1 + a2 * _A2 + half * 8 + (a3 ^ half * 4)


@dataclass(frozen=True)
class Chain8Plan:
    """One kernel.

    blocks: rows of X.  grid: thread blocks.  staged: units of a warp that come through the stage by cp.async.
    first: a block's first row is brought into L2 before the launch before this one has ended.
    sooner: the launch after this one may do so already then.
    overlap: the launch starts while the one before it ends, and waits for it by itself.
    """

    m: int
    threads: int
    grid: int
    prefetch: str
    load: str
    store: str
    unroll: int
    staged: int
    first: bool
    sooner: bool
    overlap: bool

    @property
    def blocks(self) -> int:
        """Rows of X, one at a time in a thread block."""
        return self.m

    @property
    def rows(self) -> int:
        """Rows of X of a thread block at a time."""
        return 1

    @property
    def rows_at_once(self) -> int:
        """Rows that may be brought into L2 at once."""
        return 1

    @property
    def row_bytes(self) -> int:
        """Bytes of a row of X."""
        return SIZE * 4

    @property
    def units_a_warp(self) -> int:
        """Units of a warp."""
        return UNITS * 32 // self.threads

    @property
    def held_words(self) -> int:
        """Words of the next row in a thread's registers."""
        return (self.units_a_warp - self.staged) * UNIT_WORDS

    @property
    def shared_bytes(self) -> int:
        """A row, the stage, five factors in fragment order."""
        return ROW_CHUNKS * 16 + self.staged * self.threads * UNIT_WORDS * 4 + 5 * 32 * 16


def plan_chain8(m: int, config: Config, device: Device) -> Chain8Plan:
    """The kernel of a config for m rows. Raises InvalidConfig with one line."""
    threads, prefetch = int(config["threads"]), str(config["prefetch"])
    a_warp = UNITS * 32 // threads
    staged = {"none": 0, "registers": 0, "split": a_warp // 2}[prefetch]
    grid = min(m, device.units) if prefetch != "none" else m
    if prefetch != "none" and grid == m:
        raise InvalidConfig(f"prefetch={prefetch}: there is no next row when every row has its own place in the grid")
    hints = str(config["load"]), str(config["store"]), int(config["unroll"])
    overlap, first = generation(device) >= 90, config["l2"] != "none"
    if first and not overlap:
        raise InvalidConfig(f"l2={config['l2']}: this launch does not start before the one before it has ended")
    plan = Chain8Plan(m, threads, grid, prefetch, *hints, staged, first, config["l2"] == "sooner", overlap)
    if plan.shared_bytes > device.shared_per_block:
        raise InvalidConfig(f"a block needs {plan.shared_bytes} bytes of shared memory, the device has {device.shared_per_block}")
    return plan


def chain8_features(plan: Chain8Plan, device: Device) -> dict[str, float]:
    """What the cost model sees of a plan."""
    bytes_moved = 8.0 * plan.m * SIZE
    return {
        "launches": 1.0,
        "global_mb": bytes_moved / 1e6,
        "shared_mb": 2 * bytes_moved / 1e6,
        "roofline_us": bytes_moved / device.bandwidth_gbs / 1e3,
        "shared_kb": plan.shared_bytes / 1024,
        "blocks": float(plan.m),
        "threads_per_sm": float(plan.threads),
        "waves": plan.m / device.units,
        "wave_efficiency": plan.m / device.units / ceil(plan.m / device.units),
        "register_cap": min(255.0, device.registers_per_sm / plan.threads),
        "held_words": float(plan.held_words),
        "staged_share": plan.staged / plan.units_a_warp,
    }
