"""Small CUDA kernels with one fault each (and without it), as text for the emulator's own tests: one source, compiled once.

Each kernel takes int or float arrays `a` (read) and `y` (written) of 64 elements and runs as one block of 64 threads with 1 KB of
dynamic shared memory.
"""

from __future__ import annotations

_HEAD = """
#define SHARED(p) ((unsigned)__cvta_generic_to_shared(p))
__device__ inline void copy16(unsigned dst, const void* src) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(dst), "l"(src) : "memory");
}
__device__ inline void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
#define WAIT(n) asm volatile("cp.async.wait_group %0;" :: "n"(n) : "memory")
"""

_BODIES = {
    # y[i] = a[63 - i] through shared memory
    "reverse_right": "s[t] = a[t]; __syncthreads(); y[t] = s[63 - t];",
    "reverse_no_sync": "s[t] = a[t]; y[t] = s[63 - t];",
    # a tile is overwritten while others still read it
    "rewrite_right": """s[t] = a[t]; __syncthreads(); int v = s[(t + 1) % 64]; __syncthreads();
        s[t] = -v; __syncthreads(); y[t] = s[t];""",
    "rewrite_no_sync": "s[t] = a[t]; __syncthreads(); int v = s[(t + 1) % 64]; s[t] = -v; __syncthreads(); y[t] = -v;",
    "warp_exchange": "s[t] = a[t]; __syncwarp(); y[t] = s[t ^ 31];",
    "warp_exchange_no_sync": "s[t] = a[t]; y[t] = s[t ^ 31];",
    "named_barrier": """s[t] = a[t];
        asm volatile("bar.sync %0, %1;" :: "r"(1 + t / 32), "r"(32) : "memory"); y[t] = s[t ^ 31];""",
    "barrier_short": 'asm volatile("bar.sync 1, 96;" ::: "memory"); y[t] = a[t];',
    "exit_early": "if (t >= 32) return; __syncthreads(); y[t] = a[t];",
    # cp.async
    "async_right": "if (t < 16) copy16(SHARED(s + 4 * t), a + 4 * t); commit(); WAIT(0); __syncthreads(); y[t] = s[t];",
    "async_no_wait": "if (t < 16) copy16(SHARED(s + 4 * t), a + 4 * t); commit(); __syncthreads(); y[t] = s[t];",
    "async_wait_too_few": """if (t < 16) copy16(SHARED(s + 4 * t), a + 4 * t); commit();
        if (t < 16) copy16(SHARED(s + 64 + 4 * t), a + 4 * t); commit(); WAIT(1); __syncthreads(); y[t] = s[64 + t];""",
    "async_too_early": """s[t] = a[t]; __syncthreads();
        if (t < 16) copy16(SHARED(s + 4 * t), a + 4 * t); commit(); y[t] = s[63 - t]; WAIT(0);""",
    "async_zero_fill": """asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;"
        :: "r"(SHARED(s + t)), "l"(a + t), "r"(t % 2 ? 4 : 0) : "memory"); commit(); WAIT(0); y[t] = s[t];""",
    "async_predicated": """asm volatile("{ .reg .pred p; setp.ne.b32 p, %2, 0; @p cp.async.ca.shared.global [%0], [%1], 4; }"
        :: "r"(SHARED(s + t)), "l"(a + t), "r"(t % 2) : "memory"); commit(); WAIT(0); y[t] = t % 2 ? s[t] : 0;""",
    "async_misaligned": "copy16(SHARED(s + t), a); commit(); WAIT(0); y[t] = a[t];",
    # bounds and alignment
    "past_end": "y[t] = a[t]; if (t == 63) y[t + 1] = 1;",
    "before_start": "y[t] = a[t]; if (t == 0) y[-1] = 1;",
    "far_away": "y[t] = a[t + (1 << 20)];",
    "ptx_past_end": 'int v; asm volatile("ld.global.nc.b32 %0, [%1];" : "=r"(v) : "l"(a + t + 1)); y[t] = v;',
    "shared_past_end": "s[256 + t] = a[t]; y[t] = s[256 + t];",
    "ptx_shared_past_end": 'asm volatile("st.shared.b32 [%0], %1;" :: "r"(SHARED(s) + 1024 + t * 4), "r"(t)); y[t] = 0;',
    "divide_by_zero": "y[t] = a[t] / (a[t] - 3 * (t + 1));",
    "local_index": "int r[4]; for (int i = 0; i < 4 + t / 63; ++i) r[i] = a[i]; y[t] = r[t % 4];",
    "ptx_misaligned": """int u, v, w, x; asm volatile("ld.global.v4.b32 {%0, %1, %2, %3}, [%4];"
        : "=r"(u), "=r"(v), "=r"(w), "=r"(x) : "l"(a + t % 4)); y[t] = u;""",
    "misaligned": "int4 v = *(const int4*)(a + t % 4); y[t] = v.x;",
    # warps
    "shuffles": """int up = __shfl_up_sync(0xffffffffu, a[t], 1), across = __shfl_xor_sync(0xffffffffu, a[t], 16);
        int one = __shfl_sync(0xffffffffu, a[t], 3, 8), votes = __popc(__ballot_sync(0xffffffffu, a[t] & 1));
        y[t] = up + 1000 * across + 1000000 * one + 100000000 * votes;""",
    "diverged": """if (t % 2) { __shfl_sync(0xffffffffu, t, 0); } else { __syncwarp(); } y[t] = a[t];""",
    "static_shared": "__shared__ __align__(16) int mine[64]; mine[t] = a[t]; __syncthreads(); y[t] = mine[63 - t];",
    # one thread fetches 256 bytes, all wait on the mbarrier
    "bulk": """__shared__ alignas(16) unsigned long long bar[1]; unsigned b = SHARED(bar), dst = SHARED(s);
        if (t == 0) {
          asm volatile("mbarrier.init.shared.b64 [%0], 1;" :: "r"(b));
          asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], 256;" :: "r"(b));
          asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
            :: "r"(dst), "l"(a), "r"(256), "r"(b) : "memory");
        }
        __syncthreads();
        asm volatile("{\\n.reg .pred P;\\nLOOP:\\nmbarrier.try_wait.parity.shared::cta.b64 P, [%0], %1;\\n@P bra.uni DONE;\\n"
            "bra.uni LOOP;\\nDONE:\\n}" :: "r"(b), "r"(0) : "memory");
        y[t] = s[63 - t];""",
}

