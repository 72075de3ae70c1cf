"""One kernel of the wgmma Kron-Matmul as a TIRx program.

    factors ─(once a block: high and low TF32 parts, as operand B)─ shared
    for each tile of a warpgroup:
        global ─(cp.async, swizzled, `stages` units ahead)─ shared ─ registers ─(high and low parts)─ operand A of wgmma
        line, column: accumulators ─ global          pair: accumulators ─ shared ─ operand A of wgmma ─ accumulators ─ global

A float32 product is three TF32 products. The tensor core truncates when it accumulates, so the small products of a unit are
summed first and the large ones on top of them; units are added up by ordinary rounded additions.

A "column" launch may work in place: a warpgroup has read all of a tile before it writes any of it, and nobody else touches it.

Read first: `program`; kron_wgmma_layout.py for every index.
"""

from __future__ import annotations

from typing import Any

from kronsched.schedules.kron_mma_kernel import tf32_parts
from kronsched.schedules.kron_wgmma_layout import (
    LEADING,
    STRIDE,
    UNIT,
    column_k,
    column_read,
    factor_element,
    line_k,
    line_read,
    line_write,
    swizzle,
)
from kronsched.schedules.kron_wgmma_plan import UNIT_BYTES, WgmmaLaunch

STEPS = UNIT // 8
"""k-steps of a unit."""


def program(launch: WgmmaLaunch, name: str, source: str, target: str, size: int) -> Any:
    """The PrimFunc of a launch: parameters `source` (unless it is `target`), f<axis> …, `target`, flat float32.

    size: elements of source and target.
    """
    from tvm.script.ir_builder import IRBuilder
    from tvm.tirx.script.builder import ir as I

    with IRBuilder() as builder:
        with I.prim_func():
            I.func_name(name)
            x = None if source == target else I.arg(source, I.buffer((size,), "float32"))
            fs = [I.arg(f"f{axis}", I.buffer((launch.p * launch.p,), "float32")) for axis in sorted(launch.axes)]
            y = I.arg(target, I.buffer((size,), "float32"))
            I.device_entry()
            with I.attr({"tirx.launch_bounds_min_blocks_per_sm": launch.per_sm}):
                _Kernel(launch, y if x is None else x, fs[::-1], y).emit()
        return builder.get()


def _do(expr: Any) -> None:
    from tvm.tirx.script.builder import ir as I

    I.evaluate(expr)


