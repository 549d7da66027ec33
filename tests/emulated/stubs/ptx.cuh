/* ptx.cuh - stands in for csrc/hopper/ptx.cuh: each function does what its instruction does. */
#ifndef DHP_PTX_CUH
#define DHP_PTX_CUH

#include <cuda.h>

enum : unsigned { FULL_MASK = 0xffffffffu };

static inline uint32_t shared_address(const void *) { return emulated::SHARED_ADDRESS; }
static inline int warp_index() { return emulated::thread_index() / emulated::WARP; }

static inline void mbarrier_init(uint32_t barrier, int arrivals) {
  if (emulated::elect()) emulated::mbarrier_init(barrier, arrivals);
}
static inline void mbarrier_arrive_expect_tx(int go, uint32_t barrier, uint32_t bytes) {
  if (emulated::elect() && go) emulated::mbarrier_arrive(barrier, bytes);
}
static inline uint32_t mbarrier_wait(uint32_t barrier, uint32_t parity, uint32_t) {
  emulated::mbarrier_await(barrier, parity);
  return 1;
}
static inline uint32_t mbarrier_wait_long(uint32_t barrier, uint32_t parity, uint32_t zero) {
  return mbarrier_wait(barrier, parity, zero);
}
static inline uint32_t mbarrier_wait_begin(uint32_t, uint32_t, uint32_t) { return 0; }
static inline uint32_t mbarrier_wait_end(uint32_t barrier, uint32_t parity, uint32_t zero, uint32_t) {
  return mbarrier_wait(barrier, parity, zero);
}

static inline void bar_sync(int go, int id, int threads) {
  if (go) emulated::named_barrier(id, threads, true);
}
static inline void bar_arrive(int go, int id, int threads) {
  if (go) emulated::named_barrier(id, threads, false);
}

static inline void await_launches_before() {}

static inline void tma_load(int go, uint32_t destination, const CUtensorMap *map, uint32_t barrier, int d, int s, int h,
                            int b) {
  const int corner[] = {d, s, h, b};
  if (emulated::elect() && go) emulated::load_box(destination, barrier, *map, corner);
}

#include "common_ptx.cuh"

/* Four 8x8 matrices: lane 8 m + i has the address of row i of matrix m, lane l gets two columns of row l / 4 of each.
 */
static inline void load_matrices(uint32_t *x, uint32_t from) {
  const uint64_t *const rows = emulated::exchange(from);
  const int lane = emulated::thread_index() % emulated::WARP;
  for (int m = 0; m < 4; m++)
    memcpy(&x[m], emulated::shared((uint32_t)rows[8 * m + lane / 4], 16) + lane % 4 * 4, 4);
}

static inline void clear_shared_four(int go, uint32_t to) {
  if (go) memset(emulated::shared(to, 16), 0, 16);
}
static inline void fence_async_shared() {}

static inline void load_four(uint32_t *x, const void *from) { memcpy(x, from, 16); }
static inline int load_word(const int32_t *from) { return *from; }
static inline int load_word_if(int go, const int32_t *from) { return go ? *from : 0; }

static inline void store_word(int go, uint32_t *to, uint32_t x) {
  if (go) *to = x;
}
static inline void store_one(int go, float *to, float x) {
  if (go) *to = x;
}
static inline void store_four(int go, void *to, const uint32_t *x) {
  if (go) memcpy(to, x, 16);
}
static inline void end_together() {}

static inline void wgmma_commit() {}
static inline void wgmma_wait(int) {}

/* To bfloat16, to nearest even. */
static inline uint32_t element_of(float x) {
  const uint32_t bits = __float_as_uint(x);
  return isnan(x) ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
static inline uint32_t pack_two(float low, float high) { return element_of(low) | element_of(high) << 16; }

#endif