SOURCE = _HEAD + "".join(
    f'extern "C" __global__ void __launch_bounds__(64) {name}(int* __restrict__ a, int* __restrict__ y) {{\n'
    f"  extern __shared__ __align__(128) int s[];\n  int t = (int)threadIdx.x; (void)s;\n  {body}\n}}\n"
    for name, body in _BODIES.items()
)

# One warp: D (16, 8) = A (16, k) B (k, 8). Fragments come from row-major arrays: of 16-bit numbers by ldmatrix, else one by one.
_MMA16 = """
extern "C" __global__ void {name}(unsigned short* __restrict__ a, unsigned short* __restrict__ b, float* __restrict__ d) {{
  __shared__ __align__(16) unsigned short sa[256];
  __shared__ __align__(16) unsigned short sb[128];
  int l = threadIdx.x;
  for (int i = l; i < 256; i += 32) sa[i] = a[i];
  for (int i = l; i < 128; i += 32) sb[i] = b[i];
  __syncwarp();
  unsigned r[4], s[2];
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{%0, %1, %2, %3}}, [%4];"
    : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"((unsigned)__cvta_generic_to_shared(sa + l % 16 * 16 + l / 16 * 8)));
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {{%0, %1}}, [%2];" : "=r"(s[0]), "=r"(s[1])
    : "r"((unsigned)__cvta_generic_to_shared(sb + l % 16 * 8)));
  float c[4] = {{1, 1, 1, 1}};
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.{type}.{type}.f32 {{%0, %1, %2, %3}}, {{%4, %5, %6, %7}}, {{%8, %9}}, "
    "{{%0, %1, %2, %3}};" : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
    : "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]), "r"(s[0]), "r"(s[1]));
  for (int i = 0; i < 4; ++i) d[(l / 4 + i / 2 * 8) * 8 + l % 4 * 2 + i % 2] = c[i];
}}
"""
_MMA_TF32 = """
extern "C" __global__ void mma_tf32(float* __restrict__ a, float* __restrict__ b, float* __restrict__ d) {
  int g = threadIdx.x / 4, t = threadIdx.x % 4;
  unsigned r[4], s[2];
  for (int i = 0; i < 4; ++i) r[i] = __float_as_uint(a[(g + i % 2 * 8) * 8 + t + i / 2 * 4]);
  for (int i = 0; i < 2; ++i) s[i] = __float_as_uint(b[(t + 4 * i) * 8 + g]);
  float c[4];
  asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
    "{%10, %10, %10, %10};"
    : "=f"(c[0]), "=f"(c[1]), "=f"(c[2]), "=f"(c[3])
    : "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]), "r"(s[0]), "r"(s[1]), "f"(0.0f));
  for (int i = 0; i < 4; ++i) d[(g + i / 2 * 8) * 8 + t * 2 + i % 2] = c[i];
}
"""
_MMA_S8 = """
extern "C" __global__ void mma_s8(signed char* __restrict__ a, signed char* __restrict__ b, int* __restrict__ d) {
  int g = threadIdx.x / 4, t = threadIdx.x % 4;
  unsigned r[4] = {}, s[2] = {};
  for (int e = 0; e < 4; ++e) {
    for (int i = 0; i < 4; ++i) r[i] |= (unsigned)(unsigned char)a[(g + i % 2 * 8) * 32 + 4 * t + e + i / 2 * 16] << 8 * e;
    for (int i = 0; i < 2; ++i) s[i] |= (unsigned)(unsigned char)b[(4 * t + e + 16 * i) * 8 + g] << 8 * e;
  }
  int c[4];
  asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
    "{%10, %10, %10, %10};"
    : "=r"(c[0]), "=r"(c[1]), "=r"(c[2]), "=r"(c[3])
    : "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]), "r"(s[0]), "r"(s[1]), "r"(0));
  for (int i = 0; i < 4; ++i) d[(g + i / 2 * 8) * 8 + t * 2 + i % 2] = c[i];
}
"""
_MMA_4 = """
extern "C" __global__ void mma_{type}(signed char* __restrict__ a, signed char* __restrict__ b, int* __restrict__ d) {{
  int g = threadIdx.x / 4, t = threadIdx.x % 4;
  unsigned r[4] = {{}}, s[2] = {{}};
  for (int e = 0; e < 8; ++e) {{
    for (int i = 0; i < 4; ++i) r[i] |= (unsigned)(a[(g + i % 2 * 8) * 64 + 8 * t + e + i / 2 * 32] & 15) << 4 * e;
    for (int i = 0; i < 2; ++i) s[i] |= (unsigned)(b[(8 * t + e + 32 * i) * 8 + g] & 15) << 4 * e;
  }}
  int c[4];
  asm volatile("mma.sync.aligned.m16n8k64.row.col.s32.{type}.s4.s32 {{%0, %1, %2, %3}}, {{%4, %5, %6, %7}}, {{%8, %9}}, "
    "{{%10, %10, %10, %10}};"
    : "=r"(c[0]), "=r"(c[1]), "=r"(c[2]), "=r"(c[3])
    : "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]), "r"(s[0]), "r"(s[1]), "r"(0));
  for (int i = 0; i < 4; ++i) d[(g + i / 2 * 8) * 8 + t * 2 + i % 2] = c[i];
}}
"""
MMA_SOURCE = _MMA16.format(name="mma_f16", type="f16") + _MMA16.format(name="mma_bf16", type="bf16") + _MMA_TF32 + _MMA_S8
MMA_SOURCE += _MMA_4.format(type="s4") + _MMA_4.format(type="u4")

