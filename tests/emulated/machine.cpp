/* machine.cpp - see machine.h. */
#include "machine.h"

#include <string.h>
#include <ucontext.h>

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace emulated {

namespace {

enum { STACK_BYTES = 256 << 10, NAMED_BARRIERS = 16, MAX_THREADS = 1024 };

/* What a thread waits for: that this number is no longer the one it was. */
struct Thread {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  bool ended;
  const long *awaited;
  long until_not;
};

/* Threads that meet again and again; what they bring stays until the meeting after the next. */
struct Meeting {
  int arrived = 0;
  long generation = 0;
  uint64_t brought[2][WARPGROUP];
};

struct Mbarrier {
  int arrivals, pending;
  int64_t bytes = 0;
  long phase = 0;
};

struct NamedBarrier {
  int threads = 0, arrived = 0;
  long generation = 0;
};

std::vector<Thread> threads;
std::vector<Meeting> warps, warpgroups;
std::map<uint32_t, Mbarrier> mbarriers;
NamedBarrier named_barriers[NAMED_BARRIERS];
std::vector<char> memory;
ucontext_t scheduler;
std::function<void()> code;
int current, block, blocks;
std::string violation;

Thread &self() { return threads[(size_t)current]; }

void give_way() { swapcontext(&self().context, &scheduler); }

void await_change(const long *number) {
  self().awaited = number;
  self().until_not = *number;
  give_way();
}

void thread_main() {
  code();
  self().ended = true;
  give_way();
}

void set_up(Thread &thread) {
  if (!thread.stack) thread.stack.reset(new char[STACK_BYTES]);
  thread.ended = false;
  thread.awaited = nullptr;
  getcontext(&thread.context);
  thread.context.uc_stack.ss_sp = thread.stack.get();
  thread.context.uc_stack.ss_size = STACK_BYTES;
  thread.context.uc_link = nullptr;
  makecontext(&thread.context, thread_main, 0);
}

/* All threads of a meeting have come; the last one acts for all before the others go on. */
const uint64_t *meet(Meeting &meeting, int size, uint64_t brought, const std::function<void(const uint64_t *)> &act) {
  uint64_t *const all = meeting.brought[meeting.generation % 2];
  all[current % size] = brought;
  if (++meeting.arrived < size) {
    await_change(&meeting.generation);
  } else {
    if (act) act(all);
    meeting.arrived = 0;
    meeting.generation++;
  }
  return all;
}

Meeting &of_warp() { return warps[(size_t)(current / WARP)]; }

void complete(Mbarrier &barrier) {
  if (barrier.pending != 0 || barrier.bytes != 0) return;
  barrier.pending = barrier.arrivals;
  barrier.phase++;
}

Mbarrier &mbarrier_at(uint32_t address) {
  const auto found = mbarriers.find(address);
  require(found != mbarriers.end(), "no mbarrier lies there");
  return found->second;
}

float element(uint32_t bits) {
  float x;
  bits <<= 16;
  memcpy(&x, &bits, sizeof x);
  return x;
}

/* The 128-byte swizzle: bits 4 to 6 of an address are exchanged by bits 7 to 9. */
uint32_t swizzled(uint32_t address) { return address ^ (address >> 7 & 7) << 4; }

float element_at(uint32_t address) {
  uint16_t bits;
  memcpy(&bits, shared(swizzled(address), sizeof bits), sizeof bits);
  return element(bits);
}

/* Nobody is under way in the end. */
void check_end() {
  for (const auto &one : mbarriers)
    require(one.second.pending == one.second.arrivals && one.second.bytes == 0, "an mbarrier is not at rest");
  for (const NamedBarrier &barrier : named_barriers)
    require(barrier.arrived == 0, "a named barrier is not at rest");
}

void run_block(int count) {
  memory.assign(SHARED_BYTES, (char)0x7f); /* NaN in every element */
  mbarriers.clear();
  warps.assign((size_t)count / WARP, Meeting());
  warpgroups.assign((size_t)(count + WARPGROUP - 1) / WARPGROUP, Meeting());
  for (NamedBarrier &barrier : named_barriers)
    barrier = NamedBarrier();
  for (int i = 0; i < count; i++)
    set_up(threads[(size_t)i]);
  for (int ended = 0; ended < count && violation.empty();) {
    bool any = false;
    for (current = 0; current < count && violation.empty(); current++) {
      Thread &thread = self();
      if (thread.ended || (thread.awaited && *thread.awaited == thread.until_not)) continue;
      any = true;
      thread.awaited = nullptr;
      swapcontext(&scheduler, &thread.context);
      ended += thread.ended;
    }
    if (!any && violation.empty()) violation = "no thread can go on";
  }
  current = -1;
  if (violation.empty()) check_end();
}

} // namespace

static std::map<std::string, void (*)(void **)> &launchables() {
  static std::map<std::string, void (*)(void **)> all; /* there before any kernel is added, in whatever file */
  return all;
}

Launchable::Launchable(const char *name, void (*kernel)(void **)) { launchables()[name] = kernel; }

const char *launch(const char *name, int64_t grid, int count, void **arguments) {
  violation.clear();
  if (threads.empty()) threads.resize(MAX_THREADS);
  code = [kernel = launchables().at(name), arguments] { kernel(arguments); };
  blocks = (int)grid;
  for (block = 0; block < blocks && violation.empty(); block++)
    run_block(count);
  if (violation.empty()) return nullptr;
  violation += " (CTA " + std::to_string(block - 1) + " of " + std::to_string(blocks) + ")";
  return violation.c_str();
}

int thread_index() { return current; }
int block_index() { return block; }
int grid_size() { return blocks; }

void require(bool holds, const char *what) {
  if (holds || !violation.empty()) return;
  violation = what;
  if (current >= 0) {
    violation += "; thread " + std::to_string(current);
    give_way(); /* and never again */
  }
}

char *shared(uint32_t address, int bytes) {
  require(address >= SHARED_ADDRESS && address + (uint32_t)bytes <= SHARED_ADDRESS + SHARED_BYTES,
          "an address beyond shared memory");
  return memory.data() + (address - SHARED_ADDRESS);
}

void mbarrier_init(uint32_t barrier, int arrivals) {
  Mbarrier fresh;
  fresh.arrivals = fresh.pending = arrivals;
  mbarriers[barrier] = fresh;
}

void mbarrier_arrive(uint32_t barrier, int64_t bytes) {
  Mbarrier &at = mbarrier_at(barrier);
  require(at.pending > 0, "an arrival too many");
  at.bytes += bytes;
  at.pending--;
  complete(at);
}

void mbarrier_await(uint32_t barrier, uint32_t parity) {
  const Mbarrier &at = mbarrier_at(barrier);
  while ((uint32_t)(at.phase & 1) == parity)
    await_change(&at.phase);
}

void named_barrier(int id, int count, bool wait) {
  require(id >= 0 && id < NAMED_BARRIERS, "no such named barrier");
  NamedBarrier &barrier = named_barriers[id];
  require(barrier.arrived == 0 || barrier.threads == count, "a named barrier is met by two numbers of threads");
  barrier.threads = count;
  if (++barrier.arrived == count) {
    barrier.arrived = 0;
    barrier.generation++;
  } else if (wait) {
    await_change(&barrier.generation);
  }
}

bool elect() {
  meet(of_warp(), WARP, 0, nullptr);
  return current % WARP == 0;
}

const uint64_t *exchange(uint64_t value) { return meet(of_warp(), WARP, value, nullptr); }

void load_box(uint32_t destination, uint32_t barrier, const TensorMap &map, const int *corner) {
  enum { ROW_BYTES = 128, ELEMENT_BYTES = 2, COLUMNS = ROW_BYTES / ELEMENT_BYTES };
  require(destination % ROW_BYTES == 0, "a box that begins within a row of shared memory");
  const int rows = map.box_rows * map.box_heads;
  for (int i = 0; i < rows; i++) {
    const int64_t at[] = {corner[0], corner[1] + i % map.box_rows, corner[2] + i / map.box_rows, corner[3]};
    bool inside = true;
    for (int d = 1; d < 4; d++)
      inside &= at[d] >= 0 && at[d] < map.size[d];
    for (int c = 0; c < COLUMNS; c++) {
      uint16_t bits = 0;
      if (inside && at[0] + c < map.size[0]) {
        const char *from = map.data + (at[0] + c) * ELEMENT_BYTES;
        for (int d = 1; d < 4; d++)
          from += at[d] * map.stride_bytes[d];
        memcpy(&bits, from, sizeof bits);
      }
      memcpy(shared(swizzled(destination + (uint32_t)(i * ROW_BYTES + c * ELEMENT_BYTES)), ELEMENT_BYTES), &bits,
             sizeof bits);
    }
  }
  Mbarrier &at = mbarrier_at(barrier);
  at.bytes -= (int64_t)rows * ROW_BYTES;
  complete(at);
}

void multiply(float *d, const Operand &a, uint32_t b, uint32_t leading_bytes, bool is_transposed, int columns,
              bool accumulate) {
  enum { ROWS = 64, DEPTH = 16, GROUP_ROWS = 8, ROW_BYTES = 128, BOX_COLUMNS = 64 };
  struct Mine {
    float *d;
    const uint32_t *a;
  } mine = {d, a.registers};
  meet(warpgroups[(size_t)(current / WARPGROUP)], WARPGROUP, (uint64_t)&mine, [&](const uint64_t *all) {
    float left[ROWS][DEPTH];
    for (int t = 0; t < WARPGROUP; t++) /* of registers: two columns in each, rows l / 4 and l / 4 + 8, twice */
      for (int i = 0; i < 8 && a.registers; i++)
        left[t / WARP * 16 + t % WARP / 4 + i / 2 % 2 * 8][t % 4 * 2 + i % 2 + i / 4 * 8] =
            element(reinterpret_cast<const Mine *>(all[t])->a[i / 2] >> i % 2 * 16 & 0xffff);
    for (int i = 0; i < ROWS * DEPTH && !a.registers; i++)
      left[i / DEPTH][i % DEPTH] = element_at(a.address + (uint32_t)(i / DEPTH / GROUP_ROWS) * a.group_bytes +
                                              (uint32_t)(i / DEPTH % GROUP_ROWS * ROW_BYTES + i % DEPTH * 2));
    for (int column = 0; column < columns; column++) {
      float right[DEPTH];
      for (int k = 0; k < DEPTH; k++) {
        const uint32_t across = (uint32_t)(column / BOX_COLUMNS) * leading_bytes + (uint32_t)(column % BOX_COLUMNS * 2);
        right[k] = element_at(
            b + (is_transposed ? across + (uint32_t)(k * ROW_BYTES) : (uint32_t)(column * ROW_BYTES + k * 2)));
      }
      for (int row = 0; row < ROWS; row++) {
        const int t = row / 16 * WARP + row % 8 * 4 + column % 8 / 2;
        float &sum = reinterpret_cast<const Mine *>(all[t])->d[column / 8 * 4 + row % 16 / 8 * 2 + column % 2];
        float total = accumulate ? sum : 0.f;
        for (int k = 0; k < DEPTH; k++)
          total += left[row][k] * right[k];
        sum = total;
      }
    }
  });
}

} // namespace emulated
