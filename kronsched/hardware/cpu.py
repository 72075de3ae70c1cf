"""Describes this machine's CPU from /proc and /sys, with neither torch nor TVM."""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path

# The x86-64 psABI levels, best first: the flags (as /proc/cpuinfo spells them) that each adds. A level is used rather than
# LLVM's own name for the host because that one goes by family and model, and is wrong under a hypervisor that masks AVX-512.
_LEVELS = (
    ("x86-64-v4", {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}, 64),
    ("x86-64-v3", {"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"}, 32),
    ("x86-64-v2", {"cx16", "lahf_lm", "popcnt", "sse4_1", "sse4_2", "ssse3"}, 16),
)


def cores() -> int:
    """Cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def cpu_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The CPU's model name, such as "AMD EPYC"."""
    fields = _cpuinfo(cpuinfo)
    return fields.get("model name") or fields.get("Model") or platform.processor() or platform.machine() or "unknown CPU"


def cpu_arch(cpuinfo: Path = Path("/proc/cpuinfo"), machine: str = "") -> tuple[str, int]:
    """(LLVM mcpu name, bytes of the widest vector): the psABI level on x86-64, Apple's baseline, else LLVM's "generic"."""
    machine = machine or platform.machine()
    if machine in ("x86_64", "AMD64"):
        flags = set(_cpuinfo(cpuinfo).get("flags", "").split())
        for level, (name, _, width) in enumerate(_LEVELS):
            if all(wanted <= flags for _, wanted, _ in _LEVELS[level:]):
                return name, width
        return "x86-64", 16
    return ("apple-m1", 16) if sys.platform == "darwin" else ("generic", 16)


def cache_bytes(level: int, root: Path = Path("/sys/devices/system/cpu/cpu0/cache")) -> int:
    """Size of the first core's data cache of a level in bytes; 0 when unknown."""
    for index in sorted(root.glob("index*")):
        try:
            if int((index / "level").read_text()) == level and (index / "type").read_text().strip() != "Instruction":
                text = (index / "size").read_text().strip()
                return int(text.rstrip("KMG")) * {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(text[-1], 1)
        except (OSError, ValueError):
            continue
    return 0


def _cpuinfo(path: Path) -> dict[str, str]:
    """The fields of the first processor."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return {}
    fields: dict[str, str] = {}
    for line in text.split("\n\n")[0].splitlines():
        key, _, value = line.partition(":")
        fields[key.strip()] = value.strip()
    return fields
