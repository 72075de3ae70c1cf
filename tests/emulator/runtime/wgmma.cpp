// wgmma: products of a warpgroup (128 threads) with operand B, and A or its registers, read from shared memory by descriptor.
//
// The product is computed when the last of the 128 threads arrives, not between issue and wait: shared memory that is overwritten too
// early, and accumulators read before wgmma.wait_group, are not noticed. What is: a thread that exits with a product in flight.
#include "internal.hpp"

namespace emu {
namespace {

struct Call { Type a, b, acc; int n, k; const char* what; };

int size_of(Type t) { return t == Type::tf32 ? 4 : t == Type::f16 || t == Type::bf16 ? 2 : 1; }

// Element (row, k) of an operand: row of A, or column of B. turned: rows, not k, are neighbours in memory (16-bit types only).
double from_shared_memory(uint64_t descriptor, Type t, bool turned, int row, int k, const char* what) {
  const uint64_t start = (descriptor & 0x3fff) << 4, leading = (descriptor >> 16 & 0x3fff) << 4, stride = (descriptor >> 32 & 0x3fff) << 4;
  const unsigned layout = (unsigned)(descriptor >> 62), byte = (unsigned)(k * size_of(t));
  if (descriptor >> 49 & 7) fail("%s: a descriptor with a base offset", what);
  uint64_t at = start + (uint64_t)(row / 8) * stride;
  if (turned) {  // core matrices of 8 k, as wide as the swizzle
    const unsigned width = layout ? 256u >> layout : 16, rows = width / 2;
    at = start + row / rows * (layout ? leading : stride) + k / 8 * (layout ? stride : leading) + k % 8 * width + row % rows * 2;
    if (layout) at ^= (at >> 7 & (width / 16 - 1)) << 4;
  } else if (layout == 0) {  // core matrices of 8 rows of 16 bytes
    at += byte / 16 * leading + (uint64_t)(row % 8) * 16 + byte % 16;
  } else {
    const unsigned width = 256u >> layout;  // 1: 128 bytes, 2: 64, 3: 32
    at += (uint64_t)(row % 8) * width + byte;
    at ^= (at >> 7 & (width / 16 - 1)) << 4;
  }
  uint32_t v = 0;
  std::memcpy(&v, shared(at, (size_t)size_of(t), what), (size_t)size_of(t));
  return element(t, v, 0);
}

template <class T>
void multiply(Wgmma* const* threads, const Call& c) {
  static T a[64][32], b[256][32];
  const Wgmma& first = *threads[0];
  const int e = elements(c.a);
  for (int r = 0; r < c.n; ++r)
    for (int k = 0; k < c.k; ++k) b[r][k] = (T)from_shared_memory(first.b, c.b, first.b_turned, r, k, c.what) * (T)first.sign_b;
  if (first.a_shared) {
    for (int r = 0; r < 64; ++r)
      for (int k = 0; k < c.k; ++k) a[r][k] = (T)from_shared_memory(first.a[0], c.a, first.a_turned, r, k, c.what);
  } else {
    for (int l = 0; l < 128; ++l)
      for (int r = 0; r < 4; ++r)
        for (int i = 0; i < e; ++i)
          a[l / 32 * 16 + l % 32 / 4 + 8 * (r % 2)][e * (l % 4) + i + 4 * e * (r / 2)] = (T)element(c.a, threads[l]->a[r], i);
  }
  for (int l = 0; l < 128; ++l) {
    Wgmma& x = *threads[l];
    if (x.b != first.b || x.add != first.add || (x.a_shared && x.a[0] != first.a[0]))
      fail("%s: the threads of a warpgroup give different descriptors or scale-d", c.what);
    for (int i = 0; i < c.n / 2; ++i) {
      const int row = l / 32 * 16 + l % 32 / 4 + 8 * (i / 2 % 2), col = i / 4 * 8 + l % 4 * 2 + i % 2;
      T sum = 0;
      for (int k = 0; k < c.k; ++k) sum += a[row][k] * b[col][k];
      sum *= (T)first.sign_a;
      if (c.acc == Type::f32) {
        x.d[i] = bits((float)sum + (x.add ? f32(x.d[i]) : 0.0f));
      } else if (c.acc == Type::s32) {
        x.d[i] = (uint32_t)((int64_t)sum + (x.add ? (int32_t)x.d[i] : 0));
      } else {
        const int shift = 16 * (i % 2);
        uint32_t h = Half::to((double)sum + (x.add ? Half::from((uint16_t)(x.d[i / 2] >> shift)) : 0.0));
        x.d[i / 2] = (x.d[i / 2] & ~(0xffffu << shift)) | h << shift;
      }
    }
  }
}

}  // namespace

void wgmma(Wgmma& x, Type a, Type b, Type acc, int n, int k, const char* what) {
  Call c{a, b, acc, n, k, what};
  ++self().wgmma_open;
  meet_warpgroup(what, &x, [](void* const* all, const void* argument) {
    auto& call = *(const Call*)argument;
    if (call.acc == Type::s32) multiply<double>((Wgmma* const*)all, call);
    else multiply<float>((Wgmma* const*)all, call);
  }, &c);
}

void wgmma_commit() {
  Fiber& f = self();
  if (f.wgmma_open) ++f.wgmma_groups;
  f.wgmma_open = 0;
}

void wgmma_wait(unsigned groups) {
  if (self().wgmma_groups > groups) self().wgmma_groups = groups;
}

}  // namespace emu
