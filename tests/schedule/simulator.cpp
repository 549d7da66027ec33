/*
 * simulator.cpp - one CTA's warps, barriers, loads and products in flight, and what is checked of them in any family.
 *
 * Time: warps are coroutines that give way at every barrier, load, product and wait. A random scheduler, with equal
 * chances or with priorities, chooses who goes on, and when a load that is under way arrives.
 *
 * Order: one event comes before another only by program order and by named barriers (vector clocks). That a wait for
 * an mbarrier succeeded orders nothing but the reads of what its loads brought, unless the family's model says that its
 * kernels rely on more: an arrival releases, a wait acquires (PTX ISA, "mbarrier"). So most mistakes of order show in
 * every schedule, not only in the one where they do harm.
 *
 * Products: a wgmma reads its tiles from its issue until a wait for its group.
 *
 * Checked here, whatever the family:
 * - every product reads a tile that its model expects, at the right address, after its arrival;
 * - a load overwrites a box only after all reads of it, and after the load before has been seen to arrive;
 * - a warp arrives at an mbarrier once a phase, after having seen the phase before, and before its loads; a phase ends
 *   only after all warps have seen the one before, so its parity misleads nobody; waits alternate in parity;
 * - a named barrier is met by the expected number of threads, each warp once, after its phase before has ended;
 * - all barriers and loads are at rest in the end; and the end comes.
 * Which tiles are multiplied in which order, and what is stored when, a family's model checks (model.h).
 *
 * With time-outs, each wait may give up while the phase is still to come, and does so if nothing else can go on. Then a
 * warp that gave up may read anything, but all it stores from then on is NaN, and it asks for no tile. All other checks
 * but those of the barriers and loads at rest hold for the other warps, and the end comes all the same.
 *
 * Not modelled: values and registers (so no wgmma fence), lanes of a warp, the mask, L2, other CTAs, the order that a
 * fence of mbarrier_init or of the TMA's proxy makes, and how long anything takes.
 */
#include "simulator.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <ucontext.h>

#include <algorithm>
#include <array>
#include <memory>
#include <random>

