"""PTX instructions that threads execute together: barriers, mma, ldmatrix, shuffles, votes; and branches within a statement."""

from __future__ import annotations

import re

from tests.emulator.instructions import SIZES, Ctx, handles

_MMA_ELEMENTS = {"f16": 2, "bf16": 2, "tf32": 1, "s4": 8, "u4": 8, "s8": 4, "u8": 4, "e4m3": 4, "e5m2": 4, "f64": 1}
_MMA_DEPTHS = {"f16": (8, 16), "bf16": (8, 16), "tf32": (4, 8), "f64": (4, 8, 16), "s4": (32, 64), "u4": (32, 64)}


@handles("bar", "barrier")
def _barrier(c: Ctx) -> str:
    if c.has("cluster"):
        c.only("cluster", "arrive", "wait", "aligned", "release", "acquire", "relaxed")
        return "emu::cluster_arrive();" if c.has("arrive") else f"emu::cluster_wait({c.what});"
    c.only("sync", "arrive", "warp", "cta", "aligned")
    count = c.bits(c.ops[1]) if len(c.ops) > 1 else "0"
    if c.has("warp"):
        return f"emu::sync_warp((uint32_t)({c.bits(c.ops[0])}), {c.what});"
    wait = "true" if c.has("sync") else "false"
    return f"emu::barrier((unsigned)({c.bits(c.ops[0])}), (unsigned)({count}), {wait}, {c.what});"


@handles("bra")
def _bra(c: Ctx) -> str:
    c.only("uni")
    return f"goto {c.scope.label(c.ops[0])};"


@handles("trap")
def _trap(c: Ctx) -> str:
    return 'emu::fail("trap");'


