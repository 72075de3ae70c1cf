// CUDA functions and qualifiers that kernels use by name, on top of emu.hpp. Only what host g++ lacks after the CUDA headers.
#pragma once

#undef __forceinline__
#define __forceinline__ inline
#undef __launch_bounds__
#define __launch_bounds__(...)
#undef __restrict__
#define __restrict__  // fibers write behind the compiler's back
#undef __grid_constant__
#define __grid_constant__
#undef __global__
#define __global__
#undef __device__
#define __device__
#undef __host__
#define __host__
#undef __constant__
#define __constant__ static

inline void __syncthreads() { emu::barrier(0, 0, true, "__syncthreads"); }
inline void __syncwarp(unsigned mask = 0xffffffffu) { emu::sync_warp(mask, "__syncwarp"); }
inline void __threadfence() {}
inline void __threadfence_block() {}
inline void __threadfence_system() {}
inline void __nanosleep(unsigned) { emu::poll("__nanosleep"); }
[[noreturn]] inline void __trap() { emu::fail("__trap was called"); }

inline unsigned __cvta_generic_to_shared(const void* p) { return emu::to_shared(p); }
inline size_t __cvta_generic_to_global(const void* p) { return (size_t)p; }
inline unsigned __isShared(const void* p) { return emu::is_shared(p); }
template <class T>
T __ldg(const T* p) { return *p; }
template <class T>
T __ldcg(const T* p) { return *p; }
template <class T>
T __ldcs(const T* p) { return *p; }
template <class T>
void __stcs(T* p, T v) { *p = v; }
template <class T>
void __stcg(T* p, T v) { *p = v; }

namespace emu {
template <class T>  // C form of a shuffle: width must be a power of two
T shuffle_value(unsigned mask, Shuffle mode, T v, unsigned b, int width, const char* what) {
  constexpr int words = (sizeof(T) + 3) / 4;
  uint32_t w[words] = {};
  std::memcpy(w, &v, sizeof v);
  uint32_t c = (uint32_t)(32 - width) << 8 | (mode == Shuffle::up ? 0u : 31u);
  for (auto& word : w) word = shuffle(mask, mode, word, b, c, nullptr, what);
  std::memcpy(&v, w, sizeof v);
  return v;
}
}  // namespace emu
#undef __shfl_sync
#undef __shfl_up_sync
#undef __shfl_down_sync
#undef __shfl_xor_sync
template <class T>
T __shfl_sync(unsigned m, T v, int b, int w = 32) { return emu::shuffle_value(m, emu::Shuffle::idx, v, b, w, "__shfl_sync"); }
template <class T>
T __shfl_up_sync(unsigned m, T v, unsigned b, int w = 32) { return emu::shuffle_value(m, emu::Shuffle::up, v, b, w, "__shfl_up_sync"); }
template <class T>
T __shfl_down_sync(unsigned m, T v, unsigned b, int w = 32) {
  return emu::shuffle_value(m, emu::Shuffle::down, v, b, w, "__shfl_down_sync");
}
template <class T>
T __shfl_xor_sync(unsigned m, T v, int b, int w = 32) { return emu::shuffle_value(m, emu::Shuffle::bfly, v, b, w, "__shfl_xor_sync"); }
inline unsigned __ballot_sync(unsigned m, int p) { return emu::ballot(m, p != 0, "__ballot_sync"); }
inline int __any_sync(unsigned m, int p) { return emu::ballot(m, p != 0, "__any_sync") != 0; }
inline int __all_sync(unsigned m, int p) { return emu::ballot(m, p == 0, "__all_sync") == 0; }
inline unsigned __activemask() { return emu::live_lanes(); }

inline unsigned __byte_perm(unsigned a, unsigned b, unsigned s) { return emu::prmt(a, b, s & 0x7777); }
inline int __popc(unsigned v) { return __builtin_popcount(v); }
inline int __clz(unsigned v) { return v ? __builtin_clz(v) : 32; }
inline int __ffs(unsigned v) { return __builtin_ffs((int)v); }
inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)((uint64_t)a * b >> 32); }
inline int __mulhi(int a, int b) { return (int)((int64_t)a * b >> 32); }
inline unsigned __funnelshift_l(unsigned lo, unsigned hi, unsigned s) { return (unsigned)((((uint64_t)hi << 32 | lo) << (s & 31)) >> 32); }
inline unsigned __funnelshift_r(unsigned lo, unsigned hi, unsigned s) { return (unsigned)(((uint64_t)hi << 32 | lo) >> (s & 31)); }
inline int __dp4a(int a, int b, int c) {
  for (int i = 0; i < 32; i += 8) c += (int8_t)(a >> i) * (int8_t)(b >> i);
  return c;
}
inline float __int_as_float(int v) { return emu::f32((uint32_t)v); }
inline float __uint_as_float(unsigned v) { return emu::f32(v); }
inline int __float_as_int(float v) { return (int)emu::bits(v); }
inline unsigned __float_as_uint(float v) { return emu::bits(v); }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float __fmul_rn(float a, float b) { volatile float r = a * b; return r; }
inline float __fadd_rn(float a, float b) { volatile float r = a + b; return r; }
inline float __fsub_rn(float a, float b) { volatile float r = a - b; return r; }
inline float __fdividef(float a, float b) { return a / b; }
inline float __expf(float v) { return std::exp(v); }
inline float __logf(float v) { return std::log(v); }
inline float rsqrtf(float v) { return 1.0f / std::sqrt(v); }
inline int __float2int_rn(float v) { return emu::to_int<int>(std::nearbyint(v)); }
inline int __float2int_rz(float v) { return emu::to_int<int>(std::trunc(v)); }
inline float __int2float_rn(int v) { return (float)v; }
inline float __uint2float_rn(unsigned v) { return (float)v; }

// Library functions of CUDA's global namespace.
template <class A, class B>
std::enable_if_t<std::is_arithmetic_v<A> && std::is_arithmetic_v<B>, std::common_type_t<A, B>> max(A a, B b) {
  using C = std::common_type_t<A, B>;
  if constexpr (std::is_floating_point_v<C>) return std::fmax((C)a, (C)b);
  else return (C)a > (C)b ? (C)a : (C)b;
}
template <class A, class B>
std::enable_if_t<std::is_arithmetic_v<A> && std::is_arithmetic_v<B>, std::common_type_t<A, B>> min(A a, B b) {
  using C = std::common_type_t<A, B>;
  if constexpr (std::is_floating_point_v<C>) return std::fmin((C)a, (C)b);
  else return (C)a < (C)b ? (C)a : (C)b;
}

template <class T, class V, class F>
T emu_atomic(T* p, V v, F f) {  // fibers switch only inside emulator calls: a plain update is atomic
  T old = *p;
  *p = (T)f(old, (T)v);
  return old;
}
template <class T, class V>
T atomicAdd(T* p, V v) { return emu_atomic(p, v, [](T a, T b) { return a + b; }); }
template <class T, class V>
T atomicSub(T* p, V v) { return emu_atomic(p, v, [](T a, T b) { return a - b; }); }
template <class T, class V>
T atomicMax(T* p, V v) { return emu_atomic(p, v, [](T a, T b) { return a > b ? a : b; }); }
template <class T, class V>
T atomicMin(T* p, V v) { return emu_atomic(p, v, [](T a, T b) { return a < b ? a : b; }); }
template <class T, class V>
T atomicExch(T* p, V v) { return emu_atomic(p, v, [](T, T b) { return b; }); }
template <class T>
T atomicCAS(T* p, T compare, T v) {
  T old = *p;
  if (old == compare) *p = v;
  return old;
}
