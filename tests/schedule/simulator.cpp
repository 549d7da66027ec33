/*
 * simulator.cpp - runs the warps of one CTA; and what is checked of its barriers, loads and products in flight in any
 * family (barriers.cpp, products.cpp).
 *
 * Time: warps are coroutines that give way at every barrier, load, product and wait. A random scheduler, with equal
 * chances or with priorities, chooses who goes on, and when a load that is under way arrives.
 *
 * Order: one event comes before another only by program order and by named barriers (vector clocks). That a wait for
 * an mbarrier succeeded orders nothing but the reads of what its loads brought, unless the family's model says that its
 * kernels rely on more: an arrival releases, a wait acquires (PTX ISA, "mbarrier"). So most mistakes of order show in
 * every schedule, not only in the one where they do harm.
 *
 * Products: a wgmma reads its tiles from its issue until a wait for its group, and its accumulator is NaN until then.
 *
 * Areas of shared memory are what a warp writes for products, or for a bulk sum, to read.
 *
 * Checked here, whatever the family:
 * - every product reads a tile that its model expects, at the right address, after its arrival;
 * - a load overwrites a box only after all reads of it, and after the load before has been seen to arrive;
 * - a warp arrives at an mbarrier once a phase, after having seen the phase before, and before its loads; a phase ends
 *   only after all warps have seen the one before, so its parity misleads nobody; waits alternate in parity;
 * - a named barrier is met by the expected number of threads, each warp once, after its phase before has ended;
 * - a warp that sleeps for what another one still has to ask for sleeps longer than that one may;
 * - a wait that is spread over a step makes all its tries, each knows what the one before said, and the phase stays
 *   until the last; any but the last may end too early, in every run;
 * - a product reads an area after a fence that follows its stores; it is written again only after all reads of it;
 * - a bulk sum begins after a fence and a meeting of the lanes which follow the stores; what it reads is written again
 *   only after it has been waited for, and the lanes have met; and the CTA waits for it before its end;
 * - all barriers and loads are at rest in the end; and the end comes.
 * Which tiles are multiplied in which order, and what is stored when, a family's model checks (model.h).
 *
 * With time-outs, each wait may give up while the phase is still to come, and does so if nothing else can go on. Then a
 * warp that gave up may read anything, but all it stores from then on is NaN, and it asks for no tile. All other checks
 * but those of the barriers and loads at rest hold for the other warps, and the end comes all the same.
 *
 * Not modelled: values, but for which are there; registers that a product under way reads (so no wgmma fence); lanes of
 * a warp, but for the first, and how often they have met in a shuffle; the mask, L2, other CTAs, the order that a fence
 * of mbarrier_init makes, or that a read needs before a load over it; and how long anything takes.
 */
#include "simulator.h"

#include <stdio.h>
#include <stdlib.h>

#include <algorithm>

#include "machine.h"

namespace sim {

std::array<Warp, MAX_WARPS> warps;
std::vector<Mbarrier> mbarriers;
std::array<NamedBarrier, NAMED_BARRIERS> named_barriers;
std::vector<Box> boxes;
std::vector<Area> areas;
std::vector<Load> loads;
std::mt19937 rng;
Layout layout;
int current;
bool time_outs;

namespace {

enum { STACK_BYTES = 128 << 10 };

ucontext_t scheduler;
unsigned run_seed;
std::vector<int> run_lengths;

void warp_main() {
  model::run_warp();
  self().ended = true;
  give_way();
}

void set_up_warp(Warp &w) {
  if (!w.stack) w.stack.reset(new char[STACK_BYTES]);
  w.ended = w.awaited_launches = w.gave_up = w.gives_up = false;
  w.late = 0;
  w.at_named_barrier = w.at_mbarrier = -1;
  w.priority = (int)(rng() % 1000);
  w.meetings = 0;
  w.clock = {};
  for (int i = 0; i < MAX_WARPS; i++) {
    w.wait_began[i].clear();
    w.seen[i] = 0;
  }
  w.tries = {};
  w.open = {};
  w.pending.clear();
  getcontext(&w.context);
  w.context.uc_stack.ss_sp = w.stack.get();
  w.context.uc_stack.ss_size = STACK_BYTES;
  w.context.uc_link = nullptr;
  makecontext(&w.context, warp_main, 0);
}

void set_up(const std::vector<int> &lengths) {
  layout = model::begin(lengths);
  mbarriers.assign((size_t)layout.mbarriers, Mbarrier());
  named_barriers.fill(NamedBarrier());
  boxes.clear();
  for (const Boxes &several : layout.boxes)
    for (int i = 0; i < several.count; i++) {
      Box box = {};
      box.start = several.start + (uint32_t)i * several.bytes;
      box.bytes = several.bytes;
      box.stays = several.stay;
      boxes.push_back(box);
    }
  areas.clear();
  for (const uint32_t start : layout.areas) {
    Area area = {};
    area.start = start;
    areas.push_back(area);
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
  for (const Warp &w : warps)
    require(w.tries.made == 0, "a wait of too few tries");
  for (const Area &area : areas)
    require(area.sum == Area::AT_REST || area.sum == Area::READ,
            "a bulk sum may read shared memory after its CTA's end");
  if (time_outs) return;
  require(loads.empty(), "a load is under way in the end");
  for (const Mbarrier &barrier : mbarriers)
    require(barrier.pending == barrier.arrivals && barrier.bytes == 0, "an mbarrier is not at rest in the end");
  for (const NamedBarrier &barrier : named_barriers)
    require(barrier.arrived == 0, "a named barrier is not at rest in the end");
}

} // namespace

void give_way() { swapcontext(&self().context, &scheduler); }

void join(Clock &clock, const Clock &other) {
  for (size_t i = 0; i < clock.size(); i++)
    clock[i] = std::max(clock[i], other[i]);
}

int random(int n) { return (int)(rng() % (unsigned)n); }

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

int warp_index() { return current; }

int warp_count() { return layout.warps; }

void await_launches_before() { self().awaited_launches = true; }

bool has_timed_out() { return self().timed_out(); }
bool launches_have_ended() { return self().awaited_launches; }

void meet_lanes() { self().meetings++; }
int meetings() { return self().meetings; }

} // namespace sim
