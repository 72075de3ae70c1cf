"""CUDA source as TVM emits it -> a C++ file that g++ compiles against runtime/emu.hpp.

Read first: `translate_source`. The text stays as it is but for three things: inline PTX (asm.py), shared-memory declarations,
and one exported launcher for each kernel at the end.
"""

from __future__ import annotations

import re

from tests.emulator.asm import replace_asm
from tests.emulator.errors import EmulatorError

_ALIGN = r"(?:(?:__align__|alignas)\s*\(\s*(?P<align>\d+)\s*\)\s*)?"
_DYNAMIC = re.compile(rf"extern\s+__shared__\s+{_ALIGN}(?P<type>[\w:\s]+?)\s*\b(?P<name>\w+)\s*\[\s*\]\s*;")
_STATIC = re.compile(rf"(?<!extern )__shared__\s+{_ALIGN}(?P<type>[\w:\s]+?)\s*\b(?P<name>\w+)\s*(?P<extent>(?:\[[^\]]+\]\s*)*);")
_KERNEL = re.compile(r"__global__\s+void\s+(?:__\w+__\s*\([^)]*\)\s*)*(\w+)\s*\(")


def translate_source(source: str) -> str:
    """The C++ text; each kernel SYMBOL is exported as `emu_run_SYMBOL`. Line numbers of the source are kept."""
    if re.search(r"__cluster_dims__", source):
        raise EmulatorError("clusters of thread blocks (__cluster_dims__) are not known to the emulator")
    text = replace_asm(source)
    text = _DYNAMIC.sub(lambda m: f"{m['type']}* {m['name']} = ({m['type']}*)emu::dynamic_shared();", text)
    text = _STATIC.sub(_static, text)
    rest = re.search(r"[^\n]*\b__shared__\b[^\n]*", text)
    if rest:
        raise EmulatorError(f"the shared-memory declaration {rest[0].strip()!r} is not understood by the emulator")
    launchers = "\n".join(f"EMU_KERNEL({symbol})" for symbol in sorted(set(_KERNEL.findall(source))))
    return f'#include "emu.hpp"\n#line 1 "kernel.cu"\n{text}\n{launchers}\n'


def _static(match: re.Match[str]) -> str:
    kind, name, extent, align = match["type"], match["name"], match["extent"].strip(), match["align"] or "16"
    of = f"{kind}{extent}"
    return f"static {kind} (&{name}){extent} = *({kind}(*){extent})emu::static_shared(sizeof({of}), {align});"
