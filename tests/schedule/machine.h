/*
 * machine.h - the state of the simulated CTA, which the files of the simulator share.
 */
#ifndef SCHEDULE_MACHINE_H
#define SCHEDULE_MACHINE_H

#include <ucontext.h>

#include <array>
#include <memory>
#include <random>
#include <vector>

#include "simulator.h"

namespace sim {

enum {
  NAMED_BARRIERS = 16,
  TRIES = 5 /* of a wait that is spread over a step (one_pass.cu) */
};

using Clock = std::array<int, MAX_WARPS>;

/* A place in shared memory for one tile. */
struct Box {
  uint32_t start, bytes;
  bool stays;
  Tile holds;
  int barrier = -1, phase = -1; /* that its last load completes */
  bool under_way = false;
  std::array<int, MAX_WARPS> reads = {}; /* begun and not ended, by warp */
  Clock read = {};                       /* when each warp last ended one */
};

/* A place in shared memory that one warp writes, for products or for a bulk sum to read. */
struct Area {
  uint32_t start;
  int writer = -1, content = -1; /* content: a number that the model gives what is written */
  bool complete = false;
  int fenced = -1;     /* when its writer has told TMA and wgmma, on the writer's clock; -1: not since it was written */
  bool synced = false; /* and all lanes have */
  enum { AT_REST, ADDED, COMMITTED, READ } sum = AT_REST; /* the bulk sum out of it; READ: known to one lane */
  std::array<int, MAX_WARPS> reads = {};                  /* of products, as of a box */
  Clock read = {};
};

struct Mbarrier {
  int phase = 0; /* how many have been completed */
  int arrivals = 0, pending = 0;
  int64_t bytes = 0;
  unsigned arrived = 0; /* warps, in this phase */
  unsigned askers = 0;  /* and in any */
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

/* A product's accumulator: NaN while it is under way; then, of the two rows of a lane, these numbers. */
struct Result {
  float *to;
  int count;
  float of_row[2];
};

/* A wgmma group: which product of its model (-1: none yet), in how many steps, and what it reads, each time. */
struct Group {
  int product = -1;
  int steps = 0;
  std::vector<Box *> reads;
  std::vector<Area *> areas;
  Result result = {nullptr, 0, {0.f, 0.f}};
};

/* A wait that is spread over a step: how many of its tries were made (0: no such wait), and what the last one said. */
struct Tries {
  int made = 0;
  int mbarrier = -1;
  uint32_t parity = 0;
  bool for_nothing = false, came = false;
  bool naps = false; /* one of its tries came after a sleep: there is no other wait after it */
};

struct Warp {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  bool ended, awaited_launches;
  bool gave_up;                      /* it has waited at length, in vain */
  uint32_t late;                     /* bit by mbarrier: its wait there timed out, and may be made again, at length */
  int at_named_barrier, at_mbarrier; /* where it waits; -1: nowhere */
  uint32_t parity;                   /* that it waits for at an mbarrier */
  bool gives_up;                     /* the next time it has a turn, if the phase has not come */
  int sleeps;                        /* how long it may sleep in the wait that it is in, before it gives up, in naps */
  int priority;
  int meetings; /* of its lanes in shuffles */
  Clock clock;
  std::vector<int> wait_began[MAX_WARPS]; /* by mbarrier and phase, on this warp's clock */
  int seen[MAX_WARPS];                    /* phases of each mbarrier that it has seen completed */
  int phase_awaited;                      /* how many will be complete when its wait, of whatever tries, ends */
  Tries tries;
  bool timed_out() const { return gave_up || late; }
  Group open;
  std::vector<Group> pending;
};

extern std::array<Warp, MAX_WARPS> warps;
extern std::vector<Mbarrier> mbarriers;
extern std::array<NamedBarrier, NAMED_BARRIERS> named_barriers;
extern std::vector<Box> boxes;
extern std::vector<Area> areas;
extern std::vector<Load> loads;
extern std::mt19937 rng;
extern Layout layout;
extern int current; /* the warp that runs */
extern bool time_outs;

inline Warp &self() { return warps[(size_t)current]; }

inline bool one_in(unsigned n) { return rng() % n == 0; }

void give_way();

/* A moment of its own on the warp's clock. */
inline void tick() { self().clock[(size_t)current]++; }

/* What came before `other` comes before what follows `clock`. */
void join(Clock &clock, const Clock &other);

bool has_come(const Warp &w); /* the phase that it waits for */
void finish_load(size_t index);

} // namespace sim

#endif