# One warpgroup: D (64, 8) = A (64, 64) B (64, 8) of float16, both K-major with the 128-byte swizzle, B given as (8, 64).
WGMMA_SOURCE = """
#define CHUNK(row, chunk) ((row) * 64 + (((chunk) ^ ((row) % 8)) * 8))
extern "C" __global__ void wgmma_f16(unsigned short* a, unsigned short* b, float* d) {
  extern __shared__ __align__(1024) unsigned short s[];
  int t = threadIdx.x, lane = t % 32;
  for (int i = t; i < 64 * 64; i += 128) s[CHUNK(i / 64, i % 64 / 8) + i % 8] = a[i];
  for (int i = t; i < 8 * 64; i += 128) s[4096 + CHUNK(i / 64, i % 64 / 8) + i % 8] = b[i];
  __syncthreads();
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  unsigned long long high = (1ull << 62) | (64ull << 32) | (1ull << 16);
  unsigned long long da = high | __cvta_generic_to_shared(s) >> 4, db = high | __cvta_generic_to_shared(s + 4096) >> 4;
  float c[4];
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
  for (int k = 0; k < 4; ++k)
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %6, 0; wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 "
      "{%0, %1, %2, %3}, %4, %5, p, 1, -1, 0, 0; }" : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "l"(da + 2 * k), "l"(db + 2 * k), "r"(k));
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
  WAIT;
  for (int i = 0; i < 4; ++i) d[(t / 32 * 16 + lane / 4 + i / 2 * 8) * 8 + lane % 4 * 2 + i % 2] = c[i];
}
"""
WGMMA_WAIT = 'asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory")'
