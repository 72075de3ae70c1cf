"""Each PTX instruction on values against a description of it in Python, on random bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kronsched.runtime.lower import Lowered
from kronsched.runtime.manifest import LaunchSpec
from tests.emulator import build, run_lowered

pytestmark = pytest.mark.skipif(build.available() is not None, reason=str(build.available()))
Array = np.ndarray[Any, Any]
U, S = np.uint32, np.int32
THREADS = 64


def halves(v: Array) -> Array:
    """(…, 2) float64 of packed float16."""
    return v.view(np.float16).reshape(*v.shape, 2).astype(np.float64)


def pack(v: Array) -> Array:
    return np.ascontiguousarray(v.astype(np.float16)).view(U).reshape(v.shape[:-1])


def wide(v: Array) -> Array:
    return v.astype(np.uint64)


def prmt(a: Array, b: Array, c: Array) -> Array:
    all_bytes = np.stack([(wide(x) >> np.uint64(8 * i)) & np.uint64(255) for x in (a, b) for i in range(4)])
    out = np.zeros_like(a)
    for i in range(4):
        pick = (c >> U(4 * i)) & U(15)
        byte = np.take_along_axis(all_bytes, (pick & U(7)).astype(np.int64)[None], 0)[0]
        byte = np.where(pick & U(8), np.where(byte & np.uint64(128), 255, 0), byte)
        out |= byte.astype(U) << U(8 * i)
    return out


def sat8(v: Array) -> Array:
    return np.clip(v, -128, 127).astype(S).view(U) & U(255)


def bf16(v: Array) -> Array:
    bits = wide(v)
    return ((bits + np.uint64(0x7FFF) + ((bits >> np.uint64(16)) & np.uint64(1))) >> np.uint64(16)).astype(U)


F = np.float32
CASES: dict[str, Callable[[Array, Array, Array], Array]] = {
    "add.u32 %0, %1, %2;": lambda a, b, c: a + b,
    "sub.s32 %0, %1, %2;": lambda a, b, c: a - b,
    "mul.lo.s32 %0, %1, %2;": lambda a, b, c: a * b,
    "mul.hi.u32 %0, %1, %2;": lambda a, b, c: ((wide(a) * wide(b)) >> np.uint64(32)).astype(U),
    "mad.lo.s32 %0, %1, %2, %3;": lambda a, b, c: a * b + c,
    "min.s32 %0, %1, %2;": lambda a, b, c: np.minimum(a.view(S), b.view(S)).view(U),
    "max.u32 %0, %1, %2;": lambda a, b, c: np.maximum(a, b),
    "xor.b32 %0, %1, %2;": lambda a, b, c: a ^ b,
    "shr.u32 %0, %1, 5;": lambda a, b, c: a >> U(5),
    "shr.s32 %0, %1, 5;": lambda a, b, c: (a.view(S) >> 5).view(U),
    "shl.b32 %0, %1, 40;": lambda a, b, c: np.zeros_like(a),
    "shf.l.wrap.b32 %0, %1, %2, 7;": lambda a, b, c: (b << U(7)) | (a >> U(25)),
    "prmt.b32 %0, %1, %2, %3;": prmt,
    "lop3.b32 %0, %1, %2, %3, 0xEA;": lambda a, b, c: (a & b) | c,
    "lop3.b32 %0, %1, %2, %3, 0x96;": lambda a, b, c: a ^ b ^ c,
    "bfe.u32 %0, %1, 4, 9;": lambda a, b, c: (a >> U(4)) & U(511),
    "bfi.b32 %0, %1, %2, 8, 4;": lambda a, b, c: (b & ~U(0xF00)) | ((a & U(15)) << U(8)),
    "{ .reg .pred p; setp.lt.s32 p, %1, %2; selp.b32 %0, %1, %3, p; }": lambda a, b, c: np.where(a.view(S) < b.view(S), a, c),
    "{ .reg .b16 lo, hi; mov.b32 {lo, hi}, %1; mov.b32 %0, {hi, lo}; }": lambda a, b, c: (a << U(16)) | (a >> U(16)),
    "add.f16x2 %0, %1, %2;": lambda a, b, c: pack(halves(a) + halves(b)),
    "sub.f16x2 %0, %1, %2;": lambda a, b, c: pack(halves(a) - halves(b)),
    "fma.rn.f16x2 %0, %1, %2, %3;": lambda a, b, c: pack(halves(a) * halves(b) + halves(c)),
    "add.f32 %0, %1, %2;": lambda a, b, c: (a.view(F) + b.view(F)).view(U),
    "mul.rn.f32 %0, %1, %2;": lambda a, b, c: (a.view(F) * b.view(F)).view(U),
    "cvt.rna.tf32.f32 %0, %1;": lambda a, b, c: (a + U(0x1000)) & U(0xFFFFE000),
    "cvt.rn.f16x2.f32 %0, %1, %2;": lambda a, b, c: pack(np.stack([b.view(F), a.view(F)], -1)),
    "cvt.rn.bf16x2.f32 %0, %1, %2;": lambda a, b, c: (bf16(a) << U(16)) | bf16(b),
    "cvt.rni.s32.f32 %0, %1;": lambda a, b, c: np.rint(a.view(F)).astype(S).view(U),
    "cvt.rn.f32.s32 %0, %1;": lambda a, b, c: a.view(S).astype(F).view(U),
    "{ .reg .s32 s; shr.s32 s, %1, 23; cvt.pack.sat.s8.s32.b32 %0, %2, s, %3; }": lambda a, b, c: (
        (c << U(16)) | (sat8(b.view(S)) << U(8)) | sat8(a.view(S) >> 23)
    ),
    "cvt.u32.u8 %0, %1;": lambda a, b, c: a & U(255),
    "dp4a.s32.s32 %0, %1, %2, %3;": lambda a, b, c: (
        (a.view(np.int8).reshape(-1, 4).astype(S) * b.view(np.int8).reshape(-1, 4)).sum(1).astype(S).view(U) + c
    ),
    "popc.b32 %0, %1;": lambda a, b, c: np.array([int(v).bit_count() for v in a], U),
}
FLOAT = {"add.f32", "mul.rn.f32", "cvt.rna.tf32.f32", "cvt.rn.f16x2.f32", "cvt.rn.bf16x2.f32", "cvt.rni.s32.f32"}
HALF = {"add.f16x2", "sub.f16x2", "fma.rn.f16x2"}


def _inputs(template: str) -> list[Array]:
    rng = np.random.default_rng(len(template))
    opcode = template.split(" ")[0]
    if opcode in FLOAT:
        return [rng.standard_normal(THREADS).astype(F).view(U) for _ in range(3)]
    if opcode in HALF:
        return [rng.standard_normal(2 * THREADS).astype(np.float16).view(U) for _ in range(3)]
    return [rng.integers(0, 2**32, THREADS, dtype=U) for _ in range(3)]


@pytest.fixture(scope="module")
def results() -> dict[str, Array]:
    """The outputs of all cases, from one kernel."""
    body = "\n".join(
        f'  {{ unsigned d; asm volatile("{t}" : "=r"(d) : "r"(a[{i} + t]), "r"(b[{i} + t]), "r"(c[{i} + t])); y[{i} + t] = d; }}'
        for i, t in ((n * THREADS, t) for n, t in enumerate(CASES))
    )
    params = ", ".join(f"unsigned* {name}" for name in "abcy")
    source = f'extern "C" __global__ void k({params}) {{ int t = threadIdx.x;\n{body}\n}}\n'
    shape = (len(CASES) * THREADS,)
    spec = LaunchSpec("k", tuple("abcy"), (shape,) * 4, block=(THREADS, 1, 1), dtypes=("uint32",) * 4)
    inputs = [np.concatenate(part) for part in zip(*(_inputs(t) for t in CASES), strict=True)]
    y = np.zeros(shape, U)
    run_lowered(Lowered(source, "", (spec,), (), None), dict(zip("abcy", [*inputs, y], strict=True)))
    return dict(zip(CASES, y.reshape(-1, THREADS), strict=True))


@pytest.mark.parametrize("template", CASES)
def test_instruction(template: str, results: dict[str, Array]) -> None:
    with np.errstate(over="ignore"):
        expected = CASES[template](*_inputs(template))
    assert np.array_equal(results[template], expected.astype(U))


def test_stmatrix_undoes_ldmatrix_and_transposes() -> None:
    source = """
