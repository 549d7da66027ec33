/* machine.cpp - see machine.h: threads, barriers, shared memory, and what is under way to it. */
#undef _FORTIFY_SOURCE /* its longjmp refuses to go to another stack */
#include "machine.h"

#include <setjmp.h>
#include <string.h>
#include <ucontext.h>

#include <deque>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

namespace emulated {

namespace {

enum {
  STACK_BYTES = 256 << 10,
  NAMED_BARRIERS = 16,
  RANK_SHIFT = 24 /* an address in a CTA of the cluster has 1 + its rank above these bits; one in the own CTA, 0 */
};

struct Range {
  uint32_t from, to;
};

bool overlap(const Range &x, const Range &y) { return x.from < y.to && y.from < x.to; }

struct Addition {
  int32_t *to;
  Range from;
};

/* What a thread waits for: that this number is no longer the one it was. */
struct Thread {
  ucontext_t context; /* to begin with; then it goes on from `place`, which takes no system call */
  jmp_buf place;
  std::unique_ptr<char[]> stack;
  bool begun, ended;
  const long *awaited;
  long until_not;
  bool may_give_up, gives_up; /* a wait for a load that is lost */
  long clusters_met, clusters_awaited;
  std::vector<Range> reads;          /* that may still be under way */
  std::vector<Range> writes, fenced; /* that TMA may not see yet: before a fence, and between that and a barrier */
  std::vector<Addition> additions;
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

struct Load {
  uint32_t destination;
  Mbarrier *barrier;
  TensorMap map;
  int corner[4];
};

struct Store {
  char *destination;
  Mbarrier *barrier;
  std::vector<char> bytes;
};

struct Cta {
  std::vector<char> memory;
  std::vector<Meeting> warps, warpgroups;
  std::map<uint32_t, Mbarrier> mbarriers;
  NamedBarrier named_barriers[NAMED_BARRIERS];
  int threads_left;
  std::vector<Load> loads;
  std::vector<std::deque<Store>> stores; /* of each warp of the cluster */
};

std::vector<Thread> threads; /* those of the first CTA of the cluster come first */
std::vector<Cta> ctas;
jmp_buf scheduler;
std::function<void()> code;
int current, of_cta, first_block, blocks;
long cluster_arrived, cluster_generation;
std::mt19937 rng;
unsigned seed;
int lost = -1, loads_asked;
std::string violation;

Thread &self() { return threads[(size_t)current]; }
Cta &cta() { return ctas[(size_t)(current / of_cta)]; }

size_t random_below(size_t count) { return rng() % count; }

void give_way() {
  if (_setjmp(self().place) == 0) _longjmp(scheduler, 1);
}

void go_on(Thread &thread) {
  if (_setjmp(scheduler) != 0) return;
  if (thread.begun) _longjmp(thread.place, 1);
  thread.begun = true;
  setcontext(&thread.context);
}

void await_change(const long *number) {
  self().awaited = number;
  self().until_not = *number;
  give_way();
}

bool can_go_on(const Thread &thread) {
  return !thread.ended && !(thread.awaited && *thread.awaited == thread.until_not && !thread.gives_up);
}

void complete(Mbarrier &barrier) {
  if (barrier.pending != 0 || barrier.bytes != 0) return;
  barrier.pending = barrier.arrivals;
  barrier.phase++;
}

Mbarrier &mbarrier_at(uint32_t address) {
  Cta &owner = address >> RANK_SHIFT ? ctas[(address >> RANK_SHIFT) - 1] : cta();
  const auto found = owner.mbarriers.find(address % (1u << RANK_SHIFT));
  require(found != owner.mbarriers.end(), "no mbarrier lies there");
  return found->second;
}

/* ---- what is under way to a CTA ---------------------------------------------------------------------------------- */

bool is_awaiting(const Cta &to) {
  bool any = !to.loads.empty();
  for (const std::deque<Store> &of_warp : to.stores)
    any |= !of_warp.empty();
  return any;
}

/* The swizzle exchanges the 16-byte pieces of a row by those bits of an address that count rows. */
uint32_t swizzled(uint32_t address, int row_bytes) {
  return address ^ (address >> 7 & (uint32_t)(row_bytes / 16 - 1)) << 4;
}

/* Of a box, in shared memory: a row, and all. */
int row_bytes_of(const TensorMap &map) { return map.box_columns * map.element_bytes; }
int bytes_of(const TensorMap &map) { return map.box_rows * map.box_heads * row_bytes_of(map); }

void deliver_load(Cta &to) {
  const size_t index = random_below(to.loads.size());
  const Load load = to.loads[index];
  to.loads.erase(to.loads.begin() + (long)index);
  const TensorMap &map = load.map;
  const int row_bytes = row_bytes_of(map), rows = map.box_rows * map.box_heads;
  for (int i = 0; i < rows; i++) {
    const int *const corner = load.corner;
    const int64_t at[] = {corner[0], corner[1] + i % map.box_rows, corner[2] + i / map.box_rows, corner[3]};
    bool inside = true;
    for (int d = 1; d < 4; d++)
      inside &= at[d] >= 0 && at[d] < map.size[d];
    for (int c = 0; c < map.box_columns; c++) {
      uint32_t bits = 0;
      if (inside && at[0] + c < map.size[0]) {
        const char *from = map.data + (at[0] + c) * map.element_bytes;
        for (int d = 1; d < 4; d++)
          from += at[d] * map.stride_bytes[d];
        memcpy(&bits, from, (size_t)map.element_bytes);
      }
      const uint32_t place = load.destination + (uint32_t)(i * row_bytes + c * map.element_bytes);
      const uint32_t there = map.is_swizzled ? swizzled(place, row_bytes) : place;
      memcpy(&to.memory[there - SHARED_ADDRESS], &bits, (size_t)map.element_bytes);
    }
  }
  load.barrier->bytes -= (int64_t)rows * row_bytes;
  complete(*load.barrier);
}

void deliver_store(std::deque<Store> &of_warp) {
  const auto which = of_warp.begin() + (ptrdiff_t)random_below(of_warp.size());
  const Store store = *which;
  of_warp.erase(which);
  memcpy(store.destination, store.bytes.data(), store.bytes.size());
  store.barrier->bytes -= (int64_t)store.bytes.size();
  complete(*store.barrier);
}

/* Something, if there is any: from a random CTA or warp on, the first that there is. */
bool deliver() {
  const size_t first = random_below(ctas.size());
  for (size_t i = 0; i < ctas.size(); i++) {
    Cta &to = ctas[(first + i) % ctas.size()];
    const size_t warps = to.stores.size(), first_warp = random_below(warps);
    const bool load_first = rng() % 2 != 0;
    if (load_first && !to.loads.empty()) return deliver_load(to), true;
    for (size_t w = 0; w < warps; w++) {
      std::deque<Store> &of_warp = to.stores[(first_warp + w) % warps];
      if (of_warp.empty()) continue;
      for (size_t count = 1 + random_below(of_warp.size()); count > 0; count--)
        deliver_store(of_warp);
      return true;
    }
    if (!to.loads.empty()) return deliver_load(to), true;
  }
  return false;
}

/* ---- threads ----------------------------------------------------------------------------------------------------- */

void thread_main() {
  code();
  require(self().additions.empty(), "a thread ends before its sums have left");
  self().ended = true;
  if (--cta().threads_left == 0 && lost < 0)
    require(!is_awaiting(cta()), "something is under way to a CTA that has ended");
  give_way();
}

void set_up(Thread &thread) {
  if (!thread.stack) thread.stack.reset(new char[STACK_BYTES]);
  thread.begun = thread.ended = thread.may_give_up = thread.gives_up = false;
  thread.awaited = nullptr;
  thread.clusters_met = thread.clusters_awaited = 0;
  thread.reads.clear();
  thread.writes.clear();
  thread.fenced.clear();
  thread.additions.clear();
  getcontext(&thread.context);
  thread.context.uc_stack.ss_sp = thread.stack.get();
  thread.context.uc_stack.ss_size = STACK_BYTES;
  thread.context.uc_link = nullptr;
  makecontext(&thread.context, thread_main, 0);
}

void set_up(Cta &fresh, size_t all_threads) {
  fresh.memory.assign(SHARED_BYTES, (char)(rng() % 2 ? 0x7f : 0xff)); /* large numbers, or NaN */
  fresh.threads_left = of_cta;
  fresh.warps.assign((size_t)of_cta / WARP, Meeting());
  fresh.warpgroups.assign((size_t)(of_cta + WARPGROUP - 1) / WARPGROUP, Meeting());
  fresh.stores.resize(all_threads / WARP);
}

/* Where a load is lost: one of those who wait, or all of them, wait no longer. */
bool give_up(size_t all_threads) {
  const size_t first = random_below(all_threads);
  const bool all = rng() % 2 != 0;
  bool any = false;
  for (size_t i = 0; i < all_threads && (all || !any); i++) {
    Thread &thread = threads[(first + i) % all_threads];
    if (!thread.may_give_up) continue;
    thread.gives_up = any = true;
  }
  return any;
}

/* Nobody is under way in the end. An mbarrier that has not completed one phase may never be needed. */
void check_end() {
  for (const Cta &one : ctas) {
    for (const auto &[address, barrier] : one.mbarriers)
      require(lost >= 0 || (barrier.bytes == 0 && (barrier.phase == 0 || barrier.pending == barrier.arrivals)),
              "an mbarrier is not at rest");
    for (const NamedBarrier &barrier : one.named_barriers)
      require(barrier.arrived == 0, "a named barrier is not at rest");
  }
  require(cluster_arrived == 0, "the cluster's barrier is not at rest");
}

void run_cluster(size_t cluster) {
  const size_t count = cluster * (size_t)of_cta;
  const bool as_late_as_can_be = rng() % 4 != 0; /* whatever is under way arrives when nobody can go on */
  ctas = std::vector<Cta>(cluster);
  for (Cta &one : ctas)
    set_up(one, count);
  if (threads.size() < count) threads.resize(count);
  for (size_t i = 0; i < count; i++)
    set_up(threads[i]);
  cluster_arrived = cluster_generation = 0;
  for (size_t ended = 0; ended < count && violation.empty();) {
    const size_t first = random_below(count);
    bool any = false;
    for (size_t i = 0; i < count && violation.empty(); i++) {
      current = (int)((first + i) % count);
      Thread &thread = self();
      if (!can_go_on(thread)) continue;
      any = true;
      thread.awaited = nullptr;
      go_on(thread);
      ended += thread.ended;
      if (!as_late_as_can_be && rng() % 16 == 0) deliver();
    }
    if (!any && violation.empty() && !deliver() && !give_up(count)) violation = "no thread can go on";
  }
  current = -1;
  if (violation.empty()) check_end();
}

} // namespace

struct Kernel {
  int cluster;
  void (*function)(void **);
};

static std::map<std::string, Kernel> &launchables() {
  static std::map<std::string, Kernel> all; /* there before any kernel is added, in whatever file */
  return all;
}

Launchable::Launchable(const char *name, int cluster, void (*kernel)(void **)) {
  launchables()[name] = {cluster, kernel};
}

void disturb(unsigned new_seed, int lost_load) {
  seed = new_seed;
  lost = lost_load;
}

const char *launch(const char *name, int64_t grid, int count, void **arguments) {
  const Kernel &kernel = launchables().at(name);
  violation.clear();
  rng.seed(seed);
  loads_asked = 0;
  code = [function = kernel.function, arguments] { function(arguments); };
  blocks = (int)grid;
  of_cta = count;
  current = -1;
  require(blocks % kernel.cluster == 0, "clusters are not whole");
  for (first_block = 0; first_block < blocks && violation.empty(); first_block += kernel.cluster)
    run_cluster((size_t)kernel.cluster);
  if (violation.empty()) return nullptr;
  violation += " (one of the CTAs before " + std::to_string(first_block) + " of " + std::to_string(blocks) + ")";
  return violation.c_str();
}

int thread_index() { return current % of_cta; }
int block_index() { return first_block + current / of_cta; }
int block_size() { return of_cta; }
int grid_size() { return blocks; }

void require(bool holds, const char *what) {
  if (holds || !violation.empty()) return;
  violation = what;
  if (current >= 0) {
    violation += "; CTA " + std::to_string(block_index()) + ", thread " + std::to_string(thread_index());
    give_way(); /* and never again */
  }
}

/* ---- shared memory ----------------------------------------------------------------------------------------------- */

uint32_t address_in_cta(uint32_t address, int rank) {
  require(rank >= 0 && (size_t)rank < ctas.size(), "no such CTA in the cluster");
  return address | (uint32_t)(rank + 1) << RANK_SHIFT;
}

char *shared(uint32_t address, int bytes) {
  require(address >= SHARED_ADDRESS && address + (uint32_t)bytes <= SHARED_ADDRESS + SHARED_BYTES,
          "an address beyond shared memory");
  return cta().memory.data() + (address - SHARED_ADDRESS);
}

const char *read_late(uint32_t address, int bytes) {
  self().reads.push_back({address, address + (uint32_t)bytes});
  return shared(address, bytes);
}

void load_box(uint32_t destination, uint32_t barrier, const TensorMap &map, const int *corner) {
  const int row_bytes = row_bytes_of(map), bytes = bytes_of(map);
  const int boundary = map.is_swizzled ? row_bytes : 16;
  require(destination % (uint32_t)boundary == 0, "a box that begins within a row of shared memory");
  shared(destination, bytes);
  const Range target = {destination, destination + (uint32_t)bytes};
  const int first = current / of_cta * of_cta;
  for (int i = first; i < first + of_cta; i++)
    for (const Range &read : threads[(size_t)i].reads)
      require(!overlap(read, target), "a load over what may still be read");
  Load load = {destination, &mbarrier_at(barrier), map, {}};
  memcpy(load.corner, corner, sizeof load.corner);
  if (loads_asked++ != lost) cta().loads.push_back(load);
}

void store_shared(uint32_t to, int bytes, const uint32_t *words) {
  memcpy(shared(to, bytes), words, (size_t)bytes);
  self().writes.push_back({to, to + (uint32_t)bytes});
}

void fence_async() {
  Thread &thread = self();
  thread.fenced.insert(thread.fenced.end(), thread.writes.begin(), thread.writes.end());
  thread.writes.clear();
}

void add_later(int32_t *to, uint32_t from, int bytes) {
  const Range source = {from, from + (uint32_t)bytes};
  shared(from, bytes);
  const int first = current / WARP * WARP; /* what this warp wrote; of others a barrier would have to tell */
  for (int i = first; i < first + WARP; i++)
    for (const Range &write : threads[(size_t)i].writes)
      require(!overlap(write, source), "a sum of what TMA may not see yet");
  self().additions.push_back({to, source});
}

void await_additions() {
  for (const Addition &one : self().additions) {
    const int bytes = (int)(one.from.to - one.from.from);
    const char *const from = shared(one.from.from, bytes);
    for (int i = 0; i < bytes / 4; i++) {
      uint32_t x, sum;
      memcpy(&x, from + 4 * i, sizeof x);
      memcpy(&sum, one.to + i, sizeof sum);
      sum += x;
      memcpy(one.to + i, &sum, sizeof sum);
    }
  }
  self().additions.clear();
}

static void send(uint32_t destination, uint32_t barrier, int bytes, const void *from) {
  const uint32_t rank = destination >> RANK_SHIFT, offset = destination % (1u << RANK_SHIFT);
  require(rank != 0 && rank == barrier >> RANK_SHIFT, "a store into one CTA that tells another");
  Cta &to = ctas[rank - 1];
  require(&to == &cta() || self().clusters_awaited > 0, "a store into a CTA that may not have begun");
  require(to.threads_left > 0, "a store into a CTA that has ended");
  shared(offset, bytes);
  const char *const first = static_cast<const char *>(from);
  to.stores[(size_t)current / WARP].push_back(
      {&to.memory[offset - SHARED_ADDRESS], &mbarrier_at(barrier), std::vector<char>(first, first + bytes)});
}

void store_async(uint32_t destination, uint32_t barrier, int bytes, const uint32_t *words) {
  exchange(0);
  send(destination, barrier, bytes, words);
}

void copy_async(uint32_t destination, uint32_t from, int bytes, uint32_t barrier) {
  const Range source = {from, from + (uint32_t)bytes};
  const int first = current / of_cta * of_cta;
  for (int i = first; i < first + of_cta; i++)
    for (const std::vector<Range> *writes : {&threads[(size_t)i].writes, &threads[(size_t)i].fenced})
      for (const Range &write : *writes)
        require(!overlap(write, source), "a copy of what TMA may not see yet");
  send(destination, barrier, bytes, shared(from, bytes));
}

/* ---- barriers ---------------------------------------------------------------------------------------------------- */

void mbarrier_init(uint32_t barrier, int arrivals) {
  Mbarrier fresh;
  fresh.arrivals = fresh.pending = arrivals;
  cta().mbarriers[barrier] = fresh;
}

void mbarrier_arrive(uint32_t barrier, int64_t bytes) {
  Mbarrier &at = mbarrier_at(barrier);
  require(at.pending > 0, "an arrival too many");
  at.bytes += bytes;
  at.pending--;
  complete(at);
}

/* Bytes that have been asked for, or stored, and have not arrived. */
int64_t under_way(const Mbarrier &to) {
  int64_t bytes = 0;
  for (const Load &load : cta().loads)
    if (load.barrier == &to) bytes += bytes_of(load.map);
  for (const std::deque<Store> &of_warp : cta().stores)
    for (const Store &store : of_warp)
      if (store.barrier == &to) bytes += (int64_t)store.bytes.size();
  return bytes;
}

/* Whether all that an mbarrier still lacks is under way. */
bool is_on_its_way(const Mbarrier &barrier) { return barrier.pending == 0 && barrier.bytes == under_way(barrier); }

bool has_come(uint32_t barrier, uint32_t parity) { return (uint32_t)(mbarrier_at(barrier).phase & 1) != parity; }

bool mbarrier_test(uint32_t barrier, uint32_t parity) { return exchange(has_come(barrier, parity))[0] != 0; }

bool mbarrier_await(uint32_t barrier, uint32_t parity) {
  const Mbarrier &at = mbarrier_at(barrier);
  Thread &thread = self();
  /* A wait lasts as long as a load may take; who has not asked yet, or not told, may sleep for longer. Lane 0 is the
   * one that asks for its warp. */
  if (ctas.size() > 1 && lost < 0 && current % WARP == 0)
    require(has_come(barrier, parity) || is_on_its_way(at), "a wait for what is not under way yet");
  if (lost < 0) {
    while (!has_come(barrier, parity))
      await_change(&at.phase);
    return true;
  }
  bool came = false;
  if (current % WARP == 0) { /* a warp's wait ends for all its lanes alike */
    thread.may_give_up = true;
    while (!(came = has_come(barrier, parity)) && !thread.gives_up)
      await_change(&at.phase);
    thread.may_give_up = thread.gives_up = false;
  }
  return exchange(came)[0] != 0;
}

void named_barrier(int id, int count, bool wait) {
  require(id >= 0 && id < NAMED_BARRIERS, "no such named barrier");
  self().reads.clear();
  self().fenced.clear();
  NamedBarrier &barrier = cta().named_barriers[id];
  require(barrier.arrived == 0 || barrier.threads == count, "a named barrier is met by two numbers of threads");
  barrier.threads = count;
  if (++barrier.arrived == count) {
    barrier.arrived = 0;
    barrier.generation++;
  } else if (wait) {
    await_change(&barrier.generation);
  }
}

void cluster_arrive() {
  self().reads.clear();
  require(self().clusters_met == self().clusters_awaited, "a second arrival at the cluster's barrier");
  self().clusters_met++;
  if (++cluster_arrived == (long)ctas.size() * of_cta) {
    cluster_arrived = 0;
    cluster_generation++;
  }
}

void cluster_wait() {
  while (cluster_generation < self().clusters_met)
    await_change(&cluster_generation);
  self().clusters_awaited = self().clusters_met;
}

/* ---- threads that meet ------------------------------------------------------------------------------------------- */

const uint64_t *meet(int lanes, uint64_t brought, const std::function<void(const uint64_t *)> &act) {
  const size_t index = (size_t)(thread_index() / lanes);
  Meeting &meeting = lanes == WARP ? cta().warps[index] : cta().warpgroups[index];
  uint64_t *const all = meeting.brought[meeting.generation % 2];
  all[current % lanes] = brought;
  if (++meeting.arrived < lanes) {
    await_change(&meeting.generation);
  } else {
    if (act) act(all);
    meeting.arrived = 0;
    meeting.generation++;
  }
  return all;
}

bool elect() {
  meet(WARP, 0, nullptr);
  return current % WARP == 0;
}

const uint64_t *exchange(uint64_t value) { return meet(WARP, value, nullptr); }

} // namespace emulated
