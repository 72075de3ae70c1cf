"""PTX instructions on values: moves, arithmetic, logic, comparison, conversion."""

from __future__ import annotations

import re

from tests.emulator.instructions import INT_TYPES, SIZES, Ctx, handles

_FLOATS = ("f16", "bf16", "f32", "f64")
_PACKED = {"f16x2": "emu::Half", "bf16x2": "emu::BFloat"}
_ROUNDING = ("rn", "ftz", "sat", "approx", "full", "NaN", "relu", "xorsign", "abs")


def _elementwise(c: Ctx, expression: str, arity: int, extra: tuple[str, ...] = ()) -> str:
    """`expression` in a, b, c of the type of the opcode; floats may be packed."""
    kind, names = c.kind, "abc"[:arity]
    if kind in INT_TYPES:
        c.only(kind, *extra)
        values = [c.read(op, kind) for op in c.ops[1 : 1 + arity]]
        declared = " ".join(f"{INT_TYPES[kind]} {n} = {v};" for n, v in zip(names, values, strict=True))
        return f"{declared} {c.write(c.ops[0], kind, expression)}"
    if kind not in _FLOATS and kind not in _PACKED:
        raise c.refuse()
    c.only(kind, *_ROUNDING, *extra)
    result = expression
    if c.has("relu"):
        result = f"std::fmax(0.0, (double)({result}))"
    if c.has("sat"):
        result = f"emu::clamp01<double>({result})"
    if kind in _PACKED:
        params = ", ".join(f"double {n}" for n in names)
        args = ", ".join(f"(uint32_t)({c.bits(op)})" for op in c.ops[1 : 1 + arity])
        return c.write(c.ops[0], kind, f"emu::packed<{_PACKED[kind]}>([]({params}) -> double {{ return {result}; }}, {args})")
    # 16-bit floats compute in double: one rounding, to the result.
    scalar = {"f32": "float", "f64": "double"}.get(kind, "double")
    declared = " ".join(f"{scalar} {n} = {c.read(op, kind)};" for n, op in zip(names, c.ops[1 : 1 + arity], strict=True))
    return f"{declared} {c.write(c.ops[0], kind, result)}"


@handles("add", "sub", "div", "rem", "and", "or", "xor")
def _binary(c: Ctx) -> str:
    symbol = {"add": "+", "sub": "-", "div": "/", "rem": "%", "and": "&", "or": "|", "xor": "^"}[c.parts[0]]
    if c.kind == "pred":
        return c.write(c.ops[0], "pred", f"{c.read(c.ops[1], 'pred')} {symbol} {c.read(c.ops[2], 'pred')}")
    if c.kind == "f32x2":
        return _f32x2(c, f"a {symbol} b")
    return _elementwise(c, f"a {symbol} b", 2)


@handles("mul")
def _mul(c: Ctx) -> str:
    if c.kind == "f32x2":
        return _f32x2(c, "a * b")
    if c.has("hi", "wide"):
        return _wide(c, "a * b")
    return _elementwise(c, "a * b", 2, ("lo",))


@handles("fma", "mad")
def _fma(c: Ctx) -> str:
    if c.kind == "f32x2":
        return _f32x2(c, "std::fma(a, b, c)")
    if c.has("hi", "wide"):
        return _wide(c, "a * b")
    return _elementwise(c, "a * b + c" if c.kind in INT_TYPES else "std::fma(a, b, c)", 3, ("lo",))


def _wide(c: Ctx, expression: str) -> str:
    """mul and mad with .hi or .wide, of 16- and 32-bit integers."""
    kind = c.kind
    c.only(kind, "hi", "wide")
    if SIZES.get(kind, 8) > 4:
        raise c.refuse()
    out = kind[0] + str(SIZES[kind] * 16) if c.has("wide") else kind
    a, b = (c.read(op, kind) for op in c.ops[1:3])
    addend = f" + {c.read(c.ops[3], out)}" if c.parts[0] == "mad" else ""
    shift = f" >> {SIZES[kind] * 8}" if c.has("hi") else ""
    return f"int64_t a = {a}, b = {b}; {c.write(c.ops[0], out, f'(({expression}){shift}){addend}')}"


def _f32x2(c: Ctx, expression: str) -> str:
    c.only("f32x2", "rn", "ftz")
    sources = [f"uint64_t w{i} = {c.bits(op)};" for i, op in enumerate(c.ops[1:])]
    names = "abc"[: len(sources)]
    half = "; ".join(f"float {n} = emu::f32((uint32_t)(w{i} >> s))" for i, n in enumerate(names))
    loop = f"for (int s = 0; s < 64; s += 32) {{ {half}; r |= (uint64_t)emu::bits((float)({expression})) << s; }}"
    return f"{' '.join(sources)} uint64_t r = 0; {loop} {c.write(c.ops[0], 'b64', 'r')}"


@handles("min", "max")
def _extreme(c: Ctx) -> str:
    better = "<" if c.parts[0] == "min" else ">"
    if c.kind in INT_TYPES:
        return _elementwise(c, f"a {better} b ? a : b", 2)
    if c.has("NaN"):
        return _elementwise(c, f"a != a ? a : b != b ? b : a {better} b ? a : b", 2)
    return _elementwise(c, f"std::f{c.parts[0]}(a, b)", 2)


