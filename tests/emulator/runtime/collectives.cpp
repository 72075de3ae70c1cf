// Operations of a whole warp: tensor-core products, ldmatrix and its relatives, shuffles, votes, reductions.
//
// Fragment layouts are those of the PTX ISA: with g = lane / 4, t = lane % 4 and E elements in a 32-bit register, register r of A
// holds row g + 8 (r % 2), columns E t + e + 4 E (r / 2); of B row E t + e + 4 E r, column g; C has two columns 2 t, 2 t + 1.
#include "internal.hpp"

namespace emu {

int elements(Type t) {
  switch (t) {
    case Type::f16: case Type::bf16: return 2;
    case Type::s8: case Type::u8: case Type::e4m3: case Type::e5m2: return 4;
    case Type::s4: case Type::u4: return 8;
    default: return 1;
  }
}

double element(Type t, uint64_t reg, int e) {
  switch (t) {
    case Type::f16: return Half::from((uint16_t)(reg >> 16 * e));
    case Type::bf16: return BFloat::from((uint16_t)(reg >> 16 * e));
    case Type::tf32: return f32((uint32_t)reg & 0xffffe000u);
    case Type::s8: return (int8_t)(reg >> 8 * e);
    case Type::u8: return (uint8_t)(reg >> 8 * e);
    case Type::s4: return (int8_t)(reg >> 4 * e << 4) >> 4;
    case Type::u4: return reg >> 4 * e & 15;
    case Type::e4m3: return from_e4m3((uint8_t)(reg >> 8 * e));
    case Type::e5m2: return from_e5m2((uint8_t)(reg >> 8 * e));
    case Type::f64: return f64(reg);
    default: fail("mma: operand type");
  }
}

namespace {

struct Shape { Type a, b, acc; int k, m; bool saturate; };

template <class T>
void multiply(Mma* const* lanes, const Shape& s) {
  static T a[16][64], b[64][8];
  const int ea = elements(s.a), regs_b = s.k / (4 * ea), regs_a = regs_b * (s.m / 8), halves = s.m / 8;
  for (int l = 0; l < 32; ++l) {
    const int g = l / 4, t = l % 4;
    for (int r = 0; r < regs_a; ++r)
      for (int e = 0; e < ea; ++e) a[g + 8 * (r % halves)][ea * t + e + 4 * ea * (r / halves)] = (T)element(s.a, lanes[l]->a[r], e);
    for (int r = 0; r < regs_b; ++r)
      for (int e = 0; e < ea; ++e) b[ea * t + e + 4 * ea * r][g] = (T)element(s.b, lanes[l]->b[r], e);
  }
  for (int l = 0; l < 32; ++l)
    for (int i = 0; i < 2 * halves; ++i) {
      const int row = l / 4 + 8 * (i / 2), col = l % 4 * 2 + i % 2;
      T sum = 0;
      for (int k = 0; k < s.k; ++k) sum += a[row][k] * b[k][col];
      Mma& x = *lanes[l];
      if (s.acc == Type::f32) {
        x.d[i] = bits((float)sum + f32((uint32_t)x.c[i]));
      } else if (s.acc == Type::f64) {
        x.d[i] = bits((double)sum + f64(x.c[i]));
      } else if (s.acc == Type::s32) {
        int64_t v = (int64_t)sum + (int32_t)x.c[i];
        x.d[i] = (uint32_t)(s.saturate ? to_int<int32_t>((double)v) : (int32_t)v);
      } else {  // f16: two elements a register
        const int shift = 16 * (i % 2);
        uint64_t h = Half::to((double)sum + Half::from((uint16_t)(x.c[i / 2] >> shift)));
        x.d[i / 2] = (x.d[i / 2] & ~(0xffffull << shift)) | h << shift;
      }
    }
}

struct Matrix { uint32_t address; uint32_t r[4]; };

struct Shape8 { int n; bool trans; const char* what; };

// Element (row, col) of matrix i as register and shift of a lane.
void place(bool trans, int lane, int e, int& row, int& col) {
  row = lane / 4, col = lane % 4 * 2 + e;
  if (trans) std::swap(row, col);
}

template <bool Store>
void move_matrix(void* const* all, const void* argument) {
  auto& s = *(const Shape8*)argument;
  auto* const* lanes = (Matrix* const*)all;
  for (int i = 0; i < s.n; ++i) {
    uint16_t* rows[8];
    for (int j = 0; j < 8; ++j) rows[j] = (uint16_t*)shared(lanes[8 * i + j]->address, 16, s.what);
    for (int l = 0; l < 32; ++l) {
      if (!Store) lanes[l]->r[i] = 0;
      for (int e = 0; e < 2; ++e) {
        int row, col;
        place(s.trans, l, e, row, col);
        if (Store) rows[row][col] = (uint16_t)(lanes[l]->r[i] >> 16 * e);
        else lanes[l]->r[i] |= (uint32_t)rows[row][col] << 16 * e;
      }
    }
  }
}

struct Shuffled { uint32_t v, b, c, out; bool valid; };

}  // namespace

void mma(Mma& x, Type a, Type b, Type acc, int k, bool saturate, const char* what) {
  struct Call { Shape s; const char* what; } c{{a, b, acc, k, a == Type::f64 && k == 4 && std::strstr(what, "m8n8k4") ? 8 : 16, saturate}, what};
  meet(0xffffffffu, what, &x, [](void* const* all, const void* argument) {
    auto& call = *(const Call*)argument;
    for (int l = 0; l < 32; ++l)
      if (!all[l]) fail("%s: lane %d has exited", call.what, l);
    if (call.s.a == Type::f64 || call.s.acc == Type::s32) multiply<double>((Mma* const*)all, call.s);
    else multiply<float>((Mma* const*)all, call.s);
  }, &c);
}

void ldmatrix(uint32_t address, int n, bool trans, uint32_t* d, const char* what) {
  Matrix x{address, {}};
  Shape8 s{n, trans, what};
  meet(0xffffffffu, what, &x, move_matrix<false>, &s);
  std::memcpy(d, x.r, 4 * (size_t)n);
}

void stmatrix(uint32_t address, int n, bool trans, const uint32_t* v, const char* what) {
  Matrix x{address, {}};
  std::memcpy(x.r, v, 4 * (size_t)n);
  Shape8 s{n, trans, what};
  meet(0xffffffffu, what, &x, move_matrix<true>, &s);
}

uint32_t movmatrix(uint32_t a) {
  Matrix x{0, {a}};
  meet(0xffffffffu, "movmatrix", &x, [](void* const* all, const void*) {
    uint16_t m[8][8];
    for (int l = 0; l < 32; ++l)
      for (int e = 0; e < 2; ++e) m[l / 4][l % 4 * 2 + e] = (uint16_t)(((Matrix*)all[l])->r[0] >> 16 * e);
    for (int l = 0; l < 32; ++l) ((Matrix*)all[l])->r[0] = m[l % 4 * 2][l / 4] | (uint32_t)m[l % 4 * 2 + 1][l / 4] << 16;
  }, nullptr);
  return x.r[0];
}

uint32_t shuffle(uint32_t mask, Shuffle mode, uint32_t v, uint32_t b, uint32_t c, bool* valid, const char* what) {
  Shuffled x{v, b, c, 0, false};
  meet(mask, what, &x, [](void* const* all, const void* argument) {
    Shuffle kind = *(const Shuffle*)argument;
    for (int l = 0; l < 32; ++l) {
      auto* s = (Shuffled*)all[l];
      if (!s) continue;
      int clamp = s->c & 31, segment = s->c >> 8 & 31, by = s->b & 31;
      int top = (l & segment) | (clamp & ~segment), low = l & segment, from;
      if (kind == Shuffle::up) from = l - by, s->valid = from >= top;
      else if (kind == Shuffle::down) from = l + by, s->valid = from <= top;
      else if (kind == Shuffle::bfly) from = l ^ by, s->valid = from <= top;
      else from = low | (by & ~segment), s->valid = from <= top;
      if (!s->valid) from = l;
      s->out = all[from] ? ((Shuffled*)all[from])->v : 0xffffffffu;  // a lane that takes no part: undefined
    }
  }, &mode);
  if (valid) *valid = x.valid;
  return x.out;
}

uint32_t ballot(uint32_t mask, bool p, const char* what) {
  Shuffled x{p, 0, 0, 0, false};
  meet(mask, what, &x, [](void* const* all, const void*) {
    uint32_t votes = 0;
    for (int l = 0; l < 32; ++l)
      if (all[l] && ((Shuffled*)all[l])->v) votes |= 1u << l;
    for (int l = 0; l < 32; ++l)
      if (all[l]) ((Shuffled*)all[l])->out = votes;
  }, nullptr);
  return x.out;
}

void sync_warp(uint32_t mask, const char* what) {
  meet(mask, what, nullptr, [](void* const*, const void*) {}, nullptr);
}

uint32_t elect(uint32_t mask, bool* leader, const char* what) {
  uint32_t first = (uint32_t)__builtin_ctz(ballot(mask, true, what));
  *leader = lane() == first;
  return first;
}

uint32_t redux(uint32_t mask, Reduce op, uint32_t v, const char* what) {
  Shuffled x{v, 0, 0, 0, false};
  meet(mask, what, &x, [](void* const* all, const void* argument) {
    Reduce kind = *(const Reduce*)argument;
    bool first = true;
    uint32_t r = 0;
    for (int l = 0; l < 32; ++l) {
      if (!all[l]) continue;
      uint32_t w = ((Shuffled*)all[l])->v;
      if (first) r = w;
      else if (kind == Reduce::add) r += w;
      else if (kind == Reduce::min) r = (int32_t)w < (int32_t)r ? w : r;
      else if (kind == Reduce::max) r = (int32_t)w > (int32_t)r ? w : r;
      else if (kind == Reduce::umin) r = w < r ? w : r;
      else if (kind == Reduce::umax) r = w > r ? w : r;
      else if (kind == Reduce::iand) r &= w;
      else if (kind == Reduce::ior) r |= w;
      else r ^= w;
      first = false;
    }
    for (int l = 0; l < 32; ++l)
      if (all[l]) ((Shuffled*)all[l])->out = r;
  }, &op);
  return x.out;
}

// -- bits ---------------------------------------------------------------------------------------------

uint16_t BFloat::to(double v) {
  uint32_t u = emu::bits((float)v);
  if (std::isnan(v)) return 0x7fff;
  return (uint16_t)((u + 0x7fffu + (u >> 16 & 1)) >> 16);
}

uint32_t rna_tf32(uint32_t v) { return (v & 0x7f800000u) == 0x7f800000u ? v : (v + 0x1000u) & 0xffffe000u; }

uint32_t prmt(uint32_t a, uint32_t b, uint32_t selector) {
  uint64_t all = (uint64_t)b << 32 | a;
  uint32_t r = 0;
  for (int i = 0; i < 4; ++i) {
    uint32_t s = selector >> 4 * i & 15, byte = (uint32_t)(all >> 8 * (s & 7)) & 255;
    if (s & 8) byte = byte & 128 ? 255 : 0;  // the sign replicated
    r |= byte << 8 * i;
  }
  return r;
}

uint32_t lop3(uint32_t a, uint32_t b, uint32_t c, uint32_t table) {
  uint32_t r = 0;
  for (uint32_t i = 0; i < 8; ++i)
    if (table >> i & 1) r |= (i & 4 ? a : ~a) & (i & 2 ? b : ~b) & (i & 1 ? c : ~c);
  return r;
}

float from_e4m3(uint8_t v) { return Half::from(__half_raw(__nv_cvt_fp8_to_halfraw(v, __NV_E4M3)).x); }
float from_e5m2(uint8_t v) { return Half::from(__half_raw(__nv_cvt_fp8_to_halfraw(v, __NV_E5M2)).x); }
uint8_t to_e4m3(float v) { return __nv_cvt_float_to_fp8(v, __NV_SATFINITE, __NV_E4M3); }
uint8_t to_e5m2(float v) { return __nv_cvt_float_to_fp8(v, __NV_SATFINITE, __NV_E5M2); }

}  // namespace emu
