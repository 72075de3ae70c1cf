"""Inline PTX statements of CUDA source -> C++ blocks that call the emulator.

Read first: `replace_asm`. A statement `asm volatile("template" : outs : ins : clobbers)` becomes a block that copies the
inputs to registers (raw bits), runs one C++ statement for each PTX instruction (instructions.py) and copies the outputs back.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from tests.emulator.errors import EmulatorError
from tests.emulator.instructions import REGISTER_TYPES, Instruction, Scope, emit

_ASM = re.compile(r"\b(?:asm|__asm__|__asm)\b\s*(?:volatile|__volatile__)?\s*\(")
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
_CONSTRAINTS = {"r": "uint32_t", "f": "uint32_t", "h": "uint16_t", "l": "uint64_t", "d": "uint64_t", "n": "int64_t"}


@dataclass(frozen=True)
class Operand:
    """One operand of an asm statement: constraint such as "=r", C++ expression, and symbolic name or ""."""

    constraint: str
    expression: str
    name: str = ""

    @property
    def register(self) -> str:
        """The C++ type of its register."""
        kind = self.constraint.strip("=+&%")
        if kind not in _CONSTRAINTS:
            raise EmulatorError(f"asm constraint {self.constraint!r} is not supported by the emulator")
        return _CONSTRAINTS[kind]


@dataclass
class Statement:
    """A parsed asm statement."""

    template: str
    outputs: list[Operand] = field(default_factory=list)
    inputs: list[Operand] = field(default_factory=list)


def replace_asm(source: str) -> str:
    """The source with every inline PTX statement translated; `EmulatorError` names an instruction that is not known."""
    out, at = [], 0
    for begin, end, statement in statements(source):
        lines = source.count("\n", begin, end)
        out += [source[at:begin], translate(statement), "\n" * lines]  # keep line numbers
        at = end
    return "".join((*out, source[at:]))


def statements(source: str) -> Iterator[tuple[int, int, Statement]]:
    """(start, end, statement) of every asm statement; the end is behind its semicolon, if it has one."""
    at = 0
    while match := _ASM.search(source, at):
        line = source[source.rfind("\n", 0, match.start()) + 1 : match.start()]
        if line.lstrip().startswith("//"):
            at = match.end()
            continue
        close = _closing(source, match.end())
        semicolon = re.compile(r"\s*;?").match(source, close + 1)
        assert semicolon is not None
        yield match.start(), semicolon.end(), _parse(source[match.end() : close])
        at = semicolon.end()


def _closing(text: str, at: int) -> int:
    """Index of the parenthesis that closes the one before `at`."""
    depth = 1
    while depth:
        if text[at] == '"':
            string = _STRING.match(text, at)
            assert string is not None
            at = string.end()
            continue
        depth += {"(": 1, ")": -1}.get(text[at], 0)
        at += 1
    return at - 1


def _split(text: str, separator: str) -> list[str]:
    """Split at separators outside strings, parentheses and brackets."""
    parts, depth, start, at = [], 0, 0, 0
    while at < len(text):
        if text[at] == '"':
            string = _STRING.match(text, at)
            assert string is not None
            at = string.end()
            continue
        depth += {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}.get(text[at], 0)
        if depth == 0 and text[at] == separator:
            parts.append(text[start:at])
            start = at + 1
        at += 1
    parts.append(text[start:])
    return parts


def _parse(inside: str) -> Statement:
    sections = _split(inside, ":")
    strings = _STRING.findall(sections[0])
    statement = Statement("".join(ast.literal_eval(s) for s in strings))
    for index, group in ((1, statement.outputs), (2, statement.inputs)):
        if len(sections) > index:
            group += [_operand(part) for part in _split(sections[index], ",") if part.strip()]
    return statement


def _operand(text: str) -> Operand:
    match = re.fullmatch(r'\s*(?:\[(\w+)\]\s*)?"([^"]*)"\s*\((.*)\)\s*', text, re.DOTALL)
    if match is None:
        raise EmulatorError(f"asm operand {text.strip()!r} cannot be read")
    return Operand(match[2], match[3], match[1] or "")


def translate(statement: Statement) -> str:
    """A C++ block for one statement, on one line."""
    operands = statement.outputs + statement.inputs
    scope = Scope({}, {})
    setup, finish = [], []
    for i, operand in enumerate(operands):
        name = f"emu_o{i}"
        for key in (str(i), f"[{operand.name}]"):
            scope.operands[key] = (name, operand.register)
        if i < len(statement.outputs) and not operand.constraint.startswith("+"):
            setup.append(f"{operand.register} {name}{{}};")
        else:
            setup.append(f"{operand.register} {name} = emu::in<{operand.register}>({operand.expression});")
        if i < len(statement.outputs):
            finish.append(f"emu::out({operand.expression}, {name});")
    body = list(_body(statement.template, scope))
    declared = [f"{kind} {name}{{}};" for name, kind in scope.locals.values()]
    labels = [f"__label__ {name};" for name in scope.labels]
    # Labels may be jumped to from anywhere in the block, so nothing is declared behind them.
    return " ".join(("{", *labels, *setup, *declared, *body, *finish, "}"))


def _body(template: str, scope: Scope) -> Iterator[str]:
    text = re.sub(r"/\*.*?\*/|//[^\n]*", " ", template, flags=re.DOTALL)
    for piece in _pieces(text):
        if piece in "{}":
            continue  # registers of all PTX scopes are declared at the top of the block
        if piece.endswith(":"):
            yield f"{scope.label(piece[:-1].strip())}:;"
        elif piece.startswith(".reg"):
            _declare(piece, scope)
        else:
            yield emit(_instruction(piece), scope)


def _pieces(text: str) -> Iterator[str]:
    """Instructions without their semicolons; labels with their colon; the braces of PTX scopes."""
    for line in text.split(";"):
        piece = line.strip()
        while before := re.match(r"[{}]|[$\w]+\s*:(?!:)", piece):
            yield before[0]
            piece = piece[before.end() :].strip()
        if piece:
            yield " ".join(piece.split())


def _declare(piece: str, scope: Scope) -> None:
    match = re.fullmatch(r"\.reg\s+\.(\w+)\s+(.*)", piece)
    if match is None or match[1] not in REGISTER_TYPES:
        raise EmulatorError(f"PTX declaration {piece!r} is not supported by the emulator")
    for name in re.split(r"\s*,\s*", match[2].strip()):
        counted = re.fullmatch(r"(\S+)<(\d+)>", name)
        names = [f"{counted[1]}{i}" for i in range(int(counted[2]))] if counted else [name]
        for each in names:
            scope.declare(each, REGISTER_TYPES[match[1]])


def _instruction(piece: str) -> Instruction:
    match = re.fullmatch(r"(?:@(!?)(\S+)\s+)?([a-zA-Z][\w.:]*)\s*(.*)", piece)
    if match is None:
        raise EmulatorError(f"PTX {piece!r} cannot be read")
    operands = [part.strip() for part in _split(match[4], ",") if part.strip()]
    guard = f"{match[1]}{match[2]}" if match[2] else ""
    return Instruction(piece, guard, match[3], operands)