@handles("neg", "abs", "not", "cnot", "sqrt", "rsqrt", "rcp", "ex2", "lg2", "sin", "cos", "tanh")
def _unary(c: Ctx) -> str:
    expression = {
        "neg": "-a",
        "abs": "std::abs(a)",
        "not": "~a",
        "cnot": "a == 0",
        "sqrt": "std::sqrt(a)",
        "rsqrt": "1 / std::sqrt(a)",
        "rcp": "1 / a",
        "ex2": "std::exp2(a)",
        "lg2": "std::log2(a)",
        "sin": "std::sin(a)",
        "cos": "std::cos(a)",
        "tanh": "std::tanh(a)",
    }[c.parts[0]]
    if c.kind == "pred":
        return c.write(c.ops[0], "pred", f"!{c.read(c.ops[1], 'pred')}")
    return _elementwise(c, expression, 1)


@handles("shl", "shr")
def _shift(c: Ctx) -> str:
    kind, bits = c.kind, 8 * SIZES[c.kind]
    c.only(kind)
    a, by = c.read(c.ops[1], kind), c.read(c.ops[2], "u32")
    if c.parts[0] == "shl":
        return c.write(c.ops[0], kind, f"{by} >= {bits} ? 0 : ({a}) << ({by})")
    return c.write(c.ops[0], kind, f"{by} >= {bits} ? {f'(({a}) < 0 ? -1 : 0)' if kind[0] == 's' else '0'} : ({a}) >> ({by})")


@handles("shf")
def _funnel(c: Ctx) -> str:
    c.only("l", "r", "wrap", "clamp", "b32")
    lo, hi, by = (c.read(op, "u32") for op in c.ops[1:4])
    amount = f"(({by}) & 31)" if c.has("wrap") else f"(({by}) > 32 ? 32 : ({by}))"
    wide = f"((uint64_t)({hi}) << 32 | ({lo}))"
    value = f"({wide} << {amount}) >> 32" if c.has("l") else f"{wide} >> {amount}"
    return c.write(c.ops[0], "b32", value)


@handles("prmt")
def _prmt(c: Ctx) -> str:
    c.only("b32")
    return c.write(c.ops[0], "b32", f"emu::prmt({', '.join(c.read(op, 'u32') for op in c.ops[1:4])})")


@handles("lop3")
def _lop3(c: Ctx) -> str:
    c.only("b32")
    return c.write(c.ops[0], "b32", f"emu::lop3({', '.join(c.read(op, 'u32') for op in c.ops[1:5])})")


@handles("bfe", "bfi", "popc", "clz", "brev", "dp4a")
def _bit_fields(c: Ctx) -> str:
    op, o = c.parts[0], c.ops
    if op == "dp4a":
        if c.parts[1:] not in (["s32", "s32"], ["u32", "u32"]):
            raise c.refuse()
        byte = "int8_t" if c.kind == "s32" else "uint8_t"
        a, b, acc = c.read(o[1], "u32"), c.read(o[2], "u32"), c.read(o[3], "u32")
        loop = f"for (int i = 0; i < 32; i += 8) r += (uint32_t)(({byte})({a} >> i) * ({byte})({b} >> i));"
        return f"uint32_t r = {acc}; {loop} {c.write(o[0], 'b32', 'r')}"
    c.only("b32", "u32", "s32")
    if op == "bfe" and c.kind == "u32":
        a, at, n = (c.read(x, "u32") for x in o[1:4])
        return c.write(o[0], "u32", f"({n}) >= 32 ? ({a}) >> ({at}) : (({a}) >> ({at})) & ((1u << ({n})) - 1)")
    if op == "bfi":
        a, b, at, n = (c.read(x, "u32") for x in o[1:5])
        mask = f"((({n}) >= 32 ? ~0u : (1u << ({n})) - 1) << ({at}))"
        return c.write(o[0], "b32", f"(({b}) & ~{mask}) | ((({a}) << ({at})) & {mask})")
    a = c.read(o[1], "u32")
    if op == "popc":
        return c.write(o[0], "u32", f"__builtin_popcount({a})")
    if op == "clz":
        return c.write(o[0], "u32", f"({a}) ? __builtin_clz({a}) : 32")
    raise c.refuse()


@handles("selp")
def _selp(c: Ctx) -> str:
    bits = f"b{8 * SIZES[c.kind]}"
    return c.write(c.ops[0], bits, f"{c.read(c.ops[3], 'pred')} ? {c.read(c.ops[1], bits)} : {c.read(c.ops[2], bits)}")


@handles("setp")
def _setp(c: Ctx) -> str:
    relation, kind = c.parts[1], c.kind
    symbols = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "lo": "<", "ls": "<=", "hi": ">", "hs": ">="}
    if relation not in symbols or len(c.parts) != 3:
        raise c.refuse()
    a, b = c.read(c.ops[1], kind), c.read(c.ops[2], kind)
    both = c.ops[0].split("|")
    first = f"bool t = ({a}) {symbols[relation]} ({b}); {c.write(both[0], 'pred', 't')}"
    return first + (f" {c.write(both[1], 'pred', '!t')}" if len(both) > 1 else "")


