/*
 * ptx.cuh - stands in for csrc/hopper/ptx.cuh: what matters to the schedule goes to the simulator, the rest (fences of
 * registers, prefetches, the launch of later kernels) does nothing. Packed elements are bfloat16, whatever the dtype.
 */
#ifndef DHP_PTX_CUH
#define DHP_PTX_CUH

enum : unsigned { FULL_MASK = 0xffffffffu };

static inline uint32_t shared_address(const void *) { return sim::SHARED_ADDRESS; }
static inline int warp_index() { return sim::warp_index(); }

static inline void mbarrier_init(uint32_t barrier, int arrivals) { sim::mbarrier_init(barrier, arrivals); }
static inline void mbarrier_arrive_expect_tx(int go, uint32_t barrier, uint32_t bytes) {
  if (go) sim::mbarrier_arrive(barrier, bytes);
}

using sim::require;
#include "phases.cuh"

static inline uint32_t mbarrier_test(uint32_t barrier, phase_state state) {
  return sim::mbarrier_test(barrier, parity_of(state));
}
static inline uint32_t mbarrier_wait(uint32_t barrier, phase_state state, uint32_t there, int tries) {
  sim::require(tries > 0, "a wait without a try");
  return sim::mbarrier_wait(barrier, parity_of(state), 0, there);
}
static inline uint32_t mbarrier_wait_long(uint32_t barrier, uint32_t phase, uint32_t) {
  return sim::mbarrier_wait(barrier, parity_of(phase), sim::SLEEP);
}
static inline uint32_t mbarrier_wait_longer(uint32_t barrier, uint32_t phase, uint32_t) {
  return sim::mbarrier_wait(barrier, parity_of(phase), 2 * sim::SLEEP);
}
static inline uint32_t mbarrier_wait_first(uint32_t barrier, uint32_t phase, uint32_t) {
  return sim::mbarrier_wait(barrier, parity_of(phase), sim::NAP);
}
static inline uint32_t mbarrier_wait_steady(uint32_t barrier, uint32_t phase, uint32_t) {
  return sim::mbarrier_wait_steady(barrier, parity_of(phase));
}

enum { NAP = sim::NAP, LONG_NAP = sim::LONG_NAP };
static inline uint32_t mbarrier_nap_and_try(uint32_t barrier, uint32_t phase, uint32_t, uint32_t before, uint32_t nap) {
  return sim::mbarrier_try(barrier, parity_of(phase), before, (int)nap);
}
static inline uint32_t mbarrier_try(uint32_t barrier, uint32_t phase, uint32_t zero, uint32_t before) {
  return mbarrier_nap_and_try(barrier, phase, zero, before, 0);
}

static inline void bar_sync(int go, int id, int threads) {
  if (go) sim::named_barrier(id, threads, true);
}
static inline void bar_arrive(int go, int id, int threads) {
  if (go) sim::named_barrier(id, threads, false);
}

static inline void await_launches_before() { sim::await_launches_before(); }

static inline void tma_load(int go, uint32_t destination, const CUtensorMap *map, uint32_t barrier, int d, int s, int h,
                            int b) {
  if (go) sim::load(destination, barrier, sim::Tile{map->tensor, d, s, h, b});
}
static inline void tma_load_2d(int go, uint32_t destination, const CUtensorMap *map, uint32_t barrier, int x, int y) {
  if (go) sim::load(destination, barrier, sim::Tile{map->tensor, x, y, 0, 0});
}

#include "common_ptx.cuh"

static inline void fence_async_shared() { sim::fence_async(); }
static inline void bulk_add(int go, void *to, uint32_t from, int bytes) {
  if (go) model::add(static_cast<int32_t *>(to), from, bytes);
}
static inline void bulk_commit() { sim::commit_sums(); }
static inline void bulk_wait_read() { sim::await_sums(); }

static inline float2 load_shared_two(uint32_t from) {
  model::read_shared(from);
  return {0.f, 0.f};
}
static inline void store_shared_four(uint32_t to, const int32_t *x) { model::store_shared(to, x); }
static inline void load_matrices(uint32_t *x, uint32_t from) { model::load_matrices(x, from); }
static inline void store_matrices_transposed(uint32_t to, const uint32_t *x) { model::store_matrices(to, x); }

/* Clears rows of v behind a sequence's last key. A warp is its first lane here, and that one clears none of them. */
static inline void clear_shared_four(int go, uint32_t) { sim::require(!go, "keys that count are cleared"); }
static inline void load_two_if(int go, float2 *x, const float *from) {
  if (go) model::load_floats(&x->x, from, 2);
}
static inline void load_four_if(int go, float *x, const float *from) {
  if (go) model::load_floats(x, from, 4);
}
static inline int load_word(const int32_t *from) { return *from; }
static inline float load_one_if(int go, const float *from, float otherwise) { return go ? *from : otherwise; }
static inline int load_word_if(int go, const int32_t *from) { return go ? *from : 0; }

static inline void or_into(void *to, uint32_t bits) { model::set_bits(to, bits); }
static inline void store_two(int go, float *to, float x, float y) {
  if (go) model::store_two(to, x, y);
}
static inline void store_one(int go, float *to, float x) {
  if (go) model::store_number(to, x);
}
static inline void store_four(int go, void *to, const uint32_t *x) {
  if (go) model::store_row(to, x);
}
static inline int any_lane(int x) { return x; } /* it is the same in all of them */
static inline void end_together() { __syncthreads(); }

static inline void wgmma_commit() { sim::commit_products(); }
static inline void wgmma_wait(int pending) { sim::await_products(pending); }

static inline uint32_t pack_two(float low, float high) { return sim::element_of(low) | sim::element_of(high) << 16; }

#endif