class _Kernel:
    """A kernel under construction."""

    def __init__(self, launch: WgmmaLaunch, x: Any, factors: list[Any], y: Any) -> None:
        from tvm.script import tirx as T
        from tvm.script.ir_builder import IRBuilder
        from tvm.tirx.script.builder import ir as I

        self.launch, self.x, self.factors, self.y = launch, x, factors, y
        name = IRBuilder.name
        self.cta = name("cta", I.cta_id([launch.grid]))
        self.tx = name("tx", I.thread_id([launch.threads]))
        self.group = name("group", I.Bind(self.tx >> 7))
        self.warp = name("warp", I.Bind((self.tx >> 5) & 3))
        self.g = name("g", I.Bind((self.tx & 31) >> 2))
        self.t = name("t", I.Bind(self.tx & 3))
        self.shared = name("sm", I.alloc_buffer((launch.shared_bytes // 4,), "float32", scope="shared.dyn", align=1024))
        n = launch.p // 2
        self.acc = name("acc", I.alloc_local([n], "float32"))
        self.total = name("total", I.alloc_local([n], "float32")) if launch.units > 1 else self.acc
        self.high = name("high", I.alloc_local([4 * STEPS], "uint32"))
        self.low = name("low", I.alloc_local([4 * STEPS], "uint32"))
        self.operand = name("operand", I.alloc_local([len(launch.axes)], "uint64"))
        self.mma = f"wgmma.mma_async.sync.aligned.m64n{launch.p}k8.f32.tf32.tf32"
        self.zero = T.float32(0)

    def emit(self) -> None:
        """The body."""
        from tvm.script import tirx as T
        from tvm.script.ir_builder import IRBuilder
        from tvm.tirx.script.builder import ir as I

        launch = self.launch
        first = IRBuilder.name("first", I.Bind(self.cta * launch.groups + self.group))
        stride = launch.grid * launch.groups
        for s in range(launch.stages):
            self._fetch(first + s // launch.units * stride, s % launch.units, s)
        for i in range(len(launch.axes)):
            self._factor(i)
        _do(T.ptx.fence.proxy.async_.shared__cta())
        _do(T.cuda.cta_sync())
        with I.serial(0, (launch.tiles - first + stride - 1) // stride) as n:
            tile = IRBuilder.name("tile", I.Bind(first + n * stride))
            for kc in range(launch.units):
                u = n * launch.units + kc
                slot = IRBuilder.name(f"slot{kc}", I.Bind(u % launch.stages))
                _do(T.ptx.cp.async_.wait_group(launch.stages - 1))
                self._sync()
                if launch.kind == "pair":
                    self._read_lines(slot)
                    self._multiply(0, 0)
                    self._put_back(slot)
                    self._sync()
                    self._read_columns(slot)
                elif launch.kind == "line":
                    self._read_lines(slot)
                else:
                    self._read_columns(slot)
                self._sync()
                ahead = kc + launch.stages
                self._fetch(tile + ahead // launch.units * stride, ahead % launch.units, slot)
                self._multiply(len(launch.axes) - 1, kc)
                if launch.units > 1:
                    self._add(kc)
            self._store(tile)
        _do(T.ptx.cp.async_.wait_group(0))

    # -- movement -----------------------------------------------------------------------------------

    def _sync(self) -> None:
        """A barrier of the warpgroup."""
        from tvm.script import tirx as T

        _do(T.ptx.bar.sync(T.Cast("uint32", self.group + 1), T.uint32(128)))

    def _slot(self, slot: Any) -> Any:
        """First float of a stage of this warpgroup."""
        launch = self.launch
        return launch.factor_bytes // 4 + (self.group * launch.stages + slot) * (UNIT_BYTES // 4)

    def _origin(self, tile: Any, kc: int) -> tuple[Any, int]:
        """(first element, elements from line to line) of a unit in global memory."""
        launch = self.launch
        if launch.kind != "column":
            return tile * (UNIT * launch.p) + kc * UNIT, launch.p
        blocks = launch.columns // UNIT
        at = tile // blocks * (launch.p * launch.columns) + tile % blocks * UNIT
        return at + kc * UNIT * launch.columns, launch.columns

    def _fetch(self, tile: Any, kc: int, slot: Any) -> None:
        """Start copying a unit to shared memory, if there is such a tile; one group of copies in any case."""
        from tvm.script import tirx as T
        from tvm.tirx.script.builder import ir as I

        line, chunk = (self.tx & 127) >> 4, self.tx & 15  # eight lines at a time: the swizzle of a line is that of line % 8
        with I.If(tile < self.launch.tiles), I.Then():
            origin, pitch = self._origin(tile, kc)
            source = I.Bind(origin + line * pitch + chunk * 4)
            into = I.Bind(self._slot(slot) + line * UNIT + ((chunk ^ swizzle(line)) << 2))
            for e in range(UNIT // 8):
                to = self.shared.ptr_to([into + e * 8 * UNIT])
                _do(T.ptx["cp.async.cg.shared.global"](to, self.x.ptr_to([source + e * 8 * pitch]), 16))
        _do(T.ptx.cp.async_.commit_group())

    def _factor(self, i: int) -> None:
        """Factor i of the launch, as operand B: high parts, then low parts; and its descriptor."""
        from tvm.script import tirx as T
        from tvm.tirx.script.builder import ir as I

        launch, p = self.launch, self.launch.p
        lines = launch.kind == "line" or (launch.kind == "pair" and i == 0)
        start = i * 2 * p * p
        with I.serial(0, p * p // launch.threads + (p * p % launch.threads > 0)) as e:
            at = I.Bind(e * launch.threads + self.tx)
            with I.If(at < p * p), I.Then():
                step, k, q = factor_element(at, p)
                row = line_k(step, k) if lines else column_k(step, k)
                high, low = tf32_parts(self.factors[i][row * p + q])
                I.buffer_store(self.shared, T.reinterpret("float32", high), [start + at])
                I.buffer_store(self.shared, T.reinterpret("float32", low), [start + p * p + at])
        _do(T.cuda.wgmma.encode_matrix_descriptor(T.address_of(self.operand[i]), self.shared.ptr_to([start]), LEADING, STRIDE, 0))

    # -- operand A ----------------------------------------------------------------------------------

    def _read_lines(self, slot: Any) -> None:
        """A: rows are lines, k along them."""
        from tvm.script import tirx as T
        from tvm.tirx.script.builder import ir as I

        base, line = I.Bind(self._slot(slot)), I.Bind(self.warp * 16 + self.g)
        low = I.Bind(self.t ^ swizzle(self.g))
        for b in range(STEPS // 2):
            for half in range(2):  # lines g and g + 8
                to = [self.high[(2 * b + v // 2) * 4 + half + v % 2 * 2] for v in range(4)]
                _do(T.ptx["ld.shared.v4.b32"](*to, self.shared.ptr_to([base + line_read(line, low, b, half)])))

    def _read_columns(self, slot: Any) -> None:
        """A: rows are columns, k over lines."""
        from tvm.script import tirx as T
        from tvm.tirx.script.builder import ir as I

        column = self.warp * 16 + self.g
        for k in range(2):  # lines t and t + 4 of a k-step
            for half in range(2):  # columns g and g + 8
                at = I.Bind(self._slot(slot) + column_read(self.t + 4 * k, column, half))
                for step in range(STEPS):
                    to = self.high[step * 4 + 2 * k + half]
                    _do(T.ptx["ld.shared.b32"](to, self.shared.ptr_to([at + step * 8 * UNIT])))

    # -- arithmetic ---------------------------------------------------------------------------------

    def _multiply(self, i: int, kc: int) -> None:
        """Multiply: acc = A · (rows kc·64 … of factor i), by three TF32 products."""
        from tvm.script import tirx as T
        from tvm.tirx.script.builder import ir as I

        p = self.launch.p
        for r in range(4 * STEPS):
            high, low = tf32_parts(T.reinterpret("float32", self.high[r]))
            I.buffer_store(self.low, low, [r])
            I.buffer_store(self.high, high, [r])
        _do(T.ptx.wgmma.fence.sync.aligned())
        low_b, a_step = p * p * 4 // 16, 8 * p * 4 // 16
        products = [(a, b, s) for s in range(STEPS) for a, b in ((self.low, 0), (self.high, low_b))]
        products += [(self.high, 0, s) for s in range(STEPS)]
        for number, (a, b, s) in enumerate(products):
            operand = self.operand[i] + T.uint64(b + (kc * STEPS + s) * a_step)
            registers = [a[s * 4 + r] for r in range(4)]
            accumulators = [self.acc[r] for r in range(p // 2)]
            _do(T.ptx[self.mma](*accumulators, *registers, operand, T.bool(number > 0), 1, 1))
        _do(T.ptx.wgmma.commit_group.sync.aligned())
        _do(T.ptx.wgmma.wait_group.sync.aligned(0))

    def _add(self, kc: int) -> None:
        """Add a unit's sums to the tile's."""
        from tvm.tirx.script.builder import ir as I

        for r in range(self.launch.p // 2):
            I.buffer_store(self.total, self.acc[r] if kc == 0 else self.total[r] + self.acc[r], [r])

    # -- results ------------------------------------------------------------------------------------

    def _put_back(self, slot: Any) -> None:
        """Sums of the line pattern to where their lines were."""
        from tvm.script import tirx as T
        from tvm.tirx.script.builder import ir as I

        base, line = I.Bind(self._slot(slot)), I.Bind(self.warp * 16 + self.g)
        low = I.Bind((self.t >> 1) ^ swizzle(self.g))
        for j in range(UNIT // 8):
            for half in range(2):
                to, a = self.shared.ptr_to([base + line_write(line, low, self.t, j, half)]), 4 * j + 2 * half
                _do(T.ptx["st.shared.v2.f32"](to, self.acc[a], self.acc[a + 1]))

    def _store(self, tile: Any) -> None:
        """A tile's sums to global memory: whole 32-byte sectors from each instruction."""
        from tvm.script import tirx as T
        from tvm.tirx.script.builder import ir as I

        launch, sums = self.launch, self.total
        row = self.warp * 16 + self.g
        if launch.kind == "line":
            at = I.Bind(tile * (UNIT * launch.p) + row * launch.p + 2 * self.t)
            for j in range(launch.p // 8):
                for half in range(2):
                    a = 4 * j + 2 * half
                    to = self.y.ptr_to([at + half * 8 * launch.p + 8 * j])
                    _do(T.ptx["st.global.v2.f32"](to, sums[a], sums[a + 1]))
            return
        pitch = UNIT if launch.kind == "pair" else launch.columns
        blocks = pitch // UNIT
        at = I.Bind(tile // blocks * (launch.p * pitch) + tile % blocks * UNIT + 2 * self.t * pitch + row)
        for j in range(launch.p // 8):
            for r in range(4):
                to = self.y.ptr_to([at + (8 * j + r % 2) * pitch + r // 2 * 8])
                _do(T.ptx["st.global.f32"](to, sums[4 * j + r]))