@handles("mov")
def _mov(c: Ctx) -> str:
    kind = c.kind
    c.only(kind)
    if kind == "pred":
        return c.write(c.ops[0], "pred", c.read(c.ops[1], "pred"))
    bits = f"b{8 * SIZES[kind]}"
    into, source = c.vector(c.ops[0]), c.vector(c.ops[1])
    if len(into) > 1:  # unpack
        width = 8 * SIZES[kind] // len(into)
        value = c.read(source[0], bits)
        return f"auto w = {value}; " + " ".join(c.write(r, f"b{width}", f"w >> {width * i}") for i, r in enumerate(into))
    if len(source) > 1:  # pack
        width = 8 * SIZES[kind] // len(source)
        parts = (f"(uint64_t){c.read(r, f'b{width}')} << {width * i}" for i, r in enumerate(source))
        return c.write(into[0], bits, " | ".join(parts))
    return c.write(into[0], bits, c.bits(source[0]))


@handles("cvta")
def _cvta(c: Ctx) -> str:
    kind = c.kind
    c.only("to", "shared", "shared::cta", "global", "const", "local", kind)
    if not c.has("shared", "shared::cta"):
        return c.write(c.ops[0], kind, c.bits(c.ops[1]))
    if c.has("to"):
        return c.write(c.ops[0], kind, f"emu::to_shared((void*)({c.bits(c.ops[1])}))")
    return c.write(c.ops[0], kind, f"(uint64_t)emu::from_shared((uint32_t)({c.bits(c.ops[1])}))")


@handles("cvt")
def _cvt(c: Ctx) -> str:
    if c.parts[1] == "pack":
        c.only("pack", "sat", "s8", "s32", "b32")
        high, low = (f"(uint8_t)emu::to_int<int8_t>((double){c.read(op, 's32')})" for op in c.ops[1:3])
        return c.write(c.ops[0], "b32", f"(uint32_t)({c.bits(c.ops[3])}) << 16 | {high} << 8 | {low}")
    if c.parts[-2:] == ["tf32", "f32"]:
        c.only("tf32", "f32", "rna")
        if not c.has("rna"):
            raise c.refuse()
        return c.write(c.ops[0], "b32", f"emu::rna_tf32({c.read(c.ops[1], 'b32')})")
    to, source = c.parts[-2], c.parts[-1]
    if re.fullmatch(r"(b?f16|e4m3|e5m2)x2", to) or source.endswith("x2"):
        return _cvt_packed(c, to, source)
    modes = {"rni": "std::nearbyint", "rzi": "std::trunc", "rmi": "std::floor", "rpi": "std::ceil"}
    c.only(to, source, "rn", "sat", "ftz", "relu", *modes)
    value = c.read(c.ops[1], source)
    if c.has("relu"):
        value = f"std::fmax(0.0f, {value})"
    if source in _FLOATS and to in INT_TYPES:
        mode = next((f for m, f in modes.items() if c.has(m)), None)
        if mode is None:
            raise c.refuse("needs a rounding such as .rni")
        return c.write(c.ops[0], to, f"emu::to_int<{INT_TYPES[to]}>({mode}({value}))")
    if to in _FLOATS:
        for mode, function in modes.items():
            value = f"{function}({value})" if c.has(mode) else value
        value = f"emu::clamp01({value})" if c.has("sat") else value
        return c.write(c.ops[0], to, value)
    if c.has("sat"):
        wide = f"(double)({value})" if source != "u64" else value
        return c.write(c.ops[0], to, f"emu::to_int<{INT_TYPES[to]}>({wide})")
    return c.write(c.ops[0], to, value)


def _cvt_packed(c: Ctx, to: str, source: str) -> str:
    """Two floats into one register (the first operand is the high one), or a pair of 8-bit floats widened."""
    c.only(to, source, "rn", "relu", "satfinite")
    if to in _PACKED and source == "f32":
        hi, lo = (c.read(op, "f32") for op in c.ops[1:3])
        if c.has("relu"):
            hi, lo = (f"std::fmax(0.0f, {v})" for v in (hi, lo))
        pack = f"{_PACKED[to]}::to"
        return c.write(c.ops[0], "b32", f"(uint32_t){pack}({hi}) << 16 | {pack}({lo})")
    if to in ("e4m3x2", "e5m2x2") and source == "f32" and c.has("satfinite"):
        hi, lo = (c.read(op, "f32") for op in c.ops[1:3])
        pack = f"emu::to_{to[:4]}"
        return c.write(c.ops[0], "b16", f"(uint16_t)({pack}({hi}) << 8 | {pack}({lo}))")
    if to == "f16x2" and source in ("e4m3x2", "e5m2x2"):
        v, wide = c.read(c.ops[1], "b16"), f"emu::from_{source[:4]}"
        return c.write(c.ops[0], "b32", f"(uint32_t)emu::Half::to({wide}({v} >> 8)) << 16 | emu::Half::to({wide}({v} & 255))")
    raise c.refuse()
