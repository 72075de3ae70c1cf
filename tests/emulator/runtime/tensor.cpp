// Tensor copies (TMA): cp.async.bulk.tensor between a tensor in global memory and a box in shared memory, by a tensor map.
//
// A map is 128 bytes, as on the GPU, but with fields of our own (see tests/emulator/run.py); kernels get it by value. Copies are
// asynchronous as those of memory.cpp are. What lies beyond the tensor's ends reads as zero and is not written.
//
// im2col mode, for NHWC: coordinates c, w, h, n, then the offsets of the kernel's tap along w and h. From pixel (w, h) of image n
// on, pixels are taken in steps inside of the window of each image, line by line and image by image; the tap's offsets are added.
#include <algorithm>

#include "internal.hpp"

namespace emu {
namespace {

constexpr unsigned kChunk = 16;  // bytes that a swizzle moves as a whole

struct Map {
  uint64_t base;
  uint32_t rank, item, swizzle, magic, extents[5], box[5];
  uint64_t strides[4];  // of dimensions 1…
  uint32_t steps[2];    // im2col mode, along w and h; else 0
  int32_t lower[2], upper[2];
};
static_assert(sizeof(Map) <= 128, "a kernel's parameter holds no more");
constexpr uint32_t kMagic = 0x544d4150;

const Map& map_at(uint64_t address, unsigned rank, const char* what) {
  const Map& m = *(const Map*)address;
  if (address % 64 || m.magic != kMagic) fail("%s: no tensor map at address 0x%lx", what, (unsigned long)address);
  if (m.rank != rank) fail("%s: the tensor map has %u dimensions", what, m.rank);
  return m;
}

uint64_t swizzled(uint64_t address, uint32_t swizzle) {  // 1, 2, 3: 32, 64, 128 bytes
  return address ^ (address >> 7 & ((1u << swizzle) - 1)) << 4;
}

// Calls f(pixel's address or 0 outside of the tensor, its row) for each pixel of a copy in im2col mode.
template <class F>
void each_pixel(const Map& m, const int* at, F f) {
  int64_t place[3] = {at[1], at[2], at[3]};
  for (unsigned row = 0; row < m.box[1]; ++row) {
    bool inside = true;
    uint64_t source = m.base;
    for (unsigned d = 0; d < 3; ++d) {
      int64_t index = place[d] + (d < 2 ? at[4 + d] : 0);
      inside &= index >= 0 && index < m.extents[d + 1];
      source += index * m.strides[d];
    }
    f(inside ? source : 0, row);
    place[0] += m.steps[0];
    for (unsigned d = 0; d < 2 && place[d] >= (int64_t)m.extents[d + 1] + m.upper[d]; ++d) {
      place[d] = m.lower[d];
      place[d + 1] += d ? 1 : m.steps[1];
    }
  }
}

// Calls f(shared address, global address, bytes, bytes of them inside the tensor) for each piece of a box.
template <class F>
void each_piece(const Map& m, const int* at, uint64_t shared_address, F f) {
  unsigned rows = 1, row_bytes = m.box[0] * m.item;
  for (unsigned d = 1; d < m.rank; ++d) rows *= m.box[d];
  for (unsigned row = 0; row < rows; ++row) {
    bool inside = true;
    uint64_t source = m.base;
    for (unsigned d = 1, rest = row; d < m.rank; rest /= m.box[d++]) {
      int64_t index = at[d] + (int64_t)(rest % m.box[d]);
      inside &= index >= 0 && index < m.extents[d];
      source += index * m.strides[d - 1];
    }
    for (unsigned byte = 0; byte < row_bytes; byte += kChunk) {
      int64_t first = (int64_t)at[0] * m.item + byte, end = (int64_t)m.extents[0] * m.item;
      uint64_t to = swizzled(shared_address + row * row_bytes + byte, m.swizzle);
      if (first >= 0 || first + kChunk <= 0) {
        unsigned present = inside && first >= 0 ? (unsigned)std::clamp<int64_t>(end - first, 0, kChunk) : 0;
        f(to, source + first, kChunk, present);
        continue;
      }
      for (unsigned b = 0; b < kChunk; b += m.item)  // the tensor begins within the chunk
        f(to + b, source + first + b, m.item, inside && first + b >= 0 && first + b < end ? m.item : 0);
    }
  }
}

uint64_t box_bytes(const Map& m) {
  uint64_t bytes = m.item;
  for (unsigned d = 0; d < (m.steps[0] ? 2 : m.rank); ++d) bytes *= m.box[d];
  return bytes;
}

void check_box(const Map& m, uint64_t address, const char* what) {
  unsigned align = m.swizzle ? 128u << m.swizzle : 128u;  // a swizzle repeats after so many bytes
  if ((address & 0xffffff) % align) fail("%s: shared address 0x%lx, no multiple of %u", what, (unsigned long)address, align);
  shared(address, 16, what), shared(address + box_bytes(m) - 16, 16, what);
}

}  // namespace

void tensor_load(uint64_t dst, uint64_t map, const int* at, unsigned rank, uint64_t bar, uint32_t blocks, const char* what) {
  if (blocks) {  // multicast: the same offsets in every block of the mask
    for (unsigned b = 0; b < 32; ++b)
      if (blocks >> b & 1) tensor_load(map_shared((uint32_t)dst, b), map, at, rank, map_shared((uint32_t)bar, b), 0, what);
    return;
  }
  const Map& m = map_at(map, rank, what);
  check_box(m, dst, what);
  std::vector<Copy> copies;
  if (m.steps[0]) {
    for (unsigned d = 0; d < 2; ++d)
      if (at[1 + d] < m.lower[d] || at[1 + d] >= (int64_t)m.extents[d + 1] + m.upper[d]) fail("%s: pixel %d, %d is not in the window", what, at[1], at[2]);
    const unsigned bytes = m.box[0] * m.item;
    if (at[0] < 0 || (uint64_t)at[0] * m.item + bytes > (uint64_t)m.extents[0] * m.item) fail("%s: channels beyond the last", what);
    each_pixel(m, at, [&](uint64_t source, unsigned row) {
      for (unsigned byte = 0; byte < bytes; byte += kChunk) {
        const uint64_t from = source + (uint64_t)at[0] * m.item + byte;
        if (source) in_array(from, kChunk, what);
        copies.push_back({(char*)from_shared((uint32_t)swizzled(dst + row * bytes + byte, m.swizzle)), (const char*)from, kChunk, source ? kChunk : 0});
      }
    });
    expect_copies(bar, std::move(copies), box_bytes(m));
    return;
  }
  each_piece(m, at, dst, [&](uint64_t to, uint64_t from, unsigned bytes, unsigned present) {
    if (present) in_array(from, present, what);
    copies.push_back({(char*)from_shared((uint32_t)to), (const char*)from, bytes, present});
  });
  expect_copies(bar, std::move(copies), box_bytes(m));
}

void tensor_store(uint64_t map, const int* at, unsigned rank, uint64_t src, const char* what) {
  const Map& m = map_at(map, rank, what);
  check_box(m, src, what);
  each_piece(m, at, src, [&](uint64_t from, uint64_t to, unsigned, unsigned present) {
    if (!present) return;
    in_array(to, present, what);
    self().bulk_open.push_back({(char*)to, (const char*)from_shared((uint32_t)from), present, present});
  });
}

}  // namespace emu
