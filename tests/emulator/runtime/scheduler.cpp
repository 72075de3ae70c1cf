// Threads of a block as fibers on one OS thread; blocks run one after another, those of a cluster together.
//
// A fiber runs until it blocks. The scheduler takes one warp as far as it gets (its lanes in the wanted order), then the next:
// forward starts with warp 0, reverse with the last, random draws. So a kernel that lacks a barrier reads shared memory that is
// still poisoned, or overwritten, under at least one order.
#include <csignal>
#include <cstdarg>
#include <cstdio>
#include <algorithm>
#include <random>
#include <sys/mman.h>
#include <sys/time.h>

#include "internal.hpp"

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;

namespace emu {
namespace {

constexpr size_t kStack = 256 << 10, kGuard = 4096;
constexpr unsigned kPollLimit = 10000;
constexpr long kSeconds = 120;  // of CPU time for a launch: a loop that spins on memory never yields

struct Barrier { unsigned expected = 0, arrived = 0; bool all = false; std::vector<unsigned> waiting; };
struct Meeting { uint32_t mask = 0, arrived = 0; const char* what = nullptr; void* mine[32]; Compute compute; const void* argument; };

std::vector<Fiber> fibers;
std::vector<std::vector<Meeting>> meetings;  // by warp
struct Group { unsigned arrived = 0; const char* what = nullptr; void* mine[128]; };
std::vector<Group> groups;  // by warpgroup
struct Block { Barrier barriers[16]; unsigned live; };
std::vector<Block> blocks;      // of the cluster that runs
unsigned current, size_of_block, cluster = 1, first_block;  // current: block in the cluster * size_of_block + thread
unsigned cluster_arrived, cluster_phase;
bool in_kernel = false;
void* main_sp;
void (*body)(void*);
void* body_argument;
sigjmp_buf escape;
std::string message;
std::mt19937 rng;

#if defined(__x86_64__)
extern "C" void emu_switch(void** save, void* load);
asm(R"(
.text
.type emu_switch,@function
.hidden emu_switch
.globl emu_switch
emu_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
)");
#else
#error "the CUDA emulator switches stacks by x86-64 assembly"
#endif

void yield() { emu_switch(&fibers[current].sp, main_sp); }
void release_if_complete(Block& block, unsigned id);
void finish_cluster_barrier();
Block& own() { return blocks[current / size_of_block]; }
unsigned live() {
  unsigned n = 0;
  for (auto& b : blocks) n += b.live;
  return n;
}
void finish_if_complete(unsigned warp, size_t i);

void entry() {
  body(body_argument);
  Fiber& f = self();
  if (f.wgmma_open || f.wgmma_groups) fail("exited with wgmma products that were not waited for");
  f.state = Fiber::done;
  --own().live;
  for (unsigned id = 0; id < 16; ++id) release_if_complete(own(), id);
  finish_cluster_barrier();
  auto& open = meetings[current / 32];
  for (size_t i = open.size(); i-- > 0;) finish_if_complete(current / 32, i);
  yield();
  __builtin_unreachable();
}

void resume(unsigned t) {
  current = t;
  unsigned rank = t / size_of_block, thread = t % size_of_block;
  threadIdx = {thread % blockDim.x, thread / blockDim.x % blockDim.y, thread / (blockDim.x * blockDim.y)};
  blockIdx.x = first_block + rank;
  enter_block(rank, cluster);
  emu_switch(&main_sp, fibers[t].sp);
}

void start(Fiber& f) {
  void** top = (void**)(f.stack + kGuard + kStack);
  *--top = nullptr;            // keeps the stack 16-byte aligned at entry, and is where a return would crash
  *--top = (void*)entry;
  for (int i = 0; i < 6; ++i) *--top = nullptr;
  f.sp = top;
  f.state = Fiber::ready;
  f.groups.clear(), f.open.clear(), f.bulk_groups.clear(), f.bulk_open.clear();
  f.wgmma_open = f.wgmma_groups = f.cluster_phase = 0;
}

uint32_t lanes_of(unsigned warp) {
  uint32_t mask = 0;
  for (unsigned t = warp * 32; t < fibers.size() && t < warp * 32 + 32; ++t)
    if (fibers[t].state != Fiber::done) mask |= 1u << t % 32;
  return mask;
}

void release_if_complete(Block& block, unsigned id) {
  Barrier& b = block.barriers[id];
  if (!b.arrived || b.arrived < (b.all ? block.live : b.expected)) return;
  if (b.arrived > (b.all ? block.live : b.expected)) fail("barrier %u: more threads arrived than its count %u", id, b.expected);
  for (unsigned t : b.waiting) fibers[t].state = Fiber::ready;
  b = Barrier{};
}

void finish_cluster_barrier() {
  if (!cluster_arrived || cluster_arrived < live()) return;
  cluster_arrived = 0;
  ++cluster_phase;
  for (auto& f : fibers)
    if (f.state == Fiber::waiting && !std::strncmp(f.where, "barrier.cluster", 15)) f.state = Fiber::ready;
}

void finish_if_complete(unsigned warp, size_t i) {
  Meeting m = meetings[warp][i];
  uint32_t need = m.mask & lanes_of(warp);
  if (!m.arrived || (m.arrived & need) != need) return;
  meetings[warp].erase(meetings[warp].begin() + (long)i);
  m.compute(m.mine, m.argument);
  for (unsigned l = 0; l < 32; ++l)
    if (m.arrived >> l & 1) fibers[warp * 32 + l].state = Fiber::ready;
}

[[noreturn]] void deadlock() {
  in_kernel = false;
  std::string text = "deadlock:";
  int shown = 0;
  const char* last = "";
  for (unsigned t = 0; t < fibers.size() && shown < 4; ++t) {
    if (fibers[t].state == Fiber::done || last == fibers[t].where) continue;
    last = fibers[t].where;
    text += (shown++ ? ", thread " : " thread ") + std::to_string(t) + " waits at " + last;
  }
  unsigned done = (unsigned)fibers.size() - live();
  if (done) text += "; " + std::to_string(done) + " threads have exited";
  fail("%s", text.c_str());
}

void order_of(std::vector<unsigned>& v, unsigned n, unsigned order) {
  v.resize(n);
  for (unsigned i = 0; i < n; ++i) v[i] = order == 1 ? n - 1 - i : i;
  if (order == 2) std::shuffle(v.begin(), v.end(), rng);
}

bool run_warp(unsigned warp, unsigned order, std::vector<unsigned>& lanes) {
  bool any = false;
  for (bool again = true; again;) {
    again = false;
    order_of(lanes, 32, order);
    for (unsigned l : lanes) {
      unsigned t = warp * 32 + l;
      if (t >= fibers.size() || fibers[t].state != Fiber::ready) continue;
      resume(t);
      again = any = true;
    }
    if (order == 2 && rng() % 2) break;  // let another warp overtake
  }
  return any;
}

void run_cluster(const Launch& l) {
  unsigned n = (unsigned)fibers.size(), polls = 0;
  blocks.assign(cluster, Block{});
  for (auto& b : blocks) b.live = size_of_block;
  cluster_arrived = cluster_phase = 0;
  meetings.assign((n + 31) / 32, {});
  groups.assign(cluster * ((size_of_block + 127) / 128), {});
  for (unsigned r = 0; r < cluster; ++r) enter_block(r, cluster), begin_block(l.dynamic_bytes);
  for (auto& f : fibers) start(f);
  std::vector<unsigned> warps, lanes;
  in_kernel = true;
  while (live()) {
    bool progress = false;
    order_of(warps, (n + 31) / 32, l.order);
    for (unsigned w : warps) progress |= run_warp(w, l.order, lanes);
    bool polling = false;
    for (auto& f : fibers)
      if (f.state == Fiber::polling) f.state = Fiber::ready, polling = true;
    if (!progress && !polling) deadlock();
    bool waits = std::all_of(fibers.begin(), fibers.end(), [](auto& f) { return f.state != Fiber::ready || *f.where; });
    polls = polling && waits ? polls + 1 : 0;
    if (polls > kPollLimit) deadlock();
  }
  in_kernel = false;
  for (unsigned r = 0; r < cluster; ++r) enter_block(r, cluster), end_block();
}

void on_signal(int number, siginfo_t* info, void*) {
  if (number == SIGVTALRM) fail("the launch takes more than %ld s: a loop without end, or too much work (see max_blocks)", kSeconds);
  if (number == SIGFPE) fail("integer division by zero");
  std::string where = describe_address(info->si_addr);
  bool stack = false;
  for (auto& f : fibers) stack |= (char*)info->si_addr >= f.stack && (char*)info->si_addr < f.stack + kGuard;
  fail("%s", stack ? "the thread's stack overflowed" : ("out-of-bounds access: " + where).c_str());
}

struct Signals {  // our handler for the time of a launch
  static constexpr int kNumbers[] = {SIGSEGV, SIGBUS, SIGFPE, SIGVTALRM};
  struct sigaction before[4];
  stack_t old;
  char stack[1 << 16];
  Signals() {
    stack_t s{};
    s.ss_sp = stack, s.ss_size = sizeof stack;
    sigaltstack(&s, &old);
    struct sigaction a{};
    a.sa_sigaction = on_signal, a.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
    for (int i = 0; i < 4; ++i) sigaction(kNumbers[i], &a, &before[i]);
    itimerval limit{{0, 0}, {kSeconds, 0}};
    setitimer(ITIMER_VIRTUAL, &limit, nullptr);
  }
  ~Signals() {
    itimerval off{};
    setitimer(ITIMER_VIRTUAL, &off, nullptr);
    for (int i = 0; i < 4; ++i) sigaction(kNumbers[i], &before[i], nullptr);
    sigaltstack(&old, nullptr);
  }
};

}  // namespace

Fiber& self() { return fibers[current]; }
unsigned thread() { return current % size_of_block; }
unsigned cluster_rank() { return current / size_of_block; }
unsigned cluster_size() { return cluster; }
uint32_t live_lanes() { return lanes_of(current / 32); }

std::string thread_name() {
  if (!in_kernel) return "";
  char text[100];
  std::snprintf(text, sizeof text, "thread %u of block (%u,%u,%u): ", thread(), blockIdx.x, blockIdx.y, blockIdx.z);
  return text;
}

void fail(const char* format, ...) {
  char text[800];
  va_list args;
  va_start(args, format);
  std::vsnprintf(text, sizeof text, format, args);
  va_end(args);
  message = thread_name() + text;
  siglongjmp(escape, 1);
}

void barrier(unsigned id, unsigned count, bool wait, const char* what) {
  if (id > 15) fail("%s: barrier %u is not in 0..15", what, id);
  if (count % 32) fail("%s: count %u is no multiple of 32", what, count);
  Barrier& b = own().barriers[id];
  if (b.arrived && (b.all != !count || b.expected != count)) fail("%s: threads meet at barrier %u with different counts", what, id);
  b.all = !count, b.expected = count;
  ++b.arrived;
  Fiber& f = self();
  if (wait) b.waiting.push_back(current), f.state = Fiber::waiting, f.where = what;
  release_if_complete(own(), id);
  if (wait) {
    yield();  // also when complete: whoever arrived last need not be the first to go on
    f.where = "";
  }
}

void cluster_arrive() {
  self().cluster_phase = cluster_phase;
  ++cluster_arrived;
  finish_cluster_barrier();
}

void cluster_wait(const char* what) {
  Fiber& f = self();
  while (f.cluster_phase == cluster_phase) {
    f.state = Fiber::waiting, f.where = what;
    yield();
  }
  f.where = "";
}

void poll(const char* what) {
  Fiber& f = self();
  f.state = Fiber::polling, f.where = what;
  yield();
  f.where = "";
}

void meet(uint32_t mask, const char* what, void* mine, Compute compute, const void* argument) {
  unsigned warp = current / 32;
  if (!(mask >> lane() & 1)) fail("%s: lane %u is not in its own mask 0x%x", what, lane(), mask);
  auto& open = meetings[warp];
  size_t i = 0;
  while (i < open.size() && open[i].mask != mask) ++i;
  if (i == open.size()) {
    Meeting m{};
    m.mask = mask, m.what = what, m.compute = compute, m.argument = argument;
    open.push_back(m);
  }
  if (std::strcmp(open[i].what, what)) fail("lanes of a warp diverged: one is at %s, others wait at %s", what, open[i].what);
  open[i].arrived |= 1u << lane();
  open[i].mine[lane()] = mine;
  Fiber& f = self();
  f.state = Fiber::waiting, f.where = what;
  finish_if_complete(warp, i);
  if (f.state == Fiber::waiting) yield();
  f.where = "";
}

void meet_warpgroup(const char* what, void* mine, Compute compute, const void* argument) {
  const unsigned rank = current / size_of_block, thread = current % size_of_block;
  Group& g = groups[rank * ((size_of_block + 127) / 128) + thread / 128];
  if (g.arrived && std::strcmp(g.what, what)) fail("a warpgroup diverged: a thread is at %s, others wait at %s", what, g.what);
  g.what = what;
  g.mine[thread % 128] = mine;
  Fiber& f = self();
  f.state = Fiber::waiting, f.where = what;
  if (++g.arrived == 128) {
    g.arrived = 0;
    compute(g.mine, argument);
    const unsigned first = current - thread % 128;
    for (unsigned t = first; t < first + 128; ++t) fibers[t].state = Fiber::ready;
  } else {
    yield();
  }
  f.where = "";
}

const char* error_text(const std::string& text) {
  message = text;
  return message.c_str();
}

const char* launch(const Launch& l, void (*kernel)(void*), void* argument) {
  size_of_block = l.block.x * l.block.y * l.block.z, cluster = l.cluster;
  if (!size_of_block || size_of_block > 1024)
    return error_text("a block has 1 to 1024 threads, not " + std::to_string(size_of_block));
  if (!cluster || cluster > kMostBlocks || l.grid.x % cluster || (cluster > 1 && size_of_block % 32))
    return error_text("clusters of " + std::to_string(cluster) + " blocks of these are not known to the emulator");
  const unsigned n = size_of_block * cluster;
  body = kernel, body_argument = argument;
  blockDim = l.block, gridDim = l.grid;
  rng.seed(l.seed);
  size_t pitch = kStack + kGuard;
  char* stacks = (char*)mmap(nullptr, n * pitch, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (stacks == MAP_FAILED) return error_text("no memory for the stacks of the threads");
  fibers.assign(n, Fiber{});
  for (unsigned t = 0; t < n; ++t) {
    fibers[t].stack = stacks + t * pitch;
    mprotect(fibers[t].stack, kGuard, PROT_NONE);
  }
  static Signals* signals;
  signals = new Signals;
  message.clear();
  if (!sigsetjmp(escape, 1)) {
    uint64_t clusters = (uint64_t)l.grid.x * l.grid.y * l.grid.z / cluster;
    std::vector<uint64_t> order(clusters);
    for (uint64_t i = 0; i < clusters; ++i) order[i] = l.order == 1 ? clusters - 1 - i : i;
    if (l.order == 2) std::shuffle(order.begin(), order.end(), rng);
    uint64_t most = (l.max_blocks + cluster - 1) / cluster;
    if (most && most < clusters) order.resize(most);
    for (uint64_t c : order) {
      uint64_t i = c * cluster;
      first_block = (unsigned)(i % l.grid.x);
      blockIdx = {(unsigned)(i % l.grid.x), (unsigned)(i / l.grid.x % l.grid.y), (unsigned)(i / l.grid.x / l.grid.y)};
      run_cluster(l);
    }
    check_guards();
  }
  in_kernel = false;
  delete signals;
  fibers.clear();
  munmap(stacks, n * pitch);
  return message.empty() ? nullptr : message.c_str();
}

}  // namespace emu
