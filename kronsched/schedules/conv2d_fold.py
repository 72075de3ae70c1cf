"""Conv2d with few channels, such as the first layer of a network, as a Conv2d with more: neighbouring pixels are channels.

    x_fold[n, h]   a line of x: zeros, its pixels with zeros added to their channels, zeros; so that the window of any output
                   begins a multiple of 16 bytes after the one before it
    x_fold[n, h, j : j + window]   the channels of pixel j of the folded layer: windows overlap, nothing is copied twice
    w_fold         for `outputs` neighbouring outputs at once, each with its weights at its place of the window, zeros elsewhere

So a kernel of 7 × 7 with stride 2 over 3 channels of int8 is one of 7 × 1 with stride (2, 1) over 64 channels of which 36 count,
for two pixels of y (128 channels) at once: few large copies, and none of the padding along a line is ever tested for.

A layer with few outputs may be folded by pairs of pixels, without a copy of x: a kernel of 3 × 3 is one of 3 × 4 with stride
(1, 2) for two neighbouring outputs at once. What their windows share is then brought once: 12 pixels for two outputs, not 18.

Read first: `Fold`, `fold_of`, `pair_of`, `fold_program`, `folded_launches`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from kronsched.dtypes import DTYPES
from kronsched.schedules.base import Launch, Scheduled
from kronsched.schedules.conv2d_gather import do, named
from kronsched.workloads.base import TensorSpec
from kronsched.workloads.conv2d import Conv2d

THREADS = 256
UNITS = 4
"""Times 16 bytes of x_fold that a thread writes: all are read before any is written."""
_LINE = 16
"""Bytes that a thread writes, and that windows begin at multiples of."""
_WINDOWS = (32, 64, 128)
MOST_PAIRED = 64
"""Channels of y up to which outputs are paired: twice as many columns then make better use of what is copied."""


@dataclass(frozen=True)
class Fold:
    """conv: the layer.  channels: of a pixel in x_fold.  outputs: that one pixel of the folded layer stands for.

    folded: the layer that is computed; its x is made of overlapping windows of x_fold, or is x itself (pairs).
    """

    conv: Conv2d
    channels: int
    outputs: int
    folded: Conv2d
    pairs: bool = False

    @property
    def item(self) -> int:
        """Bytes of an element of x."""
        return DTYPES[self.conv.in_dtype].itemsize

    @property
    def step(self) -> int:
        """Elements from a window to the next."""
        return self.outputs * self.conv.stride[1] * self.channels

    @property
    def line(self) -> int:
        """Elements of a line of x_fold: up to the end of the last window, whole steps of 16 bytes."""
        size = ((self.folded.w - 1) * self.step + self.folded.c_in) * self.item
        return -(-size // _LINE) * _LINE // self.item

    @property
    def strides(self) -> tuple[int, int, int]:
        """Bytes from a pixel, a line, an image of the folded layer to the next."""
        line = self.line * self.item
        return self.step * self.item, line, line * self.conv.h

    @property
    def scratch(self) -> tuple[TensorSpec, ...]:
        """x_fold (unless in pairs), w_fold, and scale_fold and bias_fold where the layer has such inputs."""
        out = [] if self.pairs else [TensorSpec("x_fold", (self.conv.n, self.conv.h, self.line), self.conv.in_dtype)]
        out += [TensorSpec(f"{t.name}_fold", t.shape, t.dtype) for t in self.folded.inputs if t.name in ("w", "scale", "bias")]
        return tuple(out)


def fold_of(conv: Conv2d) -> Fold | None:
    """How to fold a layer; None when its windows are longer than 128 bytes, or whole outputs do not begin at 16 bytes."""
    item, ow = DTYPES[conv.in_dtype].itemsize, conv.out_hw[1]
    channels = -(-conv.c_in // (4 // item)) * (4 // item)  # whole words
    outputs = next((k for k in (1, 2, 4) if k * conv.stride[1] * channels * item % _LINE == 0), 0)
    if not outputs or ow % outputs or conv.groups > 1:
        return None
    pixels = (outputs - 1) * conv.stride[1] + (conv.kernel[1] - 1) * conv.dilation[1] + 1
    window = next((w for w in _WINDOWS if pixels * channels * item <= w), None)
    if window is None:
        return None
    folded = replace(
        conv,
        w=ow // outputs,
        c_in=window // item,
        c_out=outputs * conv.c_out,
        kernel=(conv.kernel[0], 1),
        stride=(conv.stride[0], 1),
        padding=(conv.padding[0], 0),
        dilation=(conv.dilation[0], 1),
    )
    return Fold(conv, channels, outputs, folded)


def pair_of(conv: Conv2d) -> Fold | None:
    """How to fold a layer by pairs; None when windows share nothing, pairs are not whole, or outputs are many as it is."""
    (sh, sw), (kh, kw) = conv.stride, conv.kernel
    if kw == 1 or sw > 1 or conv.dilation[1] > 1 or conv.out_hw[1] % 2 or conv.c_out > MOST_PAIRED or conv.groups > 1:
        return None
    folded = replace(conv, c_out=2 * conv.c_out, kernel=(kh, kw + 1), stride=(sh, 2))
    return Fold(conv, conv.c_in, 2, folded, pairs=True)


def fold_program(fold: Fold, name: str) -> Any:
    """The PrimFunc over x, w, scale, bias and their folded forms: first blocks that make x_fold, then those for the others.

    The launch overlaps the one before it, and lets the next one start, which waits for its end.
    """
    from tvm.script import tirx as T
    from tvm.script.ir_builder import IRBuilder
    from tvm.tirx.script.builder import ir as I

    scratch = {t.name.removesuffix("_fold"): t for t in fold.scratch}
    images = -(-scratch["x"].size * fold.item // (_LINE * THREADS * UNITS)) if "x" in scratch else 0
    jobs = {n: t.size for n, t in scratch.items() if n != "x"}
    with IRBuilder() as builder:
        with I.prim_func():
            I.func_name(name)
            sources = {t.name: I.arg(t.name, I.buffer((t.size,), t.dtype)) for t in fold.conv.inputs if t.name in scratch}
            targets = {n: I.arg(t.name, I.buffer((t.size,), t.dtype)) for n, t in scratch.items()}
            I.device_entry()
            block = IRBuilder.name("block", I.cta_id([images - (-sum(jobs.values()) // THREADS)]))
            thread = IRBuilder.name("thread", I.thread_id([THREADS]))
            do(T.ptx.griddepcontrol.launch_dependents())
            do(T.ptx.griddepcontrol.wait())
            if images:
                with I.If(block < images), I.Then():
                    _image(fold, sources["x"], targets["x"], named("unit", block * (THREADS * UNITS) + thread))
            job, first = named("job", (block - images) * THREADS + thread), 0
            for tensor, count in jobs.items():
                with I.If(_between(job, first, first + count)), I.Then():
                    _WRITE.get(tensor, _repeat)(fold, sources[tensor], targets[tensor], job - first)
                first += count
        return builder.get()


def folded_launches(fold: Fold | None, kernel: Any) -> Scheduled:
    """The launch of a kernel that waits by itself for the launch before it; the fold goes first, where there is one."""
    import tvm

    programs = {"conv2d_fold": fold_program(fold, "conv2d_fold")} if fold else {}
    programs["conv2d"] = kernel
    launches = [Launch(name, tuple(str(p.name) for p in f.params), overlap=True) for name, f in programs.items()]
    return Scheduled(tvm.IRModule(programs), tuple(launches), fold.scratch if fold else ())


def _between(value: Any, low: int, high: int) -> Any:
    from tvm.script import tirx as T

    return T.And(value >= low, value < high)


def _image(fold: Fold, x: Any, x_fold: Any, first: Any) -> None:
    """The units of 16 bytes first, first + THREADS, … of x_fold; by words of x where all lines begin at the same byte of one."""
    from tvm.script import tirx as T
    from tvm.tirx.script.builder import ir as I

    conv, pixel = fold.conv, fold.conv.c_in * fold.item
    pixels = _LINE // (fold.channels * fold.item)
    even = conv.w * pixel % 4 == 0 and pixels * pixel % 4 == 0 and pixels * fold.channels * fold.item == _LINE
    whole = even and fold.line % (pixels * fold.channels) == 0 and conv.n * conv.h * conv.w * pixel % 4 == 0
    units = [_Words(fold, x, first + i * THREADS) if whole else _Elements(fold, x, first + i * THREADS) for i in range(UNITS)]
    for i, unit in enumerate(units):
        with I.If(first + i * THREADS < x_fold.shape[0] * fold.item // _LINE), I.Then():
            words = unit.fill()
            to = x_fold.ptr_to([(first + i * THREADS) * (_LINE // fold.item)])
            do(T.ptx["st.global.v4.b32"](to, *(words[e] for e in range(_LINE // 4))))


class _Words:
    """A unit whose words each come from one or two words of x, which are read at once."""

    def __init__(self, fold: Fold, x: Any, job: Any) -> None:
        from tvm.script import tirx as T
        from tvm.script.ir_builder import IRBuilder
        from tvm.tirx.script.builder import ir as I

        conv, item = fold.conv, fold.item
        self.fold, self.pixel, self.wide = fold, conv.c_in * item, fold.channels * item  # bytes of a pixel, and of one with more
        pixels = _LINE // self.wide
        per_line = fold.line * item // _LINE
        self.column = named("column", job % per_line * pixels - conv.padding[1])
        self.shift = -conv.padding[1] * self.pixel % 4  # of the first byte in its word
        first = named("first", (job // per_line * (conv.w * self.pixel) + self.column * self.pixel - self.shift) // 4)
        last = conv.n * conv.h * conv.w * self.pixel // 4 - 1
        self.count = -(-(self.shift + pixels * self.pixel) // 4)
        self.read = IRBuilder.name("read", I.alloc_local([self.count], "uint32"))
        for i in range(self.count):
            at = T.max(T.min(first + i, last), 0)
            do(T.ptx["ld.global.nc.b32"](self.read[i], x.ptr_to([at * (4 // item)])))

    def fill(self) -> Any:
        """The unit's words."""
        from tvm.script import tirx as T
        from tvm.script.ir_builder import IRBuilder
        from tvm.tirx.script.builder import ir as I

        words, read = IRBuilder.name("words", I.alloc_local([_LINE // 4], "uint32")), self.read
        for word in range(_LINE // 4):
            start, length = word * 4 // self.wide, min(4, max(0, self.pixel - word * 4 % self.wide))  # its pixel, and bytes of it
            source = self.shift + start * self.pixel + word * 4 % self.wide
            select = sum((source % 4 + b) << (4 * b) for b in range(4))
            I.buffer_store(words, T.uint32(0), [word])
            inside = T.And(self.column + start >= 0, self.column + start < self.fold.conv.w)
            with I.If(inside), I.Then():
                if length:
                    after = read[min(source // 4 + 1, self.count - 1)]
                    do(T.ptx["prmt.b32"](words[word], read[source // 4], after, T.uint32(select)))
                if length < 4:
                    I.buffer_store(words, words[word] & T.uint32((1 << 8 * length) - 1), [word])
        return words


class _Elements:
    """A unit that is put together element by element."""

    def __init__(self, fold: Fold, x: Any, job: Any) -> None:
        self.fold, self.x, self.job = fold, x, job

    def fill(self) -> Any:
        """The unit's words."""
        from tvm.script import tirx as T
        from tvm.script.ir_builder import IRBuilder
        from tvm.tirx.script.builder import ir as I

        fold, conv, item, job = self.fold, self.fold.conv, self.fold.item, self.job
        per_word, per_line = 4 // item, fold.line * item // _LINE
        line, start = job // per_line, job % per_line * (_LINE // item)
        words = IRBuilder.name("words", I.alloc_local([_LINE // 4], "uint32"))
        for word in range(_LINE // 4):
            I.buffer_store(words, T.uint32(0), [word])
            for i in range(per_word):
                at = start + word * per_word + i
                column, c = named("column", at // fold.channels - conv.padding[1]), named("c", at % fold.channels)
                with I.If(T.And(T.And(column >= 0, column < conv.w), c < conv.c_in)), I.Then():
                    value = self.x[(line * conv.w + column) * conv.c_in + c]
                    bits = T.Cast("uint32", T.reinterpret(f"uint{8 * item}", value)) << T.uint32(8 * item * i)
                    I.buffer_store(words, words[word] | bits, [word])
        return words


def _weights(fold: Fold, w: Any, w_fold: Any, job: Any) -> None:
    """One element of w_fold: (output and channel of y, line of the kernel, pixel and channel of the window)."""
    from tvm import tirx
    from tvm.script import tirx as T
    from tvm.tirx.script.builder import ir as I

    conv, window = fold.conv, fold.folded.kernel[1] * fold.folded.c_in
    (kh, kw), step = conv.kernel, conv.dilation[1]
    element, line, channel = job % window, job // window % kh, job // window // kh
    offset = named("offset", element // fold.channels - channel // conv.c_out * conv.stride[1])
    column, c = named("column", offset // step), named("c", element % fold.channels)
    I.buffer_store(w_fold, tirx.const(0, str(w.dtype)), [job])
    with I.If(T.And(T.And(offset >= 0, offset % step == 0), T.And(column < kw, c < conv.c_in))), I.Then():
        where = ((channel % conv.c_out * kh + line) * kw + column) * conv.c_in + c
        I.buffer_store(w_fold, w[where], [job])


def _repeat(fold: Fold, source: Any, target: Any, job: Any) -> None:
    """One element of scale or bias, for each of the outputs."""
    from tvm.tirx.script.builder import ir as I

    I.buffer_store(target, source[job % fold.conv.c_out], [job])


_WRITE: dict[str, Callable[[Fold, Any, Any, Any], None]] = {"w": _weights}
