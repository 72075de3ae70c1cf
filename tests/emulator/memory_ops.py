"""PTX instructions on memory: loads, stores, atomics, cp.async, bulk copies, mbarriers, and hints without effect here."""

from __future__ import annotations

import re

from tests.emulator.instructions import INT_TYPES, SIZES, Ctx, handles

_SPACES = {
    "shared": "shared",
    "shared::cta": "shared",
    "shared::cluster": "shared",
    "global": "global",
    "const": "constant",
}
_ORDERING = ("weak", "volatile", "relaxed", "acquire", "release", "acq_rel", "cta", "cluster", "gpu", "sys", "nc")
_CACHE = ("ca", "cg", "cs", "cv", "lu", "wb", "wt")


def _space(c: Ctx) -> str:
    return next((_SPACES[p] for p in c.parts if p in _SPACES), "generic")


def _hint(part: str) -> bool:
    return part.startswith(("L1::", "L2::"))


def _access(c: Ctx) -> tuple[str, int, str]:
    """(space, vector length, type) of ld and st, everything else in the opcode checked."""
    length = 1
    for part in c.parts[1:-1]:
        if match := re.fullmatch(r"v([248])", part):
            length = int(match[1])
        elif part not in _SPACES and part not in _ORDERING and part not in _CACHE and not _hint(part):
            raise c.refuse(f"is not known to the emulator (.{part})")
    if c.kind not in SIZES:
        raise c.refuse(f"is not known to the emulator (.{c.kind})")
    return _space(c), length, c.kind


def _element(kind: str) -> str:
    """The integer type of a memory element; signed kinds extend their sign."""
    return INT_TYPES.get(kind, f"uint{8 * SIZES[kind]}_t")


@handles("ld", "ldu")
def _ld(c: Ctx) -> str:
    space, length, kind = _access(c)
    registers = c.vector(c.ops[0])
    if len(registers) != length:
        raise c.refuse("has another number of registers than its vector length")
    kind = kind if kind in INT_TYPES else f"b{8 * SIZES[kind]}"
    p = f"auto* p = (const {_element(kind)}*)emu::{space}({c.address(c.ops[1])}, {length * SIZES[kind]}, {c.what});"
    return p + " " + " ".join(c.write(r, kind, f"p[{i}]") for i, r in enumerate(registers))


@handles("st")
def _st(c: Ctx) -> str:
    space, length, kind = _access(c)
    registers = c.vector(c.ops[1])
    if len(registers) != length:
        raise c.refuse("has another number of registers than its vector length")
    element = f"uint{8 * SIZES[kind]}_t"
    p = f"auto* p = ({element}*)emu::{space}({c.address(c.ops[0])}, {length * SIZES[kind]}, {c.what});"
    return p + " " + " ".join(f"p[{i}] = ({element})({c.bits(r)});" for i, r in enumerate(registers))


@handles("atom", "red")
def _atom(c: Ctx) -> str:
    updates = {
        "add": "a + b",
        "min": "a < b ? a : b",
        "max": "a > b ? a : b",
        "exch": "b",
        "and": "a & b",
        "or": "a | b",
        "xor": "a ^ b",
    }
    op = next((p for p in c.parts if p in updates or p == "cas"), None)
    if op is None:
        raise c.refuse()
    c.only(op, *_SPACES, *_ORDERING, "noftz", c.kind)
    kind, operands = c.kind, c.ops if c.parts[0] == "atom" else ["_", *c.ops]
    size = SIZES.get(kind) or 0
    if not size:
        raise c.refuse()
    p = f"auto* p = (uint{8 * size}_t*)emu::{_space(c)}({c.address(operands[1])}, {size}, {c.what}); auto old = *p;"
    keep = c.write(operands[0], f"b{8 * size}", "old")
    if op == "cas":
        new = f"if (old == {c.read(operands[2], f'b{8 * size}')}) *p = {c.read(operands[3], f'b{8 * size}')};"
        return f"{p} {new} {keep}"
    if kind in INT_TYPES:
        t = INT_TYPES[kind]
        return f"{p} {t} a = ({t})old, b = {c.read(operands[2], kind)}; *p = (uint{8 * size}_t)({updates[op]}); {keep}"
    if kind in ("f16x2", "bf16x2") and op == "add":
        half = "emu::Half" if kind == "f16x2" else "emu::BFloat"
        value = f"emu::packed<{half}>([](double a, double b) {{ return a + b; }}, old, {c.read(operands[2], kind)})"
        return f"{p} *p = {value}; {keep}"
    if kind in ("f32", "f64") and op in ("add", "exch"):
        t = "float" if kind == "f32" else "double"
        return f"{p} {t} a = emu::{kind}(old), b = {c.read(operands[2], kind)}; *p = emu::bits(({t})({updates[op]})); {keep}"
    raise c.refuse()


