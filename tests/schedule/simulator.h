/*
 * simulator.h - one CTA of a Hopper kernel on the host: each warp is a coroutine, and every instruction that matters to
 * the schedule (barriers, TMA, wgmma, stores) is a call of the simulator, which checks it and may go on with another
 * warp. simulator.cpp says what is checked of any family; a family's model (namespace model) says what its products
 * read and what it stores.
 */
#ifndef SCHEDULE_SIMULATOR_H
#define SCHEDULE_SIMULATOR_H

#include <stddef.h>
#include <stdint.h>

#include <vector>

namespace sim {

enum : uint32_t { SHARED_ADDRESS = 16 /* of shared memory, which CUDA aligns to 16 bytes */ };

enum { MAX_WARPS = 16, WARPS_PER_GROUP = 4 };

/* One TMA box: where in its tensor, a number that the model gives it, it begins. */
struct Tile {
  int tensor, column, row, head, batch;
};

inline bool operator==(const Tile &a, const Tile &b) {
  return a.tensor == b.tensor && a.column == b.column && a.row == b.row && a.head == b.head && a.batch == b.batch;
}

/* Boxes that lie one after another in shared memory. */
struct Boxes {
  uint32_t start;
  int count;
  uint32_t bytes;
  bool stay = false; /* loaded once, and read after later phases of their barrier, too */
};

/* What a model tells of its CTA. */
struct Layout {
  int warps = 0;
  uint32_t barriers = 0; /* shared address of the first mbarrier */
  int mbarriers = 0;
  int ring = 0;        /* of these first ones the same warps ask for each */
  int for_nothing = 0; /* at these first ones a warp may wait for a phase that it has seen, or one before the first */
  bool mbarriers_order = false; /* what came before the arrivals of a phase comes before what follows a wait for it */
  std::vector<Boxes> boxes;
  std::vector<uint32_t> areas; /* shared addresses that begin what one warp writes, for products or bulk sums to read */
};

/* ---- what main.cpp asks for ------------------------------------------------------------------------------------ */

/* How many warps stored their rows of a tile, and how many of those were NaN. */
struct Rows {
  long stored, poisoned;
};

/*
 * Runs one CTA through tiles with loops of these lengths under one random schedule. With time-outs, waits give up at
 * random. Exits with status 1 and a sentence at the first violation.
 */
Rows run(const std::vector<int> &lengths, unsigned seed, bool with_time_outs);

/* ---- what the stubs call --------------------------------------------------------------------------------------- */

int warp_index();
int warp_count();

void await_launches_before();
void mbarrier_init(uint32_t address, int arrivals);
void mbarrier_arrive(uint32_t address, uint32_t bytes);
enum { NAP = 1, LONG_NAP = 4, SLEEP = 4 }; /* how long these are, of which a wait may have several, in naps */
bool mbarrier_test(uint32_t address, uint32_t parity); /* a look, which changes nothing */
/* `sleeps` before it gives up: then it is at length. `came`: so a test has said. */
bool mbarrier_wait(uint32_t address, uint32_t parity, int sleeps, bool came = false);
bool mbarrier_wait_steady(uint32_t address, uint32_t parity); /* with a sleep, and no other wait after it */
/* One try of a wait that is spread out, perhaps after a sleep. */
bool mbarrier_try(uint32_t address, uint32_t parity, bool came_before, int sleeps);
void named_barrier(int id, int threads, bool wait);
void load(uint32_t destination, uint32_t barrier, const Tile &tile);
void commit_products();
void await_products(int pending);
void fence_async(); /* of the areas that the warp wrote */
void sync_warp();
void meet_lanes(); /* in a shuffle */
void commit_sums();
void await_sums();

/* ---- what a model calls, of the warp that runs ------------------------------------------------------------------ */

int random(int n);                          /* from 0 to n - 1 */
void require(bool holds, const char *what); /* or the run ends with this sentence */
bool has_timed_out();
bool launches_have_ended();
int meetings();                                /* of its lanes in shuffles, so far */
int products_under_way(int product);           /* of the warp that runs: committed, and not awaited */
int step_of(int product);                      /* one more step of the open group: how many there were before */
void read(uint32_t address, const Tile &tile); /* the open group reads the box there, which has to hold this tile */
void read_at_once(uint32_t address, const Tile &tile); /* the warp does */
void read_area(uint32_t start, int content);           /* the open group reads an area, which has to hold this */
void write_area(uint32_t start, int content, bool is_first, bool is_last); /* a store of several */
void add_area(uint32_t start, int content);                                /* a bulk sum out of it begins */
/* The open group's accumulator: NaN while it is under way; then these numbers, of the two rows that a lane has. */
void result(float *to, int count, float of_row, float of_next_row);

uint32_t element_of(float x);                /* as bfloat16, rounded towards 0 */
float number_of(uint32_t packed, int which); /* of two elements; NaN stays NaN */
bool is_nan(uint32_t packed);                /* both elements */
bool is_number(uint32_t packed);

inline uint32_t address_of(uint32_t descriptor) { return (descriptor & 0x3fff) << 4; }
inline uint32_t leading_bytes_of(uint32_t descriptor) { return (descriptor >> 16) << 4; }

} // namespace sim

/* A family's model: FAMILY/model.cpp. The stubs of its products and stores are its own. */
namespace model {

sim::Layout begin(const std::vector<int> &lengths); /* a new run */
void run_warp();                                    /* the kernel, as the warp that runs */
bool waits_for(int warp, int mbarrier);
bool waits_twice(int mbarrier);      /* at the start, and again later; the first time does not count */
void commit(int product, int steps); /* of the warp that runs */
void end_warp();                     /* the warp that runs has ended: is anything left? */
sim::Rows rows();
void store_row(const void *to, const uint32_t *four_words); /* 16 bytes of a row of an output */
void store_number(const float *to, float x);
/* A family that has no such instruction need not define its function. In shared memory: */
void read_shared(uint32_t from); /* 8 bytes */
void store_shared(uint32_t to, const int32_t *four_words);
void store_matrices(uint32_t to, const uint32_t *four_words); /* transposed */
void load_matrices(uint32_t *four_words, uint32_t from);
/* In global memory: */
void add(const int32_t *to, uint32_t from, int bytes); /* a bulk sum */
void set_bits(const void *to, uint32_t bits);
void load_floats(float *x, const float *from, int count);
void store_two(const float *to, float x, float y);

} // namespace model

#endif
