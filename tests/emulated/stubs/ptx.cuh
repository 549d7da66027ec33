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
static inline void mbarrier_init_by(int go, uint32_t barrier, int arrivals) {
  if (emulated::elect() && go) emulated::mbarrier_init(barrier, arrivals);
}
static inline void mbarrier_arrive_expect_tx(int go, uint32_t barrier, uint32_t bytes) {
  if (emulated::elect() && go) emulated::mbarrier_arrive(barrier, bytes);
}

using emulated::require;
#include "phases.cuh"

static inline uint32_t mbarrier_test(uint32_t barrier, phase_state state) {
  return emulated::mbarrier_test(barrier, parity_of(state));
}
static inline uint32_t mbarrier_wait(uint32_t barrier, phase_state state, uint32_t there, int tries) {
  emulated::require(tries > 0, "a wait without a try");
  emulated::require(!there || emulated::has_come(barrier, parity_of(state)), "a look was at another phase");
  return there ? there : (uint32_t)emulated::mbarrier_await(barrier, parity_of(state));
}
static inline uint32_t mbarrier_wait_long(uint32_t barrier, uint32_t phase, uint32_t) {
  return emulated::mbarrier_await(barrier, parity_of(phase));
}
static inline uint32_t mbarrier_wait_longer(uint32_t barrier, uint32_t phase, uint32_t) {
  return emulated::mbarrier_await(barrier, parity_of(phase));
}
static inline uint32_t mbarrier_wait_first(uint32_t barrier, uint32_t phase, uint32_t) {
  return emulated::mbarrier_await(barrier, parity_of(phase));
}
static inline uint32_t mbarrier_wait_steady(uint32_t barrier, uint32_t phase, uint32_t) {
  return emulated::mbarrier_await(barrier, parity_of(phase));
}
/* Once one has said that the phase has come, so do the others. */
static inline uint32_t mbarrier_try(uint32_t barrier, uint32_t phase, uint32_t, uint32_t before) {
  return before ? before : (uint32_t)emulated::mbarrier_await(barrier, parity_of(phase));
}
enum { NAP = 1, LONG_NAP = 1 };
static inline uint32_t mbarrier_nap_and_try(uint32_t barrier, uint32_t phase, uint32_t zero, uint32_t before,
                                            uint32_t) {
  return mbarrier_try(barrier, phase, zero, before);
}

static inline void bar_sync(int go, int id, int threads) {
  if (go) emulated::named_barrier(id, threads, true);
}
static inline void barrier_sync(int go, int id, int threads) { bar_sync(go, id, threads); }
static inline void bar_arrive(int go, int id, int threads) {
  if (go) emulated::named_barrier(id, threads, false);
}

static inline void cluster_arrive() { emulated::cluster_arrive(); }
static inline void cluster_wait() { emulated::cluster_wait(); }
static inline uint32_t address_in_cta(uint32_t address, int rank) { return emulated::address_in_cta(address, rank); }
static inline void store_async_one(uint32_t to, uint32_t barrier, float x) {
  const uint32_t word = __float_as_uint(x);
  emulated::store_async(to, barrier, sizeof word, &word);
}
static inline void copy_async(uint32_t to, uint32_t from, int bytes, uint32_t barrier) {
  if (emulated::elect()) emulated::copy_async(to, from, bytes, barrier);
}

static inline void await_launches_before() {}

static inline void tma_load(int go, uint32_t destination, const CUtensorMap *map, uint32_t barrier, int d, int s, int h,
                            int b) {
  const int corner[] = {d, s, h, b};
  if (emulated::elect() && go) emulated::load_box(destination, barrier, *map, corner);
}

static inline void tma_load_2d(int go, uint32_t destination, const CUtensorMap *map, uint32_t barrier, int x, int y) {
  tma_load(go, destination, map, barrier, x, y, 0, 0);
}

#include "common_ptx.cuh"