namespace sim {
namespace {

enum { NAMED_BARRIERS = 16, STACK_BYTES = 128 << 10 };

/* ---- state of a run -------------------------------------------------------------------------------------------- */

using Clock = std::array<int, MAX_WARPS>;

void join(Clock &clock, const Clock &other) {
  for (size_t i = 0; i < clock.size(); i++)
    clock[i] = std::max(clock[i], other[i]);
}

/* A place in shared memory for one tile. */
struct Box {
  uint32_t start, bytes;
  Tile holds;
  int barrier = -1, phase = -1; /* that its last load completes */
  bool under_way = false;
  std::array<int, MAX_WARPS> reads = {}; /* begun and not ended, by warp */
  Clock read = {};                       /* when each warp last ended one */
};

struct Mbarrier {
  int phase = 0; /* how many have been completed */
  int arrivals = 0, pending = 0;
  int64_t bytes = 0;
  unsigned arrived = 0; /* warps, in this phase */
  Clock clock = {};
  Clock ended = {}; /* of the phase that was completed last */
};

struct NamedBarrier {
  int threads = 0;
  unsigned arrived = 0;
  Clock clock = {}, clock_before = {}; /* of this phase; of the one before */
};

struct Load {
  Box *box;
  int barrier, phase;
};

/* A wgmma group: which product of its model (-1: none yet), in how many steps, and the boxes it reads, each time. */
struct Group {
  int product = -1;
  int steps = 0;
  std::vector<Box *> reads;
};

struct Warp {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  bool ended, awaited_launches, timed_out;
  int at_named_barrier, at_mbarrier; /* where it waits; -1: nowhere */
  uint32_t parity;                   /* that it waits for at an mbarrier */
  bool gives_up;                     /* the next time it has a turn, if the phase has not come */
  int priority;
  Clock clock;
  std::vector<int> wait_began[MAX_WARPS]; /* by mbarrier and phase, on this warp's clock */
  int seen[MAX_WARPS];                    /* phases of each mbarrier that it has seen completed */
  Group open;
  std::vector<Group> pending;
};

std::array<Warp, MAX_WARPS> warps;
std::vector<Mbarrier> mbarriers;
std::array<NamedBarrier, NAMED_BARRIERS> named_barriers;
std::vector<Box> boxes;
std::vector<Load> loads;
std::mt19937 rng;
Layout layout;
ucontext_t scheduler;
int current; /* the warp that runs */
bool time_outs;
unsigned run_seed;
std::vector<int> run_lengths;

Warp &self() { return warps[(size_t)current]; }

bool one_in(unsigned n) { return rng() % n == 0; }

void give_way() { swapcontext(&self().context, &scheduler); }

/* A moment of its own on the warp's clock. */
void tick() { self().clock[(size_t)current]++; }

/* ---- mbarriers and loads --------------------------------------------------------------------------------------- */

int mbarrier_at(uint32_t address) {
  const uint32_t index = (address - layout.barriers) / 8;
  require(index < mbarriers.size() && address % 8 == 0, "an address that is no mbarrier's");
  return (int)index;
}

bool has_come(const Warp &w) { return ((unsigned)mbarriers[(size_t)w.at_mbarrier].phase & 1) != w.parity; }

void complete_if_due(int index) {
  Mbarrier &barrier = mbarriers[(size_t)index];
  if (barrier.pending != 0 || barrier.bytes != 0) return;
  for (int i = 0; barrier.phase > 0 && i < warp_count(); i++) {
    const Warp &w = warps[(size_t)i];
    if (!model::waits_for(i, index) || w.timed_out) continue;
    require(w.seen[index] >= barrier.phase &&
                w.wait_began[index][(size_t)barrier.phase - 1] <= barrier.clock[(size_t)i],
            "a phase may end before a warp has seen the one before");
  }
  barrier.phase++;
  barrier.ended = barrier.clock;
  barrier.pending = barrier.arrivals;
  barrier.arrived = 0;
}

void finish_load(size_t index) {
  const Load done = loads[index];
  loads.erase(loads.begin() + (std::ptrdiff_t)index);
  Mbarrier &barrier = mbarriers[(size_t)done.barrier];
  require(barrier.phase == done.phase, "a load ends in another phase than it began");
  done.box->under_way = false;
  barrier.bytes -= done.box->bytes;
  require(barrier.bytes >= 0, "a load of more bytes than announced");
  complete_if_due(done.barrier);
}

/* ---- a run ----------------------------------------------------------------------------------------------------- */

void warp_main() {
  model::run_warp();
  self().ended = true;
  give_way();
}

void set_up_warp(Warp &w) {
  if (!w.stack) w.stack.reset(new char[STACK_BYTES]);
  w.ended = w.awaited_launches = w.timed_out = w.gives_up = false;
  w.at_named_barrier = w.at_mbarrier = -1;
  w.priority = (int)(rng() % 1000);
  w.clock = {};
  for (int i = 0; i < MAX_WARPS; i++) {
    w.wait_began[i].clear();
    w.seen[i] = 0;
  }
  w.open = {};
  w.pending.clear();
  getcontext(&w.context);
  w.context.uc_stack.ss_sp = w.stack.get();
  w.context.uc_stack.ss_size = STACK_BYTES;
  w.context.uc_link = nullptr;
  makecontext(&w.context, warp_main, 0);
}

void set_up(const std::vector<int> &lengths) {
  layout = model::begin(lengths, rng);
  mbarriers.assign((size_t)layout.mbarriers, Mbarrier());
  named_barriers.fill(NamedBarrier());
  boxes.clear();
  for (const Boxes &several : layout.boxes)
    for (int i = 0; i < several.count; i++) {
      Box box = {};
      box.start = several.start + (uint32_t)i * several.bytes;
      box.bytes = several.bytes;
      boxes.push_back(box);
    }
  loads.clear();
  for (int i = 0; i < warp_count(); i++)
    set_up_warp(warps[(size_t)i]);
}

bool can_go_on(const Warp &w) {
  return !w.ended && w.at_named_barrier < 0 && (w.at_mbarrier < 0 || has_come(w) || w.gives_up);
}

/* One of the warps that wait for an mbarrier gives up; false if none waits. */
bool give_up() {
  std::vector<Warp *> waiting;
  for (Warp &w : warps)
    if (!w.ended && w.at_mbarrier >= 0) waiting.push_back(&w);
  if (waiting.empty()) return false;
  waiting[rng() % waiting.size()]->gives_up = true;
  return true;
}

enum class Policy { equal_chances, fixed_priorities, changing_priorities };

int choose(const std::vector<int> &ready, Policy policy) {
  if (policy == Policy::equal_chances) return ready[rng() % ready.size()];
  if (policy == Policy::changing_priorities && one_in(50))
    warps[(size_t)ready[rng() % ready.size()]].priority = (int)(rng() % 1000);
  return *std::max_element(ready.begin(), ready.end(),
                           [](int a, int b) { return warps[(size_t)a].priority < warps[(size_t)b].priority; });
}

void check_end() {
  for (current = 0; current < warp_count(); current++)
    model::end_warp();
  if (time_outs) return;
  require(loads.empty(), "a load is under way in the end");
  for (const Mbarrier &barrier : mbarriers)
    require(barrier.pending == barrier.arrivals && barrier.bytes == 0, "an mbarrier is not at rest in the end");
  for (const NamedBarrier &barrier : named_barriers)
    require(barrier.arrived == 0, "a named barrier is not at rest in the end");
}

} // namespace

void require(bool holds, const char *what) {
  if (holds) return;
  printf("violation: %s; warp %d, seed %u, time-outs %s, lengths:", what, current, run_seed, time_outs ? "on" : "off");
  for (int length : run_lengths)
    printf(" %d", length);
  printf("\n");
  fflush(stdout);
  _Exit(1); /* the destructors would free the stack that this runs on */
}

Rows run(const std::vector<int> &lengths, unsigned seed, bool with_time_outs) {
  run_seed = seed;
  run_lengths = lengths;
  time_outs = with_time_outs;
  rng.seed(seed);
  set_up(lengths);
  const Policy policy = static_cast<Policy>(rng() % 3);
  const unsigned steps_a_load = 1 + rng() % 30;
  for (;;) {
    std::vector<int> ready;
    bool all_ended = true;
    for (int i = 0; i < warp_count(); i++) {
      all_ended &= warps[(size_t)i].ended;
      if (can_go_on(warps[(size_t)i])) ready.push_back(i);
    }
    if (all_ended) break;
    if (!loads.empty() && (ready.empty() || one_in(steps_a_load))) {
      finish_load(rng() % loads.size());
    } else if (ready.empty()) {
      require(time_outs && give_up(), "no warp can go on");
    } else {
      current = choose(ready, policy);
      swapcontext(&scheduler, &self().context);
    }
  }
  check_end();
  return model::rows();
}

/* ---- what the stubs call --------------------------------------------------------------------------------------- */

int warp_index() { return current; }

int warp_count() { return layout.warps; }

void await_launches_before() { self().awaited_launches = true; }

void mbarrier_init(uint32_t address, int arrivals) {
  Mbarrier &barrier = mbarriers[(size_t)mbarrier_at(address)];
  barrier.arrivals = barrier.pending = arrivals;
}

void mbarrier_arrive(uint32_t address, uint32_t bytes) {
  give_way();
  tick();
  const Warp &w = self();
  const int index = mbarrier_at(address);
  Mbarrier &barrier = mbarriers[(size_t)index];
  require(w.awaited_launches, "an arrival before the launches before have ended");
  require(!w.timed_out, "a warp that timed out arrives at an mbarrier");
  require(w.seen[index] == barrier.phase, "an arrival in a phase before the end of the last has been seen");
  require(!(barrier.arrived >> current & 1), "two arrivals of a warp in one phase");
  require(barrier.pending > 0, "more arrivals than expected");
  barrier.arrived |= 1u << current;
  barrier.pending--;
  barrier.bytes += bytes;
  join(barrier.clock, w.clock);
  complete_if_due(index);
}

bool mbarrier_wait(uint32_t address, uint32_t parity, bool at_start) {
  Warp &w = self();
  const int index = mbarrier_at(address);
  const int phase = (int)w.wait_began[index].size();
  const bool is_extra = at_start && model::waits_twice(index);
  /* the phase before has ended, also that before the first, as the hardware has it: a tile that was not awaited shows
   * when it is read */
  if (layout.waits_for_nothing && parity != ((unsigned)phase & 1)) return true;
  require(parity == ((unsigned)phase & 1), "a wait for the wrong parity");
  tick();
  if (!is_extra) w.wait_began[index].push_back(w.clock[(size_t)current]);
  w.at_mbarrier = index;
  w.parity = parity;
  w.gives_up = time_outs && one_in(50);
  give_way();
  const bool came = has_come(w);
  w.at_mbarrier = -1;
  w.timed_out |= !came;
  if (w.timed_out) return came;
  require(mbarriers[(size_t)index].phase == phase + 1, "a wait ends in another phase");
  w.seen[index] = phase + 1;
  if (layout.mbarriers_order) join(w.clock, mbarriers[(size_t)index].ended);
  return true;
}

void named_barrier(int id, int threads, bool wait) {
  give_way();
  tick();
  require(id >= 0 && id < NAMED_BARRIERS, "a named barrier that does not exist");
  Warp &w = self();
  NamedBarrier &barrier = named_barriers[(size_t)id];
  require(barrier.arrived == 0 || barrier.threads == threads, "a named barrier is met with different thread counts");
  require(!(barrier.arrived >> current & 1), "a warp meets a named barrier twice in one phase");
  for (size_t i = 0; i < MAX_WARPS; i++)
    require(barrier.clock_before[i] <= w.clock[i], "a named barrier may be met before its last phase has ended");
  if (barrier.arrived == 0) barrier.clock = {};
  barrier.threads = threads;
  barrier.arrived |= 1u << current;
  join(barrier.clock, w.clock);
  if (wait) w.at_named_barrier = id;
  if (32 * __builtin_popcount(barrier.arrived) == threads) {
    for (Warp &waiting : warps) {
      if (waiting.at_named_barrier != id) continue;
      waiting.at_named_barrier = -1;
      join(waiting.clock, barrier.clock);
    }
    barrier.clock_before = barrier.clock;
    barrier.arrived = 0;
  }
  if (wait) give_way();
}

void load(uint32_t destination, uint32_t barrier, const Tile &tile) {
  give_way();
  tick();
  const Warp &w = self();
  const int index = mbarrier_at(barrier);
  const auto box = std::find_if(boxes.begin(), boxes.end(), [=](const Box &b) { return b.start == destination; });
  require(box != boxes.end(), "a load to where no box begins");
  require(w.awaited_launches, "a load before the launches before have ended");
  require(!w.timed_out, "a warp that timed out asks for a tile");
  require(mbarriers[(size_t)index].arrived >> current & 1, "a load without its arrival in this phase");
  require(!box->under_way && (box->barrier < 0 || w.seen[box->barrier] > box->phase),
          "a load over one that has not been seen to arrive");
  for (int i = 0; i < warp_count(); i++) {
    const size_t reader = (size_t)i;
    require(box->reads[reader] == 0 || warps[reader].timed_out, "a load over a tile that is being read");
    require(box->read[reader] <= w.clock[reader], "a load that does not come after the last read");
  }
  box->holds = tile;
  box->barrier = index;
  box->phase = mbarriers[(size_t)index].phase;
  box->under_way = true;
  loads.push_back({&*box, index, box->phase});
}

/* ---- what a family's model calls ------------------------------------------------------------------------------- */

bool has_timed_out() { return self().timed_out; }
bool launches_have_ended() { return self().awaited_launches; }
bool products_have_ended() { return self().pending.empty(); }

int step_of(int product) {
  Group &open = self().open;
  if (open.product < 0) give_way();
  require(open.product < 0 || open.product == product, "one group of two products");
  open.product = product;
  return open.steps++;
}

void read(uint32_t address, const Tile &tile) {
  const auto box = std::find_if(boxes.begin(), boxes.end(), [=](const Box &b) { return b.start == address; });
  require(box != boxes.end(), "a product reads where no box begins");
  Warp &w = self();
  const bool has_arrived = !box->under_way && box->barrier >= 0 && w.seen[box->barrier] == box->phase + 1;
  require(w.timed_out || (has_arrived && box->holds == tile), "a product reads a tile that is wrong or not there");
  box->reads[(size_t)current]++;
  w.open.reads.push_back(&*box);
}

/* ---- products in flight ---------------------------------------------------------------------------------------- */

void commit_products() {
  tick();
  Warp &w = self();
  require(w.open.product >= 0, "a group without products");
  model::commit(w.open.product, w.open.steps);
  w.pending.push_back(w.open);
  w.open = {};
  give_way();
}

void await_products(int pending) {
  give_way();
  tick();
  Warp &w = self();
  while ((int)w.pending.size() > pending) {
    for (Box *box : w.pending.front().reads) {
      box->reads[(size_t)current]--;
      if (!w.timed_out) box->read[(size_t)current] = w.clock[(size_t)current];
    }
    w.pending.erase(w.pending.begin());
  }
}

} // namespace sim