@handles("prefetch", "prefetchu", "applypriority", "discard")
def _no_effect(c: Ctx) -> str:
    return ";"


@handles("createpolicy")
def _policy(c: Ctx) -> str:
    return c.write(c.ops[0], "b64", "0")


@handles("fence", "membar", "griddepcontrol", "setmaxnreg")
def _ordering(c: Ctx) -> str:
    return ";"  # fibers run on one thread; register counts and launch dependence do not exist here


@handles("nanosleep")
def _sleep(c: Ctx) -> str:
    return f"emu::poll({c.what});"


# -- asynchronous copies ------------------------------------------------------------------------------


@handles("cp")
def _cp(c: Ctx) -> str:
    if c.parts[1] != "async":
        raise c.refuse()
    if c.parts[2] == "bulk":
        return _bulk(c)
    if c.parts[2] == "commit_group":
        return "emu::cp_async_commit();"
    if c.parts[2] == "wait_group":
        return f"emu::cp_async_wait((unsigned)({c.bits(c.ops[0])}));"
    if c.parts[2] == "wait_all":
        return "emu::cp_async_wait_all();"
    if c.parts[2] == "mbarrier":
        c.only("async", "mbarrier", "arrive", "noinc", "shared", "shared::cta", "b64")
        counted = "false" if c.has("noinc") else "true"
        return f"emu::cp_async_mbarrier({c.address(c.ops[0])}, {counted}, {c.what});"
    if c.parts[2] not in ("ca", "cg") or not c.has("shared", "shared::cta") or not c.has("global"):
        raise c.refuse()
    c.only("async", "ca", "cg", "shared", "shared::cta", "global", *(p for p in c.parts if _hint(p)))
    if c.has("L2::cache_hint"):
        c.ops.pop()
    size = c.bits(c.ops[2])
    source = size
    if len(c.ops) > 3:  # source size, or a predicate that ignores the source
        text = c.ops[3]
        predicate = text.startswith("!") or (text in c.scope.locals and c.scope.locals[text][1] == "bool")
        source = f"({c.bits(text)} ? 0 : {size})" if predicate else c.bits(text)
    check = 'if (n != 16) emu::fail("cp.async.cg copies 16 bytes only"); ' if c.has("cg") else ""
    args = f"{c.address(c.ops[0])}, {c.address(c.ops[1])}, n, (unsigned)({source}), {c.what}"
    return f"unsigned n = (unsigned)({size}); {check}emu::cp_async({args});"


def _bulk(c: Ctx) -> str:
    if c.has("commit_group"):
        return "emu::bulk_commit();"
    if c.has("wait_group"):
        return f"emu::bulk_wait((unsigned)({c.bits(c.ops[0])}));"
    if c.has("prefetch"):
        return ";"
    if c.has("tensor"):
        return _tensor(c)
    spaces = [p for p in c.parts if p in ("global", "shared::cta", "shared::cluster", "shared")]
    addresses = f"{c.address(c.ops[0])}, {c.address(c.ops[1])}, (uint64_t)({c.bits(c.ops[2])})" if len(c.ops) > 2 else ""
    rest = [p for p in c.parts[3:] if p not in spaces]
    if len(spaces) == 2 and spaces[1] == "global" and rest == ["mbarrier::complete_tx::bytes"] and len(c.ops) == 4:
        return f"emu::bulk_load({addresses}, {c.address(c.ops[3])}, {c.what});"
    if spaces == ["shared::cluster", "shared::cta"] and rest == ["mbarrier::complete_tx::bytes"] and len(c.ops) == 4:
        return f"emu::bulk_send({addresses}, {c.address(c.ops[3])}, {c.what});"
    if len(spaces) == 2 and spaces[0] == "global" and rest == ["bulk_group"] and len(c.ops) == 3:
        return f"emu::bulk_store({addresses}, {c.what});"
    raise c.refuse()