extern "C" __global__ void k(unsigned short* a, unsigned short* y) {
  __shared__ __align__(16) unsigned short s[64];
  __shared__ __align__(16) unsigned short d[128];
  int l = threadIdx.x;
  s[l] = a[l], s[l + 32] = a[l + 32];
  __syncwarp();
  unsigned r, p = __cvta_generic_to_shared(s + l % 8 * 8), q = __cvta_generic_to_shared(d + l % 8 * 8);
  asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];" : "=r"(r) : "r"(p));
  asm volatile("stmatrix.sync.aligned.m8n8.x1.shared.b16 [%0], {%1};" :: "r"(q), "r"(r));
  asm volatile("stmatrix.sync.aligned.m8n8.x1.trans.shared.b16 [%0+128], {%1};" :: "r"(q), "r"(r));
  __syncwarp();
  for (int i = l; i < 128; i += 32) y[i] = d[i];
}
"""
    a, y = np.arange(64, dtype=np.uint16), np.zeros((2, 64), np.uint16)
    spec = LaunchSpec("k", ("a", "y"), ((64,), (2, 64)), block=(32, 1, 1), dtypes=("uint16", "uint16"))
    run_lowered(Lowered(source, "", (spec,), (), None), {"a": a, "y": y})
    assert np.array_equal(y[0], a)
    assert np.array_equal(y[1].reshape(8, 8), a.reshape(8, 8).T)
