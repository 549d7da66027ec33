/*
 * simulator.h - one CTA of the forward kernel on the host: each warp is a coroutine, and every instruction that matters
 * to the schedule (barriers, TMA, wgmma, stores) is a call of the simulator, which checks it and may go on with another
 * warp. simulator.cpp says what is checked.
 */
#ifndef SCHEDULE_SIMULATOR_H
#define SCHEDULE_SIMULATOR_H

#include <stdint.h>

#include <vector>

namespace sim {

enum : uint32_t {
  SHARED_ADDRESS = 16, /* of shared memory, which CUDA aligns to 16 bytes */
  NAN_ELEMENT = 0x7e00 /* float16 */
};

enum class Tensor { queries, keys, values };

/* One TMA box: where in its tensor it begins. */
struct Tile {
  Tensor tensor;
  int column, row, head, batch;
};

/* One query tile of the CTA, and how many key tiles it sees. */
struct Walk {
  int batch, head, key_head, row, tiles, masked;
};

/* ---- what kernel.cpp, compiled with the constants of one shape, tells ------------------------------------------ */

struct Shape {
  int head_dim, tile_k, warpgroups, rows, stages; /* rows: query rows of a warpgroup */
  int box_columns, row_bytes;
  uint32_t q_box_bytes, kv_box_bytes;
  uint32_t q, k, v, barriers; /* shared addresses */
};
extern const Shape shape;

enum { HEADS = 64, SEQLEN_Q = 1 << 12, SEQLEN_K = 1 << 20 }; /* of the tensors that the simulated CTA works on */
float *const LSE = reinterpret_cast<float *>(4096);          /* an address only: nothing is stored */

void run_warp(); /* the kernel, as the warp that runs */

/* ---- what main.cpp asks for ------------------------------------------------------------------------------------ */

/* How many warps stored their rows of a walk, and how many of those were NaN. */
struct Rows {
  long stored, poisoned;
};

/*
 * Runs one CTA through walks of these lengths under one random schedule. With time-outs, waits give up at random. Exits
 * with status 1 and a sentence at the first violation.
 */
Rows run(const std::vector<int> &tiles, unsigned seed, bool with_time_outs);

/* ---- what the stubs call --------------------------------------------------------------------------------------- */

int warp_index();
int warp_count();
Walk walk_of(int round); /* no tiles after the last walk */

void await_launches_before();
void mbarrier_init(uint32_t address, int arrivals);
void mbarrier_arrive(uint32_t address, uint32_t bytes);
bool mbarrier_wait(uint32_t address, uint32_t parity, bool at_start);
void named_barrier(int id, int threads, bool wait);
void load(uint32_t destination, uint32_t barrier, const Tile &tile);
void multiply_scores(uint32_t q_descriptor, uint32_t k_descriptor, int accumulate);
void multiply_output(uint32_t v_descriptor, int accumulate);
void commit_products();
void await_products(int pending);
void store_out(const uint32_t *four_words);
void store_lse(const float *to, float x);

} // namespace sim

#endif