@handles("mma")
def _mma(c: Ctx) -> str:
    match = re.fullmatch(
        r"mma\.sync\.aligned\.m(16|8)n8k(\d+)\.row\.col(\.satfinite)?(?:\.kind::f8f6f4)?\.(\w+)\.(\w+)\.(\w+)\.(\w+)",
        c.instruction.opcode,
    )
    if match is None:
        raise c.refuse()
    rows, depth, (d, a, b, acc) = int(match[1]), int(match[2]), match.group(4, 5, 6, 7)
    fits = a == b or {a, b} <= {"s8", "u8"} or {a, b} <= {"s4", "u4"} or {a, b} <= {"e4m3", "e5m2"}
    allowed = {
        "f16": ("f16", "f32"),
        "s8": ("s32",),
        "u8": ("s32",),
        "s4": ("s32",),
        "u4": ("s32",),
        "f64": ("f64",),
        "e4m3": ("f16", "f32"),
        "e5m2": ("f16", "f32"),
    }
    ok = fits and d == acc and a in _MMA_ELEMENTS and d in allowed.get(a, ("f32",)) and depth in _MMA_DEPTHS.get(a, (16, 32))
    if not ok or (rows == 8 and (a, depth) != ("f64", 4)):
        raise c.refuse()
    regs_b = depth // (4 * _MMA_ELEMENTS[a])
    regs_c = rows // 8 * 2 if d != "f16" else rows // 8
    groups = [c.vector(op) for op in c.ops]
    if [len(g) for g in groups] != [regs_c, regs_b * rows // 8, regs_b, regs_c]:
        raise c.refuse("has a wrong number of registers")
    load = [f"x.{n}[{i}] = {c.bits(r)};" for n, group in zip("abc", groups[1:], strict=True) for i, r in enumerate(group)]
    bits = "b64" if d == "f64" else "b32"
    store = [c.write(r, bits, f"x.d[{i}]") for i, r in enumerate(groups[0])]
    saturate = "true" if match[3] else "false"
    types = ", ".join(f"emu::Type::{t}" for t in (a, b, d))
    return f"emu::Mma x; {' '.join(load)} emu::mma(x, {types}, {depth}, {saturate}, {c.what}); {' '.join(store)}"


@handles("ldmatrix", "stmatrix")
def _matrix(c: Ctx) -> str:
    load = c.parts[0] == "ldmatrix"
    length = next((int(p[1]) for p in c.parts if p in ("x1", "x2", "x4")), None)
    if length is None or not c.has("m8n8") or not c.has("shared", "shared::cta"):
        raise c.refuse()
    c.only("sync", "aligned", "m8n8", f"x{length}", "trans", "shared", "shared::cta", "b16")
    registers, address = (c.ops[0], c.ops[1]) if load else (c.ops[1], c.ops[0])
    regs = c.vector(registers)
    if len(regs) != length:
        raise c.refuse("has a wrong number of registers")
    trans = "true" if c.has("trans") else "false"
    if load:
        store = " ".join(c.write(r, "b32", f"r[{i}]") for i, r in enumerate(regs))
        return f"uint32_t r[4]; emu::ldmatrix((uint32_t){c.address(address)}, {length}, {trans}, r, {c.what}); {store}"
    values = ", ".join(f"(uint32_t)({c.bits(r)})" for r in regs)
    return f"uint32_t r[] = {{{values}}}; emu::stmatrix((uint32_t){c.address(address)}, {length}, {trans}, r, {c.what});"


@handles("movmatrix")
def _movmatrix(c: Ctx) -> str:
    if c.instruction.opcode != "movmatrix.sync.aligned.m8n8.trans.b16":
        raise c.refuse()
    return c.write(c.ops[0], "b32", f"emu::movmatrix({c.read(c.ops[1], 'b32')})")


@handles("shfl")
def _shfl(c: Ctx) -> str:
    if len(c.parts) != 4 or c.parts[1] != "sync" or c.parts[2] not in ("idx", "up", "down", "bfly") or c.kind != "b32":
        raise c.refuse()
    into = c.ops[0].split("|")
    v, b, clamp, mask = (c.read(op, "u32") for op in c.ops[1:5])
    call = f"bool valid; uint32_t r = emu::shuffle({mask}, emu::Shuffle::{c.parts[2]}, {v}, {b}, {clamp}, &valid, {c.what});"
    keep = c.write(into[0], "b32", "r") + (f" {c.write(into[1], 'pred', 'valid')}" if len(into) > 1 else "")
    return f"{call} {keep}"


@handles("vote")
def _vote(c: Ctx) -> str:
    c.only("sync", "ballot", "any", "all", "uni", c.kind)
    p, mask = c.read(c.ops[1], "pred"), c.read(c.ops[2], "u32")
    if c.has("ballot"):
        return c.write(c.ops[0], "b32", f"emu::ballot({mask}, {p}, {c.what})")
    negated = f"emu::ballot({mask}, !({p}), {c.what}) == 0"
    if c.has("all"):
        return c.write(c.ops[0], "pred", negated)
    if c.has("any"):
        return c.write(c.ops[0], "pred", f"emu::ballot({mask}, {p}, {c.what}) != 0")
    raise c.refuse()


@handles("activemask")
def _activemask(c: Ctx) -> str:
    return c.write(c.ops[0], "b32", "emu::live_lanes()")


@handles("elect")
def _elect(c: Ctx) -> str:
    into = c.ops[0].split("|")
    call = f"bool leader; uint32_t first = emu::elect({c.read(c.ops[1], 'u32')}, &leader, {c.what});"
    return f"{call} {c.write(into[0], 'b32', 'first')} {c.write(into[1], 'pred', 'leader')}"


@handles("redux")
def _redux(c: Ctx) -> str:
    c.only("sync", "add", "min", "max", "and", "or", "xor", "u32", "s32", "b32")
    op = c.parts[2]
    name = {"and": "iand", "or": "ior", "xor": "ixor"}.get(op, op)
    if op in ("min", "max") and c.kind == "u32":
        name = "u" + op
    if SIZES[c.kind] != 4:
        raise c.refuse()
    return c.write(
        c.ops[0], "b32", f"emu::redux({c.read(c.ops[2], 'u32')}, emu::Reduce::{name}, {c.read(c.ops[1], 'u32')}, {c.what})"
    )