def _tensor(c: Ctx) -> str:
    """cp.async.bulk.tensor.Nd: operands are [dst], [map, {coordinates}], [mbarrier], or [map, {coordinates}], [src].

    In im2col mode, {offset along w, offset along h} of the kernel's tap follow.
    """
    opcode = c.instruction.opcode.removeprefix("cp.async.bulk.tensor.")
    if opcode.endswith(".L2::cache_hint"):
        opcode = opcode.removesuffix(".L2::cache_hint")
        c.ops.pop()
    ends = r"\.mbarrier::complete_tx::bytes(\.multicast::cluster)?"
    im2col = re.fullmatch(r"(4)d\.shared::(?:cluster|cta)\.global\.im2col" + ends, opcode)
    load = im2col or re.fullmatch(r"([1-5])d\.shared::(?:cluster|cta)\.global(?:\.tile)?" + ends, opcode)
    store = re.fullmatch(r"([1-5])d\.global\.shared::cta(?:\.tile)?\.bulk_group", opcode)
    match = load or store
    at = re.fullmatch(r"\[\s*(\S+?)\s*,\s*\{(.*)\}\s*\]", c.ops[1 if load else 0]) if match else None
    if match is None or at is None or len(c.ops) != (2 if store else 3 + bool(match[2]) + bool(im2col)):
        raise c.refuse()
    indices = [c.read(text.strip(), "s32") for text in at[2].split(",")]
    if len(indices) != int(match[1]):
        raise c.refuse("has another number of coordinates than dimensions")
    where = f"(uint64_t)({c.bits(at[1])}), at, {len(indices)}"
    if im2col:
        indices += [c.read(text.strip(), "u16") for text in c.ops.pop(3).strip("{} ").split(",")]
    head = f"int at[] = {{{', '.join(indices)}}};"
    if load:
        blocks = c.bits(c.ops[3]) if load[2] else "0"
        return f"{head} emu::tensor_load({c.address(c.ops[0])}, {where}, {c.address(c.ops[2])}, {blocks}, {c.what});"
    return f"{head} emu::tensor_store({where}, {c.address(c.ops[1])}, {c.what});"


@handles("mapa")
def _mapa(c: Ctx) -> str:
    c.only("shared::cluster", "u32")
    return c.write(c.ops[0], "u32", f"emu::map_shared((uint32_t)({c.bits(c.ops[1])}), (unsigned)({c.bits(c.ops[2])}))")


@handles("mbarrier")
def _mbarrier(c: Ctx) -> str:
    verb = c.parts[1]
    c.only(verb, "expect_tx", "complete_tx", "noComplete", "parity", *_SPACES, *_ORDERING, "b64")
    if c.has("global"):
        raise c.refuse()
    if verb == "init":
        return f"emu::mbar_init({c.address(c.ops[0])}, (uint32_t)({c.bits(c.ops[1])}));"
    if verb == "inval":
        return ";"
    if verb == "expect_tx":
        return f"emu::mbar_expect({c.address(c.ops[0])}, (uint32_t)({c.bits(c.ops[1])}));"
    if verb == "complete_tx":
        return f"emu::mbar_complete({c.address(c.ops[0])}, (uint32_t)({c.bits(c.ops[1])}));"
    if verb == "arrive":
        operands = c.ops if not c.ops[0].startswith("[") else ["_", *c.ops]
        at, count, expect = c.address(operands[1]), "1", ""
        if c.has("expect_tx"):
            expect = f"emu::mbar_expect({at}, (uint32_t)({c.bits(operands[2])})); "
        elif len(operands) > 2:
            count = f"(uint32_t)({c.bits(operands[2])})"
        return expect + c.write(operands[0], "b64", f"emu::mbar_arrive({at}, {count}, {c.what})")
    if verb in ("try_wait", "test_wait"):
        parity, block = (str(c.has("parity")).lower(), str(verb == "try_wait").lower())
        value = f"emu::mbar_test({c.address(c.ops[1])}, {c.bits(c.ops[2])}, {parity}, {block}, {c.what})"
        return c.write(c.ops[0], "pred", value)
    raise c.refuse()
