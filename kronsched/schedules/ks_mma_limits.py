"""What a GPU allows a tensor-core Kronecker-sparse kernel: threads, registers, shared memory, instructions. No TVM.

Read first: `check_limits`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from kronsched.errors import InvalidConfig

if TYPE_CHECKING:
    from kronsched.hardware import Device

LANES = 32
FRESH_OTHER = 24
"""Registers beyond data, where products of wgmma start new sums."""
_FRESH_REGISTERS = 240
_REGISTERS = 65536
_BLOCK_SHARED = 1024  # what CUDA keeps of the shared memory of an SM for each block


def can_overlap(device: Device) -> bool:
    """Whether the device has programmatic dependent launch."""
    return sm_number(device) >= 90


def sm_number(device: Device) -> int:
    """The number in an architecture such as sm_90a; 0 where there is none."""
    return int("".join(c for c in device.arch if c.isdigit()) or 0)


def check_wgmma(wgmma: bool, warps: int, device: Device) -> None:
    """Raise InvalidConfig where wgmma is wanted and the device lacks it, or `warps` along the samples make no warpgroups."""
    if wgmma and device.arch != "sm_90a":
        raise InvalidConfig(f"mma=wgmma needs sm_90a, {device.name} is {device.arch}")
    if wgmma and warps % 4:
        raise InvalidConfig(f"{warps} warps along the samples are not whole warpgroups of 4")


class Limited(Protocol):
    """The figures of a plan that the device limits."""

    @property
    def threads(self) -> int:
        """Threads of a block."""

    @property
    def min_blocks(self) -> int:
        """Blocks that must fit on an SM."""

    @property
    def registers(self) -> int:
        """Registers of a thread."""

    @property
    def shared_words(self) -> int:
        """Words of shared memory of a block."""


def check_limits(p: Limited, device: Device) -> None:
    """Raise InvalidConfig, naming the limit, where a plan has too many threads, registers or bytes of shared memory."""
    if p.threads > device.max_threads_per_block or p.threads * p.min_blocks > device.max_threads_per_sm:
        raise InvalidConfig(f"{p.threads} threads a block, {p.min_blocks} blocks an SM: more than {device.name} allows")
    allowed = min(255, device.registers_per_sm // (p.threads * p.min_blocks) // 8 * 8)
    if p.registers > allowed:
        raise InvalidConfig(f"about {p.registers} registers a thread, {allowed} are left")
    available = min(device.shared_per_block, device.shared_per_sm // p.min_blocks - _BLOCK_SHARED)
    if 4 * p.shared_words > available:
        raise InvalidConfig(f"{4 * p.shared_words} bytes of shared memory, {available} are left for a block")


def check_warps(p: Limited, blocks: int, device: Device) -> None:
    """Raise InvalidConfig where a grid that fills the GPU leaves an SM fewer than 4 warps: nothing would hide its waits."""
    if blocks >= device.units * p.min_blocks and p.threads * p.min_blocks < 4 * LANES:
        raise InvalidConfig(f"{p.threads * p.min_blocks} threads an SM are too few")


def form_of(steps: int, threads: int, registers: Callable[[int, int], int]) -> tuple[int, int]:
    """(steps of k of a product that starts new sums, sets of new sums): as many as there are registers for.

    With two sets, products of wgmma run while those before them are added to the long sums.
    steps: of a chunk.  threads: on an SM.  registers: of a thread, for a form.
    """
    most = min(_FRESH_REGISTERS, _REGISTERS // threads - 8)
    forms = [(n, sets) for n in (2, 1) if steps % n == 0 for sets in (2, 1)]
    return next((form for form in forms if registers(*form) <= most), forms[-1])
