/*
 * barriers.cpp - mbarriers, the loads that complete them, and named barriers; what is checked of them says
 * simulator.cpp.
 */
#include "machine.h"

#include <algorithm>

namespace sim {
namespace {

int mbarrier_at(uint32_t address) {
  const uint32_t index = (address - layout.barriers) / 8;
  require(index < mbarriers.size() && address % 8 == 0, "an address that is no mbarrier's");
  return (int)index;
}

void complete_if_due(int index) {
  Mbarrier &barrier = mbarriers[(size_t)index];
  if (barrier.pending != 0 || barrier.bytes != 0) return;
  for (int i = 0; barrier.phase > 0 && i < warp_count(); i++) {
    const Warp &w = warps[(size_t)i];
    if (!model::waits_for(i, index) || w.timed_out()) continue;
    require(w.seen[index] >= barrier.phase &&
                w.wait_began[index][(size_t)barrier.phase - 1] <= barrier.clock[(size_t)i],
            "a phase may end before a warp has seen the one before");
  }
  barrier.phase++;
  barrier.ended = barrier.clock;
  barrier.pending = barrier.arrivals;
  barrier.arrived = 0;
}

} // namespace

static bool phase_has_come(int index, uint32_t parity) {
  return ((unsigned)mbarriers[(size_t)index].phase & 1) != parity;
}

bool has_come(const Warp &w) { return phase_has_come(w.at_mbarrier, w.parity); }

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
  require(!w.timed_out(), "a warp that timed out arrives at an mbarrier");
  require(w.seen[index] == barrier.phase, "an arrival in a phase before the end of the last has been seen");
  require(!(barrier.arrived >> current & 1), "two arrivals of a warp in one phase");
  require(barrier.pending > 0, "more arrivals than expected");
  barrier.arrived |= 1u << current;
  barrier.askers |= 1u << current;
  barrier.pending--;
  barrier.bytes += bytes;
  join(barrier.clock, w.clock);
  complete_if_due(index);
}

/*
 * A wait begins for the next phase of an mbarrier. False if it waits for nothing: the phase before has ended, also that
 * before the first, as the hardware has it. A tile that was not awaited shows when it is read.
 */
static bool begin_wait(int index, uint32_t parity, bool at_length) {
  Warp &w = self();
  const int phase = (int)w.wait_began[index].size();
  if (parity != ((unsigned)phase & 1)) {
    require(at_length || index < layout.for_nothing, "a wait for the wrong parity");
    return false;
  }
  w.phase_awaited = phase + 1;
  tick();
  if (!(at_length && model::waits_twice(index))) w.wait_began[index].push_back(w.clock[(size_t)current]);
  return true;
}

/*
 * Who sleeps for a phase that another warp still has to ask for must not give up before that one, which may itself be
 * asleep for something late, or that was late: when that has come it sleeps on, once. Who asks for a stage is who has
 * asked for it before, or, where these are the same, for the one before it.
 */
static void require_patience() {
  const auto is_asleep = [](const Warp &w) { return w.sleeps > 0 && !w.gave_up && w.at_mbarrier >= 0; };
  for (const Warp &w : warps) {
    if (!is_asleep(w) || has_come(w)) continue;
    const Mbarrier &barrier = mbarriers[(size_t)w.at_mbarrier];
    const bool is_next = w.at_mbarrier > 0 && w.at_mbarrier < layout.ring && barrier.askers == 0;
    const unsigned askers = is_next ? mbarriers[(size_t)w.at_mbarrier - 1].askers : barrier.askers;
    for (int i = 0; i < warp_count(); i++) {
      const Warp &asks = warps[(size_t)i];
      const bool has_to_ask = askers >> i & ~barrier.arrived >> i & 1;
      require(&asks == &w || !has_to_ask || !is_asleep(asks) ||
                  w.sleeps > (has_come(asks) ? std::min(asks.sleeps, (int)SLEEP) : asks.sleeps),
              "a warp sleeps no longer than the one that it waits for may");
    }
  }
}

static bool try_once(int index, uint32_t parity, bool may_give_up) {
  Warp &w = self();
  w.at_mbarrier = index;
  w.parity = parity;
  w.gives_up = may_give_up;
  require_patience();
  give_way();
  const bool came = has_come(w);
  w.at_mbarrier = -1;
  return came;
}

