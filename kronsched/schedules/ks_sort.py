"""Launches that take the d interleaved slices of rows apart and put them together again (TIRx).

    sort     (rows, f, d)  →  (rows, d, f)
    merge    (rows, d, f)  →  (rows, f, d)

Of the interleaved tensor a block takes a run of pieces: 16 bytes of features (E of them) times all l. They lie in shared memory
one after the other, 16 bytes apart, so that 8 neighbouring pieces are in different banks. On the other side a thread moves 16
bytes, E features of one l, and 8 neighbouring threads 128.

Read first: `sort_kernel`.
"""

from __future__ import annotations

from math import ceil
from typing import TYPE_CHECKING, Any

from kronsched.dtypes import DTYPES
from kronsched.workloads.ks import KSMatmul, Pattern, pattern_in, pattern_out

if TYPE_CHECKING:
    from kronsched.hardware import Device

_THREADS = 256
_RUN = 1024
"""16-byte chunks of a block."""
_EIGHT = 8
_LIMITS = {2: ((64, 96), (16, 120), (2, 256)), 4: ((64, 48), (16, 72), (2, 256))}
"""By bytes of an element: (least d, least b·c / (b + c)) where sorting pays."""
_COPY_SHARE = 0.85
"""Of the memory's rate."""


def pays(pattern: Pattern, dtype: str) -> bool:
    """Whether three trips of X and Y through memory may take less than products of interleaved slices.

    Blocks must have enough arithmetic for their bytes, b·c / (b + c), and more of it the shorter the runs of l are: a product of
    few l reads X in pieces of 16 bytes. Where measured on an H200, the limit is about where both take the same time.
    """
    _, b, c, d = pattern
    limits = _LIMITS[DTYPES[dtype].itemsize]
    return b * c / (b + c) >= next(limit for least, limit in limits if d >= least)


def sort_us(w: KSMatmul, pattern: Pattern, device: Device) -> float:
    """About what it takes to sort X and to merge Y of one factor."""
    elements = w.batch * (pattern_in(pattern) + pattern_out(pattern))
    return 4.0 + 2 * elements * DTYPES[w.dtype].itemsize / (_COPY_SHARE * device.bandwidth_gbs * 1e3)


def piece_run(d: int) -> int:
    """Pieces of a block, a multiple of 8."""
    return max(1, _RUN // d // _EIGHT) * _EIGHT


def sorted_at(piece: Any, l: Any, f: int, d: int, each: int) -> Any:  # noqa: E741 (the axis has that name everywhere)
    """First element, in the sorted tensor, of the `each` features of a piece and l."""
    pieces = f // each
    return (piece // pieces * d + l) * f + piece % pieces * each


def sort_kernel(rows: int, f: int, d: int, dtype: str, merge: bool, early: bool = True) -> Any:
    """The PrimFunc over the flat source and target; f features must be whole 16 bytes.

    merge: the target is interleaved.  early: start before the kernel before it has ended, and wait for that (sm_90).
    """
    from tvm.script import tirx as T
    from tvm.script.ir_builder import IRBuilder
    from tvm.tirx.script.builder import ir as I

    named, item = IRBuilder.name, DTYPES[dtype].itemsize
    each, bits = 16 // item, f"uint{8 * item}"
    pieces, run, pitch = rows * f // each, piece_run(d), (d + 1) * each
    with IRBuilder() as builder:
        with I.prim_func():
            I.func_name("merge" if merge else "sort")
            source = I.arg("source", I.buffer((rows * f * d,), dtype))
            target = I.arg("target", I.buffer((rows * f * d,), dtype))
            I.device_entry()
            cta = named("cta", I.cta_id([ceil(pieces / run)]))
            tx = named("tx", I.thread_id([_THREADS]))
            shared = named(f"pieces_{bits}", I.alloc_buffer((run * pitch,), bits, scope="shared.dyn", align=128))
            words = named("words", I.alloc_local([4], "uint32"))
            first = named("first", I.Bind(cta * run))
            if early:
                I.evaluate(T.ptx.griddepcontrol.wait())
                I.evaluate(T.ptx.griddepcontrol.launch_dependents())

            def all_words() -> list[Any]:
                return [words[i] for i in range(4)]

            def interleaved() -> None:
                """Between shared memory and the interleaved tensor, 16 bytes at a time."""
                with I.serial(0, ceil(run * d / _THREADS)) as e:
                    chunk = named("chunk", I.Bind(e * _THREADS + tx))
                    piece = chunk // d
                    with I.If(T.And(piece < run, first + piece < pieces)), I.Then():
                        at, near = (first * d + chunk) * each, shared.ptr_to([piece * pitch + chunk % d * each])
                        if merge:
                            I.evaluate(T.ptx["ld.shared.v4.b32"](*all_words(), near))
                            I.evaluate(T.ptx["st.global.v4.b32"](target.ptr_to([at]), *all_words()))
                        else:
                            I.evaluate(T.ptx["cp.async.cg.shared.global"](near, source.ptr_to([at]), 16))

            def sorted_() -> None:
                """Between shared memory and the sorted tensor: the features of a piece for one l."""
                with I.serial(0, ceil(run * d / _THREADS)) as e:
                    chunk = named("chunk", I.Bind(e * _THREADS + tx))
                    piece = named("piece", I.Bind(chunk // (_EIGHT * d) * _EIGHT + chunk % _EIGHT))
                    l = named("l", I.Bind(chunk // _EIGHT % d))  # noqa: E741
                    with I.If(T.And(piece < run, first + piece < pieces)), I.Then():
                        at, near = sorted_at(first + piece, l, f, d, each), piece * pitch + l
                        if merge:
                            I.evaluate(T.ptx["ld.global.v4.b32"](*all_words(), source.ptr_to([at])))
                            for i in range(each):
                                I.buffer_store(shared, element(i), [near + i * d])
                        else:
                            for i in range(4):
                                I.buffer_store(words, word(near, i), [i])
                            I.evaluate(T.ptx["st.global.v4.b32"](target.ptr_to([at]), *all_words()))

            def element(i: int) -> Any:
                """Element i of the four words."""
                if item == 4:
                    return words[i]
                return T.Cast("uint16", words[i // 2] >> T.uint32(16) if i % 2 else words[i // 2] & T.uint32(0xFFFF))

            def word(near: Any, i: int) -> Any:
                """Word i of the features that lie d apart."""
                if item == 4:
                    return shared[near + i * d]
                low, high = (T.Cast("uint32", shared[near + (2 * i + h) * d]) for h in range(2))
                return low | (high << T.uint32(16))

            (sorted_ if merge else interleaved)()
            if not merge:
                I.evaluate(T.ptx.cp.async_.commit_group())
                I.evaluate(T.ptx.cp.async_.wait_group(0))
            I.evaluate(T.cuda.cta_sync())
            (interleaved if merge else sorted_)()
        return builder.get()
