// What a translated kernel sees: the CUDA names it uses and the entry points of the emulator (namespace emu).
//
// Read first: scheduler.cpp (threads as fibers), then collectives.cpp (mma, ldmatrix, shuffles) and memory.cpp (bounds, cp.async).
// Registers of inline PTX are raw bits: uint32_t for "r" and "f", uint64_t for "l" and "d", uint16_t for "h", bool for .pred.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

extern uint3 threadIdx, blockIdx;
extern dim3 blockDim, gridDim;
constexpr int warpSize = 32;

namespace emu {

[[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));

// -- registers ----------------------------------------------------------------------------------------

template <class T, class E>
T in(E e) {  // the value of an asm input operand as a register
  if constexpr (sizeof(E) == sizeof(T)) {
    T t;
    std::memcpy(&t, &e, sizeof t);
    return t;
  } else {
    return (T)e;
  }
}
template <class D, class T>
void out(D& d, T t) {  // a register into the lvalue of an asm output operand
  if constexpr (sizeof(D) == sizeof(T))
    std::memcpy(&d, &t, sizeof d);
  else
    d = (D)t;
}

inline float f32(uint32_t v) { return in<float>(v); }
inline double f64(uint64_t v) { return in<double>(v); }
inline uint32_t bits(float v) { return in<uint32_t>(v); }
inline uint64_t bits(double v) { return in<uint64_t>(v); }

struct Half {
  static float from(uint16_t v) { return (float)in<_Float16>(v); }
  static uint16_t to(double v) { return in<uint16_t>((_Float16)v); }
};
struct BFloat {
  static float from(uint16_t v) { return f32((uint32_t)v << 16); }
  static uint16_t to(double v);
};
float from_e4m3(uint8_t v);
float from_e5m2(uint8_t v);
uint8_t to_e4m3(float v);
uint8_t to_e5m2(float v);
uint32_t rna_tf32(uint32_t v);  // round to nearest, ties away, low 13 bits zero

// Elementwise on two packed 16-bit floats.
template <class H, class F, class... R>
uint32_t packed(F f, R... r) {
  uint32_t lo = H::to(f((double)H::from((uint16_t)r)...));
  uint32_t hi = H::to(f((double)H::from((uint16_t)(r >> 16))...));
  return lo | hi << 16;
}
template <class T>
T clamp01(T v) { return v > 0 ? (v < 1 ? v : T(1)) : T(0); }
template <class T>  // float to integer as cvt does: NaN is 0, out of range saturates
T to_int(double v) {
  if (std::isnan(v)) return 0;
  if (v <= (double)std::numeric_limits<T>::min()) return std::numeric_limits<T>::min();
  if (v >= (double)std::numeric_limits<T>::max()) return std::numeric_limits<T>::max();
  return (T)v;
}
uint32_t prmt(uint32_t a, uint32_t b, uint32_t selector);
uint32_t lop3(uint32_t a, uint32_t b, uint32_t c, uint32_t table);

// -- threads (scheduler.cpp) --------------------------------------------------------------------------

unsigned thread();  // linear thread index in the block
inline unsigned lane() { return thread() % 32; }
uint32_t live_lanes();  // lanes of this warp that have not exited
void barrier(unsigned id, unsigned count, bool wait, const char* what);  // count 0: every live thread of the block
unsigned cluster_rank();  // of the running block
unsigned cluster_size();
void cluster_arrive();
void cluster_wait(const char* what);
void poll(const char* what);  // let the others run, then return

// The lanes of `mask` meet here; the last one calls compute with every lane's `mine` (null where a lane takes no part).
using Compute = void (*)(void* const* lanes, const void* argument);
void meet(uint32_t mask, const char* what, void* mine, Compute compute, const void* argument);
void meet_warpgroup(const char* what, void* mine, Compute compute, const void* argument);  // 128 threads

// -- warp operations (collectives.cpp) ----------------------------------------------------------------

enum class Type { f16, bf16, tf32, s4, u4, s8, u8, e4m3, e5m2, f64, f32, s32 };
struct Mma { uint64_t a[8], b[4], c[4], d[4]; };
void mma(Mma& x, Type a, Type b, Type acc, int k, bool saturate, const char* what);  // m16n8k, and m8n8k4 for f64
void ldmatrix(uint32_t address, int n, bool trans, uint32_t* d, const char* what);
void stmatrix(uint32_t address, int n, bool trans, const uint32_t* s, const char* what);
uint32_t movmatrix(uint32_t a);
enum class Shuffle { idx, up, down, bfly };
uint32_t shuffle(uint32_t mask, Shuffle mode, uint32_t v, uint32_t b, uint32_t c, bool* valid, const char* what);
uint32_t ballot(uint32_t mask, bool p, const char* what);
void sync_warp(uint32_t mask, const char* what);
uint32_t elect(uint32_t mask, bool* leader, const char* what);
enum class Reduce { add, min, max, umin, umax, iand, ior, ixor };
uint32_t redux(uint32_t mask, Reduce op, uint32_t v, const char* what);

// -- warpgroup products (wgmma.cpp) -------------------------------------------------------------------

struct Wgmma { uint64_t a[4], b; uint32_t d[128]; bool a_shared, add, a_turned, b_turned; int sign_a, sign_b; };  // d: in and out; turned: MN-major
void wgmma(Wgmma& x, Type a, Type b, Type acc, int n, int k, const char* what);
void wgmma_commit();
void wgmma_wait(unsigned groups);

// -- memory (memory.cpp) ------------------------------------------------------------------------------

void* dynamic_shared();
void* static_shared(size_t bytes, size_t align);  // a new range; called once for each declaration
uint32_t to_shared(const void* p);                // generic pointer -> shared address
void* from_shared(uint32_t address);
bool is_shared(const void* p);
uint32_t map_shared(uint32_t address, unsigned rank);  // mapa: the address in another block of the cluster
void* shared(uint64_t address, size_t bytes, const char* what);  // bounds- and alignment-checked host pointers
void* global(uint64_t address, size_t bytes, const char* what);
void* generic(uint64_t address, size_t bytes, const char* what);
void* constant(uint64_t address, size_t bytes, const char* what);

void cp_async(uint64_t dst, uint64_t src, unsigned bytes, unsigned src_bytes, const char* what);
void cp_async_commit();
void cp_async_wait(unsigned groups);  // all but the newest `groups`
void cp_async_wait_all();
void cp_async_mbarrier(uint64_t bar, bool counted, const char* what);
void bulk_load(uint64_t dst, uint64_t src, uint64_t bytes, uint64_t bar, const char* what);
void bulk_send(uint64_t dst, uint64_t src, uint64_t bytes, uint64_t bar, const char* what);
void bulk_store(uint64_t dst, uint64_t src, uint64_t bytes, const char* what);
void bulk_commit();
void bulk_wait(unsigned groups);
void tensor_load(uint64_t dst, uint64_t map, const int* at, unsigned rank, uint64_t bar, uint32_t blocks, const char* what);  // tensor.cpp
void tensor_store(uint64_t map, const int* at, unsigned rank, uint64_t src, const char* what);
void mbar_init(uint64_t bar, uint32_t count);
void mbar_expect(uint64_t bar, uint32_t bytes);
uint64_t mbar_arrive(uint64_t bar, uint32_t count, const char* what);
void mbar_complete(uint64_t bar, uint32_t bytes);
bool mbar_test(uint64_t bar, uint64_t state, bool parity, bool block, const char* what);

// Kernel launch: what run.py calls through ctypes. Returns null, or the error as one line.
struct Launch { dim3 grid, block; unsigned dynamic_bytes, order, seed, cluster; uint64_t max_blocks; };
const char* launch(const Launch& l, void (*body)(void*), void* argument);

template <class A>
A argument(void* p) {  // pointers as they are, anything else (a tensor map) by value from where p points
  if constexpr (std::is_pointer_v<A>) return (A)p;
  else return *(const A*)p;
}
template <class... A, size_t... I>
void call(void (*kernel)(A...), void** args, std::index_sequence<I...>) { kernel(argument<A>(args[I])...); }
template <class... A>
const char* run(void (*kernel)(A...), void** args, unsigned n, const Launch& l) {
  static_assert(((std::is_pointer_v<A> || sizeof(A) == 128) && ...), "kernel parameters must be pointers or tensor maps");
  if (n != sizeof...(A)) return "the kernel has another number of parameters than its launch";
  struct Bound { void (*kernel)(A...); void** args; } bound{kernel, args};
  return launch(l, [](void* p) { auto* b = (Bound*)p; call(b->kernel, b->args, std::index_sequence_for<A...>{}); }, &bound);
}

}  // namespace emu

#define EMU_KERNEL(name) \
  extern "C" const char* emu_run_##name(void** args, unsigned n, const emu::Launch* l) { return emu::run(name, args, n, *l); }

#include "cuda_names.hpp"
