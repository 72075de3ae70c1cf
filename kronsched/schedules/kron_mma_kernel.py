"""What the kernels of a tensor-core Kron-Matmul are written with: registers, addresses in shared memory, packing, TF32 splitting.

TIRx is written with TVM's IR builder from Python, not as TVMScript text, so that lists of steps and fragments are Python loops.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from math import prod
from typing import Any

from kronsched.schedules.kron_mma_layout import CHUNK_BYTES, LANES, swizzle
from kronsched.schedules.kron_mma_plan import LaunchPlan

HALF_ULP, _TF32_MASK = 0x1000, 0xFFFFE000


def evaluate(expr: Any) -> None:
    """Add an expression as a statement to the function under construction."""
    from tvm.tirx.script.builder import ir as I

    I.evaluate(expr)


class Kernel:
    """The state of one kernel under construction; made inside an open function, after `device_entry`."""

    def __init__(self, plan: LaunchPlan, dtype: str, registers: dict[str, int]) -> None:
        """Declare thread indices, shared memory and register arrays of the given sizes."""
        from tvm.script import tirx as T
        from tvm.script.ir_builder import IRBuilder
        from tvm.tirx.script.builder import ir as I

        self.plan, self.dtype = plan, dtype
        self.warps = plan.threads // LANES
        name = IRBuilder.name
        self.block = name("block", I.cta_id([plan.grid]))
        self.thread = name("thread", I.thread_id([plan.threads]))
        self.zero = T.float32(0)
        words = max(4, plan.shared_bytes // 4)
        self.shared = name("smem", I.alloc_buffer((words,), "uint32", scope="shared.dyn", align=128))
        base = T.cuda.cvta_generic_to_shared(self.shared.ptr_to([0]))
        self.base = name("base", I.Bind(base))
        self.source: Any = self.base
        self.acc = name("acc", I.alloc_local([registers["acc"]], "float32"))
        self.x = name("xr", I.alloc_local([registers["x"]], "uint32"))
        self.f = name("fr", I.alloc_local([registers["f"]], "uint32"))
        self.d = name("dr", I.alloc_local([registers["d"]], "float32"))
        self.own = name("own", I.alloc_local([1], "uint32"))
        self.r = name("r", I.alloc_local([4], "uint32"))
        short = {"float16": "f16", "bfloat16": "bf16", "float32": "tf32"}[dtype]
        k = 16 if plan.item == 2 else 8
        self.mma = f"mma.sync.aligned.m16n8k{k}.row.col.f32.{short}.{short}.f32"
        self.mma_half = f"mma.sync.aligned.m16n8k8.row.col.f32.{short}.{short}.f32"
        self.pack = f"cvt.rn.{short}x2.f32"
        self.name_lanes()

    # -- control ------------------------------------------------------------------------------------

    def name_lanes(self) -> None:
        """Make tx, lane, warp, g and t anew, from a copy of the thread index that the compiler cannot see through.

        Called at the start of every step and copy. Otherwise each of their addresses, the same for every tile of a block, is
        computed once before the loop over tiles, and kept in more registers than there are.
        """
        from tvm.script import tirx as T

        evaluate(T.ptx["mov.b32"](self.own[0], T.Cast("uint32", self.thread)))
        # Expressions, not variables: TVM's arithmetic must see the mask, which bounds tx.
        mask = (1 << (self.plan.threads - 1).bit_length()) - 1
        self.tx: Any = T.Cast("int32", self.own[0] & T.uint32(mask))
        self.lane: Any = self.tx & 31
        self.warp: Any = self.tx >> 5
        self.g: Any = self.lane >> 2
        self.t: Any = self.lane & 3

    def sync(self) -> None:
        """A barrier of the block."""
        from tvm.script import tirx as T

        evaluate(T.cuda.cta_sync())

    @contextlib.contextmanager
    def guarded(self, conditions: list[Any]) -> Iterator[None]:
        """Run what follows where all conditions hold."""
        from tvm.script import tirx as T
        from tvm.tirx.script.builder import ir as I

        if not conditions:
            yield
            return
        condition = conditions[0]
        for other in conditions[1:]:
            condition = T.And(condition, other)
        with I.If(condition), I.Then():
            yield

    # -- addresses ----------------------------------------------------------------------------------

    def work_base(self) -> Any:
        """Byte address of the work buffer."""
        return _plus(self.base, self.plan.stages * self.plan.in_chunks * CHUNK_BYTES)

    def buffer(self, which: int) -> tuple[Any, int]:
        """(byte address, chunks) of buffer 0 (the current input stage) or 1 (work)."""
        if which == 0:
            return self.source, self.plan.in_chunks
        return self.work_base(), self.plan.work_chunks

    def tile_address(self, which: int, lane: Any, fixed: int, word: Any = 0) -> Any:
        """Byte address of a 32-bit word of chunk `lane + fixed` of a buffer.

        A `fixed` ≠ 0 promises that the bits of both do not overlap: then the swizzle of the sum is the XOR of theirs, of which
        all but three bits are an immediate offset of the instruction.
        """
        from tvm.script import tirx as T

        base, chunks = self.buffer(which)
        at = swizzle(lane, chunks)
        constant = int(swizzle(fixed, chunks))
        low, high = constant & 7, constant >> 3 << 3
        if low:
            at = at ^ low
        offset = at * CHUNK_BYTES + word * 4
        address = base + T.Cast("uint32", offset)
        return T.ptx.addr(address, high * CHUNK_BYTES) if high else address

    def fragment_address(self, word: Any) -> Any:
        """Byte address of a 32-bit word of the factors in fragment order."""
        from tvm.script import tirx as T

        start = (self.plan.stages * self.plan.in_chunks + self.plan.work_chunks) * CHUNK_BYTES
        return self.base + T.Cast("uint32", word * 4 + start)

    # -- data ---------------------------------------------------------------------------------------

    def load4(self, into: Any, at: int, address: Any) -> None:
        """16 bytes of shared memory into four registers."""
        from tvm.script import tirx as T

        evaluate(T.ptx["ld.shared.v4.b32"](*[into[at + i] for i in range(4)], address))

    def split(self, hi: Any, i: int, lo: Any, j: int) -> None:
        """Split the float32 in hi[i] into its TF32 value (stays there) and the TF32 value of the rest (to lo[j])."""
        from tvm.script import tirx as T
        from tvm.tirx.script.builder import ir as I

        high, low = tf32_parts(T.reinterpret("float32", hi[i]))
        I.buffer_store(lo, low, [j])
        I.buffer_store(hi, high, [i])

    def round_up(self, values: Any, i: int) -> None:
        """Add half a unit of TF32 to the float32 in values[i], so that truncation by mma rounds it."""
        from tvm.script import tirx as T
        from tvm.tirx.script.builder import ir as I

        I.buffer_store(values, values[i] + T.uint32(HALF_ULP), [i])

    def store(self, address: Any, acc: list[int], shared: bool) -> None:
        """Accumulators (two of a 16-bit type; one, two or four of float32), rounded to storage, to neighbouring elements."""
        from tvm.script import tirx as T

        space = "shared" if shared else "global"
        if self.plan.item == 4:
            vector = "" if len(acc) == 1 else f".v{len(acc)}"
            evaluate(T.ptx[f"st.{space}{vector}.f32"](address, *[self.acc[a] for a in acc]))
            return
        evaluate(T.ptx[self.pack](self.r[0], self.acc[acc[1]], self.acc[acc[0]]))
        evaluate(T.ptx[f"st.{space}.b32"](address, self.r[0]))


def tf32_parts(value: Any) -> tuple[Any, Any]:
    """(high, low) as 32-bit words: value rounded to TF32 (nearest, ties away); the rest, so that truncation by mma rounds it."""
    from tvm.script import tirx as T

    bits = T.reinterpret("uint32", value)
    high = (bits + T.uint32(HALF_ULP)) & T.uint32(_TF32_MASK)
    low = T.reinterpret("uint32", value - T.reinterpret("float32", high)) + T.uint32(HALF_ULP)
    return high, low


def _plus(base: Any, offset: int) -> Any:
    from tvm.script import tirx as T

    return base + T.uint32(offset) if offset else base


def total(plan: LaunchPlan) -> int:
    """Tiles of a launch."""
    return prod(plan.tile_grid)
