"""Tensor copies (TMA) in the emulator: against numpy, and each fault it is there to find."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from kronsched.runtime.lower import Lowered
from kronsched.runtime.manifest import LaunchSpec
from kronsched.runtime.tensor_map import DECLARATION, TensorMap
from tests.emulator import ORDERS, EmulatorError, build, run_lowered

pytestmark = pytest.mark.skipif(build.available() is not None, reason=str(build.available()))

# A block of 32 threads. `load` brings the box at (at[0], at[1]) of x to shared memory and copies that to y; `store` does the
# latter with a tensor copy.
_KERNEL = """
extern "C" __global__ void {name}(const __grid_constant__ CUtensorMap x_map, {y}, int* at) {{
  extern __shared__ __align__(1024) unsigned char s[];
  __shared__ __align__(8) unsigned long long bar[1];
  unsigned b = (unsigned)__cvta_generic_to_shared(bar), dst = (unsigned)__cvta_generic_to_shared(s);
  int t = threadIdx.x;
  if (t == 0) {{
    asm volatile("mbarrier.init.shared.b64 [%0], 1;" :: "r"(b));
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], {bytes};" :: "r"(b));
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {{%2, %3}}], [%4];"
      :: "r"(dst + {shift}), "l"(&x_map), "r"(at[0]), "r"(at[1]), "r"(b) : "memory");
  }}
  __syncthreads();
  {wait}
  {out}
}}
"""
_WAIT = """asm volatile("{\\n.reg .pred P;\\nLOOP:\\nmbarrier.try_wait.parity.shared::cta.b64 P, [%0], %1;\\n@P bra.uni DONE;\\n"
            "bra.uni LOOP;\\nDONE:\\n}" :: "r"(b), "r"(0) : "memory");"""
_COPY = "for (int i = t; i < 1024; i += 32) y[i] = s[i];"
_STORE = """if (t == 0) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%1, %2}], [%3];"
      :: "l"(&y_map), "r"(at[0]), "r"(at[1]), "r"(dst) : "memory");
    asm volatile("cp.async.bulk.commit_group;");
    FLUSH
  }"""
_FLUSH = 'asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");'
_Y, _Y_MAP = "unsigned char* y", "const __grid_constant__ CUtensorMap y_map"


def _text(name: str, y: str = _Y, wait: str = _WAIT, out: str = _COPY, shift: int = 0, nbytes: int = 1024) -> str:
    return _KERNEL.format(name=name, y=y, wait=wait, out=out, shift=shift, bytes=nbytes)


# A cluster of two blocks: the first sends the box to both, at once or (`_SEND`) by a copy from its own shared memory to the
# other's; each waits, copies its own shared memory to its half of y, and tells the other by a remote arrival that it is done.
_CLUSTER = """
extern "C" __global__ void {name}(const __grid_constant__ CUtensorMap x_map, unsigned char* y, int* at) {{
  extern __shared__ __align__(1024) unsigned char s[];
  unsigned base = (unsigned)__cvta_generic_to_shared(s), full = base + 1024, done = base + 1032, rank, other;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  int t = threadIdx.x;
  if (t == 0) {{
    asm volatile("mbarrier.init.shared.b64 [%0], 1;" :: "r"(full));
    asm volatile("mbarrier.init.shared.b64 [%0], 1;" :: "r"(done));
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], 1024;" :: "r"(full));
  }}
  {meet}
  if (t == 0 && rank == 0)
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes{multicast} "
      "[%0], [%1, {{%2, %3}}], [%4]{blocks};"
      :: "r"(base), "l"(&x_map), "r"(at[0]), "r"(at[1]), "r"(full), "h"((unsigned short)3) : "memory");
  unsigned b = full;
  {wait}
  {send}
  for (int i = t; i < 1024; i += 128) y[rank * 1024 + i] = s[i];
  if (t == 0) {{
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(other) : "r"(done), "r"({other}));
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" :: "r"(other) : "memory");
  }}
  b = done;
  {wait}
}}
"""
_MEET = 'asm volatile("barrier.cluster.arrive.aligned;"); asm volatile("barrier.cluster.wait.aligned;");'


_SEND = """if (t == 0 && rank == 0) {
    unsigned there, bar;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(base), "r"(1));
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(bar) : "r"(full), "r"(1));
    asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
      :: "r"(there), "r"(base), "r"(1024), "r"(bar) : "memory");
  }"""


def _cluster(name: str, meet: str = _MEET, other: str = "1 - rank", send: str = "") -> str:
    many = {"multicast": "", "blocks": ""} if send else {"multicast": ".multicast::cluster", "blocks": ", %5"}
    return _CLUSTER.format(name=name, meet=meet, other=other, wait=_WAIT, send=send, **many)


SOURCE = (
    "#include <cuda.h>\n"
    + DECLARATION
    + _text("load")
    + _text("load_no_wait", wait="")
    + _text("load_fewer_bytes", nbytes=1008)
    + _text("load_unaligned", shift=64)
    + _text("store", _Y_MAP, out=_STORE.replace("FLUSH", _FLUSH))
    + _text("store_no_wait", _Y_MAP, out=_STORE.replace("FLUSH", ""))
    + _cluster("multicast")
    + _cluster("sent", send=_SEND)
    + _cluster("sent_too_much", send=_SEND.replace("1024", "1056"))
    + _cluster("multicast_too_early", meet="")
    + _cluster("arrives_at_itself", other="0")
    + _cluster("arrives_outside", other="2")
)
ROWS, COLUMNS, BOX = 11, 40, (32, 16)  # of float16: boxes of 64 bytes × 16
X = (np.arange(ROWS * COLUMNS) + 1).astype(np.int16).reshape(ROWS, COLUMNS)


def run(name: str, at: tuple[int, int], order: str = "forward", swizzle: int = 2) -> np.ndarray[Any, Any]:
    """y after a kernel: the content of shared memory, or the tensor that was stored to."""
    maps = [TensorMap("x_map", "x", "float16", (COLUMNS, ROWS), (COLUMNS * 2,), BOX, swizzle)]
    y = np.full(1024, 0xEE, np.uint8)
    y_shape, dtype = (1024,), "uint8"
    if name.startswith("store"):
        maps.append(TensorMap("y_map", "y", "float16", (COLUMNS, ROWS), (COLUMNS * 2,), BOX, swizzle))
        y, y_shape, dtype = np.full((ROWS, COLUMNS), -1, np.int16), (ROWS, COLUMNS), "float16"
    args = ("x_map", "y_map" if len(maps) == 2 else "y", "at")
    spec = LaunchSpec(
        name, args, ((ROWS, COLUMNS), y_shape, (2,)), (1, 1, 1), (32, 1, 1), 2048, ("float16", dtype, "int32"), maps=tuple(maps)
    )
    arrays = {"x": X.copy(), "y": y, "at": np.array(at, np.int32)}
    run_lowered(Lowered(SOURCE, "", (spec,), (), None), arrays, order=order)
    return y


def box(at: tuple[int, int]) -> np.ndarray[Any, Any]:
    """The box of X as rows, zero beyond its ends."""
    out = np.zeros((BOX[1], BOX[0]), np.int16)
    for r in range(BOX[1]):
        for c in range(BOX[0]):
            row, column = at[1] + r, at[0] + c
            if 0 <= row < ROWS and 0 <= column < COLUMNS:
                out[r, c] = X[row, column]
    return out


PLACES = [(0, 0), (8, 3), (32, 8), (-4, -2), (-13, 0), (40, 0), (3, 5)]


@pytest.mark.parametrize("at", PLACES, ids=str)
@pytest.mark.parametrize("swizzle", [0, 2])
def test_a_box_arrives_swizzled_with_zeros_beyond_the_ends(at: tuple[int, int], swizzle: int) -> None:
    shared = run("load", at, swizzle=swizzle).view(np.int16).reshape(-1, 8)
    chunks = np.empty_like(shared)
    for i in range(64):  # 16-byte chunks: the 64-byte swizzle flips bits 4, 5 by bits 7, 8
        chunks[i] = shared[i ^ (i >> 3 & (2**swizzle - 1))]
    assert np.array_equal(chunks.reshape(BOX[1], BOX[0]), box(at))


@pytest.mark.parametrize("at", PLACES, ids=str)
def test_a_stored_box_leaves_out_what_is_beyond_the_ends(at: tuple[int, int]) -> None:
    y = run("store", at)
    inside = np.zeros_like(y, bool)
    inside[max(at[1], 0) : max(at[1] + BOX[1], 0), max(at[0], 0) : max(at[0] + BOX[0], 0)] = True
    assert np.array_equal(y, np.where(inside, X, -1))


def test_without_waiting_nothing_has_arrived() -> None:
    assert all((run("load_no_wait", (0, 0), order) == 0xFF).all() for order in ORDERS)


def test_a_store_that_is_not_waited_for_is_lost() -> None:
    assert (run("store_no_wait", (0, 0)) == -1).all()


@pytest.mark.parametrize(
    ("name", "says"), [("load_fewer_bytes", "mbarrier.try_wait"), ("load_unaligned", "shared address .* no multiple of 512")]
)
def test_faults_are_errors(name: str, says: str) -> None:
    with pytest.raises(EmulatorError, match=says):
        run(name, (0, 0))


# -- clusters -------------------------------------------------------------------------------------------


def run_cluster(name: str, order: str) -> np.ndarray[Any, Any]:
    """y of both blocks, (2, 1024) bytes."""
    x_map = TensorMap("x_map", "x", "float16", (COLUMNS, ROWS), (COLUMNS * 2,), BOX)
    shapes, dtypes = ((ROWS, COLUMNS), (2, 1024), (2,)), ("float16", "uint8", "int32")
    spec = LaunchSpec(name, ("x_map", "y", "at"), shapes, (2, 1, 1), (128, 1, 1), 1040, dtypes, maps=(x_map,), cluster=2)
    y = np.full((2, 1024), 0xEE, np.uint8)
    run_lowered(Lowered(SOURCE, "", (spec,), (), None), {"x": X.copy(), "y": y, "at": np.array([3, 5], np.int32)}, order=order)
    return y


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("how", ["multicast", "sent"])
def test_a_box_is_sent_to_every_block_of_a_cluster(how: str, order: str) -> None:
    for half in run_cluster(how, order):
        assert np.array_equal(half.view(np.int16).reshape(BOX[1], BOX[0]), box((3, 5)))


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("multicast_too_early", "was not initialised"),
        ("arrives_at_itself", "more arrivals than|mbarrier.try_wait"),
        ("arrives_outside", "of block 2 of a cluster of 2"),
        ("sent_too_much", "shared memory"),
    ],
)
def test_faults_of_clusters_are_errors(name: str, says: str) -> None:
    with pytest.raises(EmulatorError, match=says):
        for order in ORDERS:
            run_cluster(name, order)


def test_a_kernel_in_clusters_needs_whole_ones() -> None:
    spec = LaunchSpec(
        "multicast", ("x_map", "y", "at"), ((1, 8), (1,), (2,)), (3, 1, 1), (128, 1, 1), 1040, ("float16", "uint8", "int32")
    )
    spec = dataclasses.replace(spec, maps=(TensorMap("x_map", "x", "float16", (8, 1), (16,), (8, 1)),), cluster=2)
    arrays: dict[str, Any] = {"x": np.zeros(8, np.int16), "y": np.zeros(1, np.uint8), "at": np.zeros(2, np.int32)}
    with pytest.raises(EmulatorError, match="clusters of 2 blocks"):
        run_lowered(Lowered(SOURCE, "", (spec,), (), None), arrays)
