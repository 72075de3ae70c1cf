"""PTX instructions of Hopper's warpgroup products: wgmma with K-major operands, 16-bit ones in shared memory also MN-major."""

from __future__ import annotations

import re

from tests.emulator.instructions import Ctx, handles

_DEPTHS = {"tf32": 8, "f16": 16, "bf16": 16, "s8": 32, "u8": 32, "e4m3": 32, "e5m2": 32}


@handles("wgmma")
def _wgmma(c: Ctx) -> str:
    verb = c.parts[1]
    if verb == "fence":
        c.only("fence", "sync", "aligned")
        return ";"
    if verb == "commit_group":
        c.only("commit_group", "sync", "aligned")
        return "emu::wgmma_commit();"
    if verb == "wait_group":
        c.only("wait_group", "sync", "aligned")
        return f"emu::wgmma_wait((unsigned)({c.bits(c.ops[0])}));"
    match = re.fullmatch(r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k(\d+)\.(f32|f16|s32)\.(\w+)\.(\w+)", c.instruction.opcode)
    if match is None:
        raise c.refuse()
    n, k, (acc, a, b) = int(match[1]), int(match[2]), match.group(3, 4, 5)
    integers, small = {"s8", "u8"}, {"e4m3", "e5m2"}
    fits = a == b or {a, b} <= integers or {a, b} <= small
    accumulates = (acc == "s32") == (a in integers) and not (acc == "f16" and a in ("tf32", "bf16"))
    if not fits or not accumulates or _DEPTHS.get(a) != k or n % 8 or not 8 <= n <= 256:
        raise c.refuse()
    return _product(c, n, k, (a, b, acc))


def _product(c: Ctx, n: int, k: int, types: tuple[str, str, str]) -> str:
    into, source = c.vector(c.ops[0]), c.vector(c.ops[1])
    in_shared = not c.ops[1].startswith("{")
    rest = c.ops[3:]
    signs = 0 if types[2] == "s32" else 2
    transposes = rest[1 + signs :]
    if len(into) != n // (4 if types[2] == "f16" else 2) or len(source) != (1 if in_shared else 4) or len(rest) < 1 + signs:
        raise c.refuse("has a wrong number of operands")
    turned = [text != "0" for text in transposes]
    if any(turned) and (_DEPTHS[types[0]] != 16 or any(text not in ("0", "1") for text in transposes)):
        raise c.refuse("has an operand that is not K-major and not of 16 bits")
    a_turned, b_turned = turned if len(turned) == 2 else (False, bool(turned and turned[0]))
    load = [f"x.d[{i}] = (uint32_t)({c.bits(r)});" for i, r in enumerate(into)]
    load += [f"x.a[{i}] = {c.bits(r)};" for i, r in enumerate(source)]
    a_sign, b_sign = (c.read(text, "s32") for text in rest[1:3]) if signs else ("1", "1")
    load.append(f"x.b = {c.bits(c.ops[2])}; x.add = {c.bits(rest[0])}; x.a_shared = {str(in_shared).lower()};")
    load.append(f"x.sign_a = {a_sign}; x.sign_b = {b_sign};")
    load.append(f"x.a_turned = {str(a_turned).lower()}; x.b_turned = {str(b_turned).lower()};")
    store = " ".join(c.write(r, "b32", f"x.d[{i}]") for i, r in enumerate(into))
    kinds = ", ".join(f"emu::Type::{t}" for t in types)
    return f"emu::Wgmma x; {' '.join(load)} emu::wgmma(x, {kinds}, {n}, {k}, {c.what}); {store}"
