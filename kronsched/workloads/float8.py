"""Float8 values in TVM programs, by their bits.

TVM 0.27 widens float8 by arithmetic on the bits that knows neither zero nor subnormal numbers nor NaN (0 becomes 2⁻⁷ or 2⁻¹⁵),
on CPUs and on GPUs before sm_89: programs here reinterpret the bytes and use `widened` instead.
"""

from __future__ import annotations

from typing import Any

FLOAT8 = ("float8_e4m3fn", "float8_e5m2")


def widened(bits: Any, dtype: str) -> Any:
    """The float16 value, which is exact, of a float8 number given as a uint8 expression.

    Every float8_e5m2 number is the upper half of a float16. The fields of a float8_e4m3fn number, put into a float16, give 2⁻⁸ of
    its value; NaN, which looks like 480 there, is put right.
    """
    from tvm import tirx

    def word(n: int) -> Any:
        return tirx.const(n, "uint16")

    wide = bits.astype("uint16")
    if dtype == "float8_e5m2":
        return tirx.reinterpret("float16", wide << word(8))
    magnitude = wide & word(0x7F)
    scaled = tirx.reinterpret("float16", (wide & word(0x80)) << word(8) | magnitude << word(7)) * tirx.const(256.0, "float16")
    return tirx.Select(magnitude == word(0x7F), tirx.reinterpret("float16", word(0x7E00)), scaled)