/* The same, so many sleeps long; 0: none, because the phase was seen to have come. */
static bool try_asleep(int index, uint32_t parity, int sleeps, bool may_give_up) {
  self().sleeps = sleeps;
  const bool came = try_once(index, parity, may_give_up);
  self().sleeps = 0;
  return came;
}

/* The warp knows that the phase came, or that it has waited in vain. */
static void end_wait(int index, bool came, bool at_length) {
  Warp &w = self();
  if (at_length) w.late &= ~(1u << index);
  if (!came && at_length) w.gave_up = true;
  if (!came && !at_length) w.late |= 1u << index;
  if (!came || w.gave_up) return;
  const int phase = mbarriers[(size_t)index].phase;
  require(w.timed_out() || phase == w.phase_awaited, "a wait ends in another phase");
  w.seen[index] = phase;
  if (layout.mbarriers_order) join(w.clock, mbarriers[(size_t)index].ended);
}

bool mbarrier_test(uint32_t address, uint32_t parity) {
  give_way();
  return phase_has_come(mbarrier_at(address), parity);
}

/* At length: at the start, or again where a wait was too short. */
bool mbarrier_wait(uint32_t address, uint32_t parity, int sleeps, bool came_before) {
  const int index = mbarrier_at(address);
  const bool at_length = sleeps > 0;
  Warp &w = self();
  if (at_length && (w.late >> index & 1))
    w.phase_awaited = (int)w.wait_began[index].size();
  else if (!begin_wait(index, parity, at_length))
    return true;
  require(!came_before || w.timed_out() || phase_has_come(index, parity), "a look was at another phase");
  const bool may_give_up = time_outs && !came_before && one_in(50);
  const bool came = try_asleep(index, parity, phase_has_come(index, parity) ? 0 : sleeps, may_give_up);
  end_wait(index, came, at_length);
  return came;
}

/* In a stream of tiles, and there is no other wait after it. */
bool mbarrier_wait_steady(uint32_t address, uint32_t parity) {
  const int index = mbarrier_at(address);
  if (!begin_wait(index, parity, false)) return true;
  const bool came = try_asleep(index, parity, phase_has_come(index, parity) ? 0 : NAP, time_outs && one_in(50));
  end_wait(index, came, true);
  return came;
}

/* Any try but the last two may end too early, time-outs or not: that is what the others are for. The last one only
 * makes sure that what the one before said is known; if that came in vain, it says anything. */
bool mbarrier_try(uint32_t address, uint32_t parity, bool came_before, int sleeps) {
  const int index = mbarrier_at(address);
  Tries &tries = self().tries;
  if (tries.made == 0) {
    tries.mbarrier = index;
    tries.parity = parity;
    tries.came = tries.naps = false;
    tries.for_nothing = !begin_wait(index, parity, false);
  }
  require(tries.mbarrier == index && tries.parity == parity, "a wait of too few tries");
  require(tries.came == came_before, "a try does not know what the one before said");
  if (++tries.made == TRIES) {
    tries.made = 0;
    return tries.came || one_in(2);
  }
  if (tries.for_nothing) return tries.came = true;
  const bool counts_last = tries.made == TRIES - 1;
  const bool came =
      try_asleep(index, parity, tries.came ? 0 : sleeps, counts_last ? time_outs && one_in(50) : one_in(2));
  tries.naps |= sleeps > 0;
  require(came || !tries.came || self().timed_out(), "a phase ends between two tries of a wait for the one before");
  if ((came && !tries.came) || (counts_last && !came)) end_wait(index, came, tries.naps);
  return tries.came = came;
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
  require(!w.timed_out(), "a warp that timed out asks for a tile");
  require(mbarriers[(size_t)index].arrived >> current & 1, "a load without its arrival in this phase");
  require(!box->under_way && (box->barrier < 0 || w.seen[box->barrier] > box->phase),
          "a load over one that has not been seen to arrive");
  for (int i = 0; i < warp_count(); i++) {
    const size_t reader = (size_t)i;
    require(box->reads[reader] == 0 || warps[reader].timed_out(), "a load over a tile that is being read");
    require(box->read[reader] <= w.clock[reader], "a load that does not come after the last read");
  }
  box->holds = tile;
  box->barrier = index;
  box->phase = mbarriers[(size_t)index].phase;
  box->under_way = true;
  loads.push_back({&*box, index, box->phase});
}

} // namespace sim