static inline void load_matrices(uint32_t *x, uint32_t from) { emulated::load_matrices(x, 4, from, false); }
static inline void load_matrices_transposed(uint32_t *x, uint32_t from) { emulated::load_matrices(x, 4, from, true); }
static inline void load_two_matrices_transposed(uint32_t *x, uint32_t from) {
  emulated::load_matrices(x, 2, from, true);
}
static inline void multiply_eight_rows(float *d, const uint32_t *a, const uint32_t *b) {
  emulated::multiply_eight_rows(d, a, b);
}

static inline float load_shared_one(uint32_t from) {
  float x;
  memcpy(&x, emulated::shared(from, sizeof x), sizeof x);
  return x;
}
static inline float2 load_shared_two(uint32_t from) {
  float2 x;
  memcpy(&x, emulated::shared(from, sizeof x), sizeof x);
  return x;
}

static inline void clear_shared_four(int go, uint32_t to) {
  if (go) memset(emulated::shared(to, 16), 0, 16);
}
static inline void store_shared_two(uint32_t to, uint32_t x, uint32_t y) {
  const uint32_t words[] = {x, y};
  emulated::store_shared(to, sizeof words, words);
}
static inline void store_shared_four(uint32_t to, const int32_t *x) {
  uint32_t words[4];
  memcpy(words, x, sizeof words);
  emulated::store_shared(to, sizeof words, words);
}
static inline void store_matrices_transposed(uint32_t to, const uint32_t *x) {
  emulated::store_matrices_transposed(to, x);
}
static inline void fence_async_shared() { emulated::fence_async(); }
static inline void bulk_add(int go, void *to, uint32_t from, int bytes) {
  if (emulated::elect() && go) emulated::add_later(static_cast<int32_t *>(to), from, bytes);
}
static inline void bulk_commit() {}
static inline void bulk_wait_read() { emulated::await_additions(); }

static inline void load_two_if(int go, float2 *x, const float *from) {
  if (go) memcpy(x, from, 8);
}
static inline void load_four_if(int go, float *x, const float *from) {
  if (go) memcpy(x, from, 16);
}
static inline int load_word(const int32_t *from) { return *from; }
static inline float load_one_if(int go, const float *from, float otherwise) { return go ? *from : otherwise; }
static inline int load_word_if(int go, const int32_t *from) { return go ? *from : 0; }

static inline void store_word(int go, uint32_t *to, uint32_t x) {
  if (go) *to = x;
}
static inline void store_two(int go, float *to, float x, float y) {
  if (go) {
    memcpy(to, &x, 4); /* of bits: y may be packed numbers */
    memcpy(to + 1, &y, 4);
  }
}
static inline void store_one(int go, float *to, float x) {
  if (go) *to = x;
}
static inline void store_byte(int go, uint8_t *to, uint32_t x) {
  if (go) *to = (uint8_t)x;
}
static inline void or_into(void *to, uint32_t bits) { *static_cast<uint32_t *>(to) |= bits; }
static inline void store_four(int go, void *to, const uint32_t *x) {
  if (go) memcpy(to, x, 16);
}
static inline int any_lane(int x) { return x; } /* it is the same in all of them */
static inline void end_together() {}

static inline void wgmma_commit() {}
static inline void wgmma_wait(int) {}

/* To bfloat16, to nearest even. */
static inline uint32_t element_of(float x) {
  const uint32_t bits = __float_as_uint(x);
  return isnan(x) ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
static inline uint32_t pack_two(float low, float high) { return element_of(low) | element_of(high) << 16; }
static inline void unpack_two(float *low, float *high, uint32_t pair) {
  *low = __uint_as_float(pair << 16);
  *high = __uint_as_float(pair & 0xffff0000u);
}

static inline float max_or_nan(float a, float b) { return isnan(a) || isnan(b) ? NAN : fmaxf(a, b); }
static inline uint32_t larger_halves(uint32_t a, uint32_t b) {
  const uint32_t low = 0xffff;
  return ((a & low) > (b & low) ? a & low : b & low) | ((a & ~low) > (b & ~low) ? a & ~low : b & ~low);
}
/* ct.h has it for the device alone. */
static inline float dhp_ct_log2(float x) { return log2f(x < 0x1p-126f && x >= 0 ? 0 : x); }

#endif
