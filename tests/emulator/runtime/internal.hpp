// Shared between the emulator's own translation units; kernels do not see it.
#pragma once
#include <csetjmp>
#include <string>
#include <vector>

#include "emu.hpp"

namespace emu {

struct Copy { char* dst; const char* src; unsigned bytes, src_bytes; };  // dst gets src_bytes of src, the rest is zero

struct Fiber {
  enum State { ready, waiting, polling, done } state = done;
  void* sp = nullptr;
  char* stack = nullptr;
  const char* where = "";  // what it waits at
  std::vector<std::vector<Copy>> groups;       // committed cp.async groups, oldest first
  std::vector<Copy> open;                      // copies issued since the last commit
  std::vector<std::vector<Copy>> bulk_groups;  // the same for bulk stores
  std::vector<Copy> bulk_open;
  unsigned cluster_phase = 0;                  // of the cluster's barrier when this thread arrived there
  unsigned wgmma_open = 0, wgmma_groups = 0;   // products issued since the last commit, committed groups in flight
};

constexpr unsigned kMostBlocks = 8;  // of a cluster

Fiber& self();
std::string thread_name();           // "thread 3 of block (0,0,0)", or "" outside a kernel
const char* error_text(const std::string& text);  // keep a text for the caller of the library

// collectives.cpp
int elements(Type t);  // in a 32-bit register
double element(Type t, uint64_t reg, int e);

// memory.cpp
void enter_block(unsigned rank, unsigned blocks);  // from now on this block of a cluster runs
void begin_block(unsigned dynamic_bytes);  // poison shared memory, forget mbarriers
void end_block();                          // check what lies beyond shared memory
std::string describe_address(const void* p);
void* in_array(uint64_t address, size_t bytes, const char* what);  // as global, without a demand on alignment
void expect_copies(uint64_t bar, std::vector<Copy> copies, uint64_t bytes);  // poison now, land when the mbarrier is waited for
void check_guards();                       // bytes around the arrays

}  // namespace emu
