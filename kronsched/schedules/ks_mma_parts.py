"""Expressions and instruction names that the tensor-core Kronecker-sparse kernels share."""

from __future__ import annotations

from typing import Any

from tvm.script import tirx as T

MMA = {
    "float16": "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32",
    "bfloat16": "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32",
    "float32": "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32",
}
WGMMA = "wgmma.mma_async.sync.aligned.m64n{n}k{k}.f32.{kind}.{kind}"
KIND = {"float16": "f16", "bfloat16": "bf16", "float32": "tf32"}
PACK = {"float16": "cvt.rn.f16x2.f32", "bfloat16": "cvt.rn.bf16x2.f32"}
"""Two float32 to a word: the first operand goes to the high half."""
VECTOR = {4: "", 8: ".v2", 16: ".v4"}
"""Suffix of a load or store of so many bytes as 32-bit words."""


def inside(*tests: tuple[bool, Any]) -> Any:
    """The tests that are needed, all together."""
    found = None
    for needed, test in tests:
        if needed:
            found = test if found is None else T.And(found, test)
    return T.bool(True) if found is None else found


def high_part(word: Any) -> Any:
    """The TF32 value nearest to a float32, both as words (halves round away from zero)."""
    return T.bitwise_and(word + T.uint32(0x1000), T.uint32(0xFFFFE000))


def low_part(word: Any, high: Any) -> Any:
    """What `high_part` leaves of a float32, as words; the tensor core cuts it to TF32."""
    return T.reinterpret("uint32", T.reinterpret("float32", word) - T.reinterpret("float32", high))


def zero(block: Any, number: Any) -> Any:
    """0.0 as float32 for every number of a block; neither TVM nor ptxas knows that it is 0, or the same for another number.

    To begin sums with, to which products of wgmma are added that take turns in the same registers. ptxas (of NVRTC 13.0.88 and
    13.5.37) takes two additions of the same registers to the same value for one, though a product came between them: both sums
    get the later one. Most often it then leaves out the earlier product, which `nvrtc.lost_products` finds.
    """
    return T.Cast("float32", T.shift_right(T.bitwise_xor(block, 1) + number, 30))  # TVM has no bounds for an exclusive or


def half_selector(low_at: Any, high_at: Any) -> Any:
    """Selector of `prmt.b32` for a word of half `low_at` (0 or 1) of its first operand, half `high_at` of its second above."""
    return T.uint32(0x5410) + T.Cast("uint32", low_at * 0x22 + high_at * 0x2200)


def group_barrier(groups: int, threads: int) -> Any:
    """The inline function that is a barrier of one of the groups of a block, each of so many threads."""

    @T.inline
    def sync_group(group):  # type: ignore[no-untyped-def]
        if groups == 1:
            T.cuda.cta_sync()
        else:
            T.ptx.bar.sync(T.Cast("uint32", group + 1), T.uint32(threads))

    return sync_group
