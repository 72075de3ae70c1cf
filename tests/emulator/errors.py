"""What the emulator raises."""

from __future__ import annotations


class EmulatorError(RuntimeError):
    """One line: what the kernel did wrong, and which thread of which block, or what the emulator does not know."""
