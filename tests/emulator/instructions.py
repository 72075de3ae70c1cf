"""One PTX instruction -> one C++ statement: operands, guards, and the table of instructions by opcode.

Read first: `emit`. Handlers are in arithmetic.py, memory_ops.py, warp_ops.py and wgmma_ops.py; each is a function of a `Ctx`
registered under the first part of its opcodes. What no handler accepts is refused by name: nothing is skipped.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.emulator.errors import EmulatorError

REGISTER_TYPES = {
    "pred": "bool",
    **{f"{k}{n}": f"uint{n}_t" for k in "bus" for n in (8, 16, 32, 64)},
    "f16": "uint16_t",
    "bf16": "uint16_t",
    "f16x2": "uint32_t",
    "bf16x2": "uint32_t",
    "f32": "uint32_t",
    "f64": "uint64_t",
}
_SPECIAL = {
    "laneid": "emu::lane()",
    "warpid": "(emu::thread() / 32)",
    "WARP_SZ": "32u",
    "tid.x": "threadIdx.x",
    "tid.y": "threadIdx.y",
    "tid.z": "threadIdx.z",
    "ntid.x": "blockDim.x",
    "ntid.y": "blockDim.y",
    "ntid.z": "blockDim.z",
    "ctaid.x": "blockIdx.x",
    "ctaid.y": "blockIdx.y",
    "ctaid.z": "blockIdx.z",
    "nctaid.x": "gridDim.x",
    "nctaid.y": "gridDim.y",
    "nctaid.z": "gridDim.z",
    "smid": "0u",
    "cluster_ctarank": "emu::cluster_rank()",
    "cluster_nctarank": "emu::cluster_size()",
    "clusterid.x": "(blockIdx.x / emu::cluster_size())",
    "lanemask_eq": "(1u << emu::lane())",
    "lanemask_lt": "((1u << emu::lane()) - 1u)",
    "lanemask_le": "((2u << emu::lane()) - 1u)",
    "lanemask_gt": "~((2u << emu::lane()) - 1u)",
    "lanemask_ge": "~((1u << emu::lane()) - 1u)",
}
INT_TYPES = {
    **{f"{k}{n}": f"uint{n}_t" for k in "bu" for n in (8, 16, 32, 64)},
    **{f"s{n}": f"int{n}_t" for n in (8, 16, 32, 64)},
}
SIZES = {
    **{f"{k}{n}": n // 8 for k in "bus" for n in (8, 16, 32, 64, 128)},
    "f16": 2,
    "bf16": 2,
    "f32": 4,
    "f64": 8,
    "f16x2": 4,
    "bf16x2": 4,
}


@dataclass
class Instruction:
    """text as written; guard such as "p" or "!p", or ""; opcode with all its dots; operands."""

    text: str
    guard: str
    opcode: str
    operands: list[str]


@dataclass
class Scope:
    """Names of one asm statement: operand number -> (C++ variable, its type), declared PTX register -> the same, labels."""

    operands: dict[str, tuple[str, str]]
    locals: dict[str, tuple[str, str]]
    labels: list[str] = field(default_factory=list)

    def declare(self, name: str, kind: str) -> None:
        """A `.reg` of this name."""
        self.locals[name] = ("emu_v_" + re.sub(r"\W", "_", name.lstrip("%")), kind)

    def label(self, name: str) -> str:
        """The C++ name of a label, which is local to the statement."""
        cpp = "emu_l_" + name.replace("$", "_")
        if cpp not in self.labels:
            self.labels.append(cpp)
        return cpp


class Ctx:
    """An instruction being translated: `parts` are the pieces of its opcode, `ops` its operands; the rest builds C++."""

    def __init__(self, instruction: Instruction, scope: Scope) -> None:
        self.instruction, self.scope = instruction, scope
        self.parts = re.split(r"(?<!:)\.", instruction.opcode)
        self.ops = instruction.operands

    @property
    def what(self) -> str:
        """A C++ string that names the instruction in messages."""
        return '"' + self.instruction.opcode + '"'

    @property
    def kind(self) -> str:
        """The last part of the opcode: its type."""
        return self.parts[-1]

    def has(self, *parts: str) -> bool:
        """Whether the opcode has one of these parts."""
        return any(p in self.parts for p in parts)

    def refuse(self, why: str = "is not known to the emulator") -> EmulatorError:
        """The error for what is not modelled."""
        return EmulatorError(f"PTX instruction {self.instruction.text!r} {why}")

    def only(self, *allowed: str) -> None:
        """Refuse opcode parts (after the first) beyond these."""
        for part in self.parts[1:]:
            if part not in allowed:
                raise self.refuse(f"is not known to the emulator (.{part})")

    # -- operands -----------------------------------------------------------------------------------

    def variable(self, text: str) -> tuple[str, str]:
        """(C++ variable, type) of a register operand."""
        if text in self.scope.locals:
            return self.scope.locals[text]
        match = re.fullmatch(r"%(\d+|\[\w+\])", text)
        if match and match[1] in self.scope.operands:
            return self.scope.operands[match[1]]
        raise self.refuse(f"has an operand {text!r} that is no register")

    def bits(self, text: str) -> str:
        """A C++ expression of the raw bits of an operand: register, special register or literal."""
        negated = text.startswith("!")
        if negated:
            return f"!{self.bits(text[1:])}"
        if text in self.scope.locals or re.fullmatch(r"%(\d+|\[\w+\])", text):
            return self.variable(text)[0]
        special = text.lstrip("%")
        if special in _SPECIAL:
            return _SPECIAL[special]
        if special in ("clock", "clock64", "globaltimer", "globaltimer_lo", "clock_lo"):
            raise self.refuse("reads a clock, which the emulator has not")
        if match := re.fullmatch(r"0[fF]([0-9a-fA-F]{8})", text):
            return f"0x{match[1]}u"
        if match := re.fullmatch(r"0[dD]([0-9a-fA-F]{16})", text):
            return f"0x{match[1]}ull"
        if re.fullmatch(r"-?(0[xX][0-9a-fA-F]+|\d+)U?", text):
            return text.rstrip("U") + ("ll" if text.startswith("-") else "ull")
        raise self.refuse(f"has an operand {text!r} that cannot be read")

    def read(self, text: str, kind: str) -> str:
        """A C++ expression of an operand's value in a PTX type; 16-bit floats widen to float."""
        bits = self.bits(text)
        if kind == "pred":
            return f"(bool)({bits})"
        if kind in INT_TYPES:
            return f"({INT_TYPES[kind]})({bits})"
        wrap = {"f32": ("emu::f32", "uint32_t"), "f64": ("emu::f64", "uint64_t"), "f16": ("emu::Half::from", "uint16_t")}
        wrap["bf16"] = ("emu::BFloat::from", "uint16_t")
        if kind in ("f16x2", "bf16x2"):
            return f"(uint32_t)({bits})"
        if kind not in wrap:
            raise self.refuse(f"is not known to the emulator (type .{kind})")
        function, cast = wrap[kind]
        return f"{function}(({cast})({bits}))"

    def write(self, text: str, kind: str, value: str) -> str:
        """A C++ statement that stores a value of a PTX type into a register; "_" takes nothing."""
        if text == "_":
            return f"(void)({value});"
        name, register = self.variable(text)
        if kind == "pred":
            return f"{name} = {value};"
        if kind in INT_TYPES:
            return f"{name} = ({register})({INT_TYPES[kind]})({value});"
        pack = {
            "f32": "emu::bits((float)({}))",
            "f64": "emu::bits((double)({}))",
            "f16": "emu::Half::to({})",
            "bf16": "emu::BFloat::to({})",
        }
        if kind in ("f16x2", "bf16x2"):
            return f"{name} = ({register})({value});"
        if kind not in pack:
            raise self.refuse(f"is not known to the emulator (type .{kind})")
        return f"{name} = ({register}){pack[kind].format(value)};"

    def vector(self, text: str) -> list[str]:
        """The registers of "{a, b}", or of a single operand."""
        if text.startswith("{"):
            return [part.strip() for part in text[1:-1].split(",")]
        return [text]

    def address(self, text: str) -> str:
        """The C++ expression of "[reg+offset]"."""
        match = re.fullmatch(r"\[\s*(\S+?)\s*(?:([+-])\s*(\S+))?\s*\]", text)
        if match is None:
            raise self.refuse(f"has an address {text!r} that cannot be read")
        base = f"(uint64_t)({self.bits(match[1])})"
        return f"({base} {match[2]} (uint64_t)({self.bits(match[3])}))" if match[2] else base


Handler = Callable[[Ctx], str]
_HANDLERS: dict[str, Handler] = {}


def handles(*opcodes: str) -> Callable[[Handler], Handler]:
    """Register a handler for opcodes by their first part."""

    def register(handler: Handler) -> Handler:
        for opcode in opcodes:
            _HANDLERS[opcode] = handler
        return handler

    return register


def emit(instruction: Instruction, scope: Scope) -> str:
    """The C++ statement of one instruction; `EmulatorError` when it is not known."""
    for module in ("arithmetic", "memory_ops", "warp_ops", "wgmma_ops"):
        importlib.import_module(f"tests.emulator.{module}")
    ctx = Ctx(instruction, scope)
    handler = _HANDLERS.get(ctx.parts[0])
    if handler is None:
        raise ctx.refuse()
    body = handler(ctx)
    if instruction.guard:
        return f"if ({ctx.bits(instruction.guard)}) {{ {body} }}"
    return f"{{ {body} }}"
