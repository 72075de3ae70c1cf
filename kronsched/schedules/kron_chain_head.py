"""The 16-bit kernel that contracts one axis of 64 that is not among the last two, in place: tensor cores, no shared exchange.

    global ── registers ─ the axis ── global

The tensor is (outer, 64, inner). A tile is 64 neighbouring columns of inner at all 64 values of the axis: a warp reads all of it
before it writes any of it, and nobody else touches it. The next tile is on its way meanwhile.

Read first: `head64`; kron_chain_half64.py for operands and sums.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,misc,valid-type,name-defined"

from __future__ import annotations

from math import ceil
from typing import Any

from kronsched.schedules.kron_chain_half32 import STORES
from kronsched.schedules.kron_chain_half64 import columns, contract_first, rows_of
from kronsched.schedules.kron_chain_names import LOADS
from kronsched.schedules.kron_chain_plan import ChainPlan


def chunk(n: Any) -> Any:
    """The chunk (of a tile's eight in a line) that column n of an operand stands for: lanes then write 64 bytes in a row."""
    return n % 2 * 4 + n // 2


def head64(plan: ChainPlan, outer: int, inner: int, units: int) -> Any:
    """The PrimFunc. Parameters f, y as 16-bit and 32-bit words. units: multiprocessors of the device."""
    from tvm.script import tirx as T

    threads, warps = plan.threads, plan.threads // 32
    blocks = inner // 64  # tiles of an outer index
    tiles = outer * blocks
    grid = min(ceil(tiles / warps), units * plan.per_sm)
    pitch = inner // 2  # words from one value of the axis to the next
    load, store = LOADS["stream"].replace(".nc", ""), STORES[plan.store]
    dtype = plan.dtype

    @T.prim_func
    def kernel(f: T.Buffer((4096,), "uint16"), y: T.Buffer((outer * 64 * pitch,), "uint32")):
        T.device_entry()
        T.attr({"tirx.launch_bounds_min_blocks_per_sm": plan.per_sm})
        cta = T.cta_id([grid])
        tx = T.thread_id([threads])
        warp: T.let = tx // 32
        lane: T.let = tx % 32
        g: T.let = lane // 4
        t: T.let = lane % 4
        sm = T.alloc_buffer((2048,), "uint32", scope="shared.dyn", align=128)
        N = T.alloc_local([64], "uint32")  # the next tile
        R = T.alloc_local([64], "uint32")
        b = T.alloc_local([16], "uint32")
        c = T.alloc_local([32], "float32")
        a = T.alloc_local([64], "uint32")  # the factor: (tile, k step, word)

        @T.inline
        def factor():
            for v in T.serial((16 + warps - 1) // warps, unroll=True):
                i = T.meta_var(v * warps + warp)  # 4 tile + k step
                if i < 16:
                    for w in T.serial(4, unroll=True):
                        q = T.meta_var(rows_of(0, i // 4, w % 2, g))
                        sm[(i * 32 + lane) * 4 + w] = T.cast(f[columns(0, i % 4, w // 2, t, 0) * 64 + q], "uint32") | (
                            T.cast(f[columns(0, i % 4, w // 2, t, 1) * 64 + q], "uint32") << T.uint32(16)
                        )

        @T.inline
        def fetch(tile):
            for z in T.serial(16, unroll=True):
                at = T.meta_var(tile // blocks * (64 * pitch) + tile % blocks * 32)
                T.ptx[load](
                    N[z * 4], N[z * 4 + 1], N[z * 4 + 2], N[z * 4 + 3],
                    y.ptr_to([at + columns(0, z // 4, z // 2 % 2, t, z % 2) * pitch + chunk(g) * 4]),
                )  # fmt: skip

        @T.inline
        def put(tile):
            for z in T.serial(16, unroll=True):
                at = T.meta_var(tile // blocks * (64 * pitch) + tile % blocks * 32)
                T.ptx[store](
                    y.ptr_to([at + rows_of(0, z // 4, z // 2 % 2, g) * pitch + chunk(2 * t + z % 2) * 4]),
                    R[z * 4], R[z * 4 + 1], R[z * 4 + 2], R[z * 4 + 3],
                )  # fmt: skip

        if cta * warps + warp < tiles:
            fetch(cta * warps + warp)
        factor()
        T.cuda.cta_sync()
        for v in T.serial(16, unroll=True):
            T.ptx["ld.shared.v4.b32"](a[v * 4], a[v * 4 + 1], a[v * 4 + 2], a[v * 4 + 3], sm.ptr_to([(v * 32 + lane) * 4]))
        for it in T.serial((tiles - cta * warps - warp + grid * warps - 1) // (grid * warps)):
            tile = T.meta_var((it * grid + cta) * warps + warp)
            for e in T.serial(64, unroll=True):
                R[e] = N[e]
            if tile + grid * warps < tiles:
                fetch(tile + grid * warps)
            contract_first(dtype, R, b, c, a)
            put(tile)

    return kernel
