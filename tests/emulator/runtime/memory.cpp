// Memory of the emulated GPU: arrays between guard pages, the shared arena, cp.async, bulk copies and mbarriers.
//
// Asynchronous copies are modelled by their worst case in both directions: the destination is poisoned when the copy is issued and
// filled when it is waited for, so that a missing wait and an overwrite of data still in use both give NaN.
#include <cstdio>
#include <map>
#include <sys/mman.h>

#include "internal.hpp"

namespace emu {
namespace {

constexpr size_t kPage = 4096, kStaticBytes = 16 << 10, kDynamicAt = kPage + kStaticBytes;
constexpr size_t kArena = 256 << 10;  // what the 14 bits of a wgmma descriptor's address reach
constexpr size_t kGuard = 64 << 20;  // unmapped on each side of an array: a wild index must not land in another one
constexpr unsigned char kPoison = 0xFF;
constexpr unsigned kRankBit = 24;

struct Array { std::string name; char *map, *base; size_t map_bytes, bytes; };
std::vector<Array> arrays;
char* arenas[kMostBlocks];      // of the blocks of a cluster
char* arena = nullptr;          // of the running block
unsigned rank = 0, blocks = 1;  // of the running block, in the cluster
size_t static_used = 0, dynamic_used = 0, sized[kMostBlocks];

struct Mbarrier { uint32_t expected, pending; int64_t bytes; uint64_t phase; std::vector<Copy> copies; };
std::map<uint32_t, Mbarrier> mbarriers[kMostBlocks];

size_t up(size_t n, size_t to) { return (n + to - 1) / to * to; }

char* shared_arena() {
  if (!arenas[rank]) {
    arena = arenas[rank] = (char*)mmap(nullptr, kArena + kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    mprotect(arena, kPage, PROT_NONE);
    mprotect(arena + kArena, kPage, PROT_NONE);
  }
  return arena = arenas[rank];
}

unsigned owner(uint64_t address) {  // addresses from mapa hold the rank of a block of the cluster above bit 24
  unsigned of = address >> kRankBit ? (unsigned)(address >> kRankBit) - 1 : rank;
  if (of >= blocks) fail("shared address 0x%lx is of block %u of a cluster of %u", (long)address, of, blocks);
  return of;
}
uint64_t within(uint64_t address) { return address & ((1ull << kRankBit) - 1); }

void poison(void* p, size_t n) { std::memset(p, kPoison, n); }

void land(const Copy& c) {
  std::memcpy(c.dst, c.src, c.src_bytes);
  std::memset(c.dst + c.src_bytes, 0, c.bytes - c.src_bytes);
}

void land(std::vector<std::vector<Copy>>& groups, size_t keep) {
  while (groups.size() > keep) {
    for (const Copy& c : groups.front()) land(c);
    groups.erase(groups.begin());
  }
}

void check_align(uint64_t address, size_t bytes, const char* what) {
  size_t align = bytes > 16 ? 16 : bytes;
  if (address % align) fail("misaligned access: %s at address 0x%lx, no multiple of %zu", what, (long)address, align);
}

Mbarrier& find(uint64_t address) {
  shared(address, 8, "mbarrier");
  auto& all = mbarriers[owner(address)];
  auto found = all.find((uint32_t)within(address));
  if (found == all.end()) fail("mbarrier at shared address 0x%lx was not initialised", (long)address);
  return found->second;
}

void advance(Mbarrier& m) {
  if (m.pending || m.bytes) return;
  m.pending = m.expected;
  ++m.phase;
}

}  // namespace

// -- the block's shared memory ------------------------------------------------------------------------

void enter_block(unsigned number, unsigned of) {
  rank = number, blocks = of;
  arena = arenas[rank];
}

uint32_t map_shared(uint32_t address, unsigned of) {
  uint32_t mapped = (uint32_t)within(address) | (of + 1) << kRankBit;
  owner(mapped);
  return mapped;
}

void begin_block(unsigned dynamic_bytes) {
  char* a = shared_arena();
  if (dynamic_bytes > kArena - kDynamicAt) fail("%u bytes of dynamic shared memory", dynamic_bytes);
  if (dynamic_bytes != sized[rank]) {
    mprotect(a + kDynamicAt, kArena - kDynamicAt, PROT_READ | PROT_WRITE);
    size_t end = up(kDynamicAt + dynamic_bytes, kPage);
    if (end < kArena) mprotect(a + end, kArena - end, PROT_NONE);
  }
  dynamic_used = sized[rank] = dynamic_bytes;
  poison(a + kPage, kStaticBytes);
  poison(a + kDynamicAt, up(kDynamicAt + dynamic_bytes, kPage) - kDynamicAt);
  mbarriers[rank].clear();
}

void end_block() {
  size_t end = kDynamicAt + dynamic_used;
  for (size_t i = end; i < up(end, kPage); ++i)
    if ((unsigned char)arena[i] != kPoison)
      fail("block (%u,%u,%u) wrote %zu bytes past the end of its %zu bytes of dynamic shared memory", blockIdx.x, blockIdx.y,
           blockIdx.z, i - end + 1, dynamic_used);
  for (size_t i = kPage + static_used; i < kDynamicAt; ++i)
    if ((unsigned char)arena[i] != kPoison)
      fail("block (%u,%u,%u) wrote out of bounds between static and dynamic shared memory", blockIdx.x, blockIdx.y, blockIdx.z);
}

void* dynamic_shared() { return shared_arena() + kDynamicAt; }

void* static_shared(size_t bytes, size_t align) {
  if (blocks > 1) fail("static shared memory in a cluster is not known to the emulator");
  size_t at = up(static_used, align < 16 ? 16 : align);
  if (at + bytes > kStaticBytes) fail("static shared memory exceeds %zu bytes", kStaticBytes);
  static_used = at + bytes;
  return shared_arena() + kPage + at;
}

bool is_shared(const void* p) { return (const char*)p >= arena && (const char*)p < arena + kArena; }

uint32_t to_shared(const void* p) {
  if (!is_shared(p)) fail("__cvta_generic_to_shared of an address outside shared memory (%s)", describe_address(p).c_str());
  return (uint32_t)((const char*)p - arena);
}

void* from_shared(uint32_t address) { return arenas[owner(address)] + within(address); }

void* shared(uint64_t address, size_t bytes, const char* what) {
  char* base = arenas[owner(address)];
  address = within(address);
  check_align(address, bytes, what);
  bool ok = (address >= kPage && address + bytes <= kPage + static_used) ||
            (address >= kDynamicAt && address + bytes <= kDynamicAt + dynamic_used);
  if (!ok)
    fail("out-of-bounds access: %s of %zu bytes at byte %ld of %zu bytes of dynamic shared memory", what, bytes,
         (long)address - (long)kDynamicAt, dynamic_used);
  return base + address;
}

// -- global memory ------------------------------------------------------------------------------------

std::string describe_address(const void* p) {
  char text[200];
  for (const Array& a : arrays)
    if ((const char*)p >= a.map && (const char*)p < a.map + a.map_bytes) {
      std::snprintf(text, sizeof text, "byte %ld of %s, which has %zu bytes", (long)((const char*)p - a.base), a.name.c_str(), a.bytes);
      return text;
    }
  if (arena && (const char*)p >= arena && (const char*)p < arena + kArena + kPage) {
    std::snprintf(text, sizeof text, "byte %ld of %zu bytes of dynamic shared memory", (long)((const char*)p - arena - (long)kDynamicAt),
                  dynamic_used);
    return text;
  }
  std::snprintf(text, sizeof text, "address %p, in no array and not in shared memory", p);
  return text;
}

void* global(uint64_t address, size_t bytes, const char* what) {
  check_align(address, bytes, what);
  return in_array(address, bytes, what);
}

void* in_array(uint64_t address, size_t bytes, const char* what) {
  for (const Array& a : arrays)
    if ((char*)address >= a.base && (char*)address + bytes <= a.base + a.bytes) return (void*)address;
  fail("out-of-bounds access: %s of %zu bytes at %s", what, bytes, describe_address((void*)address).c_str());
}

void* generic(uint64_t address, size_t bytes, const char* what) {
  if (is_shared((void*)address)) return shared(to_shared((void*)address), bytes, what);
  for (const Array& a : arrays)
    if ((char*)address >= a.map && (char*)address < a.map + a.map_bytes) return global(address, bytes, what);
  check_align(address, bytes, what);
  return (void*)address;  // local or constant memory
}

void* constant(uint64_t address, size_t bytes, const char* what) {
  check_align(address, bytes, what);
  return (void*)address;
}

void check_guards() {
  for (const Array& a : arrays) {
    for (char* p = a.map + kGuard; p < a.base; ++p)
      if ((unsigned char)*p != kPoison) fail("out-of-bounds write %ld bytes before the start of %s", (long)(a.base - p), a.name.c_str());
    for (char* p = a.base + a.bytes; p < a.map + a.map_bytes - kGuard; ++p)
      if ((unsigned char)*p != kPoison)
        fail("out-of-bounds write %ld bytes past the end of %s", (long)(p - a.base - (long)a.bytes + 1), a.name.c_str());
  }
}

// -- cp.async -----------------------------------------------------------------------------------------

void cp_async(uint64_t dst, uint64_t src, unsigned bytes, unsigned src_bytes, const char* what) {
  if (bytes != 4 && bytes != 8 && bytes != 16) fail("%s: %u bytes, 4, 8 or 16 are needed", what, bytes);
  if (src_bytes > bytes) fail("%s: %u source bytes for %u bytes", what, src_bytes, bytes);
  char* d = (char*)shared(dst, bytes, what);
  check_align(src, bytes, what);
  if (src_bytes) in_array(src, src_bytes, what);
  poison(d, bytes);
  self().open.push_back({d, (char*)src, bytes, src_bytes});
}

void cp_async_commit() {
  self().groups.push_back(std::move(self().open));
  self().open.clear();
}

void cp_async_wait(unsigned groups) { land(self().groups, groups); }

void cp_async_wait_all() {
  cp_async_commit();
  cp_async_wait(0);
}

void cp_async_mbarrier(uint64_t bar, bool counted, const char* what) {
  Mbarrier& m = find(bar);
  Fiber& f = self();
  for (auto& group : f.groups) m.copies.insert(m.copies.end(), group.begin(), group.end());
  m.copies.insert(m.copies.end(), f.open.begin(), f.open.end());
  f.groups.clear(), f.open.clear();
  if (counted) ++m.pending;
  mbar_arrive(bar, 1, what);
}

// -- bulk copies and mbarriers ------------------------------------------------------------------------

void bulk_load(uint64_t dst, uint64_t src, uint64_t bytes, uint64_t bar, const char* what) {
  if (!bytes || bytes % 16) fail("%s: %lu bytes, no positive multiple of 16", what, (unsigned long)bytes);
  char* d = (char*)shared(dst, 16, what);
  shared(dst + bytes - 16, 16, what), check_align(src, 16, what), in_array(src, bytes, what);
  expect_copies(bar, {{d, (char*)src, (unsigned)bytes, (unsigned)bytes}}, bytes);
}

void bulk_send(uint64_t dst, uint64_t src, uint64_t bytes, uint64_t bar, const char* what) {
  if (!bytes || bytes % 16) fail("%s: %lu bytes, no positive multiple of 16", what, (unsigned long)bytes);
  char* d = (char*)shared(dst, 16, what);
  char* s = (char*)shared(src, 16, what);
  shared(dst + bytes - 16, 16, what), shared(src + bytes - 16, 16, what);
  expect_copies(bar, {{d, s, (unsigned)bytes, (unsigned)bytes}}, bytes);
}

void expect_copies(uint64_t bar, std::vector<Copy> copies, uint64_t bytes) {
  Mbarrier& m = find(bar);
  for (const Copy& c : copies) poison(c.dst, c.bytes);
  m.copies.insert(m.copies.end(), copies.begin(), copies.end());
  m.bytes -= (int64_t)bytes;  // they land when somebody waits, which balances expect_tx
}

void bulk_store(uint64_t dst, uint64_t src, uint64_t bytes, const char* what) {
  if (!bytes || bytes % 16) fail("%s: %lu bytes, no positive multiple of 16", what, (unsigned long)bytes);
  char* s = (char*)shared(src, 16, what);
  shared(src + bytes - 16, 16, what), check_align(dst, 16, what), in_array(dst, bytes, what);
  self().bulk_open.push_back({(char*)dst, s, (unsigned)bytes, (unsigned)bytes});
}

void bulk_commit() {
  self().bulk_groups.push_back(std::move(self().bulk_open));
  self().bulk_open.clear();
}

void bulk_wait(unsigned groups) { land(self().bulk_groups, groups); }

void mbar_init(uint64_t bar, uint32_t count) {
  shared(bar, 8, "mbarrier.init");
  if (!count) fail("mbarrier.init: count 0");
  mbarriers[owner(bar)][(uint32_t)within(bar)] = {count, count, 0, 0, {}};
}

void mbar_expect(uint64_t bar, uint32_t bytes) { find(bar).bytes += bytes; }

uint64_t mbar_arrive(uint64_t bar, uint32_t count, const char* what) {
  Mbarrier& m = find(bar);
  if (count > m.pending) fail("%s: more arrivals than the mbarrier's count %u", what, m.expected);
  uint64_t state = m.phase;
  m.pending -= count;
  advance(m);
  return state;
}

void mbar_complete(uint64_t bar, uint32_t bytes) {
  Mbarrier& m = find(bar);
  m.bytes -= bytes;
  advance(m);
}

bool mbar_test(uint64_t bar, uint64_t state, bool parity, bool block, const char* what) {
  for (bool first = true;; first = false) {
    Mbarrier& m = find(bar);
    bool over = parity ? (m.phase & 1) != (state & 1) : m.phase != state;
    if (over) {
      for (const Copy& c : m.copies) land(c);
      m.copies.clear();
      return true;
    }
    advance(m);  // bytes may have balanced without an arrival since
    if (!block && !first) return false;
    poll(what);
  }
}

}  // namespace emu

// -- for run.py ---------------------------------------------------------------------------------------

extern "C" {
void* emu_alloc(const char* name, size_t bytes) {  // the array ends where a guard page begins, up to 16-byte alignment
  using namespace emu;
  size_t inside = up(up(bytes, 16), kPage), total = inside + 2 * kGuard;
  char* map = (char*)mmap(nullptr, total, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (map == MAP_FAILED || mprotect(map + kGuard, inside, PROT_READ | PROT_WRITE)) return nullptr;
  poison(map + kGuard, inside);
  char* base = map + kGuard + inside - up(bytes, 16);
  arrays.push_back({name, map, base, total, bytes});
  return base;
}
void emu_free_all() {
  for (auto& a : emu::arrays) munmap(a.map, a.map_bytes);
  emu::arrays.clear();
}
}
