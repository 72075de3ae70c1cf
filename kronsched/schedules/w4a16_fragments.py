"""Register-level pieces of the W4A16 kernels: 4-bit words into mma operands, scales into float32.

A word holds eight nibbles, two for each of the four registers of an A operand of `mma.m16n8k16`. `lop3` puts a nibble pair into
the low mantissa bits of two halves with exponent 2^10 (float16: 1024 + q) or 2^7 (bfloat16: 128 + q); one subtraction or
multiply-add leaves q - zero, exactly. In float16 the odd registers take their nibbles four bits further up: 1024 + 16 q, hence
the factor 1/16.

Each factory returns a `T.inline` for one dtype.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator,misc"

from typing import Any

from tvm.script import tirx as T

FP16_TO_FLOAT = r"""
__forceinline__ __device__ float w4_half_to_float(unsigned int word, int high) {
  return __half2float(__ushort_as_half((unsigned short)(high ? (word >> 16) : (word & 0xffffu))));
}
"""
MMA = {
    "float16": "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32",
    "bfloat16": "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32",
}
ONES = {"float16": 0x3C003C00, "bfloat16": 0x3F803F80}


RAW_ZERO = {"float16": 8.0, "bfloat16": -128.0}
"""The zero of a `raw` dequantiser, whose values are q - zero: 128 + q as they come in bfloat16, q - 8 in float16."""


def dequantiser(dtype: str, asymmetric: bool, raw: bool = False) -> Any:
    """An inline (a, at, word, shifted, offsets, o): the A registers a[at … at + 3] of the nibbles of `word`.

    offsets[o], offsets[o + 1]: what `zero_offsets` made, used when `asymmetric`; else the zero is 8.  shifted: scratch.
    raw: with the zero `RAW_ZERO` instead, which spares bfloat16 the subtraction.
    """
    if dtype == "float16":

        @T.inline
        def dequantise(a, at, word, shifted, offsets, o):
            shifted[0] = word >> T.uint32(8)
            T.ptx.lop3.b32(a[at], word, T.uint32(0x000F000F), T.uint32(0x64006400), 0xEA)
            T.ptx.lop3.b32(a[at + 1], word, T.uint32(0x00F000F0), T.uint32(0x64006400), 0xEA)
            T.ptx.lop3.b32(a[at + 2], shifted[0], T.uint32(0x000F000F), T.uint32(0x64006400), 0xEA)
            T.ptx.lop3.b32(a[at + 3], shifted[0], T.uint32(0x00F000F0), T.uint32(0x64006400), 0xEA)
            for e in T.unroll(2):
                if asymmetric:
                    T.ptx["sub.f16x2"](a[at + 2 * e], a[at + 2 * e], offsets[o])
                    T.ptx["fma.rn.f16x2"](a[at + 2 * e + 1], a[at + 2 * e + 1], T.uint32(0x2C002C00), offsets[o + 1])
                else:
                    T.ptx["sub.f16x2"](a[at + 2 * e], a[at + 2 * e], T.uint32(0x64086408))
                    T.ptx["fma.rn.f16x2"](a[at + 2 * e + 1], a[at + 2 * e + 1], T.uint32(0x2C002C00), T.uint32(0xD480D480))

    else:

        @T.inline
        def dequantise(a, at, word, shifted, offsets, o):
            for r in T.unroll(4):
                shifted[0] = word >> T.Cast("uint32", 4 * r)
                T.ptx.lop3.b32(a[at + r], shifted[0], T.uint32(0x000F000F), T.uint32(0x43004300), 0xEA)
                if asymmetric:
                    T.ptx["fma.rn.bf16x2"](a[at + r], a[at + r], T.uint32(0x3F803F80), offsets[o + r % 2])
                elif not raw:
                    T.ptx["fma.rn.bf16x2"](a[at + r], a[at + r], T.uint32(0x3F803F80), T.uint32(0xC308C308))

    return dequantise


def zero_offsets(dtype: str) -> Any:
    """An inline (offsets, o, word): the constants of two columns from their zeros, which are the halves of `word`.

    float16: 1024 + z of the low half, -(64 + z) of the high half; bfloat16: -(128 + z) of both. Each one twice: packed halves.
    """
    if dtype == "float16":

        @T.inline
        def offsets_of(offsets, o, word):
            T.ptx.prmt.b32(offsets[o], word, word, T.uint32(0x1010))
            T.ptx.prmt.b32(offsets[o + 1], word, word, T.uint32(0x3232))
            T.ptx["fma.rn.f16x2"](offsets[o], offsets[o], T.uint32(0x3C003C00), T.uint32(0x64006400))
            T.ptx["fma.rn.f16x2"](offsets[o + 1], offsets[o + 1], T.uint32(0xBC00BC00), T.uint32(0xD400D400))

    else:

        @T.inline
        def offsets_of(offsets, o, word):
            T.ptx.prmt.b32(offsets[o], word, word, T.uint32(0x1010))
            T.ptx.prmt.b32(offsets[o + 1], word, word, T.uint32(0x3232))
            T.ptx["fma.rn.bf16x2"](offsets[o], offsets[o], T.uint32(0xBF80BF80), T.uint32(0xC300C300))
            T.ptx["fma.rn.bf16x2"](offsets[o + 1], offsets[o + 1], T.uint32(0xBF80BF80), T.uint32(0xC300C300))

    return offsets_of


def half_to_float(dtype: str) -> Any:
    """A function (word, high): the low (0) or high (1) half of a word as a float32 expression; `high` may be an expression."""
    if dtype == "float16":
        return lambda word, high: T.cuda.func_call(
            "w4_half_to_float", word, high, source_code=FP16_TO_FLOAT, return_type="float32"
        )
    return lambda word, high: T.reinterpret("float32", T.Select(high == 1, word & T.uint32(0xFFFF0000), word << T.uint32(16)))
